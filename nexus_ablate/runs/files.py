"""Files that survive a crash: synced, replaced in one instant, strict JSON, and the disk's refusals in plain words."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nexus_ablate.errors import CheckpointError, StorageError

_MAKE_ROOM = "free some space there or choose another runs_dir"
_MAKE_WRITABLE = "make it writable or choose another runs_dir"
_DISK_FIXES = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EACCES: _MAKE_WRITABLE,
    errno.EPERM: _MAKE_WRITABLE,
    errno.EROFS: _MAKE_WRITABLE,
    errno.EIO: "check the disk or choose another runs_dir",
    errno.ENOTDIR: "a file stands where a directory is needed; choose another runs_dir",
    errno.EEXIST: "a file stands where a directory is needed; choose another runs_dir",
}
_write = os.write


@contextmanager
def storage(path: Path, needed: int = 0) -> Iterator[None]:
    """Turn the disk's refusals into an error that names `path` and the bytes needed.

    Raises:
        StorageError: No space, no quota, no permission, read-only, or a failing disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FIXES:
            raise
        got = os.strerror(error.errno) + (f"; {needed} bytes needed" if needed else "")
        raise StorageError(f"cannot write {path}", got, _DISK_FIXES[error.errno]) from error


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte, however many calls the system makes of it."""
    rest = memoryview(data)
    while rest:
        rest = rest[_write(descriptor, rest) :]


def write_synced(path: Path, data: bytes | memoryview) -> None:
    """Make a new file and wait until its bytes are on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems do not sync directories
            raise
    finally:
        os.close(descriptor)


def atomic_write_text(path: Path, text: str) -> None:
    """Replace a file in one instant: a reader, or a restart, sees the old text or the new one.

    Raises:
        StorageError: The disk refused; the old file is untouched.
    """
    data = text.encode("utf-8", "backslashreplace")
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with storage(path, len(data)):
        try:
            write_synced(aside, data)
            os.replace(aside, path)
            sync_directory(path.parent)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def atomic_write_json(path: Path, obj: dict[str, Any]) -> None:
    """Replace a file by `strict_json(obj)`, indented for people."""
    atomic_write_text(path, strict_json(obj, indent=2) + "\n")


def strict_json(obj: dict[str, Any], indent: int | None = None) -> str:
    """JSON in which a non-finite number is null and its dotted name stands under "nonfinite"."""
    nonfinite: list[str] = []
    nulls: set[str] = set()

    def clean(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {str(key): clean(item, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [clean(item, f"{name}.{index}") for index, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite.append(name)
            return None
        if value is None:
            nulls.add(name)
        return value

    cleaned = clean({key: value for key, value in obj.items() if key != "nonfinite"}, "")
    nonfinite += [name for name in obj.get("nonfinite", ()) if name in nulls]  # known from an earlier writing
    if nonfinite:
        cleaned["nonfinite"] = nonfinite
    return json.dumps(cleaned, allow_nan=False, indent=indent)


def check_reach(path: Path, offset: int) -> None:
    """That a log reaches the offset which a checkpoint recorded, and a line ends there; a missing log is empty.

    Raises:
        CheckpointError: It does not.
    """
    with storage(path):
        data = b""
        if path.exists():
            with open(path, "rb") as file:
                file.seek(max(offset - 1, 0))
                data = file.read(1)
        if offset and data != b"\n":
            size = path.stat().st_size if path.exists() else 0
            got = f"{size} bytes, the checkpoint was taken at {offset}"
            raise CheckpointError(f"{path} does not reach its checkpoint", got, "rerun=true trains the run anew")


def truncate(path: Path, offset: int) -> None:
    """Cut a log back to a line end that a checkpoint recorded; a missing log counts as empty.

    Raises:
        CheckpointError: The log is shorter than `offset` bytes, or no line ends there.
    """
    check_reach(path, offset)
    with storage(path), open(path, "ab") as file:
        file.truncate(offset)
        os.fsync(file.fileno())
