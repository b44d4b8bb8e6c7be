"""Read run directories: missing files stay missing, damaged files are reported by name."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO

import msgspec

from nexus_ablate.errors import RESTORE, UserError
from nexus_ablate.plain_data import LARGEST, UNREADABLE, check_plain, load_yaml, strict_loads
from nexus_ablate.runs.formats import ByHead, ConfigRecord, EnvironmentRecord, RowRecord, StatusRecord, SummaryRecord
from nexus_ablate.runs.ownership import effective_state

LOGS = ("metrics.jsonl", "probes.jsonl")
FIRST_KEYS = ("step", "tokens", "flops", "seconds")

_CHUNK_BYTES = 8 * 2**20
_TAIL_BYTES = 2**18

_RUN_NAME = re.compile(r"s(\d{1,18})-[0-9a-f]{8}(?:-r(\d{1,18}))?")


@dataclass(frozen=True)
class RunRecord:
    """The content of a run directory; missing files are None.

    Attributes:
        state: The effective state: one of `formats.State`, or `lost`.
        rerun: 1, or N for a sibling `-rN`.
    """

    path: Path
    study: str
    arm: str
    seed: int | None
    rerun: int
    state: str
    status: dict[str, Any]
    summary: dict[str, Any] | None
    config: dict[str, Any] | None
    overrides: list[str] | None
    env: dict[str, Any] | None

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; an empty list if there is no file."""
        return read_jsonl(self.path / "metrics.jsonl")

    def probes(self) -> list[dict[str, Any]]:
        """The rows of probes.jsonl; an empty list if there is no file."""
        return read_jsonl(self.path / "probes.jsonl")


def read_run(path: Path) -> RunRecord:
    """Read a run directory.

    Raises:
        UserError: It isn't a run, or a file in it is damaged; the message names the file.
    """
    path = Path(os.path.abspath(path))
    status = read_status(path)
    seed, rerun = None, 1
    if named := _RUN_NAME.fullmatch(path.name):
        seed, rerun = int(named[1]), int(named[2] or 1)
    overrides = read_text(path / "overrides.txt")
    return RunRecord(
        path=path,
        study=path.parent.parent.name,
        arm=path.parent.name,
        seed=seed,
        rerun=rerun,
        state=effective_state(status, path),
        status=status,
        summary=read_summary(path, status),
        config=read_config(path),
        overrides=None if overrides is None else overrides.splitlines(),
        env=read_env(path),
    )


def has_status(path: Path) -> bool:
    """Whether a directory is a run: it has a status.json, even a damaged one."""
    return os.path.lexists(path / "status.json")


def read_status(path: Path) -> dict[str, Any]:
    """The status.json of a run directory.

    Raises:
        UserError: It is missing or damaged.
    """
    status = read_document(path / "status.json", StatusRecord)
    if status is None:
        raise UserError(f"{path} is not a run", "no status.json", f"nexus-ablate status {shlex.quote(str(path))}")
    return status


def read_summary(path: Path, status: dict[str, Any]) -> dict[str, Any] | None:
    """The summary.json of a run directory with this status.json; None if the run has not finished and has none.

    Raises:
        UserError: It is damaged, or missing although the run has finished.
    """
    summary = read_document(path / "summary.json", SummaryRecord)
    if summary:
        measures = {name: value for name, value in summary.items() if "/" in name}
        with _named(path / "summary.json"):
            msgspec.convert(measures, dict[str, ByHead])
    if summary is None and status["state"] == "finished":
        raise damaged(path / "summary.json", "the file is missing, but status.json has the state finished")
    return summary


def leaves(values: Mapping[str, Any], *before: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value of a summary with its names, those of evaluations several: `("extrapolation", "sliding", "2")`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, *before, name)
        else:
            yield (*before, name), value


def read_config(path: Path) -> dict[str, Any] | None:
    """The config.yaml of a run directory with current keys (`experiment` was called `study`); None if there is none.

    Raises:
        UserError: It is damaged.
    """
    config = read_document(path / "config.yaml", ConfigRecord, load_yaml)
    if config is None:
        return None
    former = {"study": "experiment"}
    return {former.get(key, key): value for key, value in config.items()}


def read_env(path: Path) -> dict[str, Any] | None:
    """The env.json of a run directory; None if there is none.

    Raises:
        UserError: It is damaged.
    """
    return read_document(path / "env.json", EnvironmentRecord)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a log, one after the other. Empty if there is no file; a truncated last line is left out.

    Raises:
        UserError: Another line is damaged.
    """
    lines = (line for chunk in read_lines(path) for line in chunk.split(b"\n")[:-1])
    for number, line in enumerate(lines, 1):
        yield parse_row(path, line, f"line {number}")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All rows of a log in a list, which takes several times the memory of its text."""
    return list(read_rows(path))


def last_row(path: Path, name: str = "step") -> dict[str, Any]:
    """The last row of a log that has a metric, among its last 256 KiB; {} if there is none.

    Raises:
        UserError: The row is damaged.
    """
    wanted = f'"{name}"'.encode()
    for chunk in read_lines(path, -_TAIL_BYTES):
        for line in reversed(chunk.split(b"\n")[:-1]):
            if wanted in line:
                return parse_row(path, line, f"the last line with {name}")
    return {}


