"""What SLURM makes of a study's jobs at this moment. Reads files and asks squeue and sacct; submits nothing.

`<runs_dir>/<study>/.slurm/<time>/` holds one submission: submission.json (which job trains which run, and with what
code), the jobs' prints, and an answer of each job that ended by itself. The results are in the run directories alone.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nexus_ablate.errors import UserError
from nexus_ablate.runs.formats import JOB_ANSWER, SUBMISSION
from nexus_ablate.runs.record import read_document

FOLDER = ".slurm"
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
"""States of jobs that are over, as squeue and sacct name them."""

POLL_SECONDS = 5.0
CRASHED = ("FAILED", "OUT_OF_MEMORY")
"""States of jobs that would most likely end so again."""


@dataclass(frozen=True)
class Entry:
    """The latest job of a run.

    Attributes:
        state: SLURM's; '' where it has forgotten the job.
        why: SLURM's reason for a job that waits, or what the job said in the end.
        log: What the job printed.
    """

    job: str
    state: str
    why: str
    log: Path

    @property
    def live(self) -> bool:
        return bool(self.state) and self.state not in ENDED

    def told(self) -> str:
        """How it ended, or what it waits for, in words."""
        if self.live:
            why = f" ({self.why})" if self.why else ""
            return f"SLURM job {self.job} is {self.state.lower()}{why}"
        said = f": {self.why}" if self.why else ""
        return f"SLURM job {self.job} ended{f' as {self.state}' if self.state else ''}{said}; it printed {self.log}"


class Queue:
    """The jobs of a study by the run that they train, as SLURM tells at this moment.

    Args:
        directory: `<runs_dir>/<study>`.

    Raises:
        UserError: SLURM does not answer, or a submission.json is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def live(self, run: Path) -> bool:
        """Whether a job of this run is waiting or running."""
        entry = self.entries.get(str(run.relative_to(self.directory)))
        return entry is not None and entry.live

    def crash(self, run: Path) -> str:
        """How the latest job of this run took its process down; '' where it did not."""
        entry = self.entries.get(str(run.relative_to(self.directory)))
        return entry.told() if entry is not None and entry.state in CRASHED else ""

    @cached_property
    def submitted(self) -> dict[str, tuple[str, Path]]:
        """The latest job of each run and the folder of its submission, by the run's directory within the study's."""
        jobs: dict[str, tuple[str, Path]] = {}
        for file in sorted(self.directory.glob(f"{FOLDER}/*/submission.json")):
            submission = read_document(file, SUBMISSION) or {"jobs": {}}
            jobs |= {run: (job, file.parent) for job, run in submission["jobs"].items()}
        return jobs

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """What SLURM says of each job in `submitted`; it is asked once."""
        if not self.submitted:
            return {}
        states = job_states([job for job, _ in self.submitted.values()])
        found = {}
        for run, (job, folder) in self.submitted.items():
            state, why = states.get(job, ("", ""))
            answer = read_document(folder / f"{job}.json", JOB_ANSWER) or {}
            found[run] = Entry(job, state, answer.get("reason") or why, folder / f"{job}_0_log.out")
        return found


def sweep_entries(folder: Path) -> list[Entry]:
    """The jobs of a multirun in their order, after all of them have left the queue.

    Args:
        folder: submitit's, which may hold `%j` for the job.
    """
    fixed = Path(*itertools.takewhile(lambda part: "%" not in part, folder.parts))
    pickles = {path.name.removesuffix("_submitted.pkl"): path.parent for path in fixed.rglob("*_submitted.pkl")}
    jobs = sorted(pickles, key=lambda job: [int(number) for number in job.split("_")])
    while True:
        states = job_states(jobs)
        found = [Entry(job, *states.get(job, ("", "")), pickles[job] / f"{job}_0_log.out") for job in jobs]
        if not any(entry.live for entry in found):
            return found
        time.sleep(POLL_SECONDS)


def job_states(jobs: list[str]) -> dict[str, tuple[str, str]]:
    """State and reason of each job that SLURM knows: from its queue, and from its accounting for those that left it.

    Raises:
        UserError: It does not answer.
    """
    user = f"--user={os.getuid()}"
    lines = _ask(["squeue", "--noheader", "--array", "--states=all", user, "--format=%i|%T|%r"])
    rows = [line.split("|", 2) for line in lines if line.count("|") >= 2]
    found = {name: (state, "" if why == "None" else why) for name, state, why in rows}
    gone = sorted({job.partition("_")[0] for job in jobs if job not in found})
    if gone and accounting():
        lines = _ask(["sacct", "--noheader", "--allocations", "--parsable2", "-o", "JobID,State", "-j", ",".join(gone)])
        rows = [line.split("|")[:2] for line in lines if "|" in line]
        found = {name: (state.split(" ")[0], "") for name, state in rows} | found
    return {job: found[job] for job in jobs if job in found}


def accounting() -> bool:
    """Whether SLURM remembers jobs that left its queue: the command is there, and a database behind it."""
    if shutil.which("sacct") is None:
        return False
    return (
        subprocess.run(["sacct", "--noheader", "-j", "1"], capture_output=True, timeout=60, check=False).returncode == 0
    )


def _ask(command: list[str]) -> list[str]:
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except FileNotFoundError as error:
        raise UserError(f"{command[0]} is not here", " ".join(command), "ask on a node of the cluster") from error
    except (subprocess.SubprocessError, OSError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise UserError(f"{command[0]} does not answer", why[0] if why else "", "try again later") from error
    return told.stdout.splitlines()
