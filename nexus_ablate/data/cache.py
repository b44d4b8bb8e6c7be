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
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nexus_ablate.config.options import Option
from nexus_ablate.data.batches import eval_windows
from nexus_ablate.data.corpus import DATA, Corpus, FilesCorpus, hash_facts, head
from nexus_ablate.data.repeats import Repeats, repeated_share
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

FORMAT = 2
TOKENIZER_KEYS = ("tokenizer", "bpe_vocab")
"""The keys of a data option that its corpus doesn't take."""

_HASHED_BYTES = 64 * 2**20  # of larger files only the size is checked
_ABANDONED_SECONDS = 24 * 3600
_ANSWERED = 4096  # windows of a split whose answers are counted

MakeTokenizer = Callable[[Corpus], Tokenizer]


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
        corpus: Where the tokens come from.
        repeated: Share of the validation text that also stands in the training text, of a text that the user chose.
    """

    name: str
    fingerprint: str
    train: np.ndarray
    val: dict[str, np.ndarray]
    tokenizer: Tokenizer
    unigram_bpb: float
    corpus: Corpus
    repeated: float = 0.0

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def period(self) -> int:
        """Tokens from the start of a sequence to the start of the next. Windows begin at multiples of it."""
        return self.corpus.period

    @property
    def answers(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """The function that says which targets of windows the loss counts (`Corpus.answers`); None: all of them."""
        return self.corpus.answers if self.corpus.scores_answers else None

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
    corpus, make_tokenizer, fingerprint = _identify(option, context)
    root = cache_dir or default_cache_dir()
    final = _directory(root, fingerprint)
    data = _open(final, option.name, corpus)
    if data is None:
        try:
            data = _build(final, option.name, corpus, make_tokenizer, fingerprint, context)
        except OSError as error:
            fix = "free some space there, make it writable, or point NEXUS_ABLATE_CACHE to another directory"
            raise StorageError(f"the token cache {root} cannot be written", str(error), fix) from error
    _require_length(data, context)
    if data.vocab_size < 2:
        got, fix = f"a vocabulary of {data.vocab_size}", "give a text of several characters, or data.tokenizer=bytes"
        raise ConfigError(f"data={option.name} has one distinct token: there is nothing to predict", got, fix)
    if data.answers is None:
        return data
    counts = []
    for tokens in (data.train, data.val["val"]):
        windows = eval_windows(tokens, context, _ANSWERED * context, data.period)
        counts.append(np.bincount(windows[:, 1:][data.answers(windows)], minlength=data.vocab_size))
    return dataclasses.replace(data, unigram_bpb=_unigram_bpb(counts[0], counts[1], data.token_bytes))


def _unigram_bpb(train: np.ndarray, val: np.ndarray, token_bytes: np.ndarray) -> float:
    """Bits per byte of validation tokens under the add-one frequencies of training tokens, both as (V,) counts."""
    bits = -(val @ np.log2((train + 1) / (train.sum() + len(train))))
    return float(bits / max(val @ token_bytes, 1))  # no text at all is refused later


def cached(option: Option, context: int = 128) -> TokenizedData | None:
    """The tokens of a data option in the default cache; None where there are none. Tokenizes and writes nothing.

    Raises:
        ConfigError: As in `fingerprint_of`.
    """
    corpus, _, fingerprint = _identify(option, context)
    return _open(_directory(default_cache_dir(), fingerprint), option.name, corpus)


def repeated_text(option: Option, context: int) -> float:
    """The share of the validation text that also stands in the training text.

    It is 0 of a text that isn't the user's choice, of one from the Hub that hasn't been tokenized here yet, and of one
    that can't be read.
    """
    try:
        data, corpus = cached(option, context), _corpus_of(option)
    except ConfigError:
        return 0.0
    if data is not None:
        return data.repeated
    return repeated_share(corpus.train_texts(), corpus.val_texts()) if isinstance(corpus, FilesCorpus) else 0.0


def _directory(root: Path, fingerprint: str) -> Path:
    return root / hash_facts([FORMAT, fingerprint])[:32]


def fingerprint_of(option: Option, context: int = 128) -> str:
    """The `fingerprint` that `prepare(option)` will have. Tokenizes nothing and writes nothing.

    Raises:
        ConfigError: The data is missing, empty, unreadable or certainly too short.
    """
    return _identify(option, context)[2]


def vocabulary_size(option: Option) -> int:
    """The size of the vocabulary (bpe: at most), without tokenizing or writing anything."""
    if option.keys["tokenizer"] == "bpe":
        return option.keys["bpe_vocab"]
    _, make_tokenizer = _tokenizer_of(option)
    return make_tokenizer(_corpus_of(option)).vocab_size


def default_cache_dir() -> Path:
    """The folder of token files unless another is given."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("NEXUS_ABLATE_CACHE") or caches / "nexus-ablate").expanduser()


