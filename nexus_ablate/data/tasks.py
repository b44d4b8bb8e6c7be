"""Tasks with known answers, generated: recall, induction and copying. The same on every machine."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import ClassVar, final

import numpy as np

from nexus_ablate.data.corpus import DATA, Corpus
from nexus_ablate.data.random_integers import below, random_stream, weighted
from nexus_ablate.errors import ConfigError

FORMAT = 1
"""Increased whenever the same keys would give other sequences."""
BLANK = 0
"""The token of no meaning in recall, and the separator of a copy."""
_CHARACTERS = "".join(map(chr, [*range(32, 127), *range(0x4E00, 0xA000)]))
"""One per token: a space, then ASCII, then CJK."""
_BLOCK = 2048  # sequences drawn at a time


@dataclass(kw_only=True, eq=False)
class TaskCorpus(Corpus):
    """Abstract: sequences of symbols, some of which (the answers) follow from the ones before them.

    Symbols are the tokens 0 .. V - 1. A sequence has `length` + 1 of them, of which the last is only a target.

    Args:
        symbols: Size of the vocabulary (V).
        length: Inputs per sequence (T).
        sequences: Training sequences; a sixteenth as many are for validation.
        score: Whether the loss counts the `answers` alone or `all` targets.
    """

    name: ClassVar[str]
    symbols: int
    length: int
    sequences: int
    score: str

    def __post_init__(self) -> None:
        self.period = self.length + 1
        self.scores_answers = self.score == "answers"
        self.characters = _CHARACTERS[: self.symbols]

    @abstractmethod
    def mistake(self) -> ConfigError | None:
        """Why no such sequence exists; None where it does."""

    @abstractmethod
    def rows(self, bits: np.random.Philox, count: int) -> np.ndarray:
        """(count, T + 1) tokens."""

    @abstractmethod
    def answers(self, windows: np.ndarray) -> np.ndarray:
        """(N, T) bool: which targets of (N, T + 1) sequences are answers."""

    def check(self, context: int) -> None:
        if mistake := self.mistake():
            raise mistake
        if context != self.length:
            raise ConfigError(
                f"data={self.name} has sequences of data.length tokens, and model.context differs",
                f"data.length={self.length} model.context={context}",
                f"data.length={context}",
            )

    def fingerprint(self) -> str:
        # its default is left out, as it was before another score was a loss of its own
        drawn = {key: value for key, value in asdict(self).items() if (key, value) != ("score", "answers")}
        return hashlib.sha256(f"{self.name} {FORMAT} {sorted(drawn.items())}".encode()).hexdigest()

    def train_texts(self) -> Iterator[str]:
        yield self._text("train", self.sequences)

    def val_texts(self) -> Iterator[str]:
        yield self._text("val", max(1, self.sequences // 16))

    def draw(self, use: str, sequences: int) -> np.ndarray:
        """(sequences, T + 1) tokens of the stream of a use: `train`, `val` or an evaluation's."""
        bits = random_stream(f"{self.name} {use}")
        starts = range(0, sequences, _BLOCK)
        return np.concatenate([self.rows(bits, min(_BLOCK, sequences - start)) for start in starts])

    def _text(self, use: str, sequences: int) -> str:
        codes = np.frombuffer(self.characters.encode("utf-32-le"), dtype="<u4")
        return codes[self.draw(use, sequences)].tobytes().decode("utf-32-le")


