"""Intervals, tests and the planning of seeds. Pure functions of arrays: no files, no randomness.

Seed s gives every arm the same initial values, data order and dropout, so the seed's part cancels in an arm's
difference to the baseline. Each arm is judged by its own differences alone (the paired t-test), so that no arm's noise
passes for another's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.05
"""Chance of any false word about a difference in everything that is printed."""
POWER = 0.80
FEWEST_BLOCKS = 16
"""Of evaluation text, below which its part of the error is too uncertain to be counted."""

Array = NDArray[np.float64]


def sidak(level: float, comparisons: float) -> float:
    """The level of each of some comparisons that together hold `level`."""
    return -math.expm1(math.log1p(-level) / max(comparisons, 1))


# ------------------------------------------------------------------------------------------------------- the two tests


@dataclass(frozen=True)
class Effect:
    """An arm against the baseline on one endpoint.

    Attributes:
        n: Pairs; of unpaired runs, the smaller number of the two.
        delta: Mean difference, arm minus baseline.
        se: Standard error of delta, over text too where that is counted.
        df: Degrees of freedom of `se`.
        level: Chance that the interval misses the true difference.
        low, high: The interval, the one that decides.
        p: Of the t-test of this cell alone.
        spread: Standard deviation of a pair's difference over seeds.
        text_se: The standard error over evaluation text alone; None where it is not part of `se`.
    """

    n: int
    delta: float
    se: float
    df: float
    level: float
    low: float
    high: float
    p: float
    spread: float
    text_se: float | None = None

    @property
    def seed_se(self) -> float:
        """The standard error over seeds alone."""
        return self.spread / math.sqrt(self.n)

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def within(self, margin: float) -> bool:
        """Whether the whole interval lies inside +-margin."""
        return -margin < self.low and self.high < margin

    @property
    def detectable(self) -> float:
        """The smallest true difference that this comparison would have shown with 80% power."""
        return noncentrality(t_quantile(1 - self.level / 2, self.df), self.df) * self.se


def paired_effect(
    differences: Array, level: float, step: float = 0.0, by_block: Array | None = None, shares: Array | None = None
) -> Effect | None:
    """The paired t-test; None for fewer than two pairs.

    Args:
        differences: (n,) arm minus baseline by seed.
        level: Of this cell.
        step: To which the values were rounded: they are no less noisy than rounding made them, step^2 / 12.
        by_block: (n, blocks) the same by block of evaluation text; None where that is not known.
        shares: (blocks,) of the text in each block.
    """
    n = len(differences)
    if n < 2:
        return None
    spread = max(float(differences.std(ddof=1)), step / math.sqrt(6))
    se, df, text_se = spread / math.sqrt(n), n - 1.0, None
    if by_block is not None and shares is not None and len(shares) >= FEWEST_BLOCKS:
        se, df, text_se = seeds_and_text(by_block, shares)
    return _effect(n, float(differences.mean()), se, df, level, spread, text_se)


def welch_effect(arm: Array, baseline: Array, level: float, step: float = 0.0) -> Effect | None:
    """Welch's t-test of runs that share no seeds; None for fewer than two runs of either."""
    n = min(len(arm), len(baseline))
    if n < 2:
        return None
    se, df = welch(arm, baseline, floor=step**2 / 12)
    return _effect(n, float(arm.mean() - baseline.mean()), se, df, level, se * math.sqrt(n), None)


def _effect(n: int, delta: float, se: float, df: float, level: float, spread: float, text_se: float | None) -> Effect:
    half = t_quantile(1 - level / 2, df) * se
    p = t_tail(delta / se, df) if se else float(delta == 0)
    return Effect(n, delta, se, df, level, delta - half, delta + half, p, spread, text_se)


