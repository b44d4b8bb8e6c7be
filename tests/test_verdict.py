"""The words come in their order, and each sentence says what decided it."""

from __future__ import annotations

import numpy as np
import pytest

from nexus_ablate.comparison import verdict as v
from nexus_ablate.comparison.statistics import effects


def effect(shift, seeds=5, noise=0.1):
    rng = np.random.default_rng(0)
    return effects(np.vstack([np.zeros(seeds), shift + noise * rng.normal(size=seeds)]) + rng.normal(size=seeds))[1]


def evidence(**given):
    return v.Evidence(**{"effect": effect(-1.0), "delta_min": 0.3, "pairs": 5, "runs": 5, "baseline_runs": 5, **given})


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"unfair": ["evaluation"], "identical": True, "diverged": 5}, v.NOT_COMPARABLE),
        ({"pairs": 0, "runs": 0, "waiting": 3}, v.INCOMPLETE),
        ({"identical": True, "diverged": 1}, v.IDENTICAL),
        ({"diverged": 5, "pairs": 0}, v.DIVERGED),
        ({"diverged": 1, "pairs": 4}, v.UNSTABLE),
        ({}, v.BETTER),
        ({"effect": effect(1.0)}, v.WORSE),
        ({"effect": effect(0.0, noise=0.01)}, v.EQUIVALENT),
        ({"effect": effect(0.3, noise=1.0)}, v.INCONCLUSIVE),
        ({"effect": None, "pairs": 1, "runs": 1, "single": -3.0}, v.INCONCLUSIVE),
    ],
)
def test_the_first_word_that_fits_is_the_verdict(given, word):
    assert v.decide(evidence(**given)).word == word


def test_one_seed_never_claims():
    decided = v.decide(evidence(effect=None, pairs=1, runs=1, single=-3.0))
    assert decided.word == v.INCONCLUSIVE and decided.screening
    assert "-3.0000" in decided.sentence and "one pair" in decided.sentence


@pytest.mark.parametrize(("seeds", "screening"), [(3, True), (4, True), (5, False)])
def test_below_five_seeds_a_verdict_is_screening(seeds, screening):
    decided = v.decide(evidence(effect=effect(-1.0, seeds), pairs=seeds))
    assert decided.screening == screening
    assert str(decided).startswith("screening: ") == screening


def test_a_difference_that_is_shown_but_too_small_to_matter_is_negligible():
    assert v.decide(evidence(delta_min=5.0)).qualifiers == ("negligible",)


def test_a_difference_that_turns_round_at_the_best_learning_rates_says_so():
    assert "depends on LR" in str(v.decide(evidence(tuned_delta=0.5)))
    assert "depends on LR" not in str(v.decide(evidence(tuned_delta=-0.5)))


def test_an_arm_whose_runs_still_go_on_is_marked():
    assert "incomplete" in v.decide(evidence(waiting=2)).qualifiers


def test_what_is_inconclusive_names_the_seeds_that_would_decide():
    decided = v.decide(evidence(effect=effect(0.1, noise=1.0)))
    assert decided.word == v.INCONCLUSIVE and "seeds would show" in decided.sentence


def test_divergences_come_with_fisher_s_test():
    decided = v.decide(evidence(diverged=4, hows="non-finite"))
    assert "non-finite at 4 of 5 seeds, the baseline at 0 of 5 (Fisher p = 0.048)" in decided.sentence


def test_every_word_has_a_meaning():
    assert len(v.MEANINGS) == 9
