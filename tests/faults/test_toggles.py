"""What may not change a run does not, to the byte: surroundings, watching, repetition (R15).

Fourteen toggles: six that measure otherwise, three that save otherwise, and a terminal, none, other generators, a cold
cache, another place with its locale and hash seed. The fifteenth, the mirror on disk, is in test_training.py; W&B
online, in every state of disrepair, in test_sync.py. Batches are drawn in the training process, so there are no loading
workers to vary; the number of threads may change the last bit, and is recorded and compared instead.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from faults.bench import logged, only, result, run, weights
from nexus_ablate.config.compose import compose
from nexus_ablate.training import checkpoint, session, trainer
from nexus_ablate.training import step as training_step

GOLDEN = Path(__file__).with_name("golden_losses.json")
WATCHING = {
    "log less often": ["train.log_every=7"],
    "probe off": ["probe=off"],
    "probe full": ["probe=full", "probe.every=3"],
    "probe fewer sequences": ["probe.sequences=1"],
    "validate more often": ["train.eval_every=3"],
    "validate on more tokens": ["train.eval_tokens=512"],
}
ASIDE = {
    "save more often": ["train.checkpoint_every=2"],
    "keep more": ["train.keep=9"],
    "compute activations again": ["train.activation_checkpointing=on"],
}


def seen(path: Path) -> list[dict[str, float]]:
    """What the gradients of a run were at the steps that it logged, and its batches up to there."""
    return [{k: v for k, v in row.items() if k.startswith(("grad_norm/", "batch_hash", "lr"))} for row in logged(path)]


def agree(plain: Path, watched: Path) -> bool:
    """Whether two runs ended at the same weights, and had the same gradients and batches wherever both looked."""
    actual, expected = ({row["step"]: s for row, s in zip(logged(p), seen(p), strict=True)} for p in (plain, watched))
    both = [step for step in actual.keys() & expected.keys() if actual[step] and expected[step]]
    assert len(both) >= 2
    first, second = weights(plain), weights(watched)
    return all(actual[step] == expected[step] for step in both) and all(torch.equal(first[n], second[n]) for n in first)


def test_watching_otherwise_leaves_the_weights_the_gradients_and_the_batches_as_they_were(tiny_run, tmp_path):
    plain = run(tiny_run("model.dropout=0.1"))
    for toggle, overrides in WATCHING.items():
        watched = run([*tiny_run("model.dropout=0.1"), *overrides, f"runs_dir={tmp_path / toggle}"])
        assert agree(plain.path, watched.path), toggle


def test_saving_otherwise_leaves_everything_as_it_was(tiny_run, tmp_path):
    plain = run(tiny_run("model.dropout=0.1"))
    for toggle, overrides in ASIDE.items():
        other = run([*tiny_run("model.dropout=0.1"), *overrides, f"runs_dir={tmp_path / toggle}"])
        assert result(other.path) == result(plain.path), toggle


@pytest.mark.parametrize("terminal", [True, False])
def test_being_shown_leaves_everything_as_it_was(tiny_run, tmp_path, monkeypatch, terminal):
    plain = run(tiny_run("model.dropout=0.1"))
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    overrides = tiny_run("model.dropout=0.1", f"runs_dir={tmp_path / 'other'}")
    shown = session.train(compose(overrides), overrides)
    assert ("tok/s" in screen.getvalue()) == terminal
    assert result(shown.path) == result(plain.path)


def test_generators_that_stand_elsewhere_and_a_cold_cache_leave_everything_as_it_was(tiny_run, tmp_path, monkeypatch):
    plain = run(tiny_run("model.dropout=0.1"))
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path / "another cache"))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(99)
    other = run(tiny_run("model.dropout=0.1", f"runs_dir={tmp_path / 'other'}"))
    assert result(other.path) == result(plain.path)


@pytest.mark.slow
def test_control_a_probe_that_leaves_a_trace_is_seen(tiny_run, tmp_path, monkeypatch):
    probe = trainer.probe

    def nudging(model, *arguments):
        with torch.no_grad():
            next(model.parameters()).mul_(1 + 1e-6)
        return probe(model, *arguments)

    monkeypatch.setattr(trainer, "probe", nudging)
    plain = run(tiny_run("model.dropout=0.1"))
    watched = run([*tiny_run("model.dropout=0.1"), *WATCHING["probe full"], f"runs_dir={tmp_path / 'other'}"])
    assert not agree(plain.path, watched.path)


@pytest.mark.parametrize("toggle", ["validate more often", "keep more"])
def test_control_a_validation_that_moves_the_generator_of_dropout_is_seen(tiny_run, tmp_path, monkeypatch, toggle):
    """Dropout without a stream of its own, and a validation that draws; saving otherwise still changes nothing."""
    mode = trainer.evaluation_mode

    def drawing(model):
        torch.rand(1)
        return mode(model)

    monkeypatch.setattr(training_step.Step, "_seed_dropout", lambda self, number: None)
    monkeypatch.setattr(trainer, "evaluation_mode", drawing)
    torch.manual_seed(0)
    plain = run(tiny_run("model.dropout=0.1"))
    torch.manual_seed(0)
    other = run([*tiny_run("model.dropout=0.1"), *(WATCHING | ASIDE)[toggle], f"runs_dir={tmp_path / 'other'}"])
    assert agree(plain.path, other.path) == (toggle == "keep more")


@pytest.mark.slow
def test_in_another_place_with_other_hash_seeds_and_locale_the_run_is_the_same(tiny_run, tmp_path):
    plain = run(tiny_run())
    other = tmp_path / "elsewhere"
    other.mkdir()
    changed = {"PYTHONHASHSEED": "123", "LC_ALL": "C", "TZ": "Asia/Tokyo", "HOME": str(other), "COLUMNS": "40"}
    command = [sys.executable, "-m", "nexus_ablate", *tiny_run(f"runs_dir={other / 'runs'}")]
    done = subprocess.run(command, cwd=other, env=os.environ | changed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    again = only(other / "runs")
    assert again.name == plain.path.name
    assert result(again) == result(plain.path)


def test_the_first_batches_and_losses_are_those_of_the_record(tiny_run):
    """Losses of this version, kept to notice a change of numbers that nobody meant; another torch may differ a little.

    After a change that was meant: delete the file, run this test, and say in the change what moved the numbers.
    """
    rows = [row for row in logged(run(tiny_run("seed=5", "init=gpt2", "optim.lr=3e-3")).path) if "train/loss" in row]
    actual = {"batch_hash": rows[-1]["batch_hash"], "train/loss": [row["train/loss"] for row in rows]}
    if not GOLDEN.exists():
        GOLDEN.write_text(json.dumps(actual, indent=1) + "\n")
        pytest.fail(f"{GOLDEN.name} was missing and has been written")
    golden = json.loads(GOLDEN.read_text())
    assert actual["batch_hash"] == golden["batch_hash"]
    assert actual["train/loss"] == pytest.approx(golden["train/loss"], rel=1e-5)


def test_nothing_is_asked_of_a_random_state_that_a_checkpoint_would_have_to_hold(tiny_run, monkeypatch):
    """The reason why resuming is exact: a run reads no global generator, so there is none to restore."""
    before = torch.get_rng_state()
    run(tiny_run())
    assert torch.equal(torch.get_rng_state(), before)
    loaded = checkpoint.load_newest(only(Path(next(o for o in tiny_run() if "runs_dir" in o)[9:])) / "checkpoints")
    assert loaded is not None
    assert set(loaded.tensors) == {"model"}
