"""Ownership of a run directory: at most one living process.

The kernel holds the lock for the life of the process, so a killed owner is noticed at once, and a later process with
the same pid is not mistaken for it. An owner on another host, where the lock may not reach, is alive while its
heartbeat in status.json is fresh.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nexus_ablate.errors import AlreadyRunning, StorageError
from nexus_ablate.runs.files import write_all

LIVE = ("created", "running")
SETTLED = ("finished", "diverged")  # both are results: divergence is one too
LOST_SECONDS = 120.0
"""Twelve heartbeats, and twice as long as NFS may show an old directory (acdirmax)."""

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_held: set[int] = set()


def _close_in_child() -> None:
    """A forked worker that outlives its parent must not keep the parent's run alive."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def take_lock(path: Path, busy: str = "is being trained", name: str = "LOCK") -> int:
    """The descriptor that owns a directory.

    Args:
        path: The directory of a run or a study.
        busy: What another owner is doing, for the error.
        name: The file that is locked.

    Raises:
        AlreadyRunning: Another process holds it.
        StorageError: The file system has no locks.
    """
    descriptor = os.open(path / name, os.O_RDWR | os.O_CREAT, 0o666)
    for _ in range(5):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)  # a reader that checks whether the lock is free holds it for an instant
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise
            problem = f"{path} is on a file system without file locks, which say who trains a run"
            raise StorageError(problem, error.strerror or "", "runs_dir=DIR, on a file system that has them") from None
        else:
            _held.add(descriptor)
            try:
                os.ftruncate(descriptor, 0)
                write_all(descriptor, f"host {socket.gethostname()}, pid {os.getpid()}\n".encode())
            except OSError:
                release(descriptor)
                raise
            return descriptor
    owner = os.pread(descriptor, 1000, 0).decode("utf-8", "replace").strip() or "another process"
    os.close(descriptor)
    fix = "wait for it, stop it, or use rerun=on" if busy == "is being trained" else "wait, then the same command again"
    raise AlreadyRunning(f"{path} {busy}", owner, fix)


def release(lock: int | None) -> None:
    """Release a lock from `take_lock`."""
    if lock is not None:
        _held.discard(lock)
        os.close(lock)


def _owned(path: Path) -> bool | None:
    """Whether a process on this host owns the directory; None if its lock doesn't show it."""
    try:
        descriptor = os.open(path / "LOCK", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def effective_state(status: dict[str, Any], path: Path) -> str:
    """The state, or `lost` for a run that no living process owns.

    Args:
        status: From `read_status`.
        path: The run directory, whose lock shows at once whether an owner on this host is alive.
    """
    if status["state"] not in LIVE:
        return status["state"]
    owned = _owned(path) if status["host"] == socket.gethostname() else None
    if owned is None:
        owned = is_beating(status)
    return status["state"] if owned else "lost"


def is_beating(status: dict[str, Any]) -> bool:
    """Whether the heartbeat is fresh, by this host's clock."""
    age = datetime.now(UTC) - datetime.fromisoformat(status["heartbeat"])
    return abs(age.total_seconds()) <= LOST_SECONDS  # negative after a clock was set back


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
