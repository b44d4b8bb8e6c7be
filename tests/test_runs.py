"""The run directory has one owner, survives any instant, and reads back as what it is."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import stat
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from faults.bench import child, ended

from nexus_ablate.errors import AlreadyRunning, CheckpointError, ConfigError, StorageError, UserError
from nexus_ablate.masking import mask
from nexus_ablate.runs import (
    Launch,
    Run,
    arm_name,
    atomic_write_text,
    directory,
    effective_state,
    environment,
    files,
    find_runs,
    identity,
    naming,
    open_run,
    ownership,
    read_jsonl,
    read_run,
    run_path,
    strict_json,
)

IDENTITY = identity({"seed": 3, "norm": "rms"}, "data", "source", {})


def open_it(runs_dir: Path, **changes: Any) -> Run:
    launch = {
        "identity": IDENTITY,
        "config_yaml": "norm: layer\n",
        "overrides": ["norm=layer"],
        "env": {"host": "here"},
    }
    launch |= {key: changes.pop(key) for key in launch.keys() & changes.keys()}
    name = {"experiment": "scratch", "arm": "norm=layer", "seed": 3}
    name |= {key: changes.pop(key) for key in name.keys() & changes.keys()}
    return open_run(run_path(runs_dir, **name, identity=launch["identity"]), Launch(**launch), **changes)


def row(step: int) -> dict[str, Any]:
    return {"train/loss": 1.0 / (step + 1), "seconds": 0.5, "flops": 2.0, "tokens": step * 8, "step": step}


def settled_run(runs_dir: Path, state: str = "finished") -> Path:
    with open_it(runs_dir) as run:
        run.status("running")
        for step in range(3):
            run.log_metrics(row(step))
        run.log_probes(row(2))
        run.write_summary({"val_loss": 1.25})
        run.log("done")
        run.status(state)
    return run.path


def killed_while_running(runs_dir: Path) -> Path:
    """A run whose process was killed in state `running`."""

    def train() -> None:
        run = open_it(runs_dir)
        run.status("running")
        run.log_metrics(row(0))
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(child(train)) == -signal.SIGKILL
    return next(runs_dir.glob("*/*/s*"))


def edit_status(path: Path, **changes: Any) -> None:
    status = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps(status | changes))


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="seconds")


def snapshot(path: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(path.rglob("*")) if p.is_file()}


# Names


def test_the_seed_changes_the_run_and_not_the_arm():
    other = identity({"seed": 4, "norm": "rms"}, "data", "source", {})
    assert other.run_hash != IDENTITY.run_hash
    assert other.arm_hash == IDENTITY.arm_hash


@pytest.mark.parametrize(
    "other",
    [
        identity({"seed": 3, "norm": "layer"}, "data", "source", {}),
        identity({"seed": 3, "norm": "rms"}, "other data", "source", {}),
        identity({"seed": 3, "norm": "rms"}, "data", "other source", {}),
        identity({"seed": 3, "norm": "rms"}, "data", "source", {"my_norm": "abc"}),
    ],
)
def test_whatever_can_change_the_result_changes_the_identity(other: Any):
    assert other.run_hash != IDENTITY.run_hash
    assert other.arm_hash != IDENTITY.arm_hash


def test_the_order_of_keys_does_not_change_the_identity():
    assert identity({"norm": "rms", "seed": 3}, "data", "source", {}) == IDENTITY


@pytest.mark.parametrize(
    ("differences", "name"),
    [
        ({}, "baseline"),
        ({"placement": "post", "norm": "layer"}, "norm=layer,placement=post"),
        ({"d_ff_ratio": "8/3"}, "d_ff_ratio=8over3"),
        ({"optim.lr": "1e-3"}, "optim.lr=1e-3"),
    ],
)
def test_an_arm_reads_like_its_differences(differences: dict[str, str], name: str):
    assert arm_name(differences) == name


def test_an_arm_always_names_one_visible_directory_of_at_most_120_bytes():
    draw = random.Random(0)
    alphabet = "abz09=,._+-/ \\\n\0é漢\ud800~$*"
    names: dict[str, dict[str, str]] = {}
    for _ in range(2000):
        text = ["".join(draw.choices(alphabet, k=draw.randint(0, 60))) for _ in range(2 * draw.randint(1, 3))]
        differences = dict(zip(text[::2], text[1::2], strict=True))
        name = arm_name(differences)
        assert naming.NAME.fullmatch(name)
        assert len(name.encode()) <= 120
        assert name == arm_name(dict(reversed(differences.items())))
        assert names.setdefault(name, differences) == differences


def test_a_long_arm_is_cut_at_a_comma_and_stays_unique():
    long = {f"key{index}": "x" * 30 for index in range(5)}
    name, other = arm_name(long), arm_name({**long, "key4": "y"})
    assert name.startswith("key0=" + "x" * 30 + ",key1=")
    assert name.rpartition(",+")[0].endswith("x" * 30)
    assert name != other


def test_arms_whose_names_had_to_be_changed_stay_apart():
    names = {arm_name({"data.path": value}) for value in ("a b", "a_b", "a*b", "a?b")}
    assert len(names) == 4
    assert "data.path=a_b" in names


@pytest.mark.parametrize("name", ["../up", "..", ".hidden", "", "a/b", "a\nb", "x" * 121])
def test_a_study_or_arm_that_leaves_its_directory_is_refused_and_nothing_is_made(tmp_path: Path, name: str):
    for kind in ("experiment", "arm"):
        with pytest.raises(ConfigError):
            open_it(tmp_path / "runs", **{kind: name})
    assert list(tmp_path.iterdir()) == []


# Writing


def test_a_nonfinite_number_is_null_and_named():
    text = strict_json({"a": float("nan"), "b": {"c": [1.0, float("inf")]}, "train/loss": 2.0, "d": None})
    assert json.loads(text) == {
        "a": None,
        "b": {"c": [1.0, None]},
        "train/loss": 2.0,
        "d": None,
        "nonfinite": ["a", "b.c.1"],
    }


def test_the_name_of_a_nonfinite_number_survives_a_second_writing_and_goes_when_it_is_finite():
    first = json.loads(strict_json({"a": float("nan"), "b": float("nan")}))
    second = json.loads(strict_json({**first, "b": 1.0}))
    assert second == {"a": None, "b": 1.0, "nonfinite": ["a"]}


def plain_write_text(path: Path, text: str) -> None:
    with open(path, "wb", buffering=0) as file:
        files.write_all(file.fileno(), text.encode())
        os.fsync(file.fileno())


@pytest.mark.parametrize(("write", "survives"), [(atomic_write_text, True), (plain_write_text, False)])
def test_a_kill_at_any_instant_leaves_the_old_text_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, str], None], survives: bool
):
    path, old, new = tmp_path / "file", "old " * 9, "new " * 9
    results = set()
    for instant in range(12):
        path.write_text(old)

        def write_and_die(instant: int = instant) -> None:
            left = [instant]

            def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
                def wrapped(*arguments: Any) -> Any:
                    if left[0] == 0:
                        os._exit(9)
                    left[0] -= 1
                    return call(*arguments)

                return wrapped

            files._write = deadly(lambda descriptor, data: os.write(descriptor, data[:13]))
            os.fsync, os.replace = deadly(os.fsync), deadly(os.replace)
            write(path, new)

        ended(child(write_and_die))
        results.add(path.read_text())
    assert (results == {old, new}) is survives


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO])
def test_a_refusing_disk_leaves_the_old_text_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    path = tmp_path / "file"
    path.write_text("old")
    for call in ("write", "fsync", "replace"):

        def refuse(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(files, "_write", refuse) if call == "write" else patch.setattr(os, call, refuse)
            with pytest.raises(StorageError) as caught:
                atomic_write_text(path, "new text")
        assert str(path) in caught.value.problem
        assert ("8 bytes needed" in caught.value.got) == (number in (errno.ENOSPC, errno.EDQUOT))
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]


def test_two_threads_replacing_one_file_never_leave_half_of_it(tmp_path: Path):
    path, texts = tmp_path / "file", ["a" * 5000, "b" * 9000]
    threads = [threading.Thread(target=lambda t=t: [atomic_write_text(path, t) for _ in range(20)]) for t in texts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert not path.exists() or path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_system_that_does_not_sync_directories_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.fsync

    def refuse_directories(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a file")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_directories)
    atomic_write_text(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


# One owner


def test_a_new_run_has_the_agreed_layout(tmp_path: Path):
    path = settled_run(tmp_path)
    assert path == tmp_path / "scratch" / "norm=layer" / f"s3-{IDENTITY.hash8}"
    agreed = (
        "config.yaml overrides.txt env.json status.json metrics.jsonl probes.jsonl summary.json log.txt checkpoints"
    )
    assert {p.name for p in path.iterdir()} == {*agreed.split(), "LOCK"}
    status = json.loads((path / "status.json").read_text())
    keys = [
        "state",
        "host",
        "pid",
        "heartbeat",
        "step",
        "started",
        "updated",
        "reason",
        "traceback",
        "exit_status",
    ]
    assert set(status) == {*keys}
    assert status["step"] == 2
    assert (path / "status.json").read_text().count("\n") > 9
    assert (path / "log.txt").read_text().endswith("+00:00 done\n")


def test_a_living_run_is_refused_with_its_host_and_pid(tmp_path: Path):
    with open_it(tmp_path) as run:
        with pytest.raises(AlreadyRunning) as caught:
            open_it(tmp_path)
        assert str(run.path) in caught.value.problem
        assert str(os.getpid()) in caught.value.got
        assert os.uname().nodename in caught.value.got


def test_a_killed_run_is_lost_at_once_and_taken_over_once(tmp_path: Path):
    path = killed_while_running(tmp_path)
    assert read_run(path).state == "lost"
    started = read_run(path).status["started"]
    with open_it(tmp_path) as run:
        assert (run.path, run.resuming, run.finished) == (path, True, False)
        assert read_run(path).status["started"] == started
        with pytest.raises(AlreadyRunning):
            open_it(tmp_path)


def test_a_living_process_that_got_the_pid_of_a_dead_one_does_not_keep_its_run_alive(tmp_path: Path):
    path = killed_while_running(tmp_path)
    edit_status(path, pid=os.getpid())
    assert read_run(path).state == "lost"
    open_it(tmp_path).close()


@pytest.mark.parametrize("protected", [True, False])
def test_a_forked_worker_that_outlives_its_killed_parent_does_not_keep_the_run_alive(tmp_path: Path, protected: bool):
    until, stop = os.pipe()

    def train() -> None:
        os.close(stop)
        open_it(tmp_path)
        if not protected:
            ownership._held.clear()
        child(lambda: os.read(until, 1))
        os.kill(os.getpid(), signal.SIGKILL)

    ended(child(train))
    try:
        if protected:
            open_it(tmp_path).close()
        else:
            with pytest.raises(AlreadyRunning):
                open_it(tmp_path)
    finally:
        os.close(stop)
        os.close(until)


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOSYS, "no locks")


@pytest.mark.parametrize(("age", "state"), [(1, "running"), (130, "lost"), (-110, "running"), (-130, "lost")])
def test_status_shows_a_run_on_another_host_by_its_heartbeat(tmp_path: Path, age: float, state: str):
    """A negative age: the heartbeat is in the future, as after a clock was set back."""
    path = killed_while_running(tmp_path)
    edit_status(path, host="elsewhere", heartbeat=ago(age))
    assert read_run(path).state == state


@pytest.mark.parametrize("age", [1, -110])
def test_a_run_that_beats_on_another_host_is_refused(tmp_path: Path, age: float):
    path = killed_while_running(tmp_path)
    edit_status(path, host="elsewhere", heartbeat=ago(age))
    with pytest.raises(AlreadyRunning, match="being trained") as caught:
        open_it(tmp_path)
    assert "host elsewhere" in caught.value.got
    edit_status(path, heartbeat=ago(130))
    open_it(tmp_path).close()


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StorageError, match="file system without file locks"):
        open_it(tmp_path)


@pytest.mark.parametrize("age", [1000, -1000])
def test_a_held_lock_outweighs_an_old_heartbeat_and_one_of_a_clock_that_was_set_back(tmp_path: Path, age: float):
    with open_it(tmp_path) as run:
        edit_status(run.path, state="running", heartbeat=ago(age))
        record = read_run(run.path)
        assert record.state == "running"
        assert effective_state(record.status, tmp_path) == "lost"  # by the heartbeat alone, in a folder without a lock
        with pytest.raises(AlreadyRunning):
            open_it(tmp_path)


def test_a_reader_never_makes_a_start_fail(tmp_path: Path):
    path = killed_while_running(tmp_path)
    with open(path / "LOCK") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        threading.Timer(0.1, lambda: fcntl.flock(lock, fcntl.LOCK_UN)).start()
        open_it(tmp_path).close()


def test_a_disk_that_refuses_the_owner_s_name_leaves_the_run_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The next run of the same worker process would wait for itself."""
    path = killed_while_running(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(ownership, "write_all", refuse)
        with pytest.raises(StorageError):
            open_it(tmp_path)
    assert read_run(path).state == "lost"
    open_it(tmp_path).close()


@pytest.mark.parametrize("state", ["finished", "diverged"])
def test_a_result_is_found_and_not_touched(tmp_path: Path, state: str):
    path = settled_run(tmp_path, state)
    before = snapshot(path)
    with open_it(tmp_path, config_yaml="other: 1\n") as run:
        assert (run.finished, run.resuming, run.state) == (True, False, state)
        for write in (lambda: run.log("x"), lambda: run.status("running"), lambda: run.log_metrics(row(9))):
            with pytest.raises(RuntimeError):
                write()
        run.heartbeat()
    assert snapshot(path) == before


def test_a_run_that_finishes_while_its_lock_is_awaited_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = directory.take_lock

    def take_late(path: Path) -> int | None:
        monkeypatch.setattr(directory, "take_lock", real)
        settled_run(tmp_path)
        return real(path)

    monkeypatch.setattr(directory, "take_lock", take_late)
    with open_it(tmp_path) as run:
        assert run.finished
    assert len(read_run(run.path).metrics()) == 3
    assert not ownership._held


@pytest.mark.parametrize("state", ["created", "running", "preempted", "failed"])
def test_an_unfinished_run_is_taken_over(tmp_path: Path, state: str):
    path = settled_run(tmp_path, state)
    with open_it(tmp_path) as run:
        assert (run.path, run.resuming, run.finished) == (path, True, False)


def test_a_rerun_is_a_sibling_that_can_itself_be_resumed(tmp_path: Path):
    first = settled_run(tmp_path)
    before = snapshot(first)
    with open_it(tmp_path, rerun=True) as second:
        assert second.path == first.with_name(first.name + "-r2")
        assert not second.resuming
        second.status("preempted")
    with open_it(tmp_path, rerun=True) as again:
        assert (again.path, again.resuming) == (second.path, True)
        again.restore({})
        again.write_summary({"val_loss": 1.0})
        again.status("finished")
    with open_it(tmp_path, rerun=True) as third:
        assert third.path == first.with_name(first.name + "-r3")
    assert snapshot(first) == before
    assert [read_run(path).rerun for path in find_runs([tmp_path])] == [1, 2, 3]


def test_a_takeover_records_what_it_now_runs_in_and_what_it_ran_in_before(tmp_path: Path):
    with open_it(tmp_path, env={"torch": "1", "host": "a"}) as run:
        run.status("preempted")
    open_it(tmp_path, env={"torch": "2", "host": "a"}, config_yaml="device: cpu\n").close()
    record = read_run(run.path)
    assert record.env is not None
    (earlier,) = record.env["earlier"]
    assert record.env["torch"] == "2" and earlier.keys() == {"torch", "config_file"} and earlier["torch"] == "1"
    assert record.config == {"device": "cpu"}


def test_a_directory_killed_before_its_first_status_is_begun_anew(tmp_path: Path):
    path = tmp_path / "scratch" / "norm=layer" / f"s3-{IDENTITY.hash8}"
    path.mkdir(parents=True)
    (path / ".status.json.0123.tmp").write_text("{")
    with open_it(tmp_path) as run:
        assert not run.resuming
        run.log_metrics(row(0))
    assert not list(path.glob(".*"))


def test_logs_without_a_status_are_never_cut(tmp_path: Path):
    path = settled_run(tmp_path)
    (path / "status.json").unlink()
    with open_it(tmp_path) as run:
        assert run.resuming
    assert len(read_jsonl(path / "metrics.jsonl")) == 3


def test_a_damaged_status_is_refused_because_it_may_hide_a_result(tmp_path: Path):
    path = settled_run(tmp_path)
    (path / "status.json").write_text("{")
    before = snapshot(path)
    with pytest.raises(UserError, match=r"status\.json is damaged"):
        open_it(tmp_path)
    assert {k: v for k, v in snapshot(path).items() if "LOCK" not in k} == {
        k: v for k, v in before.items() if "LOCK" not in k
    }


def test_a_file_in_the_place_of_a_directory_is_a_storage_error(tmp_path: Path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(StorageError):
        open_it(tmp_path / "runs")


def test_a_signal_handler_that_interrupts_a_writing_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = open_it(tmp_path)
    real = directory.atomic_write_json

    def interrupted(path: Path, obj: dict[str, Any], *_: object) -> None:
        monkeypatch.setattr(directory, "atomic_write_json", real)
        run.status("preempted")
        real(path, run._status)

    monkeypatch.setattr(directory, "atomic_write_json", interrupted)
    writing = threading.Thread(target=run.status, args=("running",), daemon=True)
    writing.start()
    writing.join(5)
    assert not writing.is_alive()
    assert run.state == "preempted"
    run.close()


# Heartbeat


@pytest.mark.parametrize("closed", [False, True])
def test_the_heartbeat_beats_by_itself_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
):
    monkeypatch.setattr(directory, "HEARTBEAT_SECONDS", 0.01)
    run = open_it(tmp_path)
    if closed:
        run.status("finished")
    edit_status(run.path, heartbeat=ago(1000))
    deadline = time.monotonic() + (0.2 if closed else 5)
    while time.monotonic() < deadline and json.loads((run.path / "status.json").read_text())["heartbeat"] < ago(500):
        time.sleep(0.01)
    assert (json.loads((run.path / "status.json").read_text())["heartbeat"] > ago(500)) is not closed
    run.close()
    before = snapshot(run.path)
    run.heartbeat()
    time.sleep(0.05)
    assert snapshot(run.path) == before


def test_a_heartbeat_costs_nothing_within_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with open_it(tmp_path) as run:
        written = []
        monkeypatch.setattr(directory, "atomic_write_json", lambda *a: written.append(a))
        for _ in range(100):
            run.heartbeat()
        assert not written
        run._written -= 11
        run.heartbeat()
        run.heartbeat()
        assert len(written) == 1


def test_a_refused_heartbeat_is_reported_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(directory, "HEARTBEAT_SECONDS", 0.01)
    beats = []

    def refuse(path: Path, *_: object) -> None:
        beats.append(path)
        raise StorageError(f"cannot write {path}", "a full disk", "make room")

    with open_it(tmp_path):
        monkeypatch.setattr(directory, "atomic_write_json", refuse)
        deadline = time.monotonic() + 5
        while len(beats) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(beats) >= 2
    assert "no heartbeat" in caplog.text


# Logs


def test_a_row_begins_with_step_tokens_flops_seconds_and_none_may_be_missing(tmp_path: Path):
    with open_it(tmp_path) as run:
        run.log_metrics({**row(0), "val/loss": float("inf")})
        for key in ("step", "tokens", "flops", "seconds"):
            with pytest.raises(KeyError, match=key):
                run.log_metrics({k: v for k, v in row(1).items() if k != key})
    (line,) = (run.path / "metrics.jsonl").read_text().splitlines()
    assert list(json.loads(line)) == ["step", "tokens", "flops", "seconds", "train/loss", "val/loss", "nonfinite"]
    assert json.loads(line)["val/loss"] is None


def test_a_log_cut_at_any_byte_loses_at_most_one_line_and_resumes_without_gap_or_duplicate(tmp_path: Path):
    with open_it(tmp_path) as run:
        for step in range(4):
            run.log_metrics(row(step))
        offsets = run.offsets()
        for step in range(4, 7):
            run.log_metrics(row(step))
    path = run.path / "metrics.jsonl"
    whole = path.read_bytes()
    lengths = range(offsets["metrics.jsonl"], len(whole) + 1)
    for length in lengths:
        path.write_bytes(whole[:length])
        steps = [r["step"] for r in read_jsonl(path)]
        assert steps == list(range(len(steps)))
        assert len(steps) >= whole[:length].count(b"\n")
    for length in lengths[::40]:
        path.write_bytes(whole[:length])
        with open_it(tmp_path) as run:
            run.restore(offsets)
            for step in range(4, 7):
                run.log_metrics(row(step))
        assert path.read_bytes() == whole


def test_a_resumed_log_cannot_be_written_before_it_is_restored(tmp_path: Path):
    path = settled_run(tmp_path, "preempted")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "tok')
    with open_it(tmp_path) as run:
        with pytest.raises(RuntimeError, match="restore"):
            run.log_metrics(row(3))
        run.restore({})
        run.log_metrics(row(0))
    assert [r["step"] for r in read_jsonl(path / "metrics.jsonl")] == [0]
    assert read_jsonl(path / "probes.jsonl") == []


@pytest.mark.parametrize("offset", [3, 10**6])
def test_an_offset_that_is_no_line_end_of_the_log_is_refused(tmp_path: Path, offset: int):
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}\n{}\n{}\n" if offset > 10 else "{}}\n")
    before = path.read_bytes()
    with pytest.raises(CheckpointError):
        files.truncate(path, offset)
    assert path.read_bytes() == before


