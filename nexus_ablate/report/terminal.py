"""A comparison in a terminal, from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from nexus_ablate.console import UNLIMITED, grid, middle, print_table
from nexus_ablate.errors import printable
from nexus_ablate.report.arm_tables import TONES, TextTable
from nexus_ablate.report.parts import ReportPart

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = {"good": "green", "bad": "red", "same": "cyan", "warn": "yellow", "": ""}
"""Of `TONES`."""
STYLES = {"title": "bold", "heading": "dim", "note": "dim"}
WIDE = 120
NARROW = ("interval", "p", "delta/SD", "wins", "detectable")
"""Columns that a terminal narrower than `WIDE` leaves out, so that the arms' names have room."""


def show(parts: Iterable[ReportPart], console: Console, full: bool = False) -> None:
    """Print the parts of a comparison; with `full` the arms' whole names in tables, however long."""
    from rich.text import Text

    started = False
    for part in parts:
        if part.kind == "heading" or part.arms or (part.kind == "title" and started):
            console.print("")
        started = True
        text, colour = printable(part.text, 2000), COLOURS[TONES.get(part.word, "")]
        if part.kind == "table":
            _print(part, console, full)
        elif part.kind == "path":
            console.print(f"  {text}", soft_wrap=True, markup=False, emoji=False)
        elif part.kind == "item" and part.word:
            console.print(Text.assemble("  ", (part.word, colour), f" {text}"))
        elif text:
            console.print(Text(text, colour or STYLES.get(part.kind, "")))


def _print(part: ReportPart, console: Console, full: bool) -> None:
    """Print a table, of arms each in the colour of its verdict; with `full` without cutting names and columns."""
    width = UNLIMITED if full else console.width
    styles = []
    for row in part.arms:
        styles.append("dim" if row.is_baseline else COLOURS[TONES.get(row.word, "")])
    if part.arms:
        table, leave = part.table, part.table.heads[:2:-1]
        shown = [column for column, head in enumerate(table.heads) if width >= WIDE or head not in NARROW]
        tables = [_some_columns(table, shown)]
    else:
        tables, leave = _by_width(part.table, width), ()
    for number, table in enumerate(tables):
        if number:
            console.print("")
        print_table(console, grid(table.heads, table.rows, width, table.words, styles, leave=leave), full)


def _widths(table: TextTable) -> list[int]:
    """The characters of each column, with two between columns."""
    return [max(map(len, cells)) + 2 for cells in zip(table.heads, *table.rows, strict=True)]


def _some_columns(table: TextTable, columns: list[int]) -> TextTable:
    heads = [table.heads[column] for column in columns]
    rows = []
    for row in table.rows:
        rows.append([row[column] for column in columns])
    return TextTable(heads, rows, table.words)


def _by_width(table: TextTable, width: int) -> Iterator[TextTable]:
    """The columns in as many tables as the width asks for, each with the first one in front."""
    first = min(_widths(table)[0], width // 2)
    rows = [[name, *(middle(cell, width - first - 2) for cell in cells)] for name, *cells in table.rows]
    table = TextTable([middle(head, width // 3) for head in table.heads], rows, table.words)
    _, *widths = _widths(table)
    columns, left = [0], width - first
    for column, needed in enumerate(widths, 1):
        if needed > left and len(columns) > 1:
            yield _some_columns(table, columns)
            columns, left = [0], width - first
        columns.append(column)
        left -= needed
    yield _some_columns(table, columns)
