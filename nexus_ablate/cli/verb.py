"""Declaration of a verb: summary, examples and flags. Help, parsing and errors are generated from it."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from nexus_ablate.errors import ConfigError, did_you_mean, unknown


@dataclass(frozen=True)
class Flag:
    """One flag of a verb.

    Attributes:
        takes: The name of its value in the help (`FILE`); '' for a flag without a value. With `[FILE]` the value may be
            left out, and is then ''.
        meaning: One line of help.
        read: Converts the text to the value; raises ConfigError.
        repeated: Whether it may be given several times; its value is then a list.
        short: A short name, such as `-m`.
        keys: Further names: `--qos high` is this flag with `qos=high`.
    """

    name: str
    takes: str
    meaning: str
    read: Callable[[str], Any] = str
    repeated: bool = False
    short: str = ""
    keys: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        return f"{self.short + ', ' if self.short else ''}{self.name} {self.takes}".rstrip()

    @property
    def key(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    @property
    def example(self) -> str:
        """The flag with a value that it takes, for errors; where any text will do, with what the help calls it."""
        try:
            self.read("")
        except ConfigError as error:
            return error.fix
        return f"{self.name} {self.takes}"


Flags = dict[str, Any]
"""The values of the flags that were typed, by `Flag.key`; True for a flag without a value."""
KINDS = ("runs", "studies", "results", "this machine and W&B")
OVERRIDES = "KEY=VALUE"
FORCE = Flag("--force", "", "replace the files that flags name")
FULL = Flag("--full", "", "whole names and every column, also where a line then wraps")


@dataclass(frozen=True)
class Verb:
    """One verb: `nexus-ablate NAME ...`.

    Attributes:
        name: The name as typed; its module has the same name, with underscores.
        summary: One line of `nexus-ablate --help`.
        takes: Its positional arguments in the help: `DIR...`, `[KEY=VALUE ...]`.
        examples: Command lines without `nexus-ablate`, each with an explanation ('' if it is obvious).
        notes: Paragraphs below the flags.
        needed: The required positional arguments, for the error; '' if none are required.
        kind: Its heading in `nexus-ablate --help`, one of `KINDS`.
    """

    name: str
    summary: str
    takes: str = ""
    examples: tuple[tuple[str, str], ...] = ()
    flags: tuple[Flag, ...] = ()
    notes: str = ""
    needed: str = ""
    kind: str = KINDS[-1]

    def show_help(self) -> None:
        """Print the answer to `nexus-ablate NAME --help`, 80 columns wide."""
        from rich.padding import Padding
        from rich.text import Text

        from nexus_ablate.console import folded, open_console

        console = open_console()
        console.width = 80
        usage = f"nexus-ablate {self.name} {self.takes}".rstrip() + (" [flags]" if self.flags else "")
        console.print(Text(usage), "", Text(self.summary), "", sep="\n")
        for line, meaning in self.examples:
            console.print(Text(f"  nexus-ablate {line}"))
            if meaning:
                console.print(Padding.indent(Text(meaning), 6))
        if self.flags:
            flags = folded([(flag.usage, flag.meaning) for flag in self.flags])
            console.print("", Padding.indent(flags, 2), sep="\n")
        if self.notes:
            console.print("", Text(self.notes), sep="\n")

    @property
    def takes_overrides(self) -> bool:
        """Whether it takes overrides and nothing else."""
        return self.takes == f"[{OVERRIDES} ...]"

    def parse(self, arguments: list[str]) -> tuple[list[str], Flags]:
        """Positional arguments and flags.

        Raises:
            ConfigError: An unknown flag, a flag given twice or without its value, or an invalid value.
        """
        words: list[str] = []
        values: Flags = {}
        rest = list(arguments)
        if rest and self.takes_overrides:
            self._check_word(rest)  # a mistyped verb has flags that this one lacks
        while rest:
            argument = rest.pop(0)
            if not argument.startswith("-") or argument == "-" or argument[1:].isdecimal():
                words.append(argument)
                continue
            flag, text = self._read_flag(argument, rest)
            value = flag.read(text) if flag.takes else True
            if flag.repeated:
                values.setdefault(flag.key, []).append(value)
            elif flag.key in values:
                got = f"{values[flag.key]} and {text}" if flag.takes else argument
                raise ConfigError(f"{flag.name} is given twice", got, f"give {flag.name} once")
            else:
                values[flag.key] = value
        if self.needed and not words:
            raise ConfigError(f"{self.name} needs {self.needed}", "nothing", f"nexus-ablate {self._example()}")
        if self.takes_overrides:
            for number in range(len(words)):
                self._check_word(words[number:])
        outputs = {}
        for flag in self.flags:
            path = values.get(flag.key)
            if isinstance(path, Path) and path != Path("-"):
                outputs[flag.name] = path
        if outputs:
            from nexus_ablate.report.output_files import check_outputs

            check_outputs(outputs, "force" in values)
        return words, values

    def _read_flag(self, argument: str, rest: list[str]) -> tuple[Flag, str]:
        """The flag that an argument names, and the text of its value: after `=`, or taken from `rest`."""
        name, equals, text = argument.partition("=")
        flag = next((flag for flag in self.flags if name in (flag.name, flag.short, *flag.keys)), None)
        if flag is None:
            raise self._unknown_flag(argument, rest)
        if equals and not flag.takes:
            raise ConfigError(f"{flag.name} takes no value", argument, flag.name)
        may_be_left_out = flag.takes.startswith("[")
        is_value = bool(rest) and not rest[0].startswith("--") and not (may_be_left_out and "=" in rest[0])
        if flag.takes and not equals and is_value:
            text = rest.pop(0)
        if flag.takes and not text and not may_be_left_out:
            example = f"{name} ..." if name in flag.keys else flag.example
            raise ConfigError(f"{name} needs a value", argument, example)
        return flag, f"{name}={text}" if name in flag.keys else text

    def _example(self) -> str:
        """A command line that works here; for want of a directory what lists them, or a study to begin with."""
        if not self.takes.startswith("DIR"):
            return self.examples[0][0]
        from nexus_ablate.runs.lookup import DEFAULT

        return "status" if DEFAULT.is_dir() else "study first_look"

    def _unknown_flag(self, argument: str, rest: list[str]) -> ConfigError:
        """The error for a flag that this verb does not have."""
        from nexus_ablate.config.foreign_words import unknown_word
        from nexus_ablate.config.groups import default_keys

        name, equals, value = argument.partition("=")
        typed = argument
        if not equals and rest and not rest[0].startswith("-") and "=" not in rest[0]:
            value = rest[0]
            typed = f"{name} {value}"
        if self.name == "train" and (verb := next((word for word in rest if word in verb_names()), "")):
            others = [word for word in rest if word != verb]
            fix = shlex.join(["nexus-ablate", verb, argument, *others])
            return ConfigError("the verb stands before its flags", f"{argument} before {verb}", fix)
        flags = [name for flag in self.flags for name in (flag.name, *flag.keys)] + ["--help"]
        key, keys, help_command = name.lstrip("-"), default_keys(), f"nexus-ablate {self.name} --help"
        is_flag = did_you_mean(key, [flag.lstrip("-") for flag in flags])
        if value and OVERRIDES in self.takes and (key in keys or not is_flag):
            problem = f"{self.name} has no such flag; an option is typed {OVERRIDES}, without dashes"
            return unknown_word(problem, typed, key, keys, f"{{}}={value}", help_command)
        form = f"{{}}{typed.removeprefix(name)}"
        return unknown_word(f"{self.name} has no flag of this name", typed, name, flags, form, help_command)

    def _check_word(self, words: list[str]) -> None:
        """Check the first word where overrides alone are taken; a wrong one is repeated with the words behind it.

        Raises:
            ConfigError: It is neither a flag nor an override and, right behind `nexus-ablate`, no verb.
        """
        word, *after = words
        if "=" in word[1:] or word.startswith(("-", "~", "+")):
            return
        from nexus_ablate.config.foreign_words import unknown_word
        from nexus_ablate.config.run_config import OPTION_GROUPS

        typed = shlex.join(words)
        if word in OPTION_GROUPS:
            raise ConfigError(f"an option is typed {OVERRIDES}", typed, f"nexus-ablate list {word}")
        is_verb = self.name == "train"
        problem = f"this is neither a verb nor {OVERRIDES}" if is_verb else f"{self.name} takes {OVERRIDES}"
        verbs = verb_names() if is_verb else []
        form = f"nexus-ablate {{}} {shlex.join(after)}".rstrip()
        help_command = "nexus-ablate --help" if is_verb else f"nexus-ablate {self.name} --help"
        raise unknown_word(problem, typed, word, verbs, form, otherwise=help_command)


def verb_names() -> list[str]:
    """The names of all verbs: modules of this folder that declare a VERB. Imports none of them."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [path.stem.replace("_", "-") for path in files if "\nVERB = Verb(" in path.read_text(encoding="utf-8")]


def verb_module(name: str) -> ModuleType:
    """The module of a verb, with its `VERB` and `run(words, flags)`, which returns the exit status."""
    return importlib.import_module(f"nexus_ablate.cli.{name.replace('-', '_')}")


def all_verbs() -> list[Verb]:
    """Every verb, in the order of the help."""
    return sorted((verb_module(name).VERB for name in verb_names()), key=lambda verb: KINDS.index(verb.kind))


# --------------------------------------------------------------------------------------------------- values of flags


def comma_separated(text: str) -> list[str]:
    """The items of a comma-separated list, without empty ones."""
    return [item for item in text.split(",") if item]


def whole(
    flag: str, example: int, unit: str = "", also: tuple[str, ...] = (), most: int = 10**9
) -> Callable[[str], Any]:
    """A reader of whole numbers from 1, or of one of the words in `also`."""

    def read(text: str) -> Any:
        if text in also:
            return text
        if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) <= most:
            kind = "a whole number" if most == 10**9 else f"a whole number from 1 to {most}"
            kind = f"{kind} {unit}".rstrip() + "".join(f" or {word}" for word in also)
            raise ConfigError(f"{flag} takes {kind}", text or "nothing", f"{flag} {example}")
        return int(text)

    return read


