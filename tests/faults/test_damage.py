"""A damaged checkpoint is reported, and the one before it is used; with none left the exit status is 4 (R4)."""

from __future__ import annotations

import os
import random
import shutil

import pytest

from faults.bench import at_step, only, result, run, sizes
from nexus_ablate import errors
from nexus_ablate.config.compose import compose
from nexus_ablate.errors import CheckpointError
from nexus_ablate.training import checkpoint
from nexus_ablate.training.checkpoint import load_newest
from nexus_ablate.training.session import train

SHORT = ("train.steps=12", "train.checkpoint_every=4", "train.eval_every=6", "model.n_layers=1", "model.d_model=8")


class Crash(Exception):
    """Ends a run between two checkpoints."""


@pytest.fixture
def broken_off(tiny_run, tmp_path, monkeypatch):
    """Overrides and path of a run that crashed before step 11, with checkpoints of steps 4 and 8."""

    def stop(step: int) -> None:
        if step == 11:
            raise Crash

    overrides = tiny_run(*SHORT)
    with monkeypatch.context() as patch:
        at_step(patch, stop)
        with pytest.raises(Crash):
            run(overrides)
    path = only(tmp_path / "runs")
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["step_00000004", "step_00000008"]
    return overrides, path


def cut(file, draw) -> str:
    length = draw.randrange(file.stat().st_size)
    os.truncate(file, length)
    return f"{file.name} cut to {length} bytes"


def flip(file, draw) -> str:
    data, bit = bytearray(file.read_bytes()), draw.randrange(8 * file.stat().st_size)
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    return f"bit {bit} of {file.name} flipped"


def delete(file, draw) -> str:
    file.unlink()
    return f"{file.name} deleted"


def replace(file, draw) -> str:
    file.write_bytes(draw.randbytes(file.stat().st_size))
    return f"{file.name} overwritten"


@sizes(44, 220, fast=True)
def test_no_damaged_checkpoint_is_ever_loaded(broken_off, tmp_path, counted, count):
    _, path = broken_off
    newest = path / "checkpoints" / "step_00000008"
    intact = {file.name: file.read_bytes() for file in newest.iterdir()}
    whole = load_newest(path / "checkpoints")
    assert whole is not None
    draw = random.Random(0)
    caught = harmless = 0
    for number in range(count):
        way = [cut, flip, cut, flip, cut, flip, delete, cut, flip, cut, flip, replace][number % 12]
        said = way(newest / draw.choice(sorted(intact)), draw)
        loaded = load_newest(path / "checkpoints")
        assert loaded is not None
        if loaded.step == 4:
            assert len(loaded.skipped) == 1 and "\n" not in loaded.skipped[0], said
            caught += 1
        else:  # a bit of the manifest that says nothing, such as one in its white space
            assert said.endswith("MANIFEST.json flipped"), said
            assert loaded.state == whole.state, said
            harmless += 1
        shutil.rmtree(newest)
        newest.mkdir()
        for name, data in intact.items():
            (newest / name).write_bytes(data)
    assert caught + harmless == count
    counted(f"{caught} of {count} damaged checkpoints caught, {harmless} changes without a meaning, 0 loaded silently")


def test_a_run_resumes_from_the_checkpoint_before_and_reports_it_in_one_line(tiny_run, broken_off, tmp_path, capsys):
    overrides, path = broken_off
    expected = result(run([*overrides, f"runs_dir={tmp_path / 'whole'}"]).path)
    (path / "checkpoints" / "step_00000008" / "model.safetensors").write_bytes(b"")
    capsys.readouterr()
    train(compose(overrides), overrides)
    lines = [line for line in capsys.readouterr().err.splitlines() if "step_00000008" in line]
    assert lines == [
        "skipped a damaged checkpoint: step_00000008: model.safetensors has 0 bytes, not " + lines[0].rpartition(" ")[2]
    ]
    assert result(path) == expected


def test_with_no_whole_checkpoint_the_status_is_4_and_nothing_is_deleted(broken_off):
    overrides, path = broken_off
    for each in (path / "checkpoints").iterdir():
        (each / "state.json").unlink()
    before = sorted((path / "checkpoints").rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        run(overrides)
    assert caught.value.status == errors.CHECKPOINT == 4
    assert len(caught.value.lines()) <= 3
    assert sorted((path / "checkpoints").rglob("*")) == before


def test_control_without_the_manifest_the_damage_is_trained_on(tiny_run, broken_off, tmp_path, monkeypatch):
    overrides, path = broken_off
    expected = result(run([*overrides, f"runs_dir={tmp_path / 'whole'}"]).path)
    file = path / "checkpoints" / "step_00000008" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    monkeypatch.setattr(
        checkpoint,
        "_read_verified",
        lambda at: {file.name: file.read_bytes() for file in at.iterdir() if file.name != checkpoint.MANIFEST},
    )
    assert result(run(overrides).path) != expected
