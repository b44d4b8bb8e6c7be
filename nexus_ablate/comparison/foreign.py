"""Tables of results that other tools wrote: files read as text by cell, columns found or asked for, rows as runs."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from nexus_ablate.comparison.read import LeftOut
from nexus_ablate.errors import ConfigError, did_you_mean, printable
from nexus_ablate.measure.measures import measure_of
from nexus_ablate.plain_data import LARGEST, UNREADABLE
from nexus_ablate.runs.naming import BASELINE

Frame: TypeAlias = Any
"""A pandas.DataFrame."""
Rows: TypeAlias = dict[int, dict[str, Any]]
"""Cells by column, by the number of the row."""
Cells: TypeAlias = Any
"""A pandas.Series. Its type hints don't know what comes out of an expression."""
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
_DECIMAL_COMMA = re.compile(r"^([+-]?\d+),(\d+(?:[eE][+-]?\d+)?)$")
_CHART = r"^(?P<run>.+?) - (?P<metric>.+?)(?P<end>__MIN|__MAX)?$"
"""A column of W&B's chart export: the run, the metric, and the ends of what was averaged."""
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

    def renamed(self, columns: dict[str, str]) -> Frame:
        """The cells under the names that judge uses: those of `columns`, else what `OPTIONAL` lists."""
        usual = {name: next(filter(self.cells.columns.__contains__, names), name) for name, names in OPTIONAL.items()}
        cells = self.cells
        for name, column in {**usual, **columns}.items():
            if column != name:
                cells = cells.drop(columns=name, errors="ignore").rename(columns={column: name})
        return cells


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
        frame = frame_of(READERS[kind](path.read_bytes()))
    except FileNotFoundError:
        fix = f"ls {shlex.quote(str(path.parent))}"
        raise ConfigError("there is no file of this name", str(path), fix) from None
    except (*UNREADABLE, NotImplementedError, csv.Error, OSError) as error:
        raise ConfigError(f"{path} is not a table", printable(str(error), 200), ONE_ROW_PER_RUN) from None
    unit = "row" if kind in (".json", ".parquet") else "line"
    frame.index = [f"{path.name}, {unit} {number}" for number in frame.index]
    return source_of(str(path), frame)


def source_of(name: str, frame: Frame) -> Source:
    """The table of a frame, with a row per run and step, and with arms and seeds.

    Raises:
        ConfigError: It has no rows.
    """
    if frame.empty:
        raise ConfigError("the table has no rows", name, ONE_ROW_PER_RUN)
    cells = _chart(frame.astype(object).where(frame.notna(), "").astype(str))
    names = [column for column in ("run", "Name") if column in cells]
    if names and "arm" not in cells and not any(map(_is_seed, cells)):
        parts = cells[names[0]].str.extract(_RUN_NAME)
        if parts.notna().all(axis=None):
            return Source(
                name, cells.assign(arm=parts["arm"], seed=parts["seed"]), f"arms and seeds are read from {names[0]}; "
            )
    return Source(name, cells)


def frame_of(rows: Mapping[Any, dict[str, Any]]) -> Frame:
    """Nested objects are columns with dots, as W&B shows them: `optim.lr`."""
    import pandas

    return pandas.json_normalize([*rows.values()]).set_axis([*rows], axis=0)


def _csv(data: bytes) -> Rows:
    """Where semicolons separate the cells, a comma in a number is its decimal point."""
    text = data.decode("utf-8-sig")
    head = text.lstrip().partition("\n")[0]
    separator = next((mark for mark in "\t,;" if mark in head), ",")
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, restval="")
    rows = {}
    for row in reader:
        line = reader.line_num
        if None in row:
            raise ValueError(f"line {line} has more cells than the head")
        first = line - "".join(row.values()).count("\n")
        cells = {name.strip(): cell.strip() for name, cell in row.items()}
        if separator == ";":
            cells = {name: _DECIMAL_COMMA.sub(r"\1.\2", cell) for name, cell in cells.items()}
        rows[first] = cells
    names = reader.fieldnames or []
    if len(set(names)) < len(names):
        raise ValueError(f"two columns have one name: {', '.join(names)}")
    return {line: row for line, row in rows.items() if any(row.values())}


