"""`nexus-ablate coordcheck`: do activations and logits change alike at every width, so that learning rates transfer?"""

from __future__ import annotations

import sys
from typing import Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import Flag, Verb, comma_separated, target, whole

WIDTHS = [64, 128, 256, 512]
SMALL = {"model.context": "64", "train.batch_size": "4"}
"""Defaults of the check, since a few steps on few tokens decide."""


def _widths(text: str) -> list[int]:
    widths = [int(item) for item in comma_separated(text) if item.isdecimal() and len(item) < 7]
    if len(widths) < 3 or sorted(set(widths)) != widths or len(widths) != len(comma_separated(text)) or not widths[0]:
        raise errors.ConfigError("--widths takes at least three widths, rising", text, "--widths 64,128,256,512")
    return widths


VERB = Verb(
    "coordcheck",
    "do activations change alike at every width, so rates transfer",
    "[KEY=VALUE ...]",
    (
        ("coordcheck param=mup", "passes: exit status 0"),
        ("coordcheck param=sp --png sp.png", "fails: exit status 1"),
        ("coordcheck param=mup ffn=gelu --widths 128,256,512", ""),
    ),
    (
        Flag("--widths", "N,...", f"values of d_model ({','.join(map(str, WIDTHS))})", _widths),
        Flag("--steps", "N", "optimizer steps (10)", whole("--steps", 10, most=1000)),
        Flag("--seeds", "N", "seeds that are averaged (2)", whole("--seeds", 2, most=100)),
        Flag("--png", "FILE", "a picture", target("--png", picture=True)),
    ),
    "Trains each width for ten steps on one small batch of random tokens at optim.lr, without warm-up and clipping. "
    "Passes if the change of the logits and of every branch output has a slope of at most 0.35 against the width, both "
    "on logarithmic scales. Heads keep their width. Reads no data and saves no run. Exit status 1: it fails.",
    kind="runs",
)


def run(overrides: list[str], flags: dict[str, Any]) -> int:
    """Check, print the slopes, and return 0 if they are flat."""
    from nexus_ablate.bench.coordinates import FLAT, check_coordinates, configurations, draw

    requested = {text.partition("=")[0] for text in overrides}
    overrides = [*(f"{key}={value}" for key, value in SMALL.items() if key not in requested), *overrides]
    widths, steps = flags.get("widths", WIDTHS), flags.get("steps", 10)
    configs = configurations(overrides, widths)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    checked = check_coordinates(configs, steps, flags.get("seeds", 2), say)
    print(f"RMS change since the start after {steps} steps, and its slope against d_model")
    print("".join([f"{'':16}", *(f"{width:>10}" for width in widths), f"{'slope':>8}"]))
    for name, slope in checked.slopes.items():
        values = "".join(f"{value:>10.3g}" for value in checked.changes[name][:, -1])
        print(f"{name:16}{values}{slope:>+8.2f}{'  not flat' if abs(slope) > FLAT else ''}")
    word = "passes" if checked.passes else "fails"
    name = f"param={configs[0].param.name}"
    print(f"{name} {word}: a slope may be at most {FLAT:g} in size")
    if "png" in flags:
        draw(checked, f"{name} {word} the coordinate check (slopes at most {FLAT:g})", flags["png"])
        print(f"saved to {errors.printable(str(flags['png']), 4096)}", file=sys.stderr)
    return errors.OK if checked.passes else errors.BUG
