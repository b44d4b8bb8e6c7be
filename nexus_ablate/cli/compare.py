"""`nexus-ablate compare DIR|STUDY...`: is the difference real? A table in the terminal, and reports as files."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nexus_ablate.cli.verb import FORCE, FULL, Flag, Flags, Verb, comma_separated, target
from nexus_ablate.errors import OK, ConfigError, printable
from nexus_ablate.masking import mask

if TYPE_CHECKING:
    from nexus_ablate.comparison.results import Comparison

FORMATS = ("html", "md", "latex", "csv", "json", "runs")
WATCH_SECONDS = 2.0  # between looks at the runs
RELOAD_SECONDS = 10  # between reloads of a page that --watch saves
OUTPUTS = (
    Flag("--details", "", "all columns and conditions"),
    FULL,
    *(
        Flag(f"--{name}", "FILE", f"the comparison as {name} (- for the terminal)", target(f"--{name}"))
        for name in FORMATS
        if name != "runs"
    ),
    Flag("--runs", "FILE", "one row per run as CSV, which `judge` reads", target("--runs")),
    FORCE,
)


def _place_on_wandb(text: str) -> str:
    """`project` or `entity/project`, as typed after --wandb."""
    from nexus_ablate.config.rules import check_project

    entity, slash, project = text.rpartition("/")
    if "/" in entity or not project or (slash and not entity):
        raise ConfigError("--wandb takes PROJECT or ENTITY/PROJECT", text, "--wandb nexus-ablate")
    check_project(project, f"--wandb {entity}{slash}")
    return text


VERB = Verb(
    "compare",
    "is a difference real: paired seeds, intervals, a verdict",
    "DIR|STUDY...",
    (
        ("compare runs/norms", "every arm of a study against its baseline; `compare norms` is the same"),
        ("compare runs/norms --html norms.html", "one file with pictures; needs no network"),
        ("compare runs/norms --html norms.html --watch", "again and again while the study runs"),
        ("compare runs/depth", "the strata runs/depth@... of a study, side by side"),
        ("compare runs/a runs/b --baseline a/baseline", "runs of several studies"),
        ("compare runs/norms --arm norm=dyt --baseline norm=layer", "two arms directly"),
        ("compare runs/norms --allow params", "waive a condition of fairness; the report shows it"),
        ("compare runs/norms --json -", "to standard output instead of the table"),
        ("compare runs/norms --wandb nexus-ablate", "table and report to W&B"),
    ),
    (
        Flag("--baseline", "ARM", "the arm that others are compared with (the study's)"),
        Flag("--arm", "ARM", "this arm alone, at the 5% of all pairs, any of which could have been picked"),
        Flag("--tokens", "DIR", "runs of the study `tokens`: what is a difference worth in training tokens"),
        Flag("--allow", "NAME,...", "conditions of fairness to waive", comma_separated),
        *OUTPUTS,
        Flag("--watch", "", "with --html: save the page again whenever a run ends, until the last one has"),
        Flag("--wandb", "PROJECT", "publish to [ENTITY/]PROJECT", _place_on_wandb),
    ),
    "Runs that failed, are still running, are damaged or exist twice are listed with the reason, never dropped. "
    "docs/reading_a_verdict.md defines each word.",
    "at least one directory",
    kind="results",
)


def run(dirs: list[str], flags: Flags) -> int:
    """Compare, print, and save the requested files."""
    from nexus_ablate.runs.lookup import place_of

    dirs = [str(place_of(word)) for word in dirs]
    if "watch" in flags:
        _watch(dirs, flags)
    comparison = _compare(dirs, flags)
    deliver(comparison, flags)
    if "wandb" in flags:
        chosen = [f"--{name} {flags[name]}" for name in ("baseline", "arm") if name in flags]
        name = " ".join([*dirs, *chosen])
        if comparison.name and len(dirs) == 1 and not chosen:  # all of the study, as it was planned
            name = comparison.name
        print(f"W&B: {_publish(comparison, name, flags['wandb'])}", file=sys.stderr)
    return OK


def _compare(dirs: list[str], flags: Flags) -> Comparison:
    from nexus_ablate.comparison.across_strata import compare

    return compare(dirs, flags.get("baseline"), flags.get("allow", ()), flags.get("arm"), flags.get("tokens"))


def _watch(dirs: list[str], flags: Flags) -> None:
    """Save the page, which reloads itself, after each run that ends; return when none is to come.

    Raises:
        ConfigError: There is no file to save the page to.
    """
    from nexus_ablate.comparison.arms import NoResult
    from nexus_ablate.execution.run_states import COMING, Watcher
    from nexus_ablate.execution.state_table import summary
    from nexus_ablate.report.page import html
    from nexus_ablate.runs import atomic_write_text

    path = flags.get("html", Path("-"))
    if path == Path("-"):
        fix = f"nexus-ablate compare {shlex.quote(dirs[0])} --html report.html --watch"
        raise ConfigError("--watch needs a page to save", "no --html FILE", fix)
    watcher, before = Watcher(), None
    while True:
        lines = watcher.lines(map(Path, dirs))
        states = [(line.study, line.arm, line.seed, line.state) for line in lines]
        if not any(line.state in COMING for line in lines):
            return
        if states != before and any(line.state in ("finished", "diverged") for line in lines):
            with suppress(NoResult):  # an arm may have a result before the baseline
                text = html(_compare(dirs, flags), _typed_command(), RELOAD_SECONDS)
                atomic_write_text(path, mask(text))
                print(f"saved to {printable(str(path), 4096)}: {summary(lines)}", file=sys.stderr, flush=True)
        before = states
        time.sleep(WATCH_SECONDS)


def deliver(comparison: Comparison, flags: Flags) -> None:
    """Print, and save the files that `OUTPUTS` ask for."""
    from nexus_ablate.console import open_console
    from nexus_ablate.report.parts import of_comparison
    from nexus_ablate.report.terminal import show
    from nexus_ablate.runs import atomic_write_text

    files = {name: flags[name] for name in FORMATS if name in flags}
    printed = [name for name in files if files[name] == Path("-")]
    saved = [name for name in files if name not in printed]
    for name in saved:  # first, so that a reader who closes the pipe (`| head`) has the files
        atomic_write_text(files[name], mask(_written(name, comparison)))
    if not printed:
        show(of_comparison(comparison, "details" in flags), open_console(), "full" in flags)
    for name in printed:
        sys.stdout.write(_written(name, comparison))
    for name in saved:
        print(f"saved to {printable(str(files[name]), 4096)}", file=sys.stderr)


def _written(name: str, comparison: Comparison) -> str:
    """The comparison in one of `FORMATS`."""
    from nexus_ablate.report import exports
    from nexus_ablate.report.page import html

    if name == "html":
        return html(comparison, _typed_command())
    writers = {
        "md": exports.markdown,
        "latex": exports.latex,
        "csv": exports.csv_text,
        "json": exports.json_text,
        "runs": exports.runs_text,
    }
    return writers[name](comparison)


def _typed_command() -> str:
    return shlex.join(["nexus-ablate", *sys.argv[1:]])


def _publish(comparison: Comparison, name: str, project: str) -> str:
    """Send the comparison to W&B; returns its URL."""
    from nexus_ablate.report.arm_tables import arm_table, main_columns
    from nexus_ablate.report.page import html
    from nexus_ablate.report.sentences import answer
    from nexus_ablate.track.comparison_run import publish

    tables, answers = {}, []
    for stratum in comparison.strata:
        table = arm_table(stratum.rows, main_columns(stratum))
        tables[stratum.name] = table.heads, table.rows
        answers.append(f"{stratum.name}: {answer(stratum)}" if stratum.name else answer(stratum))
    files = {
        "report.html": html(comparison),
        "report.md": _written("md", comparison),
        "table.csv": _written("csv", comparison),
        "comparison.json": _written("json", comparison),
    }
    return publish(project, *mask((name, " ".join(answers), tables, files)))
