"""What a second command makes of a study that was launched: what is missing, what was changed, what was named anew."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import yaml
from written_runs import without_checksum

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.planning.cores_and_gpus import Places, places_for
from nexus_ablate.planning.preview import _total
from nexus_ablate.runs import atomic_write_json, find_runs, read_run
from nexus_ablate.runs.lookup import id_of
from nexus_ablate.training.device import IdleCores

STRATA = "question: q?\narms: [norm=layer]\nseeds: [0, 1]\nstrata: {model.n_layers: [1, 2]}\n"


def record(tmp_path, name):
    return yaml.safe_load((tmp_path / "runs" / name / "study.yaml").read_text())


def said(capsys):
    return " ".join(capsys.readouterr().err.split())


def launched(tiny_run, *words):
    """Launch the study `mine`; returns the words with which a later command finds and carries out its runs."""
    assert main(["study", "mine", *words, "--workers", "1", *tiny_run()]) == 0
    how = ("runs_dir", "tracker", "train.device", "train.threads")
    return ["--workers", "1", *(text for text in tiny_run() if text.startswith(how))]


@pytest.mark.slow
def test_a_study_stopped_before_a_run_s_evaluations_makes_up_for_them(tiny_run, forked_workers, tmp_path):
    how = launched(tiny_run, "vary.norm=layer", "seeds=0", "evals=[quantization]")
    first, second = (read_run(path) for path in find_runs([tmp_path / "runs/mine"]))
    assert {"quantization"} <= first.summary.keys() & second.summary.keys()
    lacking = {name: value for name, value in first.summary.items() if name != "quantization"}
    atomic_write_json(first.path / "summary.json", lacking)
    assert main(["study", "mine", *how]) == 0
    assert read_run(first.path).summary["quantization"] == first.summary["quantization"]
    assert read_run(second.path).summary == second.summary


@pytest.mark.slow
def test_an_amendment_to_an_evaluation_runs_it_and_one_to_a_probe_that_was_off_is_refused(
    tiny_run, forked_workers, tmp_path, capsys
):
    how = launched(tiny_run, "vary.norm=layer", "seeds=0", "probe=off")
    assert main(["study", "mine", "endpoints=quantization/loss", "--amend", *how]) == 0
    assert all("quantization" in read_run(path).summary for path in find_runs([tmp_path / "runs/mine"]))
    before = record(tmp_path, "mine")
    assert main(["study", "mine", "endpoints=attn/sink_rate", "--amend", *how]) == 2
    assert "name=mine_2, which trains them anew" in said(capsys) and record(tmp_path, "mine") == before


@pytest.mark.slow
def test_a_second_command_has_the_exit_status_of_the_failed_run(tiny_run, forked_workers, tmp_path):
    how = launched(tiny_run, "vary.norm=layer", "seeds=0")
    (path,) = find_runs([tmp_path / "runs/mine/norm=layer"])
    status = read_run(path).status
    (path / "status.json").write_text(json.dumps(status | {"state": "preempted", "files": {}}))
    for weights in path.glob("checkpoints/*/model.safetensors"):
        weights.unlink()
    assert main(["study", "mine", *how]) == errors.CHECKPOINT
    assert main(["study", "mine", *how]) == errors.CHECKPOINT, "nothing is run again"


GONE = (
    "WARN W&B failed (ConnectionError: run {id} is gone); nothing is lost: `nexus-ablate sync {place}` sends the rest"
)
STUDY, MULTIRUN = ["study", "mine", "vary.norm=layer", "seeds=0", "--workers", "1"], ["-m", "seed=0,1"]


@pytest.mark.parametrize(
    ("words", "key", "expected", "lines"),
    [
        (STUDY, "", "WARN W&B has no key on this machine: set WANDB_API_KEY or run `wandb login`", 1),
        pytest.param(STUDY, "a" * 40, GONE.replace("{place}", "{study}"), 1, marks=pytest.mark.slow),
        (MULTIRUN, "a" * 40, GONE.replace("{place}", "{run}"), 2),
    ],
    ids=["no key", "a study names its folder", "a run of a multirun names itself"],
)
def test_a_launch_prints_what_wandb_lacks_of_its_runs(
    words, key, expected, lines, tiny_run, forked_workers, tmp_path, monkeypatch, capsys
):
    def refuse(settings, config):
        raise ConnectionError(f"run {config['id']} is gone")

    for name in ("WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setattr("nexus_ablate.track.upload.begin", refuse)
    assert main([*words, *tiny_run(), "tracker=wandb"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("WARN W&B")]
    runs = find_runs([tmp_path / "runs"])
    possible = [expected.format(id=id_of(run), run=run, study=tmp_path / "runs/mine") for run in runs]
    assert len(said) == lines and all(line.startswith(tuple(possible)) for line in said), said


@pytest.mark.slow
def test_a_study_prints_that_torch_compile_failed(tiny_run, forked_workers, monkeypatch, capsys):
    def fail(*inputs):
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr("nexus_ablate.training.choices.compiling_pays", lambda *facts: (True, "it is long"))
    monkeypatch.setattr("torch.compile", lambda function, **settings: fail)
    assert main([*STUDY, *tiny_run()]) == 0
    assert "WARN training without torch.compile, which failed: no working C++ compiler" in capsys.readouterr().err


def test_under_another_name_an_arm_is_matched_to_the_new_baseline_and_has_no_history(tiny_run, instant, tmp_path):
    how = launched(tiny_run, "vary.train.batch_size=8", "match=tokens", "seeds=0,1")
    assert main(["study", "mine", "--add-seeds", "1", *how]) == 0
    assert main(["study", "mine", "train.steps=40", "name=mine_2", *how]) == 0
    (arm,) = record(tmp_path, "mine")["arms"]
    (again,) = record(tmp_path, "mine_2")["arms"]
    assert "train.steps=10" in arm["overrides"] and "train.steps=20" in again["overrides"]
    assert record(tmp_path, "mine")["added"] and not {"added", "amendments"} & record(tmp_path, "mine_2").keys()


@pytest.mark.slow
def test_status_counts_what_an_amended_study_wants_and_names_the_runs_that_it_replaced(
    tiny_run, forked_workers, tmp_path, capsys
):
    def status() -> str:
        capsys.readouterr()
        assert main(["status", str(tmp_path / "runs/mine")]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    how = launched(tiny_run, "vary.norm=layer", "seeds=0")
    former = find_runs([tmp_path / "runs/mine"])
    assert status() == "2 finished"
    assert main(["study", "mine", "train.steps=10", "--amend", *how]) == 0
    assert status() == "2 finished, 2 replaced"
    shutil.rmtree(next(run for run in find_runs([tmp_path / "runs/mine/norm=layer"]) if run not in former))
    assert status() == "1 finished, 1 waiting, 2 replaced"
    path = tmp_path / "runs/mine/study.yaml"
    path.write_text(without_checksum(path.read_text()).replace("source: ", "source: f"))
    assert status() == "2 waiting, 3 replaced", "by other code"


def test_under_another_name_auto_means_what_it_does_for_the_new_baseline(tiny_run, text_file, instant, tmp_path):
    text_file.write_text("the quick brown fox jumps over the lazy dog.\n" * 3000)
    words = [text for text in tiny_run() if not text.startswith("train.steps")]
    how = ["--workers", "1", *(text for text in words if text.startswith(("runs_dir", "tracker", "train.device")))]
    first = ["study", "mine", "vary.norm=layer", "seeds=0", "endpoints=quantization/loss", "--workers", "1", *words]
    assert main(first) == 0
    assert main(["study", "mine", "name=mine_2", "model.n_layers=1", "endpoints=val_loss", *how]) == 0
    assert {"train.tokens=122880", "evals=[quantization]"} <= {*record(tmp_path, "mine")["baseline"]}
    again = record(tmp_path, "mine_2")["baseline"]
    assert "train.tokens=61440" in again and "evals=[quantization]" not in again


def test_an_amended_kind_of_match_is_solved_anew(tiny_run, instant, tmp_path):
    how = launched(tiny_run, "vary.gate=elementwise", "match=params", "seeds=0")
    assert main(["study", "mine", "match=flops", "--amend", *how]) == 0
    (arm,) = record(tmp_path, "mine")["arms"]
    assert arm["match"]["kind"] == "flops"


def test_a_launch_that_is_refused_for_its_data_leaves_nothing_of_any_stratum(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(STRATA)
    words = [text for text in tiny_run() if not text.startswith("model.n_layers")]
    assert main(["study", "mine.yaml", *words, "data.files=[missing.txt]"]) == 2
    assert "missing.txt" in said(capsys) and not (tmp_path / "runs").exists()


def test_the_suggested_name_of_changed_strata_is_that_of_the_whole_study(
    tiny_run, instant, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(STRATA)
    words = [text for text in tiny_run() if not text.startswith("model.n_layers")]
    assert main(["study", "mine.yaml", *words]) == 0
    for run in find_runs([tmp_path / "runs"]):
        shutil.rmtree(run)
    assert main(["study", "mine.yaml", *words, "train.steps=6"]) == 2
    assert "try: name=mine_2, or --amend" in said(capsys)
    assert main(["study", "mine.yaml", *words, "train.steps=6", "name=mine_2"]) == 0
    assert main(["study", "mine.yaml", "--add-seeds", "1", f"runs_dir={tmp_path / 'runs'}"]) == 2
    assert "each stratum is a study of its own" in said(capsys)


def test_strata_that_were_typed_are_resumed_together_by_the_study_s_name(tiny_run, instant, tmp_path, capsys):
    words = [text for text in tiny_run() if not text.startswith("model.n_layers")]
    instant.stop_after = 3
    typed = ["vary.norm=layer", "strata.model.n_layers=2,1", "seeds=0"]
    assert main(["study", "mine", *typed, "--workers", "1", *words]) == errors.PREEMPTED
    instant.stop_after = 9
    how = [f"runs_dir={tmp_path / 'runs'}", "train.device=cpu"]
    assert main(["plan", "mine", *how]) == 0
    assert "2 strata: 4 runs" in capsys.readouterr().out
    assert main(["study", "mine", "--workers", "1", *how]) == 0
    strata = {run.parents[1].name for run in find_runs([tmp_path / "runs"])}
    assert strata == {"mine@n_layers-2", "mine@n_layers-1"} and len(instant.trained) == 4
    for changed in ("norm=none", "name=mine_2", "strata.model.n_layers=1,3"):
        assert main(["study", "mine", changed, *how]) == errors.CONFIG
        assert "each stratum is a study of its own" in said(capsys), "which of them it is about, nobody can tell"
    shutil.rmtree(tmp_path / "runs/mine@n_layers-1")
    assert main(["study", "mine", *how]) == errors.CONFIG


def test_strata_of_a_launched_study_are_not_exchanged_for_others(tiny_run, instant, tmp_path, capsys):
    words = ["vary.norm=layer", "seeds=0", *(text for text in tiny_run() if not text.startswith("model.n_layers"))]
    assert main(["study", "mine", "strata.model.n_layers=2,1", *words]) == 0
    before = len(instant.trained)
    for others in ("2,3", "3,4"):
        assert main(["study", "mine", f"strata.model.n_layers={others}", "--amend", *words]) == errors.CONFIG
        assert "study mine was launched with other strata got: n_layers-2, n_layers-1 -> " in said(capsys)
    assert len(instant.trained) == before and len([*(tmp_path / "runs").glob("mine@*")]) == 2
    assert main(["study", "mine", "strata.model.n_layers=2,3", "name=mine_2", *words]) == 0, "as suggested"
    assert main(["study", "mine", "strata.model.n_layers=2,1", *words]) == 0, "control: the same strata"


@pytest.mark.slow
def test_a_launched_study_does_not_read_another_text(tiny_run, text_file, forked_workers, tmp_path, capsys):
    how = launched(tiny_run, "vary.norm=layer", "seeds=0")
    text = text_file.read_text()
    text_file.write_text(text + "one more line\n")
    assert main(["study", "mine", "--add-seeds", "1", *how]) == errors.CONFIG
    shown = said(capsys)
    assert "has finished runs on another text than the files of today got: 2 runs, such as baseline/s0-" in shown
    assert main(["study", "mine", "name=mine_2", *how]) == 0, "as suggested"
    text_file.write_text(text)
    assert main(["study", "mine", "--add-seeds", "1", *how]) == 0, "as suggested"
    assert len(find_runs([tmp_path / "runs/mine"])) == 4


def test_a_folder_with_spaces_and_accents_holds_the_study_and_its_runs(
    tiny_run, instant, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = [text for text in tiny_run() if not text.startswith("runs_dir")]
    study = ["study", "mine", "vary.norm=layer", "seeds=0", *words]
    assert main([*study, "runs_dir=données/my runs"]) == errors.CONFIG
    assert "quote values with special characters: key='\"...\"'" in said(capsys)
    assert main([*study, 'runs_dir="données/my runs"']) == 0
    assert (tmp_path / "données/my runs/mine/study.yaml").is_file()
    assert len(find_runs([tmp_path / "données/my runs"])) == 2 and {p.name for p in tmp_path.iterdir()} >= {"données"}
    assert not [path for path in tmp_path.iterdir() if '"' in path.name]
    for again in (["study", "données/my runs/mine"], [*study, "runs_dir='données/my runs'"]):
        assert main(again) == 0 and len(instant.trained) == 2, "nothing is trained twice"


@pytest.mark.slow
def test_one_damaged_run_does_not_keep_the_others_from_being_trained(tiny_run, forked_workers, tmp_path, capsys):
    how = launched(tiny_run, "vary.norm=layer", "seeds=0,1", "evals=[quantization]")
    damaged, missing = find_runs([tmp_path / "runs/mine/norm=layer"])
    with open(damaged / "metrics.jsonl", "a") as file:
        file.write("garbage\n")
    shutil.rmtree(missing)
    assert main(["plan", "mine", *how[2:]]) == 0 and "1 missing)" in capsys.readouterr().out
    assert main(["study", "mine", *how]) == errors.CONFIG
    assert "metrics.jsonl is damaged" in said(capsys)
    assert read_run(missing).state == "finished"


def test_no_other_arm_is_trained_while_a_run_of_the_required_baseline_has_failed(tiny_run, instant, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(
        "question: q?\nclaim: c\nseeds: [0, 1]\narms: [norm=layer]\nrequires: {val_loss: '<= 9'}\n"
        "expects: [{arm: norm=layer, val_loss: lower}]\n"
    )
    instant.failing = {("baseline", 1)}
    command = ["study", str(tmp_path / "mine.yaml"), "--workers", "1", *tiny_run()]
    assert main(command) == 1
    assert main(command) == 1
    assert {arm for arm, _ in instant.trained} == {"baseline"}
    assert "the same command with --retry failed for the other arms" in said(capsys)


def test_an_amendment_does_not_hide_that_an_arm_resolves_otherwise(tiny_run, instant, tmp_path, capsys):
    how = launched(tiny_run, "vary.norm=layer,rms", "seeds=0")
    path = tmp_path / "runs/mine/study.yaml"
    values = yaml.safe_load(path.read_text())
    values["configs"] = {arm: ["0" * len(hashes[0])] for arm, hashes in values["configs"].items()}
    path.write_text(without_checksum(yaml.safe_dump(values)))
    assert main(["study", "mine", "question=better?", "--amend", *how]) == 2
    assert "resolve otherwise than at its first launch" in said(capsys)


@pytest.mark.parametrize(("missing", "seconds"), [(1, 60.0), (2, 60.0), (3, 90.0)])
def test_a_plan_counts_on_no_more_workers_than_there_are_runs(missing, seconds):
    assert _total([60.0] * missing, Places(2, 1, [])) == seconds


def test_a_worker_takes_no_more_threads_than_the_environment_allows(tiny, monkeypatch):
    monkeypatch.setattr(IdleCores, "cores", lambda: 8)
    job = SimpleNamespace(config=tiny("train.device=cpu"), arm="a")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert places_for([job], 1).threads == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert places_for([job], 1).threads == 3
