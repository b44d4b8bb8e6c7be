"""Text from the Hugging Face Hub or a local directory of tables, through `datasets`."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, final

from nexus_ablate.data.corpus import DATA, Corpus, hash_facts, head
from nexus_ablate.data.tables import is_table, no_column
from nexus_ablate.errors import ConfigError, StorageError

VAL_CHARACTERS = 1_000_000
PARQUET_ROWS = 10_000
"""Rows of a parquet file that are read at a time."""
SPLITS = "\"data.split='train[:90%]'\" \"data.val_split='train[90%:]'\""
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}


@final
@DATA.register("hub")
@DATA.register("tinystories")
@DATA.register("wikitext103")
@DATA.register("fineweb_edu")
class HubCorpus(Corpus):
    """A data set of the Hugging Face Hub or a local directory of parquet files, one document per row.

    A local directory is identified by its content, a Hub data set by its name and revision.
    """

    chosen_by_user = True

    def __init__(
        self,
        *,
        path: str,
        config: str,
        revision: str,
        split: str,
        column: str,
        val_split: str,
        streaming: bool,
        token_limit: int | str,
    ) -> None:
        self._path, self._config, self._revision = path, config, revision
        self._split, self._val_split, self._column = split, val_split, column
        self._streaming = streaming
        self.token_limit = None if token_limit == "off" else int(token_limit)

    def check(self, context: int) -> None:
        if self._path == "none":
            raise ConfigError(
                "data=hub needs a data set", "data.path=none", "data.path=owner/name, or a local directory"
            )
        if self._path.startswith((".", "/", "~")) and not self._local.is_dir():
            raise ConfigError("data.path is not a directory", self._path, "name a directory of parquet files")
        if self._local.is_dir() and not self._local_files:
            raise ConfigError("data.path holds no files", self._path, "name a directory of parquet files")
        if may_overlap(self._split, self._val_split):
            got = f"data.split={self._split} data.val_split={self._val_split}"
            fix = f"{SPLITS}, another split, or data.val_split=none"
            raise ConfigError("data.val_split would validate on the training text", got, fix)

    def fingerprint(self) -> str:
        facts = [self._config, self._split, self._val_split, self._column, self.token_limit, VAL_CHARACTERS]
        if not self._local.is_dir():
            return hash_facts([self._path, self._revision, *facts])
        return hash_facts([self._content, *facts])

    @cached_property
    def _content(self) -> list[list[str]]:
        """Name and sha256 of each file of a local directory."""
        content = []
        for path in self._local_files:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            content.append([path.relative_to(self._local).as_posix(), digest])
        return content

    def train_texts(self) -> Iterator[str]:
        texts = self._texts(self._split)
        if self._val_split != "none":
            return texts
        for _ in head(texts, VAL_CHARACTERS):
            pass
        first = next(texts, None)
        if first is None:
            problem = f"data.split={self._split} is shorter than the {VAL_CHARACTERS} characters of validation"
            raise ConfigError(problem, self._path, SPLITS)
        return itertools.chain([first], texts)

    def val_texts(self) -> Iterator[str]:
        if self._val_split == "none":
            return head(self._texts(self._split), VAL_CHARACTERS)
        return self._texts(self._val_split)

    @property
    def _local(self) -> Path:
        return Path(os.path.expanduser(self._path))

    @cached_property
    def _local_files(self) -> list[Path]:
        shown = (path for path in self._local.rglob("*") if not path.name.startswith("."))
        return sorted(path for path in shown if path.is_file())

    def _texts(self, split: str) -> Iterator[str]:
        with self._hub_errors():
            rows: Any = self._load(split)
            names = rows.column_names or list(next(iter(rows), {}))
            if self._column not in names:
                raise no_column(self._column, names, self._path)
            for batch in rows.select_columns([self._column]).iter(batch_size=1000):
                for text in batch[self._column]:
                    if text is not None and not isinstance(text, str):
                        got = f"{self._column}: {type(text).__name__}"
                        raise ConfigError("data.column holds no text", got, "choose a column of strings")
                    if text:
                        yield text

    def _load(self, split: str) -> object:
        from datasets import load_dataset

        name = None if self._config == "none" else self._config
        if self._local.is_dir():
            return self._load_local(split, name)
        revision = None if self._revision == "none" else self._revision
        return load_dataset(self._path, name=name, revision=revision, split=split, streaming=self._streaming)

    def _load_local(self, split: str, name: str | None) -> object:
        """The rows of a local directory.

        The path is absolute, since `datasets` takes a word such as `parquet` for its own reader of that name. The copy
        that it keeps is named by the content, since it would recognize changed files by their modification time alone.
        """
        from datasets import config, load_dataset
        from datasets.data_files import FILES_TO_IGNORE

        path = str(self._local.resolve())
        copy = Path(config.HF_DATASETS_CACHE) / f"content-{hash_facts(self._content)[:32]}"
        keys: dict[str, Any] = {"name": name, "cache_dir": str(copy)}
        tables = [file for file in self._local_files if is_table(file) and file.name not in FILES_TO_IGNORE]
        shards = [file for file in tables if file.suffix.lower() == ".parquet"]
        if shards and shards == tables:
            self._require_column(shards)
            # Shards may differ in their other columns, and the default size of a batch is that of a file's first group
            # of rows, which is 0 in a shard without rows.
            keys |= {"columns": [self._column], "batch_size": PARQUET_ROWS}
        return load_dataset(path, split=split, streaming=self._streaming, **keys)

    def _require_column(self, shards: list[Path]) -> None:
        """Raises:
        ConfigError: A shard lacks the column of the documents.
        """
        import pyarrow.parquet

        for shard in shards:
            names = pyarrow.parquet.read_schema(shard).names
            if self._column not in names:
                raise no_column(self._column, names, str(shard))

    @contextmanager
    def _hub_errors(self) -> Iterator[None]:
        """Turn what `datasets` raises into our errors, and silence its messages about retries."""
        import logging

        from datasets.exceptions import DatasetsError

        loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        except (OSError, ValueError, DatasetsError) as error:
            reason = error.__cause__ or error  # `datasets` hides the reason behind "an error occurred"
            got = (str(reason).splitlines() or [type(reason).__name__])[0]
            if isinstance(reason, OSError) and reason.errno in _DISK_ERRORS:
                fix = "point HF_HOME to a disk with free space"
                raise StorageError("the download cannot be stored", got, fix) from error
            if isinstance(error, ConnectionError):
                fix = "check the network, or give data.path a local directory of parquet files"
            elif isinstance(error, OSError):
                fix = "check data.path and data.revision; a gated data set needs `hf auth login`"
            else:
                fix = "check data.config, data.split, data.val_split and data.streaming"
            raise ConfigError(f"data.path={self._path} cannot be read", got, fix) from error
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def may_overlap(split: str, other: str) -> bool:
    """Whether a part of one split is one of the other, or all of what that is cut from: `train` and `train[:10%]`."""
    for part, another in itertools.product(split.split("+"), other.split("+")):
        if part in (another, another.partition("[")[0]) or another == part.partition("[")[0]:
            return True
    return False
