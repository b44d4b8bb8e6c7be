"""The table as text: its columns, the format of numbers, and the answer in a sentence. Every output uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nexus_ablate.comparison.endpoint import Endpoint
from nexus_ablate.comparison.result import Comparison, Row, Together
from nexus_ablate.comparison.statistics import LEVEL, Effect, Interval
from nexus_ablate.comparison.verdict import CLAIM_SEEDS, DIVERGED, MEANINGS, NOT_COMPARABLE, UNSTABLE, interval_name
from nexus_ablate.console import several
from nexus_ablate.measure.measures import measure_of

NOTHING = "–"


@dataclass(frozen=True)
class Column:
    """One column: its title, what it means, how a row fills it, and what it is sorted by (None: as text)."""

    title: str
    meaning: str
    cell: Callable[[Row], str]
    order: Callable[[Row], float | None] | None = None


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
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def p_text(p: float) -> str:
    return "<0.0001" if p < 0.0001 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"


def interval_text(interval: Interval | None, digits: int = 4, sign: str = "+") -> str:
    """`mean [low, high]`."""
    if interval is None:
        return NOTHING
    mean = f"{interval.mean:{sign}.{digits}f}"
    if interval.low is None or interval.high is None:
        return mean
    return f"{mean} [{interval.low:{sign}.{digits}f}, {interval.high:{sign}.{digits}f}]"


def loss_text(row: Row) -> str:
    if row.mean is None:
        return NOTHING
    text = row.endpoint.value(row.mean) + (f" ±{row.endpoint.spread(row.sd)}" if row.sd is not None else "")
    return f"({text})" if row.verdict is not None and row.verdict.word in (DIVERGED, UNSTABLE) else text


def delta(row: Row) -> float | None:
    """The mean difference; none for an arm that cannot be compared, or whose failures to train decided."""
    if row.verdict is None or row.verdict.word in (NOT_COMPARABLE, DIVERGED, UNSTABLE):
        return None
    if row.effect is not None and row.effect.wins is None:
        return row.effect.delta
    differences = [d for d in row.differences if d is not None]
    return sum(differences) / len(differences) if differences else None


def interval_of(row: Row) -> str:
    """`[+0.0012, +0.0034]`."""
    return NOTHING if row.effect is None else bounds(row.endpoint, row.effect)


def bounds(endpoint: Endpoint, effect: Effect) -> str:
    return f"[{endpoint.signed(effect.low)}, {endpoint.signed(effect.high)}]"


def outcomes(row: Row) -> str:
    """`5 ok`, `3 ok, 2 failed, 1 without result`."""
    ok = sum(v is not None for v in row.values)
    parts = [f"{ok} ok"]
    parts += [f"{len(row.failed)} failed"] if row.failed else []
    parts += [f"{row.waiting} without result"] if row.waiting else []
    return ", ".join(parts)


def seeds_text(row: Row) -> str:
    """Seeds used of those begun or planned."""
    used = sum(v is not None for v in row.values)
    return f"{used}/{used + len(row.failed) + row.waiting}"


def lr_text(row: Row) -> str:
    if row.best_lr is None:
        return NOTHING
    return f"{row.best_lr:g}" + (" (edge)" if row.lr_edge else "")


def detectable_text(row: Row) -> str:
    if row.effect is None:
        return NOTHING
    return (row.endpoint.signed if row.endpoint.log else row.endpoint.value)(row.effect.detectable)


def wins_text(row: Row) -> str:
    """`4/5`: the seeds in which the arm was better, or lower where neither side is better."""
    effect = row.effect
    if effect is None or effect.wins is None:
        return NOTHING
    return f"{effect.n - effect.wins if row.endpoint.better == 'higher' else effect.wins}/{effect.n}"


def errors_text(row: Row) -> str:
    """Both standard errors of the difference: `0.0021 / 0.0034`."""
    errors = (row.effect.se if row.effect else None, row.text_se)
    return " / ".join(NOTHING if error is None else f"{error:.4f}" for error in errors)


def _effect(name: str) -> Callable[[Row], float | None]:
    return lambda row: None if row.effect is None else getattr(row.effect, name)


def _mean(name: str) -> Callable[[Row], float | None]:
    return lambda row: None if getattr(row, name) is None else getattr(row, name).mean


ARM = Column("arm", "how it differs from the baseline", lambda r: r.arm)
SEEDS = Column("seeds", "used / begun or planned", seeds_text)
VALUE = Column(
    "loss", "mean ± standard deviation over seeds; in brackets over surviving seeds only", loss_text, lambda r: r.mean
)
DELTA = Column(
    "delta",
    "mean difference to the baseline, of pairs where seeds are shared; a ratio for measures on a logarithmic scale",
    lambda r: NOTHING if (d := delta(r)) is None else r.endpoint.signed(d),
    delta,
)
INTERVAL = Column("interval", "the one that decides: simultaneous over all arms", interval_of, _effect("delta"))
P = Column("p", "adjusted for the number of arms", lambda r: p_text(r.effect.p) if r.effect else NOTHING, _effect("p"))
VERDICT = Column("verdict", "see below", lambda r: str(r.verdict) if r.verdict else "baseline")

NARROW = (ARM, VERDICT, DELTA, VALUE, SEEDS)
MORE = (
    Column(
        "delta/SD",
        "in standard deviations of the baseline over seeds",
        lambda r: signed(r.delta_over_sd, 1),
        lambda r: r.delta_over_sd,
    ),
    Column(
        "wins",
        "seeds in which the arm was better; lower, where neither side is",
        wins_text,
        _effect("wins"),
    ),
    Column(
        "detectable",
        "difference that these seeds show with 80% power",
        detectable_text,
        _effect("detectable"),
    ),
    Column(
        "tokens ratio",
        "tokens to the higher of the two final losses, arm over baseline; 95% interval of its own",
        lambda r: interval_text(r.token_ratio, 2, ""),
        _mean("token_ratio"),
    ),
    Column(
        "SE seeds / text",
        "standard error of the difference over seeds, and over blocks of validation text",
        errors_text,
        lambda r: r.text_se,
    ),
)
COSTS = (
    Column(
        "at equal FLOPs",
        "difference at the largest FLOPs both reached; descriptive",
        lambda r: interval_text(r.at_flops),
        _mean("at_flops"),
    ),
    Column(
        "at equal seconds",
        "difference at the largest training time both reached; descriptive",
        lambda r: interval_text(r.at_seconds),
        _mean("at_seconds"),
    ),
    Column("tokens/s", "training speed", lambda r: compact(r.tokens_per_second), lambda r: r.tokens_per_second),
    Column(
        "memory",
        "largest, in bytes",
        lambda r: compact(r.peak_memory_bytes) + "B" * (r.peak_memory_bytes is not None),
        lambda r: r.peak_memory_bytes,
    ),
    Column("params", "against the baseline", lambda r: share(r.params_share), lambda r: r.params_share),
    Column("FLOPs", "a token, against the baseline", lambda r: share(r.flops_share), lambda r: r.flops_share),
)
STABILITY = (
    Column("outcome", "how the runs ended", outcomes),
    Column(
        "spikes",
        "share of training losses 6 SD off the 128 before; ! is three times the baseline's",
        lambda r: NOTHING if r.spike_score is None else f"{r.spike_score:.2%}" + "!" * r.spiky,
        lambda r: r.spike_score,
    ),
    Column("rising", "runs whose loss rises at the end", lambda r: str(r.rising), lambda r: r.rising),
)
RATES = (
    Column("best LR", "of the tuning runs; edge: the best one may lie outside the grid", lr_text, lambda r: r.best_lr),
    Column(
        "LR sensitivity",
        "mean loss over the grid minus the best",
        lambda r: NOTHING if r.lr_sensitivity is None else f"{r.lr_sensitivity:.4f}",
        lambda r: r.lr_sensitivity,
    ),
    Column(
        "at shared LR",
        "difference at the study's learning rate; 95% interval of its own",
        lambda r: interval_text(r.at_shared_lr),
        _mean("at_shared_lr"),
    ),
)
MAIN = (ARM, VERDICT, DELTA, INTERVAL, VALUE, SEEDS, P, *MORE[:3])


def named(comparison: Comparison, columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """The columns with that of the endpoint under its own name: `loss`, or the last part of the measure's name."""
    name = comparison.endpoint.name
    title = VALUE.title if name == "val_loss" else name.rpartition("/")[2]
    return tuple(replace(column, title=title) if column is VALUE else column for column in columns)


