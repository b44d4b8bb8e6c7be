"""`nexus-ablate bench AXIS|step|sweep ...`: the cost of options, a step or a sweep on this machine."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import Flag, Verb, comma_separated, positive, target
from nexus_ablate.config.compose import compose
from nexus_ablate.config.options import AXES, option_files
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import ConfigError, printable
from nexus_ablate.runs.files import atomic_write_text

if TYPE_CHECKING:
    from nexus_ablate.bench.options import Bench

BENCHED = tuple(axis for axis in AXES if axis not in ("init", "param", "head"))
SUBJECTS = (*BENCHED, "step", "sweep")
TABLE_WIDTH = 124  # characters; a narrower terminal wraps


VERB = Verb(
    "bench",
    "the cost of an axis's options, a step or a sweep on this machine",
    "AXIS|step|sweep [KEY=VALUE ...]",
    (
        ("bench norm", "every norm: forward, backward, alone and in its block"),
        ("bench norm --only layer,rms --against layer --compile", ""),
        ("bench ffn model=base train.batch_size=4 --picture ffn.png", ""),
        ("bench step norm=layer", "the training step: its time, and where the time goes"),
        ("bench step norm=none --against norm=rms,norm=layer", "steps in turn, and their ratios"),
        ("bench sweep --workers 1,2,4", "runs per hour with 1, 2 or 4 at a time"),
    ),
    (
        Flag("--seconds", "S", "approximate measuring time (10)", positive("--seconds", 10, 3600)),
        Flag("--only", "A,B", "for an axis: these options and the baseline", comma_separated),
        Flag("--against", "A", "for an axis: the baseline of the ratios; for step: K=V,K=V to compare it with"),
        Flag("--compile", "", "for an axis: measure torch.compile too"),
        Flag("--picture", "FILE", "for an axis: a bar chart (.png, .pdf or .svg)", target("--picture", picture=True)),
        Flag("--json", "FILE", "all measurements (- for the terminal)", target("--json")),
        Flag("--workers", "N,M", "for sweep: numbers of workers (1 to the number of cores)", comma_separated),
    ),
    "Candidates take turns block by block. A ratio is the median over neighbouring blocks, with quartiles in brackets.",
    "an axis, step or sweep",
)


def run(words: list[str], flags: dict[str, Any]) -> int:
    """Measure what the arguments ask for."""
    subject, *overrides = words
    _check(subject, flags)
    seconds = flags.get("seconds", 10.0)
    config = compose(overrides)
    if subject in BENCHED:
        configs, baseline = _options(subject, overrides, flags, config)
        _machine()
        from nexus_ablate.bench.options import as_data, bench_axis

        bench = bench_axis(subject, configs, baseline, seconds, "compile" in flags)
        if "picture" in flags:
            from nexus_ablate.bench.picture import draw

            draw(bench, flags["picture"])
        return _finish(flags, as_data(bench), lambda: _print_axis(bench))
    if subject == "step" and "against" in flags:
        others = flags["against"].split(",")
        for other in others:
            compose([*overrides, other])
        return _compared(overrides, others, flags, seconds)
    if subject == "step":
        return _step(overrides, flags, seconds)
    return _sweep(overrides, flags, seconds, config)


def _check(subject: str, flags: dict[str, Any]) -> None:
    """Check the subject and its flags.

    Raises:
        ConfigError: An unknown subject, or a flag that doesn't belong to it.
    """
    if subject not in SUBJECTS:
        raise errors.unknown("bench measures an axis, step or sweep", subject, SUBJECTS)
    only_axis = sorted({"only", "compile", "picture"} & flags.keys())
    if subject not in BENCHED and only_axis:
        raise ConfigError(
            f"--{only_axis[0]} belongs to the options of an axis", subject, f"bench norm --{only_axis[0]}"
        )
    if subject == "sweep" and "against" in flags:
        raise ConfigError("--against belongs to an axis or to step", subject, "bench step --against norm=layer")
    if subject != "sweep" and "workers" in flags:
        raise ConfigError("--workers belongs to sweep", subject, "bench sweep --workers 1,2")


def _options(
    axis: str, overrides: list[str], flags: dict[str, Any], config: RunConfig
) -> tuple[dict[str, RunConfig], str]:
    """Two-block configurations by option, the baseline first. Prints which options contradict the overrides.

    Raises:
        ConfigError: A requested option doesn't exist, or contradicts the overrides.
    """
    names = list(option_files(axis))
    baseline = flags.get("against") or getattr(config, axis).name
    requested = flags.get("only") or names
    for name in [baseline, *requested]:
        if name not in names:
            raise errors.unknown(f"{axis} has no option of this name", name, names)
    configs = {}
    for name in [baseline, *(n for n in requested if n != baseline)]:
        try:
            configs[name] = compose([*overrides, f"{axis}={name}", "model.n_layers=2"])
        except ConfigError as error:
            if name == baseline or "only" in flags:
                raise
            print(f"{axis}={name} is left out: {error.problem}", file=sys.stderr)
    return configs, baseline


def _machine() -> None:
    """Make settings that are needed before torch is imported, and keep freed memory."""
    from nexus_ablate.training.device import share_cores_politely
    from nexus_ablate.training.memory import keep_freed_memory

    share_cores_politely()
    keep_freed_memory()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's messages


def _finish(flags: dict[str, Any], data: Any, show: Any) -> int:
    if flags.get("json") != Path("-"):
        show()
    if "json" in flags:
        from nexus_ablate.runs import strict_json

        text = strict_json(data, indent=1) + "\n"
        if flags["json"] == Path("-"):
            sys.stdout.write(text)
        else:
            atomic_write_text(flags["json"], text)
    return errors.OK


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from nexus_ablate.console import open_console

    grid = Table(box=None, pad_edge=False, header_style="dim")
    for number, title in enumerate(titles):
        grid.add_column(title, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*(escape(printable(cell)) for cell in row))
    console = open_console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(grid)


def _print_axis(bench: Bench) -> None:
    from nexus_ablate.bench.options import verdicts
    from nexus_ablate.bench.picture import described

    places = {"alone": bench.layer, "block": "the block around it"}
    print(
        f"{described(bench)}\na matrix product does {bench.product_rate / 1e9:.0f} GFLOP/s, "
        f"a copy of this size {bench.copy_rate / 1e9:.1f} GB/s"
    )
    for place, mode in dict.fromkeys((c.place, c.mode) for c in bench.costs):
        print(f"\n{places[place]}, {mode}")
        titles = ("", "forward ms", "backward", "both", f"times {bench.baseline}")
        shares = (bench.time_share, bench.flop_share) if (place, mode) == ("alone", "eager") else ()
        rows = []
        for c in bench.costs:
            if (c.place, c.mode) != (place, mode):
                continue
            ratio = c.ratio["both"]
            row = [c.option, *(f"{1000 * c.seconds[p].median:.3f}" for p in ("forward", "backward", "both"))]
            row.append(f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})")
            if c.best_share is not None:
                row += [f"{(n or 0) / 1e6:.1f}" for n in (c.bytes_moved, c.flops, c.peak_bytes)]
                row.append(f"{c.best_share:.0%}")
            rows.append((*row, *(f"{share[c.option] or 0:.1%}" for share in shares)))
        if mode == "eager":
            titles += ("MB moved", "MFLOP", "MB held", "roofline")
        _table(titles + (("of block", "its FLOPs") if shares else ()), rows)
    print()
    for line in verdicts(bench):
        print(line)


def _step(overrides: list[str], flags: dict[str, Any], seconds: float) -> int:
    _machine()
    from nexus_ablate.bench.step import bench_step

    cost = bench_step(overrides, seconds)

    def show() -> None:
        took = cost.seconds
        print(
            f"a step takes {1000 * took.median:.2f} ms ({1000 * took.low:.2f} to {1000 * took.high:.2f}), "
            f"{cost.tokens_per_second:,.0f} tokens/s, with logging and probes"
        )
        print(
            f"{cost.matrix_share:.0%} of this machine's rate of matrix products "
            f"({cost.product_rate / 1e9:.0f} GFLOP/s); {cost.peak_memory_bytes / 2**20:,.0f} MiB at most\n"
        )
        _table(
            ("where", "ms", "share"),
            [(name, f"{1000 * s:.2f}", f"{s / took.median:.1%}") for name, s in cost.parts.items()],
        )

    return _finish(flags, dataclasses.asdict(cost), show)


def _compared(overrides: list[str], others: list[str], flags: dict[str, Any], seconds: float) -> int:
    _machine()
    from nexus_ablate.bench.step import compare_steps

    results = compare_steps(overrides, others, seconds)
    rows = [
        (
            each.name or "as given",
            f"{1000 * each.seconds.median:.2f}",
            f"{each.ratio.median:.3f} ({each.ratio.low:.3f}-{each.ratio.high:.3f})",
        )
        for each in results
    ]
    data = {"steps": [dataclasses.asdict(each) for each in results]}
    return _finish(flags, data, lambda: _table(("", "step ms", "times as given"), rows))


def _sweep(overrides: list[str], flags: dict[str, Any], seconds: float, config: RunConfig) -> int:
    from nexus_ablate.bench.sweep import bench_sweep
    from nexus_ablate.training.device import IdleCores

    cores = IdleCores.cores()
    requested = flags.get("workers") or [str(n) for n in range(1, cores + 1)]
    if not all(n.isdecimal() and 0 < int(n) <= 1024 for n in requested):
        raise ConfigError("--workers takes numbers above 0", ",".join(requested), "--workers 1,2,4")
    if config.resolved.steps is None:
        raise ConfigError("a sweep is measured in steps", "train.flops", "give train.steps or train.tokens")
    steps = config.resolved.steps
    results = bench_sweep(overrides, steps, [int(n) for n in requested], cores, seconds)
    rows = [(str(t.workers), str(t.threads), f"{1000 * t.step_seconds:.1f}", f"{t.runs_per_hour:.1f}") for t in results]

    def show() -> None:
        _table(("workers", "threads each", "step ms", "runs per hour"), rows)
        best = max(results, key=lambda t: t.runs_per_hour)
        print(
            f"\nmost with --workers {best.workers}: {best.runs_per_hour:.1f} runs of {steps:,} steps per hour, "
            "without validation and start"
        )

    return _finish(flags, {"steps": steps, "sweep": [vars(t) for t in results]}, show)
