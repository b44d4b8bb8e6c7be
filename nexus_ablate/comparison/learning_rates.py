"""Learning rates: the tuning runs of each arm, its own best rate, and its losses there."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.differences import config_hash
from nexus_ablate.comparison.failures import failure
from nexus_ablate.comparison.load import Excluded, Trained
from nexus_ablate.comparison.terms import Terms
from nexus_ablate.runs.naming import BASELINE

CRITERION = "val_loss"
"""What learning rates are chosen by, whatever the endpoint: a rate for the largest sink rate would answer nothing."""
RATES = 3
"""Rates that claims are run at: the best one of an arm's tuning runs, and a factor of sqrt(2) below and above it."""
FURTHER_RATES = 2
"""Rates that are tried beyond these at the most, while the lowest mean loss is at the outermost."""


def joined(
    arms: list[Arm], left_out: Iterable[Excluded], studies: Mapping[str, Terms]
) -> tuple[list[Arm], list[Excluded]]:
    """The arms of the studies, where one with a learning-rate grid has runs of each arm in a folder per rate.

    Such an arm gets its tuning runs and the runs of the claim by rate; `at_own_rate` says which of these count. Its
    runs without a result get its name.
    """
    names: dict[str, dict[str, str]] = {}  # of a study's arms by the hash of their configuration
    for place, terms in studies.items():
        if terms.study.lr_grid:
            planned = [arm for arm in arms if arm.name in (BASELINE, *terms.arm_names)]
            fixed = {hashes[-1]: name for name, hashes in terms.study.configs.items()}
            # an earlier version fixed none: the runs in the folders of the arms say it
            names[place] = fixed or {config_hash(arm.config, terms.study): arm.name for arm in planned}

    def owner_of(config: dict[str, Any], place: str) -> str | None:
        return names[place].get(config_hash(config, studies[place].study)) if config and place in names else None

    named = []
    for out in left_out:
        owner = owner_of(out.config, out.path.parent.parent.name)
        named.append(out if owner is None else replace(out, arm=owner))
    result: list[Arm] = []
    owned: dict[tuple[str, str], Arm] = {}
    for arm in arms:
        place = min(arm.studies & names.keys(), default="")
        owner = owner_of(arm.config, place)
        if owner is None:
            result.append(arm)
            continue
        tuning_seeds = studies[place].study.tuning_seeds
        whole = owned.setdefault((place, owner), Arm(owner, owner, {}, studies=arm.studies))
        if not whole.rates:
            result.append(whole)
        whole.waiting += [run for run in arm.waiting if run.seed not in tuning_seeds]
        at_rate = whole.rates.setdefault(arm.lr, {})
        for seed, run in arm.runs.items():
            if seed in tuning_seeds:
                whole.tuning.append(run)
            else:
                at_rate[seed] = run
    return result, named


def at_own_rate(arm: Arm, seeds: Collection[int] | None = None) -> Arm:
    """An arm as it is judged at some seeds: at its own best learning rate, by the runs at the rates around that.

    Without a grid it is the arm itself. Where a run failed to train at each rate of the grid, it is judged at the
    study's.

    Args:
        seeds: None: all that it has.
    """
    if not arm.rates:
        return arm
    best = best_lr(arm)
    if best is None:
        at_rate_of_study = [run for run in arm.claim_runs if arm.tuning and run.record.arm == arm.name]
        return replace(arm, runs={run.seed: run for run in at_rate_of_study})

    def at(step: int) -> dict[int, Trained]:
        return arm.rates.get(rate_at(best, step), {})

    def mean(step: int) -> float | None:
        return mean_loss([_loss(at(step)[seed]) if seed in at(step) else None for seed in counted])

    counted = at(-1).keys() & at(0).keys() & at(1).keys()
    if seeds is not None:
        counted.intersection_update(seeds)
    steps = steps_around(mean)
    counted.intersection_update(*map(at, steps))
    means = {step: loss for step in steps if (loss := mean(step)) is not None}
    weights = weights_at_best(means) if means else {0: 1.0}
    vertex = sum(step * weight for step, weight in weights.items())
    runs_at = {}
    for step in weights:
        runs_at[step] = {seed: at(step)[seed] for seed in sorted(counted)}
    return replace(
        arm,
        runs=runs_at[max(weights, key=weights.__getitem__)],
        around=[(weight, runs_at[step]) for step, weight in weights.items()],
        best_rate=float(f"{best * 2 ** (vertex / 2):.2g}"),
    )


def mean_loss(losses: Sequence[float | None]) -> float | None:
    """Of runs: infinite where one failed to train; None where one is missing or there is none."""
    found = [loss for loss in losses if loss is not None]
    return fmean(found) if losses and len(found) == len(losses) else None


