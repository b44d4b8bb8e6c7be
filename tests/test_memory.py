"""A run that uses up the memory names what to lower."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from nexus_ablate import errors
from nexus_ablate.config.compose import compose
from nexus_ablate.training.memory import out_of_memory
from nexus_ablate.training.refusals import too_large


def test_the_errors_of_each_allocator_are_known_and_others_are_not():
    import torch

    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        MemoryError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
    ):
        assert out_of_memory(error)
    assert not out_of_memory(RuntimeError("shape mismatch"))
    assert not out_of_memory(OSError(28, "No space left on device"))


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        ([], "train.batch_size=16 train.grad_accum=2"),
        (["train.compile=graphs"], "train.batch_size=16 train.grad_accum=2 train.compile=on"),
        (["train.batch_size=9", "train.grad_accum=4"], "train.batch_size=3 train.grad_accum=12"),
        (["train.batch_size=3"], "train.batch_size=1 train.grad_accum=3"),
        (["train.batch_size=1"], "train.activation_checkpointing=on"),
        (["train.batch_size=1", "train.activation_checkpointing=on"], "a smaller model"),
    ],
)
def test_out_of_memory_suggests_a_smaller_batch_and_as_many_sequences_per_step(overrides, fix):
    config = compose(["model=nano", "train.batch_size=32", *overrides])
    assert too_large(config).fix.partition(", or")[0] == fix
    if "=" in fix:
        train = compose(["model=nano", "train.batch_size=32", *overrides, *fix.split()]).train
        assert train.batch_size * train.grad_accum == config.train.batch_size * config.train.grad_accum


@pytest.mark.parametrize(
    ("batch_size", "fix"),
    [(12, "train.batch_size=4 train.grad_accum=3"), (4, "train.activation_checkpointing=on")],
)
def test_under_torchrun_each_process_has_as_many_sequences_of_the_smaller_batch(monkeypatch, batch_size, fix):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    config = compose(["model=nano", f"train.batch_size={batch_size}"])
    assert too_large(config).fix.partition(", or")[0] == fix


LIMITED = """
import resource, sys
from nexus_ablate.cli import main
import torch, nexus_ablate.training.session, nexus_ablate.training.trainer
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


def limited(tiny_run, extra: int, *overrides: str) -> subprocess.CompletedProcess:
    """A run in a process that may take so many more bytes of addresses than it has after its imports."""
    command = [sys.executable, "-c", LIMITED, str(extra), *merged(tiny_run("train.compile=off", *overrides))]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.long
def test_an_allocator_s_refusal_while_training_is_the_same_error(tiny_run, tmp_path):
    large = ("model.d_model=256", "model.context=256", "train.batch_size=64", "data.tokenizer=bytes")
    done = limited(tiny_run, 2**28, *large)
    assert done.returncode == errors.CONFIG, done.stderr
    *_, problem, got, fix = done.stderr.splitlines()
    assert "this run does not fit in memory" in problem
    assert "train.batch_size=64" in got
    assert re.search(r"train\.batch_size=\d+", fix)
    assert "Traceback" not in done.stderr
    (status,) = (tmp_path / "runs").glob("*/*/*/status.json")
    assert json.loads(status.read_text())["state"] == "failed"
    assert limited(tiny_run, 2**33, *large).returncode == errors.OK


def merged(overrides: list[str]) -> list[str]:
    """The last of several overrides of a key."""
    return list({text.split("=")[0]: text for text in overrides}.values())