def positive(flag: str, example: float, most: float) -> Callable[[str], float]:
    """A reader of numbers above 0 and up to `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= most:
            raise ConfigError(f"{flag} takes a number above 0, at most {most:g}", text, f"{flag} {example:g}")
        return value

    return read


def one_of(flag: str, *words: str) -> Callable[[str], str]:
    """A reader of one of some words."""

    def read(text: str) -> str:
        if text not in words:
            raise unknown(
                f"{flag} takes {' or '.join(words)}", text, words, f"{flag} {{}}", otherwise=f"{flag} {words[0]}"
            )
        return text

    return read


def target(flag: str, picture: bool = False) -> Callable[[str], Path]:
    """A reader of writable files: a picture, or any file; `-`, or no value, is standard output."""

    def read(text: str) -> Path:
        from nexus_ablate.report.output_files import PICTURES, check_target

        path = Path(text or "-")
        if path != Path("-") or picture:
            check_target(flag, path, PICTURES if picture else ())
        return path

    return read


def typed(flags: Flags, *keys: str) -> list[str]:
    """Those of some flags that were given, as they are typed."""
    return [f"--{key.replace('_', '-')}" for key in keys if key in flags]


def put(path: Path, text: str) -> None:
    """Write a text to the file that a flag names, or to standard output."""
    from nexus_ablate.runs import atomic_write_text

    if path == Path("-"):
        sys.stdout.write(text)
    else:
        atomic_write_text(path, text)
