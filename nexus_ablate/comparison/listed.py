"""Results that were trained elsewhere, as rows of a table: CSV, JSON or Parquet, each row checked."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from nexus_ablate.comparison.verdict import NOT_COMPARABLE
from nexus_ablate.errors import ConfigError, did_you_mean, printable
from nexus_ablate.plain_data import LARGEST, UNREADABLE, strict_loads
from nexus_ablate.runs.files import read_regular

REQUIRED, OPTIONAL = ("arm", "seed"), ("stratum", "rate", "tokens", "seconds", "unit", "caution")
"""Columns beside the endpoint."""
FAILED = ("failed", "diverged")
"""Words in the endpoint's column for a run that failed to train."""
NO_SEED = "none"
"""Of `seed=none`: the runs have no seeds."""
_BYTES = 64 * 2**20
_UNITS_APART = 500
"""Two budgets of one arm that are as far apart are in thousands and in ones, or in seconds and milliseconds."""

Cells = Mapping[str, Any]


@dataclass(frozen=True)
class Listed:
    """One run.

    Attributes:
        where: `runs.csv, line 7`, or the run's address on W&B.
        value: The endpoint; None for a run that failed to train.
        rate: Its learning rate.
        unit: Of the endpoint, as the source has it; '' where it does not.
        caution: What qualifies verdicts about the run, as `compare --runs` wrote it; '' where nothing does.
    """

    where: str
    stratum: str
    arm: str
    seed: int
    value: float | None
    rate: float | None
    tokens: float | None
    seconds: float | None
    unit: str
    caution: str = ""

    @property
    def unfair(self) -> bool:
        """Whether it was not comparable where it was trained."""
        return self.caution.startswith(NOT_COMPARABLE)


@dataclass(frozen=True)
class Source:
    """A table as it was read.

    Attributes:
        name: The file, or `wandb:ENTITY/PROJECT`.
        rows: Where each row is, and its cells by column.
        left_out: Where a run was left out before it became a row, and why.
    """

    name: str
    rows: list[tuple[str, Cells]]
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for _, cells in self.rows for name in cells))


# ------------------------------------------------------------------------------------------------------------- reading


def read_source(path: Path) -> Source:
    """The rows of a file: .csv, .tsv, .json (a list of objects), .jsonl or .parquet.

    Raises:
        ConfigError: There is no such file, it cannot be read as a table, or it has no rows.
    """
    readers: dict[str, Callable[[Path, bytes], Iterable[tuple[str, Cells]]]] = {
        ".csv": _csv,
        ".tsv": _csv,
        ".json": _json,
        ".jsonl": _jsonl,
        ".parquet": _parquet,
    }
    if path.is_dir():
        fix = f"nexus-ablate compare {shlex.quote(str(path))} for runs of nexus-ablate, or name a file in it"
        raise ConfigError("judge takes one table of results, not a directory", str(path), fix)
    if path.suffix.lower() not in readers:
        fix = f"a file that ends in {', '.join(readers)}, or wandb:ENTITY/PROJECT"
        raise ConfigError("judge cannot read a table of this kind", str(path), fix)
    try:
        data = read_regular(path, _BYTES, follow=True)
    except OSError as error:
        raise ConfigError("the table cannot be read", f"{path}: {error.strerror}", "name a readable file") from None
    if data is None:
        raise ConfigError("there is no file of this name", str(path), f"ls {path.parent}")
    try:
        rows = list(readers[path.suffix.lower()](path, data))
    except (*UNREADABLE, csv.Error) as error:
        fix = "one row per run, with the columns arm, seed and val_loss"
        raise ConfigError(f"{path} is not a table", printable(str(error), 200), fix) from None
    if not rows:
        raise ConfigError(
            "the table has no rows", str(path), "one row per run, with the columns arm, seed and val_loss"
        )
    return Source(str(path), rows)


def _csv(path: Path, data: bytes) -> Iterable[tuple[str, Cells]]:
    lines = csv.reader(io.StringIO(data.decode("utf-8-sig")), delimiter="\t" if path.suffix == ".tsv" else ",")
    heads = [head.strip() for head in next(lines, [])]
    if len(set(heads)) < len(heads):
        raise ValueError(f"two columns have one name: {', '.join(heads)}")
    for row in lines:
        if len(row) not in (0, len(heads)):
            raise ValueError(f"line {lines.line_num} has {len(row)} cells, and the first line {len(heads)}")
        if row:
            yield f"{path.name}, line {lines.line_num}", dict(zip(heads, row, strict=True))


def _json(path: Path, data: bytes) -> Iterable[tuple[str, Cells]]:
    rows = strict_loads(data.decode())
    if not isinstance(rows, list):
        raise ValueError(f"it holds a {type(rows).__name__}, not a list of objects")
    yield from _objects(path, "row", rows)


def _jsonl(path: Path, data: bytes) -> Iterable[tuple[str, Cells]]:
    yield from _objects(path, "line", [strict_loads(line) for line in data.decode().splitlines() if line.strip()])


