"""What a difference in loss is worth: at which multiple of its tokens the baseline would end where the arm does.

L(c) is the baseline's mean loss at half, once and twice its tokens, linear in log c between them. Each of those runs
ends its own schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.statistics import Array, Effect
from nexus_ablate.study.study import WORTH_ARMS


@dataclass(frozen=True)
class Worth:
    """A multiple of the baseline's tokens with its interval. An end beyond the budgets trained is a bound.

    Attributes:
        at: Of the arm's mean difference; inf above the largest budget, 0 below the smallest.
        low, high: Of the ends of its interval; likewise.
        per_flop, per_second: `at` times what the baseline costs over what the arm costs, over the whole run; None where
            that is not known: for seconds on unlike machines, and beyond the budgets.
    """

    at: float
    low: float
    high: float
    per_flop: float | None = None
    per_second: float | None = None

    def __str__(self) -> str:
        if self.at in (0.0, math.inf):
            return multiple(self.at)
        return f"{multiple(self.at)} ({_end(self.low)} to {_end(self.high)})"


def multiple(value: float) -> str:
    """A multiple of compute as text: `1.12x`, `above 2x`, `below 0.5x`."""
    if math.isinf(value):
        return f"above {max(WORTH_ARMS.values()):g}x"
    return f"{value:.2f}x" if value else f"below {min(WORTH_ARMS.values()):g}x"


def _end(value: float) -> str:
    """An end of the interval: `1.04`, `>2`, `<0.5`."""
    if math.isinf(value):
        return f">{max(WORTH_ARMS.values()):g}"
    return f"{value:.2f}" if value else f"<{min(WORTH_ARMS.values()):g}"


@dataclass(frozen=True)
class LossByCompute:
    """L(c): the baseline's mean losses at some multiples of its tokens, which fall."""

    multiples: Array
    losses: Array

    def multiple_of(self, loss: float) -> float:
        """The multiple at which the baseline would end at this loss; inf or 0 outside the budgets."""
        if loss < self.losses[-1]:
            return math.inf
        if loss > self.losses[0]:
            return 0.0
        return float(np.exp(np.interp(-loss, -self.losses, np.log(self.multiples))))

    def margin(self, share: float) -> float:
        """The difference in loss that this share of compute makes, on the smaller side."""
        at = np.interp(np.log([1 - share, 1, 1 + share]), np.log(self.multiples), self.losses)
        return float(min(at[0] - at[1], at[1] - at[2]))


def loss_by_compute(baseline: Arm, budgets: Iterable[Arm], seeds: list[int]) -> LossByCompute | None:
    """L(c); None until all its runs have a finite loss, or where more compute does not lower the loss.

    Args:
        budgets: The arms of `WORTH_ARMS`.
    """
    points = {1.0: baseline.values("val_loss", seeds)}
    for arm in budgets:
        points[WORTH_ARMS[arm.name]] = arm.values("val_loss", seeds)
    multiples = np.array(sorted(points))
    losses = np.array([points[multiple].mean() for multiple in multiples])
    if len(points) < 1 + len(WORTH_ARMS) or not np.isfinite(losses).all() or (np.diff(losses) >= 0).any():
        return None
    return LossByCompute(multiples, losses)


def worth_of(effect: Effect, arm: Arm, baseline: Arm, curve: LossByCompute, same_machine: bool) -> Worth:
    """What an arm's difference in validation loss is worth."""
    base_loss = float(np.interp(0.0, np.log(curve.multiples), curve.losses))
    # a higher loss is worth less compute, so the ends of the interval change places
    at, low, high = (curve.multiple_of(base_loss + end) for end in (effect.delta, effect.high, effect.low))
    per_flop = _ratio(_flops(baseline), _flops(arm))
    per_second = _ratio(baseline.mean("seconds"), arm.mean("seconds")) if same_machine else None
    if at in (0.0, math.inf):
        return Worth(at, low, high)
    return Worth(at, low, high, per_flop and at * per_flop, per_second and at * per_second)


def _flops(arm: Arm) -> float | None:
    """Of a whole run."""
    per_token, tokens = arm.mean("flops_per_token"), arm.mean("tokens")
    return per_token * tokens if per_token and tokens else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None
