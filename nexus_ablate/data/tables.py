"""Documents in a column of a table: .parquet, .json, .jsonl, .ndjson, .csv and .tsv files, read by pandas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nexus_ablate.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

_HALF = re.compile("[\ud800-\udfff]")
SUFFIXES = (".parquet", ".json", ".jsonl", ".ndjson", ".csv", ".tsv")


def is_table(path: Path) -> bool:
    """Whether the name of a file says that it is a table, which is never trained on as raw text."""
    return path.suffix.lower() in SUFFIXES


def column_texts(path: Path, column: str) -> list[str]:
    """The documents of a table's column in their order, without missing and empty ones.

    Raises:
        ConfigError: The file is damaged, or it has no such column, or one that holds no text.
    """
    try:
        table = _read(path)
    except (ValueError, TypeError, OSError) as error:  # pandas' and Arrow's errors about content are ValueErrors
        reason = str(error).splitlines()[0]
        fix = 'a list of objects such as {"text": "..."}, or one per line' if _is_json(path) else "name a whole file"
        raise ConfigError(f"{path.name} cannot be read as {path.suffix[1:]}", reason, fix) from error
    columns = [str(name) for name in table.columns]
    if not columns:
        raise ConfigError(f"{path.name} has no rows", str(path), "name a file with documents")
    if column not in columns:
        raise no_column(column, columns, str(path))
    cells = table[column]
    return list(_texts(cells[cells.notna()].tolist(), path, column))


def no_column(column: str, columns: list[str], place: str) -> ConfigError:
    """The error for a column that a table or a data set doesn't have."""
    problem = f"{place} has no column {column}, but {', '.join(columns) or 'none at all'}"
    near = did_you_mean(column, columns) or next(iter(columns), "text")
    return ConfigError(problem, f"data.column={column}", f"data.column={near}")


def _read(path: Path) -> pd.DataFrame:
    import pandas as pd

    kind = path.suffix.lower()
    if kind == ".parquet":
        return pd.read_parquet(path)
    if _is_json(path):
        return pd.DataFrame.from_records(_objects(path.read_text(encoding="utf-8-sig")))
    separator = "\t" if kind == ".tsv" else ","
    # Every cell is text: "NA" and "1.0" in a document must not become a missing value or a number.
    table = pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False, encoding="utf-8-sig")
    if not isinstance(table.index, pd.RangeIndex):  # pandas takes the surplus for an index and shifts the columns
        raise ValueError("rows have more fields than the header; quote fields that hold a separator")
    return table


def _is_json(path: Path) -> bool:
    return path.suffix.lower() in (".json", ".jsonl", ".ndjson")


def _objects(text: str) -> list[dict[str, object]]:
    """The rows of a JSON file: a list of objects, or one object per line.

    pandas would read a text that looks like a date or a number as one.
    """
    if text.lstrip().startswith("["):
        rows = json.loads(text, object_hook=_valid_unicode)
    else:
        rows = [json.loads(line, object_hook=_valid_unicode) for line in text.split("\n") if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError('a row is no object such as {"text": "..."}')
    return rows


def _valid_unicode(row: dict[str, object]) -> dict[str, object]:
    """The row with U+FFFD for half of a pair of surrogates, which JSON can write and UTF-8 can't."""
    return {key: _HALF.sub("\ufffd", value) if isinstance(value, str) else value for key, value in row.items()}


def _texts(values: list[object], path: Path, column: str) -> Iterator[str]:
    for value in values:
        if not isinstance(value, str):
            got = f"data.column={column}: {type(value).__name__} in {path}"
            raise ConfigError("data.column holds no text", got, "choose a column of strings")
        if value:
            yield value
