"""Tokenize text once into memory-mapped files: a cache that is built aside, renamed into place, never used if damaged.

    <cache>/<key>/  train.npy  val.npy  val-prose.npy  tokenizer.json  manifest.json

The cache is `$NEXUS_ABLATE_CACHE`, `$XDG_CACHE_HOME/nexus-ablate` or `~/.cache/nexus-ablate`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nexus_ablate.config.options import Option
from nexus_ablate.data.batches import eval_windows
from nexus_ablate.data.corpus import DATA, Corpus, head
from nexus_ablate.data.tokenizer import (
    BPE_TRAINING_CHARACTERS,
    BpeTokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    load_tokenizer,
    parse_tokenizer,
    read_tokenizer_file,
)
from nexus_ablate.errors import ConfigError, StorageError

FORMAT = 1
TOKENIZER_KEYS = ("tokenizer", "bpe_vocab")
"""The keys of a data option that its corpus doesn't take."""

_HASHED_BYTES = 64 * 2**20  # of larger files only the size is checked
_CHUNK = 2**20
_ANSWERED = 4096  # windows of a split whose answers are counted


@dataclass(frozen=True)
class TokenizedData:
    """A corpus as tokens.

    Attributes:
        name: The data option.
        fingerprint: sha256 (hex) of corpus and tokenizer, part of a run's identity.
        train: (N,) uint16 or uint32, memory-mapped.
        val: Validation sets, each (N,) as `train`; the first is "val".
        tokenizer: Text to ids and back.
        unigram_bpb: Bits per byte of "val" under the add-one frequencies of the training tokens.
        bytes_per_token: Mean over "val".
        period: Tokens from the start of a sequence to the start of the next. Windows begin at multiples of it.
        corpus: Where the tokens come from.
    """

    name: str
    fingerprint: str
    train: np.ndarray
    val: dict[str, np.ndarray]
    tokenizer: Tokenizer
    unigram_bpb: float
    bytes_per_token: float
    period: int = 1
    corpus: Corpus | None = None

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def answers(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """The function that says which targets of windows the loss counts (`Corpus.answers`); None: all of them."""
        return self.corpus.answers if self.corpus and self.corpus.scores_answers else None

    @property
    def token_bytes(self) -> np.ndarray:
        """(V,) float64, UTF-8 bytes that each token stands for."""
        return self.tokenizer.token_bytes


def prepare(option: Option, cache_dir: Path | None = None, context: int = 128) -> TokenizedData:
    """The tokens of a data option, from the cache; added to it first if needed.

    Args:
        option: An option of the group `data`.
        cache_dir: Replaces the default cache.
        context: Tokens per sequence; each split must have at least two more.

    Raises:
        ConfigError: The data cannot be read or is too short.
        StorageError: The cache cannot be written.
    """
    corpus, fingerprint = _identify(option, context)
    root = cache_dir or default_cache_dir()
    final = root / _hash([FORMAT, fingerprint])[:32]
    data = _open(final, option.name)
    if data is None:
        with _storage(root):
            data = _build(final, option, corpus, fingerprint, context)
    _require_length(option.name, {"train": len(data.train), **{k: len(v) for k, v in data.val.items()}}, context)
    if data.vocab_size < 2:
        got, fix = f"a vocabulary of {data.vocab_size}", "give a text of several characters, or data.tokenizer=bytes"
        raise ConfigError(f"data={option.name} has one distinct token: there is nothing to predict", got, fix)
    data = dataclasses.replace(data, period=corpus.period, corpus=corpus)
    return _of_answers(data, context) if data.answers else data


def _of_answers(data: TokenizedData, context: int) -> TokenizedData:
    """The same data, with the unigram loss and the bytes per token of the answers alone."""
    assert data.answers is not None
    counts = {}
    for split, tokens in (("train", data.train), ("val", data.val["val"])):
        windows = eval_windows(tokens, context, _ANSWERED * context, data.period)
        counts[split] = np.bincount(windows[:, 1:][data.answers(windows)], minlength=data.vocab_size)
    unigram_bpb, bytes_per_token = _unigram(counts["train"], counts["val"], data.token_bytes)
    return dataclasses.replace(data, unigram_bpb=unigram_bpb, bytes_per_token=bytes_per_token)


def _unigram(train: np.ndarray, val: np.ndarray, token_bytes: np.ndarray) -> tuple[float, float]:
    """Bits per byte of validation tokens under the add-one frequencies of training tokens, and bytes per token.

    Args:
        train, val: (V,) counts of the tokens.
    """
    n_bytes = val @ token_bytes
    bits = -(val @ np.log2((train + 1) / (train.sum() + len(train))))
    return float(bits / n_bytes), float(n_bytes / val.sum())


def fingerprint_of(option: Option, context: int = 128) -> str:
    """The `fingerprint` that `prepare(option)` will have. Tokenizes nothing and writes nothing.

    Raises:
        ConfigError: The data is missing, empty, unreadable or certainly too short.
    """
    return _identify(option, context)[1]


def vocabulary_size(option: Option) -> int:
    """The size of the vocabulary (bpe: at most), without tokenizing or writing anything."""
    if option.keys["tokenizer"] == "bpe":
        return option.keys["bpe_vocab"]
    own = {key: value for key, value in option.keys.items() if key not in TOKENIZER_KEYS}
    return _make_tokenizer(option, DATA.build(Option(option.name, own))).vocab_size


def default_cache_dir() -> Path:
    """The folder of token files unless another is given."""
    if chosen := os.environ.get("NEXUS_ABLATE_CACHE"):
        return Path(os.path.expanduser(chosen))
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nexus-ablate"


def _identify(option: Option, context: int) -> tuple[Corpus, str]:
    needed = TOKENIZER_KEYS if option.keys.get("tokenizer") != "char" else TOKENIZER_KEYS[:1]
    missing = [key for key in needed if key not in option.keys]
    if missing:
        fix = "copy their lines from conf/data/files.yaml"
        raise ConfigError(f"data={option.name}: its YAML lacks keys", ", ".join(missing), fix)
    kind = option.keys["tokenizer"]
    if kind in ("bytes", "char"):
        tokenizer = [kind]
    elif kind == "bpe":
        tokenizer = [kind, option.keys["bpe_vocab"], BPE_TRAINING_CHARACTERS]
    else:
        source = read_tokenizer_file(Path(os.path.expanduser(kind)))
        parse_tokenizer(source, kind)  # a bad file is refused here
        tokenizer = ["file", hashlib.sha256(source.encode()).hexdigest()]
    own = {key: value for key, value in option.keys.items() if key not in TOKENIZER_KEYS}
    corpus = DATA.build(Option(option.name, own))
    corpus.check(context)
    return corpus, _hash([corpus.fingerprint(), tokenizer])


def _make_tokenizer(option: Option, corpus: Corpus) -> Tokenizer:
    kind = option.keys["tokenizer"]
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "char" and corpus.characters:
        return CharTokenizer(corpus.characters)
    if kind == "char":
        limit = corpus.token_limit  # one token is one character
        train = corpus.train_texts() if limit is None else head(corpus.train_texts(), limit)
        return CharTokenizer.train([train, *_val_sets(corpus).values()])
    if kind == "bpe":
        return BpeTokenizer.train(corpus.train_texts(), option.keys["bpe_vocab"])
    return load_tokenizer(Path(os.path.expanduser(kind)))


def _val_sets(corpus: Corpus) -> dict[str, Iterator[str]]:
    return {"val": corpus.val_texts(), **corpus.extra_val()}


# -------------------------------------------------------------------------------------------------------------- writing


def _build(final: Path, option: Option, corpus: Corpus, fingerprint: str, context: int) -> TokenizedData:
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.with_name(f".{final.name}-{secrets.token_hex(8)}")
    aside.mkdir()
    try:
        tokenizer = _make_tokenizer(option, corpus)
        tokenizer.save(aside)
        train = _write_tokens(aside / "train.npy", corpus.train_texts(), tokenizer, corpus.token_limit)
        val = {
            name: _write_tokens(aside / _val_file(name), texts, tokenizer) for name, texts in _val_sets(corpus).items()
        }
        _require_length(option.name, {"train": train.sum(), **{k: v.sum() for k, v in val.items()}}, context)
        unigram_bpb, bytes_per_token = _unigram(train, val["val"], tokenizer.token_bytes)
        body = {
            "fingerprint": fingerprint,
            "val": list(val),
            "unigram_bpb": unigram_bpb,
            "bytes_per_token": bytes_per_token,
            "files": {path.name: _file_facts(path) for path in sorted(aside.iterdir())},
        }
        aside.joinpath("manifest.json").write_text(json.dumps({"sha256": _hash(body), "body": body}, indent=1))
        for path in aside.iterdir():
            _sync(path)
        built = _open(aside, option.name)
        if built is None:
            raise StorageError(f"{aside} does not contain what was written", "other content", "check the disk")
        return _publish(aside, final, option.name) or built
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _publish(aside: Path, final: Path, name: str) -> TokenizedData | None:
    """Rename `aside` to `final` and replace a damaged one; a valid one that another process put there is kept."""
    while True:
        try:
            os.rename(aside, final)
            return None
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if data := _open(final, name):
            return data
        damaged = aside.with_name(f"{aside.name}-damaged")
        with contextlib.suppress(FileNotFoundError):  # another process moved it first
            os.rename(final, damaged)
            shutil.rmtree(damaged)


def _write_tokens(path: Path, texts: Iterable[str], tokenizer: Tokenizer, limit: int | None = None) -> np.ndarray:
    """Write documents as one .npy of token ids while they are read; returns the (V,) counts of the ids."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    with open(path, "wb") as file:
        _write_header(file, dtype, 0)
        for chunk in _chunks(_documents(texts, tokenizer, limit)):
            chunk = chunk[: None if limit is None else limit - counts.sum()]
            file.write(chunk.astype(dtype).data)
            counts += np.bincount(chunk, minlength=tokenizer.vocab_size)
        file.seek(0)
        _write_header(file, dtype, int(counts.sum()))
    return counts


def _write_header(file: Any, dtype: np.dtype, length: int) -> None:  # the same size for every length
    facts = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, facts)


def _documents(texts: Iterable[str], tokenizer: Tokenizer, limit: int | None) -> Iterator[np.ndarray]:
    """The documents that hold the first `limit` tokens; a vocabulary made from these may lack characters of others."""
    length = 0
    for index, text in enumerate(texts):
        if limit is not None and length >= limit:
            return
        if index:
            yield tokenizer.separator
        ids = tokenizer.encode(text)
        length += len(ids)
        yield ids


def _chunks(arrays: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """The same ids in pieces of about a million."""
    waiting: list[np.ndarray] = []
    length = 0
    for array in arrays:
        waiting.append(array)
        length += len(array)
        if length >= _CHUNK:
            yield np.concatenate(waiting)
            waiting, length = [], 0
    if waiting:
        yield np.concatenate(waiting)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _storage(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "free some space there, make it writable, or point NEXUS_ABLATE_CACHE to another directory"
        raise StorageError(f"the token cache {root} cannot be written", str(error), fix) from error


# -------------------------------------------------------------------------------------------------------------- reading


def _open(directory: Path, name: str) -> TokenizedData | None:
    """The tokens in a cache directory; None if it is missing or damaged."""
    try:
        manifest = json.loads(directory.joinpath("manifest.json").read_bytes())
        body = manifest["body"]
        if manifest["sha256"] != _hash(body):
            return None
        if any(_file_facts(directory / file) != facts for file, facts in body["files"].items()):
            return None
        return TokenizedData(
            name=name,
            fingerprint=body["fingerprint"],
            train=np.load(directory / "train.npy", mmap_mode="r"),
            val={val: np.load(directory / _val_file(val), mmap_mode="r") for val in body["val"]},
            tokenizer=load_tokenizer(directory),
            unigram_bpb=body["unigram_bpb"],
            bytes_per_token=body["bytes_per_token"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _file_facts(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        whole = size <= _HASHED_BYTES
        return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest() if whole else None}


def _val_file(name: str) -> str:
    return "val.npy" if name == "val" else f"val-{name}.npy"


def _require_length(name: str, lengths: Mapping[str, int], context: int) -> None:
    for split, length in lengths.items():
        if length < context + 2:
            problem = f"data={name} is too short: {length} tokens in {split}, {context + 2} needed"
            raise ConfigError(problem, f"model.context={context}", "give more text or choose a smaller model.context")


def _hash(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
