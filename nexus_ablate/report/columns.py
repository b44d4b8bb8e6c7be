"""The columns of a comparison, each named once. The terminal, the page, Markdown, CSV, JSON and frames iterate them.

To show another number of each arm everywhere, add a `Column` to `COLUMNS`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nexus_ablate.comparison.compare import Comparison, Row, Table
from nexus_ablate.comparison.fairness import FAIL, PASS, WAIVED, WARN
from nexus_ablate.comparison.verdict import (
    BETTER,
    DIVERGED,
    EQUIVALENT,
    IDENTICAL,
    NOT_COMPARABLE,
    WEIGHED,
    WORSE,
)
from nexus_ablate.console import compact
from nexus_ablate.measure.measures import BITS, NATS, measure_of

NOTHING = "–"
TONES = {
    **dict.fromkeys((BETTER, PASS), "good"),
    **dict.fromkeys((WORSE, DIVERGED, FAIL), "bad"),
    **dict.fromkeys((EQUIVALENT, IDENTICAL), "same"),
    **dict.fromkeys((NOT_COMPARABLE, WARN, WAIVED), "warn"),
}
"""How verdicts and statuses are coloured, in every output; other words are not."""


class TextTable(NamedTuple):
    """A table of texts. The first column names the rows.

    Attributes:
        words: The heads of the columns that are aligned to the left.
    """

    heads: Sequence[str]
    rows: Sequence[list[str]]
    words: Sequence[str]


@dataclass(frozen=True)
class Column:
    """A column of the tables of arms.

    Attributes:
        title: Its head where people read it.
        name: Its name in CSV, JSON and frames.
        meaning: For the page's list of columns.
        value: The word or number of an arm; None: not measured.
        text: How it is written; `str` for words.
        main: It stands in the first table of the page, and of a wide terminal.
    """

    title: str
    name: str
    meaning: str
    value: Callable[[Row, Table], Any]
    text: Callable[[Any, Row], str] = lambda value, row: str(value)
    main: bool = False

    def cell(self, row: Row, table: Table) -> str:
        """The text of an arm's cell."""
        value = self.value(row, table)
        return NOTHING if value is None else self.text(value, row)


class VerdictColumn(Column):
    """The verdict, as text without what qualifies every word of the table: that is said once."""

    def cell(self, row: Row, table: Table) -> str:
        if row.is_baseline:
            return "baseline"
        own = [text for text in row.qualifiers if text not in shared_qualifiers(table)]
        return f"{row.word} ({', '.join(own)})" if own else row.word


def shared_qualifiers(table: Table) -> list[str]:
    """What qualifies every word of the table that rests on an interval."""
    rows = [row for row in table.rows if row.word in WEIGHED]
    return [text for text in rows[0].qualifiers if all(text in row.qualifiers for row in rows)] if rows else []


# ----------------------------------------------------------------------------------------------------------- values


def difference(row: Row) -> float | None:
    """The mean difference; None for an arm that cannot be compared."""
    return row.effect.delta if row.effect is not None else None


def interval_text(row: Row) -> str:
    """The interval that decides: `+0.0012 to +0.0034`."""
    if row.effect is None:
        return NOTHING
    return f"{row.endpoint.signed(row.effect.low)} to {row.endpoint.signed(row.effect.high)}"


def _of_effect(name: str) -> Callable[[Row, Table], float | None]:
    return lambda row, table: getattr(row.effect, name) if difference(row) is not None else None


def _of_worth(name: str) -> Callable[[Row, Table], float | None]:
    return lambda row, table: getattr(row.worth, name) if row.worth is not None else None


def _values(row: Row) -> Any:
    values = row.endpoint.readable(row.arm.values(row.endpoint.name, [*row.arm.runs]))
    return values[np.isfinite(values)]


def mean_value(row: Row) -> float | None:
    """The endpoint's mean over the arm's runs."""
    values = _values(row)
    return float(values.mean()) if len(values) else None


def _sd(row: Row) -> float | None:
    values = _values(row)
    return float(values.std(ddof=1)) if len(values) > 1 else None


def _mean_text(value: float, row: Row) -> str:
    sd = _sd(row)
    text = row.endpoint.value(value)
    return text if sd is None else f"{text} ±{row.endpoint.spread(sd)}"


def _runs(row: Row, table: Table) -> str:
    """`8`, or `6 of 8` where some gave no value."""
    planned = len(table.study.seeds) if table.study else len(row.arm.runs)
    used = len(_values(row))
    return str(used) if used == planned else f"{used} of {planned}"


