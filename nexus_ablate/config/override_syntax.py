"""Overrides as Hydra's grammar reads them, before they are compared with any schema.

Hydra accepts an added key (`+x=1`) and any key of its own, and its messages contain internal types.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from nexus_ablate.config.foreign_words import meaning
from nexus_ablate.config.groups import GROUPS, option_names
from nexus_ablate.errors import ConfigError

MOST_RUNS = 10_000
"""Most values of a sweep, and most runs of a multirun: more are a typing error."""
_PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.-]*")
WITH_LAUNCHER = "nexus-ablate -m norm=rms,layer hydra/launcher=joblib"
"""A command that has a use for Hydra's keys."""


@dataclasses.dataclass(frozen=True)
class Override:
    """An override as it was given.

    Attributes:
        text: All of it.
        name: Its key or group.
        typed: What follows the equals sign.
        values: Several if it is a sweep.
        parsed: Hydra's form of it.
    """

    text: str
    name: str
    typed: str
    values: list[Any]
    is_sweep: bool
    is_added: bool
    parsed: Any = dataclasses.field(repr=False)

    @property
    def is_hydra(self) -> bool:
        """Whether it is about Hydra itself: `hydra.launcher.n_jobs=2`, `hydra/launcher=joblib`."""
        return re.split("[./]", self.name)[0] == "hydra"

    def assignments(self) -> list[str]:
        """The override of each value, quoted as Hydra does."""
        from hydra.core.override_parser.types import Glob

        if isinstance(self.parsed.value(), Glob):
            texts = self.values
        elif self.is_sweep:
            texts = self.parsed.sweep_string_iterator()
        else:
            texts = [self.parsed.get_value_element_as_str()]
        return [f"{self.parsed.get_key_element()}={text}" for text in texts]


def read_override(text: str) -> Override:
    """Raises:
    ConfigError: The text cannot be read, or is nothing that an override may be.
    """
    from hydra.errors import HydraException

    if "_target_" in text:
        raise ConfigError("_target_ is not accepted: it could run any code", text, "choose an option by its name")
    try:
        override = _parser().parse_override(text)
    except (HydraException, ValueError, RecursionError) as error:  # ValueError: a number of 5000 digits
        fix = 'KEY=VALUE, without spaces around "="; quote values with special characters: key=\'"..."\''
        key, _, value = text.partition("=")
        if re.fullmatch(r"[\w.=,@+-]*/[\w./=,@+-]*", value) and " " not in key:  # a path, such as that of a run
            fix = f"\"{key}='{value}'\""
        if "~/" in text:  # a shell expands it at the beginning of a word only
            expanded = text.replace("~/", f"{Path.home()}/")
            fix = meaning(expanded) or expanded
        raise ConfigError("this override cannot be read", text, fix) from error
    name, typed = override.key_or_group, text.partition("=")[2]
    if name == "study":
        fix = f"nexus-ablate study {typed}"
        raise ConfigError("study is a verb; the folder of a run is experiment=NAME", text, fix)
    if override.is_delete():
        fix = meaning(text) or "nexus-ablate list"
        raise ConfigError("nothing can be removed from the configuration", text, fix)
    if override.package is not None:
        raise ConfigError(f"{name} has one place in the configuration", text, f"{name}={typed}")
    is_added = override.is_add() and not override.is_force_add()
    given = Override(text, name, typed, _values(override), override.is_sweep_override(), is_added, override)
    if given.is_hydra and not text.startswith("hydra/launcher=") and not name.startswith("hydra.launcher."):
        problem = "of Hydra's keys, a multirun takes hydra/launcher and hydra.launcher.KEY"
        fix = meaning(text) or WITH_LAUNCHER
        raise ConfigError(f"{problem}; sweepers that search are not supported", text, fix)
    if name == "hydra.launcher.n_jobs" and 0 in given.values:  # joblib's traceback would be the answer
        raise ConfigError("a launcher runs at least one job at a time", text, f"{name}=2")
    return given


@cache
def _parser() -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def _values(override: Any) -> list[Any]:
    """The values of an override: several if it is a sweep.

    Raises:
        ConfigError: A sweep that isn't a list of values, or has none or too many.
    """
    from hydra.core.override_parser.types import Glob, Sweep
    from hydra.errors import HydraException

    if not override.is_sweep_override():
        return [_unquoted(override.value())]
    if isinstance(override.value(), Glob):
        if override.key_or_group not in GROUPS:
            raise ConfigError(
                "glob chooses among options, not values", override.input_line, "nexus-ablate -m 'norm=glob(*)'"
            )
        return override.value().filter(sorted(option_names(override.key_or_group)))
    try:
        values = [_unquoted(value) for value in islice(override.sweep_iterator(), MOST_RUNS + 1)]
    except (HydraException, ValueError, ArithmeticError):  # an interval, a step of 0, or a range to NaN
        values = []
    if not 1 <= len(values) <= MOST_RUNS or any(isinstance(value, Sweep) for value in values):
        problem = f"a sweep is a list of 1 to {MOST_RUNS} values, not an interval, and contains no other sweep"
        raise ConfigError(problem, override.input_line, "nexus-ablate -m seed=0,1,2")
    return values


def _unquoted(value: Any) -> Any:
    """A value of Hydra's parser without the quotes of its texts."""
    if isinstance(value, list):
        return [_unquoted(item) for item in value]
    return getattr(value, "text", value)  # of a QuotedString


def quoted(path: Path) -> str:
    """A path as the value of an override."""
    if _PLAIN.fullmatch(str(path)):
        return str(path)
    escaped = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def replacements(overrides: Iterable[Override]) -> Iterator[tuple[Override, Override]]:
    """Each override that another one of its key follows, with that one. As everywhere in Hydra the last one counts."""
    last: dict[str, Override] = {}
    for override in overrides:
        if override.name in last:
            yield last[override.name], override
        last[override.name] = override
