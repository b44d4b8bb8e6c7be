"""What a verb is: its summary, examples and flags, declared once. Help, parsing and errors come from them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexus_ablate.errors import ConfigError, unknown
from nexus_ablate.runs.files import check_target


@dataclass(frozen=True)
class Flag:
    """One flag of a verb.

    Attributes:
        takes: What its value is called in the help (`FILE`); '' for a flag without a value. `[FILE]`: it may be left
            out, and is '' then.
        meaning: One line of help.
        read: From the text to the value; raises ConfigError.
        repeated: It may be given several times; its value is the list of all.
        example: A command line with it that works, for errors.
    """

    name: str
    takes: str
    meaning: str
    read: Callable[[str], Any] = str
    repeated: bool = False
    example: str = ""

    @property
    def usage(self) -> str:
        return f"{self.name} {self.takes}".rstrip()

    @property
    def key(self) -> str:
        return self.name.lstrip("-").replace("-", "_")


COLUMNS, WIDEST_TERM = 80, 46
HELP_FLAG = Flag("--help", "", "show this help")


@dataclass(frozen=True)
class Verb:
    """One verb: `nexus-ablate NAME ...`.

    Attributes:
        name: As typed.
        summary: One line of `nexus-ablate --help`.
        takes: Its positional arguments in the help: `DIR...`, `[KEY=VALUE ...]`.
        examples: Command lines without `nexus-ablate`, each with what it does ('' where that is clear).
        notes: Paragraphs below the flags.
        needed: What is missing, where arguments are but none is given; '' where none is needed.
    """

    name: str
    summary: str
    takes: str = ""
    examples: tuple[tuple[str, str], ...] = ()
    flags: tuple[Flag, ...] = ()
    notes: str = ""
    needed: str = ""

    def help(self) -> str:
        """The text of `nexus-ablate NAME --help`, at most 80 columns where words allow."""
        usage = " ".join(filter(None, ("nexus-ablate", self.name, self.takes, "[flags]" if self.flags else "")))
        examples = _columns([(f"nexus-ablate {line}", meaning) for line, meaning in self.examples])
        flags = _columns([(flag.usage, flag.meaning) for flag in self.flags])
        notes = [part for line in self.notes.splitlines() for part in (textwrap.wrap(line, COLUMNS) or [""])]
        paragraphs = ([usage], [self.summary], examples, flags, notes)
        return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)

    def parse(self, arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
        """Positional arguments, and the values of the flags that are given, by `Flag.key`.

        Raises:
            ConfigError: An unknown flag, one given twice, one without its value, or a value that it cannot take.
        """
        flags = {flag.name: flag for flag in self.flags}
        words: list[str] = []
        values: dict[str, Any] = {}
        rest = list(arguments)
        while rest:
            argument = rest.pop(0)
            name, equals, text = argument.partition("=")
            if not argument.startswith("-") or argument == "-":
                words.append(argument)
                continue
            if name not in flags:
                raise unknown(f"{self.name} has no flag of this name", name, [*flags, HELP_FLAG.name])
            flag = flags[name]
            if not flag.takes and equals:
                raise ConfigError(f"{name} takes no value", argument, name)
            if flag.takes and not equals:
                if rest and not (rest[0].startswith("--") or (flag.takes.startswith("[") and "=" in rest[0])):
                    text = rest.pop(0)
                elif not flag.takes.startswith("["):
                    text = ""
            if flag.takes and not text and not flag.takes.startswith("["):
                raise ConfigError(f"{name} needs a value", argument, flag.example or f"{name} {flag.takes}")
            if flag.key in values and not flag.repeated:
                raise ConfigError(f"{name} is given twice", f"{values[flag.key]} and {text}", f"give {name} once")
            value = flag.read(text) if flag.takes else True
            values[flag.key] = [*values.get(flag.key, []), value] if flag.repeated else value
        if self.needed and not words:
            example = next((f"nexus-ablate {line}" for line, _ in self.examples), f"nexus-ablate {self.name} --help")
            raise ConfigError(f"{self.name} needs {self.needed}", "nothing", example)
        return words, values


def _columns(rows: list[tuple[str, str]]) -> list[str]:
    """Two columns; a meaning that does not fit beside its term goes below it."""
    width = max((len(term) for term, meaning in rows if meaning and len(term) <= WIDEST_TERM), default=0)
    lines = []
    for term, meaning in rows:
        beside = f"  {term:<{width}}  {meaning}".rstrip()
        fits = not meaning or (len(term) <= width and len(beside) <= COLUMNS)
        lines += [beside] if fits else [f"  {term}", f"      {meaning}"]
    return lines


# --------------------------------------------------------------------------------------------------- values of flags


def names_of(known: Callable[[], Mapping[str, Any] | list[str]], what: str) -> Callable[[str], list[str]]:
    """Reads a comma-separated list of known names; `what` they are is for the error."""

    def read(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        for name in names:
            if name not in known():
                raise unknown(f"there is no {what} of this name", name, known())
        return names

    return read


def comma_separated(text: str) -> list[str]:
    """The items of a list, empty ones left out."""
    return [item for item in text.split(",") if item]


def whole(flag: str, example: int, unit: str = "", also: tuple[str, ...] = ()) -> Callable[[str], Any]:
    """Reads a whole number from 1, or one of the words of `also`."""

    def read(text: str) -> Any:
        if text in also:
            return text
        if not text.isdecimal() or not 1 <= int(text) <= 10**9:
            kind = " ".join(filter(None, ("a whole number", unit))) + "".join(f" or {word}" for word in also)
            raise ConfigError(f"{flag} takes {kind}", text or "nothing", f"{flag} {example}")
        return int(text)

    return read


def positive(flag: str, example: float, most: float) -> Callable[[str], float]:
    """Reads a number above 0 and at most `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= most:
            raise ConfigError(f"{flag} takes a number above 0, at most {most:g}", text, f"{flag} {example:g}")
        return value

    return read


def target(flag: str, endings: tuple[str, ...] = ()) -> Callable[[str], Path]:
    """Reads a file that can be written; `-`, for standard output, where no ending is asked for."""

    def read(text: str) -> Path:
        if text != "-" or endings:
            check_target(flag, Path(text), endings)
        return Path(text)

    return read