@final
@DATA.register("recall")
@dataclass(kw_only=True, eq=False)
class RecallCorpus(TaskCorpus):
    """Multi-query associative recall: P pairs of a key and a value, then each key once more, followed by its value.

    Arora et al. 2023 (Zoology), arXiv:2312.04927, and the authors' code (HazyResearch/zoology,
    zoology/data/multiquery_ar.py): keys are 1 .. V/2 - 1, values V/2 .. V - 1, neither comes twice in a sequence. A
    key is asked for at the first input after the pairs plus twice its gap; gaps are drawn without replacement with
    weights (1 + gap)^(power - 1). Here the value is the token after the queried key, where the authors' model sees
    filler and has the value as its label, and random filler never is a key of the same sequence.
    """

    name = "recall"
    pairs: int
    power: float
    filler: str

    def mistake(self) -> ConfigError | None:
        if 4 * self.pairs > self.length:
            got = f"4 * {self.pairs} > {self.length}"
            fix = f"data.pairs={self.length // 4}"
            return ConfigError("data=recall has no room for its pairs and queries", got, fix)
        keys = self.symbols // 2 - 1
        if self.pairs > keys:
            got = f"{self.pairs} pairs, {keys} keys"
            return ConfigError("data=recall has fewer keys than pairs", got, f"data.symbols={2 * self.pairs + 2}")
        return None

    def rows(self, bits: np.random.Philox, count: int) -> np.ndarray:
        first_value = self.symbols // 2
        keys = 1 + _distinct(bits, count, first_value - 1, self.pairs)
        values = first_value + _distinct(bits, count, self.symbols - first_value, self.pairs)
        asked = 2 * self.pairs + 2 * self.gaps(bits, count)
        x = np.zeros((count, self.length + 1), dtype=np.int64)
        if self.filler == "random":
            x = below(bits, self.symbols, x.shape)
            x[(x[:, :, None] == keys[:, None, :]).any(-1)] = BLANK
        x[:, 0 : 2 * self.pairs : 2] = keys
        x[:, 1 : 2 * self.pairs : 2] = values
        np.put_along_axis(x, asked, keys, axis=1)
        np.put_along_axis(x, asked + 1, values, axis=1)
        return x

    def gaps(self, bits: np.random.Philox, count: int) -> np.ndarray:
        """(count, P): half the distance from the end of the pairs to each key's query."""
        places = np.arange(1, (self.length - 2 * self.pairs) // 2 + 1)
        shares = places ** (self.power - 1.0)
        scale = min(2.0**32, 2.0**62 / shares.sum())  # their sum is an int64
        weights = np.tile((scale * shares).astype(np.int64), (count, 1))
        gaps = np.empty((count, self.pairs), dtype=np.int64)
        for column in range(self.pairs):
            gaps[:, column] = weighted(bits, weights.cumsum(1))
            weights[np.arange(count), gaps[:, column]] = 0
        return gaps

    def answers(self, windows: np.ndarray) -> np.ndarray:
        return self.sources(windows) >= 0

    def sources(self, windows: np.ndarray) -> np.ndarray:
        """(N, T) int: for each target that is an answer, the index of its key among the pairs; -1 elsewhere."""
        keys = windows[:, 0 : 2 * self.pairs : 2]
        sources = np.full((len(windows), windows.shape[1] - 1), -1)
        queries = windows[:, 2 * self.pairs : -1 : 2]
        same = queries[:, :, None] == keys[:, None, :]
        sources[:, 2 * self.pairs :: 2] = np.where(same.any(-1), same.argmax(-1), -1)
        return sources


@dataclass(kw_only=True, eq=False)
class RepetitionCorpus(TaskCorpus):
    """Abstract: what is repeated has a length drawn from [least, most]."""

    least: int
    most: int

    def _impossible_length(self, problem: str, got: str, longest: int) -> ConfigError | None:
        """The mistake in the lengths, if there is one; `problem` and `got` tell that `most` exceeds `longest`."""
        if self.most > longest:
            return ConfigError(problem, got, f"data.most={longest}")
        if self.least > self.most:
            return ConfigError("data.least exceeds data.most", f"{self.least} > {self.most}", f"data.least={self.most}")
        return None


@final
@DATA.register("induction")
@dataclass(kw_only=True, eq=False)
class InductionCorpus(RepetitionCorpus):
    """A segment of distinct symbols, repeated to the end of the sequence; its length is drawn from [least, most].

    Repeated random tokens, as in Olsson et al. 2022, arXiv:2209.11895. Since the length varies, no fixed distance leads
    to the answer: the token after the same token's last occurrence. The first token of the first repetition isn't an
    answer, because nothing announces it.
    """

    name = "induction"

    def mistake(self) -> ConfigError | None:
        longest = min(self.symbols, (self.length + 1) // 2)
        problem = "data.most is a segment's length, of distinct symbols, and the sequence has it twice"
        return self._impossible_length(problem, f"{self.most} > {longest}", longest)

    def rows(self, bits: np.random.Philox, count: int) -> np.ndarray:
        segments = _distinct(bits, count, self.symbols, self.most)
        lengths = self.least + below(bits, self.most - self.least + 1, (count, 1))
        return np.take_along_axis(segments, np.arange(self.length + 1) % lengths, axis=1)

    def answers(self, windows: np.ndarray) -> np.ndarray:
        lengths = 1 + (windows[:, 1:] == windows[:, :1]).argmax(1)
        return np.arange(windows.shape[1] - 1) >= lengths[:, None]


@final
@DATA.register("copy")
@dataclass(kw_only=True, eq=False)
class CopyCorpus(RepetitionCorpus):
    """A string of random symbols, a separator, and the same string again, filled up with separators.

    The string's length is drawn from [least, most]. After the task of Jelassi et al. 2024, arXiv:2402.01032.
    """

    name = "copy"

    def mistake(self) -> ConfigError | None:
        problem = "data.most is a string's length, and the sequence has it twice"
        return self._impossible_length(problem, f"2 * {self.most} > {self.length}", self.length // 2)

    def rows(self, bits: np.random.Philox, count: int) -> np.ndarray:
        strings = 1 + below(bits, self.symbols - 1, (count, self.most))
        lengths = self.least + below(bits, self.most - self.least + 1, (count, 1))
        place = np.arange(self.length + 1)
        copied = place - 1 - lengths  # index in the string of what stands after the separator
        index = np.where(copied < 0, place, copied)
        symbols = np.take_along_axis(strings, np.minimum(index, self.most - 1), axis=1)
        return np.where((copied == -1) | (index >= lengths), BLANK, symbols)

    def answers(self, windows: np.ndarray) -> np.ndarray:
        lengths = (windows == BLANK).argmax(1)[:, None]
        target = np.arange(1, windows.shape[1])
        return (target > lengths) & (target <= 2 * lengths)


def _distinct(bits: np.random.Philox, count: int, symbols: int, chosen: int) -> np.ndarray:
    """(count, chosen) different numbers below `symbols` in each row, by the first steps of a Fisher-Yates shuffle."""
    pool, rows = np.tile(np.arange(symbols, dtype=np.int32), (count, 1)), np.arange(count)
    for column in range(chosen):
        other = column + below(bits, symbols - column, count)
        pool[rows, column], pool[rows, other] = pool[rows, other], pool[rows, column]
    return pool[:, :chosen].astype(np.int64)
