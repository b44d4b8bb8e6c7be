"""Reading runs: each directory is a `Run` with a result, or left out with the reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType
from numpy.typing import NDArray

from nexus_ablate.comparison.statistics import Array
from nexus_ablate.errors import UserError, printable
from nexus_ablate.provenance import code_of, source_hash
from nexus_ablate.runs import SETTLED, RunRecord, read_run
from nexus_ablate.runs.contradiction import contradiction
from nexus_ablate.runs.formats import INIT, Count, Measured
from nexus_ablate.runs.reading import (
    damaged,
    last_row,
    leaves,
    parse_row,
    read_document,
    read_lines,
    read_rows,
    read_text,
    runs_and_strangers,
)
from nexus_ablate.study.endpoint import Endpoint


@dataclass(frozen=True)
class LeftOut:
    """A directory that gives no result to the table, and why."""

    path: Path
    reason: str
    arm: str = ""
    seed: int | None = None
    state: str = ""


# ------------------------------------------------------------------------------------------------------- metrics.jsonl


class _Row(msgspec.Struct):
    """What every row of metrics.jsonl is read for; the other measures are skipped, which takes most of the time."""

    step: Count
    val: Measured | UnsetType = msgspec.field(default=UNSET, name="val/loss")
    train: Measured | UnsetType = msgspec.field(default=UNSET, name="train/loss")
    batch_hash: str = ""


_ROW = msgspec.json.Decoder(_Row)


@dataclass(frozen=True)
class Curves:
    """The losses of a run in nats per token; a non-finite one is NaN.

    Attributes:
        tokens, flops, seconds: Where each validation stood.
        val: Validation losses.
        train: Every logged training loss, in order.
        batches: By step, a hash of all batches up to there.
        last: The last row.
    """

    tokens: Array
    flops: Array
    seconds: Array
    val: Array
    train: Array
    batches: dict[int, str] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)


def read_curves(path: Path) -> Curves:
    """The curves in a metrics.jsonl; empty if there is no file. An incomplete last line is left out.

    Rows with a validation and the last one are checked as a whole.

    Raises:
        UserError: The file is damaged.
    """
    rows, train, batches, line = [], [], {}, b""
    try:
        for chunk in read_lines(path):
            for line in chunk.split(b"\n")[:-1]:
                row = _ROW.decode(line)
                if row.batch_hash:
                    batches[row.step] = row.batch_hash
                if row.train is not UNSET:
                    train.append(row.train)
                if row.val is not UNSET:
                    rows.append(parse_row(path, line))
        last = parse_row(path, line) if line else {}
    except (msgspec.MsgspecError, RecursionError, UserError) as error:
        for _ in read_rows(path):  # whose error names the line
            pass
        raise damaged(path, str(error)) from None
    names = ("tokens", "flops", "seconds", "val/loss")
    tokens, flops, seconds, val = (np.array([row[name] for row in rows], dtype=float) for name in names)
    return Curves(tokens, flops, seconds, val, np.array(train, dtype=float), batches, last)  # None has become NaN


# ---------------------------------------------------------------------------------------------------- evaluation.jsonl

_Place = Annotated[int, Meta(ge=0, lt=10**15)]


class _Window(msgspec.Struct):
    """A line of evaluation.jsonl."""

    block: _Place
    offset: _Place
    tokens: _Place
    loss: Measured


_WINDOW = msgspec.json.Decoder(_Window)


@dataclass(frozen=True)
class WindowLosses:
    """The final validation losses by window of text, which is a sample.

    Attributes:
        places: (windows, 3) block, offset of the first token in the validation set, and targets of each window.
        by_block: (blocks,) mean loss of each block of neighbouring windows, in nats per token; NaN: not finite.
        shares: (blocks,) of the tokens, in each block.
    """

    places: NDArray[np.int64]
    by_block: Array
    shares: Array

    @property
    def tokens(self) -> int:
        """Targets of all windows."""
        return int(self.places[:, 2].sum())

    @property
    def reach(self) -> int:
        """Tokens of the validation set up to the end of the last window."""
        _, offset, targets = self.places[-1]
        return int(offset + targets)


def read_windows(path: Path) -> WindowLosses | None:
    """The losses in an evaluation.jsonl; None where there is no file.

    Raises:
        UserError: The file is damaged.
    """
    text = read_text(path)
    if text is None:
        return None
    rows = []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        try:
            rows.append(msgspec.structs.astuple(_WINDOW.decode(line)))
        except (msgspec.MsgspecError, RecursionError):
            raise damaged(path, f"line {number} is no window with its block, offset, tokens and loss") from None
    table = np.array(rows, dtype=float)  # None becomes NaN
    places, losses = table[:, :3].astype(np.int64), table[:, 3]
    blocks, offsets, tokens = places.T
    if (np.diff(blocks) < 0).any() or (np.diff(offsets) <= 0).any() or not tokens.all():
        raise damaged(path, "the windows are not in order")
    _, block = np.unique(blocks, return_inverse=True)
    of_block = np.bincount(block, tokens)
    return WindowLosses(places, np.bincount(block, tokens * losses) / of_block, of_block / tokens.sum())


# ---------------------------------------------------------------------------------------------------- a run's directory


@dataclass(frozen=True)
class Run:
    """A run with a result: finished, or diverged, which is a result too.

    Attributes:
        init: Hash of the normal numbers behind each parameter's first value and its shape, by parameter name.
        figures: Every number of the summary by name, those of evaluations as `evaluation/figure`.
        probed: The last row of probes.jsonl; {} where there is none.
        windows: Final validation losses by window of text; None where the run kept none.
    """

    record: RunRecord
    curves: Curves
    init: dict[str, tuple[str, tuple[int, ...]]]
    figures: dict[str, float]
    probed: dict[str, Any]
    windows: WindowLosses | None

    def figure(self, name: str) -> float:
        """A number of the finished run at its end, a list by head as its mean; NaN where there is none."""
        if self.state != "finished":
            return float("nan")
        value = self.figures.get(name, self.probed.get(name, self.curves.last.get(name)))
        values = value if isinstance(value, list) else [value]
        numbers = [v for v in values if isinstance(v, int | float)]
        return float(np.mean(numbers)) if numbers and len(numbers) == len(values) else float("nan")

    def on_scale(self, endpoint: Endpoint) -> float:
        """An endpoint on its scale; NaN where there is none."""
        return float(endpoint.on_scale(lambda name: np.array([self.figure(name)]))[0])

    def left_out(self, reason: str) -> LeftOut:
        """The run as one that gives no result to the table."""
        return LeftOut(self.path, reason, self.arm, self.seed, self.state)

    @property
    def path(self) -> Path:
        return self.record.path

    @property
    def state(self) -> str:
        return self.record.state

    @property
    def arm(self) -> str:
        """The arm of its study; runs at other learning rates than the arm's own lie in other folders."""
        return str(self.env.get("arm") or self.record.arm)

    @property
    def seed(self) -> int:
        assert self.record.seed is not None
        return self.record.seed

    @property
    def rate(self) -> float:
        """Its learning rate."""
        return float((self.config.get("optim") or {}).get("lr", "nan"))

    @property
    def has_loss(self) -> bool:
        """Whether it ended with a finite loss, however high."""
        return self.state == "finished" and self.summary.get("val_loss", 0.0) is not None

    @property
    def ended_above_start(self) -> bool:
        """Whether it ended above its loss at the start."""
        return len(self.curves.val) > 1 and bool(self.curves.val[-1] > self.curves.val[0])

    @property
    def code(self) -> dict[str, str] | None:
        """The hash of each file that made it, plugins among them; None where it did not record them."""
        return code_of(self.env)

    @cached_property
    def source(self) -> str:
        """One hash of the computing code that made it, plugins aside."""
        return source_hash(self.env.get("source") or {})

    @property
    def env(self) -> dict[str, Any]:
        return self.record.env or {}

    @property
    def config(self) -> dict[str, Any]:
        return self.record.config or {}

    @property
    def summary(self) -> dict[str, Any]:
        return self.record.summary or {}


