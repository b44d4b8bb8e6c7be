"""Tables of results that other tools wrote: files read as rows, columns found or asked for, rows checked as runs."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nexus_ablate.comparison.read import LeftOut
from nexus_ablate.errors import ConfigError, did_you_mean, printable
from nexus_ablate.measure.measures import measure_of
from nexus_ablate.plain_data import LARGEST, UNREADABLE
from nexus_ablate.runs.files import read_regular
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.runs.record import leaves

NO_SEED = "none"
"""Of `--columns seed=none`: the runs have no seeds."""
FAILED = ("failed", "diverged", "nan", "inf", "-inf", "infinity", "-infinity")
"""What stands in place of the endpoint of a run that ended without a finite one."""
DIVERGED = "diverged"
FINISHED = ("", "finished", "completed", "done", "success")
"""States of runs whose numbers are results; those of others but `DIVERGED` are not."""
OPTIONAL = {
    "state": ("State", "state", "status"),
    "run": ("run", "Name", "name", "run_id", "ID"),
    "step": ("step", "Step", "_step", "global_step", "train/global_step", "trainer/global_step", "iteration", "iter"),
    "steps": ("steps", "train_steps"),
    "tokens": ("tokens", "train_tokens", "total_tokens"),
    "seconds": ("seconds", "_runtime", "Runtime"),
}
"""Further columns and what they may be called."""
NOT_ARMS = ("notes", "user", "tags", "created", "updated", "end time", "hostname", "sweep", "commit", "github", "date")
"""Text columns of exports that describe no arm."""
_BYTES = 64 * 2**20
_DECIMAL_COMMA = re.compile(r"([+-]?\d+),(\d+(?:[eE][+-]?\d+)?)")
_CHART = re.compile(r"(.+?) - (.+?)(__MIN|__MAX)?")
"""A column of W&B's chart export: the run, the metric, and the ends of what was averaged."""
_RUN_NAME = re.compile(r"(.+?)[-_ /,=]+(?:seed|s)?[-_=]?(\d{1,15})", re.IGNORECASE)
"""A run that is named by its arm and its seed: `rms-0`, `rms_seed1`."""

