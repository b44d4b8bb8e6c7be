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
"""Chance of any false word in a table without effects: of DIFFERENCES and FAILURES together."""
DIFFERENCES, FAILURES = 0.04, 0.01
"""Its parts for words about differences, and about counts of runs that failed to train."""
POWER = 0.80

Array = NDArray[np.float64]


def sidak(level: float, comparisons: float) -> float:
    """The level of each of some comparisons that together hold `level`."""
    return -math.expm1(math.log1p(-level) / max(comparisons, 1))


# ------------------------------------------------------------------------------------------------------- intervals


@dataclass(frozen=True)
class Interval:
    """A mean over pairs with its own 95% interval, not adjusted for other arms; no interval below two pairs."""

    mean: float
    low: float | None
    high: float | None
    n: int


def mean_interval(values: Array, level: float = LEVEL) -> Interval | None:
    """Student's interval of the finite values' mean; None without any."""
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    mean = float(values.mean())
    if len(values) < 2:
        return Interval(mean, None, None, 1)
    half = half_width(float(values.std(ddof=1)), len(values), level)
    return Interval(mean, mean - half, mean + half, len(values))


def interaction(both: Array, one: Array, other: Array, baseline: Array, family: int) -> Interval | None:
    """How far two changes together differ from the sum of each: both - one - other + baseline, by seed.

    The interval is Bonferroni's for `family` interactions.
    """
    return mean_interval(both - one - other + baseline, LEVEL / family)


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


def correlation(a: Array, b: Array) -> float | None:
    """Pearson's r; None below three values or without variation."""
    if len(a) < 3 or not a.std() or not b.std():
        return None
    return float(np.corrcoef(a, b)[0, 1])


@cache
def failure_p(failed: int, of: int, baseline_failed: int, baseline_of: int) -> float:
    """Barnard's exact test (1945), two-sided, of an arm's failures to train against the baseline's."""
    from scipy.stats import barnard_exact

    counts = [[failed, baseline_failed], [of - failed, baseline_of - baseline_failed]]
    if not of or not baseline_of or sum(counts[0]) in (0, of + baseline_of):
        return 1.0
    return float(barnard_exact(counts).pvalue)  # type: ignore[union-attr]


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


def half_width(spread: float, n: int, level: float) -> float:
    """Half of the interval's width that n pairs give, whose differences have this standard deviation."""
    return t_quantile(1 - level / 2, n - 1) * spread / math.sqrt(n)


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


@cache
def fewest_failures(n: int, level: float) -> int | None:
    """The fewest failures among n runs that Barnard's test tells from none among n at a level; None: not even all."""
    return next((failed for failed in range(1, n + 1) if failure_p(failed, n, 0, n) < level), None)
