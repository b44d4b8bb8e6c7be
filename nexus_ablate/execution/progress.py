"""Output while a study runs: one line per run that ends, on a terminal also what is running; then a summary."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nexus_ablate import errors
from nexus_ablate.console import SHORTEST_NAME, grid, middle, open_console
from nexus_ablate.errors import printable
from nexus_ablate.execution.ranking import RANKING, ranked
from nexus_ablate.execution.status import Line, Watcher, duration, nearer, table
from nexus_ablate.execution.worker import Answer
from nexus_ablate.planning.design import ComposedStudy, label
from nexus_ablate.planning.jobs import Job
from nexus_ablate.runs import has_status

REFRESH_SECONDS = 0.5
STATES = {errors.OK: "finished", errors.DIVERGED: "diverged", errors.PREEMPTED: "preempted", errors.ALIVE: "elsewhere"}


class StudyProgress:
    """Writes to standard error.

    Args:
        study: The study that runs.
        directory: The folder of its runs.
    """

    def __init__(self, study: ComposedStudy, directory: Path) -> None:
        self.study, self.directory = study, directory
        self.console = open_console(stderr=True)
        self.failures: list[tuple[Job, str, str]] = []
        self._watcher = Watcher()
        self._running: dict[Path, tuple[int, Job]] = {}
        self._live: Any = None
        self._total = self._done = self._started = self._ended_before = 0
        self._began = self._drawn = 0.0
        self._start = time.monotonic()
        self._ended: set[Path] = set()
        self._paced = True
        self.say(f"study {study.definition.name}: {study.definition.question}")
        for left in study.equal:
            self.say(f"  {label(left.requested)} equals {left.why} and is not trained twice")
        for left in study.refused:
            self.say(f"  {label(left.requested)} is refused: {left.why}")

    def say(self, text: str) -> None:
        self.console.print(printable(text, 1000), markup=False, soft_wrap=True)

    def already_ended(self, job: Job, state: str, reason: str) -> None:
        """A run that ended before this launch."""
        self._ended_before += 1
        self._ended.add(job.path)
        if state != "finished":
            self.failures.append((job, state, reason))

    def queued(self, total: int, by: str, paced: bool = True) -> None:
        """Print how many jobs run now, and by which workers or launcher.

        Args:
            paced: Whether `ended` is called when a job ends, rather than after the last one.
        """
        self._total, self._done, self._started, self._began, self._paced = total, 0, 0, time.monotonic(), paced
        before = f"{self._ended_before} already ended, " if self._ended_before else ""
        self.say(f"{before}{total} runs queued, {by}; {nearer(self.directory)}")

    @contextmanager
    def live(self) -> Iterator[None]:
        """While the queue runs."""
        if not sys.stderr.isatty():
            yield
            return
        from rich.live import Live

        with Live(console=self.console, auto_refresh=False, transient=True) as self._live:
            try:
                yield
            finally:
                self._live = None

    def began(self, job: Job) -> None:
        if job.path not in self._running:
            self._started += 1
            self._running[job.path] = (self._started, job)

    def ended(self, job: Job, answer: Answer) -> None:
        self.began(job)  # a launcher does not say when
        number, _ = self._running.pop(job.path)
        self._done += 1
        self._ended.add(job.path)
        state = STATES.get(answer.status, "failed")
        if state != "finished":
            self.failures.append((job, state, answer.reason))
        line = self._line(job, state)
        parts = [f"seed {job.seed}"]
        parts += [state] if state != "finished" or line.loss is None else [f"val loss {line.loss:.4f}"]
        parts += [] if line.against_baseline is None else [f"{line.against_baseline:+.4f}"]
        parts += [] if state == "finished" else [answer.reason]
        left = self._left()
        if self._live is None and left and self._done < self._total:
            parts.append(f"{duration(left)} left")
        before, after = f"job {number}/{self._total}", "  ".join(filter(None, parts))
        room = max(SHORTEST_NAME, self.console.width - len(before) - len(after) - 4)
        self.say(f"{before}  {middle(job.arm, room)}  {after}")

    def tick(self) -> None:
        """Redraw the running runs and the time left, if a redraw is due."""
        if self._live is None or time.monotonic() - self._drawn < REFRESH_SECONDS:
            return
        self._drawn = time.monotonic()
        from rich.console import Group
        from rich.text import Text

        lines = [
            replace(self._line(job, "created"), job=f"{number}/{self._total}") for number, job in self._running.values()
        ]
        left = self._left()
        head = f"{self._done} of {self._total} runs" + (f", about {duration(left)} left" if left else "")
        self._live.update(Group(Text(head), table(lines, self.console.width)), refresh=True)

    def end(self, stopped: str, deciding: Sequence[Job] = ()) -> None:
        """Print which runs failed and why, the arms by loss, and the next command.

        Args:
            stopped: The stop signal, or ''.
            deciding: The runs that a verdict is based on.
        """
        self._say_failures()
        if not self._total:
            self.say(f"nothing to run: all {self._ended_before} runs have ended")
        lines = {(job.of, job.seed): self._line(job, "") for job in deciding}
        losses = {run: line.loss for run, line in lines.items() if line.state == "finished"}
        if ranking := ranked(losses, self.study.baseline.name):
            self.console.print()
            self.console.print(grid(RANKING, ranking, self.console.width))
            self.console.print()
        if self._total:
            time_spent = duration(time.monotonic() - self._start)
            finished = len(self._ended - {job.path for job, _, _ in self.failures})
            self.say(f"{finished} of {len(self._ended)} runs finished; this launch took {time_spent}")
        if stopped:
            self.say(f"stopped ({stopped}); every run is saved. Run the same command to resume.")
        else:
            self.say(f"next  nexus-ablate compare {shlex.quote(nearer(self.directory))}")

    def handed_over(self, more: bool) -> None:
        """Print which runs failed before, and the next command, after a submission to a cluster.

        Args:
            more: Runs are queued or running.
        """
        self._say_failures()
        if more:
            self.say(f"next  nexus-ablate status {shlex.quote(nearer(self.directory))}")
        self.say(f"{'then' if more else 'next'}  nexus-ablate compare {shlex.quote(nearer(self.directory))}")

    def _say_failures(self) -> None:
        for job, state, reason in self.failures:
            self.say(f"{job.arm} s{job.seed} {state}: {reason or 'see its log'}  {nearer(job.path / 'log.txt')}")
        if any(state == "failed" for _, state, _ in self.failures):
            self.say("--retry failed runs the failed ones again")

    def _line(self, job: Job, otherwise: str) -> Line:
        """The status line of a run from its files; with the state `otherwise` if it has no status yet."""
        if has_status(job.path):
            return self._watcher.line(job.path)
        return Line(job.path.parent.parent.name, job.arm, job.seed, otherwise)

    def _left(self) -> float | None:
        """Seconds until the last job ends, at the pace so far; a running job counts as half done."""
        if not self._done or not self._paced:
            return None
        done = self._done + len(self._running) / 2
        return (time.monotonic() - self._began) / done * (self._total - done)
