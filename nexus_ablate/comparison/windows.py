"""Final validation losses by window of text: evaluation text is a sample."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nexus_ablate.comparison.statistics import Array
from nexus_ablate.plain_data import LARGEST, UNREADABLE, strict_loads
from nexus_ablate.runs.record import damaged, read_text

_PLACE = re.compile(r'\{"block": ([0-9]{1,15}), "offset": ([0-9]{1,15}), "tokens": ([0-9]{1,15})')
_LOSS = re.compile(r', "loss": ([0-9]{1,15}\.[0-9]{1,25})\}\n')
_WRITTEN = re.compile(f"(?:{_PLACE.pattern}{_LOSS.pattern})++")


@dataclass(frozen=True)
class WindowLosses:
    """An evaluation.jsonl.

    Attributes:
        places: (windows, 3) block, offset of the first token in the validation set, and targets of each window.
        losses: (windows,) nats per token; a non-finite one is NaN.
    """

    places: NDArray[np.int64]
    losses: Array

    @property
    def mean(self) -> float:
        """Nats per token over all windows: the run's val_loss."""
        return float(np.average(self.losses, weights=self.places[:, 2]))

    @property
    def tokens(self) -> int:
        """Targets of all windows."""
        return int(self.places[:, 2].sum())

    @property
    def by_block(self) -> Array:
        """(blocks,) mean loss of each block of neighbouring windows."""
        weighted = np.bincount(self._block, self.places[:, 2] * self.losses)
        return weighted / np.bincount(self._block, self.places[:, 2])

    @property
    def shares(self) -> Array:
        """(blocks,) of the tokens, in each block."""
        return np.bincount(self._block, self.places[:, 2]) / self.tokens

    @property
    def _block(self) -> NDArray[np.int64]:
        return np.unique(self.places[:, 0], return_inverse=True)[1]

    @property
    def reach(self) -> int:
        """Tokens of the validation set up to the end of the last window."""
        return int(self.places[-1, 1] + self.places[-1, 2])

    @property
    def everything(self) -> bool:
        """Whether the windows cover all text between the first and the last (except the token before a sequence)."""
        return bool((np.diff(self.places[:, 1]) <= self.places[:-1, 2] + 1).all())


def read_windows(path: Path) -> WindowLosses | None:
    """The losses in an evaluation.jsonl; None where there is no file.

    Raises:
        UserError: The file is damaged.
    """
    text = read_text(path)
    try:
        return None if text is None else _parse(text)
    except UNREADABLE as error:
        raise damaged(path, str(error)) from None


def _parse(text: str) -> WindowLosses:
    """Places and losses. This package's own form is split by two patterns; other text is parsed strictly."""
    if _WRITTEN.fullmatch(text):
        parts = _LOSS.split(text)
        places, losses = _places("".join(parts[::2])), np.array(parts[1::2], dtype=float)
    else:
        rows = [_row(number, line) for number, line in enumerate(text.removesuffix("\n").split("\n"), 1)]
        places = np.array([place for place, _ in rows], dtype=np.int64)
        losses = np.array([loss for _, loss in rows], dtype=float)  # None becomes NaN
    is_ordered = (np.diff(places[:, 0]) >= 0).all() and (np.diff(places[:, 1]) > 0).all()
    if not is_ordered or not places[:, 2].all():
        raise ValueError("the windows are not in order")
    return WindowLosses(places, losses)


@lru_cache(maxsize=16)
def _places(text: str) -> NDArray[np.int64]:
    """Parsed once for all runs of a study, which have the same windows."""
    return np.array(_PLACE.findall(text)).astype(np.int64)


def _row(number: int, line: str) -> tuple[list[int], float | None]:
    with contextlib.suppress(*UNREADABLE):
        row = strict_loads(line)
        place, loss = [row["block"], row["offset"], row["tokens"]], row["loss"]
        known = type(loss) in (int, float) and abs(loss) < LARGEST
        if all(type(n) is int and 0 <= n < 10**15 for n in place) and (known or loss is None):
            return place, loss
    raise ValueError(f"line {number} is no window with its block, offset, tokens and loss")
