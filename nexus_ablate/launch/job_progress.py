"""Output while jobs run: one line per job that ends, then a summary."""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from pathlib import Path

from nexus_ablate import errors
from nexus_ablate.console import SHORTEST_NAME, duration, middle, nearer, open_console, several
from nexus_ablate.errors import printable
from nexus_ablate.launch.jobs import Job, JobResult
from nexus_ablate.launch.states import read_line
from nexus_ablate.runs.lookup import name_to_type
from nexus_ablate.track.run_on_wandb import project_page

STATES = {errors.OK: "finished", errors.DIVERGED: "diverged", errors.PREEMPTED: "preempted", errors.ALIVE: "elsewhere"}


class JobProgress:
    """What has become of the jobs of a launch; writes to standard error.

    Args:
        folder: The folder of the study.
        retry_failed: Whether the command runs failed runs again.

    Attributes:
        statuses: The exit status of each job that was given to a backend or had ended before, by run directory.
        pending: Number of jobs that wait or run in a cluster's queue.
    """

    def __init__(self, folder: Path, retry_failed: bool = False) -> None:
        self.folder, self.retry_failed = folder, retry_failed
        self.statuses: dict[Path, int] = {}
        self.pending = 0
        self._console = open_console(stderr=True)
        self._failures: list[str] = []
        self._said: set[str] = set()
        self._total = self._done = 0
        self._began = self._start = time.monotonic()

    @property
    def status(self) -> int:
        """The exit status of the command: the first nonzero one of a run; 0 while jobs wait in a cluster's queue."""
        return 0 if self.pending else next(filter(None, self.statuses.values()), errors.OK)

    def say(self, text: str) -> None:
        self._console.print(printable(text, 4096), markup=False, soft_wrap=True)

    def _say_once(self, kind: str, text: str) -> None:
        """Say something that concerns many runs at the first of them."""
        if kind not in self._said:
            self._said.add(kind)
            self.say(text)

    def queued(self, total: int, by: str) -> None:
        """Print how many jobs run now, and by which workers or launcher."""
        ended = len(self.statuses) - total
        before = f"{ended} already ended, " if ended else ""
        self._total, self._done, self._began = total, 0, time.monotonic()
        self.say(f"{before}{several(total, 'run')} queued, {by}; {nearer(self.folder)}")

    def submitted(self, number: int, in_queue: int, arrays: list[str]) -> None:
        """Print how many jobs a cluster has taken, and how many it had already."""
        self.pending += number + in_queue
        text = f"{several(number, 'run')} submitted" + (f" as SLURM job {' and '.join(arrays)}" if arrays else "")
        self.say(text + (f", {in_queue} already in the queue" if in_queue else ""))

    def ended(self, job: Job, result: JobResult) -> None:
        """Print how a job ended, what its run warned of, and its project on W&B."""
        self._done += 1
        path = result.path or job.path
        for warning in result.warnings:
            text = warning.replace(name_to_type(path), shlex.quote(nearer(self.folder)))
            self._say_once(warning.partition(" (")[0], f"WARN {text}")
        with suppress(errors.UserError):  # the next upload reports a damaged file
            if page := project_page(path):
                self._say_once(page, f"W&B: {page}")
        outcome = self.keep(job, result)
        if outcome == "finished" and (loss := read_line(path).loss) is not None:
            outcome = f"val loss {loss:.4f}"
        elif outcome != "finished":
            outcome = f"{outcome}  {result.reason}".rstrip()
        if self._done < self._total:
            pace = (time.monotonic() - self._began) / self._done
            outcome += f"  {duration(pace * (self._total - self._done))} left"
        before, after = f"job {self._done}/{self._total}", f"seed {job.seed}  {outcome}"
        room = max(SHORTEST_NAME, self._console.width - len(before) - len(after) - 4)
        self.say(f"{before}  {middle(job.folder, room)}  {after}")

    def end(self, stopped: str, compare: str) -> None:
        """Print which runs failed and why, and the next command.

        Args:
            stopped: The stop signal, or ''.
            compare: What to compare next, as typed; '' says nothing.
        """
        for failure in self._failures:
            self.say(failure)
        if any(status not in STATES for status in self.statuses.values()):
            self.say(f"{'the same command' if self.retry_failed else '--retry failed'} runs the failed ones again")
        if not self._total and not self.pending:
            self.say(f"nothing to run: all {len(self.statuses)} runs have ended")
        if self._total:
            time_spent = duration(time.monotonic() - self._start)
            finished = list(self.statuses.values()).count(errors.OK)
            self.say(f"{finished} of {len(self.statuses)} runs finished; this launch took {time_spent}")
        if stopped:
            self.say(f"stopped ({stopped}); every run is saved. Run the same command to resume.")
        elif compare:
            if self.pending:
                self.say(f"next  nexus-ablate status {compare}")
            self.say(f"{'then' if self.pending else 'next'}  nexus-ablate compare {compare}")

    def keep(self, job: Job, result: JobResult) -> str:
        """Keep the result of a job, which may have ended before this command, for the summary. Returns its state."""
        self.statuses[job.path] = result.status
        state = STATES.get(result.status, "failed")
        if state != "finished":
            log = nearer(job.path / "log.txt")
            self._failures.append(f"{job.folder} s{job.seed} {state}: {result.reason or 'see its log'}  {log}")
        return state