def _loss(run: Trained) -> float:
    """Its final validation loss; infinite if it failed to train."""
    loss = math.inf if failure(run.record, run.curves) else run.figure(CRITERION)
    return loss if math.isfinite(loss) else math.inf


def lr_points(runs: Iterable[Trained]) -> dict[float, list[float]]:
    """Learning rate to the final losses of its runs; of one that failed to train infinite."""
    points: dict[float, list[float]] = {}
    for run in runs:
        points.setdefault(run.config["optim"]["lr"], []).append(_loss(run))
    return dict(sorted(points.items()))


def failed_rates(arm: Arm) -> list[float]:
    """The learning rates at which a run failed to train, whatever it ended at."""
    return sorted({run.config["optim"]["lr"] for run in arm.all_runs if failure(run.record, run.curves)})


def best_rate(losses: Mapping[float, Sequence[float]]) -> float | None:
    """The learning rate of the lowest mean loss; None where a run failed to train at each of them.

    Rates at which a run failed to train are no candidates: a verdict would lose the pairs of such runs.

    Args:
        losses: By rate, those of its tuning runs; infinite for a run that failed to train.
    """
    means = {rate: float(np.mean(values)) for rate, values in losses.items() if np.isfinite(values).all()}
    return min(means, key=means.__getitem__, default=None)


def rate_at(best: float, step: int) -> float:
    """The rate so many factors of sqrt(2) above the best one of the tuning runs, to three digits."""
    return float(f"{best * 2 ** (step / 2):.3g}") if step else best


def steps_around(mean: Callable[[int], float | None]) -> list[int]:
    """The rates that an arm is judged at, as steps from the best one of its tuning runs, as far as `mean` knows.

    They are the neighbours on both sides, and, while the lowest mean is that of an outermost rate, up to two more.

    Args:
        mean: From a step to the mean loss of the claim's runs; infinite where one failed to train, None where one is
            missing.
    """
    steps = [-1, 0, 1]
    for _ in range(FURTHER_RATES):
        means = np.array([mean(step) for step in steps], dtype=float)  # None becomes NaN, and so does the lowest
        lowest = means.argmin()
        if not math.isfinite(means[lowest]) or 0 < lowest < len(steps) - 1:
            break
        steps = [steps[0] - 1, *steps] if lowest == 0 else [*steps, steps[-1] + 1]
    return steps


def weights_at_best(means: Mapping[int, float]) -> dict[int, float]:
    """What each rate counts for in the loss at an arm's best one: a parabola through the lowest mean and its sides.

    The best rate is the parabola's lowest point, and each seed's loss there is that of its own parabola: a weighted sum
    of its losses at the three rates. A claim at the tuned rate alone would confirm whatever a few tuning runs mistook.

    Args:
        means: From a step to the mean loss, as `steps_around` reached them.

    Returns:
        From a step to its weight; they add up to 1. The lowest rate alone if it lacks a neighbour at which every run
        trained; the best one of the tuning runs if a run failed to train at each.
    """
    lowest = min(means, key=lambda step: (means[step], abs(step)))
    below, at, above = (means.get(lowest + side, math.inf) for side in (-1, 0, 1))
    curvature = below - 2 * at + above
    if not math.isfinite(curvature) or curvature <= 0:
        return {lowest: 1.0}
    vertex = (below - above) / (2 * curvature)
    return {
        lowest - 1: vertex * (vertex - 1) / 2,
        lowest: 1 - vertex**2,
        lowest + 1: vertex * (vertex + 1) / 2,
    }


def best_lr(arm: Arm) -> float | None:
    """The best rate of an arm's tuning runs."""
    return best_rate(lr_points(arm.tuning))


def beyond_edge(arm: Arm) -> list[float]:
    """Two more rates on the side at which an arm's best one is the outermost of those tried; [] where it is not."""
    best, points = best_lr(arm), lr_points(arm.tuning)
    if best is None or min(points) < best < max(points):
        return []
    factor = 2.0 if best == max(points) else 0.5
    return [best * factor, best * factor**2]


def lr_sensitivity(arm: Arm) -> float | None:
    """Mean over rates of min(loss, loss at the start) minus the best loss (Wortsman et al., arXiv:2309.14322)."""
    losses = [float(np.mean(at_rate)) for at_rate in lr_points(arm.tuning).values()]
    starts = [run.curves.val[0] for run in arm.tuning if len(run.curves.val)]
    if len(losses) < 2 or not starts or not math.isfinite(min(losses)):
        return None
    return float(np.mean(np.minimum(losses, np.mean(starts))) - min(losses))