def worth_text(row: Row) -> str:
    """`-12% [-18%, -6%]`: the baseline reaches the arm's loss with so many tokens fewer; `beyond`: outside the runs."""
    if row.worth is None:
        return NOTHING
    shares = ["beyond" if end is None else f"{end:+.0%}" for end in (row.worth.share, row.worth.low, row.worth.high)]
    return f"{shares[0]} [{shares[1]}, {shares[2]}]"


WORTH = Column(
    "worth in tokens",
    "training tokens that the baseline would need more for the same loss, by runs of it with other budgets",
    worth_text,
    lambda r: r.worth.share if r.worth else None,
)


def side_columns(comparison: Comparison) -> tuple[Column, ...]:
    """The columns of cost and stability; learning rates only where they were tuned."""
    worth = (WORTH,) if any(row.worth for row in comparison.rows) else ()
    return (*worth, *MORE[3:], *COSTS, *STABILITY, *(RATES if comparison.tuning_runs else ()))


def figure_columns(comparison: Comparison) -> tuple[Column, ...]:
    """A column for every diagnostic and evaluation that a run was measured by."""

    def column(name: str) -> Column:
        def cell(row: Row) -> str:
            if name not in row.figures:
                return NOTHING
            mean, sd = row.figures[name]
            return f"{mean:.4g}" + (f" ±{sd:.2g}" if sd is not None else "")

        return Column(
            name,
            f"{described(name)}mean ± standard deviation over seeds",
            cell,
            lambda r: r.figures[name][0] if name in r.figures else None,
        )

    return tuple(column(name) for name in dict.fromkeys(n for row in comparison.rows for n in row.figures))


