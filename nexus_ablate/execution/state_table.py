"""The states of runs as a table and as text, for a terminal."""

from __future__ import annotations

from collections import Counter
from itertools import compress
from typing import TYPE_CHECKING

from nexus_ablate.console import UNLIMITED, duration, grid, nearer, size_text, without_shared
from nexus_ablate.execution.run_states import LATER, REPLACED, TROUBLED, Line
from nexus_ablate.runs.ownership import LIVE

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = {
    "finished": "green",
    "running": "cyan",
    "created": "cyan",
    "failed": "red",
    "damaged": "red",
    "diverged": "yellow",
    "lost": "magenta",
    "preempted": "magenta",
    "unknown": "red",
}


def table(
    lines: list[Line], width: int = UNLIMITED, limit: int | None = None, full: bool = False, ids: bool = False
) -> Table:
    """The lines as a rich table.

    Args:
        lines: From `Watcher`.
        width: Columns of the terminal; arms' names are shortened to fit.
        limit: Most rows: running runs come first, then failed ones, then the last to end.
        full: Show the arms' whole names.
        ids: Show the runs' ids and disk use.
    """
    lines = [line for line in lines if line.state != LATER]
    shown = lines if limit is None else _most_urgent(lines, limit)
    arms: dict[str, list[str]] = {}
    for line in lines:
        arms.setdefault(line.study, []).append(line.arm)
    short_names = {study: without_shared(names) for study, names in arms.items()}
    are_strata = len({study.partition("@")[0] for study in arms}) == 1
    place = "stratum" if are_strata else "study"
    heads = ("arm", "id", place, "seed", "state", "step", "val loss", "delta", "age", "left", "job", "disk")
    rows = []
    for line in shown:
        stratum = line.study.partition("@")[2]
        row = [
            line.arm if full else short_names[line.study][line.arm],
            line.id,
            stratum if are_strata else line.study,
            _text(line.seed, "d"),
            line.state,
            line.steps_text,
            _text(line.loss, ".4f"),
            _text(line.against_baseline, "+.4f"),
            duration(line.age_seconds),
            duration(line.left_seconds),
            line.job,
            size_text(line.bytes()) if ids and line.path else "",
        ]
        rows.append(row)
    used = [head == "arm" or any(cells) for head, *cells in zip(heads, *rows, strict=True)]
    used[heads.index("id")] = ids
    if len(arms) < 2:
        used[heads.index(place)] = False
    rows = [[*compress(row, used)] for row in rows]
    left = ("id", place, "state", "job")
    leave = ("job", "disk", "age", "left", "step")
    return grid([*compress(heads, used)], rows, width, left, coloured=("state", COLOURS), leave=leave)


def _text(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)


def _most_urgent(lines: list[Line], limit: int) -> list[Line]:
    """The lines to show of too many, in their order: running runs, then failed ones, then the last to end."""
    ranks = dict.fromkeys(LIVE, 0) | dict.fromkeys(TROUBLED, 1) | {"finished": 2}

    def urgency(place: int) -> tuple[int, float]:
        return ranks.get(lines[place].state, 3), lines[place].age_seconds or 0.0

    most_urgent = sorted(range(len(lines)), key=urgency)[:limit]
    return [lines[place] for place in sorted(most_urgent)]


def troubles(lines: list[Line]) -> list[str]:
    """One text per run that did not succeed: name, state, reason and log."""
    texts = []
    for line in lines:
        if line.state in TROUBLED:
            name = line.arm if line.seed is None else f"{line.arm} s{line.seed}"
            reason = line.reason or "no reason recorded"
            texts.append(f"{name} {line.state}: {reason}  {line.log and nearer(line.log)}")
    return texts


def summary(lines: list[Line]) -> str:
    """`12 finished, 1 failed, 2 running`."""
    counts = Counter(line.state for line in lines)
    order = ["finished", *TROUBLED, "created", "running", "starting", "queued", "waiting", LATER, REPLACED]
    text = ", ".join(f"{counts[state]} {state}" for state in order if counts[state])
    waits = sorted({line.reason for line in lines if line.state == "queued" and line.reason})
    return text.replace(" queued", f" queued ({', '.join(waits)})") if waits else text
