"""One run on several processes is the same run: same loss, one directory, one end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from processes import Processes

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.comparison.windows import read_windows
from nexus_ablate.config.options import option_files
from nexus_ablate.data import Batches
from nexus_ablate.runs import find_runs, read_run
from nexus_ablate.training import checkpoint, distributed
from nexus_ablate.training.checkpoint import load_newest
from nexus_ablate.training.distributed import Place, Reduction, World, place

SHORT = ("train.steps=10", "train.checkpoint_every=4", "train.eval_every=5", "train.batch_size=8", "optim.lr=1e-2")
SAME = 1e-5  # relative: the order of additions
FIGURES = ("train/loss", "val/loss", "grad_norm/global", "attn/entropy")


def alone(overrides):
    assert main(overrides) == 0


def together(size, overrides, tmp_path, before=lambda rank: None, seconds=120.0):
    """Statuses by rank, and everything that was said."""
    said = tmp_path / f"said-{time.monotonic_ns()}"
    statuses = Processes(size, overrides, said, before).wait(set(range(size)), seconds)
    return statuses, said.read_text()


def the_run(runs_dir):
    (path,) = find_runs([runs_dir])
    return read_run(path)


def furthest(first, second):
    """The largest relative difference between two runs' figures and weights; they must have the same rows."""
    a, b = first.metrics(), second.metrics()
    assert [row["step"] for row in a] == [row["step"] for row in b]
    assert [row.get("batch_hash") for row in a] == [row.get("batch_hash") for row in b]
    pairs = [(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in FIGURES if name in x]
    one, other = (load_newest(run.path / "checkpoints").tensors["model"] for run in (first, second))
    windows = [read_windows(run.path / "evaluation.jsonl") for run in (first, second)]
    assert (windows[0].places == windows[1].places).all()
    pairs += zip(windows[0].losses, windows[1].losses, strict=True)
    differences = [abs(x - y) / abs(y) for x, y in pairs]
    return max(*differences, *(float((one[n] - other[n]).norm() / other[n].norm()) for n in one if other[n].any()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "steps", "optimizer"),
    [
        *((2, 10, name) for name in sorted(option_files("optim"))),
        pytest.param(2, 100, "adamw", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(4, 100, "adamw", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_several_processes_are_one_process_at_the_same_global_batch(
    tiny_run, tmp_path, size, steps, optimizer, counted
):
    overrides = tiny_run(f"optim={optimizer}", *SHORT, f"train.steps={steps}", "train.grad_accum=2", "z_loss=1e-3")
    alone([*overrides, f"runs_dir={tmp_path / 'one'}"])
    statuses, said = together(size, [*overrides, f"runs_dir={tmp_path / 'many'}"], tmp_path)
    assert set(statuses.values()) == {0}, said
    assert len(statuses) == size
    one, many = the_run(tmp_path / "one"), the_run(tmp_path / "many")
    assert many.path.name == one.path.name  # the number of processes is no part of what a run is
    assert (many.summary["world_size"], many.env["world_size"], one.summary["world_size"]) == (size, size, 1)
    difference = furthest(many, one)
    # Muon orthogonalizes in bfloat16, which rounds gradients that differ in the last digit apart.
    assert difference < (2e-2 if optimizer == "muon" else SAME)
    assert said.count("saved to") == 1  # the first process alone speaks
    counted(f"{size} processes, {steps} steps: at most {difference:.1e} relative")


@pytest.mark.slow
def test_several_processes_continue_from_a_checkpoint_as_one_does(tiny_run, tmp_path):
    alone(tiny_run("train.steps=6", f"runs_dir={tmp_path / 'first'}"))
    first = the_run(tmp_path / "first")
    overrides = tiny_run(*SHORT, "init=checkpoint", f"init.run='{first.path}'")
    alone([*overrides, f"runs_dir={tmp_path / 'one'}"])
    statuses, said = together(2, [*overrides, f"runs_dir={tmp_path / 'many'}"], tmp_path)
    assert set(statuses.values()) == {0}, said
    one, many = the_run(tmp_path / "one"), the_run(tmp_path / "many")
    assert many.path.name == one.path.name and many.summary["init_hash"] == one.summary["init_hash"]
    assert many.metrics()[0]["val/loss"] == pytest.approx(first.summary["val_loss"], rel=SAME)
    assert furthest(many, one) < SAME
    missing = [*overrides[:-1], "init.run=nowhere", f"runs_dir={tmp_path / 'none'}"]
    statuses, said = together(2, missing, tmp_path)
    assert statuses[0] == errors.CONFIG and statuses[1] != 0, said
    assert "got: init.run=nowhere" in said and not (tmp_path / "none").exists()


@pytest.mark.slow
def test_buckets_of_gradients_are_averaged_to_the_bit_as_all_of_them_at_once(tiny_run, tmp_path, monkeypatch):
    overrides = tiny_run(*SHORT, "train.grad_accum=2", "normalizer=sink")
    for name, size in (("flat", 2**40), ("buckets", 256)):
        monkeypatch.setattr(distributed, "BUCKET_BYTES", size)
        statuses, said = together(2, [*overrides, f"runs_dir={tmp_path / name}"], tmp_path)
        assert set(statuses.values()) == {0}, said
    assert furthest(the_run(tmp_path / "flat"), the_run(tmp_path / "buckets")) == 0


def test_a_bucket_is_sent_while_later_gradients_are_still_to_come(monkeypatch):
    """Three layers, a bucket for each; the gradient of the last layer comes first. The other process sends zeros."""
    events = []

    def exchange(flat, async_op):
        events.append("sent")
        return SimpleNamespace(wait=lambda: events.append("waited"))

    monkeypatch.setattr(torch.distributed, "all_reduce", exchange)
    monkeypatch.setattr(distributed, "BUCKET_BYTES", 1)
    layers = [torch.nn.Linear(2, 2, bias=False) for _ in range(3)]
    unused = torch.nn.Parameter(torch.zeros(2))
    reduction = Reduction(World(Place(0, 2), torch.device("cpu")), [*(layer.weight for layer in layers), unused])
    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(lambda weight: events.append("arrived"))
    layers[2](layers[1](layers[0](torch.ones(1, 2)))).sum().backward()
    assert events == ["arrived"] * 3, "not the last micro-batch of its step"
    before = [layer.weight.grad.clone() for layer in layers]
    events.clear()
    reduction.begin()
    layers[2](layers[1](layers[0](torch.ones(1, 2)))).sum().backward()
    reduction.finish()
    assert events == ["arrived"] * 3 + ["sent"] * 3 + ["waited"] * 3, "the unused parameter is in the first bucket"
    assert all(torch.equal(layer.weight.grad, one) for layer, one in zip(layers, before, strict=True)), "(1 + 1) / 2"
    reduction = Reduction(World(Place(0, 2), torch.device("cpu")), [layer.weight for layer in layers])
    events.clear()
    reduction.begin()
    layers[2](layers[1](layers[0](torch.ones(1, 2)))).sum().backward()
    reduction.finish()
    assert events == ["arrived", "sent"] * 3 + ["waited"] * 3


@pytest.mark.slow
def test_control_without_the_exchange_each_process_learns_its_own_rows_only(tiny_run, tmp_path, monkeypatch):
    overrides = tiny_run(*SHORT)
    alone([*overrides, f"runs_dir={tmp_path / 'one'}"])
    monkeypatch.setattr(Reduction, "begin", lambda self: None)
    monkeypatch.setattr(Reduction, "finish", lambda self: None)
    statuses, said = together(2, [*overrides, f"runs_dir={tmp_path / 'many'}"], tmp_path)
    assert set(statuses.values()) == {0}, said
    assert furthest(the_run(tmp_path / "many"), the_run(tmp_path / "one")) > 100 * SAME


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1, 2), pytest.param((1, 4, 2, 1), marks=[pytest.mark.slow, pytest.mark.long])])
def test_a_stopped_run_resumes_with_another_number_of_processes(tiny_run, tmp_path, sizes):
    overrides = tiny_run(*SHORT)
    alone([*overrides, f"runs_dir={tmp_path / 'one'}"])
    moved = [*overrides, f"runs_dir={tmp_path / 'moved'}"]
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        signalled = size - 1  # the signal goes to one process, not always the first

        def before(rank, signalled=signalled, at=2 * number + 2, last=last):
            stop_at(rank == signalled and not last, at)

        if size == 1:
            pid = os.fork()
            if pid == 0:
                before(0)
                os._exit(main(moved))
            statuses = {0: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}
            said = ""
        else:
            statuses, said = together(size, moved, tmp_path, before)
        assert statuses == dict.fromkeys(range(size), 0 if last else errors.PREEMPTED), said
        if not last:
            record = the_run(tmp_path / "moved")
            assert record.state == "preempted"
            assert record.status["step"] == 2 * number + 3, said
    assert furthest(the_run(tmp_path / "moved"), the_run(tmp_path / "one")) < SAME


def stop_at(signalled, step):
    """Send this process SIGTERM before a step."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    disturb(step, lambda: os.kill(os.getpid(), signal.SIGTERM) if signalled else None)


def disturb(step, act):
    """Act before a step, or in the first save, in this process only, which ends soon."""
    if step == "save":
        checkpoint._checkpoint_point = lambda name: act() if name == "after model.safetensors" else None
    batch = Batches.batch

    def watched(self, number):
        if number == step:
            act()
        return batch(self, number)

    Batches.batch = watched  # type: ignore[method-assign]


def fail():
    raise ValueError("the root cause")


WAYS = {
    "raises": fail,
    "exits": lambda: os._exit(17),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


@pytest.fixture
def impatient(monkeypatch):
    """The limits of the vigil a tenth as long."""
    monkeypatch.setattr(distributed, "LOST_SECONDS", 4.0)
    monkeypatch.setattr(distributed, "ENDING_SECONDS", 1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("way", "rank"), [("raises", 1), ("exits", 0), ("hangs", 1)])
def test_a_process_that_fails_ends_the_others_and_the_run_resumes_later(tiny_run, tmp_path, way, rank):
    failing(tiny_run, tmp_path, way, rank, at=6, seconds=25)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("impatient")
def test_sixty_processes_fail_at_any_step_or_in_a_save(tiny_run, tmp_path, counted):
    draw = random.Random(0)
    longest = 0.0
    for number in range(60):
        folder = tmp_path / str(number)
        folder.mkdir()
        way, size = sorted(WAYS)[number % 4], draw.choice((2, 2, 3))
        at = "save" if number % 5 == 4 else draw.randrange(1, 10)
        rank = 0 if at == "save" else draw.randrange(size)
        longest = max(longest, failing(tiny_run, folder, way, rank, at, seconds=40, size=size))
    counted(f"60 of 60 failures took the run down, at most {longest:.1f} s with limits of a tenth")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_with_the_real_limits_all_are_gone_within_a_minute(tiny_run, tmp_path, way, size, counted):
    seconds = failing(tiny_run, tmp_path, way, size - 1, at=6, seconds=60, size=size)
    counted(f"{size} processes, one {way}: all gone after {seconds:.1f} s")


def failing(tiny_run, folder, way, rank, at, seconds, size=2):
    """Let a rank fail before a step, or in a save; seconds until all others are gone, with the root cause first."""
    overrides = tiny_run(*SHORT, f"train.batch_size={4 * size}")
    alone([*overrides, f"runs_dir={folder / 'one'}"])
    broken = [*overrides, f"runs_dir={folder / 'broken'}"]
    start = time.monotonic()
    others = set(range(size)) - ({rank} if way == "hangs" else set())
    processes = Processes(size, broken, folder / "said", lambda r: disturb(at, WAYS[way]) if r == rank else None)
    statuses = processes.wait(others, seconds)
    taken = time.monotonic() - start
    said = (folder / "said").read_text()
    assert statuses.keys() >= others, said
    assert 0 not in statuses.values()
    if way == "raises":
        blamed = [line for line in said.splitlines() if line.startswith(("ValueError", "error"))]
        assert blamed[0] == "ValueError: the root cause", said
    assert said.count("Traceback") <= (way == "raises")
    load_newest(the_run(folder / "broken").path / "checkpoints")  # raises where one is there and none is whole
    statuses, text = together(size, broken, folder)
    assert set(statuses.values()) == {0}, text
    assert furthest(the_run(folder / "broken"), the_run(folder / "one")) < SAME
    return taken


@pytest.mark.slow
@pytest.mark.long
def test_control_without_the_vigil_a_process_that_hangs_is_waited_for(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed._Vigil, "_watch", lambda self: None)
    monkeypatch.setattr(distributed, "LOST_SECONDS", 1.0)
    statuses, _ = together(2, tiny_run(*SHORT), tmp_path, lambda r: disturb(6, WAYS["hangs"]) if r else None, seconds=8)
    assert statuses == {}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [(["train.batch_size=3"], "train.batch_size must be divisible"), (["norm=batch"], "statistics over the batch")],
)
def test_what_cannot_be_spread_is_refused_before_a_directory_is_made(tiny_run, tmp_path, overrides, problem):
    statuses, said = together(2, tiny_run(*overrides), tmp_path)
    assert statuses == {0: 2, 1: 2}
    assert problem in said
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_finished_run_asked_for_again_is_reported_by_the_first_process_alone(tiny_run, tmp_path):
    alone(tiny_run(*SHORT))
    statuses, said = together(2, tiny_run(*SHORT), tmp_path)
    assert statuses == {0: 0, 1: 0}, said
    assert said.count("already finished") == 1


@pytest.mark.slow
def test_a_diverged_run_ends_in_all_processes_with_3_and_is_said_once(tiny_run, tmp_path):
    statuses, said = together(2, tiny_run("optim.lr=1e30", "optim.clip=off", "norm=none"), tmp_path)
    assert statuses == {0: errors.DIVERGED, 1: errors.DIVERGED}, said
    assert said.count("error: ") == 1
    assert the_run(tmp_path / "runs").state == "diverged"


@pytest.mark.slow
def test_under_torchrun_the_command_is_the_same(tiny_run, tmp_path):
    overrides = tiny_run(*SHORT)
    alone([*overrides, f"runs_dir={tmp_path / 'one'}"])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "nexus_ablate", *overrides, f"runs_dir={tmp_path / 'many'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert furthest(the_run(tmp_path / "many"), the_run(tmp_path / "one")) < SAME


# What a launcher says


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Place()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Place()),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
          "MASTER_PORT": "7"}, Place(3, 4, 1, 2, "a", 7)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "MASTER_ADDR": "a"},
         Place(5, 8, 1, None, "a", 29500)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, Place()),  # tasks that are runs of their own
    ],
)  # fmt: skip
def test_the_place_is_what_torchrun_or_slurm_says(monkeypatch, variables, expected):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert place() == expected


@pytest.mark.parametrize("variables", [{"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_variables_that_do_not_fit_together_are_a_configuration_error(monkeypatch, variables):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.ConfigError, match="launcher"):
        place()


@pytest.mark.parametrize("command", [["-m", "seed=0,1"], ["study", "norms"]])
def test_what_starts_processes_of_its_own_is_refused_under_torchrun(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(command) == 2
    assert "starts processes of its own" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_process_has_its_own_rows_and_together_they_are_the_batch():
    import numpy as np

    batch = np.arange(24).reshape(12, 2)
    parts = [World(Place(rank, 4), torch.device("cpu")).rows(batch) for rank in range(4)]
    np.testing.assert_array_equal(np.concatenate(parts), batch)
