"""What a comparison says, part by part and in order: the terminal and Markdown write it, each in its own way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nexus_ablate.comparison.fairness import WARN
from nexus_ablate.comparison.results import ArmResult, Comparison, Stratum
from nexus_ablate.report import arm_tables, sentences
from nexus_ablate.report.arm_tables import TextTable


class ReportPart(NamedTuple):
    """A line of text or a table.

    Attributes:
        kind: `title`, `heading`, `text`, `note` (a condition), `item` (one of several), `path`, or `table`.
        word: A verdict or status by which the line is coloured; of an `item`, in front of it.
        arms: Of a table with a row per arm, the arms.
    """

    kind: str
    text: str = ""
    word: str = ""
    table: TextTable = TextTable([], [], [])
    arms: Sequence[ArmResult] = ()


def of_comparison(comparison: Comparison, details: bool) -> Iterator[ReportPart]:
    """The claim, the strata side by side, then each of them."""
    for number, line in enumerate(sentences.claim_lines(comparison)):
        yield ReportPart("note" if number else "title", line)
    for line in sentences.missing_lines(comparison):
        yield ReportPart("note", line, WARN)
    if comparison.changes:
        yield ReportPart("heading", sentences.change_note(comparison))
        yield ReportPart("table", table=arm_tables.changes_over_strata(comparison))
    for stratum in comparison.strata:
        if stratum.name:
            yield ReportPart("title", f"stratum {stratum.name}")
        yield from of_stratum(stratum, details)


def opening(stratum: Stratum) -> Iterator[ReportPart]:
    """The question, the answer, the conditions and the table."""
    yield ReportPart("title", sentences.title(stratum))
    for line in sentences.opening(stratum):
        yield ReportPart("text", line)
    for line in sentences.basis(stratum):
        yield ReportPart("note", line, WARN if line.startswith(WARN) else "")
    table = arm_tables.arm_table(stratum.rows, arm_tables.main_columns(stratum))
    yield ReportPart("table", table=table, arms=stratum.rows)


def of_stratum(stratum: Stratum, details: bool) -> Iterator[ReportPart]:
    """The opening, a sentence for each arm, the other endpoints, fairness, and what was left out.

    Args:
        details: Measures by arm and every condition of fairness too.
    """
    yield from opening(stratum)
    yield ReportPart("heading")
    for row in stratum.rows:
        if row.verdict is not None:
            worth = f"; worth {arm_tables.worth_text(row)} of the baseline's training tokens" if row.worth else ""
            yield ReportPart("item", f"{row.arm}: {sentences.reason(row)}{worth}")
    for two in stratum.together:
        yield ReportPart("item", sentences.together_text(two, stratum.endpoint))
    for other in stratum.secondary:
        yield ReportPart("heading", ": ".join(arm_tables.secondary_heading(other)))
        yield ReportPart("table", table=arm_tables.secondary_table(other))
    if details:
        heads = ["measure", *(row.arm for row in stratum.rows)]
        measures = []
        for column in arm_tables.measures(stratum):
            measures.append([column.title, *map(column.text, stratum.rows)])
        yield ReportPart("heading", "measures")
        yield ReportPart("table", table=TextTable(heads, measures, heads[:1]))
    checks, others = sentences.fairness(stratum)
    yield ReportPart("heading", f"fairness: {', '.join(others)}")
    for check in stratum.checks if details else checks:
        yield ReportPart("item", f"{check.name}: {check.text}", check.status)
    left_out = sentences.left_out(stratum)
    if left_out:
        yield ReportPart("heading", "left out:")
    for line in left_out:
        yield ReportPart("path", line)