def described(name: str) -> str:
    """What a measure is, and its unit, before what a column shows of it."""
    measure = measure_of(name)
    return "" if measure is None else f"{measure.definition}{f', {measure.unit}' if measure.unit else ''}; "


def title(comparison: Comparison) -> str:
    return comparison.question or comparison.study or "comparison"


def answer(comparison: Comparison) -> str:
    """The answer in a sentence: each verdict word with its arms."""
    arms_by_word: dict[str, list[str]] = {}
    for row in comparison.rows[1:]:
        if row.verdict is not None:
            arms_by_word.setdefault(row.verdict.word, []).append(row.arm)
    if not arms_by_word:
        return f"Only {comparison.baseline} has a result; there is nothing to compare it with."
    prefixes = dict.fromkeys(row.verdict.prefix for row in comparison.rows if row.verdict and row.verdict.prefix)
    words = [f"{word}: {' · '.join(arms_by_word[word])}" for word in MEANINGS if word in arms_by_word]
    return max(prefixes, key=len, default="") + ". ".join(words) + "."


def basis(comparison: Comparison) -> list[str]:
    """The conditions of the verdicts, one sentence each."""
    endpoint, seeds = comparison.endpoint, len(comparison.rows[0].seeds)
    sd = "" if comparison.seed_sd is None else f", standard deviation over seeds {endpoint.spread(comparison.seed_sd)}"
    matters = endpoint.within(comparison.delta_min) if endpoint.log else endpoint.value(comparison.delta_min)
    lines = [
        f"{endpoint.name}{f' in {endpoint.unit}' if endpoint.unit else ''}, against {comparison.baseline} "
        f"({several(seeds, 'seed')}{sd}){f'; {endpoint.good()}' if endpoint.good() else ''}",
        f"smallest difference that matters: {matters} ({comparison.delta_min_source})",
        *comparison.regime,
    ]
    if comparison.looks:
        listed = ", ".join(map(str, comparison.looks))
        lines.append(f"looks at {listed} seeds share the 5%; {comparison.look} of {len(comparison.looks)} are complete")
    if not comparison.plan.paired:
        lines.append(
            "unpaired, since the arms share no seeds: each is judged by Welch's t-test against the baseline, with "
            "intervals that are simultaneous over all arms (Sidak)"
        )
    if comparison.noisy:
        lines.append(
            f"unlike noise ({', '.join(comparison.noisy)}): every arm is judged by its own paired differences, because "
            "a pooled spread would claim too much"
        )
    if any(row.at_shared_lr for row in comparison.rows):
        lines.append("each arm is judged at its own best learning rate")
    name = comparison.arms[0].name if comparison.arms else comparison.baseline
    if name != comparison.baseline:
        lines.append(f"{comparison.baseline} is {name}")
    if comparison.exploratory:
        fresh = f"; nexus-ablate confirm {comparison.plan.place} judges fresh seeds alone" * bool(comparison.plan.place)
        lines.append(f"exploratory: {'; '.join(comparison.exploratory)}{fresh}")
    if seeds < CLAIM_SEEDS:
        lines.append(f"preliminary: fewer than {CLAIM_SEEDS} seeds; treat as a hint")
    if any(row.verdict and row.verdict.word == UNSTABLE for row in comparison.rows):
        lines.append("values in brackets are over the seeds that trained; do not compare them")
    return lines


