"""Intervals and tests over a table of arms x seeds. Pure functions of arrays: no files, no randomness.

The model: loss = arm + seed + residual. Seed s gives every arm the same initial values, data order and dropout, so that
the seed's part cancels in the difference to the baseline. What is left, the residual standard deviation s, is pooled
over the arms, but no arm is judged by less than its own: s = max(pooled, own). All arms are tested at once (Dunnett
1955: max |t| over k correlated comparisons). One arm alone is the paired t-test.

Arms are not equally noisy. One that is noisier than the others (F-test at NOISY) is judged by its own degrees of
freedom too, and one that is far noisier (at ERRATIC) does not enter the pool, where it would hide all other effects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.05
"""Chance that a family of arms without any effect shows a difference."""
POWER = 0.80
NOISY = 0.01
ERRATIC = 0.00001
"""Divided by the number of arms. Both chosen by simulation (8 arms, 5 seeds): false claims stay at 5% whether one arm
is 1, 3, 5 or 10 times as noisy as the rest, and beside an arm 10 times as noisy the others are still found (81% at 2
seed deviations, 89% without it); with every arm in the pool they would be lost (5%)."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Effect:
    """One arm against the baseline, over the seeds that both have.

    Attributes:
        n: Pairs.
        delta: Mean paired difference, arm minus baseline.
        spread: s, the residual standard deviation of one run by which the arm is judged.
        se: s sqrt(2 / n), the standard error of delta.
        df: Degrees of freedom of s.
        critical: Quantile of max |t| over the family.
        p: Adjusted for the family.
        low, high: Simultaneous 95% interval.
        narrow: Half width of the arm's own 90% interval, for the equivalence test.
        wins: Seeds in which the arm was lower.
        rho: Correlation of arm and baseline over the seeds; None below 3 pairs or without variation.
        noisy: Noisier than the other arms, and judged by its own degrees of freedom.
    """

    n: int
    delta: float
    spread: float
    se: float
    df: int
    critical: float
    p: float
    low: float
    high: float
    narrow: float
    wins: int
    rho: float | None
    noisy: bool

    def equivalent(self, delta_min: float) -> bool:
        """Two one-sided tests at 5%: the 90% interval lies inside +-delta_min."""
        return abs(self.delta) + self.narrow < delta_min

    @property
    def detectable(self) -> float:
        """The smallest true difference that this comparison would have shown with 80% power."""
        return noncentrality(self.critical, self.df) * self.se


def effects(losses: Array, level: float = LEVEL) -> list[Effect | None]:
    """Every arm against the first row.

    Args:
        losses: (arms, seeds), the baseline first; NaN where there is no result.
        level: Of the whole family.

    Returns:
        By arm; None for the baseline, for fewer than two pairs, and where every difference is exactly 0.
    """
    differences = losses - losses[0]
    pairs = np.isfinite(differences)
    tested = [a for a in range(1, len(losses)) if pairs[a].sum() >= 2 and np.any(differences[a][pairs[a]] != 0)]
    first: dict[bytes, int] = {}  # copies of an arm are one arm: they say nothing new about the noise
    for a in tested:
        first.setdefault(differences[a].tobytes(), a)
    family = list(first.values())
    k, rho = len(family), common_correlation(pairs[family])
    pool, noisy_arms = _noise(losses, family)
    pooled, pooled_df = residual_variance(losses[[0, *pool]])
    found: list[Effect | None] = [None] * len(losses)
    for a in tested:
        d = differences[a][pairs[a]]
        n, delta, own = len(d), float(d.mean()), float(d.var(ddof=1)) / 2
        noisy = first[differences[a].tobytes()] in noisy_arms
        variance = max(pooled, own) if first[differences[a].tobytes()] in pool else own
        df = n - 1 if noisy else pooled_df
        se = math.sqrt(variance * 2 / n)
        critical = max_t_quantile(level, k, df, rho)
        half, narrow = critical * se, t_quantile(1 - level, df) * se
        found[a] = Effect(
            n=n,
            delta=delta,
            spread=math.sqrt(variance),
            se=se,
            df=df,
            critical=critical,
            p=max_t_tail(abs(delta) / se, k, df, rho) if se else 0.0,
            low=delta - half,
            high=delta + half,
            narrow=narrow,
            wins=int((d < 0).sum()),
            rho=correlation(losses[0][pairs[a]], losses[a][pairs[a]]),
            noisy=noisy,
        )
    return found