def test_a_disk_that_fills_in_the_middle_of_a_row_leaves_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with open_it(tmp_path) as run:
        run.log_metrics(row(0))
        calls = []

        def fill(descriptor: int, data: memoryview) -> int:
            calls.append(data)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, "full")
            return os.write(descriptor, data[:9])

        with monkeypatch.context() as patch:
            patch.setattr(files, "_write", fill)
            with pytest.raises(StorageError, match=r"metrics\.jsonl"):
                run.log_metrics(row(1))
        run.log_metrics(row(1))
    assert [r["step"] for r in read_jsonl(run.path / "metrics.jsonl")] == [0, 1]


def test_nothing_is_written_after_close(tmp_path: Path):
    run = open_it(tmp_path)
    run.close()
    run.close()
    before = snapshot(run.path)
    for write in (lambda: run.log("x"), lambda: run.write_summary({}), lambda: run.log_metrics(row(0))):
        with pytest.raises(RuntimeError):
            write()
    assert snapshot(run.path) == before


# Reading back


def test_a_run_reads_back_as_it_was_written(tmp_path: Path):
    record = read_run(settled_run(tmp_path))
    assert (record.study, record.arm, record.seed, record.rerun) == ("scratch", "norm=layer", 3, 1)
    assert (record.state, record.summary, record.config) == ("finished", {"val_loss": 1.25}, {"norm": "layer"})
    assert record.overrides == ["norm=layer"]
    assert record.env is not None
    assert record.env["run_hash"] == IDENTITY.run_hash
    assert record.metrics() == [row(0), row(1), row(2)]
    assert record.probes() == [row(2)]


