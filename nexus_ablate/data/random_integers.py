"""Random whole numbers that are the same on every machine, from the raw bits of a stream with a name.

Only a generator's raw bits are the same in all versions of numpy; its distributions aren't.
"""

from __future__ import annotations

import hashlib

import numpy as np


def random_stream(name: str, step: int = 0) -> np.random.Philox:
    """The stream of random bits that a name stands for; each step has a stream of its own."""
    key = np.frombuffer(hashlib.sha256(name.encode()).digest()[:16], dtype="<u8")
    return np.random.Philox(key=key, counter=np.array([0, 0, step, 0], dtype=np.uint64))


def below(bits: np.random.Philox, limit: int | np.ndarray, shape: int | tuple[int, ...]) -> np.ndarray:
    """int64 numbers from 0 to below `limit`, a number or one for each."""
    return (bits.random_raw(shape) % np.asarray(limit).astype(np.uint64)).astype(np.int64)


def weighted(bits: np.random.Philox, ends: np.ndarray) -> np.ndarray:
    """(N,) int64 indices, each drawn with the weights of a row, given their cumulated sums (N, V)."""
    drawn = below(bits, ends[:, -1], len(ends))
    return (ends <= drawn[:, None]).sum(1)
