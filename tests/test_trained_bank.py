"""The verdict on losses of runs that were trained: tests/bank.json holds 60 seeds of the arms of tests/bank.yaml.

`scripts/bank.py` makes it anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nexus_ablate.comparison.statistics import LEVEL, paired_effect, sidak
from nexus_ablate.comparison.verdict import BETTER, WORSE, Counts, word_of
from nexus_ablate.study.endpoint import Endpoint

BANK = json.loads((Path(__file__).parent / "bank.json").read_text())


def words(losses):
    """The words of arms against the first."""
    found, seeds = [], losses.shape[1]
    for arm in losses[1:]:
        effect = paired_effect(arm - losses[0], sidak(LEVEL, len(losses) - 1))
        found.append(word_of(Endpoint("val_loss"), effect, Counts(seeds, 0, seeds, 0), [], False))
    return found


@pytest.mark.parametrize(("tables", "accepted"), [(200, 18), pytest.param(1000, 67, marks=pytest.mark.slow)])
def test_trained_seeds_dealt_out_as_arms_are_rarely_called_different(tables, accepted):
    """Eight arms and a baseline of five seeds each, no seed twice; accepted: 5% at 99% of the binomial."""
    rng, seeds = np.random.default_rng(0), np.array(BANK["baseline"])
    assert len(seeds) == len(set(seeds)) == 60
    claims = sum(
        any(w in (BETTER, WORSE) for w in words(rng.choice(seeds, (9, 5), replace=False))) for _ in range(tables)
    )
    assert claims <= accepted


@pytest.mark.parametrize(("arm", "expected"), [("optim.lr=0.0003", WORSE), ("train.steps=300", BETTER)])
def test_a_tenth_of_the_rate_and_twice_the_tokens_are_called_what_they_are(arm, expected):
    """Twenty draws of five seeds, each in a table with three other arms."""
    rng, known = np.random.default_rng(1), [a for a in BANK if None not in BANK[a]]
    actual = []
    for _ in range(20):
        seeds = rng.choice(60, 5, replace=False)
        actual.append(words(np.array([BANK[a] for a in known])[:, seeds])[known.index(arm) - 1])
    assert actual.count(expected) >= 19


def test_a_tenth_fewer_tokens_is_less_than_a_seed_deviation_here_and_is_found_with_sixty_seeds():
    losses = np.array([BANK["baseline"], BANK["train.steps=135"]])
    assert 0 < (losses[1] - losses[0]).mean() < losses[0].std(ddof=1)
    assert words(losses) == [WORSE]


def test_without_norms_at_300_times_the_rate_every_run_diverges():
    assert BANK["norm=none,optim.lr=1"] == [None] * 60
