"""Shares of right answers as endpoints: compared by logits, and not at all at chance or at the ceiling."""

from __future__ import annotations

import re

import numpy as np
import pytest
from written_runs import Writer

from nexus_ablate.comparison.compare import compare
from nexus_ablate.comparison.verdict import BETTER, NOT_COMPARABLE, WORSE
from nexus_ablate.measure.measures import MEASURES, find
from nexus_ablate.study.endpoint import Endpoint

ACCURACY = Endpoint("recall/accuracy")
ITEMS, CHANCE = 512, 0.125


def judged(tmp_path, baseline, arm, chance=CHANCE):
    """The row of an arm, from shares of right answers by seed."""
    writer = Writer(tmp_path)
    for overrides, shares in (((), baseline), (("norm=layer",), arm)):
        for seed, share in enumerate(shares):
            recall = {"accuracy": share, "items": ITEMS, "chance": chance}
            writer.run(*overrides, seed=seed, summary={"recall": recall}, train_noise=str(overrides))
    writer.plan(("norm=layer",), endpoints=["recall/accuracy"])
    return compare(tmp_path / "study").tables[0].rows[1]


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


def test_the_logit_of_a_run_is_the_empirical_one_and_exists_at_0_and_1():
    figures = {"recall/accuracy": np.array([0.0, 0.25, 1.0]), "recall/items": np.array([8.0, 8.0, 8.0])}
    expected = [np.log(0.5 / 8.5), np.log(2.5 / 6.5), np.log(8.5 / 0.5)]
    np.testing.assert_allclose(ACCURACY.on_scale(figures.__getitem__), expected)


WORDS = [
    ([0.13, 0.12, 0.125, 0.13, 0.12], [0.125, 0.13, 0.12, 0.12, 0.13], NOT_COMPARABLE, "both guess"),
    ([0.02, 0.03, 0.02, 0.01, 0.02], [0.05, 0.06, 0.05, 0.06, 0.05], NOT_COMPARABLE, "both are worse than guessing"),
    ([1, 1, 1, 1, 1], [1, 1, 1, 511 / 512, 1], NOT_COMPARABLE, "one mistake in all runs"),
    ([0.12, 0.13, 0.12, 0.13, 0.12], [0.5, 0.6, 0.55, 0.52, 0.6], BETTER, "only the arm recalls"),
    ([1, 1, 1, 1, 1], [0.9, 0.91, 0.92, 0.9, 0.93], WORSE, "only the arm makes mistakes"),
    ([0.5, 0.55, 0.52, 0.5, 0.6], [0.8, 0.85, 0.82, 0.79, 0.9], BETTER, "both in between"),
]


@pytest.mark.parametrize(("baseline", "arm", "word", "reason"), WORDS, ids=[row[-1] for row in WORDS])
def test_words(tmp_path, baseline, arm, word, reason):
    row = judged(tmp_path, baseline, arm)
    assert row.word == word
    assert (row.unfair == ["saturated"]) is (word == NOT_COMPARABLE)


def test_without_the_floor_guessing_arms_would_get_a_word(tmp_path):
    """The negative control: two arms below chance, one of them less."""
    baseline, arm = WORDS[1][:2]
    assert judged(tmp_path, baseline, arm, chance=1e-6).word == BETTER


def test_every_share_of_right_answers_has_its_number_of_answers_and_its_floor_beside_it():
    shares = [measure for measure in MEASURES if measure.floor]
    assert len(shares) >= 8
    for measure in shares:
        endpoint = Endpoint(re.sub(r"{\w+}", "8", measure.name))
        assert find(endpoint.beside("items")).unit == "answers" and find(endpoint.beside(measure.floor))
        assert measure.most == 1.0
