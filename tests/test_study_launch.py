"""What a launch makes of a study: fixed once, continued, refused where it is another one; from the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from itertools import pairwise

import pytest
import yaml

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.launch import launch as launch_module
from nexus_ablate.launch.worker import Task
from nexus_ablate.runs import find_runs, read_run
from nexus_ablate.study.record import load

STUDY = ["study", "mine", "vary.norm=layer", "seeds=0,1", "--workers", "1"]


@pytest.fixture
def mine(tiny_run, instant, tmp_path, monkeypatch):
    """Launch `study mine`, whose runs end at once; returns the exit status."""
    monkeypatch.chdir(tmp_path)
    base = [text for text in tiny_run() if not text.startswith(("runs_dir", "model.n_layers"))]

    def launch(*words, study=STUDY):
        return main([*study, *base, *words])

    return launch


@pytest.fixture
def said(capsys):
    return lambda: " ".join(capsys.readouterr().err.split())


def record(tmp_path, name="mine"):
    return yaml.safe_load((tmp_path / "runs" / name / "study.yaml").read_text())


CHANGES = (
    (["vary.norm=none"], "arm norm=none added"),
    (["seeds=0-4"], "seeds: [0,1] -> [0,1,2,3,4]"),
    (["train.steps=10"], "baseline train.steps: 20 -> 10"),
    (["question=better?"], "question added"),
    (["endpoints=val_bpb"], "endpoints: [val_loss] -> [val_bpb]"),
    (["match=params"], "match added"),
    (["worth=on"], "worth added"),
    (["settings.a=bias=on", "settings.b=bias=off"], "none -> a, b"),
)


@pytest.mark.parametrize(("words", "change"), CHANGES)
def test_a_launched_study_is_fixed_and_the_suggested_name_works(mine, instant, said, tmp_path, words, change):
    assert mine() == 0
    before = (tmp_path / "runs/mine/study.yaml").read_bytes()
    said()
    changed = [word for word in STUDY if word.partition("=")[0] not in [each.partition("=")[0] for each in words]]
    assert mine(*words, study=changed) == errors.CONFIG
    text = said()
    assert change in text and text.endswith("try: name=mine-2")
    assert (tmp_path / "runs/mine/study.yaml").read_bytes() == before and len(instant.trained) == 4
    assert mine(*words, "name=mine-2", study=changed) == 0
    assert len(instant.trained) > 4


def test_the_same_command_and_the_name_alone_train_what_is_missing(mine, instant, said, tmp_path):
    instant.stop_after = 3
    assert mine() == errors.PREEMPTED
    assert "stopped (SIGTERM); every run is saved" in said()
    instant.stop_after = 9
    assert mine() == 0 and len(instant.trained) == 4
    shutil.rmtree(find_runs([tmp_path / "runs/mine/norm=layer"])[0])
    assert main(["study", "mine", "train.device=cpu"]) == 0 and len(instant.trained) == 5
    assert "next nexus-ablate compare mine" in said()
    assert mine() == 0 and "nothing to run: all 4 runs have ended" in said()


def test_a_run_that_failed_is_run_again_when_asked_for_and_is_the_exit_status_until_then(mine, instant, said):
    instant.failing = {("norm=layer", 1)}
    assert mine() == errors.BUG
    instant.failing = set()
    said()
    assert mine() == errors.BUG and len(instant.trained) == 4
    text = said()
    assert "norm=layer s1 failed: made to fail" in text and "--retry failed runs the failed ones again" in text
    assert mine("--retry", "failed") == 0 and len(instant.trained) == 5


def test_added_seeds_are_recorded_as_such_and_an_interrupted_addition_continues(mine, instant, said, tmp_path):
    assert mine("--add-seeds", "1") == errors.CONFIG and "has not been launched" in said()
    assert mine() == 0
    instant.stop_after = 1
    assert mine("--add-seeds", "2") == errors.PREEMPTED
    instant.stop_after = 9
    assert mine("--add-seeds", "2") == 0
    assert "seeds [2,3] were added, so the words of this study are exploratory" in said()
    assert (record(tmp_path)["seeds"], record(tmp_path)["added_seeds"]) == ([0, 1, 2, 3], [2, 3])
    for seeds in ("seeds=0,1", "seeds=0-2", "seeds=0-3"):
        assert mine(study=["study", "mine", "vary.norm=layer", seeds]) == 0
        assert record(tmp_path)["seeds"] == [0, 1, 2, 3]
    assert mine("--add-seeds", "1") == 0 and record(tmp_path)["added_seeds"] == [2, 3, 4]
    assert len(instant.trained) == 10


@pytest.mark.parametrize("stopped", ["while it trains", "while it is recorded"])
def test_an_addition_of_seeds_that_was_stopped_continues_with_the_same_seeds_in_each_setting(
    mine, instant, tmp_path, stopped
):
    settings = ["settings.one=model.n_layers=1", "settings.two=model.n_layers=2"]
    assert mine(*settings) == 0
    launched = (tmp_path / "runs/mine@two/study.yaml").read_bytes()
    instant.stop_after = 5  # all of the first setting, and one of the second
    assert mine(*settings, "--add-seeds", "2") == errors.PREEMPTED
    if stopped == "while it is recorded":
        (tmp_path / "runs/mine@two/study.yaml").write_bytes(launched)
    instant.stop_after = 99
    assert mine(*settings, "--add-seeds", "2") == 0 and len(instant.trained) == 16
    assert [record(tmp_path, f"mine@{setting}")["seeds"] for setting in ("one", "two")] == [[0, 1, 2, 3]] * 2


def test_each_setting_has_a_folder_and_a_record_before_the_first_run(mine, instant, said, tmp_path):
    settings = ["settings.one=model.n_layers=1", "settings.two=model.n_layers=2"]
    instant.stop_after = 0
    assert mine(*settings) == errors.PREEMPTED
    assert {folder.name for folder in (tmp_path / "runs").iterdir()} == {"mine@one", "mine@two"}
    assert load(tmp_path / "runs/mine@two").setting == "two"
    instant.stop_after = 99
    assert mine(*settings) == 0 and len(instant.trained) == 8
    assert [job.config.model.n_layers for job in instant.jobs] == [1] * 4 + [2] * 4
    assert "next nexus-ablate compare mine" in said()
    assert main(["study", "mine", "train.device=cpu"]) == 0 and len(instant.trained) == 8
    for others in (["settings.one=model.n_layers=1", "settings.three=model.n_layers=3"], ["model.n_layers=1"]):
        assert mine(*others) == errors.CONFIG
        assert "was launched with other settings" in said()


def test_a_study_that_is_named_has_each_setting_as_it_was_launched(mine, instant, tmp_path, text_file):
    text_file.write_text(text_file.read_text() * 10)
    arms = ["arms.layer=norm=layer", "arms.gated=gate=elementwise", "match=params", "model.d_ff_multiple=1"]
    size = ["model.n_layers=1", "train.steps=auto"]
    settings = ["settings.layer=norm=layer", "settings.large=model.d_model=32"]
    assert mine(*arms, *size, *settings, study=["study", "mine", "seeds=0,1", "--workers", "1"]) == 0
    assert len(instant.trained) == 10, "layer is the baseline of the first setting"
    assert main(["study", "mine", "train.device=cpu"]) == 0 and len(instant.trained) == 10
    assert main(["study", "mine", "name=mine-2", "seeds=5,6", "train.device=cpu"]) == 0
    for setting in ("layer", "large"):
        former, new = record(tmp_path, f"mine@{setting}"), record(tmp_path, f"mine-2@{setting}")
        assert new == former | {"name": "mine-2", "seeds": [5, 6]}, setting


def test_a_run_at_its_time_limit_does_not_keep_the_next_setting_from_its_runs(mine, instant):
    instant.late = {("norm=layer", 0)}
    assert mine("settings.one=model.n_layers=1", "settings.two=model.n_layers=2") == errors.PREEMPTED
    assert len(instant.trained) == 8


def test_a_grid_trains_every_seed_at_every_rate_in_one_round(mine, instant):
    assert mine("lr_grid=auto") == 0
    rates = {job.config.optim.keys["lr"] for job in instant.jobs}
    assert len(rates) == 7 and len(instant.trained) == 2 * 2 * 7
    ordered = sorted(rates)
    for lower, higher in pairwise(ordered):
        assert higher / lower == pytest.approx(2**0.5, rel=0.01)
    own = {job.folder for job in instant.jobs if job.config.optim.keys["lr"] == 3e-3}
    assert own == {"baseline", "norm=layer"}, "the arm's own rate is no part of the name"
    assert all(f"seed={job.seed}" in job.overrides for job in instant.jobs)


def test_worth_trains_the_baseline_at_other_budgets_with_every_seed(mine, instant):
    assert mine("worth=on") == 0
    steps = {job.arm: job.config.resolved.steps for job in instant.jobs}
    assert steps == {"baseline": 20, "norm=layer": 20, "baseline-0.5x": 10, "baseline-2x": 40}
    assert len(instant.trained) == 8


def test_no_short_run_of_a_study_compiles_unless_it_is_asked_for(mine, instant):
    assert mine() == 0 and mine("train.compile=on", "name=other") == 0
    compile_settings = [[text for text in job.overrides if text.startswith("train.compile")] for job in instant.jobs]
    assert compile_settings == [["train.compile=off"]] * 4 + [["train.compile=on"]] * 4


def test_results_by_other_code_stop_a_launch_with_the_commit_to_check_out(mine, instant, said, tmp_path, checkout):
    def as_by(dirty):
        for job in instant.jobs:
            code = {"source": {"axes/norm.py": "former"}, "git_commit": "abcdef0123456789", "git_dirty": dirty}
            (job.path / "env.json").write_text(json.dumps(code))

    assert mine() == 0
    as_by(dirty=False)
    checkout.edit("nexus_ablate/axes/norm.py", "from __future__", "import math\nfrom __future__")
    (instant.jobs[0].path / "config.yaml").write_text("norm: {na")
    before = record(tmp_path)
    said()
    assert mine() == errors.CONFIG
    text = said()
    assert "study mine has runs by other code" in text
    assert "got: 4 runs, such as baseline/s0-" in text and "by commit abcdef0123" in text
    assert text.endswith("try: git checkout abcdef0123, or name=mine-2")
    as_by(dirty=True)
    assert mine() == errors.CONFIG and said().endswith("try: name=mine-2"), "that commit is not what ran"
    assert record(tmp_path) == before and len(instant.trained) == 4
    assert mine("name=mine-2") == 0
    shutil.rmtree(tmp_path / "runs/mine/baseline")
    shutil.rmtree(tmp_path / "runs/mine/norm=layer")
    assert mine() == 0 and record(tmp_path)["source"] != before["source"], "no result is by the code of before"


def test_a_launched_study_does_not_read_another_text(mine, said, text_file):
    assert mine() == 0
    text_file.write_text(text_file.read_text() + "one more line\n")
    assert mine("--add-seeds", "1") == errors.CONFIG
    assert "has runs on another text than the files of today" in said()


def test_a_launch_that_is_refused_leaves_nothing(mine, said, tmp_path):
    before = {*tmp_path.iterdir()}
    for words in (["data.files=[missing.txt]"], ["model.n_layers=0"], ["settings.a=norm=nrm", "settings.b=bias=on"]):
        assert mine(*words) == errors.CONFIG
    assert {*tmp_path.iterdir()} - before <= {tmp_path / "cache"}


def test_of_two_launches_of_one_name_with_other_arms_one_is_refused(mine, instant, said, tmp_path, monkeypatch):
    """The second one is launched while the first one has checked that there is no study, and not yet written it."""
    kept, statuses = launch_module.prepare_data, []

    def overtaken(planned):
        monkeypatch.setattr(launch_module, "prepare_data", kept)
        statuses.append(mine("vary.norm=none", study=["study", "mine", "seeds=0,1"]))

    monkeypatch.setattr(launch_module, "prepare_data", overtaken)
    assert mine() == errors.CONFIG and statuses == [0]
    assert "arm norm=layer added; arm norm=none removed" in said()
    assert {arm for arm, _ in instant.trained} == {"baseline", "norm=none"}
    assert [*load(tmp_path / "runs/mine").arms] == ["norm=none"]


def test_a_launch_keeps_the_seeds_that_another_one_has_added_meanwhile(mine, instant, said, tmp_path, monkeypatch):
    kept, statuses = launch_module.prepare_data, []

    def overtaken(planned):
        monkeypatch.setattr(launch_module, "prepare_data", kept)
        statuses.append(mine("--add-seeds", "2"))

    assert mine() == 0
    monkeypatch.setattr(launch_module, "prepare_data", overtaken)
    assert mine() == errors.CONFIG and statuses == [0]
    assert "another launch has just added seeds to this study got: seeds [2,3] try: run the same command" in said()
    assert record(tmp_path)["added_seeds"] == [2, 3] and len(instant.trained) == 8
    assert mine() == 0


@pytest.mark.slow
def test_two_launches_at_the_same_instant_leave_one_record(mine, tmp_path):
    statuses = []
    both = [
        threading.Thread(target=lambda arm=arm: statuses.append(run_apart(arm, tmp_path))) for arm in ("layer", "none")
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert sorted(statuses)[0] == 0 and sorted(statuses)[1] in (errors.CONFIG, errors.ALIVE)
    (arm,) = load(tmp_path / "runs/d").arms
    assert {path.name for path in (tmp_path / "runs/d").iterdir() if path.is_dir()} <= {"baseline", arm, ".workers"}


def run_apart(arm, folder):
    """Launch a study of one arm without its runs, in a process of its own."""
    code = (
        "import sys\nfrom nexus_ablate.launch.local import LocalPool\nLocalPool.run = lambda *_: 'SIGTERM'\n"
        "from nexus_ablate.cli import main\nsys.exit(0 if main(sys.argv[1:]) == 75 else 2)"
    )
    words = ["study", "d", f"vary.norm={arm}", "seeds=0,1", "model=femto", "train.device=cpu", "train.steps=5"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=folder, capture_output=True, timeout=120)
    return done.returncode


def test_a_folder_with_spaces_and_accents_holds_the_study_and_its_runs(mine, instant, said, tmp_path):
    assert mine("runs_dir=données/my runs") == errors.CONFIG
    assert "quote values with special characters: key='\"...\"'" in said()
    assert mine('runs_dir="données/my runs"') == 0
    assert len(find_runs([tmp_path / "données/my runs/mine"])) == 4
    assert main(["study", "données/my runs/mine", "train.device=cpu"]) == 0 and len(instant.trained) == 4


def test_a_finished_run_without_a_readable_summary_is_named_and_not_trained_again(mine, instant, said):
    assert mine() == 0
    (instant.jobs[0].path / "summary.json").write_text('{"val_l')
    assert mine() == errors.BUG and len(instant.trained) == 4
    assert "summary.json is damaged" in said()


@pytest.mark.parametrize(
    ("typed", "state", "device", "expected"),
    [
        (["train.compile=on"], "finished", "cuda:0", ("auto", "auto")),
        (["train.compile=on"], "finished", "cpu", ("cpu", "on")),  # `auto` may mean a GPU that PyTorch cannot use
        ([], "finished", "cpu", ("auto", "auto")),  # a study of short runs compiles none
        (["train.compile=on"], "preempted", "cuda:0", ("cpu", "on")),
    ],
)
def test_a_finished_run_gets_its_evaluations_where_it_is_if_another_device_is_asked_for(
    mine, instant, typed, state, device, expected
):
    assert mine("evals=[quantization]", *typed) == 0
    job = instant.jobs[0]
    instant.end(job, state)
    (job.path / "summary.json").write_text(json.dumps({"val_loss": 1.0, "device": device, "compiled": True}))
    train = compose(Task.of(job, {}).overrides).train
    assert (train.device, train.compile) == expected


@pytest.mark.slow
def test_a_study_stopped_before_a_run_s_evaluations_makes_up_for_them(tiny_run, forked_workers, tmp_path):
    words = [*STUDY, "evals=[quantization]", *tiny_run()]
    assert main(words) == 0
    first, *others = [read_run(path) for path in find_runs([tmp_path / "runs/mine"])]
    kept = json.loads((first.path / "summary.json").read_text())
    lacking = {name: value for name, value in kept.items() if name != "quantization"}
    (first.path / "summary.json").write_text(json.dumps(lacking))
    assert main([*words, "train.compile=on"]) == 0
    assert len(find_runs([tmp_path / "runs/mine"])) == 4, "none was trained again"
    assert read_run(first.path).summary["quantization"] == first.summary["quantization"]
    assert [read_run(other.path).summary for other in others] == [other.summary for other in others]


@pytest.mark.slow
def test_a_second_command_has_the_exit_status_of_the_failed_run(tiny_run, forked_workers, tmp_path):
    assert main([*STUDY, *tiny_run()]) == 0
    path = find_runs([tmp_path / "runs/mine/norm=layer"])[0]
    status = read_run(path).status
    (path / "status.json").write_text(json.dumps(status | {"state": "preempted", "files": {}}))
    for weights in path.glob("checkpoints/*/model.safetensors"):
        weights.unlink()
    for _ in range(2):
        assert main([*STUDY, *tiny_run()]) == errors.CHECKPOINT
