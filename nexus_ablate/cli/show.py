"""`nexus-ablate show RUN`: one run in the terminal and as a picture."""

from __future__ import annotations

from typing import Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import Flag, Verb, target

VERB = Verb(
    "show",
    "one run: its result and a picture",
    "RUN",
    (
        ("show last", "the run that changed last; saves picture.png in its directory"),
        ("show 1a2b3c4d", "a run by its id (nexus-ablate runs), or by its directory"),
        ("show runs/scratch/baseline/s0-1a2b3c4d --out loss.pdf", ""),
    ),
    (Flag("--out", "FILE", "where to save the picture (.png, .pdf or .svg)", target("--out", picture=True)),),
    needed="one run",
    kind="results",
)


def run(words: list[str], flags: dict[str, Any]) -> int:
    """Print a run's state and result and draw its picture."""
    if len(words) != 1:
        raise errors.ConfigError("show takes one run", " ".join(words), f"nexus-ablate show {words[0]}")

    from rich.markup import escape

    from nexus_ablate.api import load_run
    from nexus_ablate.cli.evaluate import results
    from nexus_ablate.console import grid, open_console
    from nexus_ablate.execution.status import nearer
    from nexus_ablate.report.run_picture import draw, run_lines
    from nexus_ablate.runs.lookup import run_at
    from nexus_ablate.training.display import result_facts, table

    record = load_run(run_at(words[0], "show"))
    facts = {"run": f"{record.study} / {record.arm} / seed {record.seed}", "state": record.state}
    if record.status.get("reason"):
        facts["reason"] = record.status["reason"]
    if record.summary is not None:
        facts |= result_facts(record.summary)
        facts |= results(record.summary)
    console = open_console()
    console.print(table(facts))
    console.print()
    lines = run_lines(record)
    console.print(grid(("curve", "first, by step, last"), lines, console.width, ("curve", "first, by step, last")))
    console.print()
    picture = draw(record, flags.get("out") or record.path / "picture.png")
    console.print("[dim]picture[/dim]", escape(errors.printable(nearer(picture), 4096)), soft_wrap=True)
    return errors.OK
