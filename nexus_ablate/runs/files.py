"""Crash-safe files: synced, replaced atomically, strict JSON, and plain messages for errors of the disk."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nexus_ablate.errors import CheckpointError, ConfigError, StorageError

_MAKE_ROOM = "free some space there, or choose another folder"
_MAKE_WRITABLE = "make it writable, or choose another folder"
_NO_DIRECTORY = "a file is where a directory is needed; choose another folder"
_DISK_FIXES = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or choose another folder",
    errno.EACCES: _MAKE_WRITABLE,
    errno.EPERM: _MAKE_WRITABLE,
    errno.EROFS: _MAKE_WRITABLE,
    errno.ENOTDIR: _NO_DIRECTORY,
    errno.EEXIST: _NO_DIRECTORY,
    errno.ENAMETOOLONG: "choose a shorter name or folder",
}
_OTHER_FIX = "check the disk, or choose another folder"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SCHEME = re.compile(r".*/[A-Za-z][A-Za-z0-9+.-]+:(?=/)")
_write = os.write


@contextmanager
def storage(path: Path, needed: int = 0) -> Iterator[None]:
    """Turn an error of the disk into one that names `path`, and the bytes needed where there is no room for them.

    Raises:
        StorageError: No space, no quota, no permission, read-only, gone, or a failing disk.
    """
    try:
        yield
    except OSError as error:
        more = f"; {needed} bytes needed" if needed and error.errno in _FULL else ""
        raise refused(error, f"cannot write {path}", more) from error


def refused(error: OSError, problem: str = "", more: str = "") -> StorageError:
    """An error of the operating system as an error for the user."""
    why = error.strerror or type(error).__name__
    problem = problem or f"cannot use {error.filename or 'a file'}"
    return StorageError(problem, why + more, _DISK_FIXES.get(error.errno or 0, _OTHER_FIX))


def refuse_url(folder: Path) -> None:
    """Refuse a URL, which would become folders called `s3:` and `user:password@bucket`.

    Raises:
        ConfigError: It is one.
    """
    scheme = _SCHEME.search(f"{folder.absolute()}/")
    if scheme and not os.path.isdir(scheme[0]):
        raise ConfigError("a URL is not a folder on this machine; mount what it names", str(folder), "runs_dir=runs")


def make_directory(path: Path, root: Path) -> list[Path]:
    """Make a directory below `root` and its missing parents.

    Returns:
        The directories that were made, outermost first.

    Raises:
        ConfigError: `root` is a URL.
        StorageError: The disk refused; the directories made so far are removed.
    """
    refuse_url(root)
    made: list[Path] = []
    try:
        for part in (*reversed(path.parents), path):
            with storage(part):
                if not part.is_dir():
                    try:
                        part.mkdir()
                        made.append(part)
                    except FileExistsError:  # another process made it first, or it is a file
                        if not part.is_dir():
                            raise
    except BaseException:
        remove_empty(made)
        raise
    return made


def remove_empty(made: list[Path]) -> None:
    """Remove the directories that `make_directory` made, up to the first that isn't empty."""
    for part in reversed(made):
        with contextlib.suppress(OSError):
            part.rmdir()


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte, even if the system takes several calls."""
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


def atomic_write(path: Path, data: bytes, check: Callable[[], None] = lambda: None) -> None:
    """Replace a file atomically: a reader, or a restart, sees the old bytes or the new ones.

    A link is replaced, never followed.

    Args:
        path: The file.
        data: Its new content.
        check: Called last before the file is replaced; it raises where that must not happen.

    Raises:
        StorageError: The disk refused; the old file is untouched.
    """
    aside = path.with_name(f".{secrets.token_hex(8)}.tmp")  # short, since the file's own name may be as long as allowed
    with storage(path, len(data)):
        try:
            write_synced(aside, data)
            check()
            os.replace(aside, path)
            sync_directory(path.parent)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def atomic_write_text(path: Path, text: str, check: Callable[[], None] = lambda: None) -> None:
    """`atomic_write` of a text; characters that UTF-8 can't encode are escaped."""
    atomic_write(path, text.encode("utf-8", "backslashreplace"), check)


def atomic_write_json(path: Path, obj: Mapping[str, Any], check: Callable[[], None] = lambda: None) -> None:
    """Replace a file by `strict_json(obj)`, indented, as `atomic_write` does."""
    atomic_write_text(path, strict_json(obj, indent=2) + "\n", check)


def strict_json(obj: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON in which a non-finite number is null and its dotted name is listed under "nonfinite"."""
    nonfinite: list[str] = []
    nulls: set[str] = set()

    def clean(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            before = f"{name}." if name else ""
            return {str(key): clean(item, f"{before}{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [clean(item, f"{name}.{index}") for index, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite.append(name)
            return None
        if value is None:
            nulls.add(name)
        return value

    cleaned = clean({key: value for key, value in obj.items() if key != "nonfinite"}, "")
    nonfinite += [name for name in obj.get("nonfinite", ()) if name in nulls]  # listed by an earlier write
    if nonfinite:
        cleaned["nonfinite"] = nonfinite
    return json.dumps(cleaned, allow_nan=False, indent=indent)


def check_reach(path: Path, offset: int) -> None:
    """Check that a log reaches the offset that a checkpoint recorded, at a line end. A missing log counts as empty.

    Raises:
        CheckpointError: It is shorter, or no line ends there.
        StorageError: The disk refuses.
    """
    data, size = b"", 0
    with storage(path), contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(offset - 1, 0))
        data = file.read(1)
    if offset and data != b"\n":
        got = f"{size} bytes, the checkpoint was taken at {offset}"
        raise CheckpointError(f"{path} is shorter than at its checkpoint", got, "rerun=true trains the run again")


def truncate(path: Path, offset: int) -> None:
    """Cut a log back to the line end that a checkpoint recorded. A missing log counts as empty.

    Raises:
        CheckpointError: The log is shorter than `offset` bytes, or no line ends there.
        StorageError: The disk refuses.
    """
    check_reach(path, offset)
    with storage(path), path.open("ab") as file:
        file.truncate(offset)
        os.fsync(file.fileno())
