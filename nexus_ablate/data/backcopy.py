"""Bigram-Backcopy: generated sequences on which attention sinks appear within seconds. The same on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import final

import numpy as np

from nexus_ablate.data.corpus import DATA, Corpus
from nexus_ablate.data.random_integers import random_stream, weighted
from nexus_ablate.errors import ConfigError

FORMAT = 1
"""Increased whenever the same keys would give other sequences."""
BEGIN = "\n"
_SYMBOLS = "".join(chr(code) for code in range(33, 127))
_BLOCK = 4096  # sequences drawn at a time


@final
@DATA.register("bigram_backcopy")
class BackCopyCorpus(Corpus):
    """A begin token, a non-trigger token, then x(t+1) = x(t-1) after a trigger, else x(t+1) drawn from P(. | x(t)).

    Guo et al. 2024 (Active-dormant attention heads), arXiv:2410.13835, section 2, and the authors' code
    (GuoTianYu2000/Active-Dormant-Attention, BBM/data.py, class bbm). Triggers are the most frequent tokens. The authors
    estimate P from a text with 65 distinct characters. Here P is generated with about the same entropy (2.45 nats): row
    i has weights u^6 / (j + 1), u uniform, and tokens are numbered by their frequency under P. All numbers are
    integers, so that the sequences are the same on every machine.
    """

    def __init__(self, *, symbols: int, triggers: int, length: int, sequences: int, chain: int) -> None:
        self._symbols, self._triggers, self._length = symbols, triggers, length
        self._sequences, self._chain = sequences, chain
        self.period = length + 1
        self.characters = BEGIN + _SYMBOLS[:symbols]

    def check(self, context: int) -> None:
        if self._triggers >= self._symbols:
            got = f"{self._triggers} of {self._symbols}"
            raise ConfigError("data.triggers must be fewer than data.symbols", got, "fewer triggers or more symbols")
        if context > self._length:
            raise ConfigError(
                "model.context exceeds the sequences of data=bigram_backcopy",
                f"{context} > {self._length}",
                f"data.length={context}, or a shorter model.context",
            )

    def fingerprint(self) -> str:
        keys = (FORMAT, self._symbols, self._triggers, self._length, self._sequences, self._chain)
        return hashlib.sha256(f"bigram_backcopy {keys}".encode()).hexdigest()

    def train_texts(self) -> Iterator[str]:
        yield self._text("train", self._sequences)

    def val_texts(self) -> Iterator[str]:
        yield self._text("val", max(1, self._sequences // 16))

    def answers(self, windows: np.ndarray) -> np.ndarray:
        """(N, T) bool: the targets after a trigger, which repeat the token before it."""
        answers = (windows[:, :-1] >= 1) & (windows[:, :-1] <= self._triggers)  # token 0 begins the sequence
        answers[:, :2] = False
        return answers

    def transitions(self) -> np.ndarray:
        """(V, V) integer weights of the next token (columns) after each token (rows), the most frequent token first."""
        u = self._bits("chain").random_raw((self._symbols, self._symbols)) >> np.uint64(58)
        weights = u.astype(np.int64) ** 6 // np.arange(1, self._symbols + 1) + 1
        share = (weights << 20) // weights.sum(1, keepdims=True)
        frequency = np.full(self._symbols, 2**30 // self._symbols)
        for _ in range(100):
            frequency = frequency @ share >> 20
        order = np.argsort(-frequency, kind="stable")
        return weights[order][:, order]

    def draw(self, split: str, sequences: int) -> np.ndarray:
        """The tokens after the begin token, (sequences, length)."""
        weights = self.transitions()
        after = weights.cumsum(1)
        first = weights.sum(0)
        first[: self._triggers] = 0
        bits = self._bits(split)
        x = np.empty((sequences, self._length), dtype=np.int64)
        for start in range(0, sequences, _BLOCK):
            rows = x[start : start + _BLOCK]
            for t in range(self._length):
                edges = after[rows[:, t - 1]] if t else np.broadcast_to(first.cumsum(), (len(rows), self._symbols))
                rows[:, t] = weighted(bits, edges)
                if t > 1:
                    rows[:, t] = np.where(rows[:, t - 1] < self._triggers, rows[:, t - 2], rows[:, t])
        return x

    def _text(self, split: str, sequences: int) -> str:
        symbols = np.array(list(_SYMBOLS))[self.draw(split, sequences)]
        return BEGIN + BEGIN.join("".join(row) for row in symbols)

    def _bits(self, use: str) -> np.random.Philox:
        return random_stream(f"bigram_backcopy {self._chain} {use}")
