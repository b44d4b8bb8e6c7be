"""`nexus-ablate show RUN`: one run in the terminal and as a picture."""

from __future__ import annotations

from pathlib import Path

from nexus_ablate import errors
from nexus_ablate.config import EVALUATIONS

HELP = """nexus-ablate show RUN [--out FILE]

  nexus-ablate show runs/scratch/baseline/s0-1a2b3c4d               draws picture.png into the run
  nexus-ablate show runs/scratch/baseline/s0-1a2b3c4d --out loss.pdf"""

READ_BY = "show it with the version in its env.json; compare does without what is missing"


def run(arguments: list[str]) -> int:
    """Print a run's state and result and draw its picture."""
    if not arguments or any(a in ("-h", "--help") for a in arguments):
        print(HELP)
        return errors.OK if arguments else errors.CONFIG
    out = None
    if "--out" in arguments:
        at = arguments.index("--out")
        if at + 1 == len(arguments):
            raise errors.ConfigError("--out needs a file", fix="--out loss.png")
        out = Path(arguments[at + 1])
        del arguments[at : at + 2]
    if len(arguments) != 1:
        raise errors.ConfigError("show takes one run", " ".join(arguments), "nexus-ablate show RUN [--out FILE]")

    from rich.console import Console
    from rich.markup import escape

    from nexus_ablate.api import load_run
    from nexus_ablate.cli.evaluate import lines
    from nexus_ablate.report.run_picture import draw
    from nexus_ablate.training.display import result_facts, table

    record = load_run(arguments[0])
    facts = {"run": f"{record.study} / {record.arm} / seed {record.seed}", "state": record.state}
    if record.status.get("reason"):
        facts["reason"] = record.status["reason"]
    if record.summary is not None:
        try:
            facts |= result_facts(record.summary)
            for name in EVALUATIONS:
                facts |= dict(lines(name, record.summary[name])) if name in record.summary else {}
        except KeyError as missing:
            raise errors.UserError(
                f"{record.path / 'summary.json'} is of another version", f"no {missing}", READ_BY
            ) from None
    console = Console(highlight=False)
    console.print(table(facts))
    picture = draw(record, out or record.path / "picture.png")
    console.print("[dim]picture[/dim]", escape(errors.printable(str(picture), 4096)), soft_wrap=True)
    return errors.OK
