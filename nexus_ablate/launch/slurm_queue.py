"""The latest jobs of a study on a SLURM cluster, from files, squeue and sacct. Submits nothing.

`<runs_dir>/<study>/.slurm/<time>/` holds one submission: submission.json (which job trains which run, with which code),
the jobs' output, and an answer file from each job that ended by itself. Results are only in the run directories.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from nexus_ablate.errors import UserError
from nexus_ablate.runs.formats import JobAnswer, SubmissionRecord
from nexus_ablate.runs.reading import read_document

FOLDER = ".slurm"
ANSWER_SECONDS = 30
"""A controller under load takes ten seconds; one that is down may never answer."""
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""States of ended jobs, as squeue and sacct name them."""


@dataclass(frozen=True)
class Entry:
    """The latest job of a run.

    Attributes:
        state: SLURM's name of its state; '' where SLURM no longer knows the job.
        reason: What the job itself said when it ended.
        log: The job's output file.
    """

    job: str
    state: str
    reason: str
    log: Path

    @property
    def is_live(self) -> bool:
        """Whether it waits or runs. One that is COMPLETING has ended; on a dead node it stays so for ever."""
        return self.state not in ("", "COMPLETING", *ENDED)

    @property
    def has_crashed(self) -> bool:
        """Whether it would most likely fail the same way again."""
        return self.state in ("FAILED", "OUT_OF_MEMORY")

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"SLURM job {self.job} ended as {self.state}{reason}; its output is {self.log}"


def ask_slurm(command: list[str]) -> subprocess.CompletedProcess[str]:
    """What SLURM answers to a command.

    Raises:
        UserError: It does not answer within half a minute.
    """
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise no_answer(command[0], f"no answer within {ANSWER_SECONDS} s") from None
    except OSError as error:
        raise no_answer(command[0], str(error)) from None


def no_answer(command: str, why: str) -> UserError:
    """The error for a cluster that does not answer."""
    return UserError(f"{command} does not answer", why, "try again when the cluster answers to `sinfo`")


def entries_of(folder: Path) -> dict[str, Entry]:
    """The latest job of each submitted run of a study, by the run's path in the study; SLURM is asked if there are any.

    Raises:
        UserError: SLURM does not answer, or a submission or a job's answer is damaged.
    """
    jobs: dict[str, tuple[str, Path]] = {}
    for file in sorted(folder.glob(f"{FOLDER}/*/submission.json")):
        submission = read_document(file, SubmissionRecord) or {"jobs": {}}
        jobs |= {run: (job, file.parent) for job, run in submission["jobs"].items()}
    states = job_states([job for job, _ in jobs.values()]) if jobs else {}
    entries = {}
    for run, (job, place) in jobs.items():
        answer = read_document(place / f"{job}.json", JobAnswer) or {}
        entries[run] = Entry(job, states.get(job, ""), answer.get("reason", ""), place / f"{job}_0_log.out")
    return entries


def job_states(jobs: list[str]) -> dict[str, str]:
    """The state of each job that SLURM knows, from its queue or, for jobs that left the queue, its accounting.

    Raises:
        UserError: SLURM does not answer.
    """
    rows = _rows(["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%T"])
    states = {row[0]: row[1] for row in rows}
    gone = sorted({job.partition("_")[0] for job in jobs if job not in states})
    # A cluster may have no accounting, or sacct without the database that it asks.
    if gone and shutil.which("sacct") and not ask_slurm(["sacct", "--noheader", "-j", "1"]).returncode:
        command = ["sacct", "--noheader", "--allocations", "--parsable2", "-o", "JobID,State", "-j", ",".join(gone)]
        states = {row[0]: row[1].split(" ")[0] for row in _rows(command)} | states
    return {job: states[job] for job in jobs if job in states}


def _rows(command: list[str]) -> list[list[str]]:
    """The rows of a table that SLURM prints with `|` between two columns.

    Raises:
        UserError: SLURM does not answer.
    """
    answer = ask_slurm(command)
    if answer.returncode:
        raise no_answer(command[0], (answer.stderr.strip().splitlines() or [""])[0])
    rows = [line.split("|") for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) >= 2]
