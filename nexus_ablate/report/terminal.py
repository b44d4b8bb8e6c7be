"""A comparison in a terminal: six arms at 80 columns fit one screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nexus_ablate.comparison.compare import Comparison, Row, Table
from nexus_ablate.comparison.fairness import Check
from nexus_ablate.console import grid, middle
from nexus_ablate.errors import printable
from nexus_ablate.report import sentences
from nexus_ablate.report.columns import BY_NAME, MAIN, TONES, TextTable, by_measure, matrix, shown, text_table

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = {"good": "green", "bad": "red", "same": "cyan", "warn": "yellow", "": ""}
"""Of `TONES`."""
WIDE = 120
NARROW = [BY_NAME[name] for name in ("arm", "verdict", "delta", "interval", "worth")]
"""The columns below `WIDE`."""


def show(comparison: Comparison, console: Console, details: bool = False) -> None:
    """Print a comparison: each table, and then once what all of them share.

    Args:
        details: With every number, condition and left-out run.
    """
    tables = comparison.tables
    basis = _shared([sentences.basis(table) for table in tables])
    checks = _shared([_notable_checks(table) for table in tables])
    title = scale = ""
    for number, table in enumerate(tables):
        if number:
            console.print("")
        if sentences.title(table) != title:
            title = sentences.title(table)
            _line(console, title, "bold")
        if len(tables) > 1:
            name = comparison.name_of(table)
            if name == table.setting:
                name = f"setting {name}"
            own_basis = [part for part in sentences.basis(table) if part not in basis]
            _line(console, ": ".join(filter(None, (name, ", ".join(own_basis)))), "bold")
        _line(console, sentences.answer(table, with_numbers=False))
        if sentences.scale(table) != scale:
            scale = sentences.scale(table)
            _line(console, scale, "dim")
        console.print("")
        _show_rows(table, console)
        _show_checks([check for check in _notable_checks(table) if check not in checks], console)
        if details:
            _show_details(table, console)
    console.print("")
    if len(tables) > 1:
        print_texts(matrix(comparison), console)
    _line(console, ", ".join(basis), "dim")
    _show_checks(checks, console)
    if not details:
        left_out = sum(map(_number_left_out, tables))
        hidden = [f"{left_out} left out"] if left_out else []
        if any(sentences.fairness(table)[1] for table in tables):
            hidden.append("the other fairness conditions hold")
        _line(console, f"{'; '.join(hidden) or 'every number'} (--details)", "dim")
    _show_next(comparison, console)


def _show_next(comparison: Comparison, console: Console) -> None:
    """The advice, its command in one piece, and the settings without a table."""
    sentence, command = sentences.advice(comparison)
    if command:
        _line(console, f"next: {sentence}")
        _whole_line(console, command)
    elif sentence:
        _line(console, sentence)
    for line in sentences.missing(comparison):
        _line(console, line, "yellow")


def _number_left_out(table: Table) -> int:
    """Runs and arms in scope that are not in the table."""
    return len(table.left_out) + len(table.study.refused if table.study else [])


def _shared(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """The entries of the first list that all others have too."""
    return [entry for entry in lists[0] if all(entry in entries for entries in lists)]


def _notable_checks(table: Table) -> list[Check]:
    """The conditions that do not hold. Runs that were left out are counted in a line of their own."""
    return [check for check in sentences.fairness(table)[0] if check.name != "excluded"]


def _show_rows(table: Table, console: Console) -> None:
    """The table of the arms, and the words of the other endpoints."""
    columns = shown(table, MAIN if console.width >= WIDE else NARROW)
    print_texts(text_table(table.rows, table, columns), console, table.rows)
    for others in table.secondary:
        _line(console, f"{others[0].endpoint.name}: {sentences.answer(table, others, with_numbers=False)}")


def _show_checks(checks: Sequence[Check], console: Console) -> None:
    for check in checks:
        _line(console, f"{check.status} {check.name}: {check.text}", COLOURS[TONES[check.status]])


def _show_details(table: Table, console: Console) -> None:
    _line(console, sentences.fairness(table)[1], "dim")
    for row in table.all_rows:
        _line(console, f"  {row.endpoint.name} {row.arm.name}: {row.verdict}, {row.sentence}")
    console.print("")
    print_texts(by_measure(table), console)
    for line in sentences.left_out(table):
        _whole_line(console, line)


def _line(console: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(printable(text, 4000), style))


def _whole_line(console: Console, text: str) -> None:
    """A line that is not broken, so that it can be copied."""
    console.print(f"  {printable(text, 2000)}", soft_wrap=True, markup=False, emoji=False, highlight=False)


def print_texts(table: TextTable, console: Console, rows: Sequence[Row] = ()) -> None:
    """Print a table: of `rows` each in the colour of its verdict, else in as many tables as the width asks for."""
    if rows:
        styles = ["dim" if row.is_baseline else COLOURS[TONES.get(row.word, "")] for row in rows]
        leave = table.heads[:3:-1]
        console.print(grid(table.heads, table.rows, console.width, table.words, styles, leave=leave))
        return
    heads = [middle(head, max(console.width // 4, 8)) for head in table.heads]
    first, *others = zip(heads, *table.rows, strict=True)
    room = console.width - min(max(map(len, first)), console.width // 2) - 2
    widths = [2 + max(map(len, column)) for column in others]
    count = max(1, len(others) if sum(widths) <= room else room // max(widths))
    for start in range(0, max(1, len(others)), count):
        if start:
            console.print("")
        columns = [[middle(cell, room) for cell in column] for column in others[start : start + count]]
        names, *rows_of_part = zip(first, *columns, strict=True)
        console.print(grid(names, rows_of_part, console.width, table.words))
