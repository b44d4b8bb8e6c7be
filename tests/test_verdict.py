"""The words come in their order, and each sentence says what decided it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nexus_ablate.comparison import verdict as v
from nexus_ablate.comparison.cell import judge_cell
from nexus_ablate.comparison.decision import decide, seeds_to_differ, seeds_to_equal
from nexus_ablate.comparison.results import ArmResult
from nexus_ablate.comparison.terms import Terms
from nexus_ablate.study.endpoint import Endpoint
from nexus_ablate.study.schema import Study, StudyArm


def effect(shift, seeds=5, noise=0.1):
    rng = np.random.default_rng(0)
    differences = shift + noise * rng.normal(size=seeds)
    baseline = rng.normal(size=seeds)
    return judge_cell(baseline + differences, baseline, 0.05)


def result(failed=0, how="exploded", **values):
    """An arm that is a nat better in each of five pairs, but for what is given."""
    failures = dict.fromkeys(range(failed), how)
    endpoint = Endpoint("val_loss", delta_min=values.pop("delta_min", 0.3))
    plain = {"endpoint": endpoint, "effect": effect(-1.0), "compared": 5, "runs": 5, "baseline_runs": 5}
    if "effect" not in values:
        plain["differences"] = [-1.0] * 5
    return ArmResult("arm", name="arm", failed=failures, **(plain | values))


def verdict(terms=Terms(), **values):  # noqa: B008
    return decide(result(**values), terms)


COUNTED = {"compared": 7, "runs": 8, "baseline_runs": 8}
NARROW, WIDE = effect(0.0, noise=0.1), effect(0.1, noise=1.0)
REACH = max(-NARROW.low, NARROW.high)
WORDS = [
    ({"unfair": ["evaluation"], "is_identical": True, "failed": 5}, v.NOT_COMPARABLE, "an unfair pair says nothing"),
    ({"effect": None, "compared": 0, "runs": 0, "waiting": 3}, v.INCOMPLETE, "no run has ended"),
    ({"is_identical": True, "failed": 5}, v.IDENTICAL, "equal runs are equal, also where they fail"),
    ({"effect": None, "failed": 5, "compared": 0}, v.DIVERGED, "all fail, the baseline trains"),
    ({"effect": None, "failed": 5, "baseline_failed": 5, "compared": 0}, v.INCONCLUSIVE, "neither trains"),
    ({"failed": 7, "compared": 1, "runs": 8, "baseline_runs": 8}, v.UNSTABLE, "seven of eight fail: p < 0.001"),
    ({"failed": 4, "compared": 1}, v.TOO_FEW_SEEDS, "four of five fail: p = 0.02, and one pair is left"),
    ({"failed": 1, "compared": 7, "runs": 8, "baseline_runs": 8}, v.INCONCLUSIVE, "better where it trains"),
    ({"failed": 1, **COUNTED, "effect_with_failures": effect(-0.8)}, v.BETTER, "better also with the failure"),
    ({"failed": 1, **COUNTED, "effect_with_failures": effect(0.0)}, v.INCONCLUSIVE, "not better with the failure"),
    ({"failed": 1, **COUNTED, "effect": effect(1.0)}, v.WORSE, "worse where it trains is worse"),
    ({"failed": 1, **COUNTED, "baseline_failed": 2}, v.BETTER, "the baseline fails more often"),
    ({"unfair": ["learned"]}, v.NOT_COMPARABLE, "the baseline has learned nothing"),
    ({"unfair": ["learned"], "effect": None, "baseline_failed": 5, "compared": 0}, v.BETTER, "it does not even train"),
    ({"effect": None, "baseline_failed": 5, "compared": 0}, v.BETTER, "trains where the baseline fails"),
    ({}, v.BETTER, "the interval lies below 0"),
    ({"effect": effect(1.0)}, v.WORSE, "the interval lies above 0"),
    ({"effect": effect(0.0, noise=0.01)}, v.EQUIVALENT, "the interval lies inside the margin"),
    ({"effect": NARROW, "delta_min": 1.01 * REACH}, v.EQUIVALENT, "inside by a hair"),
    ({"effect": NARROW, "delta_min": 0.99 * REACH}, v.INCONCLUSIVE, "beyond by a hair, though a 90% interval is not"),
    ({"effect": NARROW, "delta_min": 0.0}, v.INCONCLUSIVE, "no margin is declared"),
    ({"effect": effect(0.3, noise=1.0)}, v.INCONCLUSIVE, "the interval holds 0"),
    ({"effect": None, "compared": 1, "runs": 1, "differences": [-3.0]}, v.TOO_FEW_SEEDS, "one pair has no noise"),
    ({"effect": effect(-1.0, 4), "compared": 4, "runs": 4}, v.TOO_FEW_SEEDS, "four pairs"),
    ({"effect": None, "failed": 4, "runs": 4, "baseline_runs": 4, "compared": 0}, v.TOO_FEW_SEEDS, "p = 0.008 at four"),
]


@pytest.mark.parametrize(("values", "word", "reason"), WORDS, ids=[row[-1] for row in WORDS])
def test_the_first_word_that_fits_is_the_verdict(values, word, reason):
    assert verdict(**values).word == word


WHOLE = [
    ({}, "BETTER", "five seeds"),
    ({"is_early": True}, "BETTER (early training)", "fewer than 10 tokens per parameter"),
    ({"is_early": True, "failed": 5, "compared": 0, "effect": None}, "DIVERGED (early training)", "the same"),
    ({"delta_min": 5.0}, "BETTER (below the threshold that matters)", "shown, but too small to matter"),
    ({"waiting": 2}, "BETTER (incomplete)", "runs without a result"),
    ({"unmeasured": 2}, "BETTER (2 not measured)", "runs that lack the endpoint"),
    ({"terms": Terms(exploratory=("seeds",))}, "exploratory: BETTER", "something was chosen late"),
]


@pytest.mark.parametrize(("values", "text", "reason"), WHOLE, ids=[row[-1] for row in WHOLE])
def test_a_verdict_says_what_qualifies_it(values, text, reason):
    assert str(verdict(**values)) == text


STUDY = Study(name="mine", question="?", design="list", arms=[StudyArm(name="arm", overrides=["norm=layer"])])
NEEDED = seeds_to_differ(WIDE), seeds_to_equal(WIDE, 0.6)
SENTENCES = [
    ({"effect": NARROW, "delta_min": 0.99 * REACH}, f"{NARROW.low:+.4f} to {NARROW.high:+.4f}", "the interval shown"),
    ({"effect": None, "compared": 1, "runs": 1, "differences": [-3.0]}, "one pair differs by -3.0000", "one pair"),
    ({}, "ends 0.9", "the difference in the unit of the loss"),
    ({}, " nats per token lower (", "its side and interval"),
    ({}, "), at 5 of 5 seeds", "the seeds that agree"),
    ({"effect": WIDE, "delta_min": 0.6}, f"{NEEDED[0] - 5} decide whether it is worse", "seeds for a difference"),
    ({"effect": WIDE, "delta_min": 0.6}, f"{NEEDED[1] - 5} more seeds show that it is equivalent", "for equivalence"),
    (
        {"effect": WIDE, "delta_min": 0.6, "terms": Terms(STUDY, place="mine")},
        f"(nexus-ablate study mine --add-seeds {min(NEEDED) - 5})",
        "the command",
    ),
    (
        {"failed": 4, "how": "non-finite", "compared": 1},
        "fails to train at 4 of 5 seeds (non-finite), the baseline at 0 of 5 (Barnard's exact test, p = 0.021, where a "
        "word needs p < 0.01)",
        "failures come with their test",
    ),
]


@pytest.mark.parametrize(("values", "part", "reason"), SENTENCES, ids=[row[-1] for row in SENTENCES])
def test_a_sentence_says_what_decided(values, part, reason):
    assert part in verdict(**values).sentence


def test_seeds_are_not_advised_by_a_command_that_would_not_train_the_arm():
    advice = verdict(effect=WIDE, delta_min=0.6, terms=Terms(place="mine")).sentence
    assert "more seeds" in advice and "--add-seeds" not in advice


def test_a_smaller_effect_needs_more_seeds_and_one_close_to_zero_is_decided_as_equivalent():
    few = seeds_to_differ(effect(0.9, noise=0.8))
    many = seeds_to_differ(effect(0.5, noise=0.8))
    assert few is not None and many is not None and few < many
    zero = dataclasses.replace(effect(0.2, noise=0.3), delta=0.0)
    assert seeds_to_equal(zero, 0.3) is not None and seeds_to_equal(zero, 0.0) is None


def test_every_word_has_a_meaning():
    assert {word for _, word, _ in WORDS} <= v.MEANINGS.keys()