def direction(comparison: Comparison) -> str:
    """What an axis of differences shows, and which side is better."""
    side = {"lower": " (left is better)", "higher": " (right is better)"}.get(comparison.endpoint.better, "")
    return comparison.endpoint.axis() + side


def secondary_lines(comparison: Comparison) -> list[tuple[str, list[tuple[str, ...]]]]:
    """By secondary endpoint its heading, and by arm: mean ± SD, difference, interval, verdict if one was asked for."""
    tables = []
    for other in comparison.secondary:
        endpoint = other.endpoint
        level = next((row.effect.level for row in other.rows if row.effect), LEVEL)
        unit = f", {endpoint.unit}" if endpoint.unit else ""
        definition = endpoint.measure.definition.replace("`", "")
        heading = f"{endpoint.name}{unit}: {definition} ({interval_name(level)} over all arms)"
        rows = []
        for row in other.rows:
            sd = "" if row.sd is None else f" ±{endpoint.spread(row.sd)}"
            mean = NOTHING if row.mean is None else endpoint.value(row.mean) + sd
            difference = endpoint.signed(row.effect.delta) if row.effect else NOTHING
            interval = bounds(endpoint, row.effect) if row.effect else NOTHING
            rows.append((row.arm, mean, difference, interval, str(row.verdict) if row.verdict else ""))
        tables.append((heading, rows))
    return tables


SECONDARY = ("arm", "value", "delta", "interval", "verdict")
"""Columns of `secondary_lines`."""


def together_text(two: Together) -> str:
    """An interaction in a sentence."""
    return f"{two.one} with {two.other}: {interval_text(two.interval)} beyond the sum of the two (negative: lower)"


def left_out(comparison: Comparison) -> list[str]:
    """One line per item in scope that is not in the table: excluded, refused, equal to another arm, tuning."""
    lines = [f"{'/'.join(out.path.parts[-2:])}: {out.reason}" for out in comparison.excluded]
    lines += [f"{overrides}: refused, {why}" for overrides, why in comparison.refused]
    lines += [f"{overrides}: the same configuration as {arm}, not trained twice" for overrides, arm in comparison.equal]
    if comparison.tuning_runs:
        lines.append(f"{several(comparison.tuning_runs, 'run')} chose learning rates")
    if comparison.shared_runs:
        lines.append(f"under `at shared LR`: {several(comparison.shared_runs, 'run')} at the study's learning rate")
    return lines
