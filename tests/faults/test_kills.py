"""kill -9 at any instant: the same command resumes and ends as if nothing had happened (R1)."""

from __future__ import annotations

import os
import random
import signal
import time

from faults.bench import at_every_call, at_step, child, ended, fresh, logged, only, result, run, sizes
from nexus_ablate.runs import directory, find_runs, read_jsonl
from nexus_ablate.training.checkpoint import load_newest

EVERY = 3
SHORT = ("train.steps=12", f"train.checkpoint_every={EVERY}", "train.eval_every=6", "model.dropout=0.1")


def kill_at(number: int):
    """What kills this process before its `number`-th call that changes the disk."""
    left = [number]

    def die(_: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def calls_of(overrides, monkeypatch) -> int:
    """How many calls that change the disk a whole run makes."""
    made = []
    with monkeypatch.context() as patch:
        at_every_call(patch, made.append)
        run(overrides)
    return len(made)


def killed(overrides, number, delay, monkeypatch) -> int:
    """A child that trains until it is killed: before a call, or after `delay` seconds of training."""

    def training() -> None:
        with monkeypatch.context() as patch:
            if number is not None:
                at_every_call(patch, kill_at(number))
            run(overrides)

    pid = child(training)
    if delay is not None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    return ended(pid)


@sizes(20, 200)
def test_the_same_command_after_a_kill_ends_as_if_undisturbed(tiny_run, tmp_path, monkeypatch, counted, count):
    whole = run(tiny_run(*SHORT))
    expected = result(whole.path)
    calls = calls_of(tiny_run(*SHORT, f"runs_dir={tmp_path / 'counted'}"), monkeypatch)
    draw = random.Random(count)
    kills = lost = 0
    while kills < count:
        with fresh(tmp_path) as runs_dir:
            overrides = tiny_run(*SHORT, f"runs_dir={runs_dir}")
            timed = kills % 4 == 3
            number, delay = (None, draw.uniform(0.05, 0.7)) if timed else (draw.randrange(calls), None)
            kills += killed(overrides, number, delay, monkeypatch) == -signal.SIGKILL
            lost = max(lost, steps_lost(runs_dir))
            again = run(overrides)
            assert result(again.path) == expected, (number, delay)
            assert [p.name for p in (again.path / "checkpoints").iterdir()] == ["step_00000012"], (number, delay)
    assert lost <= EVERY
    counted(f"{kills} kills of {kills} recovered, at most {lost} steps lost, {calls} calls to die before")


def steps_lost(runs_dir) -> int:
    """Steps logged after the checkpoint that training will resume from."""
    if not runs_dir.exists() or not (runs := find_runs([runs_dir])):
        return 0
    rows = read_jsonl(runs[0] / "metrics.jsonl") if (runs[0] / "metrics.jsonl").exists() else []
    newest = load_newest(runs[0] / "checkpoints")
    return (rows[-1]["step"] if rows else 0) - (newest.step if newest else 0)


def test_control_without_cutting_the_logs_a_kill_leaves_steps_twice(tiny_run, tmp_path, monkeypatch):
    whole = run(tiny_run(*SHORT))
    overrides = tiny_run(*SHORT, f"runs_dir={tmp_path / 'other'}")

    def die(step: int) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    def training() -> None:
        with monkeypatch.context() as patch:
            at_step(patch, die)
            run(overrides)

    assert ended(child(training)) == -signal.SIGKILL
    monkeypatch.setattr(directory, "truncate", lambda path, offset: path.touch())
    run(overrides)
    steps = [row["step"] for row in logged(only(tmp_path / "other"))]
    assert steps != [row["step"] for row in logged(whole.path)]
    assert len(steps) > len(set(steps))
