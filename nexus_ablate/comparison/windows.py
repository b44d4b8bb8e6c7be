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
from nexus_ablate.runs.reading import damaged, read_text

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
        by_block: (blocks,) mean loss of each block of neighbouring windows.
        shares: (blocks,) of the tokens, in each block.
        tokens: Targets of all windows.
        reach: Tokens of the validation set up to the end of the last window.
        everything: The windows cover all text between the first and the last (except the token before a sequence).
    """

    places: NDArray[np.int64]
    losses: Array
    by_block: Array
    shares: Array
    tokens: int
    reach: int
    everything: bool


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
            form = "no window with its block, offset, tokens and loss"
            raise damaged(path, f"line {number} is {form}") from None
    table = np.array(rows, dtype=float)  # None becomes NaN
    places, losses = table[:, :3].astype(np.int64), table[:, 3]
    blocks, offsets, tokens = places.T
    if (np.diff(blocks) < 0).any() or (np.diff(offsets) <= 0).any() or not tokens.all():
        raise damaged(path, "the windows are not in order")
    _, block = np.unique(blocks, return_inverse=True)
    of_block = np.bincount(block, tokens)
    return WindowLosses(
        places=places,
        losses=losses,
        by_block=np.bincount(block, tokens * losses) / of_block,
        shares=of_block / tokens.sum(),
        tokens=int(tokens.sum()),
        reach=int(offsets[-1] + tokens[-1]),
        everything=bool((np.diff(offsets) <= tokens[:-1] + 1).all()),
    )
