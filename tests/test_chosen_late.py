"""What was chosen when results had been seen is called so, and shares the 5% with what could have been chosen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from written_runs import Writer

from nexus_ablate.cli import main
from nexus_ablate.comparison import statistics
from nexus_ablate.comparison.judging import judge_losses
from nexus_ablate.comparison.terms import Terms

QUIET = (0.004, -0.003, 0.001, -0.005, 0.003, 0.002, -0.001, 0.0045, -0.0035, 0.0005)
LOOKS = {"looks": [5, 10], "look_weights": [0.15, 0.85], "seeds": list(range(10))}


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A study of one arm at five seeds, in runs/mine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return two_arms(tmp_path / "runs", "mine")


def two_arms(root, name, trained: Iterable[int] = range(5), **plan: Any):
    writer = Writer(root, name)
    more_seeds(writer, trained)
    writer.plan(("norm=layer",), **plan)
    return writer


def more_seeds(writer, seeds, shift=0.1):
    for seed in seeds:
        writer.run(seed=seed, loss=2.0 + QUIET[seed])
        writer.run("norm=layer", seed=seed, loss=2.0 + shift + QUIET[-seed])


def answer(capsys, *words):
    assert main(["compare", *words]) == 0
    return capsys.readouterr().out


def conditions(capsys, *words):
    return {check["name"]: check for check in json.loads(answer(capsys, *words, "--json", "-"))["checks"]}


def test_seeds_that_a_study_does_not_have_make_its_verdicts_exploratory(study, capsys):
    assert "exploratory" not in answer(capsys, "runs/mine")
    more_seeds(study, (5, 6))
    assert "exploratory: WORSE" in answer(capsys, "runs/mine")
    plan = conditions(capsys, "runs/mine")["plan"]
    assert plan["status"] == "WARN" and "2 seeds that the study does not have (5, 6)" in plan["text"]
    for path in Path("runs/mine/norm=layer").glob("s[56]*"):
        shutil.rmtree(path)
    assert conditions(capsys, "runs/mine")["seeds"]["text"] == "norm=layer lacks seeds 5, 6"


def test_a_study_and_its_confirmation_together_are_exploratory(study, tmp_path, capsys):
    two_arms(tmp_path / "runs", "mine-confirm", range(5, 10), seeds=list(range(5, 10)), confirms="mine")
    assert "exploratory" not in answer(capsys, "runs/mine-confirm")
    assert "exploratory: WORSE" in answer(capsys, "runs/mine", "runs/mine-confirm", "--baseline", "mine/baseline")


def test_an_arm_that_a_study_does_not_have_was_not_fixed_before_the_runs(study, capsys):
    study.arm("norm=dyt", losses=[2.1 + x for x in QUIET[:5]])
    plan = conditions(capsys, "runs/mine")["plan"]
    assert plan["status"] == "WARN" and "not an arm of the study: norm=dyt" in plan["text"]


@pytest.mark.parametrize("key", ["looks", "look_weights", "share", "seeds"])
def test_looks_and_seeds_that_were_amended_after_the_first_run_make_verdicts_exploratory(study, capsys, key):
    amendment = {"when": "2020-01-01T00:00:00+00:00", "changes": [f"{key}: 1 -> 2"]}
    study.plan(("norm=layer",), amendments=[amendment])
    printed = answer(capsys, "runs/mine")
    assert "exploratory: WORSE" in printed and f"{key} amended after the first run" in printed


def test_another_amendment_does_not(study, capsys):
    amendment = {"when": "2020-01-01T00:00:00+00:00", "changes": ["question: a -> b"]}
    study.plan(("norm=layer",), amendments=[amendment])
    assert "exploratory" not in answer(capsys, "runs/mine")


def test_two_arms_of_a_study_with_looks_are_not_compared_at_the_whole_level(study, capsys):
    study.plan(("norm=layer",), **LOOKS)
    assert "exploratory" not in answer(capsys, "runs/mine")
    assert "exploratory: WORSE" in answer(capsys, "runs/mine", "--arm", "norm=layer", "--baseline", "baseline")


def test_a_second_study_with_looks_or_added_seeds_makes_both_exploratory(study, tmp_path, capsys):
    for name, plan in (("with_looks", LOOKS), ("with_more", {"added": [{"when": "2020-01-01", "seeds": [4]}]})):
        two_arms(tmp_path / "runs", name, **plan)
        printed = answer(capsys, "runs/mine", f"runs/{name}", "--baseline", "mine/baseline")
        assert "exploratory: WORSE" in printed and name in printed.rpartition("exploratory: ")[2]


def test_arms_of_a_study_that_are_left_out_still_share_its_5_percent(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng, arms = np.random.default_rng(0), ["norm=layer", "norm=dyt", "bias=on", "ffn=gelu"]
    writer = Writer(tmp_path / "runs", "mine")
    for overrides in ((), *((arm,) for arm in arms)):
        writer.arm(*overrides, losses=list(2.0 + rng.normal(0, 0.01, 5)))
    writer.plan(*((arm,) for arm in arms))
    part = json.loads(answer(capsys, "runs/mine/baseline", "runs/mine/norm=layer", "--json", "-"))
    row = next(row for row in part["rows"] if row["arm"] == "norm=layer")
    assert part["comparisons"] == 4
    differences = np.array([d for d in row["differences"] if d is not None])
    half = statistics.t_quantile(1 - statistics.sidak(0.04, 4) / 2, 4) * differences.std(ddof=1) / 5**0.5
    assert row["high"] - row["low"] == pytest.approx(2 * half)


def test_the_noise_of_an_arm_that_is_not_comparable_is_not_that_of_two_others(study, capsys):
    rng = np.random.default_rng(0)
    for seed in range(5):
        study.run("norm=dyt", seed=seed, loss=2.2 + rng.normal(0, 0.004))
        study.run("bias=on", seed=seed, loss=2.2 + rng.normal(0, 0.006), evaluation="another")
    study.plan(("norm=layer",), ("norm=dyt",), ("bias=on",))
    picked = ["runs/mine", "--arm", "norm=dyt", "--baseline", "norm=layer", "--json", "-"]
    with_it = json.loads(answer(capsys, *picked))["rows"][1]
    for path in Path("runs/mine/bias=on").iterdir():
        shutil.rmtree(path)
    assert {key: json.loads(answer(capsys, *picked))["rows"][1][key] for key in ("low", "high")} == {
        key: with_it[key] for key in ("low", "high")
    }


def any_pair(rng, arms=7, seeds=5):
    """Whether a table without effects shows a difference against any of its rows."""
    losses = rng.normal(size=(arms, seeds)) + rng.normal(size=seeds)
    plan = Terms(family=arms * (arms - 1) // 2)
    tables = (losses[[first, *(i for i in range(arms) if i != first)]] for first in range(arms))
    return any(arm.effect and arm.effect.excludes_zero for table in tables for arm in judge_losses(table, plan).results)


@pytest.mark.slow
def test_any_pair_of_arms_is_called_different_in_at_most_one_table_of_twenty():
    rng = np.random.default_rng(0)
    assert sum(any_pair(rng) for _ in range(200)) <= 18
