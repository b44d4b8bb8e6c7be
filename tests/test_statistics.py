"""The statistics keep their promises: agreement with other sources, coverage, invariances, and plans of seeds."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from nexus_ablate.comparison.statistics import (
    detectable_difference,
    paired_effect,
    seeds_and_text,
    seeds_needed,
    sidak,
    upper_bound,
    welch_effect,
)


def pair(rng, seeds, shift=0.0, rho=0.5):
    """Losses of an arm and of the baseline: standard deviation 1 over seeds, 1 of their difference."""
    losses = rng.normal(size=(2, seeds)) * np.sqrt(1 - rho) + rng.normal(size=seeds) * np.sqrt(rho)
    return losses[1] + shift, losses[0]


# ----------------------------------------------------------------------------------------------- the test of a cell


@pytest.mark.parametrize("seeds", [2, 3, 5, 20])
def test_a_cell_is_the_paired_t_test_at_its_level(seeds):
    arm, baseline = pair(np.random.default_rng(seeds), seeds, shift=0.8)
    effect = paired_effect(arm - baseline, 0.01)
    expected = stats.ttest_rel(arm, baseline)
    interval = expected.confidence_interval(0.99)
    assert effect.p == pytest.approx(expected.pvalue, abs=1e-10)
    assert (effect.low, effect.high) == pytest.approx((interval.low, interval.high), rel=1e-10)
    assert (effect.n, effect.df, effect.level) == (seeds, seeds - 1, 0.01)


def test_swapping_arm_and_baseline_negates_the_difference():
    arm, baseline = pair(np.random.default_rng(8), 6)
    there, back = paired_effect(arm - baseline, 0.05), paired_effect(baseline - arm, 0.05)
    assert there.delta == -back.delta and there.p == pytest.approx(back.p)
    assert there.low == pytest.approx(-back.high)


@pytest.mark.parametrize("differences", [np.array([0.1]), np.array([])], ids=["one pair", "no pair"])
def test_fewer_than_two_pairs_are_not_tested(differences):
    assert paired_effect(differences, 0.05) is None


def test_equal_values_have_an_interval_of_no_width():
    effect = paired_effect(np.zeros(5), 0.05)
    assert (effect.low, effect.high, effect.p) == (0, 0, 1)


@pytest.mark.parametrize(("arm_runs", "runs"), [(5, 5), (8, 8)])
def test_runs_without_shared_seeds_are_no_more_often_different_than_welch_says(arm_runs, runs):
    rng = np.random.default_rng(3)
    arm, baseline = rng.normal(0.5, 1, arm_runs), rng.normal(0, 3, runs)
    effect, expected = welch_effect(arm, baseline, 0.05), stats.ttest_ind(arm, baseline, equal_var=False)
    assert effect.delta == pytest.approx(arm.mean() - baseline.mean())
    assert effect.delta / effect.se == pytest.approx(expected.statistic) and effect.df <= expected.df


def test_rounded_values_are_no_less_noisy_than_rounding_made_them():
    arm, baseline = np.array([1.1, 1.1, 1.1]), np.array([1.0, 1.0, 1.0])
    assert paired_effect(arm - baseline, 0.05, step=0.1).se == pytest.approx(0.1 / np.sqrt(6 * 3))
    assert paired_effect(arm - baseline, 0.05).se < 1e-15, "the control"


def test_the_levels_of_all_comparisons_multiply_to_the_level_of_the_table():
    for comparisons in (1, 8, 24):
        assert 1 - (1 - sidak(0.04, comparisons)) ** comparisons == pytest.approx(0.04)


# --------------------------------------------------------------------------------------------------- seeds and text


def crossed(rng, n, blocks, seed_sd, block_sd, rest_sd):
    """Differences (n, blocks) whose truth is 0: a part of the seed, one of the block, and a rest."""
    parts = rng.normal(0, seed_sd, (n, 1)), rng.normal(0, block_sd, blocks), rng.normal(0, rest_sd, (n, blocks))
    return parts[0] + parts[1] + parts[2]


@pytest.mark.parametrize("n", [5, 8, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sds", [(1, 0, 1), (1, 1, 1), (0.1, 1, 1), (0.1, 3, 0.5)], ids=str)
def test_intervals_over_seeds_and_text_hold_the_truth_and_those_over_seeds_alone_do_not(n, sds):
    rng, shares, tables = np.random.default_rng(n), np.full(30, 1 / 30), 400
    held = alone = 0
    for _ in range(tables):
        differences = crossed(rng, n, 30, *sds)
        by_seed = differences @ shares
        effect = paired_effect(by_seed, 0.05, by_block=differences, shares=shares)
        held += effect.low <= 0 <= effect.high
        interval = paired_effect(by_seed, 0.05)
        alone += interval.low <= 0 <= interval.high
    assert held >= 0.93 * tables - 2 * (0.05 * 0.95 * tables) ** 0.5
    if sds[1] >= 10 * sds[0]:
        assert alone < 0.75 * tables, "the control"


def test_the_two_way_error_is_that_of_a_crossed_layout_by_hand():
    rng = np.random.default_rng(3)
    differences = crossed(rng, 6, 40, 1, 0.5, 2)
    se, df, text_se = seeds_and_text(differences, np.full(40, 1 / 40))
    rows, columns, mean = differences.mean(1), differences.mean(0), differences.mean()
    residual = ((differences - rows[:, None] - columns + mean) ** 2).sum() / (5 * 39)
    over_seeds, over_text = rows.var(ddof=1) / 6, columns.var(ddof=1) / 40
    variance = max(over_seeds + over_text - residual / 240, over_seeds, over_text)
    assert (se, text_se) == pytest.approx((variance**0.5, over_text**0.5))
    assert df == pytest.approx(variance**2 / (over_seeds**2 / 5 + over_text**2 / 39))


def test_the_error_over_text_is_counted_from_sixteen_blocks_on():
    rng = np.random.default_rng(4)
    for blocks, counted in ((15, False), (16, True)):
        differences = crossed(rng, 5, blocks, 0.1, 3, 1)
        shares = np.full(blocks, 1 / blocks)
        effect = paired_effect(differences @ shares, 0.05, by_block=differences, shares=shares)
        assert (effect.text_se is not None) is counted
        assert (effect.se == effect.seed_se) is not counted


# --------------------------------------------------------------------------------------------------- seed planning


def test_detectable_differences_are_those_of_the_paired_t_test():
    result = [detectable_difference(1.0, n, 0.05) for n in (3, 4, 5, 6, 8, 10, 20)]
    assert result == pytest.approx([3.3, 2.1, 1.7, 1.4, 1.2, 1.0, 0.67], abs=0.05)  # in SDs of the difference


def test_the_seeds_that_are_named_do_show_the_difference_and_one_fewer_does_not():
    needed = seeds_needed(0.5, 1.0, 0.005)
    assert needed is not None
    assert detectable_difference(1.0, needed, 0.005) <= 0.5 < detectable_difference(1.0, needed - 1, 0.005)
    assert seeds_needed(1e-9, 1.0, 0.05) is None
    assert seeds_needed(0.5, 0.1, 0.05, text_se=0.5) is None, "no seed makes the error over text smaller"


def test_planning_with_the_upper_bound_reaches_its_power_where_the_point_estimate_falls_short():
    """Plans for a 1 SD effect from 5 seeds of one arm; the power that they really have, averaged over plans."""
    rng = np.random.default_rng(16)

    def reached(bound):
        powers = []
        for _ in range(200):
            spread = paired_effect(np.subtract(*pair(rng, 5)), 0.05).spread
            seeds = seeds_needed(1.0, upper_bound(spread, 4) if bound else spread, 0.05) or 1000
            df, se = seeds - 1, 1 / np.sqrt(seeds)
            powers.append(stats.nct.sf(stats.t.ppf(0.975, df), df, 1 / se))
        return np.mean(powers)

    assert reached(bound=True) >= 0.8 > reached(bound=False) + 0.02