def residual_variance(losses: Array) -> tuple[float, int]:
    """Residual variance of the additive fit arm + seed and its degrees of freedom; cells may be missing (NaN)."""
    present = np.isfinite(losses)
    if present.all():
        residual = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
        df = (losses.shape[0] - 1) * (losses.shape[1] - 1)
    else:
        arms, seeds = np.nonzero(present)
        design = np.zeros((len(arms), sum(losses.shape)))
        design[np.arange(len(arms)), arms] = 1
        design[np.arange(len(arms)), losses.shape[0] + seeds] = 1
        values = losses[present] - losses[present].mean()
        fit, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
        residual, df = values - design @ fit, len(values) - int(rank)
    return (float((residual**2).sum()) / df if df else math.nan), df


def _noise(losses: Array, family: list[int]) -> tuple[list[int], set[int]]:
    """The arms whose spreads are pooled, and the arms that are noisier than the others."""
    from scipy.special import fdtrc

    differences = losses - losses[0]
    own = {a: float(np.nanvar(differences[a], ddof=1)) / 2 for a in family}
    df = {a: int(np.isfinite(differences[a]).sum()) - 1 for a in family}

    def p_value(a: int, others: list[int]) -> float:
        variance, others_df = residual_variance(losses[[0, *others]])
        return float(fdtrc(df[a], others_df, own[a] / variance)) if variance else 0.0

    pool, p_values = list(family), dict.fromkeys(family, 1.0)
    while len(pool) > 1:
        p_values |= {a: p_value(a, [b for b in pool if b != a]) for a in pool}
        noisiest = min(pool, key=lambda a: p_values[a])
        if p_values[noisiest] >= ERRATIC / len(family):
            break
        pool.remove(noisiest)
    return pool, {a for a in family if p_values[a] < NOISY}


def common_correlation(pairs: NDArray[np.bool_]) -> float:
    """Correlation of two arms' mean differences through the shared baseline: 1/2 where all have the same seeds.

    With missing seeds the smallest over all couples is taken, which makes intervals wider, never narrower.
    """
    counts = pairs.sum(1)
    shared = pairs.astype(float) @ pairs.T.astype(float)
    matrix = shared / (2 * np.sqrt(np.outer(counts, counts)))
    return float(matrix[~np.eye(len(pairs), dtype=bool)].min(initial=0.5))


def correlation(a: Array, b: Array) -> float | None:
    """Pearson's r; None below three values or without variation."""
    if len(a) < 3 or not a.std() or not b.std():
        return None
    return float(np.corrcoef(a, b)[0, 1])


# --------------------------------------------------------------------------------------------------- distributions


