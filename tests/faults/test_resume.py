"""Stopped after any step, twice, the run ends as if undisturbed, to the bit (R2); a torn log costs nothing (R11)."""

from __future__ import annotations

import json
import random

import pytest

from faults.bench import at_step, fresh, logged, only, result, run, sizes
from nexus_ablate.config.run_config import Schedule
from nexus_ablate.data import Batches
from nexus_ablate.errors import CheckpointError, UserError
from nexus_ablate.runs import directory, files, read_jsonl
from nexus_ablate.training import checkpoint
from nexus_ablate.training import step as training_step

LONG = ("train.steps=40", "train.checkpoint_every=7", "train.eval_every=8", "train.log_every=3", "optim.warmup=10",
        "train.grad_accum=2", "train.batch_size=2", "model.dropout=0.1")  # fmt: skip


class Crash(Exception):
    """What stops a run here, as a bug would."""


def crash_at(patch, *steps: int) -> None:
    """Stop training before each of these steps, once."""
    left = list(steps)

    def stop(step: int) -> None:
        if left and step == left[0]:
            left.pop(0)
            raise Crash(f"before step {step}")

    at_step(patch, stop)


def interrupted(overrides, monkeypatch, *steps: int):
    """The outcome of a run that crashed before each of `steps` and was started again each time."""
    with monkeypatch.context() as patch:
        crash_at(patch, *steps)
        for _ in steps:
            with pytest.raises(Crash):
                run(overrides)
        return run(overrides)


@sizes(3, 40)
def test_stopped_twice_at_each_step_a_run_ends_as_if_undisturbed(tiny_run, tmp_path, monkeypatch, counted, count):
    expected = result(run(tiny_run(*LONG)).path)
    steps = range(40) if count == 40 else random.Random(1).sample(range(40), count)
    for step in steps:
        with fresh(tmp_path) as runs_dir:
            again = interrupted(tiny_run(*LONG, f"runs_dir={runs_dir}"), monkeypatch, step, min(step + 4, 39))
            assert result(again.path) == expected, step
    counted(f"{len(steps)} of {len(steps)} steps, each stopped twice, to the bit")


SLOWLY = [pytest.param(part, marks=pytest.mark.slow) for part in ("dropout stream", "data cursor", "schedule")]


@pytest.mark.parametrize("forgotten", ["moments", *SLOWLY])
def test_control_a_resume_that_forgot_something_is_seen(tiny_run, tmp_path, monkeypatch, forgotten):
    expected = result(run(tiny_run(*LONG)).path)
    overrides = tiny_run(*LONG, f"runs_dir={tmp_path / 'other'}")
    with monkeypatch.context() as patch:
        crash_at(patch, 25)
        with pytest.raises(Crash):
            run(overrides)
    load, batch, rate = checkpoint.load_newest, Batches.batch, Schedule.rate

    def forgetful(*arguments, **options):
        loaded = load(*arguments, **options)
        assert loaded is not None
        if forgotten == "moments":
            loaded.tensors["optimizer"] = {n: t * 0 if t.ndim else t for n, t in loaded.tensors["optimizer"].items()}
        return loaded

    monkeypatch.setattr(checkpoint, "load_newest", forgetful)
    if forgotten == "dropout stream":
        monkeypatch.setattr(training_step, "stream", lambda seed, name, step: 7)
    elif forgotten == "data cursor":
        monkeypatch.setattr(Batches, "batch", lambda self, step: batch(self, step - 21))
    elif forgotten == "schedule":
        monkeypatch.setattr(Schedule, "rate", lambda self, step, steps: rate(self, step - 21, steps))
    assert result(run(overrides).path) != expected


@pytest.fixture
def torn(tiny_run, tmp_path, monkeypatch):
    """Overrides, path and files of a run that crashed two steps after its newest checkpoint, and what it should be.

    The last three lines of its log are that of the checkpoint and two that the checkpoint does not know.
    """
    overrides = tiny_run(
        "train.steps=12", "train.checkpoint_every=4", "train.eval_every=6", "model.n_layers=1", "probe=off"
    )
    expected = result(run(overrides).path)
    overrides = [*overrides, f"runs_dir={tmp_path / 'other'}"]
    with monkeypatch.context() as patch:
        crash_at(patch, 10)
        with pytest.raises(Crash):
            run(overrides)
    path = only(tmp_path / "other")
    return overrides, path, keep(path), expected


@sizes(6, 0)  # 0: every byte
def test_a_log_torn_at_any_byte_of_its_last_lines_is_continued_without_gap_or_duplicate(torn, counted, count):
    overrides, path, kept, expected = torn
    log = path / "metrics.jsonl"
    whole = log.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines[-3:]] == [8, 9, 10]
    start = len(whole) - sum(map(len, lines[-3:]))
    offsets = range(start, len(whole))
    if count:  # the end of the checkpoint's own line, the byte before it, and some between
        end = start + len(lines[-3])
        offsets = [end - 1, end, *random.Random(0).sample(offsets, count)]
    for offset in offsets:
        restore(path, kept)
        log.write_bytes(whole[:offset])
        complete = whole[:offset].count(b"\n")
        assert complete <= len(read_jsonl(log)) <= complete + 1, offset  # a line may lack no more than its end
        assert result(run(overrides).path) == expected, offset
    counted(f"{len(offsets)} of {len(whole) - start} bytes cut at: 0 gaps, 0 duplicates, to the bit")


@pytest.mark.slow
def test_control_without_cutting_the_log_back_a_torn_line_stays_in_it(torn, monkeypatch):
    overrides, path, _, _ = torn
    log = path / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-20])
    monkeypatch.setattr(directory, "truncate", lambda path, offset: path.touch())
    with pytest.raises(UserError, match="damaged"):
        run(overrides)


@pytest.mark.slow
def test_control_without_asking_whether_the_log_reaches_its_checkpoint_a_gap_would_be_filled_with_zeros(
    torn, monkeypatch
):
    overrides, path, _, _ = torn
    log = path / "metrics.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-3]))
    for module in (files, directory):
        monkeypatch.setattr(module, "check_reach", lambda path, offset: None)
    with pytest.raises(UserError, match="damaged"):
        run(overrides)
    assert b"\0" in log.read_bytes()


def keep(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def restore(path, kept) -> None:
    for file in list(path.rglob("*")):
        if file.is_file() and file.relative_to(path) not in kept:
            file.unlink()
    for name, data in kept.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def test_a_log_that_reaches_no_checkpoint_is_an_error_and_is_not_cut(tiny_run, tmp_path, monkeypatch):
    overrides = tiny_run()
    with monkeypatch.context() as patch:
        crash_at(patch, 11)
        with pytest.raises(Crash):
            run(overrides)
    path = only(tmp_path / "runs")
    (path / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        run(overrides)
    assert logged(path) == []
