"""What a comparison says in sentences, in every output: the answer, what it rests on, the advice, fairness."""

from __future__ import annotations

import shlex
from pathlib import Path

from nexus_ablate.comparison.compare import Comparison, Row, Table
from nexus_ablate.comparison.fairness import FAIL, PASS, WAIVED, Check, tokens_per_parameter
from nexus_ablate.comparison.verdict import (
    DIFFERENT,
    EARLY,
    EQUIVALENT,
    INCOMPLETE,
    INCONCLUSIVE,
    MEANINGS,
    TOO_FEW_SEEDS,
    TOO_SMALL,
)
from nexus_ablate.console import compact, duration, nearer, several
from nexus_ablate.measure.measures import NATS
from nexus_ablate.report.columns import difference, mean_value, shared_qualifiers
from nexus_ablate.runs.lookup import DEFAULT
from nexus_ablate.study.definition import shipped_studies
from nexus_ablate.study.endpoint import Endpoint
from nexus_ablate.study.study import FEWEST_SEEDS, WORTH_ARMS, Study

SAYS = {
    EQUIVALENT: "the same within the margin",
    INCONCLUSIVE: "not decided",
    INCOMPLETE: "no result yet",
}
"""A word in a sentence, where it is not itself."""


def title(table: Table) -> str:
    return table.question or table.name or "comparison"


def answer(table: Table, rows: list[Row] | None = None, with_numbers: bool = True) -> str:
    """The answer in a sentence: `Better: qk (-0.0123). Not decided: fast.`

    Args:
        rows: Of a secondary endpoint. Default: of the first.
        with_numbers: Without them where a table with the differences follows.
    """
    by_word: dict[str, list[str]] = {}
    shown = table.rows if rows is None else rows
    for row in shown:
        delta, text = difference(row), row.arm.name
        if row.is_baseline:
            continue
        if with_numbers and row.word in DIFFERENT and delta is not None:
            text += f" ({row.endpoint.signed(delta)})"
        by_word.setdefault(row.word, []).append(text)
    if not by_word:
        return f"Only {table.baseline.name} has runs; there is nothing to compare it with."
    parts = []
    for word in MEANINGS:
        if word in by_word:
            parts.append(f"{SAYS.get(word, word).capitalize()}: {', '.join(by_word[word])}.")
    small = ", ".join(row.arm.name for row in shown if row.is_small)
    return " ".join([*parts, f"{TOO_SMALL.capitalize()}: {small}."] if small else parts)


def scale(table: Table) -> str:
    """What the differences are of, with their unit: the line beside the first number."""
    endpoint = table.endpoint
    bits = " (0.69 nats are one bit)" if endpoint.unit == NATS else ""
    side = {"lower": ", negative is better", "higher": ", positive is better"}.get(endpoint.better, "")
    text = f"{endpoint.name}: {endpoint.axis()}{bits}{'' if endpoint.log else side}"
    if any(row.worth is not None for row in table.rows):
        text += "; worth: the multiple of its own tokens at which the baseline would end there"
    return text


def basis(table: Table) -> list[str]:
    """What the words rest on: seeds, level, margin, regime."""
    endpoint = table.endpoint
    verdicts = "both" if table.cells == 2 else f"all {table.cells}"
    together = "" if table.cells == 1 else f" (95% for {verdicts} together)"
    parts = [several(len(table.rows[0].seeds), "seed"), f"{100 * (1 - table.level):.4g}% intervals{together}"]
    mean = mean_value(table.rows[0])
    if mean is not None:
        parts.append(f"baseline at {endpoint.value(mean)}")
    if endpoint.margin:
        size, _, _ = endpoint.size(endpoint.margin).partition(" ")
        parts.append(f"less than {size} does not matter ({endpoint.origin})")
    elif endpoint.better:
        parts.append("no margin, so nothing is EQUIVALENT")
    ratio, text = tokens_per_parameter(table.baseline), table.baseline.mean("train_tokens")
    qualifiers = shared_qualifiers(table)
    if ratio is not None:
        parts.append(f"{ratio:.3g} tokens per parameter")
    if EARLY in qualifiers:
        qualifiers.remove(EARLY)
        parts.append("early training: orders may reverse")
    tokens = table.baseline.mean("tokens")
    if text and tokens and tokens > text:
        parts.append(f"{tokens / text:.2g} passes over {compact(text)} tokens of text")
    without_best = any(arm.no_best_rate for arm in table.arms)
    if table.study is not None and table.study.lr_grid:
        parts.append("each arm at its own best learning rate" + ", or that of its lowest loss" * without_best)
    if qualifiers:
        parts.append(f"every verdict: {', '.join(qualifiers)}")
    return parts


