"""Sweeps with -m: the study that they make, what continues it, and what is refused."""

from __future__ import annotations

import pytest
from wandb_server import serving_alone

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.launch.multirun import study_of
from nexus_ablate.study.record import load
from nexus_ablate.training.session import train

STUDIES = (
    ("norm=rms,layer seed=0,1", "norm=rms,layer", [], ["norm=layer"], [0, 1]),
    ("norm=layer,none", "norm=layer,none", ["norm=layer"], ["norm=none"], [0]),
    ("norm=choice(rms,layer) train.steps=9", "norm=choice_rms,layer_", ["train.steps=9"], ["norm=layer"], [0]),
    ("seed=range(0,3)", "baseline", [], [], [0, 1, 2]),
    ("norm=layer seed=sort(2,1)", "norm=layer", ["norm=layer"], [], [1, 2]),
    ("norm=rms,layer bias=on,off", "bias=on,off,norm=rms,layer", [], 3, [0]),
    ("norm=glob(l*)", "norm=glob_l__", ["norm=layer"], 2, [0]),
    ("experiment=mine norm=rms,layer", "mine", [], ["norm=layer"], [0]),
    ("norm=glob(r*) norm.eps=1e-3", "norm=glob_r__", ["norm.eps=0.001"], 3, [0]),
)


@pytest.mark.parametrize(("words", "name", "baseline", "arms", "seeds"), STUDIES)
def test_a_sweep_is_a_study_of_its_combinations(words, name, baseline, arms, seeds):
    study, launch = study_of([*words.split(), "train.device=cpu"])
    assert study.name.partition(",+")[0] == name
    assert (sorted(study.baseline), study.seeds, study.multirun, launch) == (
        baseline,
        seeds,
        True,
        ["train.device=cpu"],
    )
    if isinstance(arms, int):
        assert len(study.arms) == arms
    else:
        assert [*study.arms] == arms


REFUSED = (
    ("optim.groups=[gate:lr:2] seed=0,1", "no parameter of this model has the role gate"),
    ("train.device=cpu,cuda norm=rms,layer", "all of its runs are carried out in one way"),
    ("experiment=a,b norm=rms,layer", "all of its runs are carried out in one way"),
    ("seed=0,0", "seeds, each once"),
)


@pytest.mark.parametrize(("words", "problem"), REFUSED)
def test_what_cannot_be_swept_is_refused_before_anything_starts(words, problem, tiny_run, tmp_path, capsys):
    assert main(["-m", *tiny_run(), *words.split()]) == errors.CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and problem in lines[0]
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def sweep(tiny_run, instant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = [text for text in tiny_run() if not text.startswith("runs_dir")]
    return lambda *words: main(["-m", *base, *words])


def test_a_key_of_a_swept_option_is_kept_by_each_of_its_values(sweep, instant):
    assert sweep("norm=rms,layer", "norm.eps=1e-3") == 0
    assert sweep("norm.eps=1e-5,1e-2", "norm=layer") == 0
    norms = [(job.config.norm.name, job.config.norm.keys["eps"]) for job in instant.jobs]
    assert norms == [("rms", 1e-3), ("layer", 1e-3), ("layer", 1e-5), ("layer", 1e-2)]


def test_the_same_sweep_continues_and_more_seeds_are_added_ones(sweep, instant, tmp_path, capsys):
    assert sweep("norm=rms,layer", "seed=0,1") == 0
    assert capsys.readouterr().err.splitlines()[-1] == "next  nexus-ablate compare norm=rms,layer"
    assert sweep("norm=rms,layer", "seed=0,1") == 0 and len(instant.trained) == 4
    assert sweep("norm=rms,layer", "seed=2") == 0
    assert instant.trained[4:] == [("baseline", 2), ("norm=layer", 2)]
    study = load(tmp_path / "runs/norm=rms,layer")
    assert (study.seeds, study.added_seeds, study.multirun) == ([0, 1, 2], [2], True)
    assert main(["status", "norm=rms,layer"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "6 finished"


def test_other_arms_are_refused_with_another_experiment_that_works(sweep, instant, capsys):
    assert sweep("norm=rms,layer", "experiment=mine") == 0
    assert sweep("norm=rms,none", "experiment=mine") == errors.CONFIG
    lines = capsys.readouterr().err.splitlines()[-3:]
    assert "arm norm=none added; arm norm=layer removed" in lines[1] and lines[2] == "  try: experiment=mine-2"
    assert sweep("norm=rms,none", "experiment=mine-2") == 0
    assert sweep("norm=rms,layer") == 0 and sweep("norm=rms,layer", "bias=on") == errors.CONFIG
    assert capsys.readouterr().err.splitlines()[-1] == "  try: experiment=norm-rms-layer-2"
    assert sweep("norm=rms,layer", "bias=on", "experiment=norm-rms-layer-2") == 0


def test_a_single_run_in_the_folder_of_an_arm_is_called_one_of_another_configuration(sweep, tiny_run, tmp_path, capsys):
    train(compose(tiny_run("experiment=mine", "train.steps=4")), quiet=True, arm="baseline")
    assert sweep("norm=rms,layer", "experiment=mine") == errors.CONFIG
    lines = capsys.readouterr().err.splitlines()[-3:]
    assert lines[0] == "error: study mine has runs of another configuration than its arms, in folders of the same names"
    assert "1 run, such as baseline/s0-" in lines[1] and lines[2] == "  try: experiment=mine-2"
    assert sweep("norm=rms,layer", "experiment=mine-2") == 0


def test_a_combination_that_cannot_be_run_stops_no_other(sweep, instant, capsys):
    assert sweep("n_kv_heads=1,3") == 0
    assert "n_kv_heads=3 is refused: " in capsys.readouterr().err
    assert [folder for folder, _ in instant.trained] == ["baseline"]


def test_a_failed_run_of_a_sweep_is_run_again_by_the_same_command_which_says_so(sweep, instant, capsys):
    instant.failing = {("norm=layer", 0)}
    assert sweep("norm=rms,layer") == errors.BUG
    assert "\nthe same command runs the failed ones again\n" in capsys.readouterr().err
    instant.failing = set()
    assert sweep("norm=rms,layer") == 0 and len(instant.trained) == 3


def test_each_size_of_a_sweep_keeps_its_own_budget(sweep, instant, text_file):
    text_file.write_text("the quick brown fox jumps over the lazy dog.\n" * 9000)
    assert sweep("train.steps=auto", "model.n_layers=2,1") == 0
    steps = [job.config.resolved.steps for job in instant.jobs]
    assert steps[0] == 2 * steps[1], "as the same run alone"


@pytest.mark.slow
def test_the_runs_of_a_sweep_have_its_name_as_their_group_on_wandb(tiny_run, tmp_path, monkeypatch):
    with serving_alone(tmp_path, monkeypatch) as server:
        assert main(["-m", *tiny_run("train.steps=4"), "norm=rms,layer", "seed=0,1"]) == 0
        assert main(["-m", *tiny_run("train.steps=4"), "experiment=mine", "norm=rms,layer"]) == 0
        assert main(["sync", "runs"]) == 0
        groups = [(run.config["study"], run.fields["groupName"]) for run in server.runs.values()]
    assert sorted(groups) == [("mine", "mine")] * 2 + [("norm=rms,layer", "norm=rms,layer")] * 4
