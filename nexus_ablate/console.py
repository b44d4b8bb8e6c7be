"""Output that fits: a terminal gets tables and names cut to its width, a pipe or a file gets whole lines."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from nexus_ablate.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNLIMITED = 10_000
"""The width of a pipe: a line is never wrapped, so that `grep` finds a run with all of its numbers."""
SHORTEST_NAME = 12
BLOCKS = "▁▂▃▄▅▆▇█"
MOST_BLOCKS = 32
"""Of a curve."""


def open_console(stderr: bool = False, file: TextIO | None = None) -> Console:
    """A rich console as wide as the terminal; one that doesn't wrap where there is none and COLUMNS isn't set.

    Where its reader has gone, rich would end the process with status 1: standard output raises, since there is nothing
    left to do, and any other stream goes silent, since a run goes on without its display.
    """
    from rich.console import Console

    class Lasting(Console):
        def on_broken_pipe(self) -> None:
            if self.file is sys.stdout:
                raise BrokenPipeError
            self.quiet = True

    console = Lasting(stderr=stderr, file=file, highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = UNLIMITED
    return console


def several(number: int, noun: str) -> str:
    """`1 seed`, `2 seeds`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def compact(value: float) -> str:
    """`12.3k`, `4.5M`: three digits."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """Seconds in a readable unit: `42 s`, `12 min`, `3.4 h`, `5.1 d`."""
    if seconds is None:
        return ""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            digits = 1 if size > 60 and seconds < 10 * size else 0
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def size_text(count: int) -> str:
    """Bytes in a readable unit: `3.4 MB`."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"


def nearer(path: Path) -> str:
    """A path as it is typed from here: relative to the working directory if it is inside."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = []
    for row in (heads, *rows):
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return [lines[0], "|" + "---|" * len(heads), *lines[1:]]


def grid(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    left: Iterable[str] = (),
    styles: Sequence[str] = (),
    coloured: tuple[str, dict[str, str]] = ("", {}),
    leave: Iterable[str] = (),
) -> Table:
    """A table without borders whose rows have one line each. The first column is cut in the middle if it must be.

    Args:
        heads: Titles of the columns, the names first.
        rows: The cells as plain text.
        width: Columns of the terminal.
        left: Titles of left-aligned columns, besides the first.
        styles: Rich style per row.
        coloured: Title of a column, and the rich style per text in it.
        leave: Titles of columns that are left out where there is no room, one by one, so that no number is cut.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    columns = []
    for column in zip(heads, *rows, strict=True):
        columns.append([printable(text, 2000) for text in column])
    first, *others = columns
    least = min(SHORTEST_NAME, max(map(cell_len, first)))
    for head in leave:
        if least + _width(others) <= width:
            break
        others = [column for column in others if column[0] != head]
    names = short_names(first[1:], max(SHORTEST_NAME, width - _width(others)))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0), collapse_padding=True)
    for column in (first, *others):
        is_text = column is first or column[0] in left
        gives_way = column is not first and is_text  # a long verdict, to its number
        side = "left" if is_text else "right"
        table.add_column(Text(column[0]), justify=side, no_wrap=not gives_way, overflow="ellipsis")
    coloured_head, colours = coloured
    for number, name in enumerate(first[1:], 1):
        texts = [Text(names[name])]
        for column in others:
            style = colours.get(column[number], "dim") if column[0] == coloured_head else ""
            texts.append(Text(column[number], style, no_wrap=True))
        table.add_row(*texts, style=styles[number - 1] if styles else None)
    return table


def folded(rows: Sequence[Sequence[str]], names: str = "", styles: Sequence[str] = ()) -> Table:
    """A table without borders whose names, the first column, have one line each; longer cells go on below.

    Args:
        rows: The cells as plain text, which may have several lines.
        names: Rich style of the names.
        styles: Rich style per row.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style=names, no_wrap=True)
    for _ in range(max(map(len, rows), default=1) - 1):
        table.add_column(overflow="fold")
    for number, row in enumerate(rows):
        cells = ["\n".join(printable(line, 2000) for line in cell.split("\n")) for cell in row]
        table.add_row(*map(Text, cells), style=styles[number] if styles else None)
    return table


def _width(columns: Iterable[Sequence[str]]) -> int:
    """The cells that columns take, with two in front of each; a wide letter takes two."""
    from rich.cells import cell_len

    return sum(2 + max(map(cell_len, column)) for column in columns)


def short_names(names: Iterable[str], width: int) -> dict[str, str]:
    """Each name in at most `width` letters, `…` in its middle. Those that would look alike are numbered."""
    short = {name: middle(name, width) for name in names}
    counts = Counter(short.values())
    for number, (name, text) in enumerate(short.items(), 1):
        if counts[text] > 1:
            ending = f"~{number}"
            short[name] = middle(name, width - len(ending)) + ending
    return short


def middle(text: str, width: int) -> str:
    """The text, with `…` for its middle if it takes more than `width` cells; a wide letter takes two."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{set_cell_size(text, width - 1 - end).rstrip()}…{set_cell_size(text[::-1], end).rstrip()[::-1]}"


def without_shared(names: Iterable[str]) -> dict[str, str]:
    """Each arm's name without the `key=value` that all names have in common; `baseline` where nothing is left."""
    parts = {name: name.split(",") for name in names}
    counts = Counter(part for values in parts.values() for part in set(values))
    short = {}
    for name, values in parts.items():
        distinct = [part for part in values if counts[part] < len(parts) or len(parts) == 1]
        short[name] = ",".join(distinct) or "baseline"
    return short


def sparkline(values: Sequence[Any]) -> str:
    """A curve as a line of blocks, from its lowest to its highest finite value; '' without two of them."""
    finite = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
    if len(finite) < 2:
        return ""
    count, last = min(MOST_BLOCKS, len(finite)), len(finite) - 1
    picked = [finite[round(i * last / (count - 1))] for i in range(count)]
    low, span = min(picked), (max(picked) - min(picked)) or 1.0
    heights = [round((value - low) / span * (len(BLOCKS) - 1)) for value in picked]
    return "".join(BLOCKS[height] for height in heights)
