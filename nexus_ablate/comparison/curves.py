"""Fast reading of what a comparison needs from metrics.jsonl: milliseconds for two thousand rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nexus_ablate.comparison.statistics import Array
from nexus_ablate.errors import UserError
from nexus_ablate.runs.formats import Count, Measured
from nexus_ablate.runs.record import damaged, parse_row, read_lines, read_rows

AXES = ("tokens", "flops", "seconds")


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

    def at(self, axis: str, budget: float) -> float:
        """The validation loss at a budget, linear between validations; NaN outside what was measured."""
        x = getattr(self, axis)
        if not len(x) or budget > x[-1] * (1 + 1e-9) or budget < x[0]:
            return float("nan")
        return float(np.interp(budget, x, self.val))

    def tokens_to(self, loss: float) -> float:
        """Tokens after which the validation loss first was this low, linear in between; NaN if it never was."""
        reached = np.nonzero(self.val <= loss)[0]
        if not len(reached):
            return float("nan")
        i = int(reached[0])
        if i == 0:
            return float(self.tokens[0])
        before, after = self.val[i - 1], self.val[i]
        share = (before - loss) / (before - after) if np.isfinite(before) else 1.0
        return float(self.tokens[i - 1] + share * (self.tokens[i] - self.tokens[i - 1]))


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