Cells = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A table as it was read.

    Attributes:
        name: As typed: the file, or `wandb:ENTITY/PROJECT`.
        rows: Where each row is, as an editor counts it, and its cells by column.
        note: What was read from something else than a column; "" where nothing was.
    """

    name: str
    rows: list[tuple[str, Cells]]
    note: str = ""

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for _, cells in self.rows for name in cells))

    def texts(self, column: str) -> list[str]:
        """The cells of a column that are not empty."""
        cells = (_text(cells.get(column)) for _, cells in self.rows)
        return [cell for cell in cells if cell]

    def is_number(self, column: str) -> bool:
        return all(_finite(text) is not None for text in self.texts(column))


# ------------------------------------------------------------------------------------------------------------- reading


def read_source(path: Path) -> Source:
    """The rows of a file, by its ending one of `READERS`.

    Raises:
        ConfigError: There is no such file, it cannot be read as a table, or it has no rows.
    """
    kind = path.suffix.lower()
    if path.is_dir():
        fix = f"nexus-ablate compare {shlex.quote(str(path))} for runs of nexus-ablate, or name a file in it"
        raise ConfigError("judge takes one table of results, not a directory", str(path), fix)
    if kind not in READERS:
        fix = f"a file that ends in {', '.join(READERS)}, or wandb:ENTITY/PROJECT"
        raise ConfigError("judge cannot read a table of this kind", str(path), fix)
    fix = "one row per run, with the columns arm, seed and val_loss"
    try:
        data = read_regular(path, _BYTES, follow=True)
        if data is None:
            raise ConfigError("there is no file of this name", str(path), f"ls {shlex.quote(str(path.parent))}")
        rows = READERS[kind](data)
    except (*UNREADABLE, csv.Error, OSError) as error:
        raise ConfigError(f"{path} is not a table", printable(str(error), 200), fix) from None
    if not rows:
        raise ConfigError("the table has no rows", str(path), fix)
    unit = "row" if kind in (".json", ".parquet") else "line"
    source = Source(str(path), [(f"{path.name}, {unit} {number}", cells) for number, cells in rows])
    return named(_chart(source))


def _csv(data: bytes) -> list[tuple[int, Cells]]:
    """Cells as text, by line. Where semicolons separate them, a comma in a number is its decimal point."""
    text = data.decode("utf-8-sig")
    head = text.lstrip().partition("\n")[0]
    separator = next((mark for mark in "\t,;" if mark in head), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    heads: list[str] = []
    rows = []
    end = 0
    for cells in reader:
        line, end = end + 1, reader.line_num
        cells = [cell.strip() for cell in cells]
        if not any(cells):
            continue
        if not heads:
            heads = cells
            if len(set(heads)) < len(heads):
                raise ValueError(f"two columns have one name: {', '.join(heads)}")
            continue
        if any(cells[len(heads) :]):
            raise ValueError(f"line {line} has {len(cells)} cells, the head has {len(heads)}")
        if separator == ";":
            cells = [re.sub(r",", ".", cell) if _DECIMAL_COMMA.fullmatch(cell) else cell for cell in cells]
        rows.append((line, dict(zip(heads, cells, strict=False))))
    return rows


def _json(data: bytes) -> list[tuple[int, Cells]]:
    """A list of objects, an object with such a list, or columns as pandas writes them."""
    values = json.loads(data.decode("utf-8-sig"))
    if isinstance(values, dict):
        lists = [value for value in values.values() if isinstance(value, list) and isinstance(value[:1], list)]
        tables = [value for value in lists if value and all(isinstance(row, dict) for row in value)]
        if len(tables) == 1:
            values = tables[0]
        elif any(isinstance(value, dict | list) for value in values.values()):
            import pandas

            values = pandas.DataFrame(values).to_dict("records")
    return _numbered(values)


def _json_lines(data: bytes) -> list[tuple[int, Cells]]:
    rows = []
    for line, text in enumerate(data.decode("utf-8-sig").split("\n"), 1):
        if text.strip():
            try:
                rows.append((line, flat(json.loads(text))))
            except (ValueError, AttributeError) as error:
                raise ValueError(f"line {line}: {error}") from None
    return rows


def _parquet(data: bytes) -> list[tuple[int, Cells]]:
    try:
        from pyarrow import parquet
    except ImportError:
        got = "a file that ends in .parquet"
        raise ConfigError("reading Parquet needs the package pyarrow", got, "pip install pyarrow") from None
    return _numbered(parquet.read_table(io.BytesIO(data)).to_pylist())


def _markdown(data: bytes) -> list[tuple[int, Cells]]:
    """The table between pipes in a page; several with the same columns are one."""
    heads: list[str] = []
    rows, is_inside = [], False
    for line, text in enumerate(data.decode("utf-8-sig").splitlines(), 1):
        if not text.lstrip().startswith("|"):
            is_inside = False
            continue
        cells = [cell.strip().strip("*`") for cell in text.strip().strip("|").split("|")]
        if is_inside and set("".join(cells)) - set("-: "):
            rows.append((line, dict(zip(heads, cells, strict=False))))
        elif not is_inside and heads and cells != heads:
            raise ValueError(f"line {line} begins a second table, with other columns; keep one of them")
        heads = heads or cells
        is_inside = True
    return rows


READERS: dict[str, Callable[[bytes], list[tuple[int, Cells]]]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".json": _json,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
    ".md": _markdown,
}
"""By the ending of a file: its rows, each with its number."""


def _numbered(values: Any) -> list[tuple[int, Cells]]:
    rows = values if isinstance(values, list) else [values]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is not an object: {str(row)[:60]}")
    return [(number, flat(row)) for number, row in enumerate(rows, 1)]


def flat(row: dict[str, Any]) -> Cells:
    """Nested objects as columns with dots, as W&B shows them: `optim.lr`."""
    return {".".join(names): value for names, value in leaves(row)}


def _chart(source: Source) -> Source:
    """W&B's chart export, a column per run and metric, as a log with a row per run and step; another table as it is."""
    step, *others = source.columns
    matches = {column: _CHART.fullmatch(column) for column in others}
    if not others or not all(matches.values()):
        return source
    rows = []
    for place, cells in source.rows:
        by_run: dict[str, Cells] = {}
        for column, match in matches.items():
            if match and not match[3] and _text(cells.get(column)):
                by_run.setdefault(match[1], {})[match[2]] = cells[column]
        rows += [(place, {"run": run, "step": cells[step], **metrics}) for run, metrics in by_run.items()]
    return Source(source.name, rows)


