"""The tables of a report as text: their columns, and how numbers are written. Every output shows these.

To show another column of numbers in every output, add it to `main_columns` or `side_columns`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nexus_ablate.comparison.endpoint import Endpoint
from nexus_ablate.comparison.findings import Across, Findings
from nexus_ablate.comparison.result import Comparison, Row, Secondary
from nexus_ablate.comparison.scaling import Scaling
from nexus_ablate.comparison.statistics import LEVEL, Effect, Interval
from nexus_ablate.comparison.verdict import DIVERGED, NOT_COMPARABLE, UNSTABLE, interval_name
from nexus_ablate.measure.measures import measure_of

NOTHING = "–"


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
        text: A row's cell.
        number: What a row is sorted by; None: by the text, which is then aligned to the left.
    """

    title: str
    meaning: str
    text: Callable[[Row], str]
    number: Callable[[Row], float | None] | None = None


def arm_table(comparison: Comparison, columns: Sequence[Column]) -> TextTable:
    """A row per arm, the baseline first."""
    rows = [[column.text(row) for column in columns] for row in comparison.rows]
    words = [column.title for column in columns if column.number is None]
    return TextTable([column.title for column in columns], rows, words)


# --------------------------------------------------------------------------------------------------------- numbers


def signed(value: float | None, digits: int = 4) -> str:
    """A number with its sign; one that rounds to 0 has none."""
    if value is None:
        return NOTHING
    return f"{value:+.{digits}f}" if round(value, digits) else f"{0:.{digits}f}"


def share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:+.1%}"


def compact(value: float | None) -> str:
    """12.3k, 4.5M."""
    if value is None:
        return NOTHING
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def p_text(p: float) -> str:
    if p < 0.0001:
        return "<0.0001"
    return f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def interval_text(interval: Interval | None, form: str = "{:+.4f}") -> str:
    """`mean [low, high]`, each in the given form."""
    if interval is None:
        return NOTHING
    mean = form.format(interval.mean)
    if interval.low is None or interval.high is None:
        return mean
    return f"{mean} [{form.format(interval.low)}, {form.format(interval.high)}]"


def mean_text(endpoint: Endpoint, mean: float | None, sd: float | None) -> str:
    """`mean ±standard deviation`."""
    if mean is None:
        return NOTHING
    return endpoint.value(mean) + (f" ±{endpoint.spread(sd)}" if sd is not None else "")


def bounds(endpoint: Endpoint, effect: Effect | None) -> str:
    """`[+0.0012, +0.0034]`."""
    return NOTHING if effect is None else f"[{endpoint.signed(effect.low)}, {endpoint.signed(effect.high)}]"


def delta(row: Row) -> float | None:
    """The mean difference; none for an arm that cannot be compared, or whose failures to train decided."""
    if row.verdict is None or row.verdict.word in (NOT_COMPARABLE, DIVERGED, UNSTABLE):
        return None
    if row.effect is not None and row.effect.wins is None:
        return row.effect.delta
    differences = [d for d in row.differences if d is not None]
    return sum(differences) / len(differences) if differences else None


# ----------------------------------------------------------------------------------------------------------- cells


def _delta_text(row: Row) -> str:
    difference = delta(row)
    return NOTHING if difference is None else row.endpoint.signed(difference)


def loss_text(row: Row) -> str:
    """The endpoint's mean and standard deviation, in brackets where some seeds failed to train."""
    text = mean_text(row.endpoint, row.mean, row.sd)
    is_bracketed = row.mean is not None and row.verdict is not None and row.verdict.word in (DIVERGED, UNSTABLE)
    return f"({text})" if is_bracketed else text


def _outcomes(row: Row) -> str:
    """`3 ok, 2 failed, 1 without result`."""
    parts = [f"{_used(row)} ok"]
    parts += [f"{len(row.failed)} failed"] if row.failed else []
    parts += [f"{row.waiting} without result"] if row.waiting else []
    return ", ".join(parts)


