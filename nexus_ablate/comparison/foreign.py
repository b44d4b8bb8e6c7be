"""Tables of results that other tools wrote: files read as text by cell, columns found or asked for, rows as runs."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from nexus_ablate.comparison.read import LeftOut
from nexus_ablate.errors import ConfigError, did_you_mean, printable
from nexus_ablate.measure.measures import measure_of
from nexus_ablate.plain_data import LARGEST, UNREADABLE
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.runs.reading import leaves

Frame: TypeAlias = Any
"""A pandas.DataFrame, whose type hints don't know what comes out of an expression."""
Numbered: TypeAlias = dict[int, dict[str, Any]]
"""The rows of a file, each by its number."""
NONE = "none"
"""Of `--columns seed=none`: the table has no such column."""
FAILED = ("failed", "diverged", "nan", "inf", "-inf", "infinity", "-infinity")
"""What stands in place of the endpoint of a run that ended without a finite one."""
DIVERGED = "diverged"
FINISHED = ("", "finished", "completed", "done", "success")
"""States of runs whose numbers are results; those of others but `DIVERGED` are not."""
OPTIONAL = {
    "state": ("State", "state", "status"),
    "run": ("run", "ID", "Name", "name"),
    "step": ("step", "Step", "_step", "global_step", "train/global_step", "trainer/global_step", "iteration", "iter"),
    "steps": ("steps", "train_steps"),
    "tokens": ("tokens", "train_tokens", "total_tokens"),
    "seconds": ("seconds", "_runtime"),
}
"""Further columns and what they may be called."""
NUMBERS = ("step", "steps", "tokens", "seconds")
NO_ARMS = ("Notes", "User", "Tags", "Created", "Updated", "Runtime", "End Time", "Hostname", "Sweep", "Commit", "Date")
"""Columns of exports that describe no arm."""
ONE_ROW_PER_RUN = "one row per run, with the columns arm, seed and val_loss"
NO_NUMBER = f"a number without unit; `{FAILED[0]}` if the run failed to train, which counts; or remove the row"
_DECIMAL_COMMA = re.compile(r"^([+-]?\d+),(\d+(?:[eE][+-]?\d+)?)$")
_CHART = re.compile(r"(?P<run>.+?) - (?P<metric>.+?)(?P<end>__MIN|__MAX)?")
"""A column of W&B's chart export: the run, the metric, and the ends of what was averaged."""
_RULER = re.compile(r"\|[-:| ]+")
_RUN_NAME = r"^(?P<arm>.+?)[-_ /,=]+(?:seed|s)?[-_=]?(?P<seed>\d{1,15})$"
"""A run that is named by its arm and its seed: `rms-0`, `rms_seed1`."""


@dataclass(frozen=True)
class Source:
    """A table as it was read.

    Attributes:
        name: As typed: the file, or `wandb:ENTITY/PROJECT`.
        cells: Text; the index says where each row is, as an editor counts it.
        note: What was read from something else than a column; "" where nothing was.
    """

    name: str
    cells: Frame
    note: str = ""

    def renamed(self, columns: Mapping[str, str]) -> Frame:
        """The cells under the names that judge uses: those of `columns`, else what `OPTIONAL` lists."""
        usual = {name: next(filter(self.cells.columns.__contains__, names), name) for name, names in OPTIONAL.items()}
        names = {column: name for name, column in {**usual, **columns}.items() if column != name}
        return self.cells.drop(columns=names.values(), errors="ignore").rename(columns=names)


# ------------------------------------------------------------------------------------------------------------- reading


