"""`nexus-ablate compare DIR...`: is the difference real? Table and verdict in the terminal, and reports as files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import Flag, Verb, comma_separated, target
from nexus_ablate.masking import mask

if TYPE_CHECKING:
    from nexus_ablate.comparison.result import Comparison

FORMATS = ("html", "md", "latex", "csv", "json")

VERB = Verb(
    "compare",
    "is a difference real: paired seeds, intervals, a verdict in words; --html for the report",
    "DIR...",
    (
        ("compare runs/norms", "every arm of a study against its baseline"),
        ("compare runs/norms --html norms.html", "one file with pictures; needs no network"),
        ("compare runs/a runs/b --baseline a/baseline", "runs of several studies"),
        ("compare runs/norms --allow params", "waive a condition of fairness; the report shows it"),
        ("compare runs/norms --json -", "to standard output instead of the table"),
        ("compare runs/norms --wandb nexus-ablate", "table and report to W&B"),
    ),
    (
        Flag("--baseline", "ARM", "the arm that others are compared with (the study's)"),
        Flag("--allow", "NAME,...", "conditions of fairness to waive", comma_separated),
        Flag("--details", "", "all columns and conditions"),
        *(
            Flag(f"--{name}", "FILE", f"the comparison as {name} (- for the terminal)", target(f"--{name}"))
            for name in FORMATS
        ),
        Flag("--wandb", "PROJECT", "publish to [ENTITY/]PROJECT"),
    ),
    "Runs that failed, still run, are damaged or come twice are listed with their reason, never dropped. "
    "docs/reading_a_verdict.md says what each word means.",
    "at least one directory",
    kind="results",
)


def run(dirs: list[str], flags: dict[str, Any]) -> int:
    """Compare, print, and save what was asked for."""
    from rich.console import Console

    from nexus_ablate.comparison.result import compare
    from nexus_ablate.report.exports import csv_text, json_text, latex, markdown
    from nexus_ablate.report.page import html
    from nexus_ablate.report.terminal import show
    from nexus_ablate.runs.files import atomic_write_text

    writers: dict[str, Callable[[Comparison], str]] = dict(
        zip(FORMATS, (html, markdown, latex, csv_text, json_text), strict=True)
    )
    comparison = compare(dirs, flags.get("baseline"), flags.get("allow", ()))
    targets = {name: flags[name] for name in FORMATS if name in flags}
    if Path("-") not in targets.values():
        show(comparison, Console(highlight=False), details="details" in flags)
    for name, path in targets.items():
        text = writers[name](comparison)
        if path == Path("-"):
            sys.stdout.write(text)
        else:
            atomic_write_text(path, mask(text))
            print(f"saved to {errors.printable(str(path), 4096)}", file=sys.stderr)
    if "wandb" in flags:
        print(f"W&B: {_publish(comparison, flags['wandb'])}", file=sys.stderr)
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