def t_quantile(probability: float, df: float) -> float:
    """The quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(df, probability))


def max_t_tail(t: float, k: int, df: int, rho: float = 0.5) -> float:
    """P(max |T| > t) for k t-variables that share their denominator and are correlated rho >= 0.

    T_i = (sqrt(1 - rho) Z_i + sqrt(rho) Z_0) / S, integrated over Z_0 and S by Gauss-Legendre quadrature.
    """
    from scipy.special import ndtr, stdtr

    if k == 1:
        return float(2 * stdtr(df, -abs(t)))
    z, z_weights, s, s_weights = _nodes(df)
    shift, scale = math.sqrt(rho) * z[:, None], math.sqrt(1 - rho)
    outside = ndtr((shift - t * s) / scale) + ndtr((-shift - t * s) / scale)
    some_outside = -np.expm1(k * np.log1p(-np.minimum(outside, 1 - 1e-16)))
    return float(z_weights @ some_outside @ s_weights)


@cache
def max_t_quantile(level: float, k: int, df: int, rho: float = 0.5) -> float:
    """The t that max |T| exceeds with probability `level`: two-sided Dunnett for rho = 1/2."""
    single = t_quantile(1 - level / 2, df)
    if k <= 1:
        return single
    bonferroni = t_quantile(1 - level / (2 * k), df)
    return _root(lambda t: max_t_tail(t, k, df, rho) - level, single, bonferroni + 1e-9)


@cache
def _nodes(df: int) -> tuple[Array, Array, Array, Array]:
    """Nodes and weights over a standard normal and over sqrt(chi^2 / df)."""
    from scipy.special import chdtri, gammaln

    x, w = np.polynomial.legendre.leggauss(64)
    z = 4.5 * (x + 1)  # the integrand is even in z: half of the line, twice
    z_weights = 9 * w * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    low, high = (math.sqrt(float(chdtri(df, tail)) / df) for tail in (1 - 1e-13, 1e-15))
    s = low + (high - low) * (x + 1) / 2
    log_density = (
        (1 - df / 2) * math.log(2) - gammaln(df / 2) + df / 2 * math.log(df) + (df - 1) * np.log(s) - df * s * s / 2
    )
    return z, z_weights, s, w * (high - low) / 2 * np.exp(log_density)


@cache
def noncentrality(critical: float, df: int, power: float = POWER) -> float:
    """How many standard errors a true difference must have to exceed `critical` with this power."""
    from scipy.special import nctdtr

    return _root(lambda shift: 1 - float(nctdtr(df, shift, critical)) - power, 0.0, critical * 3 + 10)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import brentq

    return float(brentq(function, low, high, xtol=1e-10))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ planning seeds


def detectable_difference(spread: float, n: int, k: int = 1) -> float:
    """The smallest difference that n seeds show with 80% power, for k arms against a baseline.

    Args:
        spread: Residual standard deviation of one run, seed effects removed.
    """
    df = k * (n - 1)
    return noncentrality(max_t_quantile(LEVEL, k, df), df) * spread * math.sqrt(2 / n)


def seeds_needed(delta: float, spread: float, k: int = 1, most: int = 1000) -> int | None:
    """Seeds after which a true difference `delta` is shown with 80% power; None beyond `most`."""
    if not spread:
        return 2
    if delta <= 0 or detectable_difference(spread, most, k) > delta:
        return None
    enough, few = most, 1
    while enough - few > 1:
        middle = (enough + few) // 2
        if detectable_difference(spread, middle, k) <= delta:
            enough = middle
        else:
            few = middle
    return enough


# ----------------------------------------------------------------------------------------- beside the main test


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
    half = t_quantile(1 - level / 2, len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, len(values))


def interaction(both: Array, one: Array, other: Array, baseline: Array, family: int) -> Interval | None:
    """How far two changes together differ from the sum of each: both - one - other + baseline, by seed.

    The interval is Bonferroni's for `family` interactions.
    """
    return mean_interval(both - one - other + baseline, LEVEL / max(family, 1))


def spread_interval(values: Array, level: float = LEVEL) -> tuple[float, float, float]:
    """Standard deviation over seeds and its interval (chi-squared)."""
    from scipy.special import chdtri

    df, sd = len(values) - 1, float(values.std(ddof=1))
    low, high = (sd * math.sqrt(df / float(chdtri(df, tail))) for tail in (level / 2, 1 - level / 2))
    return sd, low, high


def divergence_p(diverged: int, of: int, baseline_diverged: int, baseline_of: int) -> float:
    """Fisher's exact test, two-sided, of an arm's divergences against the baseline's."""
    from scipy.stats import fisher_exact

    counts = [[diverged, of - diverged], [baseline_diverged, baseline_of - baseline_diverged]]
    return float(fisher_exact(counts)[1])  # type: ignore[arg-type]
