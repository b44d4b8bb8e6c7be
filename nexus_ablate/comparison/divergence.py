"""Runs that came to grief: when a loss is no result but a failure of the arm."""

from __future__ import annotations

import numpy as np

from nexus_ablate.comparison.load import Trained

STALLED = 0.02
"""A run that ends within this of the unigram model's bits per byte has learned no more than letter frequencies."""


def divergence(run: Trained) -> str:
    """How a run came to grief, or ''.

    non-finite: the loss or a gradient; exploded: it ended above its first loss, or spent 5% of its rows a nat above its
    best so far; stalled: it ended within 2% of a unigram model.
    """
    val, train = run.curves.val, run.curves.train
    if run.record.state == "diverged" or np.isnan(val[-1:]).any():
        return "non-finite"
    if len(val) > 1 and val[-1] > val[0]:
        return "exploded"
    if len(train) and (train > np.minimum.accumulate(train) + 1).mean() >= 0.05:
        return "exploded"
    bpb, unigram = run.figures.get("val_bpb"), run.figures.get("unigram_bpb")
    return "stalled" if bpb and unigram and bpb >= (1 - STALLED) * unigram else ""


def diverged_seeds(runs: dict[int, Trained], baseline: dict[int, Trained]) -> dict[int, str]:
    """The seeds at which an arm came to grief, and how. Stalling counts only where the baseline did not stall."""
    found = {seed: divergence(run) for seed, run in runs.items()}
    for seed, how in found.items():
        twin = baseline.get(seed)
        if how == "stalled" and (runs is baseline or (twin is not None and divergence(twin) == "stalled")):
            found[seed] = ""
    return {seed: how for seed, how in found.items() if how}


def rising(run: Trained) -> bool:
    """Slow divergence: over its last tenth the training loss rises, the slope's 95% interval above 0."""
    tail = run.curves.train[-max(len(run.curves.train) // 10, 1) :]
    tail = tail[np.isfinite(tail)]
    if len(tail) < 10:
        return False
    x = np.arange(len(tail)) - (len(tail) - 1) / 2
    slope = float(x @ tail / (x @ x))
    residual = tail - tail.mean() - slope * x
    error = np.sqrt(float(residual @ residual) / (len(tail) - 2) / float(x @ x))
    return slope > 1.96 * error > 0