def _identify(option: Option, context: int) -> tuple[Corpus, MakeTokenizer, str]:
    """The corpus of a data option, the function that makes its tokenizer, and the fingerprint of both."""
    needed = TOKENIZER_KEYS if option.keys.get("tokenizer") != "char" else TOKENIZER_KEYS[:1]
    missing = [key for key in needed if key not in option.keys]
    if missing:
        fix = "copy their lines from conf/data/files.yaml"
        raise ConfigError(f"data={option.name}: its YAML lacks keys", ", ".join(missing), fix)
    facts, make_tokenizer = _tokenizer_of(option)
    corpus = _corpus_of(option)
    corpus.check(context)
    return corpus, make_tokenizer, hash_facts([corpus.fingerprint(), facts])


def _corpus_of(option: Option) -> Corpus:
    keys = {key: value for key, value in option.keys.items() if key not in TOKENIZER_KEYS}
    return DATA.build(Option(option.name, keys))


def _tokenizer_of(option: Option) -> tuple[list[Any], MakeTokenizer]:
    """What identifies the tokenizer of a data option besides the text, and the function that makes it.

    Raises:
        ConfigError: It is a file that holds none.
    """
    kind = option.keys["tokenizer"]
    if kind == "bytes":
        return [kind], lambda corpus: ByteTokenizer()
    if kind == "char":
        return [kind], _characters_of
    if kind == "bpe":
        size = option.keys["bpe_vocab"]
        facts = [kind, size, BPE_TRAINING_CHARACTERS]
        return facts, lambda corpus: BpeTokenizer.train(corpus.train_texts(), size)
    source = read_tokenizer_file(Path(os.path.expanduser(kind)))
    tokenizer = parse_tokenizer(source, kind)
    return ["file", hashlib.sha256(source.encode()).hexdigest()], lambda corpus: tokenizer


def _characters_of(corpus: Corpus) -> CharTokenizer:
    if corpus.characters:
        return CharTokenizer(corpus.characters)
    limit = corpus.token_limit  # one token is one character
    train = corpus.train_texts() if limit is None else head(corpus.train_texts(), limit)
    return CharTokenizer.train([train, *_val_sets(corpus).values()])


def _val_sets(corpus: Corpus) -> dict[str, Iterator[str]]:
    return {"val": corpus.val_texts(), **corpus.extra_val()}


# -------------------------------------------------------------------------------------------------------------- writing


