"""The jobs of a study on this machine: worker processes that keep torch imported between runs."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import connection, get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

from nexus_ablate import errors
from nexus_ablate.console import several
from nexus_ablate.errors import AlreadyRunning
from nexus_ablate.gpus import gpu_of_worker, visible_gpus
from nexus_ablate.launch.job_progress import JobProgress
from nexus_ablate.launch.jobs import Job, JobResult
from nexus_ablate.launch.worker import Task, reset_peak_memory, work
from nexus_ablate.masking import mask
from nexus_ablate.runs import append_log, atomic_write_json, has_status, make_directory, read_status
from nexus_ablate.runs.files import storage
from nexus_ablate.runs.ownership import LIVE, now, release, take_lock
from nexus_ablate.training.device import IdleCores, bound_of_threads
from nexus_ablate.training.signals import StopRequest

POLL_SECONDS = 0.25
GRACE_SECONDS = 60.0
"""Time that a run has to save and stop after its limit; then its process is killed."""
TIME_OVER = "its time limit was reached"
_STARTING = Lock()


@dataclass(frozen=True)
class Places:
    """How this machine is shared: workers, the CPU threads of each, and the GPUs, which workers take in turn."""

    workers: int
    threads: int
    gpus: list[str]

    def __str__(self) -> str:
        text = f"{several(self.workers, 'worker')} of {several(self.threads, 'CPU thread')}"
        return text + (f" on {several(len(self.gpus), 'GPU')}" if self.gpus else "")

    def gpu(self, worker: int) -> str | None:
        return gpu_of_worker(worker) if self.gpus else None

    @property
    def run_conditions(self) -> dict[str, int]:
        """For env.json: runs that share a device are slower than one alone."""
        return {"workers": self.workers, "runs_per_device": -(-self.workers // max(1, len(self.gpus)))}


def places_for(jobs: list[Job], requested: int | str) -> Places:
    """How to share this machine among jobs.

    Args:
        requested: Number of workers; `auto`: one per GPU, or without GPUs one per CPU core.
    """
    train = jobs[0].config.train
    gpus = visible_gpus() if train.device in ("auto", "cuda") else []
    cores = IdleCores.cores()
    if requested != "auto":
        workers = int(requested)
    elif gpus or train.device not in ("auto", "cpu"):
        workers = len(gpus)
    else:
        workers = cores
    workers = max(1, min(workers, len(jobs)))
    share = min(max(1, cores // workers), bound_of_threads() or cores)
    threads = share if train.threads == "auto" else int(train.threads)
    return Places(workers, threads, gpus)


@contextlib.contextmanager
def _without_the_script() -> Iterator[None]:
    """Inside the `with`, a new process does not run the script that this one runs, which would train its runs again."""
    script = vars(sys.modules["__main__"])
    with _STARTING:
        kept = {name: script[name] for name in ("__file__", "__spec__") if name in script}
        script.pop("__file__", None)  # these two are how a spawned process finds it
        script["__spec__"] = None
        try:
            yield
        finally:
            script |= kept


class Worker:
    """A worker process. It starts with its first job, and again after a job took it down. Arguments: as `work`."""

    def __init__(self, threads: int | None = None, gpu: str | None = None, log: Path | None = None) -> None:
        self.threads, self.gpu, self.log = threads, gpu, log
        self._process: SpawnProcess | None = None
        self._pipe: connection.Connection

    def _started(self) -> SpawnProcess:
        """The process, started if it is not alive."""
        if self._process is not None and self._process.is_alive():
            return self._process
        if self.log is not None:
            with storage(self.log):  # opened here: an error in the worker itself would have nowhere to go
                self.log.touch()
        context = get_context("spawn")
        self._pipe, end = context.Pipe()
        arguments = (end, self.threads, self.gpu, self.log)
        process = context.Process(target=work, args=arguments, name="worker")
        with _without_the_script():
            process.start()
        end.close()
        self._process = process
        return process

    def close(self) -> None:
        """Let the process end after its current job, and wait for it."""
        if self._process is not None:
            self._pipe.close()
            self._process.join()
            self._process = None

    def train(self, task: Task, must_stop: Callable[[], bool], limit: float = math.inf) -> JobResult:
        """Train a run and wait for it. If it takes the process down, the run is marked failed.

        Args:
            must_stop: Asked a few times per second; from the first True on, the run saves and stops.
            limit: Seconds until the run saves and stops. A run that doesn't is killed GRACE_SECONDS later.
        """
        process = self._started()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a dead worker's sentinel says so below
            self._pipe.send(task)
        began, is_late, is_stopping = time.monotonic(), False, False
        while not connection.wait([self._pipe, process.sentinel], POLL_SECONDS):
            overtime = time.monotonic() - began - limit
            if not is_stopping and (overtime > 0 or must_stop()):
                is_late, is_stopping = overtime > 0, True
                process.terminate()
            elif is_late and overtime > GRACE_SECONDS:
                process.kill()
        result = None
        with contextlib.suppress(EOFError, ConnectionResetError):
            result = self._pipe.recv() if self._pipe.poll() else None
        if result is None:
            process.join()
            result = self._died(process.exitcode or 0, task.path, is_late, is_stopping)
        elif is_late and result.status == errors.PREEMPTED:
            result = replace(result, reason=f"{TIME_OVER}; {result.reason}")
        if is_stopping or not reset_peak_memory():
            self.close()  # its SIGTERM must not hit the next run, and each run needs a peak of its own
        return result

    def _died(self, code: int, path: Path, is_late: bool, is_stopping: bool) -> JobResult:
        """The result of a run whose process ended without one, with the exit code `code`."""
        if is_stopping and code == -signal.SIGTERM:
            return JobResult(errors.PREEMPTED, f"{TIME_OVER if is_late else 'stopped'} before or after its training")
        if code >= 0:
            reason = f"its process ended with exit status {code}"
        else:
            hint = ", possibly out of memory" if code == -signal.SIGKILL and not is_late else ""
            reason = f"its process was ended by {signal.Signals(-code).name}{hint}"
        if is_late:
            reason = f"{TIME_OVER}, and it did not stop: {reason}"
        if self.log is not None:
            reason = f"{reason}; its output is in {self.log}"
        mark_failed(path, reason)
        return JobResult(errors.BUG, reason)


@dataclass
class LocalPool:
    """Worker processes on this machine.

    Attributes:
        workers: Number of concurrent runs; `auto`: one per GPU, or one per CPU core.
        limit: Seconds per run in this launch. A run that takes longer is saved; the same command resumes it.
    """

    workers: int | str = "auto"
    limit: float = math.inf

    def run(self, jobs: list[Job], progress: JobProgress) -> str:
        """Run every job.

        Returns:
            The stop signal, or ''. After a stop signal every running job was saved, with the status 75.
        """
        places = places_for(jobs, self.workers)
        progress.queued(len(jobs), str(places))
        logs = progress.folder / ".workers"
        make_directory(logs, logs.parents[1])
        idle: SimpleQueue[Worker] = SimpleQueue()
        settings = (f"train.threads={places.threads}",)
        is_over = False

        def train(job: Job) -> JobResult | None:
            """Train a job by an idle worker; None if a signal came before it began."""
            worker = idle.get()
            try:
                if is_over or stop.signal_name:
                    return None
                task = Task.of(job, places.run_conditions, settings)
                return worker.train(task, lambda: is_over or bool(stop.signal_name), self.limit)
            finally:
                idle.put(worker)

        with StopRequest() as stop:
            with contextlib.ExitStack() as closing:
                for number in range(places.workers):
                    worker = Worker(places.threads, places.gpu(number), logs / f"worker{number}.log")
                    closing.callback(worker.close)  # after an error too: at exit, Python would wait for it forever
                    idle.put(worker)
                with ThreadPoolExecutor(places.workers) as threads:
                    try:
                        trained = {threads.submit(train, job): job for job in jobs}
                        for future in as_completed(trained):
                            result = future.result()
                            if result is not None:
                                progress.ended(trained[future], result)
                    finally:
                        is_over = True
            stop.obeyed = bool(stop.signal_name)  # of one that came while the workers closed too
            return stop.signal_name


def mark_failed(path: Path, reason: str) -> None:
    """Set the status of a run whose process is gone to failed; does nothing if the run never started."""
    if not has_status(path):
        return
    try:
        lock = take_lock(path)
    except AlreadyRunning:  # another process has taken the run over, and will set its status
        return
    try:
        status = read_status(path)
        if status["state"] in LIVE:
            reason = mask(reason)
            atomic_write_json(path / "status.json", status | {"state": "failed", "reason": reason, "updated": now()})
            append_log(path, f"failed: {reason}")
    finally:
        release(lock)