def test_what_is_missing_stays_missing(tmp_path: Path):
    path = settled_run(tmp_path)
    for name in ("config.yaml", "env.json", "overrides.txt", "metrics.jsonl"):
        (path / name).unlink()
    record = read_run(path)
    assert (record.config, record.env, record.overrides) == (None, None, None)
    assert record.metrics() == []


def test_a_finished_run_without_its_summary_is_damaged_and_an_unfinished_one_has_none(tmp_path: Path):
    path = settled_run(tmp_path)
    (path / "summary.json").unlink()
    with pytest.raises(UserError, match=r"summary\.json is damaged"):
        read_run(path)
    status = (path / "status.json").read_text()
    (path / "status.json").write_text(status.replace('"finished"', '"failed"'))
    assert read_run(path).summary is None


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "resting"},
        {"state": None},
        {"host": 1},
        {"pid": "x"},
        {"heartbeat": "soon"},
        {"heartbeat": "2026-01-01"},
    ],
)
def test_a_status_that_says_nonsense_is_damaged(tmp_path: Path, changes: dict[str, Any]):
    path = settled_run(tmp_path)
    edit_status(path, **changes)
    with pytest.raises(UserError, match=r"status\.json is damaged"):
        read_run(path)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_not_strict_json_is_damage(tmp_path: Path, constant: str):
    path = settled_run(tmp_path)
    (path / "summary.json").write_text(f'{{"val_loss": {constant}}}')
    with pytest.raises(UserError, match=rf"(?s)summary\.json is damaged.*{constant}"):
        read_run(path)


