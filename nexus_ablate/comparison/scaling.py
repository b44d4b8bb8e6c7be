"""How a difference in loss changes with compute: the strata of a ladder of sizes, read against one scaling law.

The baseline's losses follow L = E + A C^-alpha in training FLOPs C (Hoffmann et al. 2022, arXiv:2203.15556, approach 3,
in one variable). An arm that differs from the baseline by d at compute C reaches its loss as the baseline would with m
times the compute:

    (1 + d C^alpha / A)^(-1 / alpha) = m

m is the compute multiplier: 1.2 is worth 20% more compute. Its intervals hold the noise of the seeds and that of the
fit: both are drawn together, from the runs' own spread with Student's t, and every draw is fitted anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.results import Scaling, Stratum
from nexus_ablate.comparison.statistics import LEVEL, Array, Interval
from nexus_ablate.comparison.verdict import CLAIM_SEEDS, NOT_COMPARABLE, PRELIMINARY

HOLDS, SHRINKS, REVERSES, NEEDS = "HOLDS", "SHRINKS", "REVERSES", "NEEDS RUNG"
FEWEST_SEEDS = 3
FEWEST_BELOW = 3
"""Rungs that a prediction of the next one needs: a law has three parameters."""
SPEED = "tokens_per_second"
ALPHAS = np.geomspace(0.02, 1.5, 120)
DRAWS = 4000


@dataclass(frozen=True)
class Law:
    """L = irreducible + scale C^-alpha, C in units of the ladder's geometric mean; arrays hold one law per draw."""

    irreducible: Array
    scale: Array
    alpha: Array


def over_rungs(tables: Sequence[Stratum]) -> list[Scaling]:
    """The arms of a ladder over its rungs. Arms that lack a fair loss at a seed of a rung are left out.

    Args:
        tables: A comparison for each rung; [] is returned if there are fewer than two rungs or three seeds.
    """
    tables = sorted(tables, key=lambda table: table.terms.study.rung)
    if len(tables) < 2 or not all(table.terms.study.rung for table in tables):
        return []
    by_name = [{arm.name: arm for arm in table.arms} for table in tables]
    bases = [table.arms[0] for table in tables]
    seeds = [list(base.runs) for base in bases]
    losses = {
        name: [
            arms[name].values("val_loss", at) if name in arms else np.array([np.nan])
            for arms, at in zip(by_name, seeds, strict=True)
        ]
        for name in by_name[0]
    }
    names = [
        name
        for name, rungs in losses.items()
        if all(np.isfinite(values).all() for values in rungs) and all(_fair(name, table) for table in tables)
    ]
    compute = [(base.mean("flops_per_token") or 0) * (base.mean("tokens") or 0) for base in bases]
    if min(map(len, seeds)) < FEWEST_SEEDS or names[:1] != [bases[0].name] or len(names) < 2 or not all(compute):
        return []
    stacked = [np.stack([losses[name][r] for name in names]) for r in range(len(tables))]
    labels = [by_name[0][name].label for name in names[1:]]
    results = scaling(labels, compute, stacked)
    if min(map(len, seeds)) < CLAIM_SEEDS:
        results = [replace(one, outcome=f"{PRELIMINARY}{one.outcome}") for one in results]
    return [replace(one, speeds=_speeds(name, by_name)) for one, name in zip(results, names[1:], strict=True)]


def _fair(name: str, table: Stratum) -> bool:
    """Whether an arm is comparable in a rung, and all of its runs trained."""
    row = next(row for row, arm in zip(table.rows, table.arms, strict=True) if arm.name == name)
    return not row.failed and (row.verdict is None or row.verdict.word != NOT_COMPARABLE)


def _speeds(name: str, by_name: Sequence[Mapping[str, Arm]]) -> tuple[float | None, ...]:
    """An arm's tokens per second over the baseline's, the first arm of each rung."""
    pairs = [(arms[name].mean(SPEED), next(iter(arms.values())).mean(SPEED)) for arms in by_name]
    return tuple(own / base if own and base else None for own, base in pairs)


def fit(compute: Array, losses: Array, weights: Array) -> Law:
    """Least squares for the scaling law, by draw.

    Args:
        compute: (R,), relative.
        losses: (N, R) mean losses.
        weights: (R,) inverse variances of the means.

    Returns:
        The law of each draw: the best alpha of `ALPHAS`, with E and A solved for, neither below 0.
    """
    x_AR = compute ** -ALPHAS[:, None]
    total = weights.sum()
    mean_x_A = x_AR @ weights / total
    mean_y_N = losses @ weights / total
    centred_AR = x_AR - mean_x_A[:, None]
    slope_NA = (losses - mean_y_N[:, None]) @ (centred_AR * weights).T / ((centred_AR**2) @ weights)
    free_NA = mean_y_N[:, None] - slope_NA * mean_x_A
    through_zero_NA = losses @ (x_AR * weights).T / ((x_AR**2) @ weights)
    scale_NA = np.maximum(np.where(free_NA > 0, slope_NA, through_zero_NA), 0)
    irreducible_NA = np.where(scale_NA > 0, np.maximum(free_NA, 0), mean_y_N[:, None])
    errors_NA = np.stack(
        [((losses - irreducible_NA[:, [a]] - scale_NA[:, [a]] * x_AR[a]) ** 2) @ weights for a in range(len(ALPHAS))],
        axis=1,
    )
    best_N = errors_NA.argmin(axis=1)
    rows = np.arange(len(losses))
    return Law(irreducible_NA[rows, best_N], scale_NA[rows, best_N], ALPHAS[best_N])


