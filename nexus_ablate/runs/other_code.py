"""Earlier runs of a configuration that other code made. They stay on disk and are never taken for the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexus_ablate.errors import UserError
from nexus_ablate.provenance import code_of, differ, differing_files
from nexus_ablate.runs.ownership import SETTLED
from nexus_ablate.runs.record import read_env, read_status


@dataclass(frozen=True)
class OtherCode:
    """A run of the same configuration and seed by other code.

    Attributes:
        files: Those that differ.
        commit: Of the code that made it; None where it isn't known.
        has_result: It finished or diverged.
    """

    path: Path
    files: tuple[str, ...]
    commit: str | None
    has_result: bool

    def __str__(self) -> str:
        return f"{self.path.name}, was made by other code ({differ(self.files)})"


def made_by_other_code(path: Path, config_hash: str, env: Mapping[str, Any]) -> list[OtherCode]:
    """The runs beside `path` of the same configuration and seed by other code, the last one begun last.

    A run of a version that recorded neither code nor configuration counts: its directory says that it is of this arm
    and seed.

    Args:
        path: Where the run is, or will be.
        config_hash: From `identity`.
        env: What env.json says of the code: `source` and `plugins`.
    """
    runs = []
    for beside in path.parent.glob(f"{path.name.partition('-')[0]}-*"):
        try:
            status = read_status(beside) if beside != path else None
            other_env = read_env(beside) or {}
        except UserError:  # damaged: `status` and `compare` name it
            continue
        files = differing_files(code_of(env), code_of(other_env))
        if status is not None and files and other_env.get("config_hash") in (None, config_hash):
            commit = other_env.get("git_commit")
            other = OtherCode(beside, tuple(files), commit, status["state"] in SETTLED)
            runs.append((str(status.get("started")), beside.name, other))
    return [other for _, _, other in sorted(runs, key=lambda item: item[:2])]
