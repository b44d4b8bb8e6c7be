"""What an unknown word of a command line should have been: a row of conf/foreign_words.yaml, else the nearest name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from nexus_ablate.config.options import conf_yaml
from nexus_ablate.errors import ConfigError, unknown

_SWITCHES = {"true": "on", "yes": "on", "false": "off", "no": "off"}


def unknown_word(
    problem: str,
    typed: str,
    word: str,
    names: Iterable[str],
    form: str = "{}",
    otherwise: str = "",
    verb: str = "",
) -> ConfigError:
    """The error for a word of a command line that is no name here. Its `try:` line repairs this word and no other.

    Args:
        typed: What stands there: `lr=1e-3`, `--lr 1e-3`, `--resume`, `eval runs/mine`.
        word: The part of it that is unknown: `lr`, `--lr`, `--resume`, `eval`.
        names: Those that it could be.
        form: How a name is typed there: `{}=1e-3`.
        otherwise: What to try where no row matches and no name is near. Default: the names.
        verb: The verb whose flag or word it is, to which a row may be limited.
    """
    names = [*names]
    fix = meaning(f"{verb} {_without_dashes(typed)}", "flags") if verb else ""
    if not fix and word not in names:
        fix = meaning(typed)
    if not fix:
        same_key = [name for name in names if _key(name) == _key(word)]  # `steps`: train.steps
        nearest = same_key[0] if len(same_key) == 1 else word
        fix = unknown(problem, nearest, names, form, otherwise=otherwise).fix
    return ConfigError(problem, typed, fix)


def meaning(typed: str, table: str = "words") -> str:
    """What another tool's word is here: the first row of conf/foreign_words.yaml that matches it; '' if none does."""
    text = _without_dashes(typed)
    name, equals, value = text.partition("=")
    value = _SWITCHES.get(value.lower(), value)
    spellings = [f"{name}{equals}{value}"]
    if value == "on":
        spellings.append(name)
    if not equals:
        spellings.append(f"{name} ")  # a verb with nothing behind it
    spellings += [f"{_key(name)}{spelling.removeprefix(name)}" for spelling in spellings]
    for spelling in spellings:
        for pattern, meant in _rows(table):
            if match := pattern.fullmatch(spelling):
                for kept in match.groups():
                    meant = meant.replace("*", kept, 1)
                return meant.strip()
    return ""


def _without_dashes(typed: str) -> str:
    """A flag as an override, `lr=1e-3` of `--lr 1e-3`; any other text as it is."""
    return re.sub(r"^--?([^\s=]+)\s+", r"\1=", typed).lstrip("-")


@cache
def _rows(table: str) -> list[tuple[re.Pattern[str], str]]:
    """The rows of a table, with what is typed as a pattern to which case, `_`, `-` and `.` make no difference."""
    rows = []
    for typed, meant in conf_yaml("foreign_words")[table].items():
        plain = re.escape(re.sub("[_-]", "", typed)).replace(r"\*", "(.*)")
        pattern = re.sub(r"(?<=[a-z0-9])(?=[a-z0-9])", "[._-]*", plain)
        rows.append((re.compile(pattern, re.IGNORECASE), meant))
    return rows


def _key(name: str) -> str:
    """A key without its group."""
    return name.rpartition(".")[2]
