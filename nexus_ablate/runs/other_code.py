"""Earlier runs of a configuration by other code. They stay on disk and are never used as the result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nexus_ablate.errors import UserError
from nexus_ablate.provenance import code_of, differ, differing_files
from nexus_ablate.runs.reading import read_env, read_status


def made_by_other_code(path: Path, config_hash: str, env: Mapping[str, Any]) -> list[str]:
    """The runs next to `path` of the same configuration and seed by other code, in the order in which they started.

    Each is a text with the files that differ. This includes runs of an old version that recorded neither code nor
    configuration: the directory shows that they are of this arm and seed.

    Args:
        path: The directory of the run, existing or not.
        config_hash: From `identity`.
        env: The entries `source` and `plugins` of env.json.
    """
    runs = {}
    for beside in path.parent.glob(f"{path.name.partition('-')[0]}-*"):
        try:
            status = read_status(beside) if beside != path else None
            other_env = read_env(beside) or {}
        except UserError:  # damaged: `status` and `compare` report it
            continue
        files = differing_files(code_of(env), code_of(other_env))
        if status is not None and files and other_env.get("config_hash") in (None, config_hash):
            started = (str(status.get("started")), beside.name)
            runs[started] = f"{beside.name}, was made by other code ({differ(files)})"
    return [runs[started] for started in sorted(runs)]