def _parquet(path: Path, data: bytes) -> Iterable[tuple[str, Cells]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("reading Parquet needs the package pyarrow", str(path), "pip install pyarrow") from None
    try:
        rows = pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(str(error).splitlines()[0]) from None
    yield from _objects(path, "row", rows)


def _objects(path: Path, kind: str, rows: list[Any]) -> Iterable[tuple[str, Cells]]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{kind} {number} is not an object: {json.dumps(row, default=str)[:60]}")
        yield f"{path.name}, {kind} {number}", row


# ------------------------------------------------------------------------------------------------------------ checking


def runs_of(source: Source, endpoint: str, columns: Mapping[str, str]) -> list[Listed]:
    """The runs in a table.

    Args:
        endpoint: The measure to judge by, which is also its column unless `columns` says otherwise.
        columns: What the source calls `arm`, `seed`, the endpoint, and the optional ones. With `seed: none` the runs
            are numbered.

    Raises:
        ConfigError: A column is missing, a cell is not what its column holds, two rows are of one run, or the units
            are mixed.
    """
    names = {name: columns.get(name, name) for name in (*REQUIRED, endpoint, *OPTIONAL)}
    if stray := [name for name in columns if name not in names]:
        near = did_you_mean(stray[0], names) or "arm"
        raise ConfigError("--columns names what judge does not read", stray[0], f"--columns {near}={columns[stray[0]]}")
    present = source.columns
    numbered = names["seed"] == NO_SEED and NO_SEED not in present
    wanted = [name for name in (*REQUIRED, endpoint, *columns) if not (numbered and name == "seed")]
    for name in wanted:
        if names[name] not in present:
            near = did_you_mean(names[name], present) or "COLUMN"
            shown = printable(", ".join(present), 200)
            raise ConfigError(f"the source has no column {names[name]}", shown, f"--columns {name}={near}")
    runs = []
    for number, (where, cells) in enumerate(source.rows):
        rate, tokens, seconds = (_number(where, names[n], cells.get(names[n])) for n in ("rate", "tokens", "seconds"))
        runs.append(
            Listed(
                where=where,
                stratum=_text(cells.get(names["stratum"])),
                arm=_arm(where, names["arm"], cells.get(names["arm"])),
                seed=number if numbered else _seed(where, names["seed"], cells.get(names["seed"])),
                value=_value(where, names[endpoint], cells.get(names[endpoint])),
                rate=rate,
                tokens=tokens,
                seconds=seconds,
                unit=_text(cells.get(names["unit"])),
                caution=_text(cells.get(names["caution"])),
            )
        )
    _refuse_duplicates(runs)
    _refuse_mixed_units(runs)
    return runs


def step_of(runs: Iterable[Listed]) -> float:
    """The last decimal that any value of the endpoint has: 0.01 for 3.28 and 3.3."""
    exponents = [Decimal(repr(run.value)).as_tuple().exponent for run in runs if run.value is not None]
    numbers = [exponent for exponent in exponents if isinstance(exponent, int)]
    return 10.0 ** min(numbers, default=0)


def _text(cell: object) -> str:
    return "" if cell is None or _missing(cell) else str(cell).strip()


def _missing(cell: object) -> bool:
    return isinstance(cell, float) and math.isnan(cell)


def _arm(where: str, column: str, cell: object) -> str:
    if not (arm := _text(cell)):
        raise ConfigError(f"{where}: {column} is empty", "nothing", "name the arm of every run, or remove the row")
    return arm


def _seed(where: str, column: str, cell: object) -> int:
    number = None
    if (
        not isinstance(cell, bool)
        and isinstance(cell, int | float | str)
        and re.fullmatch(r"\d{1,15}(\.0)?", str(cell))
    ):
        number = int(float(cell))
    if number is None:
        fix = f"whole numbers from 0; --columns seed={NO_SEED} for runs without seeds"
        raise ConfigError(f"{where}: {column} is not a whole number", _text(cell) or "nothing", fix)
    return number


def _finite(cell: object) -> float | None:
    try:
        number = float(cell) if isinstance(cell, str | int | float) and not isinstance(cell, bool) else math.nan
    except ValueError:
        return None
    return number if abs(number) < LARGEST else None


def _value(where: str, column: str, cell: object) -> float | None:
    if _text(cell).lower() in FAILED:
        return None
    if (number := _finite(cell)) is None:
        fix = f"a number without unit; `{FAILED[0]}` if the run failed to train, which counts; or remove the row"
        raise ConfigError(f"{where}: {column} is not a finite number", _shown(cell), fix)
    return number


def _number(where: str, column: str, cell: object) -> float | None:
    if not _text(cell):
        return None
    number = _finite(cell)
    if number is None or number <= 0:
        fix = "a number above 0 without unit, or an empty cell"
        raise ConfigError(f"{where}: {column} is not a number above 0", _shown(cell), fix)
    return number


def _shown(cell: object) -> str:
    return printable("nothing" if cell is None or cell == "" else str(cell), 80)


def _refuse_duplicates(runs: list[Listed]) -> None:
    met: dict[tuple[Any, ...], str] = {}
    for run in runs:
        key = (run.stratum, run.arm, run.seed, run.rate)
        if key in met:
            got = f"{met[key]} and {run.where}: {run.arm}, seed {run.seed}"
            raise ConfigError("two rows are of one arm and one seed", got, "one row per run: its final result")
        met[key] = run.where


def _refuse_mixed_units(runs: list[Listed]) -> None:
    units: dict[str, str] = {}
    for run in runs:
        units.setdefault(run.unit, run.where)
    if len(units) > 1:
        got = ", ".join(f"{unit or 'no unit'} ({where})" for unit, where in list(units.items())[:3])
        raise ConfigError("the endpoint is in mixed units", got, "the same unit in every row")
    for name in ("tokens", "seconds"):
        extremes: dict[tuple[str, str], list[tuple[float, str]]] = {}
        for run in runs:
            if (budget := getattr(run, name)) is not None:
                extremes.setdefault((run.stratum, run.arm), []).append((budget, run.where))
        for budgets in extremes.values():
            (low, where), (high, other) = min(budgets), max(budgets)
            if high >= _UNITS_APART * low:
                got = f"{low:g} ({where}) and {high:g} ({other}) of one arm"
                raise ConfigError(f"{name} are in mixed units", got, "the same unit in every row")
