"""Diagnostics by layer at the end of training, from the last row of probes.jsonl: one heat map a diagnostic."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.runs import open_regular
from nexus_ablate.runs.record import strict_loads

_BY_BLOCK = re.compile(r"(?P<before>.+)/block_(?P<block>\d+)(?P<after>/.+)?")
TAIL_BYTES = 1 << 18


def last_row(path: Path) -> dict:
    """The last whole row of a log; empty where there is none that can be read."""
    try:
        with open(open_regular(path), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - TAIL_BYTES, 0))
            lines = file.read().split(b"\n")[:-1]
        row = strict_loads(lines[-1].decode()) if lines else {}
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}


def by_layer(arms: list[Arm]) -> dict[str, list[list[float | None]]]:
    """Diagnostic to a list per arm of its mean over seeds in each block (None: not measured)."""
    found: dict[str, list[dict[int, list[float]]]] = {}
    for i, arm in enumerate(arms):
        for run in arm.runs.values():
            for name, value in last_row(run.record.path / "probes.jsonl").items():
                match = _BY_BLOCK.fullmatch(name)
                if match and isinstance(value, int | float):
                    diagnostic = match["before"] + (match["after"] or "")
                    blocks = found.setdefault(diagnostic, [{} for _ in arms])[i]
                    blocks.setdefault(int(match["block"]), []).append(float(value))
    return {name: [_means(blocks) for blocks in per_arm] for name, per_arm in sorted(found.items())}


def _means(blocks: dict[int, list[float]]) -> list[float | None]:
    depth = max(blocks, default=-1) + 1
    return [float(np.mean(blocks[b])) if b in blocks else None for b in range(depth)]
