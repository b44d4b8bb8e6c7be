"""Every shipped study is a question with arms that can be trained, and says in its first lines what it costs."""

from __future__ import annotations

import itertools
import re

import pytest

from nexus_ablate.config.compose import compose
from nexus_ablate.config.options import conf_dir
from nexus_ablate.measure.measures import find
from nexus_ablate.plain_data import load_yaml

PATHS = {path.stem: path for path in sorted(conf_dir().joinpath("studies").glob("*.yaml"))}
KEYS = {"question", "baseline", "arms", "seeds", "endpoints", "settings", "lr_grid", "match"}
RATES = 7
"""Learning rates of `lr_grid: auto`."""


@pytest.mark.parametrize("name", PATHS)
def test_a_shipped_study_asks_a_question_of_at_least_five_seeds_and_says_how_many_runs_it_takes(name):
    text = PATHS[name].read_text()
    study = load_yaml(text)
    head = text.partition("question:")[0].splitlines()
    assert study.keys() <= KEYS and study["question"].endswith("?")
    assert len(study["seeds"]) >= 5 and len(head) <= 4
    rates = RATES if "lr_grid" in study else 1
    settings = len(study.get("settings", [""]))
    runs = settings * (1 + len(study["arms"])) * rates * len(study["seeds"])
    assert re.fullmatch(rf"# {runs} runs, about \d+ minutes on two CPU cores( \(estimated\))?\.", head[-1])


@pytest.mark.parametrize("name", PATHS)
def test_the_arms_of_a_shipped_study_compose_and_differ_and_its_endpoints_are_measures(name):
    study = load_yaml(PATHS[name].read_text())
    for endpoint in study["endpoints"]:
        find(endpoint if isinstance(endpoint, str) else endpoint["name"])
    arms, settings = ["", *study["arms"].values()], study.get("settings", {"": ""}).values()
    sciences = []
    for setting, arm in itertools.product(settings, arms):
        overrides = dict(text.split("=") for text in [*study["baseline"], *setting.split(), *arm.split()])
        if overrides.get("optim.lr", "").endswith("x"):
            overrides["optim.lr"] = "0.01"  # a factor on the default, which the study resolves
        sciences.append(compose([f"{key}={value}" for key, value in overrides.items()]).science())
    assert all(one != other for one, other in itertools.combinations(sciences, 2))
