"""`nexus-ablate bench AXIS`: what the options of an axis cost on this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from nexus_ablate.cli.flags import FORCE, JSON_FILE, Flags, comma_separated, put
from nexus_ablate.cli.verb import Verb
from nexus_ablate.config.compose import compose
from nexus_ablate.config.options import AXES, option_files
from nexus_ablate.errors import OK, ConfigError, unknown

if TYPE_CHECKING:
    from nexus_ablate.bench.axis_cost import Bench

BENCHED = tuple(axis for axis in AXES if axis not in ("init", "param", "head"))
SECONDS = 10.0
"""Of measuring, approximately."""
VERB = Verb(
    "bench",
    "the cost of an axis's options, alone and in a block",
    "AXIS[=A,B] [KEY=VALUE ...]",
    (
        ("bench norm", "every norm: forward and backward, alone and in its block"),
        ("bench norm=layer,rms train.compile=on", "these, against the first one; compiled too"),
        ("bench ffn model=base train.batch_size=4 --json ffn.json", ""),
    ),
    (JSON_FILE, FORCE),
    "Options take turns block by block. A ratio is the median over neighbouring blocks, with quartiles.",
    "an axis",
)


def run(words: list[str], flags: Flags) -> int:
    """Measure the options of the axis."""
    subject, *overrides = words
    axis, _, listed = subject.partition("=")
    if axis not in BENCHED:
        raise unknown("bench measures the options of an axis", axis, BENCHED, "nexus-ablate bench {}")
    bench = _measure(axis, comma_separated(listed), overrides)
    if flags.get("json") != Path("-"):
        _print_costs(bench)
    if "json" in flags:
        from nexus_ablate.runs import strict_json

        put(flags["json"], strict_json(asdict(bench), indent=1) + "\n")
    return OK


def _measure(axis: str, requested: list[str], overrides: list[str]) -> Bench:
    """Measure the options of an axis in models of two blocks. Prints which options contradict the overrides.

    Args:
        requested: The options, compared with the first one. Without any: all, compared with the overrides' option.

    Raises:
        ConfigError: A requested option doesn't exist, or contradicts the overrides.
    """
    config = compose(overrides)
    if config.train.compile == "graphs":
        raise ConfigError("bench measures no CUDA graphs", "train.compile=graphs", "train.compile=on")
    baseline = requested[0] if requested else getattr(config, axis).name
    names = list(option_files(axis))
    configs = {}
    for name in dict.fromkeys([baseline, *(requested or names)]):
        if name not in names:
            raise unknown(f"{axis} has no option of this name", name, names, f"nexus-ablate bench {axis}={{}}")
        try:
            configs[name] = compose([*overrides, f"{axis}={name}", "model.n_layers=2"])
        except ConfigError as error:
            if name == baseline or requested:
                raise
            print(f"{axis}={name} is left out: {error.problem}", file=sys.stderr)
    _prepare_process()
    from nexus_ablate.bench.axis_cost import bench_axis

    return bench_axis(axis, configs, baseline, SECONDS, compiled=config.train.compile == "on")


def _print_costs(bench: Bench) -> None:
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
