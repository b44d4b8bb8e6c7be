"""`nexus-ablate doctor`: checks whether this machine is ready, and how to fix what isn't."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import Flag, Verb
from nexus_ablate.errors import printable

VERB = Verb(
    "doctor",
    "what is ready on this machine, and how to fix what is not",
    "[RUNS_DIR]",
    (
        ("doctor", "Python, packages, device, disk, W&B, Hugging Face, launchers, SLURM"),
        ("doctor /scratch/runs", "another folder for the runs"),
        ("doctor /scratch/runs --submit", "a one-second SLURM job checks whether the nodes see it"),
    ),
    (
        Flag("--online", "", "connect to W&B's and Hugging Face's servers; otherwise nothing leaves this machine"),
        Flag("--submit", "", "submit a one-second SLURM job"),
        Flag("--json", "", "for programs"),
    ),
    "Keys are never shown. The exit status is 2 if something is missing that every run needs, otherwise 0.",
)


def run(words: list[str], flags: dict[str, Any]) -> int:
    """Print a line for each check."""
    if len(words) > 1 or any("=" in word for word in words):
        raise errors.ConfigError("doctor takes one directory", " ".join(words), "nexus-ablate doctor runs")

    from nexus_ablate.cli.doctor_checks import MachineCheck, checks

    results: list[MachineCheck] = []
    console = None
    if "json" not in flags:
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False, soft_wrap=True)
    for check in checks(Path(words[0] if words else "runs"), "online" in flags, "submit" in flags):
        results.append(check)
        if console is not None:
            word, colour = ("ready", "green") if check.ready else ("missing", "red" if check.need else "yellow")
            line = Text(f"{word:<8}", colour)
            line.append(f"{check.name:<24}", "bold").append(printable(check.detail))
            if check.fix:
                line.append(f"  -> {printable(check.fix)}", "dim")
            console.print(line)
    broken = [check.name for check in results if check.need and not check.ready]
    if console is None:
        print(json.dumps({"ready": not broken, "checks": [asdict(check) for check in results]}, indent=2))
    elif broken:
        console.print(f"fix this before training any run: {', '.join(broken)}", style="red")
    return errors.CONFIG if broken else errors.OK
