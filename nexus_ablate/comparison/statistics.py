"""Intervals and tests over a table of arms x seeds. Pure functions of arrays: no files, no randomness.

The model: loss = arm + seed + residual. Seed s gives every arm the same initial values, data order and dropout, so
the seed's part cancels in the difference to the baseline. What is left, the residual standard deviation s, is pooled
over the arms, but no arm is judged by less than its own: s = max(pooled, own). All arms are tested at once (Dunnett
1955: max |t| over k correlated comparisons). One arm alone is the paired t-test.

Pooling assumes that all arms are equally noisy. Where an F-test says otherwise (`unlike_noise`), every arm of the
table is judged by its own paired differences instead, n - 1 degrees of freedom at the Sidak level.
`scripts/simulate_verdicts.py` prints the error rates and the power of the two together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.05
"""Chance that a table of arms without any effect shows a difference."""
POWER = 0.80
GUARD = 0.05
"""Level of the F-tests for unlike noise: of the baseline's, and of all arms' together (each at GUARD / k)."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Effect:
    """One arm against the baseline, over the seeds that both have.

    Attributes:
        n: Pairs; of unpaired runs, the smaller number of the two.
        delta: Mean difference, arm minus baseline.
        spread: s, the residual standard deviation of one run by which the arm is judged.
        spread_bound: Upper 80% bound of s, for planning seeds.
        se: s sqrt(2 / n), the standard error of delta.
        df: Degrees of freedom of s.
        critical: Quantile of max |t| over the family.
        p: Adjusted for the family.
        low, high: The simultaneous interval, the one that decides.
        wins: Seeds in which the arm was lower; None of unpaired runs.
        rho: Correlation of arm and baseline over the seeds; None below 3 pairs or without variation.
        alone: Judged by its own runs and the baseline's, without what is known of the noise of other arms.
        level: Chance of any false claim in the table that the interval spends.
    """

    n: int
    delta: float
    spread: float
    spread_bound: float
    se: float
    df: float
    critical: float
    p: float
    low: float
    high: float
    wins: int | None
    rho: float | None
    alone: bool
    level: float = LEVEL

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def within(self, margin: float) -> bool:
        """Whether the whole interval lies inside +-margin."""
        return -margin < self.low and self.high < margin

    @property
    def detectable(self) -> float:
        """The smallest true difference that this comparison would have shown with 80% power."""
        return noncentrality(self.critical, self.df) * self.se


def effects(
    losses: Array, level: float = LEVEL, family: int = 0, step: float = 0.0, absent: int = 0
) -> list[Effect | None]:
    """Every arm against the first row.

    Comparisons that share the level but are not in the table have their own baselines or come later. What is known of
    their correlation is nothing, so none is assumed; and where the table has one arm alone, its few runs say nothing
    about the noise of theirs, so it is judged at the Sidak level.

    Args:
        losses: (arms, seeds), the baseline first; NaN where there is no result.
        level: Chance of any false claim in the whole table.
        family: Comparisons that share the level, if they are more than the arms of the table.
        absent: Further arms of the table, without a result so far.
        step: To which the losses were rounded: they are no less noisy than rounding made them, step^2 / 12.

    Returns:
        By arm; None for the baseline, for fewer than two pairs, and where every difference is exactly 0.
    """
    differences = losses - losses[0]
    pairs = np.isfinite(differences)
    tested = [a for a in range(1, len(losses)) if pairs[a].sum() >= 2 and np.any(differences[a][pairs[a]] != 0)]
    result: list[Effect | None] = [None] * len(losses)
    if not tested:
        return result
    # A copy of an arm is the same arm: it adds nothing to what is known about the noise.
    distinct = list({differences[a].tobytes(): a for a in reversed(tested)}.values())[::-1]
    k = max(len(distinct) + absent, family)
    rho = common_correlation(pairs[distinct]) if k == len(distinct) else 0.0
    table = losses[[0, *distinct]]
    alone = bool(unlike_noise(table)) or len(distinct) == 1 < k
    pooled, pooled_df = residual_variance(table)
    for a in tested:
        d = differences[a][pairs[a]]
        n, delta, own = len(d), float(d.mean()), float(d.var(ddof=1)) / 2
        variance, df = (own, n - 1) if alone else (max(pooled, own), pooled_df)
        variance = max(variance, step**2 / 12)
        se = math.sqrt(variance * 2 / n)
        critical = t_quantile(1 - sidak(level, k) / 2, df) if alone else max_t_quantile(level, k, df, rho)
        t = abs(delta) / se if se else math.inf
        result[a] = Effect(
            n=n,
            delta=delta,
            spread=math.sqrt(variance),
            spread_bound=upper_bound(math.sqrt(variance), df),
            se=se,
            df=df,
            critical=critical,
            p=_at_least_one(t_tail(t, df), k) if alone else max_t_tail(t, k, df, rho),
            low=delta - critical * se,
            high=delta + critical * se,
            wins=int((d < 0).sum()),
            rho=correlation(losses[0][pairs[a]], losses[a][pairs[a]]),
            alone=alone,
            level=level,
        )
    return result


