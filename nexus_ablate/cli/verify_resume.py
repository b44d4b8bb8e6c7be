"""`nexus-ablate verify-resume OVERRIDES...`: proves on this machine that interrupted runs end like undisturbed ones.

Trains a short run undisturbed, then one that is stopped by a signal, then one that is killed, each in separate
processes, and compares the results.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import Flag, Verb
from nexus_ablate.config.compose import compose
from nexus_ablate.errors import ConfigError, UserError, printable
from nexus_ablate.runs import RunRecord, find_runs, read_run
from nexus_ablate.runs.record import last_row

STEPS = 40
CLOCKS = ("seconds", "tokens_per_second", "mfu", "peak_memory_bytes")
SHORT = (f"train.steps={STEPS}", "train.log_every=1", "train.eval_tokens=4096")
WAITS_SECONDS = 600
LAUNCHES = 5
"""Attempts to interrupt a run before it has ended; each further attempt interrupts earlier."""

VERB = Verb(
    "verify-resume",
    "prove here that interrupted runs end like undisturbed ones",
    "[KEY=VALUE ...]",
    (
        ("verify-resume", ""),
        ("verify-resume norm=layer model.dropout=0.1 train.precision=bf16", ""),
        ("verify-resume --keep proof model=mini train.steps=200", ""),
    ),
    (Flag("--keep", "DIR", "keep the three runs in a new directory", Path),),
    "Trains 40 steps (or train.steps) undisturbed, then stopped by SIGTERM, then killed. The same command resumes the "
    "interrupted ones. Compares weights, metrics and batches. Your runs are not touched. Exit status 0: identical (on "
    "a GPU: within the difference of two undisturbed runs). 1: different.",
)


@dataclass(frozen=True)
class Difference:
    """How an interrupted run differs from the undisturbed one.

    Attributes:
        place: The first row and key, tensor, or hash that differs; '' if none does.
        size: The largest relative difference of a number; infinite if the runs have different rows.
    """

    place: str
    size: float


def run(overrides: list[str], flags: dict[str, Any]) -> int:
    """Interrupt runs and compare them with an undisturbed one."""
    keep = flags.get("keep")
    chosen = [text.partition("=")[0] for text in overrides]
    own = [text for text in SHORT if text.partition("=")[0] not in chosen]
    if {"train.tokens", "train.flops"} & set(chosen):
        own = [text for text in own if not text.startswith("train.steps=")]
    command = [*own, *overrides, "tracker=files", "rerun=off"]
    config = compose(command)
    if config.resolved.steps is not None and config.resolved.steps < 8:
        raise ConfigError("too few steps to be interrupted", f"train.steps={config.resolved.steps}", "train.steps=40")
    if keep is not None and keep.exists():
        raise ConfigError("--keep makes a directory of its own", str(keep), "name one that does not exist")
    with _folder() as folder:
        try:
            return _prove(command, config.resolved.steps or STEPS, folder)
        finally:
            if keep is not None:
                shutil.move(folder, keep)
                print(f"kept in {printable(str(keep))}")


@contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder that is deleted even if this process is killed.

    A separate process deletes it when all writers of its standard input are gone: this process, and any run of it that
    is still going when this process is killed.
    """
    global _alive
    folder = Path(tempfile.mkdtemp(prefix="nexus_ablate-"))
    delete = ["sh", "-c", 'cat; rm -rf -- "$0"', str(folder)]
    deleting = subprocess.Popen(delete, stdin=subprocess.PIPE, start_new_session=True)
    assert deleting.stdin is not None
    _alive = (deleting.stdin.fileno(),)
    try:
        yield folder
    finally:
        _alive = ()
        deleting.communicate()


_alive: tuple[int, ...] = ()
"""Runs inherit this descriptor; the folder stays as long as one of them is alive."""


def _prove(command: list[str], steps: int, folder: Path) -> int:
    whole = _finished(command, folder / "undisturbed")
    device, threads = str((whole.summary or {})["device"]), (whole.summary or {})["threads"]
    command = [*command, f"train.threads={threads}"]  # another number would add in another order
    ways = {"stopped by SIGTERM": (signal.SIGTERM, steps // 2), "killed (kill -9)": (signal.SIGKILL, 2 * steps // 3)}
    results: dict[str, tuple[str, Difference]] = {}
    for number, (way, (sent, step)) in enumerate(ways.items()):
        runs_dir = folder / f"interrupted-{number}"
        every = f"train.checkpoint_every={max(2, steps // 5)}"
        at = _interrupt([*command, every], runs_dir, sent, step)
        record = _finished([*command, every], runs_dir)
        results[f"{way} after step {at}"] = "", compare(whole, record)
    tolerance = 0.0
    if device != "cpu":
        again = compare(whole, _finished(command, folder / "undisturbed again"))
        tolerance = again.size
        results["undisturbed, once more"] = "this GPU's own spread", again
    identical = [difference.place == "" for _, difference in results.values()]
    within = all(difference.size <= 2 * tolerance for _, difference in results.values())
    _show(results, whole, device, tolerance)
    return errors.OK if all(identical) or (device != "cpu" and within) else errors.BUG


def _process(command: list[str], runs_dir: Path, **options: Any) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "nexus_ablate", *command, f"runs_dir={runs_dir}"]
    alone = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=alone, pass_fds=_alive, **options)


