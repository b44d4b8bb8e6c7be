"""`nexus-ablate compare DIR...`: is the difference real? Table and verdict in the terminal, and reports as files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nexus_ablate import errors
from nexus_ablate.masking import mask
from nexus_ablate.runs.files import atomic_write_text, check_target

if TYPE_CHECKING:
    from nexus_ablate.comparison.result import Comparison

HELP = """nexus-ablate compare DIR... [--baseline ARM] [--allow NAME,...] [--details]
                          [--html|md|latex|csv|json FILE] [--wandb PROJECT]

  nexus-ablate compare runs/norms                          every arm of a study against its baseline
  nexus-ablate compare runs/norms --html norms.html        one file with pictures; opens anywhere, needs no network
  nexus-ablate compare runs/a runs/b --baseline a/baseline runs of several studies
  nexus-ablate compare runs/norms --allow params           a broken condition of fairness, waived in plain sight
  nexus-ablate compare runs/norms --json -                 to standard output instead of the table
  nexus-ablate compare runs/norms --wandb nexus-ablate     table and report to W&B, [ENTITY/]PROJECT

Runs that failed, still run, are damaged or come twice are listed with their reason, never dropped.
docs/reading_a_verdict.md says what each word means."""

FORMATS = ("--html", "--md", "--latex", "--csv", "--json")


def run(arguments: list[str]) -> int:
    """Compare, print, and write what was asked for."""
    if not arguments or any(a in ("-h", "--help") for a in arguments):
        print(HELP)
        return errors.OK if arguments else errors.CONFIG
    dirs, options = split(arguments, ("--baseline", "--allow", "--wandb", *FORMATS), ("--details",))
    if not dirs:
        raise errors.ConfigError(
            "compare needs at least one directory", " ".join(arguments), "nexus-ablate compare runs/STUDY"
        )

    written = {flag: options[flag] for flag in FORMATS if flag in options}
    for flag, path in written.items():
        if path != "-":
            check_target(flag, Path(path))

    from rich.console import Console

    from nexus_ablate.comparison.result import compare
    from nexus_ablate.report.exports import csv_text, json_text, latex, markdown
    from nexus_ablate.report.page import html
    from nexus_ablate.report.terminal import show

    writers: dict[str, Callable[[Comparison], str]] = {
        "--html": html,
        "--md": markdown,
        "--latex": latex,
        "--csv": csv_text,
        "--json": json_text,
    }
    allow = [name for name in options.get("--allow", "").split(",") if name]
    comparison = compare(dirs, options.get("--baseline"), allow)
    if "-" in written.values():
        for flag, path in written.items():
            if path == "-":
                sys.stdout.write(writers[flag](comparison))
    else:
        show(comparison, Console(highlight=False), details="--details" in options)
    for flag, path in written.items():
        if path != "-":
            atomic_write_text(Path(path), mask(writers[flag](comparison)))
            print(f"written to {errors.printable(str(path), 4096)}", file=sys.stderr)
    if "--wandb" in options:
        print(f"W&B: {_publish(comparison, options['--wandb'])}", file=sys.stderr)
    return errors.OK


def _publish(comparison: Comparison, project: str) -> str:
    """The comparison sent to W&B; its address there."""
    from nexus_ablate.report.exports import csv_text, json_text, markdown
    from nexus_ablate.report.page import html
    from nexus_ablate.report.table import MAIN, answer, title
    from nexus_ablate.track import publish

    table = [column.title for column in MAIN], [[column.cell(row) for column in MAIN] for row in comparison.rows]
    files = {
        "report.html": html(comparison),
        "report.md": markdown(comparison),
        "table.csv": csv_text(comparison),
        "comparison.json": json_text(comparison),
    }
    return publish(project, *mask((comparison.study or title(comparison), answer(comparison), table, files)))


def split(
    arguments: list[str], with_value: tuple[str, ...], alone: tuple[str, ...]
) -> tuple[list[str], dict[str, str]]:
    """Directories, and flags with their values (`--flag value` or `--flag=value`).

    Raises:
        ConfigError: An unknown flag, or one without its value.
    """
    dirs: list[str] = []
    options: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if not argument.startswith("--"):
            dirs.append(argument)
        elif name in alone and not equals:
            options[name] = ""
        elif name not in with_value:
            raise errors.unknown("there is no flag of this name", name, [*with_value, *alone])
        elif equals:
            options[name] = value
        elif rest:
            options[name] = rest.pop(0)
        else:
            raise errors.ConfigError(f"{name} needs a value", argument, f"{name} VALUE")
    return dirs, options
