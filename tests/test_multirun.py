"""Multiruns: what they vary, and what is refused."""

from __future__ import annotations

import pytest
from wandb_server import serving_alone

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.execution.multirun import expanded

EXPANDED = (
    ("norm=rms,layer seed=0,1", 4, "every combination"),
    ("norm=choice(rms,layer)", 2, "a choice"),
    ("seed=range(0,3)", 3, "a range without its end"),
    ("norm=glob(l*)", 3, "the options that match"),
    ("norm=glob(r*) norm.eps=1e-3", 4, "which all have the key"),
    ("norm=glob(*,exclude=[l*,d*,n*]) seed=1,2", 14, "all others, twice"),
    ("seed=sort(2,1)", 2, "sorted values"),
    ("norm=rms", 1, "one run"),
)


@pytest.mark.parametrize(("words", "number", "reason"), EXPANDED)
def test_hydra_s_own_parser_expands_the_overrides(words, number, reason):
    combinations, _ = expanded(words.split())
    assert len(combinations) == number, (reason, combinations)
    assert len(set(map(tuple, combinations))) == len(combinations)


def test_an_interval_is_refused_because_nothing_searches_it(capsys):
    assert main(["-m", "optim.lr=interval(1e-4,1e-2)"]) == errors.CONFIG
    assert "values, not an interval" in capsys.readouterr().err


@pytest.mark.parametrize("sweeper", ["optuna", "ax", "nevergrad"])
def test_sweepers_that_search_are_refused(sweeper, capsys):
    assert main(["-m", f"hydra/sweeper={sweeper}", "optim.lr=interval(1e-4,1e-2)"]) == errors.CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "sweepers that search are not supported" in lines[0]


def test_a_role_that_no_parameter_has_is_refused_before_anything_starts(tiny_run, tmp_path, capsys):
    assert main(["-m", *tiny_run(), "optim.groups=[gate:lr:2]", "seed=0,1"]) == errors.CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "no parameter of this model has the role gate" in lines[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_runs_of_a_multirun_have_a_group_on_wandb_and_those_of_an_experiment_have_its_name(
    tiny_run, tmp_path, monkeypatch
):
    with serving_alone(tmp_path, monkeypatch) as server:
        assert main(["-m", *tiny_run("train.steps=4"), "norm=rms,layer", "seed=0,1"]) == 0
        assert main(["-m", *tiny_run("train.steps=4"), "experiment=mine", "norm=rms,layer"]) == 0
        assert main(["sync", "runs"]) == 0
        groups = [(run.config["study"], run.fields["groupName"]) for run in server.runs.values()]
    assert sorted(groups) == [("mine", "mine")] * 2 + [("scratch", "norm=rms,layer")] * 4


@pytest.mark.slow
def test_an_arm_with_a_list_of_roles_is_named_as_typed(tiny_run, capfd):
    assert main(["-m", *tiny_run(), "train.steps=4", "optim.groups=[],[embedding:lr:0.1]"]) == 0
    assert "optim.groups=[embedding:lr:0.1]" in capfd.readouterr().err


def test_only_a_study_names_the_flag_that_runs_failed_runs_again(tiny_run, instant, capsys):
    class Everything:
        def __contains__(self, run):
            return True

    instant.failing = Everything()
    for words, named in ((["-m", "norm=rms,layer"], False), (["study", "mine", "vary.norm=layer", "seeds=0"], True)):
        assert main([*words, *tiny_run()]) != 0
        assert ("--retry failed runs the failed ones again" in capsys.readouterr().err) == named
