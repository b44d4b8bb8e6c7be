"""The words come in their order, and each sentence says what decided it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nexus_ablate.comparison import verdict as v
from nexus_ablate.comparison.statistics import effects


def effect(shift, seeds=5, noise=0.1):
    rng = np.random.default_rng(0)
    return effects(np.vstack([np.zeros(seeds), shift + noise * rng.normal(size=seeds)]) + rng.normal(size=seeds))[1]


def evidence(**arguments):
    return v.Evidence(
        **{"effect": effect(-1.0), "delta_min": 0.3, "pairs": 5, "runs": 5, "baseline_runs": 5, **arguments}
    )


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"unfair": ["evaluation"], "identical": True, "failed": 5}, v.NOT_COMPARABLE),
        ({"effect": None, "pairs": 0, "runs": 0, "waiting": 3}, v.INCOMPLETE),
        ({"identical": True, "failed": 5}, v.IDENTICAL),
        ({"effect": None, "failed": 5, "pairs": 0}, v.DIVERGED),
        ({"effect": None, "failed": 5, "baseline_failed": 5, "pairs": 0}, v.INCONCLUSIVE),
        ({"failed": 4, "pairs": 1}, v.UNSTABLE),
        ({"failed": 1, "pairs": 4}, v.BETTER),
        ({"effect": None, "baseline_failed": 5, "pairs": 0}, v.BETTER),
        ({}, v.BETTER),
        ({"effect": effect(1.0)}, v.WORSE),
        ({"effect": effect(0.0, noise=0.01)}, v.EQUIVALENT),
        ({"effect": effect(0.3, noise=1.0)}, v.INCONCLUSIVE),
        ({"effect": None, "pairs": 1, "runs": 1, "single": -3.0}, v.INCONCLUSIVE),
    ],
)
def test_the_first_word_that_fits_is_the_verdict(values, word):
    assert v.decide(evidence(**values)).word == word


def test_one_interval_decides_and_is_the_one_that_is_shown():
    """An interval that reaches beyond the margin by a hair is not EQUIVALENT, though a 90% interval lies inside."""
    estimate = effect(0.0, noise=0.1)
    assert estimate is not None
    reach = max(-estimate.low, estimate.high)
    assert v.decide(evidence(effect=estimate, delta_min=1.01 * reach)).word == v.EQUIVALENT
    inside = v.decide(evidence(effect=estimate, delta_min=0.99 * reach))
    assert inside.word == v.INCONCLUSIVE and f"{estimate.low:+.4f} to {estimate.high:+.4f}" in inside.sentence


def test_one_seed_never_claims():
    decided = v.decide(evidence(effect=None, pairs=1, runs=1, single=-3.0))
    assert str(decided) == "preliminary: INCONCLUSIVE"
    assert "-3.0000" in decided.sentence and "one pair" in decided.sentence


@pytest.mark.parametrize(("seeds", "prefix"), [(3, "preliminary: "), (4, "preliminary: "), (5, "")])
def test_below_five_seeds_a_verdict_is_preliminary(seeds, prefix):
    assert str(v.decide(evidence(effect=effect(-1.0, seeds), pairs=seeds))) == f"{prefix}BETTER"


def test_a_difference_that_is_shown_but_too_small_to_matter_says_so():
    assert str(v.decide(evidence(delta_min=5.0))) == "BETTER (below the threshold that matters)"


def test_a_difference_that_has_the_other_sign_at_the_shared_rate_says_so():
    assert "depends on LR" in str(v.decide(evidence(shared_rate_delta=0.5)))
    assert "depends on LR" not in str(v.decide(evidence(shared_rate_delta=-0.5)))


def test_an_arm_with_unfinished_runs_is_marked():
    assert "incomplete" in v.decide(evidence(waiting=2)).qualifiers


def test_what_is_inconclusive_says_how_many_seeds_this_effect_and_the_margin_need_and_the_command():
    estimate = effect(0.1, noise=1.0)
    decided = v.decide(evidence(effect=estimate, more_seeds="nexus-ablate study mine --add-seeds"))
    needed = v.seeds_to_decide(estimate, evidence(effect=estimate))
    assert needed is not None
    assert f"about {needed} seeds would decide an effect of this size" in decided.sentence
    assert f"(nexus-ablate study mine --add-seeds {needed - 5})" in decided.sentence
    assert "±0.3000 needs about" in decided.sentence


def test_a_smaller_effect_needs_more_seeds_and_one_close_to_zero_is_decided_as_equivalent():
    few, many = (
        v.seeds_to_decide(estimate, evidence()) for estimate in (effect(0.9, noise=0.8), effect(0.5, noise=0.8))
    )
    assert few is not None and many is not None and few < many
    zero = dataclasses.replace(effect(0.2, noise=0.3), delta=0.0)
    assert v.seeds_to_decide(zero, evidence()) is not None


def test_failures_come_with_barnard_s_test():
    decided = v.decide(evidence(failed=4, failures="non-finite", pairs=1))
    assert decided.word == v.UNSTABLE
    assert (
        "fails to train at 4 of 5 seeds (non-finite), the baseline at 0 of 5 (Barnard's exact test, p = 0.021)"
        in decided.sentence
    )


def test_every_word_has_a_meaning():
    assert len(v.MEANINGS) == 13
