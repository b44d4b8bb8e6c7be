"""A comparison in a terminal, from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    table, styles, leave = part.table, [], []
    for row in part.arms:
        styles.append("dim" if row.is_baseline else COLOURS[TONES.get(row.word, "")])
    if part.arms:
        columns = zip(table.heads, *table.rows, strict=True)
        tables = [[column for column in columns if width >= WIDE or column[0] not in NARROW]]
        leave = table.heads[:2:-1]
    else:
        tables = _by_width(table, width)
    for number, columns in enumerate(tables):
        if number:
            console.print("")
        heads, *rows = zip(*columns, strict=True)
        print_table(console, grid(heads, rows, width, table.words, styles, leave=leave), full)


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
