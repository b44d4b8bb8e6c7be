"""The comparison in a terminal, from 80 columns on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nexus_ablate.comparison.fairness import FAIL, PASS, STATUSES, UNKNOWN, WAIVED, WARN
from nexus_ablate.comparison.result import Comparison
from nexus_ablate.comparison.verdict import BETTER, DIVERGED, EQUIVALENT, IDENTICAL, NOT_COMPARABLE, UNSTABLE, WORSE
from nexus_ablate.console import SHORTEST_NAME, UNLIMITED, grid, print_table
from nexus_ablate.errors import printable
from nexus_ablate.report.table import (
    ARM,
    MAIN,
    NARROW,
    SECONDARY,
    Column,
    answer,
    basis,
    figure_columns,
    left_out,
    named,
    secondary_lines,
    side_columns,
    title,
    together_text,
    worth_text,
)

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = {
    BETTER: "green",
    WORSE: "red",
    EQUIVALENT: "cyan",
    IDENTICAL: "cyan",
    DIVERGED: "red",
    UNSTABLE: "red",
    NOT_COMPARABLE: "magenta",
    PASS: "green",
    WARN: "yellow",
    FAIL: "red",
    WAIVED: "magenta",
    UNKNOWN: "yellow",
}
WIDE = 120


def show(comparison: Comparison, console: Console, details: bool = False, full: bool = False) -> None:
    """Print it: the answer first, then the table, a sentence for each arm, fairness, and what was left out.

    Args:
        details: Costs, stability, diagnostics and every fairness line too.
        full: The arms' whole names in tables, however long.
    """
    show_table(comparison, console, full)
    console.print("")
    for row in comparison.rows[1:]:
        if row.verdict is not None:
            notes = "".join(f"; {note}" for note in row.notes)
            notes += f"; worth {worth_text(row)} of the baseline's training tokens" if row.worth else ""
            console.print(f"{_safe(row.arm)}: {_safe(row.verdict.sentence + notes)}")
    for two in comparison.together:
        console.print(_safe(together_text(two)))
    for heading, rows in secondary_lines(comparison):
        console.print("")
        console.print(f"[dim]{_safe(heading)}[/dim]")
        lines(SECONDARY, rows, console, full)
    if details:
        for columns in _by_width(comparison, (*side_columns(comparison), *figure_columns(comparison)), console.width):
            console.print("")
            _grid(comparison, columns, console, full)
    _fairness(comparison, console, details)
    _left_out(comparison, console)


def show_table(comparison: Comparison, console: Console, full: bool = False) -> None:
    """Print the question, the answer, the conditions and the table."""
    console.print(f"[bold]{_safe(title(comparison))}[/bold]")
    console.print(_safe(answer(comparison)))
    for line in basis(comparison):
        style = COLOURS[WARN] if line.startswith(WARN) else "dim"
        console.print(f"[{style}]{_safe(line)}[/{style}]")
    console.print("")
    columns = named(comparison, MAIN if console.width >= WIDE or full else NARROW)
    while not full and len(columns) > len(NARROW) and _width(comparison, columns) > console.width:
        columns = columns[:-1]
    _grid(comparison, columns, console, full)


def _width(comparison: Comparison, columns: tuple[Column, ...]) -> int:
    """Characters of a table whose arms' names are shortened as far as they can be."""
    needed = (max(len(column.title), *(len(column.cell(row)) for row in comparison.rows)) + 2 for column in columns)
    arm = max(len(row.arm) for row in comparison.rows)
    return sum(needed) - max(arm - SHORTEST_NAME, 0)


def _grid(comparison: Comparison, columns: tuple[Column, ...], console: Console, full: bool) -> None:
    rows = [[column.cell(row) for column in columns] for row in comparison.rows]
    styles = [COLOURS.get(row.verdict.word, "") if row.verdict else "dim" for row in comparison.rows]
    left = [column.title for column in columns if column.order is None]
    width = UNLIMITED if full else console.width
    print_table(console, grid([column.title for column in columns], rows, width, left, styles), full)


def lines(heads: tuple[str, ...], rows: list[tuple[str, ...]], console: Console, full: bool = False) -> None:
    """A small table of texts, the first and the last column to the left."""
    width = UNLIMITED if full else console.width
    print_table(console, grid(heads, rows, width, (heads[0], heads[-1])), full)


def _by_width(comparison: Comparison, columns: tuple[Column, ...], width: int) -> list[tuple[Column, ...]]:
    """The columns in as many tables as the width asks for, each with the arm in front."""
    tables: list[tuple[Column, ...]] = []
    left = 0
    for column in columns:
        needed = max(len(column.title), *(len(column.cell(row)) for row in comparison.rows)) + 2
        if needed > left:
            tables.append((ARM,))
            left = width - min(max(len(row.arm) for row in comparison.rows) + 2, width // 2)
        tables[-1] += (column,)
        left -= needed
    return tables


def _fairness(comparison: Comparison, console: Console, everything: bool) -> None:
    count = {status: sum(c.status == status for c in comparison.checks) for status in STATUSES}
    counted = ", ".join(f"{n} {status}" for status, n in count.items() if n)
    console.print(f"\n[dim]fairness:[/dim] {counted}")
    for check in comparison.checks:
        if everything or check.status not in (PASS, UNKNOWN):
            colour = COLOURS[check.status]
            console.print(f"  [{colour}]{check.status}[/{colour}] {check.name}: {_safe(check.text)}")
    if count[UNKNOWN] and not everything:
        names = ", ".join(check.name for check in comparison.checks if check.status == UNKNOWN)
        console.print(f"  [{COLOURS[UNKNOWN]}]{UNKNOWN}[/{COLOURS[UNKNOWN]}] the source does not prove: {names}")


def _left_out(comparison: Comparison, console: Console) -> None:
    out = left_out(comparison)
    if out:
        console.print(f"\n[dim]left out: {len(out)}[/dim]")
    for line in out:
        console.print(f"  {_safe(line)}", soft_wrap=True)


def _safe(text: str) -> str:
    from rich.markup import escape

    return escape(printable(text, 2000))
