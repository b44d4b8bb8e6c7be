"""How much of a validation text also stands in the training text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

SHARE = 0.1
"""From here on it is worth a warning: prose and source code without copies repeat 4 to 8% of their passages."""
_SHORTEST = 32
_ENDS = re.compile(r"\n|(?<=[.!?]) ")


def passages(text: str) -> list[str]:
    """The lines and sentences of a document that are long enough to be its own; of a short document all of it."""
    return [passage for passage in _ENDS.split(text) if len(passage) >= _SHORTEST] or [text]


class Repeats:
    """The passages of a validation text, and those of them that were also in the training text."""

    def __init__(self) -> None:
        self._held_out: list[str] = []
        self._repeated: set[str] = set()

    def validation(self, texts: Iterable[str]) -> Iterator[str]:
        """The same documents; those of validation come before those of training."""
        for text in texts:
            self._held_out += passages(text)
            yield text

    def training(self, texts: Iterable[str]) -> Iterator[str]:
        """The same documents."""
        held_out = set(self._held_out)
        for text in texts:
            self._repeated |= held_out.intersection(passages(text))
            yield text

    @property
    def share(self) -> float:
        """Of the characters of validation."""
        characters = sum(map(len, self._held_out))
        repeated = sum(len(passage) for passage in self._held_out if passage in self._repeated)
        return repeated / max(characters, 1)


def repeated_share(train: Iterable[str], val: Iterable[str]) -> float:
    """The share of a validation text that also stands in a training text."""
    repeats = Repeats()
    for _ in repeats.validation(val):
        pass
    for _ in repeats.training(train):
        pass
    return repeats.share


def warnings(share: float) -> list[str]:
    """What to say of the share: nothing where it is no more than any text has."""
    if share < SHARE:
        return []
    return [f"{share:.0%} of the validation text also stands in the training text: its loss counts what was memorized"]