def _figure(name: str) -> Callable[[Row, Table], float | None]:
    return lambda row, table: row.arm.mean(name)


def _share(name: str) -> Callable[[Row, Table], float | None]:
    """A figure against the baseline's, as a share."""

    def value(row: Row, table: Table) -> float | None:
        own, base = row.arm.mean(name), table.baseline.mean(name)
        return own / base - 1 if own and base else None

    return value


def _signed(value: float, row: Row) -> str:
    return row.endpoint.signed(value)


def _size(value: float, row: Row) -> str:
    return row.endpoint.signed(value) if row.endpoint.log else row.endpoint.value(value)


def p_text(p: float, row: Row) -> str:
    """A p value with two digits."""
    if p < 0.0001:
        return "<0.0001"
    return f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def _multiple(value: float, row: Row) -> str:
    from nexus_ablate.comparison.worth import multiple

    return multiple(value)


def _written(form: str) -> Callable[[Any, Row], str]:
    return lambda value, row: form.format(value)


def _worth(row: Row, table: Table) -> str | None:
    return str(row.worth) if row.worth is not None else None


def _interval(row: Row, table: Table) -> str | None:
    return interval_text(row) if row.effect is not None else None


COLUMNS = [
    Column("arm", "arm", "its name in the study", lambda row, table: row.arm.name, main=True),
    VerdictColumn(
        "verdict",
        "verdict",
        "see the words below",
        lambda row, table: "baseline" if row.is_baseline else row.verdict,
        main=True,
    ),
    Column(
        "difference",
        "delta",
        "mean difference to the baseline over the pairs of one seed; a ratio for measures on a logarithmic scale",
        _of_effect("delta"),
        _signed,
        main=True,
    ),
    Column("interval", "interval", "the one that decides: all intervals hold together", _interval, main=True),
    Column("worth", "worth", "the multiple of its tokens at which the baseline would end there", _worth, main=True),
    Column(
        "mean", "mean", "mean ± standard deviation over seeds", lambda row, table: mean_value(row), _mean_text, True
    ),
    Column("seeds", "seeds", "that have a value, of those planned", _runs, main=True),
    Column("p", "p", "of this comparison alone, not adjusted for the others", _of_effect("p"), p_text, main=True),
    Column("low", "low", "lower end of the interval", _of_effect("low"), _signed),
    Column("high", "high", "upper end of the interval", _of_effect("high"), _signed),
    Column("pairs", "n", "seeds at which arm and baseline both have a value", _of_effect("n")),
    Column("level", "level", "of this interval alone", _of_effect("level"), _written("{:.3g}")),
    Column("SD of a pair", "spread", "standard deviation of a pair's difference", _of_effect("spread"), _size),
    Column("SE", "se", "standard error of the difference", _of_effect("se"), _size),
    Column("SE over text", "text_se", "its part over evaluation text", _of_effect("text_se"), _size),
    Column("df", "df", "degrees of freedom", _of_effect("df"), _written("{:.1f}")),
    Column(
        "detectable", "detectable", "difference that these seeds show with 80% power", _of_effect("detectable"), _size
    ),
    Column("seeds to decide", "needed", "in all, for this difference", lambda row, table: row.needed),
    Column("worth, low", "worth_low", "lower end of worth; 0: below the budgets", _of_worth("low"), _multiple),
    Column("worth, high", "worth_high", "upper end of worth; inf: above the budgets", _of_worth("high"), _multiple),
    Column("worth per FLOP", "worth_per_flop", "over the whole run", _of_worth("per_flop"), _multiple),
    Column("worth per second", "worth_per_second", "on the same machine", _of_worth("per_second"), _multiple),
    Column(
        "best LR", "best_lr", "its own best learning rate", lambda row, table: row.arm.best_rate, _written("{:.3g}")
    ),
    Column("failed", "failed", "runs without a finite loss", lambda row, table: len(row.arm.failed)),
    Column("params", "params_share", "against the baseline", _share("params"), _written("{:+.1%}")),
    Column("FLOPs", "flops_share", "a token, against the baseline", _share("flops_per_token"), _written("{:+.1%}")),
    Column("tokens", "tokens", "of training", _figure("tokens"), lambda value, row: compact(value)),
    Column("seconds", "seconds", "of training", _figure("seconds"), lambda value, row: compact(value)),
    Column("tokens/s", "tokens_per_second", "training speed", _figure("tokens_per_second"), lambda v, row: compact(v)),
    Column(
        "memory",
        "peak_memory_bytes",
        "largest, in bytes",
        _figure("peak_memory_bytes"),
        lambda v, row: f"{compact(v)}B",
    ),
    Column("spikes", "spikes", "share of losses 6 SD off", _figure("spike_score/train/loss"), _written("{:.2%}")),
    Column("changes", "overrides", "what the arm changes", lambda row, table: " ".join(row.arm.overrides) or None),
    Column("why", "sentence", "the verdict in a sentence", lambda row, table: row.sentence or None),
]
BY_NAME = {column.name: column for column in COLUMNS}
MAIN = [column for column in COLUMNS if column.main]


