"""Finding a run by what a user types: its directory, the start of its id, or `last`."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from nexus_ablate.errors import ConfigError, UserError
from nexus_ablate.runs.reading import find_runs, has_status, setting_folders

DEFAULT = Path("runs")
"""Where ids and `last` are looked up: the default `runs_dir`."""
LAST = "last"
_ID = re.compile(r"[0-9a-f]{3,8}(?:-r\d+)?")


def id_of(path: Path) -> str:
    """A run's short id: the hash in its directory's name, with `-rN` for a rerun."""
    return path.name.partition("-")[2]


def name_to_type(path: Path) -> str:
    """A run as a command line names it: by its id where ids are looked up, elsewhere by its directory."""
    known = path.absolute().is_relative_to(DEFAULT.absolute())
    return shlex.quote(id_of(path) if known else str(path))


def place_of(word: str) -> Path:
    """The directory that a word names: itself, or that of a study in runs/, or of its settings.

    Raises:
        ConfigError: It names a file.
    """
    path, named = Path(word), DEFAULT / word
    if path.is_file():
        fix = f"nexus-ablate judge {shlex.quote(word)}, if it is a table of results"
        raise ConfigError("this is a file, not a directory of runs", word, fix)
    is_name = path.name == word and not os.path.lexists(path)
    return named if is_name and setting_folders(named)[0].is_dir() else path


def runs_at(words: list[str], verb: str) -> list[Path]:
    """The runs that words name: those in each directory, a run by its id, or `last`.

    Raises:
        UserError: As in `run_at`, or a directory that can't be read, or there is no run at all.
    """
    paths = []
    for word in words:
        is_run = word == LAST or (_ID.fullmatch(word) and not Path(word).exists())
        paths.append(run_at(word, verb) if is_run else place_of(word))
    runs = find_runs(paths)
    if not runs:
        raise ConfigError("there is no run here", " ".join(words), "nexus-ablate status")
    return runs


def run_at(word: str, verb: str) -> Path:
    """The directory of the run that a word names.

    Args:
        word: A run directory, an id or its first three letters or more, or `last`: the run that changed last.
        verb: The verb that it was typed after, for the error.

    Raises:
        UserError: There is no such run, or several.
    """
    path = Path(word)
    if has_status(path):
        return path
    if path.is_dir():
        inside = find_runs([path])
        got = f"{word}, a folder of {len(inside)} runs"
        fix = f"nexus-ablate {verb} {shlex.quote(os.path.relpath(inside[-1]))}" if inside else "nexus-ablate status"
        raise ConfigError(f"{verb} takes one run", got, fix)
    is_id = _ID.fullmatch(word)
    if not is_id and word != LAST:
        raise UserError(f"{word} is not a run", "no such directory", "nexus-ablate status")
    runs = find_runs([DEFAULT]) if DEFAULT.is_dir() else []
    matches = [run for run in runs if word in (LAST, id_of(run))]
    if not matches:
        matches = [run for run in runs if id_of(run).startswith(word)]
    ids = sorted({id_of(run) for run in matches})
    if word != LAST and len(ids) > 1:
        raise ConfigError(f"{len(ids)} ids start with {word}", ", ".join(ids[:4]), f"nexus-ablate {verb} {ids[0]}")
    if matches:  # two experiments can have the same run
        return max(matches, key=lambda run: os.lstat(run / "status.json").st_mtime)
    got = f"{word}, among {len(runs)} runs in {DEFAULT}/"
    raise ConfigError("there is no such run", got, "nexus-ablate status")
