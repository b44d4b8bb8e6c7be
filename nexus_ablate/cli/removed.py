"""Verbs of the previous version, and the command that replaces each. They answer for one release."""

from __future__ import annotations

import itertools
import shlex

from nexus_ablate.errors import ConfigError

REMOVED = {
    "noise": "nexus-ablate compare {words} --details",
    "completion": "nexus-ablate --help",
    "add-seeds": "nexus-ablate study {first} --add-seeds {rest}",
    "confirm": "nexus-ablate study {words} --confirm",
    "runs": "nexus-ablate status {words}",
    "verify-resume": "pytest -m slow tests/test_interrupted.py",
    "diff": "nexus-ablate show {words}",
    "coordcheck": "nexus-ablate bench coordinates {words}",
}
"""The removed verb, and the command that replaces it. `{words}` stands for the arguments without flags and their
values, `{first}` and `{rest}` for the first of them and the others."""


def refuse_removed(verb: str, arguments: list[str]) -> None:
    """Refuse a removed verb.

    Raises:
        ConfigError: It was a verb; `try:` has the command that replaces it, with the same arguments.
    """
    if verb not in REMOVED:
        return
    named = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    overrides = [word for word in arguments[len(named) :] if "=" in word and not word.startswith("-")]
    words = named + overrides  # another word behind a flag is its value
    first, rest = shlex.join(words[:1]), shlex.join(words[1:])
    command = REMOVED[verb].format(words=shlex.join(words), first=first, rest=rest)
    raise ConfigError(f"{verb} is no longer a verb", shlex.join([verb, *arguments]), command.strip())
