"""All options of all axes, from the registry: a new option is tested without a line here."""

from __future__ import annotations

import itertools
from functools import cache
from importlib.util import find_spec

from nexus_ablate.config.grammar import show
from nexus_ablate.config.options import AXES, option_files
from nexus_ablate.config.rules import READ_BY_MIXERS

STARTS = (("init", "auto"), ("init", "checkpoint"))
"""A meaning taken from other options, and weights read from a run: they draw nothing by themselves."""

ALL = {axis: [name for name in option_files(axis) if (axis, name) not in STARTS] for axis in AXES}
NEEDS = {"attention=additive": " position=alibi", "attention=luong_concat": " position=alibi"}
"""What the default refuses, and the further override with which it is accepted."""

OF_PYTORCH = [name for name, option in option_files("optim").items() if not option.needs]
"""The optimizers that need no package besides PyTorch."""
OPTIMIZERS = [name for name, option in option_files("optim").items() if all(map(find_spec, option.needs))]
"""Those and what this installation has besides."""

SINGLE = [f"{axis}={name}" for axis, names in ALL.items() for name in names]
EVERY_OPTION = [option + NEEDS.get(option, "") for option in SINGLE]
"""Every option as overrides, separated by spaces."""


@cache
def settings(axis: str, name: str) -> set[str]:
    """An option and the keys of its YAML, as overrides."""
    keys = option_files(axis)[name].keys.items()
    return {f"{axis}={name}", *(f"{axis}.{key}={show(spec.default)}" for key, spec in keys)}


@cache
def refused(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether either option's file refuses the other, or a key of it as its YAML sets it."""

    def unread(mixer: tuple[str, str], axis: str, name: str) -> bool:
        reads = option_files("mixer")[mixer[1]].reads if mixer[0] == "mixer" else ["all"]
        keys = {f"{axis}.{key}": spec.default for key, spec in option_files(axis)[name].keys.items()}
        wishes = {axis: name} | keys | option_files(axis)[name].prescribes
        ignored = set() if "all" in reads else wishes.keys() & READ_BY_MIXERS.keys() - {*reads}
        return any(show(wishes[key]) not in READ_BY_MIXERS[key] for key in ignored)

    def lacking(axis: str, name: str, rule: str) -> bool:
        key = rule.partition("=")[0]
        wishes = {axis: name} | option_files(axis)[name].prescribes
        return key in wishes and f"{key}={show(wishes[key])}" not in rule.split()

    return any(
        settings(*b) & (file := option_files(a[0])[a[1]]).refuses.keys()
        or any(lacking(*b, rule) for rule in file.only)
        or unread(a, *b)
        for a, b in ((one, other), (other, one))
    )


def option_pairs() -> list[tuple[str, ...]]:
    """A pairwise covering array, greedy and in order.

    Every two options of different axes that do not refuse each other stand together in some row, and no row holds two
    that do: a row that was refused as a whole would leave its other pairs untested. An axis of which no option fits
    keeps its default.
    """
    axes = [axis for axis in AXES if len(ALL[axis]) > 1]
    every = itertools.combinations([(axis, name) for axis in axes for name in ALL[axis]], 2)
    missing = {frozenset(pair) for pair in every if pair[0][0] != pair[1][0] and not refused(*pair)}
    rows = []
    while missing:
        row = dict(sorted(min(missing, key=sorted)))
        for axis in axes:
            if axis not in row:
                fits = [n for n in ALL[axis] if not any(refused((axis, n), other) for other in row.items())]
                if not fits:
                    continue
                row[axis] = max(fits, key=lambda n: sum(frozenset({(axis, n), o}) in missing for o in row.items()))
        missing -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append(tuple(f"{axis}={row[axis]}" for axis in axes if axis in row))
    return rows
