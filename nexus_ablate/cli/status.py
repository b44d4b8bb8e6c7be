"""`nexus-ablate status DIR...`: one line per run, once or repeatedly."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import FULL, Flag, Verb
from nexus_ablate.errors import printable

VERB = Verb(
    "status",
    "every run of some directories: progress, loss, failures",
    "DIR...",
    (
        ("status runs/norms", "a study: every run, also those that have not started"),
        ("status runs --watch", "all runs, refreshed until the last one has ended (or Ctrl-C)"),
    ),
    (Flag("--watch", "", "refresh the table until the last run has ended"), FULL),
    "Prints state, step, validation loss, delta (its difference from the baseline's with the same seed at the same "
    "number of tokens), time since the last heartbeat, time left, and for failed runs the reason and the log. `lost`: "
    "the process ended without reporting why; the same command resumes such a run. `not needed so far`: seeds of later "
    "looks, which only undecided arms need.",
    "at least one directory",
    kind="results",
)

WATCH_SECONDS = 1.0


def run(words: list[str], flags: dict[str, Any]) -> int:
    """Print the state of every run."""
    dirs = [Path(word) for word in words]

    from nexus_ablate.console import UNLIMITED, open_console, print_table
    from nexus_ablate.execution.status import COMING, Watcher, summary, table, troubles

    console, watcher, full = open_console(), Watcher(), "full" in flags
    lines = watcher.lines(dirs)
    if "watch" not in flags:
        if lines:
            print_table(console, table(lines, UNLIMITED if full else console.width, full=full), full)
        for trouble in troubles(lines):
            console.print(printable(trouble, 1000), markup=False, soft_wrap=True)
        console.print(summary(lines) or "no runs here")
        return errors.OK

    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, auto_refresh=False) as live:
        while True:
            shown = [Text(printable(trouble)) for trouble in troubles(lines)[-3:]]
            rows = max(4, console.size.height - 6 - 2 * len(shown))
            live.update(Group(table(lines, console.width, rows, full), *shown, Text(summary(lines))), refresh=True)
            if not any(line.state in COMING for line in lines):
                return errors.OK
            time.sleep(WATCH_SECONDS)
            lines = watcher.lines(dirs)
