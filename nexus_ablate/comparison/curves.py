"""Fast reading of what a comparison needs from metrics.jsonl.

Two thousand rows take milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nexus_ablate.comparison.statistics import Array
from nexus_ablate.errors import UserError
from nexus_ablate.runs.formats import Count, Measured
from nexus_ablate.runs.reading import damaged, parse_row, read_lines, read_rows


class _Row(msgspec.Struct):
    """What every row of metrics.jsonl is read for; the other measures are skipped, which takes most of the time."""

    step: Count
    val: Measured | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="val/loss")
    train: Measured | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="train/loss")


_ROW = msgspec.json.Decoder(_Row)


@dataclass(frozen=True)
class Curves:
    """The losses of a run in nats per token; a non-finite one is NaN.

    Attributes:
        tokens, flops, seconds: Where each validation stood.
        val: Validation losses.
        train: Every logged training loss, in order.
        steps: The step of every row, in order.
        last: The last row.
    """

    tokens: Array
    flops: Array
    seconds: Array
    val: Array
    train: Array
    steps: Array
    last: dict[str, Any] = field(default_factory=dict)


def read_curves(path: Path) -> Curves:
    """The curves in a metrics.jsonl; empty if there is no file. An incomplete last line is left out.

    Rows with a validation and the last one are checked as a whole.

    Raises:
        UserError: The file is damaged.
    """
    rows, train, steps, line = [], [], [], b""
    try:
        for chunk in read_lines(path):
            for line in chunk.split(b"\n")[:-1]:
                row = _ROW.decode(line)
                steps.append(row.step)
                if row.train is not msgspec.UNSET:
                    train.append(row.train)
                if row.val is not msgspec.UNSET:
                    rows.append(parse_row(path, line))
        last = parse_row(path, line) if line else {}
    except (msgspec.MsgspecError, RecursionError, UserError) as error:
        for _ in read_rows(path):  # whose error names the line
            pass
        raise damaged(path, str(error)) from None

    def column(name: str) -> Array:
        return np.array([row[name] for row in rows], dtype=float)  # None becomes NaN

    return Curves(
        tokens=column("tokens"),
        flops=column("flops"),
        seconds=column("seconds"),
        val=column("val/loss"),
        train=np.array(train, dtype=float),
        steps=np.array(steps, dtype=float),
        last=last,
    )
