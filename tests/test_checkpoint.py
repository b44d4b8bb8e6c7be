"""A checkpoint appears whole or not at all, and a damaged one is noticed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nexus_ablate.errors import CheckpointError, StorageError
from nexus_ablate.runs import files
from nexus_ablate.training import checkpoint
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


def exit_of(action: Callable[[], object]) -> int:
    """The exit status of a forked child that runs `action`: 0, or 1 where it raised."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


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


def instants(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the instrumented instants of a save, in order."""
    passed: list[str] = []
    copy = checkpoints.with_name("dry")
    shutil.copytree(checkpoints, copy)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_checkpoint_point", passed.append)
        save_step(copy, 300)
    return passed


def test_a_kill_at_any_instant_of_a_save_loses_nothing(two: Path, monkeypatch: pytest.MonkeyPatch):
    passed = instants(two, monkeypatch)
    assert len(passed) == 12
    for instant, name in enumerate(passed):
        copy = two.with_name(f"killed {instant}")
        shutil.copytree(two, copy)
        left = [instant]

        def die(_: str, left: list[int] = left) -> None:
            if left[0] == 0:
                os._exit(9)
            left[0] -= 1

        def save_and_die(copy: Path = copy, die: Callable[[str], None] = die) -> None:
            checkpoint._checkpoint_point = die
            save_step(copy, 300)

        assert exit_of(save_and_die) == 9, name
        assert holds(copy, 300 if instant > passed.index("before rename") else 200), name
        loaded = load_newest(copy)
        assert loaded is not None
        assert loaded.skipped == [], name
        save_step(copy, 300)  # the restart's own save clears what the kill left
        assert names(copy) == ["step_00000200", "step_00000300"], name
        assert holds(copy, 300)


@pytest.mark.parametrize("protected", [True, False])
def test_a_save_whose_bytes_never_reached_the_disk_is_noticed(
    two: Path, monkeypatch: pytest.MonkeyPatch, protected: bool
):
    def half(path: Path, data: bytes) -> None:  # as after a power cut, had nothing been synced
        path.write_bytes(data[:-8] + b"\0" * 8 if path.name == "model.safetensors" else data)

    monkeypatch.setattr(checkpoint, "write_synced", half)
    save_step(two, 300)
    if not protected:
        monkeypatch.setattr(checkpoint, "_read_verified", unverified)
    loaded = load_newest(two)
    assert loaded is not None
    assert (loaded.step == 200 and same(loaded.tensors, contents(200))) is protected


def unverified(path: Path) -> dict[str, bytes]:
    """What loading would be without the manifest."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != checkpoint.MANIFEST}


# Damaged


@pytest.mark.parametrize(
    "foreign", ["step_00000900", "step_900", "900", "step_00000200 (copy)", "step_final", "step_٠٠٠٠٠٩٠٠"]
)
def test_a_copied_or_renamed_checkpoint_is_not_trusted(two: Path, foreign: str):
    shutil.copytree(two / "step_00000200", two / foreign)
    assert holds(two, 200)


def test_checkpoints_of_which_none_is_whole_are_an_error_that_names_each(two: Path):
    for path in list(two.iterdir()):
        (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        load_newest(two)
    assert "step_00000100" in caught.value.got
    assert "step_00000200" in caught.value.got
    assert len(caught.value.lines()) == 3


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "mkdir"])
def test_a_disk_that_refuses_any_call_leaves_the_last_good_checkpoint(
    two: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
):
    real = {"write": os.write, "fsync": os.fsync, "rename": os.rename, "mkdir": os.mkdir}[call]
    refused = 0
    for k in range(100):
        left = [k]

        def refuse(*arguments: Any, left: list[int] = left, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise OSError(number, os.strerror(number))
            if call == "write":
                arguments = (arguments[0], arguments[1][:150])  # the system may take a part at a time
            return real(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(files, "_write", refuse) if call == "write" else patch.setattr(os, call, refuse)
            try:
                save_step(two, 300)
            except StorageError as error:
                refused += 1
                assert str(two) in error.problem
                assert "bytes needed" in error.got
        if left[0] >= 0:
            break
        assert holds(two, 200) or holds(two, 300)
        assert not [name for name in names(two) if ".tmp-" in name] or call == "rename"
        shutil.rmtree(two / "step_00000300", ignore_errors=True)
        save_step(two, 100)
        save_step(two, 200)
    # The second rename belongs to a deletion, the first mkdir finds its directory there: both go on without.
    assert refused == {"write": k, "fsync": k, "rename": 1, "mkdir": 1}[call]
    assert k >= {"write": 6, "fsync": 6, "rename": 2, "mkdir": 2}[call]


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