def _used(row: Row) -> int:
    return sum(value is not None for value in row.values)


def _rate_text(row: Row) -> str:
    if row.best_lr is None:
        return NOTHING
    return f"{row.best_lr:g}{' (edge)' * row.lr_edge}"


def _detectable_text(row: Row) -> str:
    if row.effect is None:
        return NOTHING
    write = row.endpoint.signed if row.endpoint.log else row.endpoint.value
    return write(row.effect.detectable)


def _wins_text(row: Row) -> str:
    """`4/5`: the seeds in which the arm was better, or lower where neither side is better."""
    effect = row.effect
    if effect is None or effect.wins is None:
        return NOTHING
    wins = effect.n - effect.wins if row.endpoint.better == "higher" else effect.wins
    return f"{wins}/{effect.n}"


def _errors_text(row: Row) -> str:
    """Both standard errors of the difference: `0.0021 / 0.0034`."""
    errors = (row.effect.se if row.effect else None, row.text_se)
    return " / ".join(NOTHING if error is None else f"{error:.4f}" for error in errors)


def _spikes_text(row: Row) -> str:
    return NOTHING if row.spike_score is None else f"{row.spike_score:.2%}{'!' * row.spiky}"


def worth_text(row: Row) -> str:
    """`-12% [-18%, -6%]`: the baseline reaches the arm's loss with so many tokens fewer; `beyond`: outside the runs."""
    if row.worth is None:
        return NOTHING
    shares = ["beyond" if end is None else f"{end:+.0%}" for end in (row.worth.share, row.worth.low, row.worth.high)]
    return f"{shares[0]} [{shares[1]}, {shares[2]}]"


def _of_effect(name: str) -> Callable[[Row], float | None]:
    return lambda row: None if row.effect is None else vars(row.effect)[name]


def _interval_column(title: str, meaning: str, name: str, form: str = "{:+.4f}") -> Column:
    """A column of one of the intervals of a row."""

    def mean(row: Row) -> float | None:
        interval = vars(row)[name]
        return None if interval is None else interval.mean

    return Column(title, meaning, lambda row: interval_text(vars(row)[name], form), mean)


# --------------------------------------------------------------------------------------------------------- columns

ARM = Column("arm", "how it differs from the baseline", lambda row: row.arm)
VERDICT = Column("verdict", "see below", lambda row: str(row.verdict) if row.verdict else "baseline")
SEEDS = Column(
    "seeds",
    "used / begun or planned",
    lambda row: f"{_used(row)}/{_used(row) + len(row.failed) + row.waiting}",
)


def main_columns(comparison: Comparison) -> list[Column]:
    """The columns of the table that decides. What a narrow terminal leaves out comes last."""
    name = comparison.endpoint.name
    return [
        ARM,
        VERDICT,
        Column(
            "delta",
            "mean difference to the baseline, of pairs where seeds are shared; a ratio for measures on a logarithmic "
            "scale",
            _delta_text,
            delta,
        ),
        Column(
            "interval",
            "the one that decides: simultaneous over all arms",
            lambda row: bounds(row.endpoint, row.effect),
            _of_effect("delta"),
        ),
        Column(
            "loss" if name == "val_loss" else name.rpartition("/")[2],
            "mean ± standard deviation over seeds; in brackets over surviving seeds only",
            loss_text,
            lambda row: row.mean,
        ),
        SEEDS,
        Column(
            "p",
            "adjusted for the number of arms",
            lambda row: p_text(row.effect.p) if row.effect else NOTHING,
            _of_effect("p"),
        ),
        Column(
            "delta/SD",
            "in standard deviations of the baseline over seeds",
            lambda row: signed(row.delta_over_sd, 1),
            lambda row: row.delta_over_sd,
        ),
        Column(
            "wins",
            "seeds in which the arm was better; lower, where neither side is",
            _wins_text,
            _of_effect("wins"),
        ),
        Column(
            "detectable",
            "difference that these seeds show with 80% power",
            _detectable_text,
            lambda row: row.effect.detectable if row.effect else None,
        ),
    ]


