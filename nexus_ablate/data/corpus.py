"""Sources of text: a corpus has training and validation documents, and a fingerprint of both."""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
import os
import shlex
import sys
import sysconfig
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import final

import numpy as np

from nexus_ablate.config.options import Registry
from nexus_ablate.data.tables import column_texts, is_table
from nexus_ablate.errors import ConfigError, did_you_mean

DATA: Registry[Corpus] = Registry("data")
STDLIB_VAL_SHARE = 0.05
_NOT_CORPUS = {"test", "tests", "idle_test", "__pycache__", "pydoc_data"}


class Corpus(ABC):
    """Documents for training and for validation, in a fixed order; no document is empty."""

    token_limit: int | None = None
    """How many training tokens are kept, from the start; None keeps all."""
    period: int = 1
    """Tokens from the start of a sequence to the start of the next. Training windows begin at multiples of it."""
    characters: str = ""
    """The vocabulary of `tokenizer=char`, sorted by code point; "": the characters that the text has."""
    scores_answers: bool = False
    """Whether the loss counts only some targets, the `answers`."""
    chosen_by_user: bool = False
    """Whether the text is the user's own choice, so that copies in it are worth a warning."""

    @abstractmethod
    def check(self, context: int) -> None:
        """Refuse data that certainly can't be used. Tokenizes nothing, writes nothing, needs no network.

        Args:
            context: Tokens per sequence.

        Raises:
            ConfigError: The data is missing, empty, unreadable or certainly too short.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 (hex) over everything that determines the text and its split.

        Raises:
            ConfigError: The text cannot be read.
        """

    @abstractmethod
    def train_texts(self) -> Iterator[str]:
        """The training documents."""

    @abstractmethod
    def val_texts(self) -> Iterator[str]:
        """The validation documents."""

    def extra_val(self) -> dict[str, Iterator[str]]:
        """Further validation sets by name."""
        return {}

    def answers(self, windows: np.ndarray) -> np.ndarray:
        """(N, T) bool: which targets of (N, T + 1) windows are answers; without a task, all of them."""
        return np.ones((len(windows), windows.shape[1] - 1), dtype=bool)


@final
@DATA.register("stdlib")
class StdlibCorpus(Corpus):
    """Source files of the running interpreter's standard library, one document per file.

    Whole files go to validation (by the hash of their path), so training and validation share none. Only modules in
    `sys.stdlib_module_names` are used, without a distribution's additions and the paths of its build. Each process
    lists the files and computes their fingerprint once.
    """

    def check(self, context: int) -> None:
        if not self._paths:
            raise ConfigError(
                "data=stdlib found no source of the standard library", str(self._root), "choose data=files or data=hub"
            )

    def fingerprint(self) -> str:
        return _stdlib_fingerprint(self._root)

    def train_texts(self) -> Iterator[str]:
        return self._texts(validation=False)

    def val_texts(self) -> Iterator[str]:
        return self._texts(validation=True)

    def extra_val(self) -> dict[str, Iterator[str]]:
        return {"prose": _prose()}

    @property
    def _root(self) -> Path:
        return Path(sysconfig.get_paths()["stdlib"])

    @property
    def _paths(self) -> list[Path]:
        return _stdlib_paths(self._root)

    def _texts(self, validation: bool) -> Iterator[str]:
        for path in self._paths:
            bucket = hashlib.sha256(path.relative_to(self._root).as_posix().encode()).digest()[0]
            if (bucket < 256 * STDLIB_VAL_SHARE) == validation:
                with tokenize.open(path) as file:  # uses the encoding that the file declares
                    text = file.read()
                if text:
                    yield text


@cache
def _stdlib_paths(root: Path) -> list[Path]:
    tops = [root / name for name in sorted(sys.stdlib_module_names - _NOT_CORPUS)]
    paths = [top.with_suffix(".py") for top in tops if top.with_suffix(".py").is_file()]
    paths += [path for top in tops if top.is_dir() for path in top.rglob("*.py")]
    paths = [path for path in paths if not _NOT_CORPUS.intersection(path.relative_to(root).parts)]
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


@cache
def _stdlib_fingerprint(root: Path) -> str:
    digest = hashlib.sha256(f"stdlib, validation {STDLIB_VAL_SHARE}".encode())
    for path in _stdlib_paths(root):
        digest.update(_framed(path.relative_to(root).as_posix().encode()) + _framed(path.read_bytes()))
    for document in _prose():
        digest.update(_framed(document.encode()))
    return digest.hexdigest()


def _prose() -> Iterator[str]:
    """The documentation that comes with the interpreter, one document per topic."""
    from pydoc_data.topics import topics

    return (topics[name] for name in sorted(topics))


