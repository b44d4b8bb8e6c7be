"""The files that a command writes where its flags say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote

from nexus_ablate.errors import ConfigError

PICTURES = (".png", ".pdf", ".svg")


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
    try:
        path.lstat()
    except FileNotFoundError:
        if not path.parent.is_dir():
            folder = str(path.parent)
            problem, fix = f"{flag} names a folder that does not exist", f"mkdir -p {quote(folder)}"
            raise ConfigError(problem, folder, fix) from None
        if not os.access(path.parent, os.W_OK):
            problem = f"{flag} names a folder that you may not write to"
            raise ConfigError(problem, str(path.parent), f"{flag} {quote(path.name)}") from None
    except OSError as error:
        shorter = f"{flag} {quote((path.stem[:40] or 'report') + path.suffix[:10])}"
        raise ConfigError(f"{flag} names a file that cannot be written: {error.strerror}", str(path), shorter) from None
    if path.is_dir():
        fix = f"{flag} {quote(str(path / 'NAME'))}"
        raise ConfigError(f"{flag} takes a file, but this is a directory", str(path), fix)
    if path.exists() and not path.is_file():
        fix = f"{flag} {quote('report' + path.suffix)}"
        raise ConfigError(f"{flag} takes a file, but this is a device or a pipe", str(path), fix)


def check_outputs(outputs: Mapping[str, Path], force: bool) -> None:
    """Check that the files named by the flags of a command replace nothing.

    Args:
        outputs: The file by flag.
        force: Whether existing files may be replaced.

    Raises:
        ConfigError: A file exists, or two flags name the same one.
    """
    taken: set[Path] = set()
    for flag, path in outputs.items():
        name = f"{path.stem[:100]}_{flag.lstrip('-')}{path.suffix[:10]}"
        other = f"{flag} {quote(name)}"
        if path.resolve() in taken:
            raise ConfigError(f"{flag} names the file of another flag", str(path), other)
        if path.exists() and not force:
            raise ConfigError(f"{flag} would replace an existing file", str(path), f"{other}, or --force")
        taken.add(path.resolve())