def side_columns(comparison: Comparison) -> list[Column]:
    """The columns of cost and stability; learning rates only where they were tuned."""
    worth = Column(
        "worth in tokens",
        "training tokens that the baseline would need more for the same loss, by runs of it with other budgets",
        worth_text,
        lambda row: row.worth.share if row.worth else None,
    )
    rates = [
        Column(
            "best LR",
            "of the tuning runs; edge: the best one may lie outside the grid",
            _rate_text,
            lambda row: row.best_lr,
        ),
        Column(
            "LR sensitivity",
            "mean loss over the grid minus the best",
            lambda row: NOTHING if row.lr_sensitivity is None else f"{row.lr_sensitivity:.4f}",
            lambda row: row.lr_sensitivity,
        ),
        _interval_column(
            "at shared LR", "difference at the study's learning rate; 95% interval of its own", "at_shared_lr"
        ),
    ]
    return [
        *([worth] if any(row.worth for row in comparison.rows) else []),
        _interval_column(
            "tokens ratio",
            "tokens to the higher of the two final losses, arm over baseline; 95% interval of its own",
            "token_ratio",
            "{:.2f}",
        ),
        Column(
            "SE seeds / text",
            "standard error of the difference over seeds, and over blocks of validation text",
            _errors_text,
            lambda row: row.text_se,
        ),
        _interval_column(
            "at equal FLOPs", "difference at the largest FLOPs both reached; descriptive", "at_flops"
        ),
        _interval_column(
            "at equal seconds", "difference at the largest training time both reached; descriptive", "at_seconds"
        ),
        Column(
            "tokens/s",
            "training speed",
            lambda row: compact(row.tokens_per_second),
            lambda row: row.tokens_per_second,
        ),
        Column(
            "memory",
            "largest, in bytes",
            lambda row: compact(row.peak_memory_bytes) + "B" * (row.peak_memory_bytes is not None),
            lambda row: row.peak_memory_bytes,
        ),
        Column("params", "against the baseline", lambda row: share(row.params_share), lambda row: row.params_share),
        Column(
            "FLOPs", "a token, against the baseline", lambda row: share(row.flops_share), lambda row: row.flops_share
        ),
        Column("outcome", "how the runs ended", _outcomes),
        Column(
            "spikes",
            "share of training losses 6 SD off the 128 before; ! is three times the baseline's",
            _spikes_text,
            lambda row: row.spike_score,
        ),
        Column("rising", "runs whose loss rises at the end", lambda row: str(row.rising), lambda row: row.rising),
        *(rates if comparison.tuning_runs else []),
    ]  # fmt: skip


def figure_columns(comparison: Comparison) -> list[Column]:
    """A column for every diagnostic and evaluation that a run was measured by."""
    names = dict.fromkeys(name for row in comparison.rows for name in row.figures)
    return [_figure_column(name) for name in names]


def _figure_column(name: str) -> Column:
    def text(row: Row) -> str:
        if name not in row.figures:
            return NOTHING
        mean, sd = row.figures[name]
        return f"{mean:.4g}" if sd is None else f"{mean:.4g} ±{sd:.2g}"

    def mean(row: Row) -> float | None:
        return row.figures[name][0] if name in row.figures else None

    return Column(name, f"{_described(name)}mean ± standard deviation over seeds", text, mean)


def _described(name: str) -> str:
    """What a measure is, and its unit, before what a column shows of it."""
    measure = measure_of(name)
    if measure is None:
        return ""
    return f"{measure.definition}, {measure.unit}; " if measure.unit else f"{measure.definition}; "


# --------------------------------------------------------------------------------------------------- other tables


def secondary_heading(other: Secondary) -> str:
    """The endpoint, its unit, definition and the level of its intervals."""
    endpoint = other.endpoint
    level = next((row.effect.level for row in other.rows if row.effect), LEVEL)
    unit = f", {endpoint.unit}" if endpoint.unit else ""
    definition = endpoint.measure.definition.replace("`", "")
    return f"{endpoint.name}{unit}: {definition} ({interval_name(level)} over all arms)"


