"""A comparison in a terminal: six arms at 80 columns fit one screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nexus_ablate.comparison.compare import Comparison, Row, Table
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
MOST_CHECKS = 3


def show(comparison: Comparison, console: Console, details: bool = False) -> None:
    """Print a comparison; with `details` every number, condition and left-out run of it."""
    before = ""
    for number, table in enumerate(comparison.tables):
        if number:
            console.print("")
        if len(comparison.tables) > 1:
            _line(console, f"setting {table.setting}" if table.setting else table.name, "bold")
        if (title := sentences.title(table)) != before:
            _line(console, title, "bold")
        before = title
        _show_table(table, console, details)
    if len(comparison.tables) > 1:
        console.print("")
        print_texts(matrix(comparison), console)
    if advice := sentences.advice(comparison):
        _line(console, f"next: {advice}")
    for line in sentences.missing(comparison):
        _line(console, line, "yellow")


def _show_table(table: Table, console: Console, details: bool) -> None:
    _line(console, sentences.answer(table, with_numbers=False))
    console.print("")
    columns = shown(table, MAIN if console.width >= WIDE else NARROW)
    rows = text_table(table.rows, table, columns)
    common = sentences.shared_qualifiers(table)
    if common:  # said once, below
        for cells, row in zip(rows.rows, table.rows, strict=True):
            own = [text for text in row.qualifiers if text not in common]
            if row.word and isinstance(cells, list):
                cells[1] = f"{row.word} ({', '.join(own)})" if own else row.word
    print_texts(rows, console, table.rows)
    for others in table.secondary:
        _line(console, f"{others[0].endpoint.name}: {sentences.answer(table, others, with_numbers=False)}")
    console.print("")
    _line(console, sentences.basis(table), "dim")
    checks, passed = sentences.fairness(table)
    for check in checks if details else [check for check in checks if check.name != "excluded"][:MOST_CHECKS]:
        _line(console, f"{check.status} {check.name}: {check.text}", COLOURS[TONES[check.status]])
    if not details:
        left_out = len(table.left_out) + len(table.study.refused if table.study else [])
        hidden = f"{left_out} left out; " if left_out else ""
        _line(console, f"{hidden}{passed.partition(':')[0]} (--details)", "dim")
        return
    _line(console, passed, "dim")
    for row in (*table.rows, *(row for others in table.secondary for row in others)):
        if not row.is_baseline:
            _line(console, f"  {row.endpoint.name} {row.arm.name}: {row.word}, {row.sentence}")
    console.print("")
    print_texts(by_measure(table), console)
    for line in sentences.left_out(table):
        console.print(f"  {printable(line, 2000)}", soft_wrap=True, markup=False, emoji=False, highlight=False)


def _line(console: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(printable(text, 4000), style))


def print_texts(table: TextTable, console: Console, rows: Sequence[Row] = ()) -> None:
    """Print a table: of `rows` each in the colour of its verdict, else in as many tables as the width asks for."""
    if rows:
        styles = ["dim" if row.is_baseline else COLOURS[TONES.get(row.word, "")] for row in rows]
        leave = table.heads[:3:-1]
        console.print(grid(table.heads, table.rows, console.width, table.words, styles, leave=leave))
        return
    for number, columns in enumerate(_by_width(table, console.width)):
        if number:
            console.print("")
        heads, *cells = zip(*columns, strict=True)
        console.print(grid(heads, cells, console.width, table.words))


def _by_width(table: TextTable, width: int) -> Iterator[list[Sequence[str]]]:
    """The columns, each with its head, of as many tables as the width asks for; the first one is in front of each."""
    (head, *names), *others = zip(table.heads, *table.rows, strict=True)
    first = [middle(head, width // 3), *names]
    room = width - min(2 + max(map(len, [head, *names])), width // 2)
    columns: list[Sequence[str]] = [first]
    free = room
    for head, *cells in others:
        column = [middle(head, width // 3), *(middle(cell, room - 2) for cell in cells)]
        needed = 2 + max(map(len, column))
        if needed > free and len(columns) > 1:
            yield columns
            columns = [first]
            free = room
        columns.append(column)
        free -= needed
    yield columns
