"""`nexus-ablate bench AXIS|step|coordinates`: what options or a step cost here, and whether learning rates transfer."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate.cli.verb import FORCE, Flag, Verb, comma_separated, positive, put, target, whole
from nexus_ablate.config.compose import compose
from nexus_ablate.config.options import AXES, option_files
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import BUG, OK, ConfigError, unknown

if TYPE_CHECKING:
    from nexus_ablate.bench.axis_cost import Bench, OptionCost
    from nexus_ablate.bench.step_cost import StepCost

BENCHED = tuple(axis for axis in AXES if axis not in ("init", "param", "head"))
SUBJECTS = (*BENCHED, "step", "coordinates")
FLAGS_OF = {
    "an axis": ("seconds", "only", "against", "compile", "json", "force"),
    "step": ("seconds", "against", "json", "force"),
    "coordinates": ("widths", "steps", "seeds", "picture", "force"),
}
WIDTHS = [64, 128, 256, 512]
SMALL = {"model.context": "64", "train.batch_size": "4"}
"""Defaults of `coordinates`, where a few steps on few tokens decide."""


def _widths(text: str) -> list[int]:
    widths = [int(item) for item in comma_separated(text) if item.isdecimal() and len(item) < 7]
    rising = sorted(set(widths)) == widths
    if len(widths) < 3 or not rising or len(widths) != len(comma_separated(text)) or not widths[0]:
        raise ConfigError("--widths takes at least three widths, rising", text, "--widths 64,128,256,512")
    return widths


VERB = Verb(
    "bench",
    "the cost of an axis's options or of a step; do rates transfer",
    "AXIS|step|coordinates [KEY=VALUE ...]",
    (
        ("bench norm", "every norm: forward and backward, alone and in its block"),
        ("bench norm --only layer,rms --against layer --compile", ""),
        ("bench ffn model=base train.batch_size=4 --json ffn.json", ""),
        ("bench step norm=layer", "the training step: its time, and where the time goes"),
        ("bench step norm=none --against norm=rms,norm=layer", "steps in turn, and their ratios"),
        ("bench coordinates param=mup", "do activations change alike at every width"),
    ),
    (
        Flag("--seconds", "S", "approximate measuring time (10)", positive("--seconds", 10, 3600)),
        Flag("--only", "A,B", "for an axis: these options and the baseline", comma_separated),
        Flag("--against", "A", "for an axis: the baseline of the ratios; for step: K=V,K=V to compare it with"),
        Flag("--compile", "", "for an axis: measure torch.compile too"),
        Flag("--json", "FILE", "all measurements (- for the terminal)", target("--json")),
        FORCE,
        Flag("--widths", "N,...", f"for coordinates: d_model ({','.join(map(str, WIDTHS))})", _widths),
        Flag("--steps", "N", "for coordinates: optimizer steps (10)", whole("--steps", 10, most=1000)),
        Flag("--seeds", "N", "for coordinates: seeds that are averaged (2)", whole("--seeds", 2, most=100)),
        Flag("--picture", "FILE", "for coordinates: a chart (.png, .pdf or .svg)", target("--picture", picture=True)),
    ),
    "Candidates take turns block by block. A ratio is the median over neighbouring blocks, with quartiles.\n"
    "`coordinates` trains each width on one small batch of random tokens at optim.lr, without warm-up and clipping. It "
    "passes if the change of the logits and of every branch output has a slope of at most 0.35 against the width, both "
    "on logarithmic scales. Heads keep their width. Exit status 1: it fails.",
    "an axis, step or coordinates",
)


def run(words: list[str], flags: dict[str, Any]) -> int:
    """Measure what the arguments ask for."""
    subject, *overrides = words
    if subject not in SUBJECTS:
        raise unknown("bench measures an axis, step or coordinates", subject, SUBJECTS, "nexus-ablate bench {}")
    kind = "an axis" if subject in BENCHED else subject
    for flag in flags:
        if flag not in FLAGS_OF[kind]:
            fix = f"nexus-ablate bench {subject}; its flags are --{', --'.join(FLAGS_OF[kind])}"
            raise ConfigError(f"bench {subject} has no --{flag}", f"bench {subject} --{flag}", fix)
    if subject == "coordinates":
        return _coordinates(overrides, flags)
    seconds = flags.get("seconds", 10.0)
    config = compose(overrides)
    if subject == "step":
        others = comma_separated(flags.get("against", ""))
        for other in others:
            compose([*overrides, other])
        _prepare_process()
        from nexus_ablate.bench.step_cost import bench_steps

        costs = bench_steps(overrides, others, seconds)
        _save_or_show(flags, {"steps": [asdict(cost) for cost in costs]}, lambda: _print_steps(costs))
        return OK
    configs, baseline = _options(subject, overrides, flags, config)
    _prepare_process()
    from nexus_ablate.bench.axis_cost import bench_axis

    bench = bench_axis(subject, configs, baseline, seconds, "compile" in flags)
    _save_or_show(flags, asdict(bench), lambda: _print_axis(bench))
    return OK


def _options(
    axis: str, overrides: list[str], flags: dict[str, Any], config: RunConfig
) -> tuple[dict[str, RunConfig], str]:
    """Two-block configurations by option, the baseline first. Prints which options contradict the overrides.

    Raises:
        ConfigError: A requested option doesn't exist, or contradicts the overrides.
    """
    names = list(option_files(axis))
    baseline = flags.get("against") or getattr(config, axis).name
    requested = [baseline, *(flags.get("only") or names)]
    configs = {}
    for name in dict.fromkeys(requested):
        if name not in names:
            raise unknown(f"{axis} has no option of this name", name, names)
        try:
            configs[name] = compose([*overrides, f"{axis}={name}", "model.n_layers=2"])
        except ConfigError as error:
            if name == baseline or "only" in flags:
                raise
            print(f"{axis}={name} is left out: {error.problem}", file=sys.stderr)
    return configs, baseline


def _prepare_process() -> None:
    """Make settings that are needed before torch is imported, and keep freed memory."""
    from nexus_ablate.training.device import share_cores_politely
    from nexus_ablate.training.memory import keep_freed_memory

    share_cores_politely()
    keep_freed_memory()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's messages


def _save_or_show(flags: dict[str, Any], data: Any, show: Callable[[], None]) -> None:
    """Print the tables, or with `--json -` the data; `--json FILE` saves the data too."""
    from nexus_ablate.runs import strict_json

    file = flags.get("json")
    if file != Path("-"):
        show()
    if file is not None:
        put(file, strict_json(data, indent=1) + "\n")


def _print_table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from nexus_ablate.console import grid, open_console

    console = open_console()
    console.print(grid(titles, rows, console.width))


def _print_axis(bench: Bench) -> None:
    print(bench.conditions)
    from nexus_ablate.bench.axis_cost import LAYERS

    layer = LAYERS.get(bench.axis, "attention, with its four projections")
    titles = "option", "forward ms", "backward", "both", f"times {bench.baseline}", "MB kept"
    tables: dict[str, list[tuple[str, ...]]] = {}
    for cost in bench.costs:
        subject = layer if cost.place == "alone" else "the block"
        tables.setdefault(f"{subject}, {cost.mode}", []).append(_cells(bench, cost))
    for title, rows in tables.items():
        print(f"\n{title}")
        _print_table((*titles, "of the block's time") if len(rows[0]) > len(titles) else titles, rows)


def _cells(bench: Bench, cost: OptionCost) -> tuple[str, ...]:
    milliseconds = [f"{1000 * taken.median:.3f}" for taken in (cost.forward, cost.backward, cost.both)]
    ratio = f"{cost.ratio.median:.2f} ({cost.ratio.low:.2f}-{cost.ratio.high:.2f})"
    cells = (cost.option, *milliseconds, ratio, f"{cost.kept_bytes / 1e6:.1f}")
    share = bench.share_of_block(cost)
    return cells if share is None else (*cells, f"{share:.1%}")


def _print_steps(costs: list[StepCost]) -> None:
    rows = []
    for cost in costs:
        milliseconds = f"{1000 * cost.seconds.median:.2f}"
        ratio = f"{cost.ratio.median:.3f} ({cost.ratio.low:.3f}-{cost.ratio.high:.3f})"
        speed = f"{cost.tokens_per_second:,.0f}"
        rows.append((cost.name or "as given", milliseconds, ratio, speed, f"{cost.rate_share:.0%}"))
    _print_table(("", "step ms", "times as given", "tokens/s", "of the rate of products"), rows)
    if costs[0].peak_memory_bytes is not None:
        print(f"the process took {costs[0].peak_memory_bytes / 2**20:,.0f} MiB at most")
    print("\nwhere the time goes, as given; steps include logging and probes")
    first = costs[0]
    parts = [(name, f"{1000 * s:.2f}", f"{s / first.seconds.median:.1%}") for name, s in first.parts.items()]
    _print_table(("part", "ms", "share"), parts)


def _coordinates(overrides: list[str], flags: dict[str, Any]) -> int:
    """Check, print the slopes, and return 0 if they are flat."""
    from nexus_ablate.bench.coordinates import FLAT, check_coordinates, configurations, draw

    requested = {text.partition("=")[0] for text in overrides}
    overrides = [*(f"{key}={value}" for key, value in SMALL.items() if key not in requested), *overrides]
    steps = flags.get("steps", 10)
    configs = configurations(overrides, flags.get("widths", WIDTHS))
    checked = check_coordinates(configs, steps, flags.get("seeds", 2))
    print(f"RMS change since the start after {steps} steps, and its slope against d_model")
    rows = []
    for name, slope in checked.slopes.items():
        changes = [f"{change:.3g}" for change in checked.changes[name][:, -1]]
        note = "not flat" if abs(slope) > FLAT else "not finite, or 0" if math.isnan(slope) else ""
        rows.append((name, *changes, f"{slope:+.2f}", note))
    _print_table(("", *map(str, checked.widths), "slope", " "), rows)
    word = "passes" if checked.passes else "fails"
    name = f"param={configs[0].param.name}"
    print(f"{name} {word}: a slope may be at most {FLAT:g} in size")
    if "picture" in flags:
        slopes = sorted(slope for slope in checked.slopes.values() if not math.isnan(slope))
        if not slopes:
            raise ConfigError(
                "nothing can be drawn, no change is finite and above 0",
                f"optim.lr={configs[0].schedule.lr:g}",
                "a lower optim.lr",
            )
        title = f"{name} {word} the coordinate check: slopes {slopes[0]:+.2f} to {slopes[-1]:+.2f}"
        draw(checked, title, flags["picture"])
    return OK if checked.passes else BUG
