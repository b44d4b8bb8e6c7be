"""An n-gram model of the training tokens: what can be known without looking further back than two tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_TOKENS = 2**21
_PRIOR = 2.0
_ROWS = 1024  # positions at a time


class NGram:
    """A trigram model: the counts of each order are smoothed with the order below it, as `_PRIOR` more observations.

    MacKay & Peto 1995, "A hierarchical Dirichlet language model", with a fixed prior.

    Args:
        train: (N,) tokens, of which the first two million are counted.
        vocab_size: V.
    """

    def __init__(self, train: np.ndarray, vocab_size: int) -> None:
        self._tokens = np.asarray(train[:_TOKENS]).astype(np.int64)
        self._size = vocab_size
        counts = np.bincount(self._tokens, minlength=vocab_size) + 1.0
        self._unigram = counts / counts.sum()
        self._pairs = self._tokens[:-1] * vocab_size + self._tokens[1:]

    def log_probabilities(self, windows: np.ndarray, chosen: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Log-probabilities of the token after each chosen input, (R, V) for some at a time, and these tokens, (R,).

        Args:
            windows: (N, T + 1) tokens.
            chosen: (N, T) bool, none of them in the first column.
        """
        row, column = np.nonzero(chosen)
        for start in range(0, len(row), _ROWS):
            rows, columns = row[start : start + _ROWS], column[start : start + _ROWS]
            p_RV = self._rows(windows[rows, columns], windows[rows, columns - 1])
            yield np.log(p_RV), windows[rows, columns + 1]

    def _rows(self, last: np.ndarray, before: np.ndarray) -> np.ndarray:
        after_one = self._counts(self._tokens[:-1], self._tokens[1:], last)
        bigram = _smoothed(after_one, self._unigram)
        after_two = self._counts(self._pairs[:-1], self._tokens[2:], before * self._size + last)
        return _smoothed(after_two, bigram)

    def _counts(self, contexts: np.ndarray, following: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """(A, V): how often each token follows each wanted context."""
        known, index = np.unique(wanted, return_inverse=True)
        place = np.minimum(np.searchsorted(known, contexts), len(known) - 1)
        same = known[place] == contexts
        cells = place[same] * self._size + following[same]
        table = np.bincount(cells, minlength=len(known) * self._size)
        return table.reshape(len(known), self._size)[index]


def _smoothed(counts: np.ndarray, lower: np.ndarray) -> np.ndarray:
    return (counts + _PRIOR * lower) / (counts.sum(1, keepdims=True) + _PRIOR)
