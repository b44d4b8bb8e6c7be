"""Many processes, one run: exactly one trains it; many runs, one instant: each has its directory (R10)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from faults.bench import child, ended, sizes
from nexus_ablate.errors import AlreadyRunning
from nexus_ablate.runs import Launch, directory, find_runs, identity, open_run, read_run, run_path

CONTENDERS = 32


def open_it(runs_dir: Path, number: int = 0):
    ident = identity({"seed": 0, "number": number}, "data", "0.1.0", {})
    return open_run(run_path(runs_dir, "scratch", "baseline", 0, ident), Launch(ident, "norm: rms\n", [], {}))


def contest(act: Callable[[int], object]) -> list[int]:
    """What each of many processes, let go at one instant, ends with; an owner stays until all have tried."""
    waiting, start = os.pipe()
    counted, count = os.pipe()
    left, leave = os.pipe()

    def contend(number: int) -> None:
        os.close(start)
        os.close(leave)
        os.read(waiting, 1)
        status = 1
        try:
            run = act(number)
            status = 0
        except AlreadyRunning as error:
            status = error.status
        finally:
            os.write(count, b".")
        if status == 0:
            os.read(left, 1)
            run.close()  # type: ignore[reportAttributeAccessIssue]
        os._exit(status)

    pids = [child(lambda number=number: contend(number)) for number in range(CONTENDERS)]
    os.close(start)
    for _ in pids:
        os.read(counted, 1)
    os.close(leave)
    statuses = [ended(pid) for pid in pids]
    for descriptor in (waiting, counted, count, left):
        os.close(descriptor)
    return statuses


def killed_owner(runs_dir: Path) -> None:
    """Leave a run whose owner was killed."""

    def own() -> None:
        open_it(runs_dir).status("running")
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(child(own)) == -signal.SIGKILL


@sizes(2, 100, fast=True)
def test_of_many_processes_one_trains_and_the_others_end_with_6(tmp_path, counted, count):
    for number in range(count):
        runs_dir = tmp_path / str(number)
        if number % 2:
            killed_owner(runs_dir)  # a stale lock is taken over once
            assert read_run(find_runs([runs_dir])[0]).state == "lost"
        statuses = contest(lambda _, runs_dir=runs_dir: open_it(runs_dir))
        assert sorted(statuses) == [0] + [6] * (CONTENDERS - 1)
        assert len(find_runs([runs_dir])) == 1
        apart = tmp_path / f"{number} apart"
        assert contest(lambda other, apart=apart: open_it(apart, other)) == [0] * CONTENDERS
        assert len(find_runs([apart])) == CONTENDERS
    counted(f"{count} of {count} rounds of {CONTENDERS}: one owner, and one directory for each of different runs")


def test_control_without_the_lock_nobody_is_turned_away(tmp_path, monkeypatch):
    """How many then train, and how many stumble over each other's files, is chance."""
    monkeypatch.setattr(directory, "take_lock", lambda path: None)
    monkeypatch.setattr(directory.Run, "require_owner", lambda run: None)
    assert AlreadyRunning.status not in contest(lambda _: open_it(tmp_path))
