"""Results that were trained elsewhere, as rows of a table: CSV, JSON or Parquet, each row checked."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate.comparison.verdict import NOT_COMPARABLE
from nexus_ablate.errors import ConfigError, did_you_mean, printable
from nexus_ablate.measure.measures import Measure, measure_of
from nexus_ablate.plain_data import LARGEST, UNREADABLE
from nexus_ablate.study.endpoint import Endpoint
from nexus_ablate.study.schema import CLAIM_SEEDS

if TYPE_CHECKING:
    import pandas

REQUIRED, OPTIONAL = ("arm", "seed"), ("stratum", "rate", "tokens", "seconds", "unit", "caution", "step")
"""Columns beside the endpoint."""
FAILED = ("failed", "diverged")
"""Words in the endpoint's column for a run that failed to train."""
KINDS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
NO_SEED = "none"
"""Of `seed=none`: the runs have no seeds."""

MOST_DECIMALS = 10
"""A number with as many is not a rounded one."""

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
        step: Of a log, the training step at which the value was measured.
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
    caution: str
    step: float | None

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


class ListedEndpoint(Endpoint, frozen=True, kw_only=True):
    """An endpoint of a table: its measure may be one that this package doesn't know."""

    own: Measure

    @property
    def measure(self) -> Measure:
        return self.own

    @property
    def origin(self) -> str:
        return "declared with --delta-min"


# ------------------------------------------------------------------------------------------------------------- reading


def read_source(path: Path) -> Source:
    """The rows of a file: .csv, .tsv, .json, .jsonl or .parquet.

    Raises:
        ConfigError: There is no such file, it cannot be read as a table, or it has no rows.
    """
    kind = path.suffix.lower()
    if path.is_dir():
        fix = f"nexus-ablate compare {shlex.quote(str(path))} for runs of nexus-ablate, or name a file in it"
        raise ConfigError("judge takes one table of results, not a directory", str(path), fix)
    if kind not in KINDS:
        fix = f"a file that ends in {', '.join(KINDS)}, or wandb:ENTITY/PROJECT"
        raise ConfigError("judge cannot read a table of this kind", str(path), fix)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        fix = f"ls {shlex.quote(str(path.parent))}"
        raise ConfigError("there is no file of this name", str(path), fix) from None
    except OSError as error:
        raise ConfigError("the table cannot be read", f"{path}: {error.strerror}", "name a readable file") from None
    fix = "one row per run, with the columns arm, seed and val_loss"
    try:
        frame = _separated(data, kind) if kind in (".csv", ".tsv") else _objects(data, kind)
    except (*UNREADABLE, TypeError, OSError) as error:
        got = printable(str(error).splitlines()[0], 200)
        raise ConfigError(f"{path} is not a table", got, fix) from None
    if frame.empty:
        raise ConfigError("the table has no rows", str(path), fix)
    unit = "row" if kind in (".json", ".parquet") else "line"
    places = [f"{path.name}, {unit} {number}" for number in frame.index]
    return Source(str(path), list(zip(places, frame.to_dict("records"), strict=True)))


def _separated(data: bytes, kind: str) -> pandas.DataFrame:
    """Cells as text, by line. Where semicolons separate them, a comma in a number is its decimal point."""
    import pandas

    written = data.lstrip(b"\r\n")
    first_line = written.partition(b"\n")[0]
    has_semicolons = kind == ".csv" and b";" in first_line and b"," not in first_line
    separator = ";" if has_semicolons else {".csv": ",", ".tsv": "\t"}[kind]
    reading = {"sep": separator, "header": None, "dtype": str, "keep_default_na": False, "skip_blank_lines": False}
    try:
        table = pandas.read_csv(io.BytesIO(written), encoding="utf-8-sig", skipinitialspace=True, **reading)
    except pandas.errors.EmptyDataError:
        return pandas.DataFrame()
    table.index += 1 + data[: len(data) - len(written)].count(b"\n")
    heads = [str(head).strip() for head in table.iloc[0]]
    if len(set(heads)) < len(heads):
        raise ValueError(f"two columns have one name: {', '.join(heads)}")
    rows = table.iloc[1:].set_axis(heads, axis=1)
    rows = rows[(rows != "").any(axis=1)]
    if has_semicolons:
        rows = rows.replace(r"^\s*([+-]?\d+),(\d+(?:[eE][+-]?\d+)?)\s*$", r"\1.\2", regex=True)
    return rows


