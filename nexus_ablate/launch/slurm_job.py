"""A run inside a SLURM job. The run outlives the job, and trains only with the code that it was submitted with.

submitit starts the job and requeues it on the signal that announces preemption or the time limit (USR2). While a run
trains, the run handles that signal first: it saves its current step and releases its directory. Then submitit requeues
the job. So no progress is lost, and only submitit requeues.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nexus_ablate import errors
from nexus_ablate.errors import AGAIN, Preempted, UserError
from nexus_ablate.launch.jobs import JobResult
from nexus_ablate.launch.slurm_queue import ask_slurm
from nexus_ablate.launch.worker import Task, result_of
from nexus_ablate.masking import masked_output
from nexus_ablate.runs import atomic_write_json
from nexus_ablate.runs.ownership import now
from nexus_ablate.training.signals import StopRequest

REQUEUES = 100
"""A run that was requeued this often makes no progress. submitit itself only counts time-outs."""


@dataclass(frozen=True)
class SlurmTask:
    """The work of one SLURM job. submitit calls it, and calls `checkpoint` to requeue it.

    Attributes:
        task: The run.
        folder: The folder for the job's result, which the next launch reads if the run has no directory.
    """

    task: Task
    folder: Path

    def __call__(self) -> None:
        print(f"{self.task.folder}: {' '.join(self.task.overrides)}", flush=True)
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
        facts = {"slurm_job": job, "slurm_node": os.environ.get("SLURMD_NODENAME"), "slurm_restarts": restarts()}
        result = train_in_job(replace(self.task, conditions=self.task.conditions | facts))
        record = {"status": result.status, "reason": result.reason, "when": now()}
        atomic_write_json(self.folder / f"{job}.json", record)
        if result.status != errors.OK:
            sys.exit(result.status)  # SLURM then calls the job failed

    def checkpoint(self) -> Any:
        """The same task again: the run finds its directory and resumes."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


@masked_output()
def train_in_job(task: Task) -> JobResult:
    """Train in this process. If the cluster preempts the job, it is requeued and this function never returns."""
    stop = StopRequest(("SIGTERM", announcement().name), stop_outside_of_training)  # submitit's handlers come back
    try:
        with stop:
            return task.train()
    except BaseException as error:
        ended: BaseException = error
        if stop.signal_name:  # what was interrupted, such as a plugin's import, may have made another error of it
            ended = stopped_by(stop.signal_name)
        result = result_of(ended)
    if result.status == errors.PREEMPTED:
        return replace(result, reason=f"{result.reason}; {put_back()}")
    return result


def stop_outside_of_training(name: str) -> None:
    """End a run at once, as preempted, on a signal before its first or after its last step: there is nothing to save.

    During training, the handlers of training/signals.py are active.
    """
    raise stopped_by(name)


def stopped_by(name: str) -> Preempted:
    return Preempted(f"stopped by {name} before or after training", name, AGAIN)


def announcement() -> signal.Signals:
    """The signal that SLURM sends, on submitit's request, before preemption or the time limit."""
    from submitit.core.job_environment import JobEnvironment

    return JobEnvironment._usr_sig()


def put_back() -> str:
    """Let submitit requeue this job, which ends the process. Returns why the job was not requeued."""
    from submitit.core.utils import UncompletedJobError

    number = announcement()
    if not callable(signal.getsignal(number)):  # without submitit's handler the signal would only end this process
        return "not requeued, because submitit did not start this process"
    try:
        answer = ask_slurm(["scontrol", "--oneliner", "show", "job", os.environ["SLURM_JOB_ID"]])
    except UserError as error:
        return f"not requeued, because {error.problem}; run the same command to resume"
    state = re.search(r"\bJobState=(\w+)", answer.stdout)
    shown = state[1] if state else f"unknown to scontrol ({answer.stderr.strip()})"
    if shown != "RUNNING":  # a cancelled job must not be requeued
        return f"not requeued, because SLURM reports its job as {shown.lower()}"
    if restarts() >= REQUEUES:
        return f"not requeued, because it was requeued {REQUEUES} times already; run the same command to resume"
    try:
        signal.raise_signal(number)
    except UncompletedJobError as error:
        return str(error)
    return "not requeued: submitit gave no reason"
