"""More seeds for a study that was launched, and claims judged on fresh seeds alone."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml
from processes import answers
from written_runs import Writer, without_checksum

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.comparison.verdict import BETTER, EQUIVALENT, LOWER
from nexus_ablate.runs import find_runs, read_run
from tests.test_study_looks import said
from tests.test_study_queue import nexus, photograph


@pytest.fixture
def study(tiny_run, tmp_path, instant):
    """A study that was launched with seeds 0-2, as a function that says how the runs of a later command go."""
    how = [
        text for text in tiny_run() if text.split("=")[0] in ("runs_dir", "tracker", "train.device", "train.threads")
    ]
    assert main(["study", "mine", "vary.norm=layer", "vary.bias=on", "seeds=0,1,2", "--workers", "1", *tiny_run()]) == 0
    instant.trained.clear()
    return lambda *arguments: [*arguments, "--workers", "1", *how]


def launched(tiny_run, *arguments):
    """Launch a study; returns the words with which a later command finds its runs."""
    runs = tiny_run()
    assert main(["study", "mine", *arguments, "--workers", "1", *runs]) == 0
    return ["--workers", "1", *(text for text in runs if text.startswith("runs_dir"))]


def record(tmp_path, name="mine"):
    return yaml.safe_load((tmp_path / "runs" / name / "study.yaml").read_text())


# --------------------------------------------------------------------------------------------------------- add-seeds


def test_seeds_are_added_to_every_arm_and_kept_as_an_amendment(study, instant, tmp_path, capsys):
    assert main(study("study", "mine", "--add-seeds", "2")) == 0
    arms = ("baseline", "norm=layer", "bias=on")
    assert instant.trained == [(arm, seed) for seed in (3, 4) for arm in arms]
    assert "adding seeds 3, 4; verdicts of this study are exploratory" in said(capsys)
    kept = record(tmp_path)
    assert kept["seeds"] == [0, 1, 2, 3, 4]
    assert [entry["seeds"] for entry in kept["added"]] == [[3, 4]]
    assert [entry["changes"] for entry in kept["amendments"]] == [["seeds: [0,1,2] -> [0,1,2,3,4]"]]
    assert kept["added"][0]["when"] == kept["amendments"][0]["when"]

    directory = [
        text for text in study("study", str(tmp_path / "runs/mine"), "--add-seeds", "1") if "runs_dir" not in text
    ]
    assert main(directory) == 0
    assert [entry["seeds"] for entry in record(tmp_path)["added"]] == [[3, 4], [5]]
    assert main([*study("study", "mine", "delta_min=0.1", "--amend")]) == 0
    assert [entry["seeds"] for entry in record(tmp_path)["added"]] == [[3, 4], [5]], "amended or not"


def test_the_study_as_it_was_asked_for_first_is_still_the_same_study(study, instant, tiny_run, tmp_path, capsys):
    assert main(study("study", "mine", "--add-seeds", "1")) == 0
    before = photograph(tmp_path / "runs")
    first = ["study", "mine", "vary.norm=layer", "vary.bias=on", "seeds=0,1,2", "--workers", "1", *tiny_run()]
    for again in (first, study("study", "mine")):
        assert main(again) == 0
        assert "nothing to run: all 12 runs have ended" in said(capsys)
    assert photograph(tmp_path / "runs") == before


def test_an_interrupted_addition_continues_with_the_same_command(study, instant, tmp_path):
    instant.stop_after = 1
    assert main(study("study", "mine", "--add-seeds", "2")) == errors.PREEMPTED
    instant.stop_after = float("inf")
    assert main(study("study", "mine", "--add-seeds", "2")) == 0
    assert sorted(instant.trained) == sorted(
        {(arm, s) for s in (3, 4) for arm in ("baseline", "norm=layer", "bias=on")}
    )
    assert record(tmp_path)["seeds"] == [0, 1, 2, 3, 4]
    instant.failing = {("bias=on", 6)}
    assert main(study("study", "mine", "--add-seeds", "2")) == errors.BUG
    assert record(tmp_path)["seeds"] == [0, 1, 2, 3, 4, 5, 6], "what has ended is not gone on with"
    assert main(study("study", "mine", "--add-seeds", "2")) == errors.BUG
    assert record(tmp_path)["seeds"][-2:] == [7, 8], "to have failed is to have ended"


def test_no_seed_of_the_tuning_or_of_a_confirmation_is_added(tiny_run, instant, tmp_path):
    launch = launched(tiny_run, "vary.norm=layer", "seeds=0,1", "lr_grid=1e-3", "tuning_seeds=2,3")
    assert main(["study", "mine", "norm=layer", "--seeds", "2", "--confirm", *launch]) == 0
    confirming = record(tmp_path, "mine-confirm")
    assert (confirming["seeds"], confirming["tuning_seeds"]) == ([4, 5], [6, 7])
    for path in tmp_path.glob("runs/mine/*/s2-*"):
        shutil.rmtree(path)  # its tuning is still to come
    assert main(["study", "mine", "--add-seeds", "2", *launch]) == 0
    assert record(tmp_path)["seeds"] == [0, 1, 8, 9]
    (tmp_path / "runs/mine/norm=scale/s12-01234567").mkdir(parents=True)
    assert main(["study", "mine", "norm=layer", "--seeds", "1", "--confirm", *launch]) == 0
    assert record(tmp_path, "mine-confirm2")["seeds"] == [13], "above a run that is no part of the plan, too"
    assert main(["study", "mine-confirm2", "--add-seeds", "1", *launch]) == 0
    assert record(tmp_path, "mine-confirm2")["confirms"] == "mine"


def test_a_study_that_is_not_what_it_was_gets_no_seeds(study, tmp_path, capsys):
    path = tmp_path / "runs/mine/study.yaml"
    path.write_text(without_checksum(path.read_text()).replace("name: norm=layer", "name: norm=another"))
    before = path.read_text()
    assert main(study("study", "mine", "--add-seeds", "2")) == errors.CONFIG
    assert "changed since its first launch" in said(capsys)
    assert path.read_text() == before


# ----------------------------------------------------------------------------------------------------------- confirm


@pytest.mark.parametrize("word", [BETTER, LOWER, EQUIVALENT])
def test_claims_are_judged_on_fresh_seeds_in_a_study_of_their_own(study, instant, tmp_path, capsys, word):
    instant.decided, instant.word = {"norm=layer": 1}, word
    before = photograph(tmp_path / "runs/mine")
    assert main(study("study", "mine", "--confirm")) == 0
    assert instant.trained == [(arm, seed) for seed in (3, 4, 5) for arm in ("baseline", "norm=layer")]
    assert photograph(tmp_path / "runs/mine") == before
    first, kept = record(tmp_path), record(tmp_path, "mine-confirm")
    assert (kept["confirms"], kept["seeds"]) == ("mine", [3, 4, 5])
    assert [arm["name"] for arm in kept["arms"]] == ["norm=layer"]
    assert all(kept[name] == first[name] for name in ("baseline", "match", "endpoints"))
    text = said(capsys)
    assert f"next nexus-ablate compare {tmp_path}/runs/mine-confirm" in text

    assert main(study("study", "mine", "bias=on", "--seeds", "2", "--confirm")) == 0
    assert record(tmp_path, "mine-confirm2")["seeds"] == [6, 7], "above those of the confirmation before"
    assert instant.trained[-4:] == [(arm, seed) for seed in (6, 7) for arm in ("baseline", "bias=on")]


def test_an_interrupted_confirmation_continues_instead_of_another_one(study, instant, tmp_path, capsys):
    instant.stop_after = 2
    assert main(study("study", "mine", "norm=layer", "--seeds", "2", "--confirm")) == errors.PREEMPTED
    instant.stop_after = float("inf")
    capsys.readouterr()
    for other in (["bias=on"], ["norm=layer", "--seeds", "3"]):
        assert main(study("study", "mine", *other, "--confirm")) == errors.CONFIG
        assert "mine-confirm has not ended" in said(capsys)
    assert main(study("study", "mine", "norm=layer", "--seeds", "2", "--confirm")) == 0
    assert instant.trained == [(arm, seed) for seed in (3, 4) for arm in ("baseline", "norm=layer")]
    assert not (tmp_path / "runs/mine-confirm2").exists()


def test_a_failed_confirmation_is_not_replaced_and_a_folder_of_another_kind_is_left_alone(study, instant, tmp_path):
    other = tmp_path / "runs/mine-confirm"
    other.mkdir()
    (other / "notes.txt").write_text("my own")
    instant.failing = {("norm=layer", 4)}
    assert main(study("study", "mine", "norm=layer", "--confirm")) == errors.BUG
    assert [path.name for path in other.iterdir()] == ["notes.txt"]
    assert record(tmp_path, "mine-confirm2")["confirms"] == "mine"
    assert main(study("study", "mine", "--confirm")) == errors.BUG
    instant.failing = set()
    assert main(study("study", "mine", "--retry", "failed", "--confirm")) == 0
    assert not (tmp_path / "runs/mine-confirm3").exists()


def test_tuned_arms_are_tuned_again_on_fresh_seeds(tiny_run, instant, tmp_path):
    launch = launched(tiny_run, "vary.norm=layer", "vary.bias=on", "seeds=0,1", "lr_grid=1e-3,3e-3")
    instant.trained.clear()
    assert main(["study", "mine", "norm=layer", "--confirm", *launch]) == 0
    kept = record(tmp_path, "mine-confirm")
    assert (kept["seeds"], kept["tuning_seeds"]) == ([1003, 1004], [1005, 1006]), "above the tuning seeds"
    assert [arm["overrides"] for arm in kept["arms"]] == [["norm=layer"]]
    assert kept["lr_grid"] == [1e-3, 3e-3]
    assert {seed for _, seed in instant.trained} == {1003, 1004, 1005, 1006}


@pytest.mark.slow
def test_a_match_is_taken_over_and_not_solved_anew(tiny_run, instant, tmp_path):
    launch = launched(tiny_run, "vary.train.batch_size=2", "match=tokens", "seeds=0,1")
    path = tmp_path / "runs/mine/study.yaml"
    path.write_text(
        without_checksum(path.read_text()).replace("train.steps=40", "train.steps=41")
    )  # as no solving gives it
    (arm,) = record(tmp_path)["arms"]
    assert arm["match"]["solved"] == ["train.steps=41"]
    assert main(["study", "mine", arm["name"], "--confirm", *launch]) == 0
    assert record(tmp_path, "mine-confirm")["arms"] == [arm]
    assert main(["study", "mine-confirm", *launch]) == 0


def test_an_arm_of_a_study_with_looks_is_confirmed_on_as_many_seeds_as_decided_it(tiny_run, instant, tmp_path):
    instant.decided = {"norm=layer": 1, "bias=on": 2}
    launch = launched(tiny_run, "vary.norm=layer", "vary.bias=on", "seeds.looks=2,3,5")
    assert main(["study", "mine", "--confirm", *launch]) == 0
    kept = record(tmp_path, "mine-confirm")
    assert kept["seeds"] == [5, 6, 7], "3 of them, above all that a later look may take"
    assert [arm["name"] for arm in kept["arms"]] == ["norm=layer", "bias=on"]
    assert "looks" not in kept


# ------------------------------------------------------------------------------------------------ what is not possible

BAD = {
    "study mine --add-seeds 0": "from 1 to 1000",
    "study mine --add-seeds -1": "from 1 to 1000",
    "study mine --add-seeds x": "from 1 to 1000",
    "study mine --add-seeds 1e6": "from 1 to 1000",
    "study mine --add-seeds 1000000": "from 1 to 1000",
    "study mine --add-seeds 999": "at most 1000 seeds",
    "study mine --add-seeds": "needs a value",
    "study --add-seeds 3": "needs a study",
    "study mine --add-seeds 3 train.steps=4": "takes one launched study",
    "study mine --add-seeds 3 --amend": "exclude each other",
    "study nrms --add-seeds 3": "try: norms",
    "study runs/mine --add-seeds 3 runs_dir=runs": "leave runs_dir=runs out",
    "study norms --add-seeds 3": "no runs yet",
    "study mine.yaml --add-seeds 3": "no runs yet",
    "study empty --add-seeds 3": "no runs yet",
    "study looks --add-seeds 3": "nexus-ablate study looks",
    "study mine --add-seeds 1 --partition gpu": "--launcher slurm",
    "study --seeds 3 --confirm": "needs a study",
    "study mine --seeds 0 --confirm": "from 1 to 1000",
    "study mine --seeds x --confirm": "from 1 to 1000",
    "study nrms --confirm": "try: norms",
    "study norms --confirm": "no runs yet",
    "study mine.yaml --confirm": "no runs yet",
    "study runs/empty --confirm": "no runs yet",
    "study runs/mine runs_dir=runs": "leave runs_dir=runs out",
    "study split --confirm": "one of split@deep, split@shallow",
    "study waiting --confirm": "no run here has a result",
    "study mine norm=layr --confirm": "try: norm=layer",
    "study mine --add-seeds " + "9" * 5000: "from 1 to 1000",
    "study mine --confirm": "no claim to confirm",
    "study other --confirm runs_dir=elsewhere": "nexus-ablate study elsewhere/other norm=layer --confirm",
    "study again --confirm": "nexus-ablate study mine --confirm",
}


def test_what_cannot_be_is_three_lines_before_torch_is_there_and_makes_nothing(tmp_path):
    (tmp_path / "mine.yaml").write_text("name: elsewhere\nquestion: which?\narms: [norm=layer]\n")
    strata = {"of": "split", "all_strata": ["deep", "shallow"]}
    budget = ["train.tokens=3932160"]
    plans = {"mine": {}, "other": {}, "waiting": {}, "empty": {}, "again": {"confirms": "mine"}}
    plans["looks"] = {"looks": [5, 6], "look_weights": [0.5, 0.5], "seeds": [*range(6)]}
    plans |= {f"split@{name}": strata | {"stratum": name} for name in strata["all_strata"]}
    for name, values in plans.items():
        writer = Writer(tmp_path / ("elsewhere" if name == "other" else "runs"), name)
        writer.plan(("norm=layer",), baseline=budget, **values)
        state = "running" if name == "waiting" else "finished"
        if name != "empty":
            writer.arm(losses=[2.0, 2.01, 1.99], state=state)
            writer.arm("norm=layer", losses=[2.01, 2.0, 1.99], state=state)
    before = photograph(tmp_path)
    answered = answers([command.split() for command in BAD], tmp_path)
    for (command, expected), (status, lines) in zip(BAD.items(), answered, strict=True):
        assert status == errors.CONFIG, command
        assert [line.split(":")[0].strip() for line in lines] == ["error", "got", "try"], (command, lines)
        assert expected in "\n".join(lines), (command, lines)
    assert photograph(tmp_path) == before


# ----------------------------------------------------------------------------------------------------------- for real


@pytest.mark.slow
def test_a_claim_of_trained_runs_is_confirmed_and_compared(tiny_run, tmp_path):
    arguments = tiny_run("train.steps=80", "train.eval_tokens=1024")
    typed = ["study", "mine", "vary.optim.lr=1.5e-3", "seeds=0,1,2,3,4", *arguments, "--workers", "2"]
    how = [text for text in arguments if text.split("=")[0] in ("runs_dir", "tracker", "train.device", "train.threads")]
    for command in (typed, ["study", "mine", "--confirm", *how], ["study", "mine", "--add-seeds", "1", *how]):
        done = nexus(command)
        assert done.returncode == 0, done.stderr
    seeds = {(run.path.parents[1].name, run.arm, run.seed) for run in map(read_run, find_runs([tmp_path / "runs"]))}
    numbers = [("mine", seed) for seed in (0, 1, 2, 3, 4, 10)] + [("mine-confirm", seed) for seed in range(5, 10)]
    assert seeds == {(name, arm, seed) for arm in ("baseline", "optim.lr=0.0015") for name, seed in numbers}
    compared = nexus(["compare", str(tmp_path / "runs/mine-confirm")])
    assert "WORSE" in compared.stdout, compared.stdout + compared.stderr
    batches = [json.loads((p / "summary.json").read_text())["batch_hash"] for p in find_runs([tmp_path / "runs"])]
    assert len(set(batches)) == 11, "one stream of data per seed, fresh ones included"
