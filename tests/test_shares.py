"""Shares of right answers as endpoints: compared by logits, and not at all at chance or at the ceiling."""

from __future__ import annotations

import re

import numpy as np
import pytest

from nexus_ablate.comparison.judging import judge_losses, saturation
from nexus_ablate.comparison.terms import Terms
from nexus_ablate.comparison.verdict import AT_CEILING, AT_CHANCE, BETTER, DIFFERENT, SATURATED, WORSE
from nexus_ablate.measure.measures import MEASURES, find
from nexus_ablate.study.endpoint import Endpoint

ACCURACY = Endpoint("recall/accuracy")
ITEMS, CHANCE, SEEDS = 512, 0.125, 5


def judged(shares, items=ITEMS, chance=CHANCE, endpoint=ACCURACY):
    """The verdicts of arms against the first, from (arms, seeds) shares of right answers."""
    shares = np.asarray(shares)
    table = {
        "recall/accuracy": shares,
        "recall/items": np.full(shares.shape, float(items)),
        "recall/chance": np.full(shares.shape, chance),
    }
    saturated = [saturation(endpoint, lambda name, a=a: table[name][[0, a]]) for a in range(len(shares))]
    losses = endpoint.on_scale(table.__getitem__)
    judgement = judge_losses(losses, Terms(endpoint=endpoint), values=shares, saturated=saturated)
    return [arm.verdict for arm in judgement.results[1:]]


RATIOS = {
    1.234: "x1.23",
    0.0123: "x0.0123",
    999.6: "x1,000",
    12340: "x12,300",
    1 / 296: "x1/296",
    1 / 12340: "x1/12,300",
}


@pytest.mark.parametrize("number", [float, np.float64])
def test_ratios_are_written_without_exponents(number):
    assert [ACCURACY.signed(number(np.log(ratio))) for ratio in RATIOS] == list(RATIOS.values())


SHARES = [0.002, CHANCE, 0.5, 0.98, 0.999]
SPREADS = {0.5: "seeds differ", 0.0: "one ability", 2.0: "some seeds learn it"}
FAST = [(CHANCE, 0.5), (0.98, 0.5)]
NULLS = [
    pytest.param(share, spread, id=f"{share}, {name}", marks=[pytest.mark.slow] * ((share, spread) not in FAST))
    for spread, name in SPREADS.items()
    for share in SHARES
]


@pytest.mark.parametrize(("share", "spread"), NULLS)
def test_null_tables_make_a_false_claim_in_at_most_5_percent(share, spread):
    """1,000 tables of a baseline and three arms."""
    random = np.random.default_rng(0)
    logits = np.log(share / (1 - share)) + spread * random.standard_normal((1000, 4, SEEDS))
    right = random.binomial(ITEMS, 1 / (1 + np.exp(-logits)))
    claims = sum(any(verdict.word in DIFFERENT for verdict in judged(table / ITEMS)) for table in right)
    assert claims <= 50


def test_the_logit_of_a_run_is_the_empirical_one_and_exists_at_0_and_1():
    figures = {"recall/accuracy": np.array([0.0, 0.25, 1.0]), "recall/items": np.array([8.0, 8.0, 8.0])}
    expected = [np.log(0.5 / 8.5), np.log(2.5 / 6.5), np.log(8.5 / 0.5)]
    np.testing.assert_allclose(ACCURACY.on_scale(figures.__getitem__), expected)


WORDS = [
    ([0.13, 0.12, 0.125, 0.13, 0.12], [0.125, 0.13, 0.12, 0.12, 0.13], AT_CHANCE, "both guess"),
    ([0.02, 0.03, 0.02, 0.01, 0.02], [0.05, 0.06, 0.05, 0.06, 0.05], AT_CHANCE, "both are worse than guessing"),
    ([1, 1, 1, 1, 1], [1, 1, 1, 511 / 512, 1], AT_CEILING, "one mistake in all runs"),
    ([0.12, 0.13, 0.12, 0.13, 0.12], [0.5, 0.6, 0.55, 0.52, 0.6], BETTER, "only the arm recalls"),
    ([1, 1, 1, 1, 1], [0.9, 0.91, 0.92, 0.9, 0.93], WORSE, "only the arm makes mistakes"),
    ([0.5, 0.55, 0.52, 0.5, 0.6], [0.8, 0.85, 0.82, 0.79, 0.9], BETTER, "both in between"),
]


@pytest.mark.parametrize(("baseline", "arm", "word", "reason"), WORDS, ids=[row[-1] for row in WORDS])
def test_words(baseline, arm, word, reason):
    assert judged([baseline, arm])[0].word == word


def test_the_sentence_of_a_saturated_share_says_so():
    assert "guessing" in judged([WORDS[0][0], WORDS[0][1]])[0].sentence
    assert "the odds of a right answer (x" in judged([WORDS[5][0], WORDS[5][1]])[0].sentence


def test_without_the_floor_guessing_arms_would_get_a_word():
    """The negative control: two arms below chance, one of them less."""
    baseline, arm = WORDS[1][:2]
    assert judged([baseline, arm], chance=1e-6)[0].word == BETTER


def test_every_share_of_right_answers_has_its_number_of_answers_and_its_floor_beside_it():
    shares = [measure for measure in MEASURES if measure.floor]
    assert len(shares) >= 8
    for measure in shares:
        endpoint = Endpoint(re.sub(r"{\w+}", "8", measure.name))
        assert find(endpoint.beside("items")).unit == "answers" and find(endpoint.beside(measure.floor))
        assert measure.most == 1.0
    assert not set(SATURATED) & set(DIFFERENT)
