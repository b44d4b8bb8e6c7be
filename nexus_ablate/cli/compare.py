"""`nexus-ablate compare DIR|STUDY...`: is the difference real? A table in the terminal, and reports as files."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nexus_ablate.cli.flags import ALLOW, BASELINE, FORMATS, OUTPUTS, WANDB, Flags
from nexus_ablate.cli.verb import Verb
from nexus_ablate.errors import OK, printable
from nexus_ablate.masking import mask

if TYPE_CHECKING:
    from nexus_ablate.comparison.compare import Comparison

VERB = Verb(
    "compare",
    "is a difference real: paired seeds, intervals, a verdict",
    "DIR|STUDY...",
    (
        ("compare norms", "every arm of a study against its baseline; `compare runs/norms` is the same"),
        ("compare norms --html norms.html", "one file with pictures; needs no network"),
        ("compare depth", "a study with settings: a table for each, and all of them side by side"),
        ("compare runs/norms --baseline norm=layer", "against another arm"),
        ("compare runs/norms --allow params", "waive a condition of fairness; the report shows it"),
        ("compare runs/norms --json -", "to standard output instead of the table"),
        ("compare runs/norms --wandb nexus-ablate", "table and report to W&B"),
    ),
    (BASELINE, ALLOW, *OUTPUTS, WANDB),
    "Runs that failed, are still running, are damaged or exist twice are listed with the reason, never dropped. "
    "docs/reading_a_verdict.md defines each word.",
    "at least one directory",
    kind="results",
)


def run(dirs: list[str], flags: Flags) -> int:
    """Compare, print, and save the requested files."""
    from nexus_ablate.comparison.compare import compare
    from nexus_ablate.runs.lookup import place_of

    places = [place_of(word) for word in dirs]
    comparison = compare(places, flags.get("baseline"), flags.get("allow", ()))
    deliver(comparison, flags)
    if "wandb" in flags:
        names = [place.resolve().name for place in places]
        baseline = [f"--baseline {flags['baseline']}"] if "baseline" in flags else []
        print(f"W&B: {_publish(comparison, ' '.join([*names, *baseline]), flags['wandb'])}", file=sys.stderr)
    return OK


def deliver(comparison: Comparison, flags: Flags) -> None:
    """Print, and save the files that `OUTPUTS` ask for."""
    from nexus_ablate.console import open_console
    from nexus_ablate.report.terminal import show
    from nexus_ablate.runs import atomic_write_text

    files = {name: flags[name] for name in FORMATS if name in flags}
    printed = [name for name in files if files[name] == Path("-")]
    saved = [name for name in files if name not in printed]
    for name in saved:  # first, so that a reader who closes the pipe (`| head`) has the files
        atomic_write_text(files[name], mask(_written(name, comparison)))
    if not printed:
        show(comparison, open_console(), "details" in flags)
    for name in printed:
        sys.stdout.write(_written(name, comparison))
    for name in saved:
        print(f"saved to {printable(str(files[name]), 4096)}", file=sys.stderr)


def _written(name: str, comparison: Comparison) -> str:
    """The comparison in one of `FORMATS`."""
    from nexus_ablate.report import exports
    from nexus_ablate.report.page import html

    if name == "html":
        return html(comparison, shlex.join(["nexus-ablate", *sys.argv[1:]]))
    writers = {"md": exports.markdown, "csv": exports.csv_text, "json": exports.json_text}
    return writers[name](comparison)


def _publish(comparison: Comparison, name: str, project: str) -> str:
    """Send the comparison to W&B; returns its URL."""
    from nexus_ablate.report.columns import MAIN, shown, text_table
    from nexus_ablate.report.sentences import answer
    from nexus_ablate.track.comparison_run import publish

    tables, answers = {}, []
    for table in comparison.tables:
        texts = text_table(table.rows, table, shown(table, MAIN))
        name_of_table = comparison.name_of(table) if len(comparison.tables) > 1 else table.setting
        tables[name_of_table] = texts.heads, texts.rows
        answers.append(f"{name_of_table}: {answer(table)}" if name_of_table else answer(table))
    endings = {"html": "report.html", "md": "report.md", "csv": "table.csv", "json": "comparison.json"}
    files = {file: _written(kind, comparison) for kind, file in endings.items()}
    return publish(project, *mask((name, " ".join(answers), tables, files)))
