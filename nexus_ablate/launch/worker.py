"""A process that imports torch once and trains one run after another."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

from nexus_ablate import errors
from nexus_ablate.config.plugins import VARIABLE as PLUGINS
from nexus_ablate.errors import AGAIN, ConfigError
from nexus_ablate.launch.jobs import Job, JobResult
from nexus_ablate.masking import masked_output
from nexus_ablate.provenance import source_hash
from nexus_ablate.runs.lookup import id_of
from nexus_ablate.study.arm_overrides import merged
from nexus_ablate.training.session import other_arithmetic


@dataclass(frozen=True)
class Task:
    """A job on its way to the process that trains it, with what that process must have in common with this one.

    Attributes:
        overrides, folder, path: Of the job.
        conditions: Saved in env.json: the arm, who runs the job, and what else runs on the machine.
        source: `provenance.source_hash` of the process that made the job.
        plugins: The plugins' directories there.
    """

    overrides: list[str]
    folder: str
    path: Path
    conditions: dict[str, Any]
    source: str
    plugins: str

    @classmethod
    def of(cls, job: Job, conditions: dict[str, Any], settings: tuple[str, ...] = ()) -> Task:
        """The task of a job; `settings` are further overrides, for how it is carried out."""
        from nexus_ablate.config.compose import compose

        overrides = merged(job.overrides, [*settings])
        if job.lacks_evaluations and not job.config.rerun and other_arithmetic(compose(overrides), job.path):
            overrides = merged(overrides, ["train.device=auto", "train.compile=auto"])  # it would be trained again
        plugins = os.environ.get(PLUGINS, "")
        return cls(
            overrides, job.folder, job.path, {"arm": job.arm, "plan": job.plan} | conditions, source_hash(), plugins
        )

    def train(self, warned: Callable[[str], None] | None = None) -> JobResult:
        """Train the run in this process.

        Args:
            warned: Takes each warning, and nothing is printed. Default: messages and progress are printed.

        Raises:
            UserError: The run ended with a status other than 0.
        """
        from nexus_ablate.config.compose import compose
        from nexus_ablate.data import fingerprint_of
        from nexus_ablate.training.session import identity_of, train

        for variable in ("WANDB_SWEEP_ID", "WANDB_RUN_ID"):  # of an agent that started the study: its run is not ours
            os.environ.pop(variable, None)
        if self.plugins:
            os.environ[PLUGINS] = self.plugins
        if self.source != source_hash():
            got = f"source {self.source[:8]} when it was submitted, {source_hash()[:8]} when it started"
            raise ConfigError(f"the code changed while the run was queued: {got}", source_hash(), AGAIN)
        config = compose(self.overrides)
        identity = identity_of(config, fingerprint_of(config.data, config.model.context))
        if identity.hash8 != id_of(self.path):
            got = f"{id_of(self.path)} then, {identity.hash8} now"
            raise ConfigError("the run's options, data or plugin changed while it was queued", got, AGAIN)
        outcome = train(
            config,
            self.overrides,
            quiet=warned is not None,
            brief=True,
            arm=self.folder,
            run_conditions=self.conditions,
            warned=warned,
        )
        return JobResult(outcome.status, path=outcome.path)


def result_of(error: BaseException) -> JobResult:
    """The result of a job that raised an error, which is printed: a bug in one run must not stop the others."""
    if isinstance(error, errors.UserError):
        print(error, file=sys.stderr)
        return JobResult(error.status, error.problem)
    traceback.print_exception(error)  # it is also in the run's status.json
    return JobResult(errors.BUG, errors.described(error))


def work(pipe: connection.Connection, threads: int | None, gpu: str | None, log: Path | None) -> None:
    """Train the tasks that come through the pipe, until the driver closes it or dies.

    torch is imported with the first task, after this process's threads and GPU are set.

    Args:
        threads: Number of CPU threads; None: each run decides.
        gpu: The only GPU that it sees, as CUDA_VISIBLE_DEVICES names it; None: all that the driver sees.
        log: The file for its output; None: the driver's output, with the progress of each run.
    """
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach the whole process group; the driver handles them
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_stop_with_driver, daemon=True).start()
    if threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[variable] = str(threads)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu

    from nexus_ablate.training.device import share_cores_politely

    share_cores_politely()
    with masked_output(log):
        while True:
            try:
                task: Task = pipe.recv()
            except EOFError:
                return
            warnings: list[str] = []
            try:
                result = task.train(None if log is None else warnings.append)
            except BaseException as error:
                result = result_of(error)
            gc.collect()
            reset_peak_memory()
            pipe.send(replace(result, warnings=tuple(warnings)))


def reset_peak_memory() -> bool:
    """Reset this process's peak memory counters, so that the next run gets its own. Returns whether that worked."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: 5 resets the peak resident size, see proc(5)
    except OSError:
        return False
    return True


def _stop_with_driver() -> None:
    """Save and stop when the driver dies: a killed driver cannot stop its workers."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