def read_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """A log in chunks of whole lines, some MiB each. Empty if there is no file; a truncated last line is left out.

    Args:
        path: The log.
        start: Byte at which a line begins; negative: only the lines that begin in the last `-start` bytes.

    Raises:
        UserError: It can't be read.
    """
    with _named(path), suppress(FileNotFoundError), _opened(path) as file:
        rest, size = b"", os.fstat(file.fileno()).st_size
        file.seek(start if start >= 0 else max(size + start, 0))
        if start < 0 < size + start:
            file.readline(-start)  # the rest of a line that began earlier
        while data := file.read(_CHUNK_BYTES):
            rest += data
            end = rest.rfind(b"\n") + 1
            if end:
                yield rest[:end]
            rest = rest[end:]


def parse_row(path: Path, line: bytes, place: str = "a line") -> dict[str, Any]:
    """One line of a log.

    Args:
        path: The log.
        line: The line.
        place: Where it is, for the error.

    Raises:
        UserError: It isn't a row.
    """
    try:
        row = strict_loads(line.decode())
        msgspec.convert(row, RowRecord)
        usual = (float, int, NoneType)  # converting every number of a log would take longer than reading it
        rest = {k: v for k, v in row.items() if type(v) not in usual or not -LARGEST < (v or 0) < LARGEST}
        for name in ("batch_hash", "nonfinite"):
            rest.pop(name, None)
        msgspec.convert(rest, dict[str, ByHead])
    except UNREADABLE as error:
        raise damaged(path, f"{place}: {error}") from None
    return row


def setting_folders(path: Path) -> list[Path]:
    """The folders `STUDY@SETTING` of a study with settings, which has no folder of its own; else the path itself."""
    if os.path.lexists(path) or not path.parent.is_dir():
        return [path]
    folders = [folder for folder in path.parent.glob("*@*") if folder.name.partition("@")[0] == path.name]
    return sorted(folders) or [path]


def find_runs(dirs: Iterable[Path]) -> list[Path]:
    """The run directories in the given ones (a run, an arm, a study with or without settings, or a runs_dir), sorted.

    Hidden directories are skipped.

    Raises:
        UserError: A given directory doesn't exist or can't be read.
    """
    return runs_and_strangers(dirs)[0]


def runs_and_strangers(dirs: Iterable[Path]) -> tuple[list[Path], dict[Path, str]]:
    """The runs, as `find_runs` has them, and why directories that look like runs are none.

    Raises:
        UserError: As in `find_runs`.
    """
    runs: dict[Path, Path] = {}  # by resolved path, so that a link doesn't count a run twice
    others: list[Path] = []

    def search(path: Path, depth: int) -> None:
        for child in sorted(path.iterdir(), key=Path.is_symlink):  # a run under its own name, before a link to it
            if child.name.startswith(".") or not child.is_dir():
                continue
            if has_status(child):
                runs.setdefault(child.resolve(), child)
                continue
            others.append(child)
            if depth > 1:
                search(child, depth - 1)

    for path in chain.from_iterable(map(setting_folders, dirs)):
        if not os.path.isdir(path):
            is_first = not path.parent.is_dir() and len(path.parts) == 2  # nothing was ever trained here
            fix = f"nexus-ablate study {path.name}" if is_first else "nexus-ablate status"
            raise UserError("this directory does not exist", str(path), fix)
        place = Path(os.path.abspath(path))
        try:
            if has_status(place):
                runs.setdefault(place.resolve(), place)
            else:
                search(place, depth=3)
        except OSError as error:
            raise UserError(f"{path} cannot be searched", str(error), f"chmod u+rx {shlex.quote(str(path))}") from None
    arms = {run.parent for run in runs.values()}
    strangers = {}
    for path in sorted(others):
        if _RUN_NAME.fullmatch(path.name) or path.parent in arms:
            strangers[path] = "not a run: no status.json"
    return sorted(runs.values()), strangers


def read_text(path: Path) -> str | None:
    """A file's text; None if there is no file.

    Raises:
        UserError: It can't be read.
    """
    with _named(path):
        try:
            with _opened(path) as file:
                return file.read().decode()
        except FileNotFoundError:
            return None


def _opened(path: Path) -> BinaryIO:
    """A file to read; one that is a pipe is empty, where it would otherwise wait for a writer."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_document(path: Path, form: Any, parse: Callable[[str], Any] = strict_loads) -> dict[str, Any] | None:
    """The mapping in a file; None if there is no file.

    Args:
        path: The file.
        form: Its required form: a type of `formats`.
        parse: Turns its text into plain data.

    Raises:
        UserError: It can't be read, or doesn't have that form.
    """
    text = read_text(path)
    if text is None:
        return None
    with _named(path):
        if not text.strip():
            raise ValueError("the file is empty")
        value = parse(text)
        check_plain(value)
        msgspec.convert(value, form)
    return value


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Say which file cannot be read."""
    try:
        yield
    except (OSError, *UNREADABLE) as error:
        raise damaged(path, getattr(error, "strerror", None) or str(error)) from None


def damaged(path: Path, got: str) -> UserError:
    """The error for a file of a run or a study that cannot be read."""
    return UserError(f"{path} is damaged", got, RESTORE)
