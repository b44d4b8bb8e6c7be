"""The arms of a finished study or multirun by their loss: the summary before a comparison, without any verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping

RANKING = ("arm", "runs", "val loss", "delta")


def ranked(losses: Mapping[tuple[str, int], float | None], reference: str = "") -> list[tuple[str, str, str, str]]:
    """One row of `RANKING` per arm, the lowest mean loss first.

    Args:
        losses: Final validation loss by arm and seed.
        reference: The arm that delta is the mean difference to, over the seeds of both. Default: the best arm.
    """
    arms: dict[str, dict[int, float]] = {}
    for (arm, seed), loss in losses.items():
        if loss is not None and math.isfinite(loss):
            arms.setdefault(arm, {})[seed] = loss
    order = sorted(arms, key=lambda arm: _mean(list(arms[arm].values())))
    if not order:
        return []
    base = reference if reference in arms else order[0]
    rows = []
    for arm in order:
        values = arms[arm]
        pairs = [loss - arms[base][seed] for seed, loss in values.items() if seed in arms[base]]
        delta = f"{_mean(pairs):+.4f}" if pairs and arm != base else ""
        rows.append((arm, str(len(values)), f"{_mean(list(values.values())):.4f}", delta))
    return rows


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