def named(source: Source) -> Source:
    """The table with arms and seeds from the names of its runs, where no column has them and each name does."""
    column = _found("run", source.columns, {})
    if column is None or any(name == "arm" or _is_seed(name) for name in source.columns):
        return source
    matches = [_RUN_NAME.fullmatch(_text(cells.get(column))) for _, cells in source.rows]
    rows = []
    for (place, cells), match in zip(source.rows, matches, strict=True):
        if match is None:
            return source
        rows.append((place, {"arm": match[1], "seed": match[2], **cells}))
    return Source(source.name, rows, f"arms and seeds are read from {column}; ")


# ---------------------------------------------------------------------------------------------------- what to judge


@dataclass(frozen=True)
class Choice:
    """What is judged, as flags say it.

    Attributes:
        endpoint: The measure, which is also its column unless `columns` says otherwise.
        better: `lower` or `higher`, for a measure that this package doesn't know.
        arm: The columns whose values name an arm.
        columns: What the table calls `seed`, the endpoint and the optional columns.
        at: The step at which a log is read. Default: the last one of each run.
    """

    endpoint: str = "val_loss"
    better: str = ""
    arm: tuple[str, ...] = ("arm",)
    columns: dict[str, str] = field(default_factory=dict)
    baseline: str = BASELINE
    at: float | None = None
    delta_min: float | None = None
    allow: tuple[str, ...] = ()

    def column(self, name: str) -> str:
        return self.columns.get(name, name)

    def arm_of(self, cells: Cells) -> str:
        return ",".join(_text(cells.get(column)) for column in self.arm)

    def command(self, source: Source) -> str:
        """The command line that asks for this."""
        usual = Choice()
        columns = [f"{name}={column}" for name, column in self.columns.items() if name != column]
        values = {
            "arm": ",".join(self.arm) if self.arm != usual.arm else "",
            "endpoint": self.endpoint if self.endpoint != usual.endpoint else "",
            "better": self.better,
            "columns": ",".join(columns),
            "at": f"{self.at:g}" if self.at is not None else "",
            "baseline": self.baseline if self.baseline != usual.baseline else "",
            "delta-min": f"{self.delta_min:g}" if self.delta_min is not None else "",
            "allow": ",".join(self.allow),
        }
        words = ["nexus-ablate", "judge", source.name]
        for name, value in values.items():
            words += [f"--{name}", value] if value else []
        return shlex.join(words)


def check_choice(source: Source, asked: Choice) -> None:
    """Check that the table has what is asked for.

    Raises:
        ConfigError: It has not. The message ends with a command for what it does have.
    """
    known = (*OPTIONAL, "seed", asked.endpoint)
    stray = [name for name in asked.columns if name not in known]
    columns = {name: column for name, column in asked.columns.items() if name in known}
    chosen = completed(source, replace(asked, columns=columns))
    fix = chosen.command(source)
    present = source.columns
    shown = printable(", ".join(present), 200)
    if stray:
        raise ConfigError("--columns names what judge does not read", stray[0], fix)
    wanted = [asked.column(asked.endpoint), *asked.columns.values(), *asked.arm, asked.column("seed")]
    lacking = [column for column in wanted if column not in (*present, NO_SEED)]
    if lacking:
        raise ConfigError(f"{source.name} has no column {lacking[0]}", shown, fix)
    if chosen.better != asked.better:
        raise ConfigError("judge does not know if lower or higher is better", asked.endpoint, fix)
    if chosen.baseline != asked.baseline:
        names = dict.fromkeys(asked.arm_of(cells) for _, cells in source.rows)
        raise ConfigError(f"no arm is called {asked.baseline}", printable(", ".join(names), 200), fix)


