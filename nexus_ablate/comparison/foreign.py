"""Tables of results that other tools wrote: files read as text by cell, columns found or asked for, rows as runs."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from nexus_ablate.comparison.read import LeftOut
from nexus_ablate.errors import ConfigError, did_you_mean
from nexus_ablate.measure.measures import measure_of
from nexus_ablate.plain_data import UNREADABLE
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.runs.reading import leaves

Frame: TypeAlias = Any
"""A pandas.DataFrame, whose type hints don't know what comes out of an expression."""
Numbered: TypeAlias = dict[int, Any]
"""The rows of a file, each by its number."""
NONE = "none"
"""Of `--columns seed=none`: the table has no such column."""
DIVERGED = "diverged"
FINISHED = ("", "finished", "completed", "done", "success", DIVERGED)
"""States of runs that have a result."""
USUAL = {
    "name": "run",
    "Name": "run",
    "ID": "run",
    "status": "state",
    "State": "state",
    "train_steps": "steps",
    "total_tokens": "tokens",
    "train_tokens": "tokens",
    "iter": "step",
    "iteration": "step",
    "trainer/global_step": "step",
    "train/global_step": "step",
    "global_step": "step",
    "_step": "step",
    "Step": "step",
}
"""What judge calls the columns of other tools; of several for one name, the last one that a table has counts."""
AMOUNTS = ("step", "steps", "tokens", "seconds")
NO_ARMS = ("Notes", "User", "Tags", "Created", "Updated", "Runtime", "End Time", "Hostname", "Sweep", "Commit", "Date")
"""Columns of exports that describe no arm."""
ONE_ROW_PER_RUN = "one row per run, with the columns arm, seed and val_loss"
NO_NUMBER = "a number without unit; `failed` if the run failed to train, which counts; or remove the row"
_NUMBER = r"[+-]?(\d{1,30}\.?\d*|\.\d+)(e\+?\d{1,2}|e-\d+)?"
_FAILED = r"failed|diverged|nan|[+-]?inf(inity)?"
"""What stands in place of the endpoint of a run that ended without a finite one."""
_RESULT = rf"(?i)({_NUMBER}|{_FAILED})?"
_SEED = r"(?i)(^|[^a-z])seed$"
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


# ------------------------------------------------------------------------------------------------------------- reading


def read_source(path: Path) -> Source:
    """The rows of a file, by its ending one of `READERS`.

    Raises:
        ConfigError: There is no such file, it cannot be read as a table, or it has no rows.
    """
    kind = path.suffix.lower()
    unit = "row" if kind == ".json" else "line"
    try:
        rows = READERS[kind](path.read_text(encoding="utf-8-sig"))
        return source_of(str(path), {f"{path.name}, {unit} {number}": row for number, row in rows.items()})
    except (*UNREADABLE, csv.Error, OSError) as error:
        fix = f"{ONE_ROW_PER_RUN}, in a file that ends in {', '.join(READERS)}, or wandb:ENTITY/PROJECT"
        raise ConfigError(f"{path} is not a table", str(error), fix) from None


def source_of(name: str, rows: Mapping[str, dict[str, Any]]) -> Source:
    """The table of some rows. Nested objects are columns with dots, as W&B shows them: `optim.lr`.

    Raises:
        ConfigError: There is none.
    """
    if not rows:
        raise ConfigError("the table has no rows", name, ONE_ROW_PER_RUN)
    import pandas

    texts = []
    for row in rows.values():
        texts.append({".".join(keys).strip(): str(cell).strip() for keys, cell in leaves(row) if cell is not None})
    cells = _chart(pandas.DataFrame(texts, [*rows], dtype=object).fillna(""))
    if cells.filter(regex=rf"{_SEED}|^arm$").empty:
        for label in cells.columns.intersection(["run", "Name"]):
            parts = cells[label].str.extract(_RUN_NAME)
            if parts.notna().all(axis=None):
                return Source(name, cells.join(parts), f"arms and seeds are read from {label}; ")
    return Source(name, cells)


def _chart(cells: Frame) -> Frame:
    """W&B's chart export, a column `RUN - METRIC` for each run, as a log with a row per run and step.

    Another table is returned as it is.
    """
    import pandas

    logs = []
    for column in cells.columns[1:]:
        run, separator, metric = column.partition(" - ")
        if not separator:
            return cells
        if not metric.endswith(("__MIN", "__MAX")):
            log = pandas.DataFrame({"run": run, "step": cells.iloc[:, 0], metric: cells[column]})
            logs.append(log.add_suffix(f", {column}", axis="index"))
    return pandas.concat(logs).fillna("") if logs else cells


