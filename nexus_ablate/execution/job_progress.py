"""Output while jobs run: one line per job that ends, on a terminal also what is running; then a summary.

The same for a study and for a multirun, whatever runs the jobs.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from nexus_ablate import errors
from nexus_ablate.console import SHORTEST_NAME, duration, grid, middle, nearer, open_console, several
from nexus_ablate.errors import printable
from nexus_ablate.execution.run_states import Line, Watcher
from nexus_ablate.execution.state_table import table
from nexus_ablate.execution.worker import JobResult
from nexus_ablate.planning.jobs import Job
from nexus_ablate.runs import has_status
from nexus_ablate.runs.lookup import name_to_type
from nexus_ablate.track.run_on_wandb import project_page

REFRESH_SECONDS = 0.5
STATES = {errors.OK: "finished", errors.DIVERGED: "diverged", errors.PREEMPTED: "preempted", errors.ALIVE: "elsewhere"}
RANKING = ("arm", "runs", "val loss", "delta")


class JobProgress:
    """What has become of the jobs of a command; writes to standard error.

    Args:
        directory: The folder of the experiment that the runs belong to.

    Attributes:
        statuses: The exit status of each job that was given to a backend or had ended before, by run directory.
        pending: Number of jobs that wait or run in a cluster's queue.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.statuses: dict[Path, int] = {}
        self.pending = 0
        self._console = open_console(stderr=True)
        self._failures: list[tuple[Job, str, str]] = []
        self._watcher = Watcher()
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

    def refused(self, name: str, error: errors.UserError) -> None:
        """A combination that is no run."""
        self.statuses[Path(name)] = error.status
        self.say(f"  {name} is refused: {error.problem}; got {error.got}; try {error.fix}")

    def queued(self, total: int, by: str, paced: bool = True) -> None:
        """Print how many jobs run now, and by which workers or launcher.

        Args:
            paced: Whether `ended` is called when a job ends, rather than after the last one.
        """
        self._total, self._done, self._started, self._began, self._paced = total, 0, 0, time.monotonic(), paced
        before = f"{self._ended_before} already ended, " if self._ended_before else ""
        self.say(f"{before}{several(total, 'run')} queued, {by}; {nearer(self.directory)}")

    def submitted(self, number: int, in_queue: int, arrays: Sequence[str]) -> None:
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
        self._paths[job.path] = result.path or job.path
        for warning in result.warnings:
            self._warn(warning, self._paths[job.path])
        with suppress(errors.UserError):  # the next upload reports a damaged file
            page = project_page(self._paths[job.path])
            if page not in self._pages:
                self._pages.add(page)
                self.say(f"W&B: {page}")
        line = self._line(job, state)
        has_loss = state == "finished" and line.loss is not None
        parts = [f"seed {job.seed}", f"val loss {line.loss:.4f}" if has_loss else state]
        if line.against_baseline is not None:
            parts.append(f"{line.against_baseline:+.4f}")
        if state != "finished":
            parts.append(result.reason)
        if self._live is None and self._done < self._total and (left := self._left()):
            parts.append(f"{duration(left)} left")
        before, after = f"job {number}/{self._total}", "  ".join(filter(None, parts))
        room = max(SHORTEST_NAME, self._console.width - len(before) - len(after) - 4)
        self.say(f"{before}  {middle(job.name, room)}  {after}")

    def _warn(self, text: str, run: Path) -> None:
        """Print a warning, once for all runs with the same one; a study's names the folder of all, not the run."""
        kind = text
        if (self.directory / "study.yaml").exists():
            kind = text.partition(" (")[0]
            text = text.replace(name_to_type(run), shlex.quote(nearer(self.directory)))
        if kind not in self._warnings:
            self._warnings.add(kind)
            self.say(f"WARN {text}")

    def tick(self) -> None:
        """Redraw the running runs and the time left, if a redraw is due."""
        if self._live is None or time.monotonic() - self._drawn < REFRESH_SECONDS:
            return
        self._drawn = time.monotonic()
        from rich.console import Group
        from rich.text import Text

        running = self._running.values()
        lines = [replace(self._line(job, "created"), job=f"{number}/{self._total}") for number, job in running]
        left = self._left()
        head = f"{self._done} of {self._total} runs" + (f", about {duration(left)} left" if left else "")
        self._live.update(Group(Text(head), table(lines, self._console.width)), refresh=True)

    def end(
        self, stopped: str, deciding: Sequence[Job], baseline: str = "", retry: str = "", compare: Sequence[str] = ()
    ) -> None:
        """Print which runs failed and why, the arms by loss, and the next command.

        Args:
            stopped: The stop signal, or ''.
            deciding: The runs that a verdict is based on.
            baseline: The arm that the others are compared with.
            retry: How failed runs are run again, if the same command does not.
            compare: The words of the comparison to do next. Default: of the directory.
        """
        for job, state, reason in self._failures:
            self.say(f"{job.name} s{job.seed} {state}: {reason or 'see its log'}  {nearer(job.path / 'log.txt')}")
        if retry and any(state == "failed" for _, state, _ in self._failures):
            self.say(retry)
        if not self._total and not self.pending:
            self.say(f"nothing to run: all {self._ended_before} runs have ended")
        lines = {(job.of, job.seed): self._line(job, "") for job in deciding}
        losses = {run: line.loss for run, line in lines.items() if line.state == "finished"}
        if not self.pending and (ranking := ranked(losses, baseline)):
            self._console.print()
            self._console.print(grid(RANKING, ranking, self._console.width))
            self._console.print()
        if self._total:
            time_spent = duration(time.monotonic() - self._start)
            finished = list(self.statuses.values()).count(errors.OK)
            self.say(f"{finished} of {len(self.statuses)} runs finished; this launch took {time_spent}")
        if stopped:
            self.say(f"stopped ({stopped}); every run is saved. Run the same command to resume.")
            return
        if self.pending:
            self.say(f"next  nexus-ablate status {shlex.quote(nearer(self.directory))}")
        words = compare or ("compare", nearer(self.directory))
        self.say(f"{'then' if self.pending else 'next'}  {shlex.join(['nexus-ablate', *words])}")

    def _keep(self, job: Job, result: JobResult) -> str:
        """Keep the result of a job for the summary. Returns its state."""
        self.statuses[job.path] = result.status
        state = STATES.get(result.status, "failed")
        if state != "finished":
            self._failures.append((job, state, result.reason))
        return state

    def _line(self, job: Job, otherwise: str) -> Line:
        """The status line of a run from its files; with the state `otherwise` if it has no status yet."""
        path = self._paths.get(job.path, job.path)
        if has_status(path):
            return self._watcher.line(path)
        return Line(job.path.parent.parent.name, job.arm, job.seed, otherwise)

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
