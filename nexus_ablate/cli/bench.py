"""`nexus-ablate bench AXIS|step|coordinates`: what options or a step cost here, and whether learning rates transfer."""

from __future__ import annotations

import math
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate.cli.verb import FORCE, Flag, Flags, Verb, comma_separated, positive, put, target, whole
from nexus_ablate.config.compose import compose
from nexus_ablate.config.options import AXES, option_files
from nexus_ablate.errors import BUG, OK, ConfigError, unknown
from nexus_ablate.study.arm_overrides import key_of

if TYPE_CHECKING:
    from nexus_ablate.bench.axis_cost import Bench
    from nexus_ablate.bench.step_cost import StepCost

BENCHED = tuple(axis for axis in AXES if axis not in ("init", "param", "head"))
SUBJECTS = (*BENCHED, "step", "coordinates")
FLAGS_OF = {
    "an axis": ("seconds", "only", "against", "compile", "json", "force"),
    "step": ("seconds", "against", "json", "force"),
    "coordinates": ("widths", "steps", "seeds", "picture", "force"),
}
WIDTHS = [64, 128, 256, 512]
SMALL = ("model.context=64", "train.batch_size=4")
"""Defaults of `coordinates`, where a few steps on few tokens decide."""
UNREAD = ("data", "evals", "experiment", "probe", "runs_dir", "seed", "tracker", "train", "z_loss")
"""Keys and groups that `coordinates` does not read, but for the batch size."""


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


def run(words: list[str], flags: Flags) -> int:
    """Measure what the arguments ask for."""
    subject, *overrides = words
    if subject not in SUBJECTS:
        raise unknown("bench measures an axis, step or coordinates", subject, SUBJECTS, "nexus-ablate bench {}")
    allowed = FLAGS_OF[subject if subject in FLAGS_OF else "an axis"]
    for flag in flags:
        if flag not in allowed:
            fix = f"nexus-ablate bench {subject}; its flags are --{', --'.join(allowed)}"
            raise ConfigError(f"bench {subject} has no --{flag}", f"bench {subject} --{flag}", fix)
    if subject == "coordinates":
        return _coordinates(overrides, flags)
    config = compose(overrides)
    is_printed = flags.get("json") != Path("-")
    if subject == "step":
        costs = _steps(overrides, flags)
        data: Any = {"steps": [asdict(cost) for cost in costs]}
        if is_printed:
            _print_steps(costs)
    else:
        bench = _options(subject, getattr(config, subject).name, overrides, flags)
        data = asdict(bench)
        if is_printed:
            _print_options(bench)
    if "json" in flags:
        from nexus_ablate.runs import strict_json

        put(flags["json"], strict_json(data, indent=1) + "\n")
    return OK


def _options(axis: str, chosen: str, overrides: list[str], flags: Flags) -> Bench:
    """Measure the options of an axis in models of two blocks. Prints which options contradict the overrides.

    Args:
        chosen: The option in the overrides, to which the others are compared unless `--against` names one.

    Raises:
        ConfigError: A requested option doesn't exist, or contradicts the overrides.
    """
    names = list(option_files(axis))
    baseline = flags.get("against") or chosen
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
    _prepare_process()
    from nexus_ablate.bench.axis_cost import bench_axis

    return bench_axis(axis, configs, baseline, flags.get("seconds", 10.0), "compile" in flags)


def _print_options(bench: Bench) -> None:
    from nexus_ablate.bench.axis_cost import LAYERS

    print(bench.conditions)
    heads = ("option", "forward ms", "backward", "both", f"times {bench.baseline}", "MB kept", "of the block's time")
    layer = LAYERS.get(bench.axis, "attention, with its four projections")
    blocks = {(cost.option, cost.mode): cost.both.median for cost in bench.costs if cost.place == "block"}
    tables: dict[str, list[tuple[str, ...]]] = {}
    for cost in bench.costs:
        milliseconds = [f"{1000 * taken.median:.3f}" for taken in (cost.forward, cost.backward, cost.both)]
        cells = (cost.option, *milliseconds, cost.ratio.text(2), f"{cost.kept_bytes / 1e6:.1f}")
        title = f"the block, {cost.mode}"
        if cost.place == "alone":
            title = f"{layer}, {cost.mode}"
            share = bench.sites[cost.option] * cost.both.median / blocks[cost.option, cost.mode]
            cells = (*cells, f"{share:.1%}")
        tables.setdefault(title, []).append(cells)
    for title, rows in tables.items():
        print(f"\n{title}")
        _print_table(heads[: len(rows[0])], rows)


