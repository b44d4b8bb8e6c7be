"""Looks: further seeds go to the arms that are undecided, and to nobody else."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import yaml
from processes import answers
from written_runs import Writer

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.comparison.within_stratum import compare_stratum as compare
from nexus_ablate.errors import ConfigError
from nexus_ablate.planning.cores_and_gpus import Places
from nexus_ablate.planning.jobs import Runs
from nexus_ablate.planning.preview import make_plan
from nexus_ablate.runs import find_runs, read_run
from nexus_ablate.study.definition import read_request
from tests.test_study_queue import nexus, photograph

ARMS = ("vary.norm=layer,rms", "vary.bias=on", "vary.placement=post")


@pytest.fixture
def study(tiny_run, tmp_path):
    """A command that runs a study of tiny runs with three looks, and what it may say besides."""
    base = ["study", "mine", "seeds.looks=2,3,5", "--workers", "1", *tiny_run()]
    return lambda *arguments: [*base, *arguments]


def said(capsys):
    return " ".join(capsys.readouterr().err.split())


# ------------------------------------------------------------------------------------------------------ who runs when


def test_further_seeds_go_to_the_undecided_arms_and_the_same_command_then_trains_nothing(
    study, instant, tmp_path, capsys
):
    instant.decided = {"norm=layer": 1, "bias=on": 2}
    assert main(study(*ARMS)) == 0
    everyone = ["baseline", "norm=layer", "bias=on", "placement=post"]
    expected = [(arm, seed) for seed in (0, 1) for arm in everyone]
    expected += [(arm, 2) for arm in ("baseline", "bias=on", "placement=post")]
    expected += [(arm, seed) for seed in (3, 4) for arm in ("baseline", "placement=post")]
    assert instant.trained == expected
    text = said(capsys)
    assert "look 2 of 3: 1 more seed for the undecided bias=on, placement=post" in text
    assert "look 3 of 3: 2 more seeds for the undecided placement=post" in text
    ends = ("norm=layer: 2 of at most 5 seeds, WORSE", "bias=on: 3 of at most 5 seeds, WORSE",
            "placement=post: 5 of at most 5 seeds, INCONCLUSIVE", "baseline: 5 of at most 5 seeds")  # fmt: skip
    assert all(line in text for line in ends), text
    assert "baseline: 5 of at most 5 seeds," not in text, "norm=rms, which equals the baseline, has its name"

    before = photograph(tmp_path / "runs")
    by_name = ["study", "mine", f"runs_dir={tmp_path / 'runs'}", "train.device=cpu"]
    by_directory = ["study", str(tmp_path / "runs/mine"), "train.device=cpu"]
    for again in (study(*ARMS), by_name, by_directory):
        assert main(again) == 0
        assert len(instant.trained) == len(expected)
        text = said(capsys)
        assert f"nothing to run: all {len(expected)} runs have ended" in text
        assert all(line in text for line in ends), text
    assert photograph(tmp_path / "runs") == before


def test_a_study_says_once_where_its_runs_are_on_wandb(study, instant, capsys):
    end = instant.end

    def sent(job, state):
        end(job, state)
        place = {"id": job.path.name, "project": "p", "url": f"https://wandb.test/me/p/runs/{job.path.name}"}
        (job.path / "wandb.json").write_text(json.dumps(place))

    instant.end = sent
    assert main(study("vary.norm=layer")) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("W&B")] == ["W&B: https://wandb.test/me/p"]


def test_looks_take_the_seeds_that_a_file_names(tiny_run, instant, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    looks = {"seeds": [10, 12, 11, 14], "looks": [2, 4], "look_weights": [0.5, 0.5]}
    file.write_text(yaml.safe_dump({"question": "?", "arms": ["norm=layer"], **looks}))
    assert main(["study", str(file), "--workers", "1", *tiny_run()]) == 0
    assert [seed for _, seed in instant.trained] == [10, 10, 12, 12, 11, 11, 14, 14]
    assert "look 2 of 2: 2 more seeds for the undecided norm=layer" in said(capsys)


def test_nobody_gets_further_seeds_once_everybody_is_decided(study, instant):
    instant.decided = {"norm=layer": 1}
    assert main(study(ARMS[0])) == 0
    assert {seed for _, seed in instant.trained} == {0, 1}


@pytest.mark.parametrize("after", [1, 5])
def test_a_study_that_is_stopped_in_any_look_continues_and_trains_nothing_twice(study, instant, after, capsys):
    instant.stop_after = after
    assert main(study(ARMS[0])) == errors.PREEMPTED
    assert len(instant.trained) == after
    instant.stop_after = float("inf")
    capsys.readouterr()
    assert main(study(ARMS[0])) == 0
    text = said(capsys)
    assert f"{after} already ended, {'3 runs' if after == 1 else '1 run'} queued" in text
    assert Counter(Counter(instant.trained).values()) == {1: 10}
    assert "norm=layer: 5 of at most 5 seeds" in text


@pytest.mark.parametrize("run", [("norm=layer", 2), ("baseline", 0)])
def test_a_look_with_a_failed_run_is_not_judged_until_it_is_tried_again(study, instant, run, capsys):
    instant.failing = {run}
    assert main(study(ARMS[0])) == errors.BUG
    number = 2 if run[1] == 2 else 1
    text = said(capsys)
    assert f"look {number} is incomplete, so no arm gets more seeds" in text
    assert "--retry failed" in text
    assert max(seed for _, seed in instant.trained) == max(run[1], 1)
    instant.failing = set()
    assert main(study(ARMS[0], "--retry", "failed")) == 0
    assert Counter(instant.trained)[run] == 2
    assert {seed for _, seed in instant.trained} == {0, 1, 2, 3, 4}


def test_the_exit_status_is_that_of_the_runs_of_all_looks(study, instant, tmp_path):
    assert main(study("vary.norm=layer")) == 0
    (path,) = (instant_path for instant_path in find_runs([tmp_path / "runs" / "mine" / "norm=layer"])
               if instant_path.name.startswith("s4-"))  # fmt: skip
    status = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps(status | {"state": "diverged", "reason": "loss"}))
    assert main(study("vary.norm=layer")) == errors.DIVERGED


@pytest.mark.parametrize("text", ["", '{"val_l', None])
def test_a_finished_run_without_a_readable_summary_is_named_and_not_trained_again(
    study, instant, tmp_path, capsys, text
):
    assert main(study("vary.norm=layer")) == 0
    folder = tmp_path / "runs" / "mine"
    summary = next((folder / "norm=layer").glob("s4-*")) / "summary.json"
    summary.unlink() if text is None else summary.write_text(text)
    before, trained = photograph(folder), len(instant.trained)
    capsys.readouterr()
    assert main(study("vary.norm=layer")) == errors.BUG
    text = said(capsys)
    assert f"norm=layer s4 failed: {summary}" in text and "move the run directory away" in text
    assert photograph(folder) == before
    assert len(instant.trained) == trained


GRID = ("lr_grid=1e-3,3e-3", "tuning_seeds=7,8", "optim.lr=3e-3")


def test_with_a_grid_only_the_runs_around_each_arm_s_best_rate_are_extended(study, instant):
    """The best rate of the baseline is 3e-3, that of norm=layer 1e-3."""
    instant.decided = {"bias=on": 1}
    instant.losses = {"norm=layer,optim.lr=0.001": 0.5, "norm=layer": 0.9, "baseline": 0.8, "bias=on": 0.8}
    assert main(study("vary.norm=layer", "vary.bias=on", *GRID)) == 0
    later = [(arm, seed) for arm, seed in instant.trained if 2 <= seed < 5]
    beside = ("optim.lr=0.00212", "baseline", "optim.lr=0.00424")
    beside += tuple(f"norm=layer,optim.lr={rate}" for rate in (0.000707, 0.001, 0.00141))
    assert later == [(arm, seed) for seed in (2, 3, 4) for arm in beside]
    assert {seed for arm, seed in instant.trained if arm == "norm=layer,optim.lr=0.001"} == {0, 1, 2, 3, 4, 7, 8}


@pytest.mark.parametrize(
    ("losses", "further"),
    [
        ({"optim.lr=0.00212": 0.85, "optim.lr=0.00424": 0.85}, []),
        ({"optim.lr=0.00212": 0.85, "optim.lr=0.00424": 0.7}, [0.006]),
        ({"optim.lr=0.00212": 0.85, "optim.lr=0.00424": 0.7, "optim.lr=0.006": 0.6}, [0.006, 0.00849]),
        ({"optim.lr=0.00212": 0.7, "optim.lr=0.0015": 0.6, "optim.lr=0.00106": 0.5}, [0.0015, 0.00106]),
    ],
)
def test_further_rates_are_trained_while_the_lowest_loss_is_at_the_outermost_twice_at_most(
    study, instant, losses, further
):
    instant.decided = {"norm=layer": 1}
    instant.losses = {"baseline": 0.8, "norm=layer": 0.8} | losses
    assert main(study("vary.norm=layer", *GRID)) == 0
    trained = dict.fromkeys(arm for arm, seed in instant.trained if seed < 2 and arm.startswith("optim.lr="))
    assert list(trained)[2:] == [f"optim.lr={rate}" for rate in further]


def test_status_counts_the_runs_of_a_grid_that_are_to_come(study, instant, tmp_path, capsys):
    instant.stop_after = 3
    assert main(study("vary.norm=layer", *GRID)) == errors.PREEMPTED
    capsys.readouterr()
    assert main(["status", str(tmp_path / "runs/mine")]) == 0
    waiting = 2 * 2 * 2 - 3 + 2 * 3 * 2  # arms x rates x tuning seeds, and arms x rates x seeds of the first look
    assert f"3 finished, {waiting} waiting" in capsys.readouterr().out


def test_an_arm_is_not_trained_at_a_rate_at_which_its_tuning_run_exploded(study, instant):
    """Although the run recovered to the lowest loss: its pairs would be lost to the verdict."""
    instant.losses = {"norm=layer,optim.lr=0.001": 0.5, "norm=layer": 0.9}
    instant.exploding = {"norm=layer,optim.lr=0.001"}
    assert main(study("vary.norm=layer", *GRID)) == 0
    assert {seed for arm, seed in instant.trained if arm == "norm=layer,optim.lr=0.001"} == {7, 8}
    assert {seed for arm, seed in instant.trained if arm == "norm=layer"} == {0, 1, 2, 3, 4, 7, 8}


# ------------------------------------------------------------------------------------------------- study.yaml and files


def test_the_record_has_seeds_looks_and_weights_and_the_study_is_found_by_its_name(study, instant, tmp_path):
    assert main(study("vary.norm=layer")) == 0
    record = yaml.safe_load((tmp_path / "runs/mine/study.yaml").read_text())
    assert (record["seeds"], record["looks"]) == ([0, 1, 2, 3, 4], [2, 3, 5])
    assert record["look_weights"] == pytest.approx([0.3, 0.3, 0.4])
    again = read_request(["mine", f"runs_dir={tmp_path / 'runs'}"]).study
    assert (again.looks, again.look_weights, again.seeds) == ([2, 3, 5], record["look_weights"], [0, 1, 2, 3, 4])


def test_looks_are_fixed_like_the_rest_of_a_launched_study(study, instant, capsys):
    assert main(study("vary.norm=layer")) == 0
    capsys.readouterr()
    for changed in (["seeds.looks=2,5"], ["seeds.weights=0.5,0.25,0.25"]):
        assert main(study("vary.norm=layer", *changed)) == errors.CONFIG
        assert "changed since its first launch" in said(capsys)


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("{looks: [8, 12, 20]}", [0.3, 0.3, 0.4]),
        ("{looks: [5, 15]}", [0.25, 0.75]),
        ("{looks: [5, 6, 7], weights: [0.2, 0.2, 0.6]}", [0.2, 0.2, 0.6]),
    ],
)
def test_a_study_file_has_looks_with_weights_by_default_or_of_its_own(tmp_path, text, weights):
    (tmp_path / "mine.yaml").write_text(f"question: which?\narms: [norm=layer]\nseeds: {text}\n")
    definition = read_request([f"{tmp_path / 'mine.yaml'}"]).study
    assert definition.look_weights == pytest.approx(weights)
    assert definition.seeds == list(range(definition.looks[-1]))
    assert definition.first_seeds == list(range(definition.looks[0]))
    assert read_request([f"{tmp_path / 'mine.yaml'}", "seeds=0,1"]).study.looks == []


BAD = (
    "seeds.looks=5", "seeds.looks=", "seeds.looks=8,5", "seeds.looks=5,5", "seeds.looks=0,5", "seeds.looks=1,5",
    "seeds.looks=a,b", "seeds.looks=5,8,1000000000", "seeds.looks=5.5,8", "seeds.looks=5,8 seeds=0,1",
    "seeds.looks=5,8 seeds.weights=0.5", "seeds.looks=5,8 seeds.weights=0.5,0.6", "seeds.looks=5,8 seeds.weights=-1,2",
    "seeds.looks=5,8 seeds.weights=a,b", "seeds.weights=0.5,0.5", "seeds={look:[5,8]}",
    "seeds.looks=2,8", "seeds.looks=4,6,9 seeds.weights=0.2,0.2,0.6",
    "seeds.looks=5,8 lr_grid=1e-3 tuning_seeds=7,8", "lr_grid=1e-3,3e-3 tuning_seeds=7",
)  # fmt: skip


def test_looks_that_cannot_be_are_three_lines_before_torch_is_there(tmp_path):
    results = answers([["study", "mine", "vary.norm=layer", *bad.split()] for bad in BAD], tmp_path)
    for bad, (status, lines) in zip(BAD, results, strict=True):
        assert status == errors.CONFIG, bad
        assert [line.split(":")[0].strip() for line in lines] == ["error", "got", "try"], (bad, lines)
        assert "a study has no" not in lines[0], bad
    assert not list(tmp_path.iterdir())


def test_no_look_is_at_fewer_seeds_than_a_verdict_needs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["plan", "mine", "vary.norm=layer", "model=femto", "train.steps=2"]
    assert main([*command, "seeds.looks=2,3,5"]) == errors.CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: a look at fewer than 5 seeds") and lines[2] == "  try: seeds.looks=5,6,8"
    assert main([*command, "seeds.looks=5,6,8"]) == 0
    Writer(tmp_path / "runs", "old").plan(("norm=layer",), looks=[5, 6], look_weights=[0.5, 0.5], seeds=[*range(6)])
    assert main(["plan", "old", "seeds.looks=3,5"]) == errors.CONFIG


def test_looks_in_a_study_file_are_a_mapping_of_two_keys(tmp_path):
    (tmp_path / "mine.yaml").write_text("question: which?\narms: [norm=layer]\nseeds: {look: [5, 8]}\n")
    with pytest.raises(ConfigError, match="no key of this name") as caught:
        read_request([f"{tmp_path / 'mine.yaml'}"])
    assert "try: seeds: {looks:" in str(caught.value)


# ---------------------------------------------------------------------------------------------------- plan and status


def test_plan_shows_the_least_and_the_most(study, instant, capsys):
    arguments = [text for text in study(*ARMS[:2]) if text not in ("--workers", "1")]
    instant.stop_after = 9  # the first look, and seed 2 of the baseline and of both arms
    assert main(study(*ARMS[:2])) == errors.PREEMPTED
    capsys.readouterr()
    assert main(["plan", *arguments[1:]]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "6 to 15 runs: 3 arms x seeds 0,1, then 3, 5 seeds for undecided arms (9 finished)" in text
    assert "about 0 s to " in text
    request = read_request([*arguments[1:], "seeds.looks=2,3,5"])
    plan = make_plan(Runs.of(request), Places(1, 1, []))
    assert plan.arms[0].seconds is not None
    assert plan.later_seconds == pytest.approx(6 * plan.arms[0].seconds), "two seeds of the last look, three arms"
    assert "2 for every arm, then up to 5 for those that are undecided" in text


def test_plan_counts_the_rates_that_all_looks_can_call_for(study, instant, capsys):
    arguments = [text for text in study("vary.norm=layer", *GRID) if text not in ("--workers", "1")]
    assert main(["plan", *arguments[1:]]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "20 to 38 runs: 2 arms x seeds 0,1 x 3 rates" in text
    assert "up to 40 more by the last look" in text, "two on each side of three, for two arms at five seeds"


def test_status_never_waits_for_seeds_that_nobody_asked_for(study, instant, tmp_path, capsys):
    def status():
        assert main(["status", str(tmp_path / "runs/mine")]) == 0
        return capsys.readouterr().out

    instant.decided, instant.stop_after = {"norm=layer": 1}, 3
    main(study(*ARMS[:2]))
    capsys.readouterr()
    text = status()
    assert "3 finished, 3 waiting, 9 not needed so far" in text
    assert text.count("not needed") == 1, "no line of the table"
    instant.stop_after = 5  # two of the second look
    main(study(*ARMS[:2]))
    capsys.readouterr()
    assert "8 finished, 7 not needed so far" in status()
    instant.stop_after = 1  # the first of the third look, the baseline's
    main(study(*ARMS[:2]))
    capsys.readouterr()
    assert "9 finished, 1 waiting, 5 not needed so far" in status()


def test_an_arm_that_the_study_does_not_plan_holds_no_look_back(tmp_path):
    """It was removed by an amendment, or trained into the folder by hand; nobody would train its further seeds."""
    writer = Writer(tmp_path, "mine")
    writer.plan(("norm=layer",), looks=[2, 3, 4], look_weights=[0.2, 0.3, 0.5], seeds=[0, 1, 2, 3], delta_min=1e-4)
    writer.arm(losses=[2.0, 2.01, 1.99])
    writer.arm("norm=layer", losses=[2.01, 2.0, 1.99])
    writer.run("bias=on", seed=0, loss=2.0)
    comparison = compare(tmp_path / "mine")
    assert (comparison.look, comparison.undecided) == (2, ["norm=layer"])
    assert [row.arm for row in comparison.rows] == ["baseline", "norm=layer", "bias=on"]


# ---------------------------------------------------------------------------------------------------------- for real


@pytest.mark.slow
def test_a_crippled_arm_is_decided_at_the_first_look_and_a_null_arm_gets_every_seed(tiny_run, tmp_path):
    """The null arm has one unit less in its FFNs and so other initial values: noise, and next to no effect."""
    (tmp_path / "mine.yaml").write_text(
        "question: which of two arms needs more seeds?\nbaseline: [model.d_ff_multiple=1, d_ff_ratio=49/16]\n"
        "arms: [optim.lr=1e-3, d_ff_ratio=3]\nseeds: {looks: [5, 6, 7]}\ndelta_min: 0.001\n"
    )
    arguments = ["study", f"{tmp_path / 'mine.yaml'}", *tiny_run("train.steps=80", "train.eval_tokens=1024")]
    done = nexus([*arguments, "--workers", "2"])
    assert done.returncode == 0, done.stderr
    used = Counter(run.arm for run in map(read_run, find_runs([tmp_path / "runs"])))
    assert used == {"baseline": 7, "optim.lr=0.001": 5, "d_ff_ratio=3": 7}, done.stderr
    lines = done.stderr.splitlines()
    assert "look 2 of 3: 1 more seed for the undecided d_ff_ratio=3" in lines
    assert "look 3 of 3: 1 more seed for the undecided d_ff_ratio=3" in lines
    (crippled,) = (line for line in lines if line.startswith("optim.lr=0.001: "))
    (null,) = (line for line in lines if line.startswith("d_ff_ratio=3: "))
    assert "5 of at most 7 seeds" in crippled
    assert "WORSE" in crippled
    assert "7 of at most 7 seeds" in null
    assert "INCONCLUSIVE" in null
    before = photograph(tmp_path / "runs")
    again = nexus(arguments)
    assert again.returncode == 0, again.stderr
    assert "nothing to run: all 19 runs have ended" in " ".join(again.stderr.split())
    assert crippled in again.stderr
    assert photograph(tmp_path / "runs") == before
