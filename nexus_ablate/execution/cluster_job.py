"""A run inside a cluster job. The run outlives the job, and trains only with the code that it was submitted with.

submitit starts the job and requeues it on the signal that announces preemption or the time limit (USR2). While a run
trains, the run handles that signal first: it saves its current step and releases its directory. Then submitit requeues
the job. So no progress is lost, and only submitit requeues.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from nexus_ablate import errors
from nexus_ablate.config.plugins import VARIABLE as PLUGINS
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import AGAIN, AlreadyRunning, ConfigError, Preempted, UserError
from nexus_ablate.execution.worker import Answer, Order
from nexus_ablate.masking import masked_streams
from nexus_ablate.provenance import refuse_other_source
from nexus_ablate.runs import atomic_write_json
from nexus_ablate.runs.ownership import LOST_SECONDS, now

REQUEUES = 100
"""A run that was requeued this often makes no progress. submitit itself only counts time-outs."""
SOURCE = "NEXUS_ABLATE_SOURCE"
"""The environment variable with the hash of the code that the jobs of a multirun were submitted with."""


def in_job() -> bool:
    """Whether submitit started this process, in SLURM or on this machine."""
    return bool(os.environ.get("SUBMITIT_EXECUTOR"))


def job_id() -> str:
    """The job number as SLURM shows it: `12`, or `12_3` in an array; '' outside SLURM."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID", "")


def job_facts() -> dict[str, Any]:
    """For env.json: the job, its node and how often it was requeued."""
    return {
        "slurm_job": job_id() or None,
        "slurm_node": os.environ.get("SLURMD_NODENAME"),
        "slurm_restarts": restarts(),
    }


def restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def refuse_another_run(config: RunConfig, hash8: str) -> None:
    """Refuse to train if options, data or a plugin changed while the run was queued: its identity would be another.

    Raises:
        ConfigError: The run is not the one that was submitted.
    """
    from nexus_ablate.data import fingerprint_of
    from nexus_ablate.training.session import identity_of

    hash8_now = identity_of(config, fingerprint_of(config.data, config.model.context)).hash8
    if hash8_now != hash8:
        got = f"{hash8} when it was submitted, {hash8_now} when it started"
        problem = f"the run's options, data or plugin changed while it was queued: {got}"
        raise ConfigError(problem, hash8_now, AGAIN)


@contextmanager
def stops_outside_of_training() -> Iterator[None]:
    """End a run at once, as preempted, on a signal before its first or after its last step: there is nothing to save.

    During training, the handlers of training/signals.py are active. submitit's handlers are restored at the end.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        raise Preempted(f"stopped by {name} before or after training", name, AGAIN)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, announcement())}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def announcement() -> signal.Signals:
    """The signal that SLURM sends, on submitit's request, before preemption or the time limit."""
    from submitit.core.job_environment import JobEnvironment

    return JobEnvironment._usr_sig()


@masked_streams()
def train_in_job(order: Order, hash8: str = "") -> Answer:
    """Train in this process. If the cluster preempts the job, it is requeued and this function never returns.

    Args:
        order: The run.
        hash8: Of the run's directory at submission; '' if unknown.
    """
    from nexus_ablate.config.compose import compose
    from nexus_ablate.training.session import train

    try:
        refuse_other_source(order.source)
        config = compose(order.overrides)
        if hash8:
            refuse_another_run(config, hash8)
        facts = order.run_conditions | job_facts()
        with stops_outside_of_training():
            try:
                outcome = train(config, order.overrides, brief=True, arm=order.arm, run_conditions=facts)
            except AlreadyRunning:
                if not restarts():
                    raise
                time.sleep(LOST_SECONDS + 10)  # the node failed, and this job's last heartbeat is still recent
                outcome = train(config, order.overrides, brief=True, arm=order.arm, run_conditions=facts)
        return Answer(outcome.status, path=outcome.path)
    except UserError as error:
        print(error, file=sys.stderr)
        why = put_back() if error.status == errors.PREEMPTED else ""
        return Answer(error.status, f"{error.problem}; {why}" if why else error.problem)
    except Exception as error:  # its traceback is in its status.json and in the job's log
        traceback.print_exc()
        return Answer(errors.BUG, errors.described(error))


def put_back() -> str:
    """Let submitit requeue this job, which ends the process.

    Returns:
        Why the job was not requeued.
    """
    from submitit.core.utils import UncompletedJobError

    number = announcement()
    if not callable(signal.getsignal(number)):  # without submitit's handler the signal would only end this process
        return "not requeued, because submitit did not start this process"
    state = _state()
    if state != "RUNNING":
        return f"not requeued, because SLURM reports its job as {state.lower()}"
    if restarts() >= REQUEUES:
        return f"not requeued, because it was requeued {REQUEUES} times already; run the same command to resume"
    try:
        signal.raise_signal(number)
    except UncompletedJobError as error:
        return str(error)
    return "not requeued: submitit gave no reason"


def _state() -> str:
    """SLURM's state of this job; a cancelled job must not be requeued."""
    if os.environ["SUBMITIT_EXECUTOR"] != "slurm":
        return "RUNNING"
    command = ["scontrol", "--oneliner", "show", "job", os.environ["SLURM_JOB_ID"]]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    state = re.search(r"\bJobState=(\w+)", answer.stdout)
    return state[1] if state else f"unknown to scontrol ({answer.stderr.strip()})"


@dataclass(frozen=True)
class Task:
    """The work of one job of a submitted study. submitit calls it, and calls `checkpoint` to requeue it.

    Attributes:
        overrides, arm: The run.
        hash8: Of its directory, as composed at submission.
        source: `source_hash` at submission.
        plugins: The plugins' directories.
        folder: The folder for the job's answer, which `status` reads if the run has no directory.
    """

    overrides: list[str]
    arm: str
    hash8: str
    source: str
    plugins: str
    folder: Path

    def __call__(self) -> None:
        if self.plugins:
            os.environ[PLUGINS] = self.plugins
        print(f"{self.arm}: {' '.join(self.overrides)}", flush=True)
        answer = train_in_job(Order(self.overrides, self.arm, {}, source=self.source), self.hash8)
        record = {"status": answer.status, "reason": answer.reason, "when": now()}
        atomic_write_json(self.folder / f"{job_id()}.json", record)
        if answer.status != errors.OK:
            sys.exit(answer.status)  # SLURM then calls the job failed

    def checkpoint(self) -> Any:
        """The same task again: the run finds its directory and resumes."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
