"""How cost grows: a step with depth, width, context, vocabulary; a probe with depth; `compare`, `status` with runs.

    python scripts/bench_growth.py [--seconds 10] [--json FILE] [--picture docs/growth.png]

One training step of the default configuration at model=nano, one thread, around which one size is varied at a time, in
turn. Memory is what a step holds at most besides weights and moments. The exponent is the slope of the logarithms over
the upper half of the sizes: what a further doubling costs is 2 to its power.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZES = {
    "depth": ("model.n_layers", [1, 2, 4, 8, 16, 32]),
    "width": ("model.d_model", [32, 64, 128, 256, 512]),
    "context": ("model.context", [32, 64, 128, 256, 512, 1024]),
    "vocabulary": ("vocab", [256, 1024, 4096, 16384, 65536]),
}
RUNS = [5, 20, 80, 320]
BATCH = 4


def step_of(key: str, size: int) -> Callable[[], None]:
    """A function that takes one optimizer step with one size changed."""
    import numpy as np

    from nexus_ablate.config.compose import compose
    from nexus_ablate.model import build_model
    from nexus_ablate.training.step import Step

    overrides = [] if key == "vocab" else [f"{key}={size}"]
    config = compose([*overrides, f"train.batch_size={BATCH}", "train.device=cpu"])
    vocab = size if key == "vocab" else 256
    rows = np.random.default_rng(0).integers(0, vocab, (BATCH, config.model.context + 1))
    step = Step(config, build_model(config, vocab).train(), 1000, lambda number: rows)

    def take() -> None:
        step.take(500, rows)
        step.read()

    take()
    return take


def probe_of(layers: int) -> Callable[[], object]:
    """A function that makes one standard probe of so many blocks."""
    import torch

    from nexus_ablate.config.compose import compose
    from nexus_ablate.measure.probe import probe
    from nexus_ablate.model import build_model

    model = build_model(compose([f"model.n_layers={layers}"]))
    tokens = torch.randint(0, 256, (4, 128))
    probe(model, tokens)
    return lambda: probe(model, tokens)


def readers_of(count: int, folder: Path) -> dict[str, Callable[[], object]]:
    """Reading a study of so many runs: five seeds an arm."""
    sys.path.insert(0, str(ROOT / "tests"))
    from written_runs import Writer  # type: ignore[reportMissingImports]

    from nexus_ablate.comparison.result import compare
    from nexus_ablate.execution.status import Watcher

    writer = Writer(folder, study=f"of{count}")
    for arm in range(count // 5):
        writer.arm(
            f"norm.eps={(arm + 1) * 1e-6:.7f}" if arm else "norm=rms", losses=[2.0 + seed / 100 for seed in range(5)]
        )
    studied = folder / f"of{count}"
    return {"compare": lambda: compare([studied], baseline="baseline"), "status": lambda: Watcher().lines([studied])}


def exponent(sizes: list[int], values: list[float]) -> float:
    """Slope of log value over log size in the upper half of the sizes, by least squares."""
    upper = len(sizes) // 2
    x, y = ([math.log(v) for v in series[upper:]] for series in (sizes, values))
    return statistics.linear_regression(x, y).slope


def draw(measured: dict[str, Any], path: Path) -> None:
    """A panel for each varied size, time and memory on logarithmic axes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = list(figure.subplots(2, 4).flat)
    for axes in panels[len(measured) :]:
        axes.set_visible(False)
    for axes, (name, series) in zip(panels, measured.items(), strict=False):
        drawn = [(axes, "ms", [1000 * s for s in series["seconds"]], "#4477aa", "o-")]
        title = f"{name}\ntime ^{series['time_exponent']:.2f}"
        if "bytes" in series:
            drawn.append((axes.twinx(), "MiB", [b / 2**20 for b in series["bytes"]], "#aa6644", "s--"))
            title += f", memory ^{series['memory_exponent']:.2f}"
        for side, unit, values, colour, style in drawn:
            side.loglog(series["sizes"], values, style, color=colour, markersize=3)
            side.set_ylabel(unit, fontsize=8, color=colour)
            side.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            side.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            side.minorticks_off()
            side.set_xticks(series["sizes"], [f"{s}" for s in series["sizes"]])
            side.tick_params(labelsize=7)
        axes.set_title(title, fontsize=9, loc="left")
    figure.savefig(path, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="measured for each varied size")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    from nexus_ablate.training.device import share_cores_politely
    from nexus_ablate.training.memory import keep_freed_memory

    share_cores_politely()
    keep_freed_memory()
    import torch

    from nexus_ablate.bench.timing import clock_of, in_turn, spread
    from nexus_ablate.bench.traffic import counted

    torch.set_num_threads(1)
    clock = clock_of(torch.device("cpu"))
    measured: dict[str, Any] = {}

    def measure(name: str, sizes: list[int], works: Mapping[str, Callable[[], object]], held: list[int] | None) -> None:
        taken = in_turn(works, arguments.seconds, clock)
        seconds = [spread(values).median for values in taken.values()]
        measured[name] = {"sizes": sizes, "seconds": seconds, "time_exponent": exponent(sizes, seconds)}
        if held is not None:
            measured[name] |= {"bytes": held, "memory_exponent": exponent(sizes, [float(b) for b in held])}
        spreads = [f"{spread(v).low * 1000:.1f}-{spread(v).high * 1000:.1f}" for v in taken.values()]
        listed = ", ".join(f"{s}: {1000 * t:.1f} ({q})" for s, t, q in zip(sizes, seconds, spreads, strict=True))
        print(f"{name}: time ^{measured[name]['time_exponent']:.2f}; ms {listed}")
        if held is not None:
            shown = ", ".join(f"{s}: {b / 2**20:.1f}" for s, b in zip(sizes, held, strict=True))
            print(f"    memory ^{measured[name]['memory_exponent']:.2f}; MiB {shown}", flush=True)

    for name, (key, sizes) in SIZES.items():
        works = {str(size): step_of(key, size) for size in sizes}
        measure(name, sizes, works, [counted(work).peak_bytes for work in works.values()])
    depths = [1, 2, 4, 8, 16]
    measure("probe, by depth", depths, {str(n): probe_of(n) for n in depths}, None)
    with tempfile.TemporaryDirectory() as folder:
        readers = {count: readers_of(count, Path(folder)) for count in RUNS}
        for verb in ("compare", "status"):
            for work in (readers[count][verb] for count in RUNS):
                work()
            measure(f"{verb}, by runs", RUNS, {str(count): readers[count][verb] for count in RUNS}, None)
    if arguments.json:
        arguments.json.write_text(
            json.dumps(measured | {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}, indent=1)
        )
    if arguments.picture:
        draw(measured, arguments.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
