"""The picture of a run: loss, gradients, weights, and the probe statistics of each block by step."""

from __future__ import annotations

import io
import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from nexus_ablate.console import sparkline
from nexus_ablate.errors import UserError, printable
from nexus_ablate.measure.measures import MEASURES
from nexus_ablate.runs import atomic_write
from nexus_ablate.runs.reading import RunRecord, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
Curves = dict[str, tuple[array, array]]
_NOTHING = (array("d"), array("d"))
_DRAWN = ("train/loss", "val/loss", "grad_norm/", "weight_rms/")
_BLOCK = re.compile(r".*/block_(?P<block>\d{1,5})(/.*)?")

HEAT_MAPS = {measure.names[-1]: measure for measure in MEASURES if measure.heat_map}
"""The statistics that are drawn by block and step, by their names over all blocks."""


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure whole or not at all, in the format of the file's ending, with its title in the file's data.

    Raises:
        StorageError: The disk refused.
    """
    drawn = io.BytesIO()
    form = path.suffix.removeprefix(".")
    figure.savefig(drawn, format=form, dpi=130, metadata={"Title": figure.get_suptitle()})
    atomic_write(path, drawn.getvalue())


def run_figure(record: RunRecord) -> Figure:
    """The run as a matplotlib figure without a window or backend.

    Raises:
        UserError: The run has no rows yet.
    """
    from matplotlib.figure import Figure

    curves, probes = _curves(record), record.probes()
    if not curves:
        raise UserError("this run has no rows yet", str(record.path), "wait for its first steps")
    grids = _heat_grids(probes)
    figure = Figure(figsize=(13, 7 if grids else 3.6), layout="constrained")
    tokens, losses = curves.get("val/loss", _NOTHING)
    end = f": validation loss {losses[-1]:.4f} after {tokens[-1]:,.0f} tokens" if losses else ""
    figure.suptitle(printable(f"{record.arm}, seed {record.seed}{end}"), fontsize=14)
    parts: Any = figure.subfigures(2 if grids else 1, 1, squeeze=False)
    loss, gradients, weights = parts[0, 0].subplots(1, 3)
    loss.plot(*curves.get("train/loss", _NOTHING), color="0.65", linewidth=1, label="training")
    loss.plot(tokens, losses, color="C0", marker="o", markersize=4, label="validation")
    _finish(loss, "loss", "nats per token")
    _draw_gradients(gradients, curves)
    _draw_weights(weights, curves)
    if grids:
        maps = parts[1, 0]
        places = maps.subplots(1, len(grids), squeeze=False)[0]
        for axes, (name, grid) in zip(places, grids.items(), strict=True):
            _draw_heat_map(maps, axes, probes, name, grid)
    return figure


def heat_maps(probes: Rows) -> Iterator[tuple[str, Figure]]:
    """The name of each of `HEAT_MAPS` that was probed, with a figure of its own.

    Args:
        probes: Rows of probes.jsonl.
    """
    from matplotlib.figure import Figure

    for name, grid in _heat_grids(probes).items():
        figure = Figure(figsize=(5, 3.75), layout="constrained")
        _draw_heat_map(figure, figure.subplots(), probes, name, grid)
        yield name, figure


def _heat_grids(probes: Rows) -> dict[str, list[list[float]]]:
    """Of each of `HEAT_MAPS` that was probed a list per block: its value at each probed step, of heads their mean."""
    grids = {}
    last = probes[-1] if probes else {}
    for name in HEAT_MAPS:
        area, _, statistic = name.partition("/")
        form = re.compile(rf"{re.escape(area)}/block_\d+/{re.escape(statistic)}")
        grid = []
        for block in sorted(filter(form.fullmatch, last)):
            grid.append([_number(row.get(block)) for row in probes])
        if grid:
            grids[name] = grid
    return grids


def _number(value: float | list[float | None] | None) -> float:
    """A value, or the mean over heads; nan where it is missing."""
    if isinstance(value, list):
        return sum(map(_number, value)) / len(value)
    return math.nan if value is None else value


def _curves(record: RunRecord) -> Curves:
    """Tokens and values of each metric that is drawn, where it was measured: 16 bytes per number."""
    curves: Curves = {}
    for row in read_rows(record.path / "metrics.jsonl"):
        for name, value in row.items():
            if name.startswith(_DRAWN) and isinstance(value, int | float):
                tokens, values = curves.setdefault(name, (array("d"), array("d")))
                tokens.append(row["tokens"])
                values.append(value)
    return curves


def _draw_gradients(axes: Any, curves: Curves) -> None:
    blocks, selection = _some_blocks(curves, "grad_norm/")
    axes.plot(*curves.get("grad_norm/global", _NOTHING), color="black", linewidth=1.2, label="global")
    for colour, block in enumerate(blocks):
        for part, style in (("attn", "-"), ("ffn", "--")):
            line = curves.get(f"grad_norm/block_{block:03d}/{part}", _NOTHING)
            axes.plot(*line, style, color=f"C{colour}", linewidth=0.9, label=f"block {block} {part}")
    axes.set_yscale("log")
    _finish(axes, f"gradients{selection}", "norm before clipping")


def _draw_weights(axes: Any, curves: Curves) -> None:
    blocks, selection = _some_blocks(curves, "weight_rms/block_")
    for block in blocks:
        tokens, values = curves.get(f"weight_rms/block_{block:03d}", _NOTHING)
        if values and values[0]:  # a weight that began at 0 has no ratio to that
            ratios = [value / values[0] for value in values]
            axes.plot(tokens, ratios, linewidth=1.2, label=f"block {block}")
    if not axes.lines:
        axes.text(0.5, 0.5, "not probed", ha="center", va="center", transform=axes.transAxes, color="0.5")
    _finish(axes, f"weights{selection}", "RMS over its first value")


def _draw_heat_map(figure: Any, axes: Any, probes: Rows, name: str, grid: list[list[float]]) -> None:
    """One of `_heat_grids`, block by probed step."""
    measure = HEAT_MAPS[name]
    axes.set_title(fill(measure.title, 24), fontsize=12)
    axes.set(xlabel="step", ylabel="block")
    axes.locator_params(axis="x", nbins=4)
    seen = [value for row in grid for value in row if not math.isnan(value)] or [0.0, 1.0]
    low, high = min(seen), max(seen)
    spans_decades = measure.most is None and low > 0 and high > 30 * low
    scale = "log" if spans_decades else "linear"
    steps = [row["step"] for row in probes]
    middles = [(before + after) / 2 for before, after in pairwise(steps)]
    edges = [steps[0], *middles, max(steps[-1], steps[0] + 1)]
    mesh = axes.pcolormesh(edges, range(len(grid) + 1), grid, norm=scale, vmin=low, vmax=high, cmap="viridis")
    blocks = range(0, len(grid), max(1, len(grid) // 8))
    axes.set_yticks([block + 0.5 for block in blocks], list(map(str, blocks)))
    figure.colorbar(mesh, ax=axes)


def _some_blocks(curves: Curves, start: str) -> tuple[list[int], str]:
    """The blocks of a metric, of more than four the first, the middle and the last, and then which, for a title."""
    names = (_BLOCK.fullmatch(name) for name in curves if name.startswith(start))
    blocks = sorted({int(match["block"]) for match in names if match})
    if len(blocks) <= 4:
        return blocks, ""
    some = [blocks[0], blocks[len(blocks) // 2], blocks[-1]]
    return some, f" (blocks {', '.join(map(str, some))} of {len(blocks)})"


def _finish(axes: Any, title: str, label: str) -> None:
    """Title, labels, grid and, where lines have names, a legend of a plot over tokens."""
    from matplotlib.ticker import EngFormatter

    axes.set(title=title, xlabel="tokens", ylabel=label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if axes.lines:
        axes.legend(frameon=False, fontsize=9, ncols=1 + len(axes.lines) // 6)


def run_lines(record: RunRecord) -> list[tuple[str, str]]:
    """Losses and gradient norm for a terminal: `2.31 █▅▃▁ 1.87` by name."""
    curves = _curves(record)
    lines = []
    for name in ("train/loss", "val/loss", "grad_norm/global"):
        finite = [value for value in curves.get(name, _NOTHING)[1] if math.isfinite(value)]
        if len(finite) > 1:
            lines.append((name, f"{finite[0]:.3g} {sparkline(finite)} {finite[-1]:.3g}"))
    return lines
