"""Which tokens a step sees: a pure function of (seed, step), and the hashes that prove it."""

from __future__ import annotations

import hashlib

import numpy as np

from nexus_ablate.data.random_integers import below, random_stream

BLOCK_WINDOWS = 32
"""Fewest neighbouring windows in a block of validation text."""
LEAST_BLOCKS = 8
"""Fewest blocks: over fewer, the standard error itself is too uncertain (over 2 it is wrong by half in every second
case)."""


class Batches:
    """Random windows of a token array, drawn with replacement.

    Args:
        tokens: (N,) of any integer type; memory-mapped is fine.
        seed: Determines the order; paired arms share it.
        batch_size: Windows per batch (B).
        context: Input tokens per window (T).
        period: Windows begin at multiples of it.

    Raises:
        ValueError: The text is shorter than one window.
    """

    def __init__(self, tokens: np.ndarray, seed: int, batch_size: int, context: int, period: int = 1) -> None:
        self._windows = _windows(tokens, context)[::period]
        self._stream = f"{seed}/data"
        self._batch_size = batch_size

    def batch(self, step: int) -> np.ndarray:
        """The (B, T+1) int64 windows of a step: inputs `[:, :-1]`, targets `[:, 1:]`."""
        starts = below(random_stream(self._stream, step), len(self._windows), self._batch_size)
        return self._windows[starts].astype(np.int64)


def eval_places(length: int, context: int, n_tokens: int, period: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Where the windows of an evaluation begin: in blocks spread evenly from the first token to the last.

    A block has at least BLOCK_WINDOWS neighbouring windows, so that different blocks hold (nearly) independent text. If
    that gives fewer than LEAST_BLOCKS blocks, there are LEAST_BLOCKS shorter ones; with fewer windows than that, each
    window is a block.

    Args:
        length: Tokens of the validation set.
        context: Input tokens per window (T).
        n_tokens: Requested targets, rounded up to whole windows; a shorter set gives fewer.
        period: Windows begin at multiples of it, at most one at each; 1: at multiples of the context.

    Returns:
        (windows,) int64 index of each window's first token, ascending; (windows,) int64 block of each window, from 0.
        No token is the target of two windows.

    Raises:
        ValueError: The set is shorter than one window.
    """
    _require_window(length, context)
    stride = context if period == 1 else period
    available = (length - context - 1) // stride + 1
    count = min(-(-n_tokens // context), available)
    blocks = max(count // BLOCK_WINDOWS, min(count, LEAST_BLOCKS))
    windows = np.arange(count)
    block = windows * blocks // count
    skipped = block * (available - count) // max(blocks - 1, 1)
    return (windows + skipped) * stride, block


def eval_windows(tokens: np.ndarray, context: int, n_tokens: int, period: int = 1, factor: int = 1) -> np.ndarray:
    """The fixed windows of an evaluation, at `eval_places`; no token is a target twice.

    Args:
        tokens: (N,) of any integer type.
        context, n_tokens, period: As for `eval_places`.
        factor: Length of a window in contexts. Each window begins where one of a single context would.

    Returns:
        (windows, factor * T + 1) int64.

    Raises:
        ValueError: The set is shorter than one window.
    """
    starts, _ = eval_places(len(tokens), context, n_tokens, period)
    windows = _windows(tokens, factor * context)
    if factor > 1:
        free, kept = 0, []
        for start in starts:
            if free <= start < len(windows):
                kept.append(start)
                free = start + factor * context
        starts = np.array(kept)
    return windows[starts].astype(np.int64)


def hash_tokens(tokens: np.ndarray) -> str:
    """blake2b-128 (hex) of a token array's shape and values, whatever its integer type."""
    return chain("", tokens)


def chain(previous: str, batch: np.ndarray) -> str:
    """The batch hash after one more batch, so that runs of different length compare on their common prefix.

    Args:
        previous: The hash so far (hex), "" before the first batch.
        batch: Tokens of any shape and integer type.
    """
    digest = hashlib.blake2b(f"{previous} {batch.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(batch, dtype="<i8").data)
    return digest.hexdigest()


def _windows(tokens: np.ndarray, context: int) -> np.ndarray:
    _require_window(len(tokens), context)
    return np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), context + 1)


def _require_window(length: int, context: int) -> None:
    if length < context + 1:
        raise ValueError(f"{length} tokens are shorter than one window of {context} + 1")