def completed(source: Source, asked: Choice) -> Choice:
    """What is asked for, with the likeliest guess in place of everything that the table doesn't have."""
    present = source.columns
    columns = {name: column for name, column in asked.columns.items() if column in (*present, NO_SEED)}
    endpoint, better = asked.endpoint, asked.better
    if columns.get(endpoint, endpoint) not in present:
        found = _endpoint_column(source, endpoint)
        is_loss = measure_of(found) is None and _words(found)[-1:] == ["loss"]
        endpoint = Choice.endpoint if is_loss else found
        columns[endpoint] = found
    if measure_of(endpoint) is None and not better:
        is_cost = re.search(r"loss|ppl|perplexity|bpb|err|time|second|step", endpoint.lower())
        better = "lower" if is_cost else "higher"
    if columns.get("seed", "seed") not in (*present, NO_SEED):
        columns["seed"] = next(filter(_is_seed, present), NO_SEED)
    chosen = replace(asked, endpoint=endpoint, better=better, columns=columns)
    if not set(chosen.arm) <= set(present):
        chosen = replace(chosen, arm=_arm_columns(source, chosen))
    names = list(dict.fromkeys(chosen.arm_of(cells) for _, cells in source.rows))
    if chosen.baseline not in names:
        usual = next((name for name in names if name.lower() in (BASELINE, "base", "control", "default")), names[0])
        chosen = replace(chosen, baseline=did_you_mean(chosen.baseline, names) or usual)
    return chosen


def _endpoint_column(source: Source, wanted: str) -> str:
    """The column that is likeliest an endpoint: one of a near name, else a validation loss, a loss, any number."""
    reserved = {name for names in OPTIONAL.values() for name in names}
    numbers = [name for name in source.columns if source.is_number(name) and name not in reserved and not _is_seed(name)]
    if not numbers:
        fix = "one row per run, with the columns arm, seed and val_loss"
        raise ConfigError(f"{source.name} has no column of numbers", printable(", ".join(source.columns), 200), fix)
    if near := did_you_mean(wanted, numbers):
        return near

    def rank(name: str) -> tuple[bool, bool, bool, int]:
        words = _words(name)
        is_validation = any(word.startswith(("val", "eval", "test")) for word in words)
        is_loss = words[-1:] in (["loss"], ["bpb"]) or "loss" in words
        return is_validation and is_loss, is_loss, is_validation, len(set(source.texts(name)))

    return max(numbers, key=rank)


def _arm_columns(source: Source, chosen: Choice) -> tuple[str, ...]:
    """The columns that likeliest name an arm: words that several rows share, else numbers that several share."""
    used = {chosen.column(chosen.endpoint), chosen.column("seed"), *(n for names in OPTIONAL.values() for n in names)}
    free = [name for name in source.columns if name not in used and name.lower() not in NOT_ARMS and not _is_seed(name)]
    levels = {name: len(set(source.texts(name))) for name in free}
    shared = [name for name in free if 1 < levels[name] <= len(source.rows) / 2]
    words = [name for name in shared if not source.is_number(name)]
    any_words = [name for name in free if not source.is_number(name) or not shared]
    return tuple(words or shared[:1] or any_words or [_found("run", source.columns, {}) or source.columns[0]])


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+", name.lower())


def _is_seed(column: str) -> bool:
    return _words(column)[-1:] == ["seed"]


def _found(name: str, present: list[str], columns: dict[str, str]) -> str | None:
    """The column of an optional name."""
    names = (columns[name],) if name in columns else OPTIONAL[name]
    return next((column for column in names if column in present), None)


# ---------------------------------------------------------------------------------------------------- rows as runs


@dataclass(frozen=True)
class ForeignRun:
    """One run.

    Attributes:
        place: `runs.csv, line 7`, or the run's address on W&B.
        value: The endpoint; None for a run that failed to train.
        figures: `step`, `steps`, `tokens` and `seconds`, those that the table has.
    """

    place: str
    arm: str
    seed: int
    value: float | None
    figures: dict[str, float]


