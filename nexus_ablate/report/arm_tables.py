"""The tables of a report as text: their columns, and how numbers are written. Every output shows these.

To show another number of each arm in every output, add a column to `main_columns`, or to `side_columns` if it does not
decide. The terminal, the page, Markdown, CSV, JSON and `compare(...).frame()` have it then; LaTeX has the main columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nexus_ablate.comparison.fairness import FAIL, PASS, UNKNOWN, WAIVED, WARN
from nexus_ablate.comparison.results import ArmResult, Comparison, Secondary, Stratum
from nexus_ablate.comparison.statistics import Interval
from nexus_ablate.comparison.verdict import (
    BETTER,
    DIVERGED,
    EQUIVALENT,
    IDENTICAL,
    NOT_COMPARABLE,
    UNSTABLE,
    WORSE,
    interval_names,
)
from nexus_ablate.console import compact
from nexus_ablate.measure.measures import measure_of

NOTHING = "–"
TONES = {
    **dict.fromkeys((BETTER, PASS), "good"),
    **dict.fromkeys((WORSE, DIVERGED, UNSTABLE, FAIL), "bad"),
    **dict.fromkeys((EQUIVALENT, IDENTICAL), "same"),
    **dict.fromkeys((NOT_COMPARABLE, WARN, WAIVED, UNKNOWN), "warn"),
}
"""How verdicts and statuses are coloured, in every output; other words are not."""


class TextTable(NamedTuple):
    """A table of texts. The first column names the rows.

    Attributes:
        words: The heads of the columns that are aligned to the left.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str]


@dataclass(frozen=True)
class Column:
    """A column of the tables of arms.

    Attributes:
        number: The column of CSV, JSON and frames by which rows are sorted; '': the text, aligned to the left.
        text: The cell of an arm.
        value: The number of an arm, if it is none of `ArmResult.record`; None: not measured.
    """

    title: str
    meaning: str
    number: str
    text: Callable[[ArmResult], str]
    value: Callable[[ArmResult], Any] | None = None

    def sorted_by(self, row: ArmResult) -> Any:
        """What the rows of a page are sorted by."""
        if self.value:
            return self.value(row)
        return row.record().get(self.number) if self.number else self.text(row)


def arm_table(rows: Sequence[ArmResult], columns: Sequence[Column]) -> TextTable:
    """A row per arm, the baseline first."""
    heads = [column.title for column in columns]
    words = [column.title for column in columns if not column.number]
    cells = []
    for row in rows:
        cells.append([column.text(row) for column in columns])
    return TextTable(heads, cells, words)


def records(stratum: Stratum) -> list[dict[str, Any]]:
    """Every number and word of each result by name, with those that a column adds."""
    columns = (*main_columns(stratum), *side_columns(stratum))
    records = []
    for row in stratum.results:
        record = row.record()
        for column in columns:
            if column.value:
                record[column.number] = column.value(row)
        records.append(record)
    return records


# --------------------------------------------------------------------------------------------------------- numbers


def signed(value: float) -> str:
    """A number with its sign; one that rounds to 0 has none."""
    return f"{value:+.1f}" if round(value, 1) else "0.0"


def p_text(p: float) -> str:
    if p < 0.0001:
        return "<0.0001"
    return f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def number_text(value: Any, write: Callable[[Any], str], missing: str = NOTHING) -> str:
    """A number, or what stands for one that was not measured."""
    return missing if value is None else write(value)


def interval_text(interval: Interval | None, write: Callable[[float], str] = "{:+.4f}".format) -> str:
    """`mean [low, high]`."""
    if interval is None:
        return NOTHING
    if interval.low is None or interval.high is None:
        return write(interval.mean)
    return f"{write(interval.mean)} [{write(interval.low)}, {write(interval.high)}]"


# ----------------------------------------------------------------------------------------------------------- cells


def difference_text(row: ArmResult) -> str:
    return number_text(row.difference, row.endpoint.signed)


def bounds(row: ArmResult) -> str:
    """The interval that decides: `[+0.0012, +0.0034]`."""
    if row.effect is None:
        return NOTHING
    return f"[{row.endpoint.signed(row.effect.low)}, {row.endpoint.signed(row.effect.high)}]"


def mean_text(row: ArmResult) -> str:
    """`mean ±standard deviation`, in brackets where some seeds failed to train."""
    if row.mean is None:
        return NOTHING
    text = row.endpoint.value(row.mean)
    if row.sd is not None:
        text = f"{text} ±{row.endpoint.spread(row.sd)}"
    return f"({text})" if row.word in (DIVERGED, UNSTABLE) else text