def log_multipliers(law: Law, compute: Array, differences: Array) -> Array:
    """ln m of each draw, arm and rung: (N, K, R) from differences (N, K, R); -inf where no compute is little enough."""
    reducible_N1R = law.scale[:, None, None] * compute ** -law.alpha[:, None, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_NKR = np.maximum(1 + differences / reducible_N1R, 0)
        return -np.log(ratio_NKR) / law.alpha[:, None, None]


def scaling(names: Sequence[str], compute: Sequence[float], losses: Sequence[Array]) -> list[Scaling]:
    """How each arm's compute multiplier changes over the rungs of a ladder.

    Args:
        names: The arms, without the baseline.
        compute: (R,) training FLOPs of the baseline by rung, rising.
        losses: By rung (1 + K, S_r): the final losses of the baseline and of the arms at the seeds that all have.

    Returns:
        By arm. Randomness is seeded: the same runs give the same numbers.
    """
    logs = np.log(np.asarray(compute, dtype=float))
    relative = np.exp(logs - logs.mean())
    means_MR = np.stack([table.mean(axis=1) for table in losses], axis=1)
    draws_NMR = np.stack([_draws(table, np.random.default_rng(i)) for i, table in enumerate(losses)], axis=2)
    weights = 1 / np.array([max(float(table[0].var(ddof=1)) / table.shape[1], 1e-12) for table in losses])
    weights = np.full_like(weights, weights.mean())  # five seeds know their own spread too poorly to weigh by it
    middle = _read(relative, means_MR[None], weights)[0]
    drawn = _read(relative, draws_NMR, weights)
    below = _read(relative[:-1], means_MR[None, :, :-1], weights[:-1])[0] if len(losses) > FEWEST_BELOW else None
    low, high = _simultaneous(middle, drawn)
    trends = _slopes(logs, middle)
    trend_low, trend_high = _simultaneous(trends, _slopes(logs, drawn))
    seeds = min(table.shape[1] for table in losses)
    results = []
    for k, name in enumerate(names):
        cells = [_factor(middle[k, r], low[k, r], high[k, r], seeds) for r in range(len(compute))]
        trend = _factor(trends[k], trend_low[k], trend_high[k], seeds)
        predicted = None if below is None else float(np.exp(_line(logs[:-1], below[k], logs[-1])))
        results.append(Scaling(name, list(compute), cells, trend, predicted, *_outcome(cells, trend)))
    return results


def _factor(middle: float, low: float, high: float, seeds: int) -> Interval:
    return Interval(float(np.exp(middle)), float(np.exp(low)), float(np.exp(high)), seeds)


def _read(compute: Array, losses_NMR: Array, weights: Array) -> Array:
    law = fit(compute, losses_NMR[:, 0], weights)
    return log_multipliers(law, compute, losses_NMR[:, 1:] - losses_NMR[:, :1])


def _draws(table: Array, random: np.random.Generator) -> Array:
    """(DRAWS, M): means of a rung as they could have come out, from the joint spread of its arms over the seeds."""
    seeds = table.shape[1]
    centred = table - table.mean(axis=1, keepdims=True)
    normal = random.standard_normal((DRAWS, seeds)) @ centred.T / np.sqrt((seeds - 1) * seeds)
    chi = random.chisquare(seeds - 1, DRAWS) / (seeds - 1)
    return table.mean(axis=1) + normal / np.sqrt(chi)[:, None]


def _slopes(logs: Array, values: Array) -> Array:
    """The slope of each line over ln C, for ten times the compute: (..., K) from (..., K, R)."""
    centred = logs - logs.mean()
    with np.errstate(invalid="ignore"):
        return values @ centred / (centred**2).sum() * np.log(10)


def _line(logs: Array, values: Array, at: float) -> float:
    centred = logs - logs.mean()
    return float(values.mean() + values @ centred / (centred**2).sum() * (at - logs.mean()))


def _simultaneous(middle: Array, draws: Array) -> tuple[Array, Array]:
    """Bounds that hold all cells in 95% of the draws, each cell's in proportion to its own spread on that side.

    Args:
        middle: Any shape.
        draws: (N, *shape).
    """
    flat = np.where(np.isfinite(draws), draws, -1e6).reshape(len(draws), -1)
    centre = np.median(flat, axis=0)
    below, above = centre - np.quantile(flat, 0.1587, axis=0), np.quantile(flat, 0.8413, axis=0) - centre
    tiny = 1e-12
    distance = np.where(flat < centre, (centre - flat) / (below + tiny), (flat - centre) / (above + tiny))
    factor = float(np.quantile(distance.max(axis=1), 1 - LEVEL))
    low, high = (middle.ravel() - factor * below, middle.ravel() + factor * above)
    return low.reshape(middle.shape), high.reshape(middle.shape)


def _outcome(cells: list[Interval], trend: Interval) -> tuple[str, str]:
    """The word, and the reason."""
    assert trend.low is not None and trend.high is not None
    signs = [_sign(cell) for cell in cells]
    top, bottom = signs[-1], next((sign for sign in signs if sign), 0)
    if bottom and top and bottom != top:
        return REVERSES, "the smallest and the largest rung that differ do so in opposite directions"
    shrinking = bottom and (trend.high < 1 if bottom > 0 else trend.low > 1)
    if shrinking:
        return SHRINKS, "the multiplier moves towards 1 as compute grows"
    if top:
        return HOLDS, "the largest rung differs, and the multiplier does not move towards 1"
    rung = f"{NEEDS} {len(cells) + 1}"
    if bottom:
        return rung, "a smaller rung differs, and the largest does not decide"
    return rung, "no rung differs from the baseline"


def _sign(cell: Interval) -> int:
    assert cell.low is not None and cell.high is not None
    return 1 if cell.low > 1 else -1 if cell.high < 1 else 0