def _csv(text: str, separators: str = ",\t;") -> Numbered:
    """Rows below a head. Where no commas separate the cells, a comma in a number is its decimal point."""
    head = text.lstrip().partition("\n")[0]
    separator = max(separators, key=head.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
    columns = next(filter(None, reader), [])
    rows = {}
    for cells in reader:
        line = reader.line_num - "".join(cells).count("\n")
        if len(cells) > len(columns) or len({*columns}) < len(columns):
            raise ValueError(f"line {line} does not have the columns {', '.join(columns)}")
        if separator != ",":
            cells = [re.sub(r"^\s*([+-]?\d+),(\d+([eE][+-]?\d+)?)\s*$", r"\1.\2", cell) for cell in cells]
        if any(cells) and cells != columns:
            rows[line] = dict(zip(columns, cells, strict=False))
    return rows


def _json(text: str) -> Numbered:
    """A list of objects, or an object with one such list."""
    values = json.loads(text)
    if isinstance(values, dict):
        (values,) = [value for value in values.values() if isinstance(value, list)]
    return dict(enumerate(values, 1))


def _json_lines(text: str) -> Numbered:
    rows = {}
    for line, row in enumerate(text.split("\n"), 1):
        try:
            if row.strip():
                rows[line] = json.loads(row)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {line}: {error.msg}") from None
    return rows


def _markdown(text: str) -> Numbered:
    """The table between pipes in a page; several with the same columns are one."""
    lines = []
    for line in text.splitlines():
        is_row = line.startswith("|") and not re.fullmatch(r"\|[-:| ]+", line)
        lines.append(re.sub(r"[ *`]*\|[ *`]*", "|", line).strip("|*` ") if is_row else "")
    return _csv("\n".join(lines), "|")


READERS = {".csv": _csv, ".tsv": _csv, ".json": _json, ".jsonl": _json_lines, ".md": _markdown}
"""By the ending of a file: how its rows are read."""


# ---------------------------------------------------------------------------------------------------- what to judge


@dataclass(frozen=True)
class Choice:
    """What is judged, as the flags say it.

    Attributes:
        arm: The columns whose values name an arm.
        endpoint: The measure, which is also its column unless `columns` says otherwise.
        better: `lower` or `higher`, for a measure that this package doesn't know.
        columns: What the table calls `arm`, `seed`, the endpoint, `state`, `run` and those of `AMOUNTS`.
        at: The step at which a log is read. Default: the last one of each run.
    """

    arm: list[str] = field(default_factory=lambda: ["arm"])
    endpoint: str = "val_loss"
    better: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    baseline: str = BASELINE
    at: float | None = None
    delta_min: float | None = None
    allow: list[str] = field(default_factory=list)

    def command(self, source: Source) -> str:
        """The command line that asks for this."""
        columns = [*map("=".join, self.columns.items())]
        words = ["nexus-ablate", "judge", source.name]
        for name, value in {**vars(self), "columns": columns}.items():
            if value:
                words.append("--" + name.replace("_", "-"))
                words.append(",".join(value) if isinstance(value, list) else str(value))
        return shlex.join(words)


def table_of(source: Source, asked: Choice) -> Frame:
    """The table with the columns and the baseline that are asked for, under the names that judge uses.

    Every row has a run (without such a column one of its own), a state and a step ("" where they are not known).

    Raises:
        ConfigError: It lacks one. The message ends with a command that has the likeliest guess in its place.
    """
    known = source.cells
    columns = {name: column for name, column in asked.columns.items() if column in (*known, NONE)}
    # of a table without seeds, every seed is `NONE` until `results_of` numbers its runs
    named = {name: known.get(column, NONE) for name, column in columns.items()}
    usual = {name: known[column] for column, name in USUAL.items() if column in known}
    cells = known.assign(**{"run": known.index, "state": "", "step": "", **usual, **known, **named})
    seeds = [*cells.filter(regex=_SEED)]
    free = known.drop(columns=[*USUAL, *USUAL.values(), *NO_ARMS, *seeds], errors="ignore")
    numbers = [name for name in free if free[name].str.fullmatch(_RESULT).all()]
    if "seed" not in cells:
        columns["seed"] = [*seeds, NONE][0]
    endpoint = asked.endpoint
    if endpoint not in cells:
        endpoint = _likely_endpoint(source, free[numbers], endpoint)
        if "loss" in endpoint and not measure_of(endpoint):
            columns[Choice.endpoint] = endpoint
            endpoint = Choice.endpoint
    better = asked.better
    if not better and not measure_of(endpoint):
        better = "lower" if re.search("loss|ppl|perplexity|bpb|err|time|second|step", endpoint.lower()) else "higher"
    arm = asked.arm
    if not {*arm} <= {*cells}:
        unused = free.drop(columns=[endpoint, *columns.values()], errors="ignore")
        shared = unused.columns[unused.nunique().between(2, len(known) / 2)]
        arm = [*shared.difference(numbers, sort=False)] or [*unused, *cells][:1]
    arms = cells[arm].agg(",".join, axis=1)
    baseline = did_you_mean(asked.baseline, arms) or arms.iloc[0]
    chosen = replace(asked, arm=arm, endpoint=endpoint, better=better, columns=columns, baseline=baseline)
    if chosen != asked:
        raise ConfigError(
            f"{source.name} does not have every column and arm that is asked for",
            f"columns {', '.join(known)}; arms {', '.join(arms.unique())}",
            chosen.command(source),
        )
    return cells.assign(arm=arms)


def _likely_endpoint(source: Source, numbers: Frame, wanted: str) -> str:
    """A column of a near name, else a validation loss, or the numbers that differ most.

    Raises:
        ConfigError: No column has numbers that can be results; whole numbers alone count something.
    """
    likely = {}
    for name, cells in numbers.items():
        if cells.str.contains(".", regex=False).any():
            likely[name] = len(re.findall("val|loss|bpb", name.lower())), cells.nunique()
    if not likely:
        raise ConfigError(f"{source.name} has no column of results", ", ".join(source.cells), ONE_ROW_PER_RUN)
    return did_you_mean(wanted, likely) or max(likely, key=likely.__getitem__)


# ---------------------------------------------------------------------------------------------------- rows as runs


def results_of(name: str, table: Frame, chosen: Choice) -> tuple[Frame, list[LeftOut]]:
    """The results in the table of this name, of a log at its last step or the chosen one, and the runs that have none.

    Returns:
        A row per run with its arm, its seed, the endpoint (NaN where the run failed to train) and those of `AMOUNTS`
        that the table has; and the other runs.

    Raises:
        ConfigError: A cell is not what its column holds, or two rows are of one run.
    """
    endpoint = chosen.endpoint
    run = ["arm", "seed"]
    runs = table["run"].where(table["step"] != "", table.index)
    seeds = table["seed"].mask(table["seed"] == NONE, runs.factorize()[0].astype(str))
    state = table["state"].str.lower()
    table = table.assign(**{"seed": seeds, endpoint: table[endpoint].mask(state == DIVERGED, DIVERGED)})
    left_out = [LeftOut(Path(row.Index), row.state, row.arm) for row in table[~state.isin(FINISHED)].itertuples()]
    table = table[state.isin(FINISHED)]
    refuse(table["arm"], table["arm"].str.strip(",") == "", "the arm is empty", "name the arm of every run")
    refuse(
        table["seed"],
        ~table["seed"].str.fullmatch(r"\d{1,15}(\.0)?"),
        "the seed is not a whole number",
        f"whole numbers from 0; --columns seed={NONE} for runs without seeds",
    )
    table = table.assign(seed=table["seed"].astype(float).astype(int))
    rows = table[table[endpoint] != ""]  # in a log, others have other measures
    texts = rows[rows.columns.intersection([endpoint, *AMOUNTS])]
    for column, cells in texts.items():
        refuse(cells, ~cells.str.fullmatch(_RESULT), f"{column} is not a finite number", NO_NUMBER)
    figures = texts.replace(rf"(?i)^({_FAILED})?$", "nan", regex=True).astype(float)
    results = rows[run].join(figures).sort_values(["step", "seed"], na_position="first")
    refuse(
        results["arm"],
        results.duplicated([*run, "step"]),
        "two rows are of one run",
        "one row per run; or with --arm also the column that tells these runs apart; or a column step",
    )
    when = ""
    if chosen.at is not None:
        when = f" at step {chosen.at:g}"
        results = results[results["step"] == chosen.at]
    results = results.drop_duplicates(run, keep="last")
    missing = table.set_index(run).index.difference(results.set_index(run).index)
    left_out += [LeftOut(Path(name), f"seed {seed} has no {endpoint}{when}", arm) for arm, seed in missing]
    return results, left_out


def refuse(cells: Any, is_wrong: Any, problem: str, fix: str) -> None:
    """Refuse a column in which a cell is wrong.

    Raises:
        ConfigError: There is one.
    """
    wrong = cells[is_wrong]
    if len(wrong):
        raise ConfigError(f"{wrong.index[0]}: {problem}", str(wrong.iloc[0]), fix)