def test_runs_are_found_from_any_level_once_and_hidden_ones_are_not(tmp_path: Path):
    runs_dir = tmp_path / "runs"
    path = settled_run(runs_dir)
    (runs_dir / "scratch" / ".hidden").symlink_to(path.parent)
    (runs_dir / "scratch" / "again").symlink_to(path.parent)
    (runs_dir / "scratch" / "study.yaml").write_text("")
    for start in (path, path.parent, runs_dir / "scratch", runs_dir):
        assert find_runs([start]) == [path]
    assert len(find_runs([runs_dir, path])) == 1
    with pytest.raises(UserError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])


# Surroundings and secrets


def test_the_environment_records_versions_and_the_command_and_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-one")
    monkeypatch.setenv("HF_TOKEN", "canary-two")
    argv = ["nexus-ablate", "data.path=https://me:canary-three@host/x", "hf_token=canary4", "--api-key", "canary5"]
    argv += ["note=canary-one", "data.tokens=100", "data.tokenizer=bytes"]
    env = environment(argv)
    text = strict_json(env)
    assert "canary" not in text
    assert "data.tokens=100 data.tokenizer=bytes" in env["command"]
    assert env["packages"]["torch"]
    assert env["python"].startswith("3.")


@pytest.mark.parametrize("text", ["train.tokens=5", "kurtosis_token=3", "https://host/a@b", "hf://x/y", "monkey=3"])
def test_what_is_no_secret_is_left_alone(text: str):
    assert mask(text) == text


