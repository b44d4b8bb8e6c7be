"""`nexus-ablate noise DIR...`: seed noise, the difference it allows to be seen, the seeds a difference needs."""

from __future__ import annotations

import dataclasses
import sys

from nexus_ablate import errors

HELP = """nexus-ablate noise DIR... [--delta D,...] [--arms K] [--json]

  nexus-ablate noise runs/norms                     seed noise of every arm, and what 3 to 20 seeds can show
  nexus-ablate noise runs/norms --delta 0.005,0.01  seeds that these differences need (nats per token)
  nexus-ablate noise runs/norms --arms 8            for eight arms against one baseline at once"""


def run(arguments: list[str]) -> int:
    """Print what the seeds tell."""
    from nexus_ablate.cli.compare import split

    if not arguments or any(a in ("-h", "--help") for a in arguments):
        print(HELP)
        return errors.OK if arguments else errors.CONFIG
    dirs, options = split(arguments, ("--delta", "--arms"), ("--json",))
    if not dirs:
        raise errors.ConfigError("noise needs at least one directory", fix="nexus-ablate noise runs/STUDY")
    deltas = [_number("--delta", text) for text in options.get("--delta", "").split(",") if text]
    family = int(_number("--arms", options.get("--arms", "1")))

    from nexus_ablate.comparison.noise import noise

    found = noise(dirs, deltas, family)
    if "--json" in options:
        from nexus_ablate.runs import strict_json

        sys.stdout.write(strict_json(dataclasses.asdict(found), indent=1) + "\n")
        return errors.OK

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    grid = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("arm", "seeds", "val loss", "SD over seeds", "95% interval", "of the loss"):
        grid.add_column(title, justify="left" if title == "arm" else "right", overflow="fold")
    for arm in found.arms:
        interval = f"{arm.sd_low:.4f} to {arm.sd_high:.4f}"
        cells = (f"{arm.seeds}", f"{arm.mean:.4f}", f"{arm.sd:.4f}", interval, f"{arm.sd / arm.mean:.2%}")
        grid.add_row(escape(errors.printable(arm.arm)), *cells)
    console.print(grid)
    how = "seed effects removed" if found.measured else "one arm alone: nothing is known of pairing, none is assumed"
    against = "one arm" if family == 1 else f"{family} arms at once"
    console.print(f"\nresidual SD of a run in a paired comparison: {found.residual:.4f} nats per token ({how})")
    console.print(f"planned with its upper 80% bound, {found.residual_bound:.4f}: {against} against a baseline")
    console.print("difference that is shown with 80% power:")
    for seeds, delta in found.detectable.items():
        console.print(f"  {seeds:>4} seeds  {delta:.4f}")
    for delta, seeds in found.needed.items():
        console.print(f"a difference of {delta:g} needs {seeds if seeds is not None else 'more than 1000'} seeds")
    if found.left_out:
        console.print(f"[dim]{found.left_out} runs without a result were left out; `compare` lists them[/dim]")
    return errors.OK


def _number(flag: str, text: str) -> float:
    """A number above 0.

    Raises:
        ConfigError: It is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6 or (flag == "--arms" and value != int(value)):
        raise errors.ConfigError(
            f"{flag} takes a number above 0", text, f"{flag} {'8' if flag == '--arms' else '0.005'}"
        )
    return value
