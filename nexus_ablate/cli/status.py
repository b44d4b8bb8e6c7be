"""`nexus-ablate status DIR...`: a line for each run, once or again and again."""

from __future__ import annotations

import time
from pathlib import Path

from nexus_ablate import errors
from nexus_ablate.errors import ConfigError, printable

HELP = """nexus-ablate status DIR... [--watch]

  nexus-ablate status runs/norms           a study: every run, also those that are still to come
  nexus-ablate status runs --watch         all of them, refreshed until the last has ended (or Ctrl-C)

State, step, validation loss, its difference to the baseline of the same seed at the same tokens, time since the last
sign of life, time left, and of what went wrong the reason and the log. `lost`: the process is gone without a word; the
same command goes on with such a run."""

WATCH_SECONDS = 1.0
COMING = ("created", "running", "queued", "waiting", "unknown")


def run(arguments: list[str]) -> int:
    """Print the state of every run."""
    if not arguments or any(a in ("-h", "--help") for a in arguments):
        print(HELP)
        return errors.OK if arguments else errors.CONFIG
    for argument in arguments:
        if argument.startswith("-") and argument != "--watch":
            raise errors.unknown("status has no flag of this name", argument, ["--watch", "--help"])
    dirs = [Path(argument) for argument in arguments if argument != "--watch"]
    if not dirs:
        raise ConfigError("status needs a directory", "", "nexus-ablate status runs")

    from rich.console import Console

    from nexus_ablate.study.status import Watcher, summary, table, troubles

    console, watcher = Console(highlight=False), Watcher()
    lines = watcher.lines(dirs)
    if "--watch" not in arguments:
        if lines:
            console.print(table(lines))
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
            live.update(Group(table(lines, limit=rows), *shown, Text(summary(lines))), refresh=True)
            if not any(line.state in COMING for line in lines):
                return errors.OK
            time.sleep(WATCH_SECONDS)
            lines = watcher.lines(dirs)
