"""One run on several processes is the same run: same loss, one directory, one end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from options import OF_PYTORCH
from processes import Processes

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.comparison.read import read_windows
from nexus_ablate.data import Batches
from nexus_ablate.kernels import normuon
from nexus_ablate.runs import find_runs, read_run
from nexus_ablate.training.checkpoint import load_newest
from nexus_ablate.training.distributed import Place, World, place
from nexus_ablate.training.refusals import check_world
from nexus_ablate.training.step import Step

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
    pairs += zip(windows[0].by_block, windows[1].by_block, strict=True)
    differences = [abs(x - y) / abs(y) for x, y in pairs]
    return max(*differences, *(float((one[n] - other[n]).norm() / other[n].norm()) for n in one if other[n].any()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "steps", "optimizer"),
    [
        *((2, 10, name) for name in OF_PYTORCH),
        pytest.param(2, 100, "adamw", marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(4, 100, "adamw", marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_several_processes_are_one_process_at_the_same_global_batch(
    tiny_run, tmp_path, monkeypatch, size, steps, optimizer, counted
):
    # In bfloat16, gradients that differ in the last digit may round apart: by 1e-3 after ten steps.
    monkeypatch.setattr(normuon, "PRECISION", torch.float64)
    overrides = tiny_run(f"optim={optimizer}", *SHORT, f"train.steps={steps}", "train.grad_accum=2", "z_loss=1e-3")
    alone([*overrides, f"runs_dir={tmp_path / 'one'}"])
    statuses, said = together(size, [*overrides, f"runs_dir={tmp_path / 'many'}"], tmp_path)
    assert set(statuses.values()) == {0}, said
    assert len(statuses) == size
    one, many = the_run(tmp_path / "one"), the_run(tmp_path / "many")
    assert many.path.name == one.path.name  # the number of processes is no part of what a run is
    assert (many.summary["world_size"], many.env["world_size"], one.summary["world_size"]) == (size, size, 1)
    difference = furthest(many, one)
    assert difference < (2e-2 if optimizer == "muon" else SAME)  # PyTorch's Muon is in bfloat16
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


@pytest.mark.slow
def test_control_without_the_exchange_each_process_learns_its_own_rows_only(tiny_run, tmp_path, monkeypatch):
    overrides = tiny_run(*SHORT)
    alone([*overrides, f"runs_dir={tmp_path / 'one'}"])
    monkeypatch.setattr(Step, "_exchange", lambda self, last: self.parallel.no_sync())
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
    """Act before a step, in this process only, which ends soon."""
    batch = Batches.batch

    def watched(self, number):
        if number == step:
            act()
        return batch(self, number)

    Batches.batch = watched  # type: ignore[method-assign]


FAILING = """
import os, signal, sys
from nexus_ablate.cli import main
from nexus_ablate.data import Batches

batch = Batches.batch

def watched(self, number):
    if number == 6 and os.environ["RANK"] == "{rank}":
        {act}
    return batch(self, number)

Batches.batch = watched
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "act"), [(1, "raise ValueError('the root cause')"), (0, "os.kill(os.getpid(), signal.SIGKILL)")]
)
def test_a_process_that_fails_ends_the_others_and_the_run_resumes_later(tiny_run, tmp_path, rank, act):
    overrides = tiny_run(*SHORT)
    alone([*overrides, f"runs_dir={tmp_path / 'one'}"])
    broken = [*overrides, f"runs_dir={tmp_path / 'broken'}"]
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(rank=rank, act=act))
    done = torchrun([str(script), *broken])
    assert done.returncode != 0
    assert ("the root cause" in done.stderr) == (rank == 1)
    load_newest(the_run(tmp_path / "broken").path / "checkpoints")  # raises where one is there and none is whole
    done = torchrun(["-m", "nexus_ablate", *broken])
    assert done.returncode == 0, done.stderr
    assert "resuming from step 4" in done.stderr
    assert furthest(the_run(tmp_path / "broken"), the_run(tmp_path / "one")) < SAME


def torchrun(arguments):
    """A command in two processes under torchrun; killed with an error if it takes longer than two minutes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_what_cannot_be_spread_is_refused_before_a_directory_is_made(tiny_run, tmp_path):
    statuses, said = together(2, tiny_run("train.batch_size=3"), tmp_path)
    assert statuses == {0: 2, 1: 2}
    assert "train.batch_size must be divisible" in said
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("option", "problem"),
    [("norm=batch", "statistics over the batch"), ("ffn=moe", "balances its experts over the batch")],
)
def test_an_option_that_needs_the_whole_batch_cannot_be_spread(tiny, option, problem):
    with pytest.raises(errors.ConfigError, match=problem):
        check_world(tiny(option, "train.batch_size=4"), Place(0, 2))


def test_a_refusal_by_the_first_process_is_printed_once_and_ends_the_others_with_its_status(tiny_run, tmp_path):
    statuses, said = together(2, tiny_run("train.steps=auto"), tmp_path)
    assert statuses == {0: 2, 1: 2}, said
    assert said.count("error: the run would read its text") == 1 and said.count("error: ") == 1
    assert "Traceback" not in said


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
    done = torchrun(["-m", "nexus_ablate", *overrides, f"runs_dir={tmp_path / 'many'}"])
    assert done.returncode == 0, done.stderr
    assert furthest(the_run(tmp_path / "many"), the_run(tmp_path / "one")) < SAME


# What a launcher says


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Place()),
        (dict(zip(TORCHRUN, "0101", strict=True)), Place()),
        (dict(zip(TORCHRUN, "3412", strict=True)), Place(3, 4, 1, 2)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, Place()),  # tasks that are runs of their own
    ],
)
def test_the_place_is_what_torchrun_says(monkeypatch, variables, expected):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert place() == expected


@pytest.mark.parametrize("variables", [{"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_variables_that_do_not_fit_together_are_a_configuration_error(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(errors.ConfigError, match="torchrun"):
        place()


@pytest.mark.parametrize(
    ("words", "what"),
    [("-m seed=0,1", "a multirun"), ("-m experiment=study", "a multirun"), ("study norms", "a study")],
)
def test_what_starts_processes_of_its_own_is_refused_under_torchrun(tmp_path, monkeypatch, capsys, words, what):
    monkeypatch.chdir(tmp_path)
    for name, value in zip(TORCHRUN, "0202", strict=True):
        monkeypatch.setenv(name, value)
    assert main(words.split()) == 2
    assert f"{what} starts processes of its own" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_process_has_its_own_rows_and_together_they_are_the_batch():
    import numpy as np

    batch = np.arange(24).reshape(12, 2)
    parts = [World(Place(rank, 4), torch.device("cpu")).rows(batch) for rank in range(4)]
    np.testing.assert_array_equal(np.concatenate(parts), batch)
