"""Every shipped study is a question with arms that can be trained, and says in its first lines what it costs."""

from __future__ import annotations

import itertools
import re

import pytest

from nexus_ablate.config.compose import compose
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.study.arm_overrides import merged
from nexus_ablate.study.definition import read_study, shipped_studies
from nexus_ablate.study.study import FEWEST_SEEDS


@pytest.mark.parametrize("name", shipped_studies())
def test_a_shipped_study_asks_a_question_and_says_how_many_runs_it_takes(name):
    study, _ = read_study([name])
    head = shipped_studies()[name].read_text().partition("question:")[0].splitlines()
    arms, settings, rates = 1 + len(study.arms), max(len(study.settings), 1), max(len(study.rates(0.01)), 1)
    runs = arms * settings * rates * len(study.seeds)
    assert study.question.endswith("?") and len(study.seeds) >= FEWEST_SEEDS and len(head) <= 4
    assert re.fullmatch(rf"# {runs} runs, about \d+ minutes on two CPU cores( \(estimated\))?\.", head[-1])


@pytest.mark.parametrize("name", shipped_studies())
def test_the_arms_of_a_shipped_study_compose_and_differ(name):
    study, _ = read_study([name])
    configs = []
    settings = [*study.settings.values()] or [[]]
    for setting, arm in itertools.product(settings, [BASELINE, *study.arms]):
        configs.append(compose(merged(study.overrides_of(arm), setting)).science())
    assert all(one != other for one, other in itertools.combinations(configs, 2))
