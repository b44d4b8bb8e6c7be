"""The queue: gives jobs to worker processes on this machine until all have run or a stop signal arrives.

A job that takes its process down is marked failed with the reason, and a new worker replaces the old one.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import connection, get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path

from nexus_ablate import errors
from nexus_ablate.errors import AlreadyRunning
from nexus_ablate.execution.worker import STOPPING, Answer, Order, work
from nexus_ablate.masking import mask
from nexus_ablate.planning.jobs import Job
from nexus_ablate.planning.places import Places
from nexus_ablate.provenance import source_hash
from nexus_ablate.runs import append_log, atomic_write_json, has_status, make_directory, open_regular, read_status
from nexus_ablate.runs.files import storage
from nexus_ablate.runs.ownership import now, release, take_lock
from nexus_ablate.training.signals import StopRequest

POLL_SECONDS = 0.25
GRACE_SECONDS = 60.0
"""Time that a run has to save and stop after its limit; then its process is killed."""
TIME_OVER = "its time limit was reached"


class Worker:
    """A worker process and its current job. The arguments are those of `work`."""

    def __init__(self, threads: int | None, leases: bool, log: Path | None) -> None:
        context = get_context("spawn")
        self.log = log
        self.pipe, end = context.Pipe()
        self.job: Job | None = None
        self.began = 0.0
        self.late = False
        self.process: SpawnProcess = context.Process(target=work, args=(end, threads, leases, log), name="worker")
        self.process.start()
        end.close()

    @classmethod
    def of_study(cls, number: int, where: Places, log_dir: Path) -> Worker:
        log = log_dir / f"worker{number}.log"
        with storage(log):  # opened here, because an error in the worker itself would have nowhere to go
            os.close(open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        return cls(where.threads, bool(where.gpus), log)

    def give(self, job: Job, where: Places) -> None:
        threads = f"train.threads={where.threads}"
        overrides = [*(text for text in job.overrides if not text.startswith("train.threads=")), threads]
        self.job, self.began, self.late = job, time.monotonic(), False
        self.send(Order(overrides, job.arm, where.run_conditions, source=source_hash()))

    def send(self, order: Order) -> None:
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the worker is dead; the queue sees its sentinel next
            self.pipe.send(order)

    def keep_time(self, limit: float) -> None:
        """Stop a run after `limit` seconds; kill its process if it doesn't stop."""
        over = time.monotonic() - self.began - limit
        if over > 0 and not self.late:
            self.late = True
            self.process.terminate()
        elif over > GRACE_SECONDS:
            self.process.kill()

    def receive(self) -> Answer | None:
        """The worker's answer; None if it died without one."""
        try:
            answer: Answer | None = self.pipe.recv() if self.pipe.poll() else None
        except (EOFError, ConnectionResetError):
            return None
        if answer is not None and answer.leaves:
            self.process.join()  # otherwise it could get another job while it ends
        return answer

    def end(self) -> str:
        """How the process ended, as text."""
        self.process.join()
        code = self.process.exitcode or 0
        if code >= 0:
            return f"its process ended with exit status {code}"
        hint = ", possibly out of memory" if code == -signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-code).name}{hint}"


def run_queue(
    jobs: list[Job],
    where: Places,
    log_dir: Path,
    began: Callable[[Job], None],
    ended: Callable[[Job, Answer], None],
    tick: Callable[[], None],
    limit: float = math.inf,
) -> str:
    """Run every job.

    Args:
        jobs: In order. A job that another process is training is tried once more after all others.
        where: From `places`.
        log_dir: For the workers' output.
        began, ended: Called for each job.
        tick: Called a few times per second.
        limit: Seconds per job. A job that takes longer is saved and stopped; the same command resumes it.

    Returns:
        The stop signal, or ''. After a stop signal every running job was saved and answered 75.
    """
    make_directory(log_dir, log_dir.parents[1])
    waiting, elsewhere, last_round = deque(jobs), deque[Job](), False
    workers = [Worker.of_study(number, where, log_dir) for number in range(min(where.workers, len(jobs)))]
    with StopRequest() as stop:
        has_forwarded_stop = False
        try:
            while True:
                if stop.signal_name:
                    waiting.clear()
                    elsewhere.clear()
                    if not has_forwarded_stop:
                        has_forwarded_stop = True
                        for worker in workers:
                            worker.process.terminate()
                busy = [worker for worker in workers if worker.job]
                if not waiting and not busy:
                    if not elsewhere:
                        stop.obeyed = bool(stop.signal_name)
                        return stop.signal_name
                    waiting, elsewhere, last_round = elsewhere, waiting, True
                _give_jobs(waiting, workers, where, log_dir, began)
                for worker in busy:
                    worker.keep_time(limit)
                for worker in _reported(workers):
                    job, answer = _answer(worker, bool(stop.signal_name))
                    if answer.status == errors.ALIVE and not last_round:
                        elsewhere.append(job)
                    else:
                        ended(job, answer)
                tick()
        finally:
            _end(workers)


def _give_jobs(
    waiting: deque[Job], workers: list[Worker], where: Places, log_dir: Path, began: Callable[[Job], None]
) -> None:
    """Give a job to each idle worker, and replace those that have died."""
    for number, worker in enumerate(workers):
        if not waiting or worker.job:
            continue
        if not worker.process.is_alive():
            worker = workers[number] = Worker.of_study(number, where, log_dir)
        began(waiting[0])
        worker.give(waiting.popleft(), where)


def _end(workers: list[Worker]) -> None:
    """Stop every worker and wait for its process."""
    for worker in workers:
        worker.pipe.close()  # an idle worker leaves
        if worker.job:
            worker.process.terminate()
    for worker in workers:
        worker.process.join()


def _reported(workers: list[Worker]) -> list[Worker]:
    """The workers that have answered or died; waits up to POLL_SECONDS for one."""
    busy = {handle: worker for worker in workers if worker.job for handle in (worker.pipe, worker.process.sentinel)}
    ready = connection.wait(list(busy), POLL_SECONDS)
    return list({id(busy[handle]): busy[handle] for handle in ready}.values())  # type: ignore[index]


def _answer(worker: Worker, stopping: bool) -> tuple[Job, Answer]:
    """A worker's job and its answer, made up here if the worker died."""
    job, worker.job = worker.job, None
    assert job is not None
    if (answer := worker.receive()) is not None:
        if not worker.late:
            return job, answer
        worker.pipe.close()  # SIGTERM may still arrive, and must not hit another job
        worker.process.join()
        return job, replace(answer, reason=f"{TIME_OVER}; {answer.reason}" if answer.reason else "")
    reason = worker.end()
    if (stopping or worker.late) and worker.process.exitcode == -STOPPING:
        return job, Answer(errors.PREEMPTED, f"{TIME_OVER if worker.late else 'stopped'} before its first step")
    reason = f"{TIME_OVER}, and it did not stop: {reason}" if worker.late else reason
    reason = f"{reason}; its output is in {worker.log}"
    mark_failed(job.path, reason)
    return job, Answer(errors.BUG, reason)


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
        if status["state"] in ("created", "running"):
            reason = mask(reason)
            atomic_write_json(path / "status.json", status | {"state": "failed", "reason": reason, "updated": now()})
            append_log(path, f"failed: {reason}")
    finally:
        release(lock)
