"""`nexus-ablate noise DIR...`: seed noise, the smallest detectable difference, and the seeds a difference needs."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import Flag, Verb, comma_separated, positive, whole


def _deltas(text: str) -> list[float]:
    return [positive("--delta", 0.005, 1e6)(item) for item in comma_separated(text)]


VERB = Verb(
    "noise",
    "seed noise, the detectable difference, the seeds it needs",
    "DIR...",
    (
        ("noise runs/norms", "seed noise of every arm, and what 3 to 20 seeds can show"),
        ("noise runs/norms --delta 0.005,0.01", "seeds that these differences need"),
        ("noise runs/norms --arms 8", "for eight arms against one baseline"),
    ),
    (
        Flag("--delta", "D,...", "differences in nats per token", _deltas),
        Flag("--arms", "K", "arms that are compared with the baseline (1)", whole("--arms", 8)),
        Flag("--json", "", "for programs"),
    ),
    needed="at least one directory",
    kind="results",
)


def run(dirs: list[str], flags: dict[str, Any]) -> int:
    """Print the noise over seeds, and what it allows to detect."""
    family = flags.get("arms", 1)

    from nexus_ablate.comparison.noise import noise

    result = noise(dirs, flags.get("delta", ()), family)
    if "json" in flags:
        from nexus_ablate.runs import strict_json

        sys.stdout.write(strict_json(dataclasses.asdict(result), indent=1) + "\n")
        return errors.OK

    from rich.markup import escape
    from rich.table import Table

    from nexus_ablate.console import open_console

    console = open_console()
    grid = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("arm", "seeds", "val loss", "SD over seeds", "95% interval", "of the loss"):
        grid.add_column(title, justify="left" if title == "arm" else "right", overflow="fold")
    for arm in result.arms:
        interval = f"{arm.sd_low:.4f} to {arm.sd_high:.4f}"
        cells = (f"{arm.seeds}", f"{arm.mean:.4f}", f"{arm.sd:.4f}", interval, f"{arm.sd / arm.mean:.2%}")
        grid.add_row(escape(errors.printable(arm.arm)), *cells)
    console.print(grid)
    how = "seed effects removed" if result.measured else "a single arm shows no effect of pairing, so none is assumed"
    against = "one arm" if family == 1 else f"{family} arms at once"
    console.print(f"\nresidual SD of a run in a paired comparison: {result.residual:.4f} nats per token ({how})")
    console.print(f"planned with its upper 80% bound, {result.residual_bound:.4f}: {against} against a baseline")
    console.print("smallest difference detected with 80% power:")
    for seeds, delta in result.detectable.items():
        console.print(f"  {seeds:>4} seeds  {delta:.4f}")
    for delta, seeds in result.needed.items():
        console.print(f"a difference of {delta:g} needs {seeds if seeds is not None else 'more than 1000'} seeds")
    if result.left_out:
        console.print(f"[dim]{result.left_out} runs without a result were left out; `compare` lists them[/dim]")
    return errors.OK
