"""All options of all axes, from the registry: a new option is tested without a line here."""

from __future__ import annotations

import itertools

from nexus_ablate.config import AXES
from nexus_ablate.registry import option_files

ALL = {axis: [name for name in option_files(axis) if (axis, name) != ("init", "auto")] for axis in AXES}
EVERY_OPTION = [f"{axis}={name}" for axis, names in ALL.items() for name in names]


def option_pairs() -> list[tuple[str, ...]]:
    """A pairwise covering array: every two options of different axes stand together in some row. Greedy, in order."""
    axes = [axis for axis in AXES if len(ALL[axis]) > 1]
    missing = {frozenset({(a, x), (b, y)}) for a, b in itertools.combinations(axes, 2) for x in ALL[a] for y in ALL[b]}
    rows = []
    while missing:
        row = dict(sorted(missing, key=sorted)[0])
        for axis in axes:
            if axis not in row:
                row[axis] = max(
                    ALL[axis], key=lambda name: sum(frozenset({(axis, name), o}) in missing for o in row.items())
                )
        missing -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append(tuple(f"{axis}={row[axis]}" for axis in axes))
    return rows