def _finished(command: list[str], runs_dir: Path) -> RunRecord:
    """Train the run to its end."""
    process = _process(command, runs_dir)
    _, said = process.communicate()
    if process.returncode != errors.OK:
        sys.stderr.write(said)
        fix = "the same overrides without verify-resume"
        raise _Unproved("the run failed, so nothing can be compared", f"exit {process.returncode}", fix)
    return read_run(find_runs([runs_dir])[0])


class _Unproved(UserError):
    """The command could not decide."""

    status = errors.BUG


def _interrupt(command: list[str], runs_dir: Path, sent: signal.Signals, step: int) -> int:
    """Send a signal to the run when it has logged `step`, before it ends. Returns the last step that it logged."""
    for _ in range(LAUNCHES):
        process = _process(command, runs_dir)
        end = time.monotonic() + WAITS_SECONDS
        while process.poll() is None and _last_step(runs_dir) < step and time.monotonic() < end:
            time.sleep(0.002)
        process.send_signal(sent)
        process.communicate()
        if process.returncode in (errors.PREEMPTED, -sent):
            return _last_step(runs_dir)
        if process.returncode != errors.OK:
            fix = "the same overrides without verify-resume"
            raise _Unproved("the run ended by itself before it was interrupted", f"exit {process.returncode}", fix)
        shutil.rmtree(runs_dir)
        step //= 2
    raise _Unproved("the run ends before it can be interrupted", f"{step} steps", "more steps: train.steps=400")


def _last_step(runs_dir: Path) -> int:
    """The step of the last complete row; -1 if there is none."""
    logs = list(runs_dir.glob("*/*/*/metrics.jsonl"))
    return last_row(logs[0]).get("step", -1) if logs else -1


def compare(whole: RunRecord, other: RunRecord) -> Difference:
    """The first difference between two runs, in the order of a run's output, and the largest of all numbers."""
    first, size = "", 0.0
    for name, expected, actual in (
        ("metrics.jsonl", whole.metrics(), other.metrics()),
        ("probes.jsonl", whole.probes(), other.probes()),
    ):
        if [row["step"] for row in expected] != [row["step"] for row in actual]:
            return Difference(first or f"the steps of {name}", math.inf)
        for mine, yours in zip(expected, actual, strict=True):
            for key in [*mine, *(key for key in yours if key not in mine)]:
                if key not in CLOCKS and mine.get(key) != yours.get(key):
                    first = first or f"step {mine['step']}: {key}"
                    size = max(size, _relative(mine.get(key), yours.get(key)))
    expected, actual = _weights(whole), _weights(other)
    for name in sorted(expected.keys() | actual.keys()):
        if name not in expected or name not in actual or expected[name].shape != actual[name].shape:
            return Difference(first or f"the weight {name}", math.inf)
        if expected[name].numpy().tobytes() != actual[name].numpy().tobytes():
            first = first or f"the weight {name}"
            gap = (expected[name].float() - actual[name].float()).abs().max() / expected[name].float().abs().max()
            size = max(size, float(gap))
    return Difference(first, size)


def _relative(a: Any, b: Any) -> float:
    """The relative difference of two numbers or lists of numbers; infinite for anything else that differs."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max((_relative(x, y) for x, y in zip(a, b, strict=True) if x != y), default=0.0)
    if isinstance(a, int | float) and isinstance(b, int | float):
        return abs(a - b) / max(abs(a), abs(b))
    return math.inf


def _weights(record: RunRecord) -> dict[str, Any]:
    from nexus_ablate.training.checkpoint import load_newest

    loaded = load_newest(record.path / "checkpoints")
    return {} if loaded is None else loaded.tensors["model"]


def weights_hash(record: RunRecord) -> str:
    """sha256 over the names and bytes of all weights."""
    import hashlib

    digest = hashlib.sha256()
    for name, tensor in sorted(_weights(record).items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def _show(results: dict[str, tuple[str, Difference]], whole: RunRecord, device: str, tolerance: float) -> None:
    from rich.console import Console
    from rich.table import Table

    summary = whole.summary or {}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("run", "result", "first difference", "largest"):
        table.add_column(name, overflow="fold")
    for way, (note, difference) in results.items():
        verdict = "identical" if not difference.place else note or "different"
        table.add_row(
            way, verdict, printable(difference.place) or "-", f"{difference.size:.1e}" if difference.place else "0"
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    hashes = f"weights sha256 {weights_hash(whole)[:16]}, batches {summary['batch_hash'][:16]}"
    console.print(
        f"\n{summary['steps']} steps on {device}, {summary['threads']} threads; {hashes}\n"
        "compared: every number of metrics.jsonl and probes.jsonl but the clocks, and every bit of the weights"
    )
    if device != "cpu":
        console.print(
            "A GPU may add in another order each time, so two undisturbed runs can differ too: here by at most "
            f"{tolerance:.1e}, relative. An interrupted run passes if it differs by no more than twice that."
        )
