"""The command as a user types it: in a process of its own where that may matter, else in this one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nexus_ablate.cli import main
from nexus_ablate.cli.verb import all_verbs
from nexus_ablate.comparison.verdict import MEANINGS
from nexus_ablate.runs import find_runs, read_run
from nexus_ablate.study.study import TYPED


def nexus(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "nexus_ablate", *arguments], capture_output=True, text=True, cwd=cwd, timeout=300
    )


def test_a_mistake_is_three_lines_and_status_2_and_makes_no_directory(tmp_path):
    done = nexus("-m", "norm=rms,rmss", cwd=tmp_path)
    assert done.returncode == 2
    assert [line.split(":")[0].strip() for line in done.stderr.splitlines()] == ["error", "got", "try"]
    assert not list(tmp_path.iterdir())


def test_list_names_every_option_and_is_json_on_request(capsys):
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["norm"]["rms"]["default"] is True
    assert listed["norm"]["rms"]["keys"]["eps"]["default"] == 1e-6
    assert "bias" in listed["switches"]
    assert main(["list", "norm"]) == 0
    text = capsys.readouterr().out
    assert "norm=scale" in text
    assert "norm.momentum=0.1" in text
    assert main(["list", "nrom"]) == 2


@pytest.mark.parametrize(
    ("word", "lines"),
    [
        ("gqa", ["gqa is typed n_kv_heads=2", "n_kv_heads=auto", "study gqa"]),
        ("grouped", ["n_kv_heads=auto"]),
        ("Muon", ["optim=muon", "optim=normuon"]),
        ("sink_rate", ["attn/sink_rate"]),
        ("rms_zero", ["norm=rms_zero"]),
        ("dyt derf", ["norm=dyt", "norm=derf"]),
        ("buckets max_distance", ["position=t5", "position.buckets=", "position.max_distance="]),
    ],
)
def test_list_finds_options_keys_and_numbers_by_a_word_of_theirs_or_of_other_tools(word, lines, capsys):
    assert main(["list", *word.split()]) == 0
    shown = capsys.readouterr().out
    assert not [line for line in lines if line not in shown] and "placement=deepnorm" not in shown


def test_the_command_line_has_forty_flags_a_study_twelve_keys_and_a_verdict_eleven_words():
    names = [(flag.name, *flag.keys) for verb in all_verbs() for flag in verb.flags]
    flags = {"--plugin", "--help", "--version"}.union(*names)
    assert (len(flags), len(TYPED), len(MEANINGS)) == (40, 12, 11)


def test_a_run_its_repetition_and_its_picture(tiny_run, tmp_path, capsys):
    done = nexus(*tiny_run(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "val bits/byte" in done.stderr
    assert "nexus-ablate show" in done.stderr
    (path,) = find_runs([tmp_path / "runs"])
    assert read_run(path).state == "finished"
    assert main(tiny_run()) == 0
    again = capsys.readouterr().err
    assert "already finished" in again and "than requested" not in again
    assert main(["show", str(path), "--out", str(tmp_path / "loss.png")]) == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.rglob("*.log")), "Hydra must not leave logs of its own"
    assert {p.name for p in tmp_path.iterdir()} == {"cache", "runs", "text.txt", "loss.png"}


def test_a_multirun_runs_every_combination_and_a_contradiction_costs_only_itself(
    tiny_run, forked_workers, tmp_path, capfd
):
    assert main(["-m", *tiny_run("train.steps=4"), "norm=rms,t5", "norm_bias=off,on", "--workers", "1"]) == 0
    said = capfd.readouterr().err
    runs = [read_run(p) for p in find_runs([tmp_path / "runs"])]
    assert len(runs) == 3
    assert {r.state for r in runs} == {"finished"}
    assert "contradict" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_multirun_may_compare_a_preset_with_none(tiny_run, tmp_path):
    done = nexus("-m", *tiny_run("train.steps=2"), "preset=none,gpt2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = [read_run(p).config for p in find_runs([tmp_path / "runs"])]
    assert sorted((run["preset"], run["norm"]["name"]) for run in runs) == [("gpt2", "layer"), ("none", "rms")]


@pytest.mark.slow
def test_a_diverged_run_of_a_multirun_is_reported_and_the_others_finish(tiny_run, tmp_path):
    extreme = ["norm=none", "optim.clip=off", "train.steps=20", "optim.lr=1e-3,1e30"]
    done = nexus("-m", *tiny_run(*extreme), cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert sorted(read_run(p).state for p in find_runs([tmp_path / "runs"])) == ["diverged", "finished"]


def test_a_run_that_is_alive_elsewhere_is_left_alone(tiny_run, tmp_path, capsys):
    from nexus_ablate.config.compose import compose, differences
    from nexus_ablate.data import fingerprint_of
    from nexus_ablate.runs import Launch, arm_name, open_run, run_path
    from nexus_ablate.training.session import identity_of

    config = compose(tiny_run())
    ident = identity_of(config, fingerprint_of(config.data, config.model.context))
    path = run_path(tmp_path / "runs", "scratch", arm_name(differences(config)), 0, ident)
    with open_run(path, Launch(ident, "", [], {})) as run:
        run.status("running")
        assert main(tiny_run()) == 6
    assert len(capsys.readouterr().err.strip().splitlines()) <= 3
