"""Each arm at its own learning rate, in one round: every seed at every rate of the grid, and one parabola.

A parabola in log rate through the lowest mean and its two neighbours gives the arm's best rate; each seed's loss there
is read from its own three losses with the same weights. Choosing the best of the rates by two tuning seeds and
judging there alone gives 32% false words (`docs/error_rates.md`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nexus_ablate.comparison.statistics import Array

CRITERION = "val_loss"
"""What an arm's best rate is chosen by, whatever the endpoint."""


def weights_at_best(losses: Mapping[float, Array]) -> tuple[dict[float, float], str]:
    """What each rate counts for in an arm's values at its best one.

    Args:
        losses: By rate, the final losses (seeds,); NaN without a finite one.

    Returns:
        From a rate to its weight (they add up to 1), and why there is no best rate, with a grid that would hold it; one
        of the two is empty.
    """
    rates = sorted(losses)
    means = [float(losses[rate].mean()) for rate in rates]
    if np.isnan(means).all():
        return {}, "a run failed to train at each rate of the grid"
    lowest = int(np.nanargmin(means))
    if lowest in (0, len(rates) - 1):
        return {}, f"its best rate is {rates[lowest]:g}, the edge of the grid; lr_grid={_wider(rates, lowest)} goes on"
    three = rates[lowest - 1 : lowest + 2]
    table = np.array([losses[rate] for rate in three])
    trained = np.isfinite(table).all(axis=0)
    if not trained.any():
        return {}, f"no run trains at {three[0]:g} or at {three[2]:g} beside its best rate {three[1]:g}"
    x = np.log(three) - np.log(three[1])
    curvature, slope, _ = np.polyfit(x, table[:, trained].mean(axis=1), 2)
    best = float(np.clip(-slope / (2 * curvature), x[0], x[2])) if curvature > 0 else 0.0
    weights = {}
    for place, rate in enumerate(three):
        others = np.delete(x, place)
        weights[rate] = float(np.prod((best - others) / (x[place] - others)))
    return weights, ""


def lowest_mean(losses: Mapping[float, Array]) -> float:
    """The rate whose mean loss is the lowest, among those at which every run has one."""
    means = {rate: float(of_rate.mean()) for rate, of_rate in losses.items()}
    return min(means, key=lambda rate: np.nan_to_num(means[rate], nan=np.inf))


def best_rate(weights: Mapping[float, float]) -> float:
    """The rate whose Lagrange weights these are: the lowest point of the parabola."""
    return float(np.exp(sum(weight * np.log(rate) for rate, weight in weights.items())))


def _wider(rates: list[float], lowest: int) -> str:
    """The grid with three more rates on the side of its edge."""
    factor = rates[1] / rates[0] if lowest == 0 else rates[-1] / rates[-2]
    more = (
        [rates[lowest] * factor**step for step in (1, 2, 3)]
        if lowest
        else [rates[0] / factor**step for step in (3, 2, 1)]
    )
    return ",".join(f"{rate:.3g}" for rate in ([*rates, *more] if lowest else [*more, *rates]))