def worth_text(row: ArmResult) -> str:
    """`-12% [-18%, -6%]`: the baseline reaches the arm's loss with so many tokens fewer; `beyond`: outside the runs."""
    if row.worth is None:
        return NOTHING
    ends = (row.worth.share, row.worth.low, row.worth.high)
    share, low, high = (number_text(end, "{:+.0%}".format, "beyond") for end in ends)
    return f"{share} [{low}, {high}]"


def _detectable_text(row: ArmResult) -> str:
    if row.effect is None:
        return NOTHING
    write = row.endpoint.signed if row.endpoint.log else row.endpoint.value
    return write(row.effect.detectable)


def _wins_text(row: ArmResult) -> str:
    """`4/5`: the seeds in which the arm was better, or lower where neither side is better."""
    return NOTHING if row.wins is None or row.effect is None else f"{row.wins}/{row.effect.n}"


def _errors_text(row: ArmResult) -> str:
    """Both standard errors of the difference: `0.0021 / 0.0034`."""
    errors = (row.effect.seed_se, row.effect.text_se) if row.effect else (None, None)
    return " / ".join(number_text(error, "{:.4f}".format) for error in errors)


def _outcomes_text(row: ArmResult) -> str:
    """`3 ok, 2 failed, 1 without result`."""
    text = f"{row.trained} ok"
    if row.failed:
        text += f", {len(row.failed)} failed"
    if row.waiting:
        text += f", {row.waiting} without result"
    return text


def _best_rate_text(row: ArmResult) -> str:
    return number_text(row.best_lr, "{:g}".format) + " (edge)" * row.lr_edge


def _number_column(title: str, meaning: str, number: str, write: Callable[[Any], str]) -> Column:
    """A column of one of the numbers of `ArmResult.record`."""
    return Column(title, meaning, number, lambda row: number_text(row.record()[number], write))


def _interval_column(title: str, meaning: str, name: str, write: Callable[[float], str] = "{:+.4f}".format) -> Column:
    """A column of one of the intervals of an arm."""
    return Column(title, meaning, name, lambda row: interval_text(vars(row)[name], write))


# --------------------------------------------------------------------------------------------------------- columns

ARM = Column("arm", "how it differs from the baseline", "", lambda row: row.arm)
VERDICT = Column("verdict", "see below", "", lambda row: "baseline" if row.is_baseline else str(row.verdict or ""))
DELTA = Column(
    "delta",
    "mean difference to the baseline, of pairs where seeds are shared; a ratio for measures on a logarithmic scale",
    "delta",
    difference_text,
)
INTERVAL = Column("interval", "the one that decides: all intervals of the page hold together", "delta", bounds)
MEAN = "mean ± standard deviation over seeds; in brackets over surviving seeds only"


def main_columns(stratum: Stratum) -> list[Column]:
    """The columns of the table that decides."""
    name = stratum.endpoint.name
    return [
        ARM,
        VERDICT,
        DELTA,
        INTERVAL,
        Column("loss" if name == "val_loss" else name.rpartition("/")[2], MEAN, "mean", mean_text),
        Column(
            "seeds",
            "used / begun or planned",
            "",
            lambda row: f"{row.trained}/{row.trained + len(row.failed) + row.waiting}",
        ),
        _number_column("p", "of this comparison alone, not adjusted for the others", "p", p_text),
        _number_column(
            "delta/SD",
            "in standard deviations of the baseline over seeds",
            "delta_over_sd",
            signed,
        ),
        Column("wins", "seeds in which the arm was better; lower, where neither side is", "wins", _wins_text),
        Column("detectable", "difference that these seeds show with 80% power", "detectable", _detectable_text),
    ]


