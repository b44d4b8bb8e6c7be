"""`nexus-ablate status [DIR|STUDY...]`: every run's state and why, once or repeatedly."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nexus_ablate.cli.verb import FULL, Flag, Flags, Verb, one_of
from nexus_ablate.errors import OK, ConfigError, printable

if TYPE_CHECKING:
    from nexus_ablate.execution.run_states import Line

SORTS: dict[str, Callable[[Line], Any]] = {
    "age": lambda line: math.inf if line.age_seconds is None else line.age_seconds,
    "loss": lambda line: math.inf if line.loss is None else line.loss,
    "arm": lambda line: (line.study, line.arm, line.seed or 0),
    "disk": lambda line: -line.bytes(),
}
VERB = Verb(
    "status",
    "the state of every run and why; without arguments, all runs",
    "[DIR|STUDY ...]",
    (
        ("status", "every run in runs/ with its id, loss and disk use, the newest first"),
        ("status norms", "a study: every run, also those that have not started"),
        ("status runs --watch", "all runs, refreshed until the last one has ended (or Ctrl-C)"),
        ("status runs/norms --sort loss", "the lowest loss first, with ids"),
        ("status --filter norm=layer --filter finished", "only runs with both texts in their line"),
    ),
    (
        Flag("--watch", "", "refresh the table until the last run has ended"),
        Flag("--filter", "TEXT", "runs whose experiment, arm, seed or state contains it", repeated=True),
        Flag("--sort", "|".join(SORTS), "by what (age, without arguments)", one_of("--sort", *SORTS)),
        FULL,
    ),
    "Prints state, step, validation loss, delta (its difference from the baseline's with the same seed at the same "
    "number of tokens), time since the last heartbeat, time left, and for failed runs the reason and the log. `lost`: "
    "the process ended without reporting why; the same command resumes such a run. `not needed so far`: seeds of later "
    "looks, which only undecided arms need. `replaced`: a run of a configuration or of code with which an amended or "
    "retrained study is no longer trained; it does not count. An id names its run in `show` and `sample`, which also "
    "take its first letters, the run's directory, or `last`.",
    kind="results",
)
WATCH_SECONDS = 1.0


def run(words: list[str], flags: Flags) -> int:
    """Print the state of every run."""
    from nexus_ablate.console import UNLIMITED, open_console, print_table, size_text
    from nexus_ablate.execution.run_states import COMING, Watcher
    from nexus_ablate.execution.state_table import summary, table, troubles
    from nexus_ablate.runs.lookup import DEFAULT, place_of

    if not words and not DEFAULT.is_dir():
        raise ConfigError("there are no runs here", f"no folder {DEFAULT}", "nexus-ablate train model=femto")
    dirs = [place_of(word) for word in words] or [DEFAULT]
    with_ids = not words or "filter" in flags or "sort" in flags
    console, watcher, full = open_console(), Watcher(), "full" in flags

    def lines() -> list[Line]:
        chosen = watcher.lines(dirs)
        for part in flags.get("filter", ()):
            chosen = [line for line in chosen if part in line.text]
        if with_ids:
            chosen.sort(key=SORTS[flags.get("sort", "age")])
        return chosen

    if "watch" not in flags:
        shown = lines()
        if shown:
            print_table(console, table(shown, UNLIMITED if full else console.width, full=full, ids=with_ids), full)
        for trouble in troubles(shown):
            console.print(printable(trouble, 1000), markup=False, soft_wrap=True)
        text = summary(shown) or "no runs here"
        if with_ids:
            text += f", {size_text(sum(line.bytes() for line in shown))}"
        console.print(text)
        return OK

    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, auto_refresh=False) as live:
        while True:
            shown = lines()
            bad = [Text(printable(trouble)) for trouble in troubles(shown)[-3:]]
            rows = max(4, console.size.height - 6 - 2 * len(bad))
            live.update(Group(table(shown, console.width, rows, full), *bad, Text(summary(shown))), refresh=True)
            if not any(line.state in COMING for line in shown):
                return OK
            time.sleep(WATCH_SECONDS)