def runs_of(source: Source, chosen: Choice) -> tuple[list[ForeignRun], list[LeftOut]]:
    """The runs of a table, a log at its last step or at the chosen one, and the rows that are no results.

    Raises:
        ConfigError: A cell is not what its column holds, or two rows are of one run.
    """
    present = source.columns
    optional = {name: _found(name, present, chosen.columns) for name in OPTIONAL}
    is_numbered = chosen.column("seed") == NO_SEED and NO_SEED not in present
    numbers: dict[object, int] = {}
    by_run: dict[tuple[str, int], list[ForeignRun]] = {}
    left_out = []
    for place, cells in source.rows:
        row = {name: cells.get(column) if column else None for name, column in optional.items()}
        row |= {"endpoint": cells.get(chosen.column(chosen.endpoint)), "seed": cells.get(chosen.column("seed"))}
        arm, state = chosen.arm_of(cells), _text(row["state"]).lower()
        if not arm.strip(","):
            raise ConfigError(f"{place}: {', '.join(chosen.arm)} is empty", "nothing", "name the arm of every run")
        is_result = state in (*FINISHED, DIVERGED)
        is_empty = not _text(row["endpoint"]) and state != DIVERGED
        if not is_result or (is_empty and state):
            reason = f"finished without {chosen.endpoint}" if is_result else state
            left_out.append(LeftOut(Path(place), reason, arm, state=state))
            continue
        if is_empty and optional["step"]:  # a row of a log with other measures
            continue
        identity = _text(row["run"]) or place
        seed = numbers.setdefault(identity, len(numbers)) if is_numbered else _seed(place, row["seed"])
        value = None if state == DIVERGED else _value(f"{place}: {chosen.endpoint}", row["endpoint"])
        figures = {}
        for name in ("step", "steps", "tokens", "seconds"):
            number = _finite(row[name])
            if number is None and _text(row[name]) and name != "seconds":
                raise ConfigError(f"{place}: {optional[name]} is not a number", _shown(row[name]), "a number or nothing")
            if number is not None:
                figures[name] = number
        by_run.setdefault((arm, seed), []).append(ForeignRun(place, arm, seed, value, figures))
    runs = []
    for rows in by_run.values():
        last = max(run.figures.get("step", math.inf) for run in rows)
        wanted = last if chosen.at is None else chosen.at
        kept = [run for run in rows if run.figures.get("step", math.inf) == wanted]
        if len(kept) > 1:
            raise _repeated(source, chosen, kept)
        if not kept:
            reason = f"no row at step {wanted:g}; its last is {last:g}"
            left_out.append(LeftOut(Path(rows[-1].place), reason, rows[0].arm, rows[0].seed))
        runs += kept
    return runs, left_out


def _repeated(source: Source, chosen: Choice, rows: list[ForeignRun]) -> ConfigError:
    """The error for two rows of one run, with a column that may tell them apart."""
    first, second = rows[:2]
    cells = dict(source.rows)
    fix = "one row per run; for a log, a column named step"
    for column in _arm_columns(source, chosen):
        if column not in chosen.arm and cells[first.place].get(column) != cells[second.place].get(column):
            fix = completed(source, replace(chosen, arm=(*chosen.arm, column))).command(source)
            break
    got = f"{first.place} and {second.place}: {first.arm}, seed {first.seed}"
    return ConfigError("two rows are of one arm and one seed", got, fix)


def _text(cell: object) -> str:
    return "" if cell is None else str(cell).strip()


def _shown(cell: object) -> str:
    return printable(_text(cell) or "nothing", 80)


def _finite(cell: object) -> float | None:
    text = str(cell)
    if isinstance(cell, bool) or "_" in text:  # Python would read 3_05 as 305
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < LARGEST else None


def _seed(place: str, cell: object) -> int:
    text = _text(cell)
    if isinstance(cell, bool) or not re.fullmatch(r"\d{1,15}(\.0)?", text):
        fix = f"whole numbers from 0; --columns seed={NO_SEED} for runs without seeds"
        raise ConfigError(f"{place}: the seed is not a whole number", _shown(text), fix)
    return int(float(text))


def _value(place: str, cell: object) -> float | None:
    if _text(cell).lower() in FAILED:
        return None
    number = _finite(cell)
    if number is None:
        fix = f"a number without unit; `{FAILED[0]}` if the run failed to train, which counts; or remove the row"
        raise ConfigError(f"{place} is not a finite number", _shown(cell), fix)
    return number