def _json(data: bytes) -> Rows:
    """A list of objects, an object with such a list, or columns as pandas writes them."""
    values = json.loads(data.decode("utf-8-sig"), parse_constant=str)
    if isinstance(values, dict):
        lists = [value for value in values.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        import pandas

        values = lists[0] if len(lists) == 1 else pandas.DataFrame(values).to_dict("records")
    return dict(enumerate(values, 1))


def _json_lines(data: bytes) -> Rows:
    rows = {}
    for line, text in enumerate(data.decode("utf-8-sig").split("\n"), 1):
        try:
            if text.strip():
                rows[line] = json.loads(text, parse_constant=str)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {line}: {error.msg}") from None
    return rows


def _parquet(data: bytes) -> Rows:
    try:
        from pyarrow import parquet
    except ImportError:
        problem, got = "reading Parquet needs the package pyarrow", "a file that ends in .parquet"
        raise ConfigError(problem, got, "pip install pyarrow") from None
    return dict(enumerate(parquet.read_table(io.BytesIO(data)).to_pylist(), 1))


def _markdown(data: bytes) -> Rows:
    """The table between pipes in a page; several with the same columns are one."""
    lines = {n: text for n, text in enumerate(data.decode("utf-8-sig").splitlines(), 1) if text.startswith("|")}
    rows = {n: [cell.strip(" *`") for cell in text.strip("| ").split("|")] for n, text in lines.items()}
    rulers = [n for n, cells in rows.items() if not set("".join(cells)) - set("-: ")]
    heads = [rows[n - 1] for n in rulers]
    if not heads or any(head != heads[0] for head in heads):
        raise ValueError(f"it has {len(heads)} tables between pipes, with other columns; one is read")
    body = {n: cells for n, cells in rows.items() if n not in rulers and cells != heads[0]}
    return {n: dict(zip(heads[0], cells, strict=True)) for n, cells in body.items()}


READERS: dict[str, Callable[[bytes], Rows]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".json": _json,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
    ".md": _markdown,
}
"""By the ending of a file: its rows, each with its number."""


def _chart(cells: Frame) -> Frame:
    """W&B's chart export, a column per run and metric, as a log with a row per run and step; another table as it is."""
    step, *others = cells
    if not others or not all(re.match(_CHART, name) for name in others):
        return cells
    rows = cells.rename_axis("place").reset_index().melt(["place", step], others)
    rows = rows.join(rows["variable"].str.extract(_CHART)).rename(columns={step: "step"})
    rows = rows[rows["end"].isna() & (rows["value"] != "")]
    table = rows.pivot(index=["place", "run", "step"], columns="metric", values="value")
    return table.fillna("").reset_index(["run", "step"])


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

    def arms(self, cells: Frame) -> Cells:
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
    problem, got = f"{source.name} does not have every column that is asked for", [*source.cells]
    if chosen == replace(asked, baseline=chosen.baseline):
        problem, got = f"no arm is called {asked.baseline}", [*asked.arms(source.renamed(asked.columns)).unique()]
    if chosen != asked:
        raise ConfigError(problem, printable(", ".join(got), 200), chosen.command(source))


def completed(source: Source, asked: Choice) -> Choice:
    """What is asked for, with the likeliest guess in place of everything that the table doesn't have."""
    columns = {name: column for name, column in asked.columns.items() if column in (*source.cells, NONE)}
    cells = source.renamed(columns)
    endpoint, better, arm = asked.endpoint, asked.better, asked.arm
    if "seed" not in cells and columns.get("seed") != NONE:
        columns["seed"] = next(filter(_is_seed, cells), NONE)
    if endpoint not in cells:
        endpoint = _endpoint_column(source, cells, endpoint)
        if "loss" in endpoint and not measure_of(endpoint):
            columns[Choice.endpoint], endpoint = endpoint, Choice.endpoint
    if not measure_of(endpoint) and not better:
        better = "lower" if re.search("loss|ppl|perplexity|bpb|err|time|second|step", endpoint.lower()) else "higher"
    if not {*(arm or ["arm"])} <= {*cells}:
        arm = _arm_columns(cells, {endpoint, *columns.values()})
    chosen = replace(asked, arm=arm, endpoint=endpoint, better=better, columns=columns)
    names = [*chosen.arms(source.renamed(columns)).unique()]
    usual = [name for name in names if name.lower() in (BASELINE, "base", "control", "default")]
    near = asked.baseline if asked.baseline in names else did_you_mean(asked.baseline, names)
    return replace(chosen, baseline=near or [*usual, *names][0])


def _endpoint_column(source: Source, cells: Frame, wanted: str) -> str:
    """The likeliest endpoint: a column of a near name, else a validation loss, a loss, the numbers that differ most."""
    free = [name for name in cells if name not in OPTIONAL and not _is_seed(name)]
    numbers = [name for name in free if _is_number(cells[name])]
    if not numbers:
        problem = f"{source.name} has no column of results"
        raise ConfigError(problem, printable(", ".join(cells), 200), ONE_ROW_PER_RUN)

    def likelihood(name: str) -> tuple[bool, bool, int]:
        return "loss" in name.lower() or "bpb" in name.lower(), "val" in name.lower(), cells[name].nunique()

    return did_you_mean(wanted, numbers) or max(numbers, key=likelihood)


def _arm_columns(cells: Frame, used: set[str]) -> list[str]:
    """The columns that likeliest name an arm: words that several rows share, else numbers that several share."""
    free = [name for name in cells if name not in used.union(NO_ARMS, OPTIONAL) and not _is_seed(name)]
    shared = [name for name in free if 1 < cells[name].nunique() <= len(cells) / 2]
    words = [name for name in shared or free if not _is_number(cells[name])]
    return words or shared[:1] or [cells.columns[0]]


def _is_number(texts: Cells) -> bool:
    filled = texts[(texts != "") & ~texts.str.lower().isin(FAILED)]
    return len(filled) > 0 and _numbers(filled).notna().all()


def _numbers(texts: Cells) -> Cells:
    """NaN for what is none."""
    import pandas

    return pandas.to_numeric(texts.replace("", "nan"), errors="coerce")


def _is_seed(column: str) -> bool:
    return re.search(r"(^|[^a-z])seed$", column.lower()) is not None


# ---------------------------------------------------------------------------------------------------- rows as runs


def runs_of(source: Source, chosen: Choice) -> tuple[Frame, list[LeftOut]]:
    """The runs of a table, a log at its last step or at the chosen one, and the rows that are no results.

    Returns:
        A row per run with `arm`, `seed`, `value` (NaN for a run that failed to train) and those of `NUMBERS` that the
        table has; and what was left out.

    Raises:
        ConfigError: A cell is not what its column holds, or two rows are of one run.
    """
    rows = source.renamed(chosen.columns)
    rows = rows.assign(arm=chosen.arms(rows), value=rows[chosen.endpoint])
    is_log = "step" in rows
    if chosen.columns.get("seed") == NONE:
        rows["seed"] = range(len(rows))
        if is_log and "run" in rows:
            rows["seed"] = rows.groupby("run", sort=False).ngroup()
    left_out = []
    if "state" in rows:
        state = rows["state"].str.lower()
        rows["value"] = rows["value"].mask(state == DIVERGED, DIVERGED)
        is_unfinished = ~state.isin((*FINISHED, DIVERGED))
        rows["state"] = state.where(is_unfinished, f"finished without {chosen.endpoint}")
        is_out = is_unfinished | (rows["value"] == "")
        for place, arm, why in rows[is_out][["arm", "state"]].itertuples(name=None):
            left_out.append(LeftOut(Path(place), why, arm, state=why))
        rows = rows[~is_out]
    if is_log:  # its other rows are of other measures
        rows = rows[rows["value"] != ""]
    _refuse(rows["arm"], rows["arm"].str.strip(",") == "", "the arm is empty", "name the arm of every run")
    fix = f"a number without unit; `{FAILED[0]}` if the run failed to train, which counts; or remove the row"
    _refuse(rows["value"], rows["value"] == "", f"{chosen.endpoint} is empty", fix)
    rows = rows.assign(value=rows["value"].mask(rows["value"].str.lower().isin(FAILED), ""))
    for name in rows.columns.intersection([*NUMBERS, "seed", "value"]):
        numbers = _numbers(rows[name].astype(str))
        what = chosen.endpoint if name == "value" else name
        _refuse(rows[name], (rows[name] != "") & ~(numbers.abs() < LARGEST), f"{what} is not a finite number", fix)
        rows[name] = numbers
    fix = f"whole numbers from 0; --columns seed={NONE} for runs without seeds"
    _refuse(rows["seed"], rows["seed"] % 1 != 0, "the seed is not a whole number", fix)
    kept = rows
    if is_log:
        last = rows.groupby(["arm", "seed"])["step"].transform("max")
        kept = rows[rows["step"] == (last if chosen.at is None else chosen.at)]
    copies = kept[kept.duplicated(["arm", "seed"], keep=False)]
    if len(copies):
        arm, seed = copies[["arm", "seed"]].iloc[0]
        places = copies.index[(copies["arm"] == arm) & (copies["seed"] == seed)]
        fix = "one row per run; or with --arm also the column that tells these runs apart; or a log with a column step"
        raise ConfigError("two rows are of one run", f"{places[0]} and {places[1]}: {arm}, seed {seed:g}", fix)
    for arm, seed in {*zip(rows["arm"], rows["seed"], strict=True)} - {*zip(kept["arm"], kept["seed"], strict=True)}:
        left_out.append(LeftOut(Path(source.name), f"seed {seed:g} has no row at step {chosen.at:g}", arm, int(seed)))
    return kept.astype({"seed": int}), left_out


def _refuse(column: Cells, is_bad: Cells, problem: str, fix: str) -> None:
    """Refuse a table at the first of its bad cells."""
    for place, cell in column[is_bad].items():
        raise ConfigError(f"{place}: {problem}", printable(str(cell), 80), fix)