def secondary_table(other: Secondary) -> TextTable:
    """Of an endpoint beside the primary one a row per arm; a verdict where one was asked for."""
    rows: list[Sequence[str]] = []
    for row in other.rows:
        difference = other.endpoint.signed(row.effect.delta) if row.effect else NOTHING
        mean = mean_text(other.endpoint, row.mean, row.sd)
        verdict = str(row.verdict) if row.verdict else ""
        rows.append((row.arm, mean, difference, bounds(other.endpoint, row.effect), verdict))
    return TextTable(("arm", "value", "delta", "interval", "verdict"), rows, ("arm", "verdict"))


def across_table(findings: Findings) -> TextTable:
    """Each arm's difference by stratum, its change from the first to the last, agreement of sign."""
    rows = [_across_row(arm) for arm in findings.across]
    return TextTable(("arm", *findings.strata, "change", "sign"), rows, ("arm", "sign"))


def _across_row(arm: Across) -> Sequence[str]:
    cells = []
    for row in arm.rows:
        if row is None or row.effect is None:
            cells.append(NOTHING)
            continue
        word = row.verdict.word if row.verdict else ""
        cells.append(f"{row.endpoint.signed(row.effect.delta)} {bounds(row.endpoint, row.effect)} {word}".rstrip())
    return (arm.arm, *cells, _change_text(arm), {True: "the same", False: "differs", None: NOTHING}[arm.agree])


def _change_text(arm: Across) -> str:
    change, endpoint = arm.change, next(row.endpoint for row in arm.rows if row)
    if change is None:
        return NOTHING
    mean = endpoint.signed(change.mean)
    if change.low is None or change.high is None:
        return mean
    return f"{mean} [{endpoint.signed(change.low)}, {endpoint.signed(change.high)}]"


def scaling_table(scaling: Sequence[Scaling]) -> TextTable:
    """Each arm's compute multiplier by size, how it changes with compute, and the outcome."""
    sizes = [f"{compute:.1e}" for compute in scaling[0].compute]
    heads = [head for size in sizes for head in (f"at {size} FLOPs", f"by time at {size}")]
    rows: list[Sequence[str]] = []
    for arm in scaling:
        pairs = zip(arm.multipliers, arm.by_time, strict=True)
        cells = [interval_text(cell, "x{:.3g}") for pair in pairs for cell in pair]
        predicted = NOTHING if arm.predicted is None else f"x{arm.predicted:.3g}"
        rows.append((arm.arm, *cells, interval_text(arm.trend, "x{:.3g}"), predicted, arm.outcome))
    return TextTable(("arm", *heads, "per 10 times", "predicted", "outcome"), rows, ("arm", "outcome"))


def changes_table(comparison: Comparison) -> TextTable:
    """Each key of each arm that differs from the baseline's, asked for or following from it."""
    rows: list[Sequence[str]] = []
    for row in comparison.rows[1:]:
        for kind, differences in (("requested", row.requested), ("follows", row.followed)):
            for key, (base_value, value) in differences.items():
                rows.append((row.arm, kind, key, base_value or NOTHING, value or NOTHING))
    heads = ("arm", "", "key", "baseline", "arm's")
    return TextTable(heads, rows, heads)


def checks_table(comparison: Comparison) -> TextTable:
    """The conditions of fairness."""
    heads = ("condition", "", " ")
    return TextTable(heads, [(check.name, check.status, check.text) for check in comparison.checks], heads)


def one_cell_per_row(table: TextTable, heads: Sequence[str]) -> TextTable:
    """The cells of a table below one another, each after the name of its row and its column, for narrow terminals."""
    rows: list[Sequence[str]] = []
    for name, *cells in table.rows:
        rows += [(name, title, cell) for title, cell in zip(table.heads[1:], cells, strict=True)]
    return TextTable(heads, rows, (heads[0], heads[-1]))