def welch(arm: Array, baseline: Array, floor: float = 0.0) -> tuple[float, float]:
    """Standard error of the difference of two means of runs that share no seeds, and its degrees of freedom.

    Welch's t-test (1947). His degrees of freedom claim up to 5.4% at five runs and unlike noise; one fewer holds 5%.
    Where arm and baseline have unlike numbers of runs, they are those of the smaller number, which never claim too much
    (Mickey and Brown, 1966).

    Args:
        arm, baseline: Two or more values each.
        floor: The least variance of a value, as rounding leaves it.
    """
    variance, base_variance = (max(float(runs.var(ddof=1)), floor) / len(runs) for runs in (arm, baseline))
    total = variance + base_variance
    fewest = min(len(arm), len(baseline)) - 1
    if not total or len(arm) != len(baseline):
        return math.sqrt(total), fewest
    df = total**2 / (variance**2 / fewest + base_variance**2 / fewest)
    return math.sqrt(total), max(df - 1, fewest)


def seeds_and_text(differences: Array, shares: Array) -> tuple[float, float, float]:
    """Error of a mean paired difference over seeds and over blocks of evaluation text at once.

    Seeds are crossed with blocks: V = s2_seed / n + s2_block / B - s2_residual / (n B), never below the larger of the
    first two, with Satterthwaite's degrees of freedom.

    Args:
        differences: (n, B) arm minus baseline, by seed and block of text; two or more of each.
        shares: (B,) of the text in each block; they add up to 1.

    Returns:
        The standard error, its degrees of freedom, and the standard error over text alone.
    """
    n, blocks = differences.shape
    by_seed, by_block = differences @ shares, differences.mean(0)
    mean = float(by_seed.mean())
    over_seeds = float(by_seed.var(ddof=1)) / n
    over_text = float(((shares * (by_block - mean)) ** 2).sum()) * blocks / (blocks - 1)
    residual = differences - by_seed[:, None] - by_block + mean
    both = float((residual**2).sum()) / ((n - 1) * (blocks - 1)) / (n * blocks)
    variance = max(over_seeds + over_text - both, over_seeds, over_text)
    parts = over_seeds**2 / (n - 1) + over_text**2 / (blocks - 1)
    df = variance**2 / parts if parts else n - 1
    return math.sqrt(variance), df, math.sqrt(over_text)


# --------------------------------------------------------------------------------------------------- distributions


@cache
def t_quantile(probability: float, df: float) -> float:
    """The quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(df, probability))


def t_tail(t: float, df: float) -> float:
    """P(|T| > t)."""
    from scipy.special import stdtr

    return float(2 * stdtr(df, -abs(t)))


def upper_bound(spread: float, df: float) -> float:
    """The one-sided upper 80% bound of a standard deviation that was estimated with `df` degrees of freedom."""
    from scipy.special import chdtri

    return spread * math.sqrt(df / float(chdtri(df, POWER)))


@cache
def noncentrality(critical: float, df: float, power: float = POWER) -> float:
    """How many standard errors a true difference must have to exceed `critical` with this power."""
    from scipy.optimize import brentq
    from scipy.special import nctdtr

    def excess(shift: float) -> float:
        return 1 - float(nctdtr(df, shift, critical)) - power

    return float(brentq(excess, 0.0, critical * 3 + 10, xtol=1e-10))  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- planning seeds


def detectable_difference(spread: float, n: int, level: float, power: float = POWER, text_se: float = 0.0) -> float:
    """The smallest true difference that n pairs show with this power.

    Args:
        spread: Standard deviation of a pair's difference.
        text_se: Standard error over evaluation text, which no further seed makes smaller.
    """
    errors = noncentrality(t_quantile(1 - level / 2, n - 1), n - 1, power)
    return errors * math.hypot(spread / math.sqrt(n), text_se)


@cache
def seeds_needed(delta: float, spread: float, level: float, power: float = POWER, text_se: float = 0.0) -> int | None:
    """Pairs after which a true difference `delta` is shown with this power; None beyond 1000.

    Args:
        spread, text_se: As for `detectable_difference`.
    """
    if delta <= 0:
        return None
    counts = range(2, 1001)
    place = bisect_left(counts, True, key=lambda n: detectable_difference(spread, n, level, power, text_se) <= delta)
    return counts[place] if place < len(counts) else None
