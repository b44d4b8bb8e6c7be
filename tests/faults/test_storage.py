"""A disk that refuses: exit 5, a line that names path and need, and the last good checkpoint stays (R5)."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest

from faults.bench import at_every_call, fresh, result, run, sizes
from nexus_ablate import errors
from nexus_ablate.errors import StorageError
from nexus_ablate.runs import find_runs, read_jsonl
from nexus_ablate.training.checkpoint import load_newest

NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EIO, errno.EROFS)
SHORT = ("train.steps=8", "train.checkpoint_every=3", "train.eval_every=4", "model.n_layers=1", "probe=off")


def refuse_at(k: int, number: int, left_refusing: bool):
    """Refuse the k-th call that changes the disk, and with `left_refusing` every one after it."""
    made = [0]

    def refuse(_: str) -> None:
        made[0] += 1
        if made[0] - 1 == k or (left_refusing and made[0] - 1 > k):
            raise OSError(number, os.strerror(number))

    return refuse


@sizes(6, 0)  # 0: every call
def test_whichever_call_the_disk_refuses_the_run_reports_it_and_resumes_later(
    tiny_run, tmp_path, monkeypatch, counted, count
):
    expected = result(run(tiny_run(*SHORT)).path)
    calls: list[str] = []
    with monkeypatch.context() as patch:
        at_every_call(patch, calls.append)
        run(tiny_run(*SHORT, f"runs_dir={tmp_path / 'dry'}"))
    draw = random.Random(1)
    every = draw.sample(range(len(calls)), count) if count else range(len(calls))
    refused = borne = 0
    for k in every:
        number, lasting = draw.choice(NUMBERS), draw.random() < 0.5
        with fresh(tmp_path) as runs_dir:
            overrides = tiny_run(*SHORT, f"runs_dir={runs_dir}")
            with monkeypatch.context() as patch:
                at_every_call(patch, refuse_at(k, number, lasting))
                try:
                    run(overrides)
                    borne += 1  # a deletion, or a directory that was there
                except StorageError as error:
                    refused += 1
                    assert error.status == errors.STORAGE == 5
                    assert len(error.lines()) == 3
                    assert str(runs_dir) in error.problem, calls[k]
            for path in find_runs([runs_dir]) if runs_dir.exists() else []:
                assert_whole_rows(path)
                load_newest(path / "checkpoints")  # raises where one is there and none is whole
            assert result(run(overrides).path) == expected, (k, calls[k], errno.errorcode[number], lasting)
    assert refused > len(every) / 2
    counted(f"{len(every)} of {len(calls)} calls refused once or for good: {refused} exits 5, {borne} borne, 0 lost")


def assert_whole_rows(path) -> None:
    for name in ("metrics.jsonl", "probes.jsonl"):
        if (path / name).exists():
            assert (path / name).read_bytes()[-1:] in (b"", b"\n")
            read_jsonl(path / name)


def test_a_run_whose_checkpoint_would_not_fit_is_refused_before_its_first_step(tiny_run, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    steps = []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6, 5000))
    from faults.bench import at_step

    at_step(monkeypatch, steps.append)
    with pytest.raises(StorageError, match="too little space") as caught:
        run(tiny_run())
    assert "5000 bytes free" in caught.value.got
    assert steps == []


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="needs root to mount a small tmpfs")
@pytest.mark.slow
def test_on_a_file_system_that_is_really_full_the_exit_status_is_5_and_room_is_all_it_takes(tiny_run, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("this machine allows no mount")
    try:
        whole = run(tiny_run(*SHORT))
        command = [sys.executable, "-m", "nexus_ablate", *tiny_run(*SHORT, f"runs_dir={small / 'runs'}")]
        (small / "filling").write_bytes(b"\0" * 500_000)
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == errors.STORAGE, done.stderr
        assert len([line for line in done.stderr.splitlines() if line.startswith(("error", "  got", "  try"))]) == 3
        assert "Traceback" not in done.stderr
        (small / "filling").unlink()
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert result(find_runs([small / "runs"])[0]) == result(whole.path)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
