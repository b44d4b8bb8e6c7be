"""Output while jobs run: one line per job that ends, on a terminal also what is running; then a summary."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from nexus_ablate import errors
from nexus_ablate.console import SHORTEST_NAME, duration, grid, middle, nearer, open_console, several
from nexus_ablate.errors import printable
from nexus_ablate.launch.jobs import Job
from nexus_ablate.launch.states import Line, read_line, table
from nexus_ablate.launch.worker import JobResult
from nexus_ablate.runs import has_status
from nexus_ablate.runs.lookup import name_to_type
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.track.run_on_wandb import project_page

REFRESH_SECONDS = 0.5
STATES = {errors.OK: "finished", errors.DIVERGED: "diverged", errors.PREEMPTED: "preempted", errors.ALIVE: "elsewhere"}
RANKING = ("arm", "runs", "val loss", "delta")


class JobProgress:
    """What has become of the jobs of a launch; writes to standard error.

    Args:
        folder: The folder of the study.

    Attributes:
        statuses: The exit status of each job that was given to a backend or had ended before, by run directory.
        pending: Number of jobs that wait or run in a cluster's queue.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.statuses: dict[Path, int] = {}
        self.pending = 0
        self._console = open_console(stderr=True)
        self._failures: list[tuple[Job, str, str]] = []
        self._running: dict[Path, tuple[int, Job]] = {}
        self._paths: dict[Path, Path] = {}
        self._pages = {""}
        self._warnings: set[str] = set()
        self._live: Any = None
        self._total = self._done = self._started = self._ended_before = 0
        self._began = self._drawn = 0.0
        self._start = time.monotonic()
        self._paced = True

    @property
    def status(self) -> int:
        """The exit status of the command: the first nonzero one of a run; 0 while jobs wait in a cluster's queue."""
        return 0 if self.pending else next(filter(None, self.statuses.values()), errors.OK)

    def say(self, text: str) -> None:
        self._console.print(printable(text, 4096), markup=False, soft_wrap=True)

    def already_ended(self, job: Job, result: JobResult) -> None:
        """A run that ended before this command."""
        self._ended_before += 1
        self._keep(job, result)

    def queued(self, total: int, by: str, paced: bool = True) -> None:
        """Print how many jobs run now, and by which workers or launcher.

        Args:
            paced: Whether `ended` is called when a job ends, rather than after the last one.
        """
        self._total, self._done, self._started, self._began, self._paced = total, 0, 0, time.monotonic(), paced
        before = f"{self._ended_before} already ended, " if self._ended_before else ""
        self.say(f"{before}{several(total, 'run')} queued, {by}; {nearer(self.folder)}")

    def submitted(self, number: int, in_queue: int, arrays: list[str]) -> None:
        """Print how many jobs a cluster has taken, and how many it had already."""
        self.pending += number + in_queue
        text = f"{several(number, 'run')} submitted" + (f" as SLURM job {' and '.join(arrays)}" if arrays else "")
        self.say(text + (f", {in_queue} already in the queue" if in_queue else ""))

    @contextmanager
    def live(self) -> Iterator[None]:
        """While the jobs run; on a terminal, `tick` then shows them."""
        if not sys.stderr.isatty():
            yield
            return
        from rich.live import Live

        with Live(console=self._console, auto_refresh=False, transient=True) as self._live:
            try:
                yield
            finally:
                self._live = None

    def began(self, job: Job) -> None:
        if job.path not in self._running:
            self._started += 1
            self._running[job.path] = (self._started, job)

    def ended(self, job: Job, result: JobResult) -> None:
        self.began(job)  # a launcher does not say when, and a short job ends before it is seen
        number, _ = self._running.pop(job.path)
        self._done += 1
        state = self._keep(job, result)
        path = self._paths[job.path] = result.path or job.path
        for warning in result.warnings:
            self._warn(warning, path)
        with suppress(errors.UserError):  # the next upload reports a damaged file
            page = project_page(path)
            if page not in self._pages:
                self._pages.add(page)
                self.say(f"W&B: {page}")
        loss = self._loss(job) if state == "finished" else None
        parts = [f"seed {job.seed}", state if loss is None else f"val loss {loss:.4f}"]
        if state != "finished":
            parts.append(result.reason)
        if self._live is None and self._done < self._total and (left := self._left()):
            parts.append(f"{duration(left)} left")
        before, after = f"job {number}/{self._total}", "  ".join(filter(None, parts))
        room = max(SHORTEST_NAME, self._console.width - len(before) - len(after) - 4)
        self.say(f"{before}  {middle(job.folder, room)}  {after}")

    def _warn(self, text: str, run: Path) -> None:
        """Print a warning, once for all runs with the same one, about the folder of all rather than the run."""
        kind = text.partition(" (")[0]
        if kind not in self._warnings:
            self._warnings.add(kind)
            self.say(f"WARN {text.replace(name_to_type(run), shlex.quote(nearer(self.folder)))}")

    def tick(self) -> None:
        """Redraw the running runs and the time left, if a redraw is due."""
        if self._live is None or time.monotonic() - self._drawn < REFRESH_SECONDS:
            return
        self._drawn = time.monotonic()
        from rich.console import Group
        from rich.text import Text

        lines = []
        for _, job in self._running.values():
            line = Line(job.path, "created")
            lines.append(read_line(job.path) if has_status(job.path) else line)
        left = self._left()
        head = f"{self._done} of {self._total} runs" + (f", about {duration(left)} left" if left else "")
        self._live.update(Group(Text(head), table(lines, self._console.width)), refresh=True)

    def end(self, stopped: str, jobs: list[Job], compare: str) -> None:
        """Print which runs failed and why, the arms by loss, and the next command.

        Args:
            stopped: The stop signal, or ''.
            jobs: All of the study.
            compare: What to compare next, as typed; '' says nothing.
        """
        for job, state, reason in self._failures:
            self.say(f"{job.folder} s{job.seed} {state}: {reason or 'see its log'}  {nearer(job.path / 'log.txt')}")
        if any(state == "failed" for _, state, _ in self._failures):
            self.say("--retry failed runs the failed ones again")
        if not self._total and not self.pending:
            self.say(f"nothing to run: all {self._ended_before} runs have ended")
        losses = {}
        for job in jobs:
            if self.statuses.get(job.path) == errors.OK and job.rate is None:
                losses[job.folder, job.seed] = self._loss(job)
        if not self.pending and (ranking := ranked(losses, BASELINE)):
            self._console.print()
            self._console.print(grid(RANKING, ranking, self._console.width))
            self._console.print()
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

    def _keep(self, job: Job, result: JobResult) -> str:
        """Keep the result of a job for the summary. Returns its state."""
        self.statuses[job.path] = result.status
        state = STATES.get(result.status, "failed")
        if state != "finished":
            self._failures.append((job, state, result.reason))
        return state

    def _loss(self, job: Job) -> float | None:
        """The last validation loss of a run."""
        path = self._paths.get(job.path, job.path)
        return read_line(path).loss if has_status(path) else None

    def _left(self) -> float | None:
        """Seconds until the last job ends, at the pace so far; a running job counts as half done."""
        if not self._done or not self._paced:
            return None
        done = self._done + len(self._running) / 2
        return (time.monotonic() - self._began) / done * (self._total - done)


def ranked(losses: Mapping[tuple[str, int], float | None], reference: str = "") -> list[tuple[str, str, str, str]]:
    """One row of `RANKING` per arm, the lowest mean loss first, without any verdict.

    Args:
        losses: Final validation loss by arm and seed.
        reference: The arm that delta is the mean difference to, over the seeds of both. Default: the best arm.
    """
    arms: dict[str, dict[int, float]] = {}
    for (arm, seed), loss in losses.items():
        if loss is not None and math.isfinite(loss):
            arms.setdefault(arm, {})[seed] = loss
    means = {arm: fmean(values.values()) for arm, values in arms.items()}
    order = sorted(means, key=means.__getitem__)
    base = reference if reference in arms else next(iter(order), "")
    rows = []
    for arm in order:
        differences = [loss - arms[base][seed] for seed, loss in arms[arm].items() if seed in arms[base]]
        delta = f"{fmean(differences):+.4f}" if differences and arm != base else ""
        rows.append((arm, str(len(arms[arm])), f"{means[arm]:.4f}", delta))
    return rows