def _steps(overrides: list[str], flags: Flags) -> list[StepCost]:
    """Time the training step, beside those with one override of `--against` each."""
    others = comma_separated(flags.get("against", ""))
    for other in others:
        compose([*overrides, other])
    _prepare_process()
    from nexus_ablate.bench.step_cost import bench_steps

    return bench_steps(overrides, others, flags.get("seconds", 10.0))


def _print_steps(costs: list[StepCost]) -> None:
    rows = []
    for cost in costs:
        milliseconds = f"{1000 * cost.seconds.median:.2f}"
        speed = f"{cost.tokens_per_second:,.0f}"
        rows.append((cost.name or "as given", milliseconds, cost.ratio.text(3), speed, f"{cost.rate_share:.0%}"))
    _print_table(("", "step ms", "times as given", "tokens/s", "of the rate of products"), rows)
    first = costs[0]
    if first.peak_memory_bytes is not None:
        print(f"the process took {first.peak_memory_bytes / 2**20:,.0f} MiB at most")
    print("\nwhere the time goes, as given; steps include logging and probes")
    parts = [(name, f"{1000 * s:.2f}", f"{s / first.seconds.median:.1%}") for name, s in first.parts.items()]
    _print_table(("part", "ms", "share"), parts)


def _prepare_process() -> None:
    """Make settings that are needed before torch is imported, and keep freed memory."""
    from nexus_ablate.training.device import share_cores_politely
    from nexus_ablate.training.memory import keep_freed_memory

    share_cores_politely()
    keep_freed_memory()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's messages


def _print_table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from nexus_ablate.console import grid, open_console

    console = open_console()
    console.print(grid(heads, rows, console.width))


def _coordinates(overrides: list[str], flags: Flags) -> int:
    """Check, print the slopes, and return 0 if they are flat."""
    from nexus_ablate.bench.coordinates import FLAT, check_coordinates, configurations, draw

    for text in overrides:
        if key_of(text).partition(".")[0] in UNREAD and key_of(text) != "train.batch_size":
            rest = [word for word in overrides if word != text]
            problem = "coordinates trains on random tokens, in float32 on the CPU, and does not read this key"
            raise ConfigError(problem, text, shlex.join(["nexus-ablate", "bench", "coordinates", *rest]))
    steps = flags.get("steps", 10)
    configs = configurations([*SMALL, *overrides], flags.get("widths", WIDTHS))
    checked = check_coordinates(configs, steps, flags.get("seeds", 2))
    print(f"RMS change since the start after {steps} steps, and its slope against d_model")
    rows = []
    for name, slope in checked.slopes.items():
        changes = [f"{change:.3g}" for change in checked.changes[name]]
        note = "not finite, or 0" if math.isnan(slope) else ""
        if abs(slope) > FLAT:
            note = "not flat"
        rows.append((name, *changes, f"{slope:+.2f}", note))
    _print_table(("", *map(str, checked.widths), "slope", " "), rows)
    verdict = f"param={configs[0].param.name} {'passes' if checked.passes else 'fails'}"
    print(f"{verdict}: a slope may be at most {FLAT:g} in size")
    if "picture" in flags:
        slopes = [slope for slope in checked.slopes.values() if not math.isnan(slope)]
        if not slopes:
            problem = "nothing can be drawn, no change is finite and above 0"
            raise ConfigError(problem, f"optim.lr={configs[0].schedule.lr:g}", "a lower optim.lr")
        title = f"{verdict} the coordinate check: slopes {min(slopes):+.2f} to {max(slopes):+.2f}"
        draw(checked, title, flags["picture"])
    return OK if checked.passes else BUG