def read_folder(folder: Path) -> tuple[list[Run], list[LeftOut]]:
    """Every run in a folder: a run, an arm or a study.

    Raises:
        UserError: The folder does not exist.
    """
    paths, strangers = runs_and_strangers([folder])
    runs: list[Run] = []
    left_out = [LeftOut(path, reason) for path, reason in strangers.items()]
    sources: dict[str, Any] = {}
    for path in paths:
        result = read(path)
        if isinstance(result, LeftOut):
            left_out.append(result)
            continue
        if result.code:  # the hashes of a thousand runs by one code are kept once
            result.env["source"] = sources.setdefault(result.source, result.env["source"])
        runs.append(result)
    return runs, left_out


def read(path: Path) -> Run | LeftOut:
    """The run in a directory, or why it is left out."""
    try:
        record = read_run(path)
        if record.seed is None:
            return LeftOut(path, "not named like a run (s<seed>-<hash>)", record.arm, None, record.state)
        if record.state not in SETTLED:
            arm = str((record.env or {}).get("arm") or record.arm)
            return LeftOut(path, _progress(record), arm, record.seed, record.state)
        run = Run(
            record=record,
            curves=read_curves(path / "metrics.jsonl"),
            init=_initial_values(path / "init.json"),
            figures=_figures(record.summary or {}),
            probed=last_row(path / "probes.jsonl"),
            windows=read_windows(path / "evaluation.jsonl"),
        )
        reason = contradiction(record)
    except UserError as error:
        damage = f"damaged: {error.problem.removeprefix(f'{path}/')}"
        if error.got:
            damage += f" ({error.got})"
        return LeftOut(path, printable(damage, 200), path.parent.name, state="damaged")
    return run.left_out(f"contradicts itself: {reason}") if reason else run


def _progress(record: RunRecord) -> str:
    """The state of a run without a result, how far it came and why it stopped."""
    step, steps = record.status.get("step"), ((record.config or {}).get("resolved") or {}).get("steps")
    text = record.state
    if step is not None:
        text += f" at step {step} of {steps}" if steps else f" at step {step}"
    if reason := record.status.get("reason"):
        text += f": {reason}"
    return printable(text, 200)


def _initial_values(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The contents of init.json.

    Raises:
        UserError: It is damaged.
    """
    recorded = read_document(path, INIT) or {}
    return {name: (value["z"], tuple(value["shape"])) for name, value in recorded.items() if isinstance(value, dict)}


def _figures(summary: dict[str, Any]) -> dict[str, float]:
    """The numbers of a summary.json."""
    figures = {}
    for names, value in leaves(summary):
        if isinstance(value, int | float) and not isinstance(value, bool):
            figures["/".join(names)] = float(value)
    return figures
