"""Diagnostics by layer at the end of training, from the last row of probes.jsonl: one heat map per diagnostic."""

from __future__ import annotations

import re

import numpy as np

from nexus_ablate.comparison.arms import Arm

_BY_BLOCK = re.compile(r"(?P<before>.+)/block_(?P<block>\d{1,5})(?P<after>/.+)?")


def by_layer(arms: list[Arm]) -> dict[str, list[list[float | None]]]:
    """Diagnostic to a list per arm of its mean over seeds in each block (None: not measured)."""
    values: dict[str, list[dict[int, list[float]]]] = {}
    for i, arm in enumerate(arms):
        for run in arm.runs.values():
            for name, value in run.probed.items():
                match = _BY_BLOCK.fullmatch(name)
                if match and isinstance(value, int | float):
                    diagnostic = match["before"] + (match["after"] or "")
                    blocks = values.setdefault(diagnostic, [{} for _ in arms])[i]
                    blocks.setdefault(int(match["block"]), []).append(float(value))
    return {name: [_means(blocks) for blocks in per_arm] for name, per_arm in sorted(values.items())}


def _means(blocks: dict[int, list[float]]) -> list[float | None]:
    depth = max(blocks, default=-1) + 1
    return [float(np.mean(blocks[b])) if b in blocks else None for b in range(depth)]
