"""`nexus-ablate status [DIR|STUDY...]`: every run's state and why, once or repeatedly."""

from __future__ import annotations

import time
from pathlib import Path

from nexus_ablate.cli.flags import JSON, WATCH, Flags, refuse_beside
from nexus_ablate.cli.verb import Verb
from nexus_ablate.errors import OK, printable

VERB = Verb(
    "status",
    "the state of every run and why; without arguments, all runs",
    "[DIR|STUDY ...]",
    (
        ("status", "every run in runs/ with its id, loss and disk use, the newest first"),
        ("status norms", "the runs of a study, and how many of them are missing"),
        ("status runs --watch", "all runs, refreshed until the last one has ended (or Ctrl-C)"),
        ("status norms --json", "a line of JSON for each run"),
    ),
    (WATCH, JSON),
    "Prints state, step, validation loss, time since the last heartbeat, time left, and for runs that did not succeed "
    "the reason and the log. `lost`: the process ended without reporting why; the same command resumes such a run. An "
    "id names its run in `show` and `sample`, which also take its first letters, the run's directory, or `last`.",
    kind="results",
)
WATCH_SECONDS = 1.0


def run(words: list[str], flags: Flags) -> int:
    """Print the state of every run."""
    from nexus_ablate.console import open_console, size_text
    from nexus_ablate.launch.states import read_lines, summary, table, troubles
    from nexus_ablate.runs import strict_json
    from nexus_ablate.runs.lookup import DEFAULT, place_of
    from nexus_ablate.runs.ownership import LIVE

    refuse_beside(WATCH, [JSON], flags)
    dirs = [place_of(word) for word in words] if words else [*filter(Path.is_dir, [DEFAULT])]
    console = open_console()
    if "watch" not in flags:
        lines, missing = read_lines(dirs)
        if not words:
            lines.sort(key=lambda line: line.age_seconds or 0.0)
        if "json" in flags:
            for line in lines:
                print(strict_json(line.to_dict()))
            return OK
        if lines:
            console.print(table(lines, console.width, ids=not words))
        for trouble in troubles(lines):
            console.print(printable(trouble, 1000), markup=False, soft_wrap=True)
        disk = "" if words or not lines else f", {size_text(sum(line.bytes() for line in lines))}"
        console.print(summary(lines, missing) + disk)
        return OK

    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, auto_refresh=False) as live:
        while True:
            lines, missing = read_lines(dirs)
            bad = [Text(printable(trouble)) for trouble in troubles(lines)[-3:]]
            rows = max(4, console.size.height - 6 - 2 * len(bad))
            shown = [table(lines, console.width, rows)] if lines else []
            live.update(Group(*shown, *bad, Text(summary(lines, missing))), refresh=True)
            if not missing and not any(line.state in LIVE for line in lines):
                return OK
            time.sleep(WATCH_SECONDS)
