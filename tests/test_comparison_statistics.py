"""The statistics keep their promises: error rates, power, coverage, invariances, and agreement with other sources."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from nexus_ablate.comparison.decision import word
from nexus_ablate.comparison.results import ArmResult
from nexus_ablate.comparison.statistics import (
    detectable_difference,
    effects,
    failure_p,
    interaction,
    max_t_quantile,
    max_t_tail,
    mean_interval,
    residual_variance,
    robust_spread,
    seeds_needed,
    unlike_noise,
)
from nexus_ablate.comparison.verdict import BETTER, WORSE

ARMS = 8


def table(rng, seeds, shift=0.0, noise=1.0, rho=0.5, arms=ARMS):
    """Losses with standard deviation 1 over seeds; the first arm is `noise` times as noisy in its residual."""
    scale = np.ones((arms + 1, 1))
    scale[1] = noise
    losses = rng.normal(size=(arms + 1, seeds)) * scale * np.sqrt(1 - rho) + rng.normal(size=seeds) * np.sqrt(rho)
    losses[1:] += shift
    return losses


def words(losses, delta_min=1.0):
    estimates = effects(losses)[1:]
    seeds = losses.shape[1]
    return [word(ArmResult("arm", effect=e, delta_min=delta_min, compared=seeds, runs=seeds)) for e in estimates]


def false_claims(tables):
    return sum(any(w in (BETTER, WORSE) for w in words(losses)) for losses in tables)


def samples(few, many):
    """A small sample in the fast tier, a large one among the slow tests."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])


@pytest.mark.parametrize("tails", ["normal", "heavy"])
@samples((200, 18), (1000, 67))
def test_null_arms_resampled_from_a_bank_of_seeds_are_rarely_called_different(count, tails):
    rng = np.random.default_rng(2)
    bank = rng.normal(3, 0.02, 60) if tails == "normal" else 3 + 0.02 * rng.standard_t(4, 60)
    tables, accepted = count
    drawn = (rng.choice(bank, (ARMS + 1, 5), replace=False) for _ in range(tables))
    assert false_claims(drawn) <= accepted


def test_without_the_correction_for_many_arms_the_bank_does_show_false_winners():
    rng = np.random.default_rng(2)
    claims = 0
    for _ in range(200):
        losses = table(rng, 5)
        claims += any(stats.ttest_rel(losses[a], losses[0]).pvalue < 0.05 for a in range(1, ARMS + 1))
    assert claims > 40


def test_the_noise_guard_sees_a_noisy_baseline_and_a_noisy_arm_and_seldom_anything_else():
    rng = np.random.default_rng(4)
    calm = sum(bool(unlike_noise(table(rng, 5))) for _ in range(300))
    assert calm <= 0.13 * 300  # two tests at 5%
    noisy = [unlike_noise(table(rng, 8, noise=5.0)) for _ in range(50)]
    assert sum(1 in rows for rows in noisy) >= 48
    assert sum(0 in unlike_noise(table(rng, 8, noise=5.0)[[1, 0, *range(2, ARMS + 1)]]) for _ in range(50)) >= 48


def test_the_noise_guard_is_the_f_test_of_what_a_row_adds_to_the_residual_sum_of_squares():
    """In the complete table: an arm minus the mean of the others, against the others' residual."""
    losses = table(np.random.default_rng(5), 6, noise=4.0)
    others = np.delete(losses, 1, 0)
    own = (losses[1] - others.mean(0)).var(ddof=1) / (1 + 1 / len(others))
    p = stats.f.sf(own / residual_variance(others)[0], 5, 5 * (len(others) - 1))
    assert unlike_noise(losses)[1] == pytest.approx(p)


def test_under_unlike_noise_each_arm_is_its_own_paired_t_test_at_the_sidak_level():
    losses = table(np.random.default_rng(6), 8, noise=6.0)
    estimate = effects(losses)[2]
    expected = stats.ttest_rel(losses[2], losses[0])
    interval = expected.confidence_interval(0.95 ** (1 / ARMS))
    assert estimate is not None and estimate.alone and estimate.df == 7
    assert (estimate.low, estimate.high) == pytest.approx((interval.low, interval.high))
    assert estimate.p == pytest.approx(1 - (1 - expected.pvalue) ** ARMS)