def unpaired_effects(
    losses: Array, level: float = LEVEL, family: int = 0, step: float = 0.0, absent: int = 0
) -> list[Effect | None]:
    """Every arm against the first row, for runs that share no seeds: Welch's t-test (1947), simultaneous by Sidak.

    Welch's degrees of freedom claim up to 5.4% at five runs and unlike noise. One fewer holds 5%. Where arm and
    baseline have unlike numbers of runs, they are those of the smaller number, which never claim too much (Mickey and
    Brown, 1966).

    Args:
        losses, level, family, step, absent: As for `effects`; which column a loss is in has no meaning.

    Returns:
        By arm; None for the baseline, where arm or baseline has fewer than two runs, and where no loss varies.
    """
    groups = [row[np.isfinite(row)] for row in losses]
    base = groups[0]
    tested = [a for a in range(1, len(groups)) if min(len(groups[a]), len(base)) > 1]
    result: list[Effect | None] = [None] * len(groups)
    distinct = {groups[a].tobytes() for a in tested}
    k = max(len(distinct) + absent, family)
    for a in tested:
        runs = groups[a]
        delta, n = float(runs.mean() - base.mean()), min(len(runs), len(base))
        own, others = (max(float(values.var(ddof=1)), step**2 / 12) / len(values) for values in (runs, base))
        se = math.sqrt(own + others)
        if not se:
            continue
        welch = (own + others) ** 2 / (own**2 / (len(runs) - 1) + others**2 / (len(base) - 1))
        df = max(welch - 1, n - 1) if len(runs) == len(base) else n - 1
        critical = t_quantile(1 - sidak(level, k) / 2, df)
        spread = se * math.sqrt(n / 2)
        result[a] = Effect(
            n=n,
            delta=delta,
            spread=spread,
            spread_bound=upper_bound(spread, df),
            se=se,
            df=df,
            critical=critical,
            p=_at_least_one(t_tail(abs(delta) / se, df), k),
            low=delta - critical * se,
            high=delta + critical * se,
            wins=None,
            rho=None,
            alone=True,
            level=level,
        )
    return result


def _at_least_one(p: float, k: int) -> float:
    """The probability that at least one of k independent events of probability p happens."""
    return -math.expm1(k * math.log1p(-p)) if p < 1 else 1.0  # exactly 1 where a mean difference is exactly 0


def residual_variance(losses: Array) -> tuple[float, int]:
    """Residual variance of the additive fit arm + seed and its degrees of freedom; cells may be missing (NaN)."""
    squares, df = _residual_squares(losses)
    return (squares / df if df else math.nan), df


def unlike_noise(losses: Array) -> dict[int, float]:
    """The rows that are noisier than the rest of the table, with their p-values; none: the noise can be pooled.

    The F-test of a row holds what it adds to the residual sum of squares against what the other rows have without it.
    The baseline is tested at GUARD against the arms, each of the k arms at GUARD / k against all other rows.

    Args:
        losses: (arms, seeds), the baseline first; NaN where there is no result.
    """
    from scipy.special import fdtrc

    if len(losses) < 3:  # one arm alone is judged by its own differences anyway
        return {}
    squares, df = _residual_squares(losses)
    noisy = {}
    for row in range(len(losses)):
        rest, rest_df = _residual_squares(np.delete(losses, row, 0))
        added = df - rest_df
        if min(squares, rest_df, added) <= 0:
            continue
        ratio = (squares - rest) / added / (rest / rest_df) if rest else math.inf
        p = float(fdtrc(added, rest_df, ratio))
        if p < (GUARD / (len(losses) - 1) if row else GUARD):
            noisy[row] = p
    return noisy


def _residual_squares(losses: Array) -> tuple[float, int]:
    """Residual sum of squares of the additive fit arm + seed, and its degrees of freedom."""
    present = np.isfinite(losses)
    if present.all():
        residual = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
        return float((residual**2).sum()), max((losses.shape[0] - 1) * (losses.shape[1] - 1), 0)
    arms, seeds = np.nonzero(present)
    design = np.zeros((len(arms), sum(losses.shape)))
    design[np.arange(len(arms)), arms] = 1
    design[np.arange(len(arms)), losses.shape[0] + seeds] = 1
    values = losses[present] - losses[present].mean()
    fit, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    return float(((values - design @ fit) ** 2).sum()), len(values) - int(rank)


