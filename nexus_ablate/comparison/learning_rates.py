"""Learning rates: the tuning runs of each arm, its best rate, and the difference at the shared rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.differences import science_key
from nexus_ablate.comparison.endpoint import Endpoint
from nexus_ablate.comparison.failures import failure
from nexus_ablate.comparison.statistics import Interval, mean_interval
from nexus_ablate.errors import ConfigError
from nexus_ablate.study.schema import Study

CRITERION = "val_loss"
"""What learning rates are chosen by, whatever the endpoint: a rate for the largest sink rate would answer nothing."""


def attach(baseline: Arm, others: list[Arm], study: Study) -> list[Arm]:
    """Move tuning runs, and copies of an arm at its own best learning rate, to the arm that they belong to.

    The arm of the table is the one at the learning rate that the study gives it; the rest of its grid differs from it
    in nothing but the rate.
    """
    everyone = [baseline, *others]
    planned = {arm.name for arm in study.arms}
    keys = {id(arm): science_key(arm.config, without=("optim.lr",)) for arm in everyone}
    owners: dict[str, Arm] = {}
    for arm in everyone:
        if arm is baseline or arm.name in planned or arm.lr == baseline.lr:
            owners.setdefault(keys[id(arm)], arm)
    only_tuning = set(study.tuning_seeds) - set(study.seeds)
    kept = []
    for arm in everyone:
        owner = owners.get(keys[id(arm)], arm)
        owner.tuning += [run for seed, run in arm.runs.items() if seed in study.tuning_seeds]
        arm.runs = {seed: run for seed, run in arm.runs.items() if seed not in only_tuning}
    for arm in others:
        owner = owners.get(keys[id(arm)], arm)
        if arm is owner or arm.name in planned:
            kept.append(arm)
        elif arm.runs and arm.lr == best_lr(owner)[0]:
            owner.tuned = arm
        elif arm.runs:
            kept.append(arm)
    return kept


def lr_points(arm: Arm) -> dict[float, list[float]]:
    """Learning rate to the final losses of its tuning runs; a diverged one is infinite."""
    points: dict[float, list[float]] = {}
    for run in arm.tuning:
        loss = run.figure(CRITERION) if run.record.state == "finished" else float("nan")
        points.setdefault(run.config["optim"]["lr"], []).append(loss if np.isfinite(loss) else float("inf"))
    return dict(sorted(points.items()))


def failed_rates(arm: Arm) -> list[float]:
    """The learning rates at which a tuning run failed to train, whatever it ended at."""
    return sorted({run.config["optim"]["lr"] for run in arm.tuning if failure(run.record, run.curves)})


def best_rate(losses: Mapping[float, Sequence[float]]) -> float | None:
    """The learning rate of the lowest mean loss; None where a run failed to train at each of them.

    Rates at which a run failed to train are no candidates: a verdict would lose the pairs of such runs.

    Args:
        losses: By rate, those of its tuning runs; infinite for a run that failed to train.
    """
    means = {rate: float(np.mean(values)) for rate, values in losses.items()}
    best = min(means, key=lambda rate: means[rate], default=None)
    return best if best is not None and np.isfinite(means[best]) else None


def best_lr(arm: Arm) -> tuple[float | None, bool]:
    """The best rate of an arm's tuning runs, and whether it lies at the edge of those tried."""
    points, failed = lr_points(arm), failed_rates(arm)
    best = best_rate({rate: [float("inf")] if rate in failed else losses for rate, losses in points.items()})
    return best, best is not None and best in (min(points), max(points))


def lr_sensitivity(arm: Arm) -> float | None:
    """Mean over rates of min(loss, loss at the start) minus the best loss (Wortsman et al., arXiv:2309.14322)."""
    points = {lr: float(np.mean(losses)) for lr, losses in lr_points(arm).items()}
    starts = [run.curves.val[0] for run in arm.tuning if len(run.curves.val)]
    if len(points) < 2 or not starts or not np.isfinite(min(points.values())):
        return None
    return float(np.mean(np.minimum(list(points.values()), np.mean(starts))) - min(points.values()))


def at_own_rates(arms: list[Arm]) -> list[Arm]:
    """The arms as they are judged: each at its own best learning rate, `shared` being what it is at the study's.

    If no rate of an arm trained, the arm is judged at the study's rate. If its runs at the best rate are missing, it
    has no runs.

    Raises:
        ConfigError: The baseline is such an arm.
    """
    judged = []
    for arm in arms:
        best = best_lr(arm)[0]
        if best is None or best == arm.lr:
            judged.append(arm)
            continue
        own = arm.tuned or Arm(arm.name, arm.label, {})
        judged.append(replace(own, name=arm.name, label=arm.label, tuning=arm.tuning, tuned=None, shared=arm))
    if not judged[0].runs:
        fix = "run the study's command again: it trains every arm at its best learning rate"
        raise ConfigError("the baseline has no result at its own best learning rate", judged[0].label, fix)
    return judged


def shared_difference(arm: Arm, baseline: Arm, endpoint: Endpoint) -> Interval | None:
    """The paired difference at the study's learning rate; None where both are judged there."""
    if arm.shared is None and baseline.shared is None:
        return None
    one, other = arm.shared or arm, baseline.shared or baseline
    seeds = sorted(one.runs.keys() & other.runs.keys())
    return mean_interval(one.on_scale(endpoint, seeds) - other.on_scale(endpoint, seeds))