def figure_columns(table: Table) -> list[Column]:
    """A column for each loss, diagnostic and evaluation that a run of the table recorded."""
    names = {name for arm in table.arms for run in arm.runs.values() for name in run.figures}
    columns = []
    for name in sorted(names - {"spike_score/train/loss"}):
        measure = measure_of(name)
        if "/" not in name and (measure is None or measure.unit not in (NATS, BITS)):
            continue
        meaning = ", ".join(filter(None, (measure.definition, measure.unit))) if measure is not None else ""
        columns.append(Column(name, name, meaning, _figure(name), _written("{:.4g}")))
    return columns


def shown(table: Table, columns: Sequence[Column]) -> list[Column]:
    """The columns in which at least one arm has something."""
    return [column for column in columns if any(column.value(row, table) is not None for row in table.rows)]


def sorted_by(column: Column, row: Row, table: Table) -> Any:
    """What the page sorts a cell by: the number behind a text."""
    if column.name == "worth":
        return min(row.worth.at, sys.float_info.max) if row.worth else None  # JavaScript reads no `inf`
    return len(_values(row)) if column.name == "seeds" else column.value(row, table)


def text_table(rows: Sequence[Row], table: Table, columns: Sequence[Column]) -> TextTable:
    """A row per arm, the baseline first."""
    heads = [column.title for column in columns]
    cells = [[column.cell(row, table) for column in columns] for row in rows]
    return TextTable(heads, cells, ["arm", "verdict", "changes", "why"])


def by_measure(table: Table) -> TextTable:
    """A row for each number, a column for each arm."""
    rows = []
    words = ("arm", "verdict", "interval", "overrides", "sentence")
    numbers = [column for column in COLUMNS if column.name not in words]
    for column in shown(table, [*numbers, *figure_columns(table)]):
        rows.append([column.title, *(column.cell(row, table) for row in table.rows)])
    return TextTable(["measure", *(row.arm.name for row in table.rows)], rows, ["measure"])


def matrix(comparison: Comparison) -> TextTable:
    """Arm by setting: the word and the difference."""
    settings = [comparison.name_of(table) for table in comparison.tables]
    cells: dict[str, list[str]] = {}
    for place, table in enumerate(comparison.tables):
        for row in table.rows:
            if not row.is_baseline:
                delta = difference(row)
                text = row.word if delta is None else f"{row.word} {row.endpoint.signed(delta)}"
                cells.setdefault(row.arm.name, [NOTHING] * len(settings))[place] = text
    return TextTable(["arm", *settings], [[arm, *texts] for arm, texts in cells.items()], ["arm", *settings])


def records(table: Table) -> list[dict[str, Any]]:
    """Every word and number of each arm on each endpoint, by name, and the endpoint at each seed."""
    found = []
    for rows in (table.rows, *table.secondary):
        for row in rows:
            record: dict[str, Any] = {"table": table.name, "setting": table.setting, "endpoint": row.endpoint.name}
            record |= {"unit": row.endpoint.unit, "is_baseline": row.is_baseline, "word": row.word}
            for column in COLUMNS:
                record[column.name] = column.value(row, table)
            record["worth"] = row.worth.at if row.worth is not None else None
            record["sd"] = _sd(row)
            if rows is table.rows:
                for column in figure_columns(table):
                    record[column.name] = column.value(row, table)
            values = row.endpoint.readable(row.arm.values(row.endpoint.name, [*row.arm.runs]))
            for seed, value in zip(row.arm.runs, values.tolist(), strict=True):
                record[f"seed {seed}"] = value if math.isfinite(value) else None
            found.append(record)
    return found
