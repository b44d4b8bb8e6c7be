"""`nexus-ablate doctor`: what of this machine is ready, and how to mend what is not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from nexus_ablate import errors
from nexus_ablate.errors import printable

HELP = """nexus-ablate doctor [RUNS_DIR] [--online] [--submit] [--json]

  nexus-ablate doctor                        Python, packages, device, disk, W&B, Hugging Face, launchers, SLURM
  nexus-ablate doctor /scratch/runs          another place for the runs
  nexus-ablate doctor /scratch/runs --submit a SLURM job of a second looks whether the nodes see it

--online connects to W&B's and Hugging Face's servers; without it nothing leaves this machine. Keys are never shown.
Exit status 2 where something is missing that every run needs, 0 otherwise."""

FLAGS = ("--online", "--submit", "--json")


def run(arguments: list[str]) -> int:
    """Print a line for each check."""
    if any(a in ("-h", "--help") for a in arguments):
        print(HELP)
        return errors.OK
    dirs = [argument for argument in arguments if not argument.startswith("-")]
    for argument in arguments:
        if argument.startswith("-") and argument not in FLAGS:
            raise errors.unknown("doctor has no flag of this name", argument, [*FLAGS, "--help"])
    if len(dirs) > 1 or any("=" in text for text in dirs):
        raise errors.ConfigError("doctor takes one directory", " ".join(dirs), "nexus-ablate doctor runs")

    from nexus_ablate.readiness import Check, checks

    found: list[Check] = []
    console = None
    if "--json" not in arguments:
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False, soft_wrap=True)
    for check in checks(Path(dirs[0] if dirs else "runs"), "--online" in arguments, "--submit" in arguments):
        found.append(check)
        if console is not None:
            word, colour = ("ready", "green") if check.ready else ("missing", "red" if check.need else "yellow")
            line = Text(f"{word:<8}", colour)
            line.append(f"{check.name:<24}", "bold").append(printable(check.found))
            if check.mend:
                line.append(f"  -> {printable(check.mend)}", "dim")
            console.print(line)
    broken = [check.name for check in found if check.need and not check.ready]
    if console is None:
        print(json.dumps({"ready": not broken, "checks": [asdict(check) for check in found]}, indent=2))
    elif broken:
        console.print(f"no run can be trained here before this is mended: {', '.join(broken)}", style="red")
    return errors.CONFIG if broken else errors.OK