def _objects(data: bytes, kind: str) -> pandas.DataFrame:
    """Rows of JSON, a list of objects or columns as pandas writes them, or of Parquet, by number."""
    import pandas

    if kind == ".parquet":
        try:
            frame = pandas.read_parquet(io.BytesIO(data), engine="pyarrow")
        except ImportError:
            got = "a file that ends in .parquet"
            raise ConfigError("reading Parquet needs the package pyarrow", got, "pip install pyarrow") from None
    else:
        text = data.decode("utf-8-sig")
        if kind == ".jsonl":
            lines = [line for line in text.split("\n") if line.strip()]
            text = f"[{','.join(lines)}]"
        values = json.loads(text)
        rows = values if isinstance(values, list) else [values]
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise ValueError(f"row {number} is not an object: {json.dumps(row)[:60]}")
        frame = pandas.DataFrame(values, dtype=object)
    frame = frame.reset_index(drop=True)
    frame.index += 1
    return frame


# ------------------------------------------------------------------------------------------------------------ checking


def runs_of(source: Source, endpoint: str, columns: Mapping[str, str]) -> list[Listed]:
    """The runs in a table, one per row, as `rows_of` reads them.

    Raises:
        ConfigError: As `rows_of`, and where two rows are of one run, or the units are mixed.
    """
    runs = rows_of(source, endpoint, columns)
    refuse_duplicates(runs, lambda run: (run.stratum, run.arm, run.seed, run.rate))
    _refuse_mixed_units(runs)
    return runs


def rows_of(
    source: Source, endpoint: str, columns: Mapping[str, str], required: Sequence[str] = REQUIRED
) -> list[Listed]:
    """The rows of a table.

    Args:
        endpoint: The measure to judge by, which is also its column unless `columns` says otherwise.
        columns: What the source calls `arm`, `seed`, the endpoint, and the optional ones. With `seed: none` the runs
            are numbered.

    Raises:
        ConfigError: A column is missing, or a cell is not what its column holds.
    """
    names = {name: columns.get(name, name) for name in (*REQUIRED, endpoint, *OPTIONAL)}
    if stray := [name for name in columns if name not in names]:
        name = did_you_mean(stray[0], names) or "arm"
        raise ConfigError("--columns names what judge does not read", stray[0], f"--columns {name}={columns[stray[0]]}")
    present = source.columns
    numbered = names["seed"] == NO_SEED and NO_SEED not in present
    wanted = [name for name in (*required, endpoint, *columns) if not (numbered and name == "seed")]
    if missing := [name for name in wanted if names[name] not in present]:
        chosen = dict(columns)
        for name in missing:
            free = [column for column in present if column not in (*names.values(), *chosen.values())]
            chosen[name] = did_you_mean(names[name], free) or (NO_SEED if name == "seed" else "COLUMN")
        mapping = ",".join(f"{name}={column}" for name, column in chosen.items())
        problem, shown = f"the source has no column {names[missing[0]]}", printable(", ".join(present), 200)
        if missing == [endpoint] and (measured := [column for column in present if measure_of(column)]):
            raise ConfigError(problem, shown, f"--endpoint {measured[0]}")
        if len(present) == 1:
            raise ConfigError(problem, shown, "columns that are separated by commas, or by tabs in a file named .tsv")
        raise ConfigError(problem, shown, f"--columns {shlex.quote(mapping)}")
    runs = []
    for number, (where, cells) in enumerate(source.rows):
        row = {name: (f"{where}: {column}", cells.get(column)) for name, column in names.items()}
        arm = _arm(*row["arm"])
        seed = number if numbered else _seed(*row["seed"])
        value = _value(*row[endpoint])
        rate = _number(*row["rate"])
        tokens, seconds = (value if name == endpoint else _number(*row[name]) for name in ("tokens", "seconds"))
        step = _step(*row["step"]) if "step" in required else None
        stratum, unit, caution = (_text(cells.get(names[name])) for name in ("stratum", "unit", "caution"))
        runs.append(Listed(where, stratum, arm, seed, value, rate, tokens, seconds, unit, caution, step))
    return runs


