"""Text to token ids and back, and the number of bytes of text in each token."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, final

import numpy as np

from nexus_ablate.data.corpus import head
from nexus_ablate.errors import ConfigError, unknown

FILE_NAME = "tokenizer.json"
TRAINED = ("bytes", "char", "bpe")
BPE_TRAINING_CHARACTERS = 50_000_000
_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>")
_OTHERS = "data.tokenizer=bytes, char or bpe, or another file"
_PROBES = ("Two  Words,\n\tTabs — naïve 漢字 🙂 <|endoftext|>\n", "  spaces", "x")
"""Texts that a tokenizer must give back."""
_OTHER_FORMS = "Cafe\u0301 \u2460 \ufb01ve \u2026 \u212bngstro\u0308m \uff46ull 10\u00bd \u2581"
"""Characters that Unicode's normal forms replace (letters with a separate accent, ligatures, wide letters), and ▁."""
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_PIECE_CHARACTERS = 2**20
_WORD = re.compile(r"(?<=\S)[ \n](?=\S)")


class Tokenizer(ABC):
    """Text to ids and back without loss.

    Attributes:
        vocab_size: Number of token ids (V).
        token_bytes: (V,) float64, UTF-8 bytes of text per token. The token between two documents counts as the newline
            that joins them in other tokenizers, so that bits per byte compare between tokenizers.
        separator: (1,) or more ids between two documents.
    """

    vocab_size: int
    token_bytes: np.ndarray
    separator: np.ndarray

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """The (N,) ids of a text.

        Raises:
            ConfigError: A character of the text is not in the vocabulary.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of some ids; bytes that aren't valid UTF-8 become U+FFFD."""

    @abstractmethod
    def to_json(self) -> str:
        """The tokenizer as JSON, for `load_tokenizer`."""

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json` into a directory."""
        directory.joinpath(FILE_NAME).write_text(self.to_json(), encoding="utf-8")


@final
class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte."""

    def __init__(self) -> None:
        self.vocab_size = 256
        self.token_bytes = np.ones(256)
        self.separator = self.encode("\n")

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return bytes(map(int, ids)).decode("utf-8", "replace")

    def to_json(self) -> str:
        return json.dumps({"type": "bytes"})


@final
class CharTokenizer(Tokenizer):
    """One token per character, numbered by code point, as in nanoGPT's shakespeare_char.

    Args:
        characters: The vocabulary, sorted.
    """

    def __init__(self, characters: str) -> None:
        self._characters = characters
        self._codes = _code_points(characters)
        self.vocab_size = len(characters)
        self.token_bytes = np.array([len(c.encode()) for c in characters], dtype=np.float64)
        self.separator = self.encode("\n") if "\n" in characters else np.zeros(0, dtype=np.int64)

    @classmethod
    def train(cls, document_sets: Iterable[Iterable[str]]) -> CharTokenizer:
        """The sorted set of all characters, plus the newline if two documents of a set have to be joined."""
        characters: set[str] = set()
        for documents in document_sets:
            for index, text in enumerate(documents):
                characters |= set(text)
                if index:
                    characters.add("\n")
        return cls("".join(sorted(characters)))

    def encode(self, text: str) -> np.ndarray:
        codes = _code_points(text)
        ids = np.minimum(np.searchsorted(self._codes, codes), self.vocab_size - 1)
        missing = np.flatnonzero(self._codes[ids] != codes)
        if len(missing):
            got, fix = repr(text[missing[0]]), "data.tokenizer=bytes, or a tokenizer made from this text"
            raise ConfigError("a character is not in the tokenizer's vocabulary", got, fix)
        return ids

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return "".join(self._characters[int(i)] for i in ids)

    def to_json(self) -> str:
        return json.dumps({"type": "char", "characters": self._characters})


_LARGEST_VOCABULARY = 2**24
"""Sixty times the largest published one (262,144 of Gemma 3): arrays with an entry for each id must fit in memory."""


class FileTokenizer(Tokenizer):
    """A tokenizer in the format of the `tokenizers` library: byte-level (GPT-2, Llama 3, Qwen), or with byte fallback
    (Llama 2, Mistral, Gemma).

    A space that it puts in front of every document counts as the newline that joins documents in other tokenizers, and
    the token between two documents as nothing. One that changes some characters refuses texts that hold any.

    Args:
        source: The content of a tokenizer.json.
        name: Its name in errors.

    Raises:
        ConfigError: It isn't in that format, it loses text, or its tokens have no length in bytes.
    """

    def __init__(self, source: str, name: str = FILE_NAME) -> None:
        from tokenizers import Tokenizer as Backend

        try:
            self._backend = Backend.from_str(source)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError("data.tokenizer is not a valid tokenizer.json", f"{name}: {error}", _OTHERS) from error
        self._backend.encode_special_tokens = True  # "<|endoftext|>" in a document is ordinary text
        self._backend.no_truncation()
        self._backend.no_padding()
        self._changes_text = False
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > _LARGEST_VOCABULARY:
            got = f"{name}: an id of {self.vocab_size - 1}, and {len(vocabulary)} tokens"
            raise ConfigError("data.tokenizer has an id that no vocabulary reaches", got, _OTHERS)
        self.token_bytes = np.zeros(self.vocab_size)
        added = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        byte_level = "ByteLevel" in str(json.loads(self._backend.to_str())["decoder"])
        for token, index in vocabulary.items():
            self.token_bytes[index] = _bytes_of(token, byte_level and token not in added)
        more = {self.token_bytes[self.encode(probe)].sum() - len(probe.encode()) for probe in _PROBES}
        end = next((vocabulary[token] for token in _ENDS_OF_TEXT if token in vocabulary), None)
        lost = any(self.decode(self.encode(probe)) != probe for probe in _PROBES)
        if lost or more not in ({0}, {1}) or (more == {1} and end is None):
            fix = "use one that does, such as GPT-2's, or data.tokenizer=bpe"
            raise ConfigError("data.tokenizer does not reproduce the bytes of a text", name, fix)
        self._changes_text = self.decode(self.encode(_OTHER_FORMS)) != _OTHER_FORMS
        self.separator = self.encode("\n") if end is None else np.array([end])
        if end is not None:
            self.token_bytes[end] = 1 - more.pop()

    def encode(self, text: str) -> np.ndarray:
        ids = np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        if self._changes_text and (decoded := self.decode(ids)) != text:
            place = next((i for i, (a, b) in enumerate(zip(text, decoded, strict=False)) if a != b), len(decoded))
            got = f"{text[place : place + 20]!r} becomes {decoded[place : place + 20]!r}"
            fix = "data.tokenizer=bytes or bpe, or the text in Unicode's normal form C"
            raise ConfigError("the tokenizer changes this text, so bits per byte would be wrong", got, fix)
        return ids

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_json(self) -> str:
        return self._backend.to_str()


@final
class BpeTokenizer(FileTokenizer):
    """Byte-level byte-pair encoding, trained here."""

    @classmethod
    def train(cls, texts: Iterator[str], vocab_size: int) -> BpeTokenizer:
        """Merges of the first 50 million characters; the same text gives the same merges.

        Args:
            texts: Documents.
            vocab_size: Most tokens: 256 bytes, `<|endoftext|>`, and merges up to this number.
        """
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers, trainers

        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[_ENDS_OF_TEXT[0]],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(head(texts, BPE_TRAINING_CHARACTERS), trainer)
        return cls(backend.to_str())

    def encode(self, text: str) -> np.ndarray:
        encode = super().encode
        return np.concatenate([encode(piece) for piece in _pieces(text)])


def _pieces(text: str) -> Iterator[str]:
    """Pieces of a text that have the ids of the whole one, because each begins where ByteLevel begins a word.

    The library needs 160 bytes per character of a piece.
    """
    start = 0
    while word := _WORD.search(text, start + _PIECE_CHARACTERS):
        yield text[start : word.start()]
        start = word.start()
    yield text[start:]


def _bytes_of(token: str, byte_level: bool) -> int:
    """Bytes of text in a token: one per character if byte-level; else a space is written as ▁ and a byte as <0x0A>."""
    if byte_level:
        return len(token)
    return 1 if _BYTE.fullmatch(token) else len(token.replace("▁", " ").encode())


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer that was saved in a directory, or in a tokenizer.json.

    Raises:
        ConfigError: The file doesn't exist or doesn't hold a tokenizer.
    """
    return parse_tokenizer(read_tokenizer_file(path), str(path))


def read_tokenizer_file(path: Path) -> str:
    """The content of a tokenizer.json.

    Args:
        path: The file or its directory.

    Raises:
        ConfigError: There is no readable file.
    """
    try:
        return (path / FILE_NAME if path.is_dir() else path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        if path.name == str(path) and not path.suffix:  # a word, not a path
            raise unknown("data.tokenizer is neither a tokenizer nor a file", str(path), TRAINED) from error
        raise ConfigError("data.tokenizer names a file that does not exist", str(path), _OTHERS) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("data.tokenizer names a file that cannot be read", f"{path}: {error}", _OTHERS) from error


def parse_tokenizer(source: str, name: str) -> Tokenizer:
    """The tokenizer that a tokenizer.json describes.

    Args:
        source: The content of the file.
        name: Its name in errors.

    Raises:
        ConfigError: It doesn't describe a tokenizer.
    """
    try:
        facts: Any = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise ConfigError("data.tokenizer is not a valid tokenizer.json", f"{name}: {error}", _OTHERS) from error
    kind = facts.get("type") if isinstance(facts, dict) else None
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "char":
        return CharTokenizer(_characters(facts.get("characters"), name))
    return FileTokenizer(source, name)


def _characters(characters: object, name: str) -> str:
    """The vocabulary in a tokenizer.json of characters.

    Raises:
        ConfigError: It isn't a text of different characters in the order of their code points.
    """
    try:
        if isinstance(characters, str) and characters and characters == "".join(sorted(set(characters))):
            _code_points(characters)
            return characters
    except UnicodeEncodeError:  # half of a pair of surrogates
        pass
    problem = "data.tokenizer is not a vocabulary of sorted characters"
    raise ConfigError(problem, f"{name}: {characters!r:.60}", _OTHERS)


def token_kinds(tokenizer: Tokenizer) -> dict[str, set[int]]:
    """Ids of the tokens that end a line (`newline`: they contain "\\n") or a sentence (`full_stop`: "." and spaces)."""
    kinds: dict[str, set[int]] = {"newline": set(), "full_stop": set()}
    for index in range(tokenizer.vocab_size):
        text = tokenizer.decode([index])
        if "\n" in text:
            kinds["newline"].add(index)
        elif text.strip() == ".":
            kinds["full_stop"].add(index)
    return kinds


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
