"""The words come in their order, and each sentence says what decided it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nexus_ablate.comparison import verdict as v
from nexus_ablate.comparison.statistics import paired_effect
from nexus_ablate.comparison.verdict import Counts, qualifiers, seeds_to_decide, sentence, word_of
from nexus_ablate.study.endpoint import Endpoint


def effect(shift, seeds=5, noise=0.1):
    differences = shift + noise * np.random.default_rng(0).normal(size=seeds)
    return paired_effect(differences, 0.05)


FIVE = Counts(5, 0, 5, 0)
NARROW = effect(0.0)
REACH = max(-NARROW.low, NARROW.high)
MARGIN = 0.3


def counts(**values):
    return dataclasses.replace(Counts(8, 0, 8, 0), **values)


WORDS = [
    (effect(-1.0), FIVE, ["evaluation"], True, v.NOT_COMPARABLE, "an unfair pair says nothing"),
    (None, Counts(0, 0, 5, 0, waiting=3), [], False, v.INCOMPLETE, "no run has ended"),
    (None, Counts(1, 0, 5, 0, waiting=4), [], False, v.INCOMPLETE, "one pair, and more to come"),
    (effect(0.0), FIVE, [], True, v.IDENTICAL, "equal runs are equal"),
    (effect(0.0), FIVE, ["learned"], True, v.IDENTICAL, "also where the baseline has learned nothing"),
    (None, counts(failed=8), [], False, v.DIVERGED, "all fail, the baseline trains"),
    (None, counts(failed=8, base_failed=1), [], False, v.TOO_FEW_SEEDS, "one of the baseline's failed too"),
    (None, Counts(4, 4, 4, 0), [], False, v.TOO_FEW_SEEDS, "four are too few to diverge"),
    (effect(-1.0), counts(failed=1), [], False, v.INCONCLUSIVE, "better where it trains: survivors flatter"),
    (effect(1.0), counts(failed=1), [], False, v.WORSE, "worse where it trains is worse"),
    (effect(1.0), counts(base_failed=1), [], False, v.INCONCLUSIVE, "the baseline's survivors flatter it"),
    (effect(-1.0), counts(base_failed=1), [], False, v.BETTER, "better than the baseline's survivors"),
    (effect(-1.0), counts(failed=1, base_failed=1), [], False, v.BETTER, "as many on both sides"),
    (effect(0.0, noise=0.01), counts(failed=1), [], False, v.INCONCLUSIVE, "no EQUIVALENT with a run missing"),
    (effect(-1.0), FIVE, ["learned"], False, v.NOT_COMPARABLE, "the baseline has learned nothing"),
    (effect(-1.0), FIVE, [], False, v.BETTER, "the interval lies below 0"),
    (effect(1.0), FIVE, [], False, v.WORSE, "the interval lies above 0"),
    (effect(0.0, noise=0.01), FIVE, [], False, v.EQUIVALENT, "the interval lies inside the margin"),
    (effect(0.01, noise=0.001), FIVE, [], False, v.WORSE, "above 0 and inside the margin"),
    (effect(0.3, noise=1.0), FIVE, [], False, v.INCONCLUSIVE, "the interval holds 0"),
    (effect(-1.0, 4), Counts(4, 0, 4, 0), [], False, v.TOO_FEW_SEEDS, "four pairs"),
]


@pytest.mark.parametrize(("found", "runs", "unfair", "same", "word", "reason"), WORDS, ids=[row[-1] for row in WORDS])
def test_the_first_word_that_holds_is_the_verdict(found, runs, unfair, same, word, reason):
    assert word_of(Endpoint("val_loss", MARGIN), found, runs, unfair, same) == word


@pytest.mark.parametrize(("margin", "word"), [(1.01 * REACH, v.EQUIVALENT), (0.99 * REACH, v.INCONCLUSIVE)])
def test_the_whole_interval_must_lie_inside_the_margin(margin, word):
    assert word_of(Endpoint("val_loss", margin), NARROW, FIVE, [], False) == word


@pytest.mark.parametrize(("shift", "word"), [(-1.0, v.LOWER), (1.0, v.HIGHER)])
def test_a_measure_without_a_better_side_is_lower_or_higher(shift, word):
    assert word_of(Endpoint("attn/sink_rate"), effect(shift), FIVE, [], False) == word


BESIDE = [
    (v.BETTER, FIVE, {}, (), "nothing"),
    (v.BETTER, FIVE, {"is_early": True}, ("early training",), "fewer than 10 tokens per parameter"),
    (v.DIVERGED, FIVE, {"is_early": True}, ("early training",), "the same"),
    (v.WORSE, FIVE, {"always": ("exploratory",)}, ("exploratory",), "seeds were added"),
    (v.WORSE, counts(failed=2), {}, ("2 of 8 failed",), "runs without a finite loss"),
    (v.BETTER, counts(base_failed=2), {}, ("2 of 8 of the baseline failed",), "the baseline's"),
    (v.WORSE, counts(above_start=1), {}, ("1 of 8 ended above their loss at the start",), "kept, and said"),
    (v.IDENTICAL, FIVE, {"always": ("exploratory",), "is_early": True}, (), "equal is equal"),
]


@pytest.mark.parametrize(("word", "runs", "flags", "beside", "reason"), BESIDE, ids=[row[-1] for row in BESIDE])
def test_what_stands_beside_a_word(word, runs, flags, beside, reason):
    assert qualifiers(word, runs, **{"always": (), "is_early": False, **flags}) == beside


WIDE = effect(0.1, noise=1.0)
SENTENCES = [
    (v.BETTER, effect(-1.0), FIVE, "ends 0.9", "the difference in the unit of the loss"),
    (v.BETTER, effect(-1.0), FIVE, "nats per token lower (-1.", "its side and interval"),
    (v.WORSE, effect(0.01, noise=0.001), FIVE, "below the threshold that matters", "shown, but too small to matter"),
    (v.INCONCLUSIVE, WIDE, FIVE, f"{seeds_to_decide(WIDE, Endpoint('val_loss', MARGIN))} new seeds", "seeds"),
    (
        v.INCONCLUSIVE,
        effect(-1.0),
        counts(failed=1),
        "runs that failed to train are missing on one side",
        "why no word",
    ),
    (v.DIVERGED, None, counts(failed=8), "8 of 8 runs failed to train, of the baseline 0 of 8", "the counts"),
    (v.TOO_FEW_SEEDS, effect(-1.0, 4), FIVE, "5 pairs are the fewest for a word", "what is missing"),
    (v.INCOMPLETE, None, Counts(0, 0, 5, 0, waiting=3), "3 runs without a result", "what is awaited"),
]


@pytest.mark.parametrize(("word", "found", "runs", "part", "reason"), SENTENCES, ids=[row[-1] for row in SENTENCES])
def test_a_sentence_says_what_decided(word, found, runs, part, reason):
    assert part in sentence(word, Endpoint("val_loss", MARGIN), found, runs, [])


def test_an_unfair_arm_says_how_to_compare_it_anyway():
    assert "--allow batches,tokens" in sentence(
        v.NOT_COMPARABLE, Endpoint("val_loss"), None, FIVE, ["batches", "tokens"]
    )


def test_a_smaller_effect_needs_more_seeds_and_one_close_to_zero_is_decided_as_equivalent():
    endpoint = Endpoint("val_loss", MARGIN)
    few, many = (seeds_to_decide(effect(shift, noise=0.8), Endpoint("val_loss")) for shift in (0.9, 0.5))
    assert few is not None and many is not None and few < many
    assert seeds_to_decide(dataclasses.replace(effect(0.2, noise=0.3), delta=0.0), endpoint) is not None
    assert seeds_to_decide(dataclasses.replace(WIDE, delta=0.0), Endpoint("val_loss")) is None


def test_every_word_has_a_meaning():
    assert {row[4] for row in WORDS} | {v.LOWER, v.HIGHER} == v.MEANINGS.keys()
