"""A verb: summary, examples and flags. Its help, the reading of its arguments and their errors follow from it."""

from __future__ import annotations

import argparse
import importlib
import shlex
import textwrap
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from nexus_ablate.cli.flags import Flag, Flags
from nexus_ablate.errors import ConfigError, did_you_mean

KINDS = ("runs", "studies", "results", "this machine and W&B")
OVERRIDES = "KEY=VALUE"
NO_VERBS = ("__init__", "backend", "flags", "verb")
"""The files of this folder that are not a verb's."""


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
        most: The largest number of positional arguments.
        kind: Its heading in `nexus-ablate --help`, one of `KINDS`.
    """

    name: str
    summary: str
    takes: str = ""
    examples: tuple[tuple[str, str], ...] = ()
    flags: tuple[Flag, ...] = ()
    notes: str = ""
    needed: str = ""
    most: int = 10**6
    kind: str = KINDS[-1]

    def help(self) -> str:
        """The answer to `nexus-ablate NAME --help`."""
        return self._parser().format_help()

    def _parser(self) -> argparse.ArgumentParser:
        lines = [self.summary, ""]
        for command, meaning in self.examples:
            lines.append(f"  nexus-ablate {command}")
            lines += textwrap.wrap(meaning, 80, initial_indent=" " * 6, subsequent_indent=" " * 6)
        usage = f"nexus-ablate {self.name} {self.takes}".rstrip()
        if self.flags:
            usage += " [flags]"
        parser = argparse.ArgumentParser(
            usage=usage,
            description="\n".join(lines),
            epilog="\n\n".join(textwrap.fill(note, 80) for note in self.notes.split("\n\n")),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )
        group = parser.add_argument_group("flags")
        for flag in self.flags:
            options: dict[str, Any] = {"action": "store_true"}
            if flag.takes:
                options = {"action": "append" if flag.repeated else "store", "type": flag.value, "metavar": flag.takes}
            names = filter(None, (flag.short, flag.name))
            group.add_argument(*names, dest=flag.key, help=flag.meaning, **options)
            for name in flag.keys:
                read = partial(_of_key, flag, name)
                group.add_argument(name, action="append", dest=flag.key, type=read, help=argparse.SUPPRESS)
        return parser

    @property
    def takes_overrides(self) -> bool:
        """Whether it takes overrides and nothing else."""
        return self.takes == f"[{OVERRIDES} ...]"

    def parse(self, arguments: list[str]) -> tuple[list[str], Flags]:
        """Positional arguments and flags.

        Raises:
            ConfigError: An unknown flag, a flag without its value, or an invalid value.
        """
        if arguments and self.takes_overrides:
            self._check_word(arguments)  # a mistyped verb has flags that this one lacks
        try:
            namespace, words = self._parser().parse_known_args(arguments)
        except argparse.ArgumentError as error:
            raise self._misused(error) from None
        verb = next((word for word in words if word in verb_names()), "") if self.name == "train" else ""
        if verb:
            rest = [*arguments]
            rest.remove(verb)
            verb_module(verb).VERB.parse(rest)  # raises where that verb lacks a flag too
            fix = shlex.join(["nexus-ablate", verb, *rest])
            raise ConfigError("the verb stands before its flags", f"{arguments[0]} before {verb}", fix)
        if any(map(_is_flag, words)):
            raise self._unknown_flags(words)
        values: Flags = vars(namespace)
        if self.needed and not words:
            raise ConfigError(f"{self.name} needs {self.needed}", "nothing", f"nexus-ablate {self._example()}")
        if len(words) > self.most:
            fix = shlex.join(["nexus-ablate", self.name, *words[: self.most]])
            raise ConfigError(f"{self.name} takes {self.needed}", shlex.join(words), fix)
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

    def _misused(self, error: argparse.ArgumentError) -> ConfigError:
        """The error for a flag that lacks its value, or has one and takes none."""
        name = str(error.argument_name).rpartition("/")[2]
        flag = next(flag for flag in self.flags if name in (flag.name, *flag.keys))
        if flag.takes:
            return ConfigError(f"{name} needs a value", name, flag.typed if name == flag.name else f"{name} VALUE")
        return ConfigError(f"{name} takes no value", f"{name}=...", name)

    def _example(self) -> str:
        """A command line that works here; for want of a directory what lists them, or a study to begin with."""
        if not self.takes.startswith("DIR"):
            return self.examples[0][0]
        from nexus_ablate.runs.lookup import DEFAULT

        return "status" if DEFAULT.is_dir() else "study first_look"

    def _unknown_flags(self, words: list[str]) -> ConfigError:
        """The error for flags that this verb does not have; overrides that are typed as flags are answered together."""
        errors = []
        for word, after in zip(words, [*words[1:], ""], strict=True):
            if _is_flag(word):
                has_value = "=" not in word and "=" not in after and not _is_flag(after)
                errors.append(self._unknown_flag(word, after if has_value else ""))
        fixes = [error.fix for error in errors]
        if len({error.problem for error in errors}) > 1 or any(" " in fix or "=" not in fix for fix in fixes):
            return errors[0]
        return ConfigError(errors[0].problem, " ".join(error.got for error in errors), " ".join(fixes))

    def _unknown_flag(self, word: str, after: str) -> ConfigError:
        """The error for one of them, with the word behind it if that may be its value."""
        from nexus_ablate.config.foreign_words import meaning, unknown_word
        from nexus_ablate.config.groups import default_keys

        name, _, value = word.partition("=")
        value = value or after
        typed = f"{word} {after}".rstrip()
        help_command = f"nexus-ablate {self.name} --help"
        key, keys, flags = name.lstrip("-"), default_keys(), ["help"]
        problem = f"{self.name} has no such flag; an option is typed {OVERRIDES}, without dashes"
        if self.takes.startswith("STUDY") and (fix := _study_key(key.replace("-", "_"), value)):
            return ConfigError(problem, typed, fix)
        for flag in self.flags:
            flags += [each.lstrip("-") for each in (flag.name, *flag.keys)]
        is_flag = did_you_mean(key, flags)
        if value and OVERRIDES in self.takes and (key in keys or meaning(typed) or not is_flag):
            is_sweep = self.name == "train" and "," in value and not value.startswith("[")
            form = f"nexus-ablate -m {{}}={value}" if is_sweep else f"{{}}={value}"
            return unknown_word(problem, typed, key, keys, form, help_command, self.name)
        form = f"--{{}}{typed.removeprefix(name)}" if value else "--{}"
        return unknown_word(f"{self.name} has no flag of this name", typed, key, flags, form, help_command, self.name)

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


def _study_key(key: str, value: str) -> str:
    """A key of a study with a value that it takes: the given one if it does; '' if a study has no such key."""
    from nexus_ablate.study.definition import read_study
    from nexus_ablate.study.study import KEYS, TYPED

    if key not in TYPED:
        return ""
    word = f"{key}={value or KEYS[key][1]}"
    try:
        read_study(["mine", *([] if key == "arms" else ["vary.norm=layer"]), word])
    except ConfigError as error:
        return error.fix
    return shlex.quote(word)


def _of_key(flag: Flag, name: str, text: str) -> Any:
    """The value of a flag that is given by one of its further names."""
    return flag.value(f"{name.removeprefix('--')}={text}")


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not word[1:].isdecimal()


def verb_names() -> list[str]:
    """The names of all verbs, each of which is a module of this folder. Imports none of them."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    return [name.replace("_", "-") for name in names if name not in NO_VERBS]


def verb_module(name: str) -> ModuleType:
    """The module of a verb, with its `VERB` and `run(words, flags)`, which returns the exit status."""
    return importlib.import_module(f"nexus_ablate.cli.{name.replace('-', '_')}")


def all_verbs() -> list[Verb]:
    """Every verb, in the order of the help."""
    return sorted((verb_module(name).VERB for name in verb_names()), key=lambda verb: KINDS.index(verb.kind))
