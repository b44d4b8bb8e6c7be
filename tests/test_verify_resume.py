"""The user's own proof finds nothing where nothing is wrong, and finds what is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from nexus_ablate.cli import main, verify_resume
from nexus_ablate.cli.verify_resume import compare
from nexus_ablate.config.compose import compose
from nexus_ablate.errors import ConfigError
from nexus_ablate.runs import find_runs, read_run
from nexus_ablate.training.checkpoint import load_newest, save
from nexus_ablate.training.session import train


@pytest.mark.slow
def test_it_interrupts_twice_finds_the_runs_identical_and_leaves_nothing(tiny_run, tmp_path, capsys):
    overrides = [text for text in tiny_run("train.steps=60", "probe=off") if not text.startswith("runs_dir")]
    assert main(["verify-resume", "--keep", str(tmp_path / "proof"), *overrides]) == 0
    shown = capsys.readouterr().out
    assert shown.count("identical") == 2, shown
    assert "killed (kill -9) after step" in shown
    assert "stopped by SIGTERM after step" in shown
    assert not (tmp_path / "runs").exists()
    states = [read_run(path).state for path in find_runs(list((tmp_path / "proof").iterdir()))]
    assert states == ["finished"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_ended_by_a_signal_it_leaves_no_folder(tiny_run, tmp_path, number):
    overrides = [text for text in tiny_run("train.steps=60", "probe=off") if not text.startswith("runs_dir")]
    command = [sys.executable, "-m", "nexus_ablate", "verify-resume", *overrides]
    (tmp_path / "tmp").mkdir()
    proof = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path / "tmp")}, stderr=subprocess.PIPE)
    while not list((tmp_path / "tmp").glob("*/*/*/*/*/metrics.jsonl")) and proof.poll() is None:
        time.sleep(0.05)
    proof.send_signal(number)
    proof.communicate(timeout=60)
    assert proof.returncode in (-number, 130)
    end = time.monotonic() + 60
    while list((tmp_path / "tmp").iterdir()):
        assert time.monotonic() < end, "the folder is still there"
        time.sleep(0.1)


@pytest.fixture
def two(tiny_run, tmp_path):
    """Two equal runs."""
    first = train(compose(tiny_run()), quiet=True).path
    shutil.copytree(first, tmp_path / "copy" / first.name)
    return read_run(first), read_run(tmp_path / "copy" / first.name)


def test_equal_runs_do_not_differ_whatever_their_clocks_say(two):
    first, second = two
    rows = [row | {"seconds": 9.0, "tokens_per_second": 1.0} for row in second.metrics()]
    (second.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert compare(first, second) == verify_resume.Difference("", 0.0)


def test_the_first_number_that_differs_is_named_with_its_step(two):
    first, second = two
    rows = second.metrics()
    rows[7]["train/loss"] *= 1 + 1e-6
    rows[9]["grad_norm/global"] *= 1.5
    (second.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    comparison = compare(first, second)
    assert comparison.place == "step 7: train/loss"
    assert comparison.size == pytest.approx(1 / 3)


def test_a_row_that_is_missing_or_twice_there_is_a_difference(two):
    first, second = two
    lines = (second.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    for changed in (lines[:-1], [*lines, lines[-1]]):
        (second.path / "metrics.jsonl").write_text("".join(changed))
        assert compare(first, second).place == "the steps of metrics.jsonl"


def test_a_single_bit_of_a_weight_is_a_difference(two):
    first, second = two
    loaded = load_newest(second.path / "checkpoints")
    assert loaded is not None
    loaded.tensors["model"]["embedding.weight"].view(torch.int32)[3, 3] ^= 1
    shutil.rmtree(loaded.path)
    save(second.path / "checkpoints", loaded.step, loaded.tensors, loaded.state)
    comparison = compare(first, second)
    assert comparison.place == "the weight embedding.weight"
    assert 0 < comparison.size < 1e-5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--nonsense"], "no flag"), (["train.steps=3"], "too few steps"), (["norm=rmss"], "try: norm=rms")],
)
def test_a_mistake_is_refused_before_anything_is_trained(arguments, said):
    with pytest.raises(ConfigError) as refused:
        verify_resume.run(*verify_resume.VERB.parse(arguments))
    assert said in str(refused.value)


def test_a_directory_that_is_there_is_not_overwritten(tmp_path):
    with pytest.raises(ConfigError, match="directory of its own"):
        verify_resume.run(*verify_resume.VERB.parse(["--keep", str(tmp_path)]))
