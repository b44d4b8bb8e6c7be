"""What may not change a run does not, to the byte: surroundings, watching, repetition (R15).

That arms share batches and initial values (R16) is held by test_training.py and test_model.py over the whole registry.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from faults.bench import logged, only, result, run, weights
from nexus_ablate.training import checkpoint
from nexus_ablate.training import step as training_step

GOLDEN = Path(__file__).with_name("golden_losses.json")
TOGGLES = {
    "log less often": ["train.log_every=7"],
    "save more often": ["train.checkpoint_every=2"],
    "probe off": ["probe=off"],
    "probe full": ["probe=full", "probe.every=3"],
    "validate more often": ["train.eval_every=3"],
    "validate on more tokens": ["train.eval_tokens=512"],
    "keep more": ["train.keep=9"],
}


@pytest.mark.parametrize("toggle", TOGGLES)
def test_watching_otherwise_leaves_the_weights_and_the_batches_as_they_were(tiny_run, tmp_path, toggle):
    plain = run(tiny_run("model.dropout=0.1"))
    watched = run([*tiny_run("model.dropout=0.1"), *TOGGLES[toggle], f"runs_dir={tmp_path / 'other'}"])
    assert watched.summary["batch_hash"] == plain.summary["batch_hash"]
    ours, theirs = weights(plain.path), weights(watched.path)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_control_a_validation_that_draws_random_numbers_is_seen(tiny_run, tmp_path, monkeypatch):
    plain = run(tiny_run("model.dropout=0.1"))
    take = training_step.Step.take

    def unseeded(self, number, batch):  # dropout from the global generator, which a validation moves on
        torch.rand(number % 3 + 1)
        return take(self, number, batch)

    monkeypatch.setattr(training_step.Step, "_seed_dropout", lambda self, number: None)
    monkeypatch.setattr(training_step.Step, "take", unseeded)
    watched = run(tiny_run("model.dropout=0.1", f"runs_dir={tmp_path / 'other'}"))
    ours, theirs = weights(plain.path), weights(watched.path)
    assert not all(torch.equal(ours[name], theirs[name]) for name in ours)


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
    rows = [row for row in logged(run(tiny_run("seed=5")).path) if "train/loss" in row]
    found = {"batch_hash": rows[-1]["batch_hash"], "train/loss": [row["train/loss"] for row in rows]}
    if not GOLDEN.exists():
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
        pytest.fail(f"{GOLDEN.name} was missing and has been written")
    golden = json.loads(GOLDEN.read_text())
    assert found["batch_hash"] == golden["batch_hash"]
    assert found["train/loss"] == pytest.approx(golden["train/loss"], rel=1e-5)


def test_nothing_is_asked_of_a_random_state_that_a_checkpoint_would_have_to_hold(tiny_run, monkeypatch):
    """The reason why resuming is exact: a run reads no global generator, so there is none to restore."""
    before = torch.get_rng_state()
    run(tiny_run())
    assert torch.equal(torch.get_rng_state(), before)
    loaded = checkpoint.load_newest(only(Path(next(o for o in tiny_run() if "runs_dir" in o)[9:])) / "checkpoints")
    assert loaded is not None
    assert set(loaded.tensors) == {"model"}