def robust_spread(losses: Array) -> float | None:
    """Residual standard deviation that a few outlying runs cannot move; None without two rows and two columns.

    The median of |(x_is - x_js) - (x_it - x_jt)| over all pairs of arms i, j and of seeds s, t: each such difference is
    free of arm and seed effects and has the variance 4 s^2.
    """
    i, j = np.triu_indices(losses.shape[0], 1)
    s, t = np.triu_indices(losses.shape[1], 1)
    between = losses[i] - losses[j]
    contrasts = np.abs(between[:, s] - between[:, t])
    contrasts = contrasts[np.isfinite(contrasts)]
    return float(np.median(contrasts)) / (2 * 0.6744897501960817) if len(contrasts) else None


def robust_spread_of_runs(losses: Array) -> float | None:
    """The same for runs that share no seeds: from the median of |x_is - x_it| over all pairs of runs of one arm."""
    s, t = np.triu_indices(losses.shape[1], 1)
    contrasts = np.abs(losses[:, s] - losses[:, t])
    contrasts = contrasts[np.isfinite(contrasts)]
    return float(np.median(contrasts)) / (math.sqrt(2) * 0.6744897501960817) if len(contrasts) else None


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


def t_tail(t: float, df: float) -> float:
    """P(|T| > t)."""
    from scipy.special import stdtr

    return float(2 * stdtr(df, -abs(t)))


def sidak(level: float, k: int) -> float:
    """The level of each of k tests that together hold `level`."""
    return -math.expm1(math.log1p(-level) / max(k, 1))


def upper_bound(spread: float, df: float, confidence: float = POWER) -> float:
    """The one-sided upper bound of a standard deviation that was estimated with `df` degrees of freedom."""
    from scipy.special import chdtri

    return spread * math.sqrt(df / float(chdtri(df, confidence)))


def max_t_tail(t: float, k: int, df: int, rho: float = 0.5) -> float:
    """P(max |T| > t) for k t-variables that share their denominator and are correlated rho >= 0.

    T_i = (sqrt(1 - rho) Z_i + sqrt(rho) Z_0) / S, integrated over Z_0 and S by Gauss-Legendre quadrature.
    """
    from scipy.special import ndtr

    if k == 1 or math.isinf(t):
        return t_tail(t, df)
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
def noncentrality(critical: float, df: float, power: float = POWER) -> float:
    """How many standard errors a true difference must have to exceed `critical` with this power."""
    from scipy.special import nctdtr

    return _root(lambda shift: 1 - float(nctdtr(df, shift, critical)) - power, 0.0, critical * 3 + 10)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import brentq

    return float(brentq(function, low, high, xtol=1e-10))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ planning seeds


def detectable_difference(spread: float, n: int, k: int = 1, power: float = POWER, alone: bool = False) -> float:
    """The smallest difference that n seeds show with this power, for k arms against a baseline.

    Args:
        spread: Residual standard deviation of one run, seed effects removed.
        alone: Each arm is judged by its own paired differences, as under unlike noise.
    """
    df = n - 1 if alone else k * (n - 1)
    critical = t_quantile(1 - sidak(LEVEL, k) / 2, df) if alone else max_t_quantile(LEVEL, k, df)
    return noncentrality(critical, df, power) * spread * math.sqrt(2 / n)


@cache
def seeds_needed(
    delta: float, spread: float, k: int = 1, power: float = POWER, alone: bool = False, most: int = 1000
) -> int | None:
    """Seeds after which a true difference `delta` is shown with this power; None beyond `most`."""
    if not spread:
        return 2
    if delta <= 0 or detectable_difference(spread, most, k, power, alone) > delta:
        return None
    enough, few = most, 1
    while enough - few > 1:
        middle = (enough + few) // 2
        if detectable_difference(spread, middle, k, power, alone) <= delta:
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

    def times(self, factor: float) -> Interval:
        """The interval of the mean times a factor above 0."""
        low = None if self.low is None else self.low * factor
        high = None if self.high is None else self.high * factor
        return Interval(self.mean * factor, low, high, self.n)


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


@cache
def failure_p(failed: int, of: int, baseline_failed: int, baseline_of: int) -> float:
    """Barnard's exact test (1945), two-sided, of an arm's failures to train against the baseline's."""
    from scipy.stats import barnard_exact

    counts = [[failed, baseline_failed], [of - failed, baseline_of - baseline_failed]]
    if not of or not baseline_of or sum(counts[0]) in (0, of + baseline_of):
        return 1.0
    return float(barnard_exact(counts).pvalue)  # type: ignore[union-attr]
