"""Names to classes, one registry per axis, and the option files that are their schema.

An option is a class in its axis file and `conf/<axis>/<name>.yaml`. The YAML is read without torch:

    # First line: what it is and where it is published. `list` prints it.
    name: rms
    eps: 1.0e-6      # float (0, inf); added to the mean square, inside the root
    equation: y = g x / sqrt(mean(x^2) + eps)   (or a list of lines) what `explain` prints
    prescribes: {norm_bias: off}         what this option means by `auto` elsewhere
    refuses: {init=gpt2: the reason}     explicit contradictions
    warns: {embed_scale=off: the reason} known traps

Every other key carries its constraint (see schema.py) and meaning as a comment, and reaches the class as a
keyword-only argument that has no default in Python.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from nexus_ablate.errors import ConfigError, unknown
from nexus_ablate.schema import Constraint

T = TypeVar("T")
RESERVED = ("name", "equation", "prescribes", "refuses", "warns")
_KEY_LINE = re.compile(r"^(?P<key>\w+):\s[^#]*#\s*(?P<comment>.+)$")


@dataclass(frozen=True)
class Key:
    """One key of a YAML file: its default, what it may hold, and what it means."""

    name: str
    default: Any
    constraint: Constraint
    meaning: str


@dataclass(frozen=True)
class OptionFile:
    """One option as its YAML describes it."""

    axis: str
    name: str
    summary: str
    equation: list[str]
    keys: dict[str, Key]
    prescribes: dict[str, Any]
    refuses: dict[str, str]
    warns: dict[str, str]


@dataclass
class Option:
    """A chosen option: its name and the values of its keys."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        return {"name": self.name, **self.keys}


def conf_dir() -> Path:
    """The built-in `conf/`: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    shipped = package / "conf"
    return shipped if shipped.is_dir() else package.parent / "conf"


def key_comments(text: str) -> dict[str, tuple[Constraint, str]]:
    """The constraint and meaning beside each top-level key of a YAML text."""
    found = {}
    for line in text.splitlines():
        match = _KEY_LINE.match(line)
        if match:
            constraint, _, meaning = match["comment"].partition(";")
            found[match["key"]] = (Constraint(constraint.strip()), meaning.strip())
    return found


@cache
def option_files(axis: str, conf: Path | None = None) -> dict[str, OptionFile]:
    """The options of an axis by name, in alphabetical order."""
    paths = sorted((conf or conf_dir()).joinpath(axis).glob("*.yaml"))
    return {path.stem: read_option_file(axis, path) for path in paths}


def read_option_file(axis: str, path: Path) -> OptionFile:
    """Read one option's YAML.

    Raises:
        ConfigError: When the file breaks the form described at the head of this module.
    """
    text = path.read_text(encoding="utf-8")
    values = yaml.safe_load(text) or {}
    comments = key_comments(text)
    if values.get("name") != path.stem:
        raise ConfigError(f"{axis}/{path.name} must say name: {path.stem}", str(values.get("name")))
    keys = {}
    for key, default in values.items():
        if key in RESERVED:
            continue
        if key not in comments:
            fix = f"write `{key}: {default}  # constraint; meaning`"
            raise ConfigError(f"{axis}/{path.name}: key {key!r} has no constraint beside it", fix=fix)
        constraint, meaning = comments[key]
        keys[key] = Key(key, constraint.accept(f"{axis}.{key}", default), constraint, meaning)
    summary = text.splitlines()[0].removeprefix("#").strip()
    equation = values.get("equation") or []
    return OptionFile(
        axis=axis,
        name=path.stem,
        summary=summary,
        equation=equation if isinstance(equation, list) else [equation],
        keys=keys,
        prescribes=values.get("prescribes") or {},
        refuses=values.get("refuses") or {},
        warns=values.get("warns") or {},
    )


def check_option(axis: str, values: dict[str, Any]) -> Option:
    """The chosen option of an axis with canonical values.

    Raises:
        ConfigError: Unknown name, unknown key, or a value that the key cannot hold.
    """
    files = option_files(axis)
    name = values.get("name")
    if name not in files:
        raise unknown(f"{axis} has no option of this name", str(name), files)
    option = files[name]
    for key in values:
        if key not in option.keys and key not in RESERVED:
            raise unknown(
                f"{axis}={name} has no key of this name", f"{axis}.{key}", [f"{axis}.{k}" for k in option.keys]
            )
    return Option(name, {k: spec.constraint.accept(f"{axis}.{k}", values[k]) for k, spec in option.keys.items()})


class Registry(Generic[T]):
    """The classes of one axis by option name.

    The class's keyword-only arguments are the option's keys, so that each default is written once, in the YAML.
    """

    def __init__(self, axis: str) -> None:
        self.axis = axis
        self._classes: dict[str, Callable[..., T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Class decorator.

        Raises:
            ValueError: When the name is taken.
        """

        def add(cls: type[T]) -> type[T]:
            if name in self._classes:
                raise ValueError(f"{self.axis}={name} is registered twice")
            self._classes[name] = cls
            return cls

        return add

    def names(self) -> list[str]:
        return sorted(self._classes)

    def get(self, name: str) -> Callable[..., T]:
        """The class of an option.

        Raises:
            ConfigError: When no class of that name is registered.
        """
        if name not in self._classes:
            raise unknown(f"{self.axis} has no class registered under this name", name, self._classes)
        return self._classes[name]

    def keys_of(self, name: str) -> set[str]:
        """The names of the class's keyword-only arguments."""
        parameters = inspect.signature(self.get(name)).parameters.values()
        return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def build(self, option: Option, *args: object) -> T:
        """The option's object, made from the model's arguments and the option's keys.

        Raises:
            ConfigError: When the class does not take exactly the keys of the option's YAML.
        """
        takes = self.keys_of(option.name)
        if takes != set(option.keys):
            got = f"class {sorted(takes)}, YAML {sorted(option.keys)}"
            raise ConfigError(f"{self.axis}={option.name}: class and YAML disagree on the keys", got)
        return self.get(option.name)(*args, **option.keys)
