"""A run that a signal interrupts, in a process of its own, ends like an undisturbed one, to the bit."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from faults.bench import result

from nexus_ablate.errors import OK, PREEMPTED
from nexus_ablate.runs import find_runs

CHECKPOINTED = ("train.steps=60", "train.log_every=1", "train.checkpoint_every=12", "model.dropout=0.1", "probe=off")


def start(overrides, runs_dir) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "nexus_ablate", *overrides, f"runs_dir={runs_dir}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status", "options"),
    [
        (signal.SIGTERM, PREEMPTED, ()),
        (signal.SIGKILL, -signal.SIGKILL, ()),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, ("train.compile=on",), marks=pytest.mark.long),
    ],
)
def test_an_interrupted_run_ends_like_an_undisturbed_one(tiny_run, tmp_path, sent, status, options):
    overrides = [text for text in tiny_run(*CHECKPOINTED, *options) if not text.startswith("runs_dir")]
    assert start(overrides, tmp_path / "undisturbed").wait() == OK
    interrupted = start(overrides, tmp_path / "interrupted")
    log = "*/*/*/metrics.jsonl"
    while not any(path.read_bytes().count(b"\n") > 20 for path in (tmp_path / "interrupted").glob(log)):
        assert interrupted.poll() is None, "the run ended before it was interrupted"
        time.sleep(0.002)
    interrupted.send_signal(sent)
    assert interrupted.wait() == status
    assert start(overrides, tmp_path / "interrupted").wait() == OK
    (expected,) = find_runs([tmp_path / "undisturbed"])
    (resumed,) = find_runs([tmp_path / "interrupted"])
    assert result(resumed) == result(expected)