def test_a_mean_difference_of_exactly_zero_is_the_least_surprising_of_all():
    differences = np.array([[0.0, 0.0, 0.0, 0.0], [0.0, 0.001, 0.0, 0.001], [0.5, -0.5, 0.25, -0.25]])
    _, _, effect = effects(2.0 + differences)
    assert effect is not None
    assert effect.alone
    assert (effect.delta, effect.p) == (0.0, 1.0)


def test_one_outlying_run_does_not_move_the_robust_spread_and_it_agrees_with_the_residual():
    rng = np.random.default_rng(7)
    calm, hit, plain = [], [], []
    for _ in range(200):
        losses = table(rng, 5, arms=3)
        plain.append(np.sqrt(residual_variance(losses)[0]))
        calm.append(robust_spread(losses))
        losses[0, 0] += 8
        hit.append(robust_spread(losses))
    assert np.mean(calm) == pytest.approx(np.mean(plain), rel=0.1)
    assert np.mean(hit) < 1.5 * np.mean(calm)
    assert robust_spread(losses[:1]) is None and robust_spread(losses[:, :1]) is None


@samples(200, 2000)
def test_the_intervals_of_all_arms_hold_the_truth_together_in_94_percent(count):
    rng = np.random.default_rng(6)
    held = sum(
        all(e is not None and e.low <= 0.7 <= e.high for e in effects(table(rng, 5, 0.7))[1:]) for _ in range(count)
    )
    assert held >= 0.94 * count


# --------------------------------------------------------------------------------------------------- invariances


def test_swapping_arm_and_baseline_negates_the_difference():
    losses = table(np.random.default_rng(8), 6, arms=1)
    (_, there), (_, back) = effects(losses), effects(losses[::-1])
    assert there is not None and back is not None
    assert there.delta == -back.delta and there.p == pytest.approx(back.p)
    assert there.low == pytest.approx(-back.high)


def test_the_order_of_arms_and_seeds_changes_nothing():
    rng = np.random.default_rng(9)
    losses = table(rng, 5, shift=0.5)
    arms, seeds = rng.permutation(ARMS) + 1, rng.permutation(5)
    actual, expected = effects(losses), effects(losses[[0, *arms]][:, seeds])
    for place, arm in enumerate(arms, 1):
        a, b = actual[arm], expected[place]
        assert a is not None and b is not None
        assert (a.delta, a.low, a.high, a.p) == pytest.approx((b.delta, b.low, b.high, b.p), rel=1e-10)


def test_one_more_arm_changes_no_difference():
    losses = table(np.random.default_rng(10), 5)
    for fewer, more in zip(effects(losses[:-1]), effects(losses), strict=False):
        assert fewer is None or (more is not None and fewer.delta == more.delta)


def test_a_copy_of_an_arm_is_no_further_arm():
    losses = table(np.random.default_rng(11), 5)
    assert effects(np.vstack([losses, losses[-1]]))[:-1] == effects(losses)


def test_equal_losses_are_no_test():
    losses = np.ones((2, 5))
    assert effects(losses) == [None, None]


def test_missing_cells_leave_the_pairs_that_are_there():
    losses = table(np.random.default_rng(12), 6)
    losses[2, 4] = np.nan
    estimate = effects(losses)[2]
    assert estimate is not None and estimate.n == 5
    assert estimate.delta == pytest.approx(np.delete(losses[2] - losses[0], 4).mean())


# --------------------------------------------------------------------------------------- agreement with others


def test_one_arm_is_the_paired_t_test():
    rng = np.random.default_rng(13)
    for seeds in (2, 3, 5, 20):
        losses = table(rng, seeds, shift=0.8, arms=1)
        estimate = effects(losses)[1]
        expected = stats.ttest_rel(losses[1], losses[0])
        assert estimate is not None
        assert estimate.p == pytest.approx(expected.pvalue, abs=1e-10)
        interval = expected.confidence_interval(0.95)
        assert (estimate.low, estimate.high) == pytest.approx((interval.low, interval.high), rel=1e-10)