def _build(
    final: Path, name: str, corpus: Corpus, make_tokenizer: MakeTokenizer, fingerprint: str, context: int
) -> TokenizedData:
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(final)
    aside = final.with_name(f".{final.name}-{secrets.token_hex(8)}")
    aside.mkdir()
    try:
        tokenizer = make_tokenizer(corpus)
        tokenizer.save(aside)
        repeats, val_sets, train_texts = Repeats(), _val_sets(corpus), corpus.train_texts()
        if corpus.chosen_by_user:
            val_sets["val"] = repeats.validation(val_sets["val"])
            train_texts = repeats.training(train_texts)
        val = {of: _write_tokens(aside / _val_file(of), texts, tokenizer) for of, texts in val_sets.items()}
        train = _write_tokens(aside / "train.npy", train_texts, tokenizer, corpus.token_limit)
        manifest = {
            "fingerprint": fingerprint,
            "val": list(val),
            "unigram_bpb": _unigram_bpb(train, val["val"], tokenizer.token_bytes),
            "repeated": repeats.share,
            "files": {path.name: _file_facts(path) for path in sorted(aside.iterdir())},
        }
        aside.joinpath("manifest.json").write_text(json.dumps(manifest, indent=1))
        for path in aside.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        built = _open(aside, name, corpus)
        if built is None:
            raise StorageError(f"{aside} does not contain what was written", "other content", "check the disk")
        _require_length(built, context)
        while True:
            try:
                os.rename(aside, final)
                return built
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if published := _open(final, name, corpus):  # another process was faster
                return published
            damaged = aside.with_name(f"{aside.name}-damaged")
            with contextlib.suppress(FileNotFoundError):  # another process moved it first
                os.rename(final, damaged)
                shutil.rmtree(damaged)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _remove_abandoned(final: Path) -> None:
    """Remove what killed processes left of a cache directory: nothing in it has been written for a day."""
    for aside in final.parent.glob(f".{final.name}-*"):
        with contextlib.suppress(OSError):  # another process removes it, or has just renamed it
            written = max(path.stat().st_mtime for path in (aside, *aside.iterdir()))
            if time.time() - written > _ABANDONED_SECONDS:
                shutil.rmtree(aside)


def _write_tokens(path: Path, texts: Iterable[str], tokenizer: Tokenizer, limit: int | None = None) -> np.ndarray:
    """Write the first `limit` tokens of documents as one .npy while they are read; returns the (V,) counts of the ids.

    No document after these is tokenized: a vocabulary made from them may lack its characters.
    """
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    counts, length = np.zeros(tokenizer.vocab_size, dtype=np.int64), 0
    with open(path, "wb") as file:
        _write_header(file, dtype, 0)
        for index, text in enumerate(texts):
            ids = tokenizer.encode(text)
            if index:
                ids = np.concatenate((tokenizer.separator, ids))
            ids = ids[: None if limit is None else limit - length]
            file.write(ids.astype(dtype).data)
            np.add.at(counts, ids, 1)
            length += len(ids)
            if length == limit:
                break
        file.seek(0)
        _write_header(file, dtype, length)
    return counts


def _write_header(file: Any, dtype: np.dtype, length: int) -> None:  # the same size for every length
    facts = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, facts)


# -------------------------------------------------------------------------------------------------------------- reading


def _open(directory: Path, name: str, corpus: Corpus) -> TokenizedData | None:
    """The tokens in a cache directory; None if it is missing or damaged."""
    try:
        if not all(path.is_file() for path in directory.iterdir()):  # a pipe would wait for a writer
            return None
        manifest = json.loads(directory.joinpath("manifest.json").read_bytes())
        if any(_file_facts(directory / file) != facts for file, facts in manifest["files"].items()):
            return None
        return TokenizedData(
            name=name,
            fingerprint=manifest["fingerprint"],
            train=np.load(directory / "train.npy", mmap_mode="r"),
            val={val: np.load(directory / _val_file(val), mmap_mode="r") for val in manifest["val"]},
            tokenizer=load_tokenizer(directory),
            unigram_bpb=manifest["unigram_bpb"],
            corpus=corpus,
            repeated=manifest["repeated"],
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


def _require_length(data: TokenizedData, context: int) -> None:
    for split, tokens in {"train": data.train, **data.val}.items():
        if len(tokens) < context + 2:
            problem = f"data={data.name} is too short: {len(tokens)} tokens in {split}, {context + 2} needed"
            raise ConfigError(problem, f"model.context={context}", "give more text or choose a smaller model.context")