@final
@DATA.register("files")
class FilesCorpus(Corpus):
    """The user's files in their order; the last characters are validation.

    A UTF-8 file is one document, without a byte order mark and with every line end read as `\\n`; of a table, each row
    of `column` is one. A single text is split as in nanoGPT: `text[:int(n * 0.9)]` and `text[int(n * 0.9):]`.
    """

    chosen_by_user = True

    def __init__(self, *, files: list[str], column: str, val_fraction: float) -> None:
        self._paths = [Path(os.path.expanduser(name)) for name in files]
        self._column = column
        self._val_fraction = val_fraction

    def check(self, context: int) -> None:
        for split, documents in (("training", self._split[0]), ("validation", self._split[1])):
            separators = max(len(documents) - 1, 0)
            most = sum(len(text.encode()) for text in documents) + separators  # a token has at least one byte
            if most < context + 2:
                names = ",".join(str(path) for path in self._paths)
                raise ConfigError(
                    f"data.files is too short: {most} bytes of {split} text, at least {context + 2} tokens needed",
                    names,
                    "give more text or choose a smaller model.context",
                )

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"files, validation {self._val_fraction!r}".encode())
        for text in self._documents:
            digest.update(_framed(text.encode()))
        return digest.hexdigest()

    def train_texts(self) -> Iterator[str]:
        return iter(self._split[0])

    def val_texts(self) -> Iterator[str]:
        return iter(self._split[1])

    @cached_property
    def _documents(self) -> list[str]:
        if not self._paths:
            raise ConfigError("data=files needs at least one file", "data.files=[]", "data.files=[my.txt]")
        seen: set[str] = set()
        for path in self._paths:
            place = os.path.realpath(path)  # unlike Path.resolve, it accepts a link that leads to itself
            if place in seen:  # validation would contain text that was trained on
                raise ConfigError("data.files names a file twice", str(path), "name each file once")
            seen.add(place)
        documents = []
        for path in self._paths:
            documents += _read_documents(path, self._column)
        return documents

    @cached_property
    def _split(self) -> tuple[list[str], list[str]]:
        left = int(sum(map(len, self._documents)) * (1 - self._val_fraction))
        train, val = [], []
        for text in self._documents:
            train.append(text[:left])
            val.append(text[left:])
            left = max(left - len(text), 0)
        return [text for text in train if text], [text for text in val if text]


def head(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The first whole documents that together reach `characters`; reads no further document from an iterator."""
    total = 0
    for text in texts:
        yield text
        total += len(text)
        if total >= characters:
            return


_ENCODED = {
    b"\x1f\x8b": ("gzip", "gunzip -k {path}"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d {path}"),
    b"BZh91AY": ("bzip2", "bunzip2 -k {path}"),
    b"\xfd7zXZ": ("xz", "unxz -k {path}"),
    b"PK\x03\x04": ("zip", "unzip {path}"),
    codecs.BOM_UTF16_LE: ("UTF-16", "iconv -f UTF-16 -t UTF-8 {path} > {stem}.utf8{suffix}"),
    codecs.BOM_UTF16_BE: ("UTF-16", "iconv -f UTF-16 -t UTF-8 {path} > {stem}.utf8{suffix}"),
}
"""How a file begins that is compressed or in another encoding, what that is called, and what makes it UTF-8 text."""


def _read_documents(path: Path, column: str) -> list[str]:
    if path.is_file():
        _check_encoding(path)
        if is_table(path):
            documents = column_texts(path, column)
            if not documents:
                raise ConfigError("data.files names a table without text", f"{path}, column {column}", "leave it out")
            return documents
    return [_read_text(path)]


def _check_encoding(path: Path) -> None:
    """Raises:
    ConfigError: The file is compressed, or text in UTF-16.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(8)
    except OSError:
        return  # said when the whole file is read
    for beginning, (kind, command) in _ENCODED.items():
        if start.startswith(beginning):
            stem, suffix = shlex.quote(str(path.with_suffix(""))), path.suffix
            fix = command.format(path=shlex.quote(str(path)), stem=stem, suffix=suffix)
            raise ConfigError(f"data.files takes UTF-8 text, but this file is {kind}", str(path), fix)


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            names = ",".join(itertools.islice((str(p) for p in sorted(path.glob("*.txt"))), 3))
            fix = f"name its files: data.files=[{names}]" if names else "name its files, or data=hub data.path=FOLDER"
            raise ConfigError("data.files takes files, but this is a directory", str(path), fix)
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*")])
        fix = str(path.with_name(near)) if near else f"a path from {Path.cwd()}"
        raise ConfigError("data.files names a file that does not exist", str(path), fix) from error
    except UnicodeDecodeError as error:
        got = f"{path}, byte {error.start}"
        raise ConfigError("data.files takes UTF-8 text, but this file isn't", got, "convert it to UTF-8") from error
    except OSError as error:
        got, fix = f"{path}: {error.strerror}", "name a readable text file"
        raise ConfigError("data.files names a file that cannot be read", got, fix) from error
    if "\0" in text:
        raise ConfigError("data.files takes text, but this file is binary", str(path), "name a text file")
    if not text:
        raise ConfigError("data.files names an empty file", str(path), "leave it out")
    return text


def hash_facts(facts: object) -> str:
    """sha256 (hex) of plain values as JSON."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data
