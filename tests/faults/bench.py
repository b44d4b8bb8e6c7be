"""The bench of the fault tests: a run in this process or in a child, what it left, and the instants to break it at."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nexus_ablate.config.compose import compose
from nexus_ablate.data import Batches
from nexus_ablate.runs import files, find_runs, read_jsonl, read_run
from nexus_ablate.training.checkpoint import load_newest
from nexus_ablate.training.session import Outcome, train

CLOCK = {"seconds", "tokens_per_second", "mfu", "peak_memory_bytes"}


def sizes(sample: int, full: int, fast: bool = False) -> Any:
    """Parametrize `count`: the sample that CI takes, which may be in the fast tier, and the full size."""
    marks = [] if fast else [pytest.mark.slow]
    whole = pytest.param(full, marks=[pytest.mark.slow, pytest.mark.long])
    return pytest.mark.parametrize("count", [pytest.param(sample, marks=marks), whole])


def run(overrides: list[str]) -> Outcome:
    """The run, in this process."""
    return train(compose(overrides), overrides, quiet=True)


def child(action: Callable[[], object]) -> int:
    """The pid of a child that runs `action` in silence and ends with 0, or 1 where it raised."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            silence()
            action()
            status = 0
        finally:
            os._exit(status)
    return pid


def silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def ended(pid: int) -> int:
    """The exit status of a child; the negative number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def only(runs_dir: Path) -> Path:
    """The one run in a directory."""
    (path,) = find_runs([runs_dir])
    return path


def logged(path: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """A log without what the clock decides."""
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in read_jsonl(path / name)]


def weights(path: Path) -> dict[str, torch.Tensor]:
    loaded = load_newest(path / "checkpoints")
    assert loaded is not None
    return loaded.tensors["model"]


def result(path: Path) -> tuple[Any, ...]:
    """Everything that two equal runs share: logs, weights, and the summary but for its clocks."""
    summary = {k: v for k, v in (read_run(path).summary or {}).items() if "second" not in k and k not in CLOCK}
    tensors = {name: tensor.numpy().tobytes() for name, tensor in weights(path).items()}
    windows = (path / "evaluation.jsonl").read_bytes()
    return logged(path), logged(path, "probes.jsonl"), tensors, summary, windows


@contextmanager
def fresh(tmp_path: Path) -> Iterator[Path]:
    """An empty directory for runs, deleted at the end: hundreds of them are made."""
    path = tmp_path / "broken"
    shutil.rmtree(path, ignore_errors=True)
    yield path
    shutil.rmtree(path, ignore_errors=True)


CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "ftruncate")


def at_every_call(patch: pytest.MonkeyPatch, act: Callable[[str], None]) -> None:
    """Call `act` with the name of each call that changes the disk, before it is made; `write` takes part of the bytes.

    What Python's own file objects do inside is not seen.
    """

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            act(name)
            return call(*arguments, **options)

        return wrapped

    for name in CALLS:
        patch.setattr(os, name, watched(name, getattr(os, name)))
    patch.setattr(files, "_write", watched("write", lambda descriptor, data: os.write(descriptor, data[:4096])))


def at_step(patch: pytest.MonkeyPatch, act: Callable[[int], object]) -> None:
    """Call `act` with each step's number before its batch is drawn."""
    batch = Batches.batch

    def watched(self: Batches, step: int) -> Any:
        act(step)
        return batch(self, step)

    patch.setattr(Batches, "batch", watched)
