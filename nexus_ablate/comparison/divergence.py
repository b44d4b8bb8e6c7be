"""Runs that came to grief: when a loss is no result but a failure of the arm."""

from __future__ import annotations

import numpy as np

from nexus_ablate.comparison.load import Trained

STALLED = 0.02
"""Relative. At a unigram model's bits per byte a run has learned no more than how frequent each token is."""


def divergence(run: Trained) -> str:
    """How a run came to grief, or ''.

    non-finite: the loss or a gradient. exploded: it ended above its first loss, or its training loss (a mean over 2%
    of the rows) was for 5% of them a nat above its best so far. stalled: it ended within 2% of a unigram model and not
    2% below where it stood halfway; a run that is merely slow is still falling there.
    """
    val, train = run.curves.val, run.curves.train
    if run.record.state == "diverged" or np.isnan(val[-1:]).any():
        return "non-finite"
    if len(val) > 1 and val[-1] > val[0]:
        return "exploded"
    window = max(len(train) // 50, 1)
    smooth = np.convolve(train, np.full(window, 1 / window), "valid") if len(train) else train
    if len(smooth) and (smooth > np.minimum.accumulate(smooth) + 1).mean() >= 0.05:
        return "exploded"
    bpb, unigram = run.figures.get("val_bpb"), run.figures.get("unigram_bpb")
    as_unigram = bool(bpb and unigram and bpb >= (1 - STALLED) * unigram)
    falling = len(val) > 1 and val[-1] < (1 - STALLED) * run.curves.at("tokens", run.curves.tokens[-1] / 2)
    return "stalled" if as_unigram and not falling else ""


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
