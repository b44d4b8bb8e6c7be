"""Reading run directories back: what is missing stays missing, what is damaged is named."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nexus_ablate.errors import RESTORE, UserError
from nexus_ablate.runs.files import read_regular
from nexus_ablate.runs.ownership import STATES, effective_state, heartbeat_age

LOGS = ("metrics.jsonl", "probes.jsonl")
FIRST_KEYS = ("step", "tokens", "flops", "seconds")

_DOCUMENT_BYTES = 16 * 2**20
"""Of a JSON file: that of a thousand layers has 1 MiB."""
_YAML_BYTES = 2 * 2**20
"""PyYAML takes seconds for so much."""
_YAML_ITEMS = 10**6
_YAML_DEPTH = 5000
"""Brackets, and characters of a line, each of which can be a level."""
_YAML_DIGITS = 1000

_RUN_NAME = re.compile(r"s(\d+)-[0-9a-f]{8}(?:-r(\d+))?")
# What a parser of damaged text can raise: PyYAML lets KeyError and IndexError through for tags such as `!!bool x`.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, yaml.YAMLError)


@dataclass(frozen=True)
class RunRecord:
    """A run directory as found; what is missing is None.

    Attributes:
        state: The effective state: one of `STATES`, or `lost`.
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
        """The rows of metrics.jsonl; none where there is no file."""
        return self._rows("metrics.jsonl")

    def probes(self) -> list[dict[str, Any]]:
        """The rows of probes.jsonl; none where there is no file."""
        return self._rows("probes.jsonl")

    def _rows(self, name: str) -> list[dict[str, Any]]:
        return read_jsonl(self.path / name) if os.path.lexists(self.path / name) else []


def read_run(path: Path) -> RunRecord:
    """Read a run directory.

    Raises:
        UserError: It is no run, or a file in it is damaged; the message names the file.
    """
    path = Path(os.path.abspath(path))
    status = read_status(path)
    named = _RUN_NAME.fullmatch(path.name)
    overrides = _read_text(path / "overrides.txt")
    return RunRecord(
        path=path,
        study=path.parent.parent.name,
        arm=path.parent.name,
        seed=int(named[1]) if named else None,
        rerun=int(named[2] or 1) if named else 1,
        state=effective_state(status, path),
        status=status,
        summary=read_mapping(path / "summary.json", strict_loads),
        config=read_config(path),
        overrides=None if overrides is None else overrides.splitlines(),
        env=read_mapping(path / "env.json", strict_loads),
    )


def read_config(path: Path) -> dict[str, Any] | None:
    """The config.yaml of a run directory in today's keys, None where there is none. `experiment` was called `study`."""
    config = read_mapping(path / "config.yaml", load_yaml)
    return None if config is None else {"experiment" if key == "study" else key: value for key, value in config.items()}


def has_status(path: Path) -> bool:
    """Whether a directory is a run, of whatever kind its status.json is."""
    return os.path.lexists(path / "status.json")


