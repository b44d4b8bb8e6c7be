"""`nexus-ablate runs [DIR...]`: the runs of some directories with their ids, losses and size on the disk."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import FULL, Flag, Verb, one_of

SORTS = ("age", "loss", "arm", "disk")

VERB = Verb(
    "runs",
    "list runs with short ids, losses and disk use",
    "[DIR...]",
    (
        ("runs", "every run in runs/, the newest first"),
        ("runs runs/norms --sort loss", "one study, the lowest loss first"),
        ("runs --filter norm=layer --filter finished", "only runs with both texts in their line"),
    ),
    (
        Flag("--filter", "TEXT", "runs whose experiment, arm, seed or state contains it", repeated=True),
        Flag("--sort", "|".join(SORTS), "by what (age)", one_of("--sort", *SORTS)),
        FULL,
    ),
    "An id names its run in `show` and `sample`, which also take its first letters, the run's directory, or `last`.",
    kind="results",
)


def run(words: list[str], flags: dict[str, Any]) -> int:
    """Print one line per run."""
    from nexus_ablate.console import UNLIMITED, grid, open_console, print_table, several
    from nexus_ablate.execution.status import COLOURS, Line, Watcher, duration, names_of
    from nexus_ablate.runs import find_runs
    from nexus_ablate.runs.lookup import DEFAULT, id_of

    if not words and not DEFAULT.is_dir():
        raise errors.ConfigError("there are no runs here", f"no folder {DEFAULT}", "nexus-ablate train")
    watcher, chosen = Watcher(), list[tuple[Path, Line, int]]()
    for path in find_runs([Path(word) for word in words] or [DEFAULT]):
        line = watcher.line(path)
        text = f"{id_of(path)} {line.study}/{line.arm} seed {line.seed} {line.state}"
        if all(part in text for part in flags.get("filter", ())):
            chosen.append((path, line, _bytes(path)))
    order = {
        "age": lambda item: math.inf if item[1].age_seconds is None else item[1].age_seconds,
        "loss": lambda item: math.inf if item[1].loss is None else item[1].loss,
        "arm": lambda item: (item[1].study, item[1].arm, item[1].seed or 0),
        "disk": lambda item: -item[2],
    }
    chosen.sort(key=order[flags.get("sort", SORTS[0])])
    console, full = open_console(), "full" in flags
    if chosen:
        names = names_of([line for _, line, _ in chosen], full)
        experiments = len({line.study for _, line, _ in chosen}) > 1
        heads = ("arm", "id", *(["experiment"] if experiments else []), "seed", "state", "val loss", "age", "disk")
        rows = [
            (
                names[line.study, line.arm],
                id_of(path),
                *([line.study] if experiments else []),
                "" if line.seed is None else str(line.seed),
                line.state,
                "" if line.loss is None else f"{line.loss:.4f}",
                duration(line.age_seconds),
                size_text(size),
            )
            for path, line, size in chosen
        ]
        width = UNLIMITED if full else console.width
        print_table(console, grid(heads, rows, width, ("id", "experiment", "state"), (), ("state", COLOURS)), full)
    console.print(f"{several(len(chosen), 'run')}, {size_text(sum(size for *_, size in chosen))}")
    return errors.OK


def _bytes(path: Path) -> int:
    """The bytes of all files in a directory; links are not followed."""
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, files in os.walk(path) for name in files)


def size_text(count: int) -> str:
    """Bytes in a readable unit: `3.4 MB`."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"