def test_a_run_that_calls_its_experiment_study_is_read_like_any_other(tmp_path: Path, capsys):
    from written_runs import Writer

    from nexus_ablate.cli import main
    from nexus_ablate.config.resolve import from_values
    from nexus_ablate.runs.contradiction import config_file_hash

    writer = Writer(tmp_path, "mine")
    paths = [*writer.arm(losses=[2.0, 2.1]), *writer.arm("norm=layer", losses=[2.2, 2.3])]
    assert main(["compare", str(tmp_path / "mine"), "--json", "-"]) == 0
    now = capsys.readouterr().out
    for path in paths:
        text = (path / "config.yaml").read_text()
        assert "experiment: mine" in text
        earlier = text.replace("experiment: mine", "study: mine")
        (path / "config.yaml").write_text(earlier)
        env = json.loads((path / "env.json").read_text()) | {"config_file": config_file_hash(earlier)}
        (path / "env.json").write_text(json.dumps(env))
    assert main(["compare", str(tmp_path / "mine"), "--json", "-"]) == 0
    assert capsys.readouterr().out == now
    config = read_run(paths[0]).config
    assert config is not None and config["experiment"] == "mine" and "study" not in config
    assert from_values({key: value for key, value in config.items() if key != "resolved"}).experiment == "mine"
    assert main(["show", str(paths[0])]) == 0