def read_status(path: Path) -> dict[str, Any]:
    """The status.json of a run directory.

    Raises:
        UserError: It is missing or damaged.
    """
    file = path / "status.json"
    status = read_mapping(file, strict_loads)
    if status is None:
        raise UserError(f"{path} is not a run", "no status.json", f"nexus-ablate status {path}")
    if status.get("state") not in STATES:
        raise _damaged(file, f"state {status.get('state')!r}")
    if not isinstance(status.get("host"), str) or not isinstance(status.get("pid"), int):
        raise _damaged(file, "host or pid missing")
    try:
        heartbeat_age(status)
    except _UNREADABLE:
        raise _damaged(file, f"heartbeat {status.get('heartbeat')!r}") from None
    return status


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a log. A last line that was cut off in the middle is left out.

    Raises:
        UserError: The file is missing or another line is damaged.
    """
    text = _read_text(path)
    if text is None:
        raise UserError(f"{path} is missing", "no such file", RESTORE)
    lines = text.split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line and number == len(lines):
            break
        try:
            row = strict_loads(line)
        except _UNREADABLE as error:
            if number == len(lines):
                break
            raise _damaged(path, f"line {number}: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int) or any(k not in row for k in FIRST_KEYS):
            raise _damaged(path, f"line {number} is no row with {' '.join(FIRST_KEYS)}")
        rows.append(row)
    return rows


def find_runs(dirs: Iterable[Path]) -> list[Path]:
    """The run directories in the given ones (a run, an arm, a study or a runs_dir), sorted.

    Hidden directories are left out, and so are links, which could lead anywhere.

    Raises:
        UserError: A given directory does not exist or cannot be read.
    """
    found: dict[Path, Path] = {}  # by resolved path: a link must not count a run twice

    def search(path: Path, depth: int) -> None:
        if has_status(path):
            found.setdefault(path.resolve(), path)
        elif depth:
            for child in path.iterdir():
                if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                    search(child, depth - 1)

    for path in dirs:
        if not os.path.isdir(path):
            raise UserError("this directory does not exist", str(path), "nexus-ablate status runs")
        try:
            search(Path(os.path.abspath(path)), depth=3)
        except OSError as error:
            raise UserError(f"{path} cannot be searched", str(error), f"chmod u+rx {path}") from None
    return sorted(found.values())


def _read_text(path: Path, limit: int = 2**40) -> str | None:
    """A file's text, None where there is none."""
    try:
        data = read_regular(path, limit)
        return None if data is None else data.decode()
    except (OSError, ValueError) as error:
        raise _damaged(path, getattr(error, "strerror", None) or str(error)) from None


def read_mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any] | None:
    """A file that holds a mapping, None where there is none.

    Raises:
        UserError: It cannot be read or holds something else.
    """
    text = _read_text(path, _DOCUMENT_BYTES)
    if text is None:
        return None
    try:
        value = parse(text)
    except _UNREADABLE as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(value, dict):
        raise _damaged(path, f"a {type(value).__name__}, not a mapping")
    return value


def strict_loads(text: str) -> Any:
    """JSON without NaN and Infinity.

    Raises:
        ValueError: The text is not that.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


class _Bounded:
    """What a YAML loader does besides: no merge keys, of which nine short lines make a billion, no endless number."""

    def flatten_mapping(self, node: Any) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise ValueError("a merge key (<<)")

    def construct_scalar(self, node: Any) -> Any:
        if node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and len(node.value) > _YAML_DIGITS:
            raise ValueError(f"a number of {len(node.value)} digits")
        return super().construct_scalar(node)  # type: ignore[misc]


class _SafeLoader(_Bounded, yaml.SafeLoader):
    pass


class _FastLoader(_Bounded, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    pass


def load_yaml(text: str) -> Any:
    """Plain data from YAML, whatever else it asks for.

    Raises:
        yaml.YAMLError: Or another of `_UNREADABLE`: PyYAML lets several through.
    """
    if len(text) > _YAML_BYTES:
        raise ValueError(f"more than {_YAML_BYTES} characters")
    if text.count("[") + text.count("{") > _YAML_DEPTH:  # PyYAML takes time by their square
        raise ValueError(f"more than {_YAML_DEPTH} brackets")
    # The C loader is several times as fast, but twenty thousand levels overflow its stack and end the process.
    deepest = max(map(len, text.splitlines()), default=0)
    value = yaml.load(text, _SafeLoader if deepest > _YAML_DEPTH else _FastLoader)
    if _written_out(value, {}) > _YAML_ITEMS:
        raise ValueError(f"more than {_YAML_ITEMS} items")
    return value


def _written_out(value: Any, known: dict[int, int]) -> int:
    """Items of nested lists and mappings with every alias written out, which nine short lines can make a billion."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = -1  # begun
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_written_out(part, known) for part in parts)
    if known[id(value)] < 0:
        raise ValueError("it holds itself")
    return known[id(value)]


def _damaged(path: Path, got: str) -> UserError:
    return UserError(f"{path} is damaged", got, RESTORE)
