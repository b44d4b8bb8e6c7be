"""A checkpoint appears whole or not at all, and a damaged one is noticed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faults.bench import at_every_call, child, ended

from nexus_ablate.errors import StorageError
from nexus_ablate.training.checkpoint import load_newest, save

Contents = dict[str, dict[str, torch.Tensor]]


def contents(step: int) -> Contents:
    return {
        "model": {"embed.weight": torch.arange(12.0).reshape(3, 4) + step, "scale": torch.tensor(step)},
        "optimizer": {"embed.weight.exp_avg": torch.full((3, 4), 0.1 * step, dtype=torch.bfloat16)},
    }


def save_step(checkpoints: Path, step: int) -> Path:
    return save(checkpoints, step, contents(step), {"step": step, "offsets": {"metrics.jsonl": 9 * step}})


def holds(checkpoints: Path, step: int) -> bool:
    """Whether the newest checkpoint is that of `step`, to the bit."""
    loaded = load_newest(checkpoints)
    return loaded is not None and loaded.step == step == loaded.state["step"] and same(loaded.tensors, contents(step))


def same(actual: Contents, expected: Contents) -> bool:
    pairs = [(actual[group][name], tensor) for group, named in expected.items() for name, tensor in named.items()]
    return actual.keys() == expected.keys() and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A directory with the checkpoints 100 and 200."""
    save_step(tmp_path / "checkpoints", 100)
    save_step(tmp_path / "checkpoints", 200)
    return tmp_path / "checkpoints"


def test_every_kind_of_tensor_comes_back_to_the_bit(tmp_path: Path):
    whole = torch.arange(24.0).reshape(4, 6)
    tensors: Contents = {
        "model": {
            "bf16": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
            "transposed": whole.T,
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "scalar": torch.tensor(3, dtype=torch.int64),
            "empty": torch.empty(0, 3),
            "mask": torch.tensor([True, False]),
        },
        "optimizer": {},
        "random": {"cpu": torch.get_rng_state()},
    }
    state = {"lr": 0.1 + 0.2, "list": [1, None, True], "text": "é"}
    path = save(tmp_path, 7, tensors, state)
    loaded = load_newest(tmp_path)
    assert loaded is not None
    assert (loaded.step, loaded.state, loaded.path, loaded.skipped) == (7, state, path, [])
    assert path.name == "step_00000007"
    for group, named in tensors.items():
        assert loaded.tensors[group].keys() == named.keys()
        for name, tensor in named.items():
            torch.testing.assert_close(loaded.tensors[group][name], tensor.detach(), rtol=0, atol=0, equal_nan=True)
    loaded.tensors["model"]["parameter"].add_(1)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int):
    for step in (100, 200, 300, 400):
        save(tmp_path, step, contents(step), {}, keep=keep)
    assert names(tmp_path) == [f"step_{step:08d}" for step in (100, 200, 300, 400)][-keep:]


def test_no_checkpoint_is_none(tmp_path: Path):
    assert load_newest(tmp_path) is None
    assert load_newest(tmp_path / "nowhere") is None
    (tmp_path / "step_00000100.tmp-7").mkdir()
    assert load_newest(tmp_path) is None


# Killed


@pytest.mark.parametrize("way", ["killed", "refused"])
def test_a_save_that_ends_at_any_call_to_the_disk_loses_nothing(two: Path, monkeypatch: pytest.MonkeyPatch, way: str):
    calls: list[str] = []
    whole = Path(shutil.copytree(two, two.with_name("whole")))
    with monkeypatch.context() as patch:
        at_every_call(patch, calls.append)
        save_step(whole, 300)
    assert {"write", "fsync", "rename", "mkdir", "unlink"} <= {*calls}
    for number in range(len(calls)):
        copy = Path(shutil.copytree(two, two.with_name(f"ended {number}")))
        left = [number]

        def end(_: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == -1 and way == "killed":
                os._exit(9)
            if left[0] == -1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def save_and_end(copy: Path = copy, end: Callable[[str], None] = end) -> None:
            with monkeypatch.context() as patch:
                at_every_call(patch, end)
                save_step(copy, 300)

        if way == "killed":
            assert ended(child(save_and_end)) == 9, number
        else:
            try:
                save_and_end()
            except StorageError as error:
                assert str(copy) in error.problem and "bytes needed" in error.got
        loaded = load_newest(copy)
        assert loaded is not None and loaded.skipped == [], (number, calls[number])
        assert holds(copy, 200) or holds(copy, 300), (number, calls[number])
        save_step(copy, 300)  # the restart's own save clears what the other left
        assert holds(copy, 300) and names(copy) == ["step_00000200", "step_00000300"], (number, calls[number])


# Damaged


@pytest.mark.parametrize(
    "foreign", ["step_00000900", "step_900", "900", "step_00000200 (copy)", "step_final", "step_٠٠٠٠٠٩٠٠"]
)
def test_a_copied_or_renamed_checkpoint_is_not_trusted(two: Path, foreign: str):
    shutil.copytree(two / "step_00000200", two / foreign)
    assert holds(two, 200)


def test_training_on_after_damage_replaces_and_outlives_the_damaged_one(two: Path):
    (two / "step_00000200" / "model.safetensors").unlink()
    save_step(two, 150)
    assert names(two) == ["step_00000100", "step_00000150"]
    save_step(two, 200)
    (two / "step_00000200" / "state.json").unlink()
    save_step(two, 200)
    assert names(two) == ["step_00000150", "step_00000200"]
    assert holds(two, 200)


def test_saving_a_step_twice_leaves_the_first_untouched(two: Path):
    before = {path: path.stat().st_mtime_ns for path in two.rglob("*")}
    assert save_step(two, 200) == two / "step_00000200"
    assert {path: path.stat().st_mtime_ns for path in two.rglob("*")} == before


# Refused by the disk


def test_a_save_that_would_fill_the_disk_is_refused_before_it_begins(two: Path, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")
    needed = sum(t.numel() * t.element_size() for group in contents(300).values() for t in group.values())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6, 2 * needed - 1))
    with pytest.raises(StorageError) as caught:
        save_step(two, 300)
    assert str(two) in caught.value.problem
    assert f"{2 * needed - 1} bytes free" in caught.value.got
    assert names(two) == ["step_00000100", "step_00000200"]


def test_a_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(
    two: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "busy")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(shutil, "rmtree", refuse)
        save_step(two, 300)
    assert "cannot delete" in caplog.text
    assert holds(two, 300)
    save_step(two, 400)
    assert names(two) == ["step_00000300", "step_00000400"]
