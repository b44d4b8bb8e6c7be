"""Which tokens a step sees: a pure function of (seed, step), and the hashes that prove it."""

from __future__ import annotations

import hashlib

import numpy as np


class Batches:
    """Random windows of a token array, drawn with replacement.

    Args:
        tokens: (N,) of any integer type; memory-mapped is fine.
        seed: Decides the order; paired arms share it.
        batch_size: Windows in a batch (B).
        context: Tokens a window holds as input (T).
        period: Windows begin at its multiples.

    Raises:
        ValueError: When not even one window fits.
    """

    def __init__(self, tokens: np.ndarray, seed: int, batch_size: int, context: int, period: int = 1) -> None:
        self._windows = _windows(tokens, context)[::period]
        self._key = np.frombuffer(hashlib.sha256(f"{seed}/data".encode()).digest()[:16], dtype="<u8")
        self._batch_size = batch_size

    def batch(self, step: int) -> np.ndarray:
        """The (B, T+1) int64 windows of a step: inputs `[:, :-1]`, targets `[:, 1:]`."""
        # Raw bits, because numpy fixes them for all its versions and its distributions for none.
        generator = np.random.Philox(key=self._key, counter=np.array([0, 0, step, 0], dtype=np.uint64))
        starts = generator.random_raw(self._batch_size) % np.uint64(len(self._windows))
        return self._windows[starts.astype(np.int64)].astype(np.int64)


def eval_windows(tokens: np.ndarray, context: int, n_tokens: int, period: int = 1) -> np.ndarray:
    """The fixed windows of an evaluation: from the start, no target twice.

    Args:
        tokens: (N,) of any integer type.
        context: Tokens a window holds as input (T).
        n_tokens: Targets wanted; rounded up to whole windows, fewer where the tokens end.
        period: Windows begin at its multiples, one at each; 1: anywhere.

    Returns:
        (windows, T+1) int64; where they may begin anywhere, each with the token that the one before it ended with.

    Raises:
        ValueError: When not even one window fits.
    """
    stride = context if period == 1 else period
    return _windows(tokens, context)[::stride][: -(-n_tokens // context)].astype(np.int64)


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
    if len(tokens) < context + 1:
        raise ValueError(f"{len(tokens)} tokens hold no window of {context} + 1")
    return np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), context + 1)
