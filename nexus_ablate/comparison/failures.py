"""Runs that failed to train: when a loss is not a result but a failure of the arm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.curves import Curves
from nexus_ablate.comparison.load import Trained
from nexus_ablate.comparison.statistics import Array
from nexus_ablate.measure.regime import has_learned
from nexus_ablate.runs import RunRecord
from nexus_ablate.study.endpoint import Endpoint

STALLED = 0.02
"""Relative. At a unigram model's bits per byte a run has learned no more than how frequent each token is."""


def failed_seeds(runs: dict[int, Trained], baseline: dict[int, Trained]) -> dict[int, str]:
    """The seeds at which an arm failed to train, and how.

    Stalling is judged by what the budget allows: only where the baseline of that seed trained.
    """
    failed = {}
    for seed, run in runs.items():
        how = failure(run.record, run.curves)
        base_run = baseline.get(seed)
        if not how and stalled(run) and base_run is not None and not stalled(base_run):
            how = "" if failure(base_run.record, base_run.curves) else "stalled"
        if how:
            failed[seed] = how
    return failed


def failure(record: RunRecord, curves: Curves) -> str:
    """How a run failed to train whatever the others did, or ''.

    non-finite: the loss or a gradient. exploded: it ended above its first loss, or its training loss (a mean over 2%
    of the rows) was for 5% of them a nat above its best so far.
    """
    val, train = curves.val, curves.train
    if record.state == "failed":  # only a table made elsewhere has such a run
        return "as its source says"
    if record.state == "diverged" or np.isnan(val[-1:]).any():
        return "non-finite"
    if len(val) > 1 and val[-1] > val[0]:
        return "exploded"
    window = max(len(train) // 50, 1)
    smooth = np.convolve(train, np.full(window, 1 / window), "valid") if len(train) else train
    if len(smooth) and (smooth > np.minimum.accumulate(smooth) + 1).mean() >= 0.05:
        return "exploded"
    return ""


def uninformed_loss(arms: Sequence[Arm], endpoint: Endpoint) -> float:
    """The unigram entropy in the endpoint's unit; NaN for other endpoints, or where no run recorded it."""
    if endpoint.name not in ("val_loss", "val_bpb"):
        return math.nan
    for arm in arms:
        for run in arm.runs.values():
            unigram, bits = run.figures.get("unigram_bpb", math.nan), run.figures.get("val_bpb", math.nan)
            if endpoint.name == "val_loss" and bits:
                unigram *= run.figures.get("val_loss", math.nan) / bits
            if math.isfinite(unigram):
                return unigram
    return math.nan


def baseline_has_learned(baseline: Arm) -> bool | None:
    """Whether the baseline's runs learned more than how frequent each token is; None where nothing says it."""
    unigram = uninformed_loss([baseline], Endpoint("val_bpb"))
    if not baseline.runs or not math.isfinite(unigram):
        return None
    return has_learned([baseline.value(seed, "val_bpb") for seed in baseline.runs], unigram)


def stalled(run: Trained) -> bool:
    """Ended within 2% of a unigram model, the training loss over the last half not falling (95% interval)."""
    bpb, unigram = run.figures.get("val_bpb"), run.figures.get("unigram_bpb")
    if not bpb or not unigram or bpb < (1 - STALLED) * unigram:
        return False
    slope, error = _slope(run.curves.train[len(run.curves.train) // 2 :])
    return slope > -1.96 * error


def rising(run: Trained) -> bool:
    """Slow divergence: over its last tenth the training loss rises, the slope's 95% interval above 0."""
    slope, error = _slope(run.curves.train[-max(len(run.curves.train) // 10, 1) :])
    return slope > 1.96 * error > 0


def _slope(losses: Array) -> tuple[float, float]:
    """The slope of a line through logged losses and its standard error; NaN below ten of them."""
    losses = losses[np.isfinite(losses)]
    if len(losses) < 10:
        return math.nan, math.nan
    x = np.arange(len(losses)) - (len(losses) - 1) / 2
    slope = float(x @ losses / (x @ x))
    residual = losses - losses.mean() - slope * x
    return slope, float(np.sqrt(float(residual @ residual) / (len(losses) - 2) / float(x @ x)))
