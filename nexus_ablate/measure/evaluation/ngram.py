"""An n-gram model of the training tokens: what can be known without looking further back than two tokens."""

from __future__ import annotations

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

    def log_probabilities(self, inputs: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """(A, V) log-probabilities of the token after each chosen input.

        Args:
            inputs: (N, T) tokens.
            chosen: (N, T) bool, none of them in the first column.
        """
        row, column = np.nonzero(chosen)
        last, before = inputs[row, column], inputs[row, column - 1]
        parts = range(0, len(last), _ROWS)
        rows = [self._rows(last[start : start + _ROWS], before[start : start + _ROWS]) for start in parts]
        return np.log(np.concatenate(rows))

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