def on_one_grid(runs: list[Listed]) -> tuple[list[Listed], float, str]:
    """The runs with values as coarse as those of the arm that is rounded most, the step between them, and a line.

    An arm at two decimals and one at five differ by up to half a step for no reason but rounding. Arms with too few
    runs for a word don't count: their last decimals may be zeros by chance. The line is '' where nothing was rounded.
    """
    decimals = {}
    for arm in dict.fromkeys(run.arm for run in runs):
        values = [run.value for run in runs if run.arm == arm and run.value is not None]
        if len(values) >= CLAIM_SEEDS:
            decimals[arm] = max(map(_decimals, values))
    finest = max((_decimals(run.value) for run in runs if run.value is not None), default=0)
    coarsest = min(decimals, key=decimals.__getitem__, default="")
    fewest = decimals.get(coarsest, finest)
    step = 10.0**-fewest
    if fewest == finest:
        return runs, step, ""
    rounded = []
    for run in runs:
        rounded.append(replace(run, value=None if run.value is None else round(run.value, fewest)))
    return rounded, step, f"all values are rounded to {step:g}, as those of {coarsest} are"


def _decimals(value: float) -> int:
    """Decimals up to the last that is not 0: 2 for 3.28, 0 for 85.0, and no more than those of an unrounded number."""
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    return min(max(-exponent, 0), MOST_DECIMALS) if isinstance(exponent, int) else 0


def _text(cell: object) -> str:
    is_missing = cell is None or (isinstance(cell, float) and math.isnan(cell))
    return "" if is_missing else str(cell).strip()


def _arm(place: str, cell: object) -> str:
    if not (arm := _text(cell)):
        raise ConfigError(f"{place} is empty", "nothing", "name the arm of every run, or remove the row")
    return arm


def _seed(place: str, cell: object) -> int:
    text = _text(cell)
    if isinstance(cell, bool) or not re.fullmatch(r"\d{1,15}(\.0)?", text):
        fix = f"whole numbers from 0; --columns seed={NO_SEED} for runs without seeds"
        raise ConfigError(f"{place} is not a whole number", _shown(text), fix)
    return int(float(text))


def _finite(cell: object) -> float | None:
    text = str(cell)
    if isinstance(cell, bool) or "_" in text:  # Python would read 3_05 as 305
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < LARGEST else None


def _value(place: str, cell: object) -> float | None:
    if _text(cell).lower() in FAILED:
        return None
    if (number := _finite(cell)) is None:
        fix = f"a number without unit; `{FAILED[0]}` if the run failed to train, which counts; or remove the row"
        raise ConfigError(f"{place} is not a finite number", _shown(cell), fix)
    return number


def _number(place: str, cell: object) -> float | None:
    if not _text(cell):
        return None
    number = _finite(cell)
    if number is None or number <= 0:
        fix = "a number above 0 without unit, or an empty cell"
        raise ConfigError(f"{place} is not a number above 0", _shown(cell), fix)
    return number


def _step(place: str, cell: object) -> float:
    number = _finite(cell)
    if number is None or number < 0:
        raise ConfigError(f"{place} is not a training step", _shown(cell), "a number from 0 in every row")
    return number


def _shown(cell: object) -> str:
    return printable("nothing" if cell is None or cell == "" else str(cell), 80)


def refuse_duplicates(
    runs: list[Listed],
    identity: Callable[[Listed], object],
    what: str = "one arm and one seed",
    fix: str = "one row per run: its final result; for a log with steps, --target LOSS",
) -> None:
    """Refuse rows that are of one run.

    Args:
        identity: What no two rows share.
        what: The same in words.

    Raises:
        ConfigError: Two rows share it.
    """
    places: dict[object, str] = {}
    for run in runs:
        key = identity(run)
        if key in places:
            step = "" if run.step is None else f", step {run.step:g}"
            got = f"{places[key]} and {run.where}: {run.arm}, seed {run.seed}{step}"
            raise ConfigError(f"two rows are of {what}", got, fix)
        places[key] = run.where


def _refuse_mixed_units(runs: list[Listed]) -> None:
    units: dict[str, str] = {}
    for run in runs:
        units.setdefault(run.unit, run.where)
    if len(units) > 1:
        found = [f"{unit or 'no unit'} ({where})" for unit, where in units.items()]
        raise ConfigError("the endpoint is in mixed units", ", ".join(found[:3]), "the same unit in every row")
