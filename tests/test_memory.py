"""What cannot fit in memory is refused before anything is made; what fits never is; what runs out says so."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.errors import ConfigError
from nexus_ablate.training import memory
from nexus_ablate.training.memory import check_memory, least_bytes, machine_bytes, out_of_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("overrides", "fixed"),
    [
        (["train.batch_size=1000000"], r"train\.batch_size=\d+$"),
        (["model.d_model=1024", "model.n_layers=10000"], r"train\.batch_size=1 model\.n_layers=\d+$"),
        (
            ["model.d_model=65536", "model.n_heads=512", "d_ff_ratio=400"],
            r"model=femto train\.batch_size=1, without other sizes$",
        ),
    ],
)
def test_a_run_that_cannot_fit_is_refused_in_three_lines_with_values_that_would_fit(
    tmp_path, monkeypatch, capsys, overrides, fixed
):
    monkeypatch.setattr(memory, "machine_bytes", lambda: 8 * GIB)
    command = [*overrides, "train.device=cpu", f"runs_dir={tmp_path / 'runs'}"]
    assert main(command) == errors.CONFIG
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert re.search(r"needs at least [\d,.]+ GiB, and cpu has 8\.0 GiB", said[0])
    assert re.search(fixed, said[2])
    assert not (tmp_path / "runs").exists()
    if "without" in said[2]:
        overrides, said[2] = [], said[2].partition(",")[0]
    suggested = said[2].removeprefix("  try: ").split()
    keys = {text.split("=")[0] for text in suggested}
    check_memory(compose([*(text for text in overrides if text.split("=")[0] not in keys), *suggested]), 8 * GIB)


@pytest.mark.parametrize("value", ["9" * 400, "9" * 5000, "-" + "9" * 400, "1e300", "1e9999"])
@pytest.mark.parametrize(
    "key", ["train.batch_size", "train.steps", "train.grad_accum", "optim.lr", "d_ff_ratio", "window"]
)
def test_a_number_that_nothing_can_hold_is_refused(tmp_path, capsys, key, value):
    if key == "optim.lr" and value == "1e300":
        return  # a rate like any other, which diverges
    assert main([f"{key}={value}", f"runs_dir={tmp_path / 'runs'}"]) == errors.CONFIG
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert not (tmp_path / "runs").exists()


def test_the_bound_grows_with_everything_that_takes_memory_and_shrinks_with_what_saves_it():
    config = compose(["train.compile=off"])
    base = least_bytes(config, vocab_size=1000, state_bytes=8)
    for overrides in (["train.batch_size=64"], ["model.n_layers=8"], ["model.d_model=256"], ["model.context=256"]):
        assert least_bytes(compose(overrides), vocab_size=1000, state_bytes=8) > base, overrides
    for overrides in (["train.precision=bf16"], ["train.activation_checkpointing=on"], ["train.loss=chunked"]):
        assert least_bytes(compose(overrides), vocab_size=1000, state_bytes=8) < base, overrides
    assert least_bytes(config, vocab_size=1000) < base
    narrow = least_bytes(compose(["train.compile=off", "d_embed=8"]), vocab_size=1000, state_bytes=8)
    assert narrow < base  # tables of 8 columns


def test_the_memory_is_that_of_the_smallest_control_group_and_of_the_process(tmp_path):
    own, root = tmp_path / "cgroup", tmp_path / "root"
    own.write_text("0::/a/b\n")
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "memory.max").write_text("max\n")
    (root / "a" / "memory.max").write_text("1000\n")
    assert [*memory._control_groups(own, root)] == [1000]
    own.write_text("4:cpu,memory:/a\n0::/\n")
    (root / "memory" / "a").mkdir(parents=True)
    (root / "memory" / "a" / "memory.limit_in_bytes").write_text("2000\n")
    assert [*memory._control_groups(own, root)] == [2000]
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 0 < (machine_bytes() or 0) <= total * 2


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


LIMITED = """
import resource, sys
from nexus_ablate.cli import main
from nexus_ablate.training import memory
import torch, nexus_ablate.training.trainer, nexus_ablate.training.session as session
used = int(open("/proc/self/statm").read().split()[0]) * 4096
session.check_memory = lambda *_, **__: None  # of which the limit would be one
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


MEASURED = {
    "wide": ("model.d_model=512", "train.batch_size=4"),
    "long": ("model.context=512", "train.batch_size=16"),
    "many": ("train.batch_size=256",),
    "bf16": ("train.batch_size=256", "train.precision=bf16"),
    "recomputed": ("train.batch_size=256", "train.activation_checkpointing=on"),
    "accumulated": ("model.d_model=512", "train.batch_size=2", "train.grad_accum=4"),
    "chunked": ("train.batch_size=256", "train.loss=chunked"),
    "adafactor": ("model.d_model=512", "train.batch_size=4", "optim=adafactor"),
}
PEAK = """
import json, sys
from nexus_ablate.config.compose import compose
from nexus_ablate.training import memory, session
import torch, nexus_ablate.training.trainer
bounds = []
session.check_memory = lambda config, *_, **known: bounds.append(memory.least_bytes(config, **known))
before = memory.resident_peak_bytes()
session.train(compose(sys.argv[1:]), sys.argv[1:], quiet=True)
print(json.dumps([bounds[0], memory.resident_peak_bytes() - before]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_no_run_takes_less_than_the_bound(tiny_run, counted, name):
    sizes = ("model.n_heads=4", "model.d_model=128", "model.context=128", "data.tokenizer=bytes", "train.steps=2")
    keys = {text.split("=")[0] for text in MEASURED[name]}
    sizes = [text for text in sizes if text.split("=")[0] not in keys]
    command = [sys.executable, "-c", PEAK, *merged(tiny_run(*sizes, "train.compile=off", "probe=off", *MEASURED[name]))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    bound, peak = json.loads(done.stdout.splitlines()[-1])
    counted(f"{name}: the bound is {bound / peak:.2f} of {peak / 2**20:.0f} MiB")
    assert bound <= peak


def merged(overrides: list[str]) -> list[str]:
    """The last of several overrides of a key."""
    return list({text.split("=")[0]: text for text in overrides}.values())


def test_control_a_limit_below_the_bound_is_what_refuses():
    config = compose([])
    bound = least_bytes(config)
    check_memory(config, bound)
    check_memory(config, None)
    with pytest.raises(ConfigError, match="does not fit"):
        check_memory(config, bound - 1)
