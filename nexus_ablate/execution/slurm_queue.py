"""The current states of a study's SLURM jobs, from files, squeue and sacct. Submits nothing.

`<runs_dir>/<study>/.slurm/<time>/` holds one submission: submission.json (which job trains which run, with which code),
the jobs' output, and an answer file from each job that ended by itself. Results are only in the run directories.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nexus_ablate.errors import UserError
from nexus_ablate.runs.formats import JobAnswer, SubmissionRecord
from nexus_ablate.runs.record import read_document

FOLDER = ".slurm"
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
        why: SLURM's reason for a pending job, or the reason in the job's answer.
        log: The job's output file.
    """

    job: str
    state: str
    why: str
    log: Path

    @property
    def live(self) -> bool:
        return bool(self.state) and self.state not in ENDED

    @property
    def has_crashed(self) -> bool:
        """Whether it would most likely fail the same way again."""
        return self.state in ("FAILED", "OUT_OF_MEMORY")

    def description(self) -> str:
        """How the job ended, or what it waits for, as text."""
        if self.live:
            why = f" ({self.why})" if self.why else ""
            return f"SLURM job {self.job} is {self.state.lower()}{why}"
        state = f" as {self.state}" if self.state else ""
        reason = f": {self.why}" if self.why else ""
        return f"SLURM job {self.job} ended{state}{reason}; its output is {self.log}"


def submitted_jobs(directory: Path) -> dict[str, tuple[str, Path]]:
    """The latest job of each run of a study and the folder of its submission, by the run's path relative to the study.

    Args:
        directory: `<runs_dir>/<study>`.

    Raises:
        UserError: A submission.json is damaged.
    """
    jobs: dict[str, tuple[str, Path]] = {}
    for file in sorted(directory.glob(f"{FOLDER}/*/submission.json")):
        if file.parent.is_symlink() or file.parents[1].is_symlink():  # which could lead anywhere
            continue
        submission = read_document(file, SubmissionRecord) or {"jobs": {}}
        jobs |= {run: (job, file.parent) for job, run in submission["jobs"].items()}
    return jobs


def entries_of(jobs: Mapping[str, tuple[str, Path]]) -> dict[str, Entry]:
    """The entry of each of the `submitted_jobs` of a study, by run; SLURM is queried once, if there are any.

    Raises:
        UserError: SLURM does not answer, or a job's answer is damaged.
    """
    states = job_states([job for job, _ in jobs.values()]) if jobs else {}
    entries = {}
    for run, (job, folder) in jobs.items():
        state, why = states.get(job, ("", ""))
        answer = read_document(folder / f"{job}.json", JobAnswer) or {}
        entries[run] = Entry(job, state, answer.get("reason") or why, folder / f"{job}_0_log.out")
    return entries


def job_states(jobs: list[str]) -> dict[str, tuple[str, str]]:
    """State and reason of each job that SLURM knows, from its queue or, for jobs that left the queue, its accounting.

    Raises:
        UserError: SLURM does not answer.
    """
    rows = _ask(["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%T|%r"], 3)
    states = {name: (state, "" if why == "None" else why) for name, state, why in rows}
    gone = sorted({job.partition("_")[0] for job in jobs if job not in states})
    # A cluster may have no accounting, or sacct without the database that it asks.
    if gone and shutil.which("sacct") and answer_to(["sacct", "--noheader", "-j", "1"]).returncode == 0:
        command = ["sacct", "--noheader", "--allocations", "--parsable2", "-o", "JobID,State", "-j", ",".join(gone)]
        states = {name: (state.split(" ")[0], "") for name, state, *_ in _ask(command, 2)} | states
    return {job: states[job] for job in jobs if job in states}


def answer_to(command: list[str], check: bool = False) -> subprocess.CompletedProcess[str]:
    """What SLURM answers to a command within a minute; `check` raises an error for an exit status that is not 0."""
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=check)


def _ask(command: list[str], columns: int) -> list[list[str]]:
    """The rows of a table that SLURM prints with `|` between at least this many columns."""
    try:
        answer = answer_to(command, check=True)
    except FileNotFoundError as error:
        raise UserError(
            f"{command[0]} is not installed", " ".join(command), "run this on a node of the cluster"
        ) from error
    except (subprocess.SubprocessError, OSError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise UserError(f"{command[0]} does not answer", why[0] if why else "", "try again later") from error
    rows = [line.split("|", 2) for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) >= columns]
