"""The state of every run of a study: progress, loss, age and reason. Reads its study.yaml and its directories."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate.console import UNLIMITED, duration, grid, nearer, size_text, without_shared
from nexus_ablate.errors import UserError
from nexus_ablate.runs import effective_state, find_runs, has_status, read_status, read_summary
from nexus_ablate.runs.contradiction import end_contradiction
from nexus_ablate.runs.lookup import id_of
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.runs.ownership import LIVE
from nexus_ablate.runs.reading import last_row, read_config, read_text, setting_folders

if TYPE_CHECKING:
    from rich.table import Table

LOSS = "val/loss"
RUN_LIST = "runs.txt"
"""The file in a study's folder with the runs that its launch has to train, one directory per line."""
TROUBLED = ("failed", "diverged", "lost", "preempted")
"""States of runs that did not succeed."""
COLOURS = {"finished": "green", "running": "cyan", "created": "cyan", "failed": "red", "diverged": "yellow"} | dict(
    lost="magenta", preempted="magenta"
)


@dataclass(frozen=True)
class Line:
    """One run as `status` shows it; unknown values are None.

    Attributes:
        state: The effective state; `failed` for a run whose files are damaged.
        loss: The last validation loss, in nats per token.
        age_seconds: Since the last heartbeat, or since the end.
        left_seconds: Until the end, at the pace so far.
    """

    path: Path
    state: str
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    age_seconds: float | None = None
    left_seconds: float | None = None
    reason: str = ""

    @property
    def study(self) -> str:
        return self.path.parent.parent.name

    @property
    def folder(self) -> str:
        """The arm, at its learning rate where that is not its own."""
        return self.path.parent.name

    @property
    def seed(self) -> int | None:
        """The seed in the name of the run directory; None if it is not named like one."""
        seed = self.path.name.removeprefix("s").partition("-")[0]
        return int(seed) if seed.isdecimal() else None

    def bytes(self) -> int:
        """The bytes of all files in the run directory; links are not followed."""
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with suppress(FileNotFoundError):  # a running run has replaced it meanwhile
                    total += os.lstat(os.path.join(folder, name)).st_size
        return total

    def to_dict(self) -> dict[str, Any]:
        """The line as plain data."""
        named = {"study": self.study, "arm": self.folder, "seed": self.seed, "id": id_of(self.path)}
        return named | asdict(self) | {"path": str(self.path)}


def read_lines(dirs: Iterable[Path]) -> tuple[list[Line], int]:
    """One line per run in the directories, and how many runs their studies list that have not begun.

    Args:
        dirs: As for `find_runs`; also a study with settings, which has no folder of its own.

    Raises:
        UserError: A directory does not exist, or a list of runs cannot be read.
    """
    folders = {folder.resolve() for path in dirs for folder in setting_folders(path)}
    lines = [read_line(path) for path in find_runs(dirs)]
    lines.sort(key=lambda line: (line.study, line.folder != BASELINE, line.folder, line.seed or 0))
    folders |= {file.parent.resolve() for folder in folders for file in folder.glob(f"*/{RUN_LIST}")}
    listed = [folder / name for folder in folders for name in (read_text(folder / RUN_LIST) or "").splitlines()]
    return lines, sum(not has_status(path) for path in listed)


def read_line(path: Path) -> Line:
    """One run."""
    try:
        status = read_status(path)
        state = effective_state(status, path)
        row = last_row(path / "metrics.jsonl")
        measured = row if LOSS in row else last_row(path / "metrics.jsonl", LOSS)
        summary = read_summary(path, status) or {}
        steps = summary.get("steps")
        if steps is None:
            steps = (read_config(path) or {}).get("resolved", {}).get("steps")
    except UserError as error:
        return Line(path, "failed", reason=f"{error.problem}: {error.got}")
    step, left = row.get("step", status.get("step")), None
    if state == "finished" and (reason := end_contradiction(summary, row)):
        return Line(path, "failed", step, steps, reason=f"contradicts itself: {reason}")
    if state == "running" and step and steps and row.get("seconds"):
        left = (steps - step) * row["seconds"] / step
    ended = None if state in LIVE else status.get("updated")
    age = datetime.now(UTC) - datetime.fromisoformat(ended or status["heartbeat"])
    reason = status.get("reason") or ""
    return Line(path, state, step, steps, measured.get(LOSS), age.total_seconds(), left, reason)


def table(lines: list[Line], width: int = UNLIMITED, limit: int | None = None, ids: bool = False) -> Table:
    """The lines as a rich table.

    Args:
        width: Columns of the terminal; arms' names are shortened to fit.
        limit: Most rows: those of running runs, then of the last to end.
        ids: Show the runs' ids and disk use.
    """
    shown = lines
    if limit is not None:
        shown = sorted(lines, key=lambda line: (line.state not in LIVE, line.age_seconds or 0.0))[:limit]
    arms: dict[str, list[str]] = {}
    for line in lines:
        arms.setdefault(line.study, []).append(line.folder)
    short_names = {study: without_shared(names) for study, names in arms.items()}
    heads = ("arm", "id", "study", "seed", "state", "step", "val loss", "age", "left", "disk")
    rows = []
    for line in shown:
        progress = "" if line.step is None else f"{line.step}/{line.steps}" if line.steps else str(line.step)
        row = [
            short_names[line.study][line.folder],
            id_of(line.path),
            line.study,
            "" if line.seed is None else str(line.seed),
            line.state,
            progress,
            "" if line.loss is None else f"{line.loss:.4f}",
            duration(line.age_seconds),
            duration(line.left_seconds),
            size_text(line.bytes()) if ids else "",
        ]
        rows.append(row)
    used = [head == "arm" or any(cells) for head, *cells in zip(heads, *rows, strict=True)]
    used[heads.index("id")] = ids
    used[heads.index("study")] = len(arms) > 1
    rows = [[*compress(row, used)] for row in rows]
    left, leave = ("id", "study", "state"), ("disk", "age", "left", "step")
    return grid([*compress(heads, used)], rows, width, left, coloured=("state", COLOURS), leave=leave)


def troubles(lines: list[Line]) -> list[str]:
    """One text per run that did not succeed: name, state, reason and log."""
    texts = []
    for line in lines:
        if line.state in TROUBLED:
            reason = line.reason or "no reason recorded"
            texts.append(f"{line.folder} s{line.seed} {line.state}: {reason}  {nearer(line.path / 'log.txt')}")
    return texts


def summary(lines: list[Line], missing: int) -> str:
    """`12 finished, 1 failed, 2 running; 3 missing`."""
    counts = Counter(line.state for line in lines)
    order = ["finished", *TROUBLED, *LIVE]
    text = ", ".join(f"{counts[state]} {state}" for state in order if counts[state]) or "no runs here"
    return f"{text}; {missing} missing" if missing else text
