"""Checkpoints: directories that are written atomically and verified by hash before they are used."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nexus_ablate.errors import CheckpointError, StorageError
from nexus_ablate.runs.files import storage, sync_directory, write_synced

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "MANIFEST.json"
STATE = "state.json"
_STEP_NAME = re.compile(r"step_(\d{8,})")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """The newest valid checkpoint.

    Attributes:
        tensors: By group and name, on the CPU.
        skipped: One line per newer checkpoint that was damaged.
    """

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    path: Path
    skipped: list[str]


class _File(msgspec.Struct):
    bytes: int
    sha256: str


class _Manifest(msgspec.Struct):
    step: int
    files: dict[str, _File]


class _Damaged(Exception):
    """A checkpoint cannot be used; the message says why."""


def save(
    checkpoints: Path,
    step: int,
    tensors: dict[str, dict[str, Tensor]],
    state: dict[str, Any],
    keep: int = 2,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """Save a checkpoint, then delete all but the newest `keep`.

    The state of a run is a function of its step, so a valid checkpoint of the same step is left as it is.

    Args:
        checkpoints: The run's `checkpoints/`; no other process writes to it.
        tensors: By group (`model`, `optimizer`) and name; no two tensors share memory.
        state: Plain JSON that survives a round trip unchanged.
        keep: At least 1.
        check: Called last before the checkpoint gets its name; it raises where that must not happen.

    Raises:
        StorageError: The disk refused the write or has less than twice the space needed. Earlier checkpoints are kept.
        TypeError: `state` would change in a round trip through JSON.
    """
    state_json = json.dumps(state, allow_nan=False).encode()
    if json.loads(state_json) != state:
        raise TypeError("a checkpoint's state must be plain JSON: lists, no tuples; text as keys")
    final = checkpoints / f"step_{step:08d}"
    needed = len(state_json) + sum(t.numel() * t.element_size() for group in tensors.values() for t in group.values())
    with storage(checkpoints, needed):
        checkpoints.mkdir(exist_ok=True)  # not its parents: a run directory that was renamed must not be created again
        for orphan in checkpoints.glob("step_*.tmp-*"):
            _delete(orphan)
        if not _is_whole(final):
            require_space(checkpoints, needed)
            _write(final, step, tensors, state_json, check)
        _prune(checkpoints, step, keep)
    return final


def load_newest(checkpoints: Path, accept: Callable[[dict[str, Any]], None] | None = None) -> Loaded | None:
    """The newest valid checkpoint; None if there are no checkpoints.

    Args:
        accept: Raises CheckpointError for a state that the run cannot resume from, such as one with a truncated log.

    Raises:
        CheckpointError: There are checkpoints, but none is valid and accepted.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    skipped: list[str] = []
    for step, path in sorted(_steps(checkpoints), reverse=True):
        try:
            files = _read_verified(path)
            state = json.loads(files.pop(STATE))
            if not isinstance(state, dict):
                raise _Damaged(f"{STATE} is not a mapping")
            tensors = {name.removesuffix(".safetensors"): from_bytes(data) for name, data in files.items()}
            if accept is not None:
                accept(state)
        except (_Damaged, SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            skipped.append(f"{path.name}: {error}")
        except CheckpointError as error:
            skipped.append(f"{path.name}: {error.problem}")
        else:
            return Loaded(step, tensors, state, path, skipped)
    if skipped:
        fix = "restore one from a copy, or train again with rerun=on"
        raise CheckpointError(f"no checkpoint in {checkpoints} is whole", "; ".join(skipped), fix)
    return None


def newest_hash(checkpoints: Path, group: str) -> str | None:
    """sha256 of a group of tensors in the newest checkpoint, by its manifest; None where there is none at all.

    Raises:
        CheckpointError: Its manifest is damaged.
    """
    newest = max(_steps(checkpoints), default=None)
    if newest is None:
        return None
    try:
        return _read_manifest(newest[1]).files[f"{group}.safetensors"].sha256
    except (_Damaged, LookupError) as error:
        fix = "restore it from a copy"
        raise CheckpointError(f"{MANIFEST} is unreadable", f"{newest[1]}: {error}", fix) from error


def discard_newer(checkpoints: Path, step: int) -> None:
    """Delete the checkpoints after `step`, so that a later start cannot resume from one that was skipped."""
    for at, path in _steps(checkpoints):
        if at > step:
            _delete(path)


def _write(
    final: Path, step: int, tensors: dict[str, dict[str, Tensor]], state_json: bytes, check: Callable[[], None]
) -> None:
    """Write a checkpoint under a temporary name, and rename it once every byte is on the disk."""
    from safetensors.torch import save as to_bytes

    aside = final.with_name(f"{final.name}.tmp-{os.getpid()}")
    files: dict[str, dict[str, Any]] = {}
    try:
        aside.mkdir()
        for group, named in tensors.items():
            data = to_bytes({name: tensor.detach().contiguous() for name, tensor in named.items()})
            files[f"{group}.safetensors"] = _add(aside, f"{group}.safetensors", data)
        files[STATE] = _add(aside, STATE, state_json)
        _add(aside, MANIFEST, json.dumps({"step": step, "files": files}, indent=2).encode())
        sync_directory(aside)
        check()
        os.rename(aside, final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # the next save deletes whatever remains
        raise
    sync_directory(final.parent)


def _is_whole(path: Path) -> bool:
    """Whether a valid checkpoint exists at this path. Deletes a damaged one."""
    if not os.path.lexists(path):
        return False
    try:
        _read_verified(path)
    except _Damaged:
        _delete(path)
        return False
    return True


def _add(directory: Path, name: str, data: bytes) -> dict[str, Any]:
    """Write one file; returns its entry in the manifest."""
    write_synced(directory / name, data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def require_space(checkpoints: Path, needed: int) -> None:
    """Check that twice `needed` bytes are free: the previous checkpoint is deleted only after a save.

    Raises:
        StorageError: There is less space.
    """
    with storage(checkpoints):
        free = shutil.disk_usage(checkpoints).free
    if free < 2 * needed:
        got = f"{free} bytes free, {2 * needed} bytes needed"
        raise StorageError(
            f"too little space for a checkpoint in {checkpoints}", got, "free some space or keep fewer runs there"
        )


def _steps(checkpoints: Path) -> list[tuple[int, Path]]:
    """The checkpoints as (step, path) pairs."""
    there = (path for path in checkpoints.glob("step_*") if path.is_dir())
    names = [(_STEP_NAME.fullmatch(path.name), path) for path in there]
    return [(int(match[1]), path) for match, path in names if match]


def _prune(checkpoints: Path, step: int, keep: int) -> None:
    """Delete all but the newest `keep`. Those after `step` are damaged, or the run would have resumed from them."""
    checkpoints_by_step = sorted(_steps(checkpoints))
    kept = [path for at, path in checkpoints_by_step if at <= step][-keep:]
    for _, path in checkpoints_by_step:
        if path not in kept:
            _delete(path)


def _delete(path: Path) -> None:
    """Rename a checkpoint so that no reader finds it, then delete it. The next save deletes what remains."""
    doomed = path if ".tmp-" in path.name else path.with_name(f"{path.name}.tmp-deleted")
    try:
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        _log.warning("cannot delete %s: %s", path, error)


def _read_verified(path: Path) -> dict[str, bytes]:
    """The verified bytes of each file in a checkpoint's manifest, so that exactly what was checked gets parsed.

    Raises:
        _Damaged: A file is missing or changed.
    """
    manifest = _read_manifest(path)
    if path.name != f"step_{manifest.step:08d}" or STATE not in manifest.files:
        raise _Damaged(f"{MANIFEST} does not belong to this checkpoint")
    files = {}
    for name, entry in manifest.files.items():
        data = _read_file(path / name)
        if len(data) < entry.bytes:
            raise _Damaged(f"{name} has {len(data)} bytes, not {entry.bytes}")
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise _Damaged(f"{name} has changed since it was saved")
        files[name] = data
    return files


def _read_manifest(path: Path) -> _Manifest:
    try:
        return msgspec.json.decode(_read_file(path / MANIFEST), type=_Manifest)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        raise _Damaged(f"{MANIFEST} is unreadable") from None


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise _Damaged(f"{path.name} is missing") from None
    except OSError as error:
        raise _Damaged(f"{path.name}: {error.strerror}") from None
