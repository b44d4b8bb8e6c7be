"""A comparison in a terminal, from 80 columns on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nexus_ablate.comparison.fairness import PASS, STATUSES, UNKNOWN, WARN
from nexus_ablate.comparison.results import Comparison, Stratum
from nexus_ablate.console import SHORTEST_NAME, UNLIMITED, grid, print_table
from nexus_ablate.errors import printable
from nexus_ablate.report import arm_tables, sentences
from nexus_ablate.report.arm_tables import ARM, TONES, Column, TextTable

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = {"good": "green", "bad": "red", "same": "cyan", "warn": "yellow"}
"""Of `TONES`."""
WIDE = 120
NARROW = ("interval", "p", "delta/SD", "wins", "detectable")
"""Columns that a terminal narrower than `WIDE` leaves out."""


def show_comparison(comparison: Comparison, console: Console, details: bool = False, full: bool = False) -> None:
    """Print the claim, the strata side by side, then each of them.

    Args:
        details: Costs, stability, diagnostics and every fairness line too.
        full: The arms' whole names in tables, however long.
    """
    for number, line in enumerate(sentences.claim_lines(comparison)):
        _say(console, line, "" if number else "bold")
    for line in sentences.missing_lines(comparison):
        _say(console, line, "yellow")
    if comparison.changes:
        console.print("")
        _say(console, sentences.change_note(comparison), "dim")
        table = arm_tables.changes_over_strata(comparison)
        if _width(table) > console.width:
            table = arm_tables.one_cell_per_row(table, ("arm", "stratum", "difference"))
        _print(table, console, full)
    for stratum in comparison.strata:
        if comparison.claim or stratum.name:
            console.print("")
        if stratum.name:
            _say(console, f"── stratum {stratum.name} ──", "bold")
        show(stratum, console, details, full)


def show(stratum: Stratum, console: Console, details: bool = False, full: bool = False) -> None:
    """Print the answer first, then the table, a sentence for each arm, fairness, and what was left out."""
    show_table(stratum, console, full)
    console.print("")
    for row in stratum.rows:
        if row.verdict is not None:
            worth = f"; worth {arm_tables.worth_text(row)} of the baseline's training tokens" if row.worth else ""
            _say(console, f"{row.arm}: {sentences.reason(row)}{worth}")
    for two in stratum.together:
        _say(console, sentences.together_text(two))
    for other in stratum.secondary:
        console.print("")
        _say(console, ": ".join(arm_tables.secondary_heading(other)), "dim")
        _print(arm_tables.secondary_table(other), console, full)
    if details:
        columns = [*arm_tables.side_columns(stratum), *arm_tables.figure_columns(stratum)]
        for fitting in _by_width(stratum, columns, console.width):
            console.print("")
            _print_arms(stratum, fitting, console, full)
    _show_fairness(stratum, console, details)
    left_out = sentences.left_out(stratum)
    if left_out:
        console.print("")
        _say(console, "left out:", "dim")
    for line in left_out:
        console.print(f"  {printable(line, 2000)}", soft_wrap=True, markup=False, emoji=False)


def show_table(stratum: Stratum, console: Console, full: bool = False) -> None:
    """Print the question, the answer, the conditions and the table."""
    _say(console, sentences.title(stratum), "bold")
    _say(console, sentences.answer(stratum))
    for line in sentences.basis(stratum):
        _say(console, line, COLOURS["warn"] if line.startswith(WARN) else "dim")
    console.print("")
    columns = arm_tables.main_columns(stratum)
    if not full:
        columns = _fitting(stratum, columns, console.width)
    _print_arms(stratum, columns, console, full)


def _fitting(stratum: Stratum, columns: list[Column], width: int) -> list[Column]:
    """The columns without those that a terminal of this width has no room for, the last first."""
    fewest = [column for column in columns if column.title not in NARROW]
    if width < WIDE:
        return fewest
    spared = max(0, max(len(row.arm) for row in stratum.rows) - SHORTEST_NAME)
    while len(columns) > len(fewest) and _width(arm_tables.arm_table(stratum.rows, columns)) - spared > width:
        columns = columns[:-1]
    return columns


def _say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is, without control characters and markup."""
    from rich.text import Text

    console.print(Text(printable(text, 2000), style))


def _width(table: TextTable) -> int:
    """The characters of a row, with two between columns."""
    columns = zip(table.heads, *table.rows, strict=True)
    return sum(max(map(len, cells)) + 2 for cells in columns)


def _print_arms(stratum: Stratum, columns: list[Column], console: Console, full: bool) -> None:
    """Print a table of arms, each in the colour of its verdict."""
    styles = ["dim" if row.is_baseline else COLOURS.get(TONES.get(row.word, ""), "") for row in stratum.rows]
    _print(arm_tables.arm_table(stratum.rows, columns), console, full, styles)


def _print(table: TextTable, console: Console, full: bool, styles: Sequence[str] = ()) -> None:
    """Print a table; with `full` without cutting the names of its rows."""
    width = UNLIMITED if full else console.width
    print_table(console, grid(table.heads, table.rows, width, table.words, styles), full)


def _by_width(stratum: Stratum, columns: list[Column], width: int) -> list[list[Column]]:
    """The columns in as many tables as the width asks for, each with the arm in front."""
    arm = min(_width(arm_tables.arm_table(stratum.rows, [ARM])), width // 2)
    fitting: list[list[Column]] = []
    left = 0
    for column in columns:
        needed = _width(arm_tables.arm_table(stratum.rows, [column]))
        if needed > left:
            fitting.append([ARM])
            left = width - arm
        fitting[-1].append(column)
        left -= needed
    return fitting


def _show_fairness(stratum: Stratum, console: Console, details: bool) -> None:
    statuses = [check.status for check in stratum.checks]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in STATUSES if status in statuses)
    console.print(f"\n[dim]fairness:[/dim] {counts}")
    for check in stratum.checks:
        if details or check.status not in (PASS, UNKNOWN):
            _say_status(console, check.status, f"{check.name}: {check.text}")
    unknown = [check.name for check in stratum.checks if check.status == UNKNOWN]
    if unknown and not details:
        _say_status(console, UNKNOWN, f"the source does not prove: {', '.join(unknown)}")


def _say_status(console: Console, status: str, text: str) -> None:
    from rich.text import Text

    console.print(Text.assemble("  ", (status, COLOURS[TONES[status]]), f" {printable(text, 2000)}"))
