"""The test of a cell: one arm against the baseline on one endpoint in one stratum.

What a test needs of two arms, and what it says of them, passes through `judge_cell` alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nexus_ablate.comparison.statistics import (
    Array,
    correlation,
    noncentrality,
    seeds_and_text,
    t_quantile,
    t_tail,
    upper_bound,
    welch,
)

FEWEST_BLOCKS = 16
"""Of evaluation text, below which its part of the error is too uncertain to be counted."""


@dataclass(frozen=True)
class Effect:
    """An arm against the baseline, over the seeds that both have.

    Attributes:
        n: Pairs; of unpaired runs, the smaller number of the two.
        delta: Mean difference, arm minus baseline.
        se: Standard error of delta, over text too where that is known.
        df: Degrees of freedom of `se`.
        level: Chance that the interval misses the true difference.
        critical: Student's quantile at that level.
        p: Of the t-test of this cell alone.
        low, high: The interval, the one that decides.
        spread: Standard deviation of a pair's difference over seeds.
        spread_bound: Its upper 80% bound, for planning seeds.
        rho: Correlation of arm and baseline over the seeds; None below 3 pairs or without variation.
        text_se: The standard error over evaluation text alone; None where losses by block of text are not known.
        counts_text: Whether it is part of `se`.
    """

    n: int
    delta: float
    se: float
    df: float
    level: float
    critical: float
    p: float
    low: float
    high: float
    spread: float
    spread_bound: float
    rho: float | None = None
    text_se: float | None = None
    counts_text: bool = False

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
        return noncentrality(self.critical, self.df) * self.se


def judge_cell(
    arm: Array,
    baseline: Array,
    level: float,
    are_paired: bool = True,
    step: float = 0.0,
    by_block: Array | None = None,
    shares: Array | None = None,
) -> Effect | None:
    """The arm's difference to the baseline with its interval: the paired t-test, or Welch's where no seeds are shared.

    Args:
        arm, baseline: (seeds,) on the endpoint's scale; NaN where there is no result.
        level: Of this cell: its share of what all cells that get a word may claim falsely.
        are_paired: Whether a place in both is one seed; else it has no meaning.
        step: To which the values were rounded: they are no less noisy than rounding made them, step^2 / 12.
        by_block: (seeds, blocks) differences by block of evaluation text; None where they are not known.
        shares: (blocks,) of the text in each block.

    Returns:
        None for fewer than two pairs (of unpaired runs, fewer than two of either), and where no difference varies or is
        other than 0.
    """
    rho, text_se, counts_text = None, None, False
    if are_paired:
        both = np.isfinite(arm - baseline)
        differences = (arm - baseline)[both]
        n = len(differences)
        if n < 2 or not differences.any():
            return None
        delta = float(differences.mean())
        spread = max(float(differences.std(ddof=1)), step / math.sqrt(6))
        se, df = spread / math.sqrt(n), n - 1
        if by_block is not None and shares is not None:
            se_with_text, df_with_text, text_se = seeds_and_text(by_block[both], shares)
            counts_text = len(shares) >= FEWEST_BLOCKS
            if counts_text:
                se, df = se_with_text, df_with_text
        rho = correlation(baseline[both], arm[both])
    else:
        arm, baseline = arm[np.isfinite(arm)], baseline[np.isfinite(baseline)]
        n = min(len(arm), len(baseline))
        if n < 2:
            return None
        delta = float(arm.mean() - baseline.mean())
        se, df = welch(arm, baseline, floor=step**2 / 12)
        spread = se * math.sqrt(n)
        if not se:
            return None
    critical = t_quantile(1 - level / 2, df)
    return Effect(
        n=n,
        delta=delta,
        se=se,
        df=df,
        level=level,
        critical=critical,
        p=t_tail(abs(delta) / se if se else math.inf, df),
        low=delta - critical * se,
        high=delta + critical * se,
        spread=spread,
        spread_bound=upper_bound(spread, n - 1),
        rho=rho,
        text_se=text_se,
        counts_text=counts_text,
    )