def side_columns(stratum: Stratum) -> list[Column]:
    """The columns of cost and stability; learning rates only where they were tuned."""
    columns = []
    if any(row.worth for row in stratum.rows):
        meaning = (
            "training tokens that the baseline would need more for the same loss, by runs of it with other budgets"
        )
        columns.append(Column("worth in tokens", meaning, "worth", worth_text))
    columns += [
        _interval_column(
            "tokens ratio",
            "tokens to the higher of the two final losses, arm over baseline; 95% interval of its own",
            "token_ratio",
            "{:.2f}".format,
        ),
        Column(
            "SE seeds / text",
            "standard error of the difference over seeds, and over blocks of validation text",
            "text_se",
            _errors_text,
        ),
        _interval_column(
            "at equal FLOPs",
            "difference of validation losses at the largest FLOPs both reached; descriptive",
            "at_flops",
        ),
        _interval_column(
            "at equal seconds",
            "difference of validation losses at the largest training time both reached; descriptive",
            "at_seconds",
        ),
        _number_column("tokens/s", "training speed", "tokens_per_second", compact),
        _number_column("memory", "largest, in bytes", "peak_memory_bytes", lambda value: f"{compact(value)}B"),
        _number_column("params", "against the baseline", "params_share", "{:+.1%}".format),
        _number_column("FLOPs", "a token, against the baseline", "flops_share", "{:+.1%}".format),
        Column("outcome", "how the runs ended", "", _outcomes_text),
        Column(
            "spikes",
            "share of training losses 6 SD off the 128 before; ! is three times the baseline's",
            "spike_score",
            lambda row: number_text(row.spike_score, "{:.2%}".format) + "!" * row.spiky,
        ),
        _number_column("rising", "runs whose loss rises at the end", "rising", str),
    ]
    if stratum.tuning_runs:
        meaning = (
            "at the lowest point of a parabola through the judged losses; edge: a better one may lie outside the grid"
        )
        columns.append(Column("best LR", meaning, "best_lr", _best_rate_text))
        meaning = "mean loss over the grid minus the best"
        columns.append(_number_column("LR sensitivity", meaning, "lr_sensitivity", "{:.4f}".format))
    return columns


def _figure_column(name: str) -> Column:
    """A column of one of the diagnostics and evaluations of an arm."""

    def text(row: ArmResult) -> str:
        if name not in row.figures:
            return NOTHING
        mean, sd = row.figures[name]
        return f"{mean:.4g}" if sd is None else f"{mean:.4g} ±{sd:.2g}"

    meaning, measure = "mean ± standard deviation over seeds", measure_of(name)
    if measure is not None:
        meaning = f"{', '.join(filter(None, (measure.definition, measure.unit)))}; {meaning}"
    return Column(name, meaning, name, text)


def secondary_table(other: Secondary) -> TextTable:
    """Of an endpoint beside the primary one a row per arm; a verdict where the study expects something."""
    columns = [ARM, Column("value", MEAN, "mean", mean_text), DELTA, INTERVAL]
    if any(row.verdict for row in other.rows):
        columns.append(VERDICT)
    return arm_table(other.rows, columns)


def secondary_heading(other: Secondary) -> tuple[str, str]:
    """The endpoint with its unit; its definition and the level of its intervals."""
    endpoint = other.endpoint
    levels = [row.effect.level for row in other.rows if row.effect]
    name = f"{endpoint.name}, {endpoint.unit}" if endpoint.unit else endpoint.name
    definition = endpoint.measure.definition.replace("`", "")
    return name, f"{definition} ({interval_names(levels)})" if levels else definition


# --------------------------------------------------------------------------------------------------- other tables


def changes_over_strata(comparison: Comparison) -> TextTable:
    """Each arm's difference by stratum, its change from the first to the last, agreement of sign, and order.

    A change names its strata where they are not the first and the last.
    """
    names = [stratum.name for stratum in comparison.strata]
    heads = ["arm", *names, "change", "sign", "order"]
    signs = {True: "the same", False: "differs", None: NOTHING}
    rows = []
    for change in comparison.changes:
        cells = [change.arm]
        for row in change.rows:
            parts = (difference_text(row), bounds(row), row.word) if row else ()
            cells.append(" ".join(part for part in parts if part not in ("", NOTHING)) or NOTHING)
        endpoint = next(row.endpoint for row in change.rows if row)
        moved = interval_text(change.change, endpoint.signed)
        if change.change is not None and (change.first, change.last) != (names[0], names[-1]):
            moved += f" from {change.first} to {change.last}"
        rows.append([*cells, moved, signs[change.agree], change.order or NOTHING])
    return TextTable(heads, rows, heads)


def measures(stratum: Stratum) -> list[Column]:
    """What decides, costs, stability, diagnostics and evaluations of each arm.

    The columns that decide stand here too: a narrow page or terminal leaves some of them out of its first table.
    """
    figures = dict.fromkeys(name for row in stratum.rows for name in row.figures)
    return [*main_columns(stratum)[2:], *side_columns(stratum), *map(_figure_column, figures)]


def changed_keys(stratum: Stratum) -> TextTable:
    """The keys of each arm that differ from the baseline's, and those that follow from them."""
    heads = ("arm", "asked for", "follows from it")
    changed = [row for row in stratum.rows if row.requested or row.followed]
    rows = [(row.arm, _changes(row.requested), _changes(row.followed)) for row in changed]
    return TextTable(heads, rows, heads)


def _changes(keys: dict[str, tuple[str, str]]) -> str:
    """`norm: rms → layer, norm.eps: 1e-06 → 1e-05`."""
    return ", ".join(f"{key}: {old or NOTHING} → {new or NOTHING}" for key, (old, new) in keys.items())
