"""Final validation losses by window of text: evaluation text is a sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from nexus_ablate.comparison.statistics import Array
from nexus_ablate.runs.formats import Measured
from nexus_ablate.runs.record import damaged, read_text

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
    if text is None:
        return None
    places, losses = [], []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        try:
            window = _WINDOW.decode(line)
        except (msgspec.MsgspecError, RecursionError):
            form = "no window with its block, offset, tokens and loss"
            raise damaged(path, f"line {number} is {form}") from None
        places.append((window.block, window.offset, window.tokens))
        losses.append(window.loss)
    windows = WindowLosses(np.array(places, dtype=np.int64), np.array(losses, dtype=float))  # None becomes NaN
    blocks, offsets, tokens = windows.places.T
    if (np.diff(blocks) < 0).any() or (np.diff(offsets) <= 0).any() or not tokens.all():
        raise damaged(path, "the windows are not in order")
    return windows