def read_source(path: Path) -> Source:
    """The rows of a file, by its ending one of `READERS`.

    Raises:
        ConfigError: There is no such file, it cannot be read as a table, or it has no rows.
    """
    kind = path.suffix.lower()
    if kind not in READERS:
        fix = f"a file that ends in {', '.join(READERS)}, or wandb:ENTITY/PROJECT"
        raise ConfigError("judge cannot read a table of this kind", str(path), fix)
    try:
        rows = READERS[kind](path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        fix = f"ls {shlex.quote(str(path.parent))}"
        raise ConfigError("there is no file of this name", str(path), fix) from None
    except (*UNREADABLE, IndexError, csv.Error, OSError) as error:
        raise ConfigError(f"{path} is not a table", printable(str(error), 200), ONE_ROW_PER_RUN) from None
    unit = "row" if kind == ".json" else "line"
    return source_of(str(path), {f"{path.name}, {unit} {number}": row for number, row in rows.items()})


def source_of(name: str, rows: Mapping[str, dict[str, Any]]) -> Source:
    """The table of some rows. Nested objects are columns with dots, as W&B shows them: `optim.lr`.

    Raises:
        ConfigError: There is none.
    """
    if not rows:
        raise ConfigError("the table has no rows", name, ONE_ROW_PER_RUN)
    import pandas

    texts = {}
    for place, row in rows.items():
        texts[place] = {".".join(keys): "" if cell is None else str(cell).strip() for keys, cell in leaves(row)}
    texts = _chart(texts)
    cells = pandas.DataFrame([*texts.values()], [*texts], dtype=object).fillna("")
    labels = cells.columns.intersection(["run", "Name"])
    if len(labels) and "arm" not in cells and not any(map(_is_seed, cells)):
        parts = cells[labels[0]].str.extract(_RUN_NAME)
        if parts.notna().all(axis=None):
            return Source(name, cells.join(parts), f"arms and seeds are read from {labels[0]}; ")
    return Source(name, cells)


def _chart(rows: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """W&B's chart export, a column per run and metric, as a log with a row per run and step; another table as it is."""
    step, *others = next(iter(rows.values())) or ("",)
    parts = {column: _CHART.fullmatch(column) for column in others}
    if not parts or None in parts.values():
        return rows
    log = {}
    for place, cells in rows.items():
        for column, part in parts.items():
            if part and not part["end"] and cells[column]:
                log[f"{place}, {column}"] = {"run": part["run"], "step": cells[step], part["metric"]: cells[column]}
    return log


def _csv(text: str) -> Numbered:
    """Where no commas separate the cells, a comma in a number is its decimal point."""
    head = text.lstrip().partition("\n")[0]
    separator = next((mark for mark in "\t,;" if mark in head), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
    columns = [column.strip() for column in next(reader, [])]
    rows, line = {}, 2
    for cells in reader:
        if len(cells) > len(columns) or len({*columns}) < len(columns):
            raise ValueError(f"line {line} has {len(cells)} cells, the head has {', '.join(columns)}")
        if separator != ",":
            cells = [_DECIMAL_COMMA.sub(r"\1.\2", cell.strip()) for cell in cells]
        if any(cells):
            rows[line] = dict(zip(columns, cells, strict=False))
        line = reader.line_num + 1
    return rows


def _json(text: str) -> Numbered:
    """A list of objects, or an object with one such list."""
    values = json.loads(text, parse_constant=str)
    if isinstance(values, dict):
        (values,) = [value for value in values.values() if isinstance(value, list)]
    return dict(enumerate(values, 1))


def _json_lines(text: str) -> Numbered:
    rows = {}
    for line, row in enumerate(text.split("\n"), 1):
        try:
            if row.strip():
                rows[line] = json.loads(row, parse_constant=str)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {line}: {error.msg}") from None
    return rows


def _markdown(text: str) -> Numbered:
    """The table between pipes in a page; several with the same columns are one."""
    rows, heads = {}, []
    for line, (row, after) in enumerate(itertools.pairwise([*text.splitlines(), ""]), 1):
        cells = [cell.strip(" *`") for cell in row.strip("| ").split("|")]
        if _RULER.fullmatch(after):
            heads.append(cells)
            if cells != heads[0]:
                raise ValueError(f"one table between pipes is read, and at line {line} another one begins")
        elif row.startswith("|") and not _RULER.fullmatch(row):
            rows[line] = dict(zip(heads[0], cells, strict=True))
    return rows


READERS = {".csv": _csv, ".tsv": _csv, ".json": _json, ".jsonl": _json_lines, ".md": _markdown}
"""By the ending of a file: how its rows are read."""


# ---------------------------------------------------------------------------------------------------- what to judge


@dataclass(frozen=True)
class Choice:
    """What is judged, as the flags say it.

    Attributes:
        arm: The columns whose values name an arm; [] for `arm`.
        endpoint: The measure, which is also its column unless `columns` says otherwise.
        better: `lower` or `higher`, for a measure that this package doesn't know.
        columns: What the table calls `arm`, `seed`, the endpoint and the optional columns.
        at: The step at which a log is read. Default: the last one of each run.
    """

    arm: list[str] = field(default_factory=list)
    endpoint: str = "val_loss"
    better: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    baseline: str = BASELINE
    at: float | None = None
    delta_min: float | None = None
    allow: list[str] = field(default_factory=list)

    def arms(self, cells: Frame) -> Any:
        """The arm of each row."""
        return cells[self.arm or ["arm"]].agg(",".join, axis=1)

    def command(self, source: Source) -> str:
        """The command line that asks for this."""
        words = ["nexus-ablate", "judge", source.name]
        for name, value in vars(self).items():
            if isinstance(value, dict):
                value = [f"{key}={column}" for key, column in value.items()]
            if value and value != getattr(Choice(), name):
                words += ["--" + name.replace("_", "-"), ",".join(value) if isinstance(value, list) else str(value)]
        return shlex.join(words)


def check_choice(source: Source, asked: Choice) -> None:
    """Check that the table has what is asked for.

    Raises:
        ConfigError: It has not. The message ends with a command for what it does have.
    """
    chosen = completed(source, asked)
    if chosen != asked:
        arms = chosen.arms(source.renamed(chosen.columns)).unique()
        got = f"columns {', '.join(source.cells)}; arms {', '.join(arms)}"
        problem = f"{source.name} does not have every column and arm that is asked for"
        raise ConfigError(problem, printable(got, 300), chosen.command(source))


def completed(source: Source, asked: Choice) -> Choice:
    """What is asked for, with the likeliest guess in place of everything that the table doesn't have."""
    columns = {name: column for name, column in asked.columns.items() if column in (*source.cells, NONE)}
    cells = source.renamed(columns)
    endpoint, better, arm = asked.endpoint, asked.better, asked.arm
    if "seed" not in cells and columns.get("seed") != NONE:
        columns["seed"] = next(filter(_is_seed, cells), NONE)
    if endpoint not in cells:
        endpoint = _endpoint_column(source.name, cells, endpoint)
        if "loss" in endpoint and not measure_of(endpoint):
            columns[Choice.endpoint] = columns.pop(endpoint, endpoint)
            endpoint = Choice.endpoint
    if not measure_of(endpoint) and not better:
        better = "lower" if re.search("loss|ppl|perplexity|bpb|err|time|second|step", endpoint.lower()) else "higher"
    if not {*(arm or ["arm"])} <= {*cells}:
        arm = _arm_columns(cells, {endpoint, *columns.values()})
    chosen = replace(asked, arm=arm, endpoint=endpoint, better=better, columns=columns)
    names = [*chosen.arms(source.renamed(columns)).unique()]
    usual = [name for name in names if name.lower() in (BASELINE, "base", "control", "default")]
    near = asked.baseline if asked.baseline in names else did_you_mean(asked.baseline, names)
    return replace(chosen, baseline=near or [*usual, *names][0])


def _endpoint_column(source: str, cells: Frame, wanted: str) -> str:
    """The likeliest endpoint: a column of a near name, else a validation loss, a loss, the numbers that differ most.

    Raises:
        ConfigError: No column has numbers that can be results; whole numbers alone count something.
    """
    likely = {}
    for name in _free(cells, ()):
        if _is_number(cells[name]) and not cells[name].str.fullmatch(r"\d*").all():
            is_loss = "loss" in name.lower() or "bpb" in name.lower()
            likely[name] = is_loss, "val" in name.lower(), cells[name].nunique()
    if not likely:
        problem = f"{source} has no column of results"
        raise ConfigError(problem, printable(", ".join(cells), 200), ONE_ROW_PER_RUN)
    return did_you_mean(wanted, likely) or max(likely, key=likely.__getitem__)


def _arm_columns(cells: Frame, used: Collection[str]) -> list[str]:
    """The columns that likeliest name an arm: words that several rows share, else numbers that several share."""
    free = _free(cells, used)
    shared = [name for name in free if 1 < cells[name].nunique() <= len(cells) / 2]
    words = [name for name in shared if not _is_number(cells[name])]
    return words or [*shared, *free, cells.columns[0]][:1]


def _free(cells: Frame, used: Collection[str]) -> list[str]:
    """The columns that may describe an arm or a result."""
    return [name for name in cells if name not in (*used, *OPTIONAL, *NO_ARMS) and not _is_seed(name)]


def _is_number(cells: Any) -> bool:
    """Whether all filled cells of a column are numbers."""
    filled = [text for text in cells if text and text.lower() not in FAILED]
    return bool(filled) and not any(math.isnan(number(text)) for text in filled)


def number(text: str) -> float:
    """The finite number that a cell holds; NaN for anything else."""
    try:
        value = float(text.replace("_", "?"))
    except ValueError:
        return math.nan
    return value if abs(value) < LARGEST else math.nan


def _is_seed(column: str) -> bool:
    return re.search(r"(^|[^a-z])seed$", column.lower()) is not None


# ---------------------------------------------------------------------------------------------------- rows as runs


class Result(NamedTuple):
    """A row that is the result of a run.

    Attributes:
        value: Of the endpoint; NaN for a run that failed to train.
        amounts: Those of `NUMBERS` that the row has.
    """

    place: str
    arm: str
    seed: int
    value: float
    amounts: dict[str, float]


def results_of(source: Source, chosen: Choice) -> tuple[list[Result], list[LeftOut]]:
    """The results in a table, of a log at its last step or at the chosen one, and the rows that are no results.

    Raises:
        ConfigError: A cell is not what its column holds, or two rows are of one run.
    """
    table = source.renamed(chosen.columns)
    runs: dict[str, int] = {}  # without a seed
    by_run: dict[tuple[str, int], dict[float, Result]] = {}  # each by step
    left_out = []
    for (place, cells), arm in zip(table.to_dict("index").items(), chosen.arms(table), strict=True):
        state = cells.get("state", "").lower()
        if state not in (*FINISHED, DIVERGED):
            left_out.append(LeftOut(Path(place), state, arm, state=state))
            continue
        if not arm.strip(","):
            raise _refused(place, "the arm is empty", arm, "name the arm of every run")
        if chosen.columns.get("seed") == NONE:
            run = cells.get("run", place) if "step" in cells else place
            seed = runs.setdefault(run, len(runs))
        elif re.fullmatch(r"\d{1,15}(\.0)?", cells["seed"]):
            seed = int(float(cells["seed"]))
        else:
            fix = f"whole numbers from 0; --columns seed={NONE} for runs without seeds"
            raise _refused(place, "the seed is not a whole number", cells["seed"], fix)
        by_step = by_run.setdefault((arm, seed), {})
        text = DIVERGED if state == DIVERGED else cells[chosen.endpoint]
        if not text:  # in a log, a row of other measures
            continue
        value = math.nan if text.lower() in FAILED else _number(place, chosen.endpoint, text)
        amounts = {name: _number(place, name, cells[name]) for name in NUMBERS if name in cells}
        step = amounts.get("step", 0.0)
        if step in by_step:
            fix = "one row per run; or with --arm also the column that tells these runs apart; or a column step"
            raise ConfigError("two rows are of one run", f"{by_step[step].place} and {place}: {arm}, seed {seed}", fix)
        by_step[step] = Result(place, arm, seed, value, amounts)
    results = []
    for (arm, seed), by_step in by_run.items():
        step = max(by_step, default=-1.0) if chosen.at is None else chosen.at
        if step in by_step:
            results.append(by_step[step])
        else:
            at = "" if chosen.at is None else f" at step {step:g}"
            left_out.append(LeftOut(Path(source.name), f"seed {seed} has no {chosen.endpoint}{at}", arm, seed))
    return results, left_out


def _number(place: str, what: str, text: str) -> float:
    """A cell's number.

    Raises:
        ConfigError: It has none.
    """
    value = number(text)
    if math.isnan(value):
        raise _refused(place, f"{what} is not a finite number", text, NO_NUMBER)
    return value


def _refused(place: str, problem: str, cell: str, fix: str) -> ConfigError:
    return ConfigError(f"{place}: {problem}", printable(cell, 80), fix)