def advice(comparison: Comparison) -> tuple[str, str]:
    """What would decide what is not decided, and its command; "" where everything is.

    Of several studies, the first that leaves something open.
    """
    waiting = [table for table in comparison.tables if any(_is_open(row, table) for row in table.rows)]
    if not waiting:
        return "", ""
    tables = [table for table in comparison.tables if _launched_as(table) == _launched_as(waiting[0])]
    rows = [row for table in tables for row in table.rows if _is_open(row, table)]
    counts = [row.needed for row in rows if row.is_undecided]
    is_lacking = len(counts) < len(rows)
    study = waiting[0].study
    if study is not None and study.multirun:
        study = None  # has no name to train it by
    if is_lacking and study is not None and len(study.seeds) >= FEWEST_SEEDS:
        return "runs are missing", _command(waiting[0], study, ["--retry", "failed"])
    needed = max((count for count in counts if count is not None), default=None)
    sentence = "more than 200 seeds would be needed to decide the rest"
    if is_lacking:
        sentence, needed = f"{FEWEST_SEEDS} seeds are the fewest for a verdict", 8
    elif needed is not None:
        sentence = f"{needed} new seeds would decide {'more' if None in counts else 'it'}"
    if study is None or needed is None:
        return sentence, ""
    sentence += f" (about {duration(needed * sum(map(_seconds_per_seed, tables)))} of training)"
    start = 100 * (max(study.seeds) // 100 + 1)
    words = [f"name={study.name}-2", f"seeds={start}-{start + needed - 1}"]
    return sentence, _command(waiting[0], study, words)


def _is_open(row: Row, table: Table) -> bool:
    """Whether further runs could decide an arm: more seeds, or those that were planned."""
    if row.word not in (TOO_FEW_SEEDS, INCOMPLETE):
        return row.is_undecided
    planned = set(table.study.seeds if table.study else [])
    for arm in (row.arm, table.baseline):
        if any(planned - runs.keys() for runs in (arm.runs, *arm.by_rate.values())):
            return True
    return len(planned) < FEWEST_SEEDS


def _launched_as(table: Table) -> Path | None:
    """One path for all settings of a study."""
    return table.folder.with_name(table.study.name) if table.folder and table.study else table.folder


def _command(table: Table, study: Study, words: list[str]) -> str:
    """A command that trains the study as it was launched, or under a new name."""
    folder, name = _launched_as(table), study.name
    assert folder is not None
    if folder.parent != DEFAULT.absolute() or name in shipped_studies():
        name = nearer(folder)  # as launched, whatever overrides were typed
    return shlex.join(["nexus-ablate", "study", name, *words])


def _seconds_per_seed(table: Table) -> float:
    """Training time of one more seed of every arm, at each of its learning rates, and of the budgets of `worth`."""
    seconds = [(row.arm.mean("seconds") or 0.0) * max(len(row.arm.by_rate), 1) for row in table.rows]
    budgets = WORTH_ARMS.values() if table.study and table.study.worth else ()
    return sum(seconds) + sum(budgets) * seconds[0]


def fairness(table: Table) -> tuple[list[Check], str]:
    """The conditions that a reader must know of, those that fail first, and the names of those that hold."""
    counted = [check for check in table.checks if check.status != PASS]
    counted.sort(key=lambda check: check.status not in (FAIL, WAIVED))
    passed = [check.name for check in table.checks if check.status == PASS]
    hold = f"{several(len(passed), 'condition')} {'holds' if len(passed) == 1 else 'hold'}: {', '.join(passed)}"
    return counted, hold if passed else ""


def left_out(table: Table) -> list[str]:
    """One line for each run or arm in scope that is not in the table."""
    lines = [f"{'/'.join(out.path.parts[-2:])}: {out.reason}" for out in table.left_out]
    if table.study is not None:
        lines += [f"{name}: refused, {reason}" for name, reason in table.study.refused.items()]
        lines += [f"{name}: the configuration of {arm}, not trained twice" for name, arm in table.study.equal.items()]
    return lines


def missing(comparison: Comparison) -> list[str]:
    """The settings without a table."""
    return [f"{name}: no result yet ({why})" for name, why in comparison.missing.items()]


def direction(endpoint: Endpoint) -> str:
    """What an axis of differences shows, and which side is better."""
    side = {"lower": " (left is better)", "higher": " (right is better)"}.get(endpoint.better, "")
    return endpoint.axis() + side
