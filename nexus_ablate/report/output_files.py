"""The files that a command writes where its flags say: one writer, which replaces nothing that a user would miss."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote

from nexus_ablate.data.cache import default_cache_dir
from nexus_ablate.errors import ConfigError, StorageError
from nexus_ablate.runs import atomic_write, has_status
from nexus_ablate.runs.files import refuse_impossible_folder

PICTURES = (".png", ".pdf", ".svg")
OF_A_RUN = (
    "config.yaml",
    "overrides.txt",
    "env.json",
    "init.json",
    "metrics.jsonl",
    "probes.jsonl",
    "evaluation.jsonl",
    "status.json",
    "summary.json",
    "decay_groups.json",
    "wandb.json",
    "log.txt",
    "LOCK",
)
OF_A_STUDY = "study.yaml"

_checked: dict[Path, str] = {}
"""The hash of each file when the command checked it; '' if there was none."""


def check_target(flag: str, path: Path, endings: Sequence[str]) -> None:
    """Check that the file named by a flag can be written, before anything is computed for it.

    Args:
        endings: Those that it may have; empty: any.

    Raises:
        ConfigError: It can't be written.
    """
    if endings and path.suffix not in endings:
        fix = f"{flag} {quote((path.stem[:100] or 'picture') + endings[0])}"
        raise ConfigError(f"{flag} takes a file that ends in {', '.join(endings)}", str(path), fix)
    folder = Path(os.path.realpath(path)).parent
    if not os.path.isdir(folder):
        raise ConfigError(
            f"{flag} names a folder that does not exist", str(path.parent), f"mkdir -p {quote(str(path.parent))}"
        )
    if os.path.isdir(path):
        raise ConfigError(
            f"{flag} takes a file, but this is a directory", str(path), f"{flag} {quote(str(path / 'NAME'))}"
        )
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(
            f"{flag} takes a file, but this is a device or a pipe", str(path), f"{flag} {quote(f'{path.name}.txt')}"
        )
    refuse_impossible_folder(folder)
    try:
        os.lstat(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        shorter = f"{flag} {quote((path.stem[:40] or 'report') + path.suffix[:10])}"
        raise ConfigError(f"{flag} names a file that cannot be written: {error.strerror}", str(path), shorter) from None


def check_outputs(outputs: Mapping[str, Path], inputs: Iterable[str], force: bool) -> None:
    """Check that the files named by the flags of a command replace nothing else.

    Args:
        outputs: The file by flag.
        inputs: What else the command line names.
        force: Whether files that this package has not written may be replaced.

    Raises:
        ConfigError: A flag names a file of a run or a study, a file that the command reads or writes too, or an
            existing one that is not byte for byte what this package wrote there.
    """
    taken = {Path(os.path.realpath(word)) for word in inputs}
    for flag, path in outputs.items():
        place = Path(os.path.realpath(path))
        name = f"{path.stem[:100]}_{flag.lstrip('-')}{path.suffix[:10]}"
        other = f"{flag} {quote(name)}"
        if place in taken:
            raise ConfigError(f"{flag} names a file that this command reads or writes", str(path), other)
        is_inside = any(has_status(folder) for folder in place.parents[1:3])
        is_its_own = has_status(place.parent) and place.name in OF_A_RUN
        in_a_run = is_inside or is_its_own or place.name == "status.json"  # which makes any folder look like a run
        if in_a_run or place.name == OF_A_STUDY:
            problem = f"{flag} would replace a file of a {'run' if in_a_run else 'study'}"
            raise ConfigError(problem, str(path), other)
        _checked[place] = _hash(place)
        if _checked[place] and not force and _checked[place] != _recorded(place):
            problem = f"{flag} would replace a file that nexus-ablate has not written, or that was changed since"
            raise ConfigError(problem, str(path), f"{other}, or --force")
        taken.add(place)


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, and record its hash, so that a later command may replace it.

    Raises:
        StorageError: The disk refused, or another program wrote the file after `check_outputs`.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    place = Path(os.path.realpath(path))
    before = _hash(place)
    if before and before != _checked.get(place, before):
        raise StorageError(f"{path} was written by another program meanwhile", "it is left as it is", "another file")
    atomic_write(path, data)
    _checked[place] = hashlib.sha256(data).hexdigest()
    try:
        record = _record(place)
        record.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(record, _checked[place].encode())
    except (OSError, StorageError):  # without a record, replacing the file takes --force
        return


def _hash(path: Path) -> str:
    """sha256 of a file; '' if there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _record(path: Path) -> Path:
    """Where the hash of what was written to a file is recorded."""
    return default_cache_dir() / "outputs" / hashlib.sha256(os.fsencode(path)).hexdigest()


def _recorded(path: Path) -> str:
    try:
        return _record(path).read_text()
    except (OSError, ValueError):
        return ""
