"""A run inside a cluster job: it outlives the job, and trains only with the code that it was submitted with.

submitit starts the job and answers the signal that announces preemption or the time limit (USR2) by putting the job
back into the queue. While a run trains, that signal is the run's: it saves the step that it is at and gives its
directory back; then submitit has its turn. So nothing of the run is lost, and there is one who requeues.
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
"""A run that was put back this often makes no progress; submitit counts time-outs alone."""
SOURCE = "NEXUS_ABLATE_SOURCE"
"""The variable that tells the jobs of a multirun which code they were submitted with."""


def in_job() -> bool:
    """Whether submitit started this process, in SLURM or on this machine."""
    return bool(os.environ.get("SUBMITIT_EXECUTOR"))


def job_id() -> str:
    """The job as its user knows it: `12`, or `12_3` in an array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID", "")


def job_facts() -> dict[str, Any]:
    """For env.json: which job, where, how often it was put back."""
    return {
        "slurm_job": job_id() or None,
        "slurm_node": os.environ.get("SLURMD_NODENAME"),
        "slurm_restarts": restarts(),
    }


def restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def refuse_another_run(config: RunConfig, hash8: str) -> None:
    """Options, data or a plugin may have changed while the run was queued; nobody would look for what is trained then.

    Raises:
        ConfigError: The run is not the one that was submitted.
    """
    from nexus_ablate.data import fingerprint_of
    from nexus_ablate.training.session import identity_of

    found = identity_of(config, fingerprint_of(config.data, config.model.context)).hash8
    if found != hash8:
        got = f"{hash8} when it was submitted, {found} when it started"
        problem = f"the run's options, data or plugin changed while it was queued: {got}"
        raise ConfigError(problem, found, AGAIN)


@contextmanager
def stops_outside_of_training() -> Iterator[None]:
    """Before its first step and after its last one a run has nothing to save: a signal ends it at once, as preempted.

    While it trains its own handlers are in place (training/signals.py); submitit's are back afterwards.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        raise Preempted(f"stopped by {name} outside of training", name, AGAIN)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, announcement())}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def announcement() -> signal.Signals:
    """The signal by which submitit lets SLURM announce preemption and the time limit."""
    from submitit.core.job_environment import JobEnvironment

    return JobEnvironment._usr_sig()


@masked_streams()
def train_in_job(order: Order, hash8: str = "") -> Answer:
    """Train in this process; where the cluster takes the node away, the job is put back and this never returns.

    Args:
        order: The run.
        hash8: Of the run's directory at submission, where it was known.
    """
    from nexus_ablate.config.compose import compose
    from nexus_ablate.training.session import train

    try:
        refuse_other_source(order.source)
        config = compose(order.overrides)
        if hash8:
            refuse_another_run(config, hash8)
        facts = order.circumstances | job_facts()
        with stops_outside_of_training():
            try:
                outcome = train(config, order.overrides, brief=True, arm=order.arm, circumstances=facts)
            except AlreadyRunning:
                if not restarts():
                    raise
                time.sleep(LOST_SECONDS + 10)  # this job died with its node, and its last heartbeat is still young
                outcome = train(config, order.overrides, brief=True, arm=order.arm, circumstances=facts)
        return Answer(outcome.status, path=outcome.path)
    except UserError as error:
        print(error, file=sys.stderr)
        why = put_back() if error.status == errors.PREEMPTED else ""
        return Answer(error.status, f"{error.problem}; {why}" if why else error.problem)
    except Exception as error:  # its traceback is in its status.json and in the job's log
        traceback.print_exc()
        return Answer(errors.BUG, errors.described(error))


def put_back() -> str:
    """Have submitit put this job back into the queue, which ends the process.

    Returns:
        Why that is not done.
    """
    from submitit.core.utils import UncompletedJobError

    number = announcement()
    if not callable(signal.getsignal(number)):  # then the signal would only end this process
        return "not put back, because submitit did not start this process"
    state = _state()
    if state != "RUNNING":
        return f"not put back, because SLURM says that its job is {state.lower()}"
    if restarts() >= REQUEUES:
        return f"not put back, because that was done {REQUEUES} times; the same command goes on"
    try:
        signal.raise_signal(number)
    except UncompletedJobError as error:
        return str(error)
    return "not put back: submitit said nothing"


def _state() -> str:
    """What the cluster makes of this job: one that somebody cancelled must not come back."""
    if os.environ["SUBMITIT_EXECUTOR"] != "slurm":
        return "RUNNING"
    command = ["scontrol", "--oneliner", "show", "job", os.environ["SLURM_JOB_ID"]]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r"\bJobState=(\w+)", told.stdout)
    return found[1] if found else f"unknown to scontrol ({told.stderr.strip()})"


@dataclass(frozen=True)
class Task:
    """What a job of a submitted study does; submitit calls it, and asks `checkpoint` what to do when it is put back.

    Attributes:
        overrides, arm: The run.
        hash8: Of its directory, as composed at submission.
        source: `source_hash` at submission.
        plugins: The plugins' directories.
        folder: For the job's answer, which `status` reads where the run has no directory.
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
        answer = train_in_job(Order(self.overrides, self.arm, {}, source=self.source), self.hash8)
        told = {"status": answer.status, "reason": answer.reason, "when": now()}
        atomic_write_json(self.folder / f"{job_id()}.json", told)
        if answer.status != errors.OK:
            sys.exit(answer.status)  # SLURM then calls the job failed

    def checkpoint(self) -> Any:
        """The same again: the run finds its directory and goes on there."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