@pytest.mark.parametrize(
    ("df", "published"),
    [  # Dunnett 1964, Biometrics 20: two-sided, 5%, k = 1 to 9
        (5, (2.57, 3.03, 3.29, 3.48, 3.62, 3.73, 3.82, 3.90, 3.97)),
        (10, (2.23, 2.57, 2.76, 2.89, 2.99, 3.07, 3.14, 3.19, 3.24)),
        (20, (2.09, 2.38, 2.54, 2.65, 2.73, 2.80, 2.86, 2.90, 2.95)),
        (60, (2.00, 2.27, 2.41, 2.51, 2.58, 2.64, 2.69, 2.73, 2.77)),
    ],
)
def test_quantiles_are_dunnett_s(df, published):
    result = [max_t_quantile(0.05, k, df) for k in range(1, 10)]
    assert result == pytest.approx(published, rel=0.005)


def test_the_quadrature_agrees_with_the_multivariate_t():
    k, df, t = 3, 9, 2.4
    shape = np.full((k, k), 0.5) + 0.5 * np.eye(k)
    inside = stats.multivariate_t(shape=shape, df=df, seed=0).cdf(np.full(k, t), lower_limit=np.full(k, -t))
    assert max_t_tail(t, k, df) == pytest.approx(1 - inside, abs=2e-4)
    assert max_t_tail(t, 1, df) == pytest.approx(2 * stats.t.sf(t, df), rel=1e-12)


def test_detectable_differences_are_those_of_the_paired_t_test():
    result = [detectable_difference(1 / np.sqrt(2), n) for n in (3, 4, 5, 6, 8, 10, 20)]
    assert result == pytest.approx([3.3, 2.1, 1.7, 1.4, 1.2, 1.0, 0.67], abs=0.05)  # in SDs of the difference


def test_the_seeds_that_are_named_do_show_the_difference_and_one_fewer_does_not():
    needed = seeds_needed(0.5, 1.0, 8)
    assert needed is not None
    assert detectable_difference(1.0, needed, 8) <= 0.5 < detectable_difference(1.0, needed - 1, 8)
    assert seeds_needed(1e-9, 1.0) is None


def test_failures_are_counted_by_barnard_s_exact_test():
    result = [failure_p(n, 5, 0, 5) for n in (5, 4, 3)]
    assert result == pytest.approx([2 / 2**10, 0.0215, 0.058], abs=1e-3)
    assert failure_p(0, 5, 0, 5) == failure_p(5, 5, 5, 5) == 1.0


def test_planning_with_the_upper_bound_reaches_its_power_where_the_point_estimate_falls_short():
    """Plans for a 1 SD effect from 5 seeds of one arm; the power that they really have, averaged over plans."""
    rng = np.random.default_rng(16)

    def reached(bound):
        powers = []
        for _ in range(200):
            estimate = effects(table(rng, 5, arms=1))[1]
            assert estimate is not None
            seeds = seeds_needed(1.0, estimate.spread_bound if bound else estimate.spread) or 1000
            df, se = seeds - 1, 1 / np.sqrt(seeds)
            powers.append(stats.nct.sf(stats.t.ppf(0.975, df), df, 1 / se))
        return np.mean(powers)

    assert reached(bound=True) >= 0.8 > reached(bound=False) + 0.02


def test_an_interaction_is_found_where_two_changes_help_one_another():
    rng = np.random.default_rng(14)
    losses = table(rng, 8, rho=0.9, arms=3)
    additive = losses + np.array([[0], [-1], [-1], [-2]])
    result = interaction(additive[3], additive[1], additive[2], additive[0], 1)
    assert result is not None and result.low < 0 < result.high
    more = additive + np.array([[0], [0], [0], [-3]])
    result = interaction(more[3], more[1], more[2], more[0], 1)
    assert result is not None and result.high < 0


def test_an_interval_of_one_value_has_no_ends():
    result = mean_interval(np.array([1.0, np.nan]))
    assert result is not None and (result.mean, result.low, result.n) == (1.0, None, 1)
    assert mean_interval(np.array([np.nan])) is None
