"""Runs as a reader finds them."""

from __future__ import annotations

from pathlib import Path

from nexus_ablate.runs import RunRecord, read_run


def load_run(path: str | Path) -> RunRecord:
    """One run: its status, configuration, summary, and `metrics()` and `probes()` row by row.

    Raises:
        UserError: It is no run, or a file of it is damaged.
    """
    return read_run(Path(path))


def series(rows: list[dict], name: str, x: str = "tokens") -> tuple[list[float], list[float]]:
    """The values of one metric where it was measured, with their x."""
    found = [(row[x], row[name]) for row in rows if row.get(name) is not None]
    return [a for a, _ in found], [b for _, b in found]
