"""An open run directory: created, found or taken over, then written by its only owner."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexus_ablate.errors import AlreadyRunning, StorageError
from nexus_ablate.masking import mask
from nexus_ablate.runs.contradiction import config_file_hash
from nexus_ablate.runs.files import (
    atomic_write_json,
    atomic_write_text,
    check_reach,
    make_directory,
    remove_empty,
    storage,
    strict_json,
    truncate,
    write_all,
)
from nexus_ablate.runs.naming import Identity
from nexus_ablate.runs.ownership import LIVE, LOST_SECONDS, SETTLED, is_beating, now, release, take_lock
from nexus_ablate.runs.reading import (
    FIRST_KEYS,
    LOGS,
    has_status,
    read_env,
    read_status,
)

HEARTBEAT_SECONDS = 10.0
_log = logging.getLogger(__name__)


class Run:
    """An open run directory, owned by this process until `close`.

    Attributes:
        path: The directory.
        finished: It already holds a result (state `finished` or `diverged`) and isn't owned: only read it.
        resuming: An earlier process started the run; call `restore` before logging.
    """

    def __init__(self, path: Path, status: dict[str, Any], lock: int | None, finished: bool, resuming: bool) -> None:
        self.path = path
        self.finished = finished
        self.resuming = resuming
        self._status = status
        self._lock = lock
        self._place = None if finished else _place(path)
        self._logs: dict[str, int] = {}
        self._closed = finished
        self._written = 0.0
        self._writing = threading.RLock()  # re-entrant: a signal handler may write in the middle of a write
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @property
    def state(self) -> str:
        return self._status["state"]

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the directory. Nothing can be written afterwards."""
        self._stop.set()
        if self._heart.is_alive():
            self._heart.join()
        with self._writing:
            self._closed = True
            for descriptor in self._logs.values():
                os.close(descriptor)
            self._logs = {}
            release(self._lock)
            self._lock = None

    def status(self, state: str, reason: str = "", traceback: str = "", exit_status: int | None = None) -> None:
        """Write status.json; its `step` is the one of the last logged row.

        Args:
            state: One of `formats.State`.
            reason: One sentence for the user.
            traceback: The traceback of a failed run.
            exit_status: Of a failed run.

        Raises:
            StorageError: The disk refused the write.
        """
        with self._writing:
            status = {"state": state, "reason": mask(reason), "traceback": mask(traceback), "exit_status": exit_status}
            self._write_status({**status, "updated": now()})

    def heartbeat(self) -> None:
        """Record that the process is alive; writes at most once in ten seconds."""
        with self._writing:
            beating = not self._closed and self.state in LIVE
            if beating and time.monotonic() - self._written >= HEARTBEAT_SECONDS:
                self._write_status({})

    def log_metrics(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl.

        Raises:
            KeyError: `step`, `tokens`, `flops` or `seconds` is missing.
            StorageError: The disk refused the write; the log ends with the previous row.
        """
        self._append_row("metrics.jsonl", row)

    def log_probes(self, row: dict[str, Any]) -> None:
        """Append a row to probes.jsonl, like `log_metrics`."""
        self._append_row("probes.jsonl", row)

    def offsets(self) -> dict[str, int]:
        """The length of each log on disk in bytes. A checkpoint stores it for `restore`."""
        self.require_owner()
        lengths = {}
        for name, descriptor in self._logs.items():
            with storage(self.path / name):
                os.fsync(descriptor)
                lengths[name] = os.fstat(descriptor).st_size
        return lengths

    def check(self, offsets: dict[str, int]) -> None:
        """Check that `restore` can go back to these offsets.

        Raises:
            CheckpointError: A log is shorter.
        """
        for name in LOGS:
            check_reach(self.path / name, offsets.get(name, 0))

    def restore(self, offsets: dict[str, int]) -> None:
        """Cut the logs back to a checkpoint's `offsets` (`{}`: to nothing) and open them for appending.

        Raises:
            CheckpointError: A log is shorter than its offset.
        """
        self.require_owner()
        for name in LOGS:
            path = self.path / name
            truncate(path, offsets.get(name, 0))
            if name not in self._logs:
                with storage(path):
                    self._logs[name] = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace summary.json."""
        self.write_json("summary.json", summary)

    def write_json(self, name: str, values: dict[str, Any]) -> None:
        """Replace another JSON file of the directory atomically."""
        atomic_write_json(self.path / name, values, self.require_owner)

    def write_evaluation(self, rows: Iterable[dict[str, Any]]) -> None:
        """Replace evaluation.jsonl atomically."""
        text = "".join(strict_json(row) + "\n" for row in rows)
        atomic_write_text(self.path / "evaluation.jsonl", text, self.require_owner)

    def log(self, text: str) -> None:
        """Append to log.txt, with the time in UTC."""
        self.require_owner()
        append_log(self.path, text)

    def _append_row(self, name: str, row: dict[str, Any]) -> None:
        if name not in self._logs:
            raise RuntimeError("a log is written between restore() and close()")
        self.require_owner()
        ordered = {key: row[key] for key in FIRST_KEYS} | row
        line = (strict_json(ordered) + "\n").encode()
        descriptor = self._logs[name]
        before = os.fstat(descriptor).st_size
        with storage(self.path / name, len(line)):
            try:
                write_all(descriptor, line)
            except BaseException:
                os.ftruncate(descriptor, before)  # half a line would spoil the next one
                raise
        self._status["step"] = row["step"]

    def _write_status(self, changes: dict[str, Any]) -> None:
        self._status |= {**changes, "host": socket.gethostname(), "pid": os.getpid(), "heartbeat": now()}
        self.write_json("status.json", self._status)
        self._written = time.monotonic()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                self.heartbeat()
            except StorageError as error:  # the training stops at its next write to the same disk
                _log.warning("no heartbeat: %s", error)

    def require_owner(self) -> None:
        """Check that the directory is still the one that this process opened.

        Raises:
            StorageError: It was renamed, deleted or emptied; another process may own a new one of the same name.
        """
        if self._closed:
            raise RuntimeError(f"{self.path} is not open for writing")
        if _place(self.path) != self._place:
            fix = "put the directory back and run the same command to resume, or train it again"
            raise StorageError(f"{self.path} was renamed, deleted or emptied during the run", "no LOCK", fix)


def _place(path: Path) -> tuple[int, int] | None:
    """Device and inode of a run directory's LOCK, which are unique; None if it has no LOCK."""
    try:
        lock = os.lstat(path / "LOCK")
    except OSError:
        return None
    return lock.st_dev, lock.st_ino


def refuse_if_alive_elsewhere(path: Path, status: dict[str, Any] | None) -> None:
    """Refuse a run whose owner is on another host, where a lock may not show it.

    Args:
        path: The run directory, which this process has locked.
        status: Its status.json; None if there is none.

    Raises:
        AlreadyRunning: The owner's heartbeat is fresh.
    """
    if status is None or status["state"] not in LIVE or status["host"] == socket.gethostname():
        return
    if is_beating(status):
        owner = f"host {status['host']}, pid {status['pid']}, heartbeat {status['heartbeat']}"
        fix = f"wait for it, or {LOST_SECONDS:.0f} s after its last heartbeat the same command again, or use rerun=on"
        raise AlreadyRunning(f"{path} is being trained", owner, fix)


def append_log(path: Path, text: str) -> None:
    """Append to the log.txt of a run directory, with the time in UTC."""
    line = f"{now()} {mask(text)}\n".encode("utf-8", "backslashreplace")
    file = path / "log.txt"
    with storage(file, len(line)):
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            write_all(descriptor, line)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Launch:
    """What a launch writes into the run directory.

    Attributes:
        config_yaml: The complete resolved configuration.
        overrides: The overrides as typed.
        env: The result of `environment`.
    """

    identity: Identity
    config_yaml: str
    overrides: list[str]
    env: dict[str, Any]


def open_run(
    path: Path,
    launch: Launch,
    rerun: bool = False,
    check: Callable[[], None] = lambda: None,
    is_wanted: Callable[[Path], bool] = lambda path: True,
) -> Run:
    """Open a run directory: create it, find its result, or take it over from a dead process.

    Args:
        path: From `run_path`.
        rerun: Leave a result untouched and use the sibling `-r2`, or the next one without a result.
        check: Called if there is no result yet, before anything is created; refuses runs that can't be trained here.
        is_wanted: Whether the result in a directory is the one that is asked for; another is left untouched too.

    Raises:
        AlreadyRunning: Another process owns the directory.
        StorageError: The disk refused a write.
    """
    first, number = path, 1
    while (rerun and number == 1) or (_result(path) and (rerun or not is_wanted(path))):
        number += 1
        path = first.with_name(f"{first.name}-r{number}")
    if result := _result(path):
        return Run(path, result, None, finished=True, resuming=False)

    check()
    made, lock = make_directory(path, path.parents[2]), None
    try:
        with storage(path / "LOCK"):
            lock = take_lock(path)
        if result := _result(path):  # the previous owner finished while this process waited for the lock
            release(lock)
            return Run(path, result, None, finished=True, resuming=False)
        status = read_status(path) if has_status(path) else None
        refuse_if_alive_elsewhere(path, status)
        return _begin(path, lock, status, launch)
    except BaseException:
        if path in made and lock is not None:  # leave no incomplete directory
            shutil.rmtree(path, ignore_errors=True)
            remove_empty(made)
        release(lock)
        raise


def _begin(path: Path, lock: int | None, status: dict[str, Any] | None, launch: Launch) -> Run:
    """Write the first files of an owned directory; config, overrides and env are those of the latest launch."""
    config_yaml = mask(launch.config_yaml)
    env = {**launch.env, **vars(launch.identity), "config_file": config_file_hash(config_yaml)}
    with storage(path):
        for orphan in path.glob(".*.tmp"):
            orphan.unlink()
        (path / "checkpoints").mkdir(exist_ok=True)
    former = read_env(path)
    if former is not None:
        changed = {key: value for key, value in former.items() if key != "earlier" and env.get(key) != value}
        env = {**env, "earlier": [*former.get("earlier", []), changed]}
    kept = {"started": now(), "step": None}
    if status is not None:
        kept = {key: status.get(key) for key in kept}
    resuming = status is not None or any(os.path.lexists(path / name) for name in LOGS)
    run = Run(path, {"state": "created", "reason": "", **kept}, lock, finished=False, resuming=resuming)
    run.status("created")
    atomic_write_text(path / "config.yaml", config_yaml, run.require_owner)
    overrides = "".join(mask(override) + "\n" for override in launch.overrides)
    atomic_write_text(path / "overrides.txt", overrides, run.require_owner)
    run.write_json("env.json", mask(env))
    if not resuming:
        run.restore({})
    run._heart.start()
    return run


def _result(path: Path) -> dict[str, Any] | None:
    """The status of a run that holds a result."""
    status = read_status(path) if has_status(path) else None
    return status if status and status["state"] in SETTLED else None
