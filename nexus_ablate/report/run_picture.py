"""The picture of a run: loss, gradients, weights, and the probe statistics of each block by step."""

from __future__ import annotations

import io
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate.console import sparkline
from nexus_ablate.errors import UserError, printable
from nexus_ablate.measure.measures import MEASURES
from nexus_ablate.runs.files import atomic_write
from nexus_ablate.runs.record import RunRecord, read_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
Curves = dict[str, tuple[array, array]]
_NOTHING = (array("d"), array("d"))
_DRAWN = ("train/loss", "val/loss", "grad_norm/", "weight_rms/")

MOST_LINES = 8
"""Blocks of a statistic in the terminal."""

_BLOCK = re.compile(r".*/block_(?P<block>\d{1,5})(/.*)?")

HEAT_MAPS = tuple((measure.names[-1], measure.title, measure.most) for measure in MEASURES if measure.heat_map)
"""Name, title and the largest value there can be."""


def draw(record: RunRecord, path: Path) -> Path:
    """Draw the run into a PNG, PDF or SVG.

    Raises:
        UserError: The run has no rows yet.
        StorageError: The disk refused.
    """
    save_figure(run_figure(record), path)
    return path


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure whole or not at all, in the format of the file's ending.

    Raises:
        StorageError: The disk refused.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix.removeprefix("."), dpi=130)
    atomic_write(path, drawn.getvalue())


def run_figure(record: RunRecord) -> Figure:
    """The run as a matplotlib figure without a window or backend.

    Raises:
        UserError: The run has no rows yet.
    """
    from matplotlib.figure import Figure

    curves, probes = _curves(record.path / "metrics.jsonl"), record.probes()
    if not curves:
        raise UserError("this run has no rows yet", str(record.path), "wait for its first steps")
    figure = Figure(figsize=(15, 7.5), layout="constrained")
    figure.suptitle(printable(f"{record.arm}  seed {record.seed}"), fontsize=13)
    parts: Any = figure.subfigures(2, 1)
    upper, maps = parts
    loss, gradients, weights = upper.subplots(1, 3)
    _loss(loss, curves)
    _gradients(gradients, curves)
    _weights(weights, curves)
    for axes, (name, title, top) in zip(maps.subplots(1, len(HEAT_MAPS)), HEAT_MAPS, strict=True):
        _heat_map(maps, axes, probes, name, title, top)
    return figure


def heat_map(probes: Rows, name: str, title: str, top: float | None) -> Figure | None:
    """One of `HEAT_MAPS` as a figure of its own; None where the statistic was not probed."""
    from matplotlib.figure import Figure

    if not heat_values(probes, name):
        return None
    figure = Figure(figsize=(5, 3.75), layout="constrained")
    _heat_map(figure, figure.subplots(), probes, name, title, top)
    return figure


def heat_values(probes: Rows, name: str) -> list[list[float]]:
    """A list per block with a statistic's value at each probed step, of one with a value a head their mean.

    Args:
        probes: Rows of probes.jsonl.
        name: Area and statistic, `attn/entropy`.
    """
    area, _, rest = name.partition("/")
    start = f"{area}/block_"
    names = sorted(n for n in (probes[-1] if probes else {}) if n.startswith(start) and n.split("/", 2)[2:] == [rest])
    return [[_number(row.get(n)) for row in probes] for n in names]


def _curves(log: Path) -> Curves:
    """Tokens and values of each metric that is drawn, where it was measured: 16 bytes per number."""
    curves: Curves = {}
    for row in read_rows(log):
        for name, value in row.items():
            if name.startswith(_DRAWN) and isinstance(value, int | float):
                tokens, values = curves.setdefault(name, (array("d"), array("d")))
                tokens.append(row["tokens"])
                values.append(value)
    return curves


def _loss(axes: Any, curves: Curves) -> None:
    axes.plot(*curves.get("train/loss", _NOTHING), color="0.65", linewidth=1, label="training")
    tokens, losses = curves.get("val/loss", _NOTHING)
    axes.plot(tokens, losses, color="C0", marker="o", markersize=4, label="validation")
    if losses:
        axes.annotate(
            f"{losses[-1]:.3f}", (tokens[-1], losses[-1]), textcoords="offset points", xytext=(0, 8), ha="right"
        )
    axes.set(xlabel="tokens", ylabel="nats per token", title="loss")
    axes.legend(frameon=False)
    _plain(axes)


def _gradients(axes: Any, curves: Curves) -> None:
    axes.plot(*curves.get("grad_norm/global", _NOTHING), color="black", linewidth=1.2, label="global")
    names = [name for name in curves if name.startswith("grad_norm/")]
    for colour, layer in enumerate(_some_layers(names)):
        for part, style in (("attn", "-"), ("ffn", "--")):
            line = curves.get(f"grad_norm/block_{layer:03d}/{part}", _NOTHING)
            axes.plot(*line, style, color=f"C{colour}", linewidth=0.9, label=f"block {layer} {part}")
    title = f"gradients{_selection(names)}"
    axes.set(xlabel="tokens", ylabel="norm before clipping", title=title, yscale="log")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    _plain(axes)


def _weights(axes: Any, curves: Curves) -> None:
    names = [name for name in curves if name.startswith("weight_rms/block_")]
    axes.set(xlabel="tokens", ylabel="RMS over its first value", title=f"weights{_selection(names)}")
    for layer in _some_layers(names):
        tokens, values = curves.get(f"weight_rms/block_{layer:03d}", _NOTHING)
        if values and values[0]:  # a weight that began at 0 has no ratio to that
            axes.plot(tokens, [value / values[0] for value in values], linewidth=1.2, label=f"block {layer}")
    if not axes.lines:
        _not_probed(axes)
        return
    axes.legend(frameon=False, fontsize=8)
    _plain(axes)


def _heat_map(figure: Any, axes: Any, probes: Rows, name: str, title: str, top: float | None) -> None:
    """Block by probed step of a statistic; of one with a value for each head, their mean."""
    from matplotlib.colors import LogNorm, Normalize

    axes.set_title(title, fontsize=10)
    axes.set(xlabel="step", ylabel="block")
    grid = heat_values(probes, name)
    if not grid:
        _not_probed(axes)
        return
    seen = [value for row in grid for value in row if value == value]
    low, high = (min(seen), max(seen)) if seen else (0.0, 1.0)
    wide = top is None and low > 0 and high > 30 * low
    norm = LogNorm(low, high) if wide else Normalize(low, high)
    steps = _edges([row["step"] for row in probes])
    mesh = axes.pcolormesh(steps, range(len(grid) + 1), grid, norm=norm, cmap="viridis")
    blocks = range(0, len(grid), max(1, len(grid) // 8))
    axes.set_yticks([i + 0.5 for i in blocks], [str(i) for i in blocks])
    figure.colorbar(mesh, ax=axes)


def _edges(steps: Sequence[float]) -> list[float]:
    """Where the cells of probed steps begin and end on an axis of steps: halfway between neighbours."""
    inner = [(a + b) / 2 for a, b in pairwise(steps)]
    return [steps[0], *inner, steps[-1] if len(steps) > 1 else steps[0] + 1]


def _number(value: float | list[float | None] | None) -> float:
    """A value, or the mean over heads; nan where it is missing."""
    if isinstance(value, list):
        return sum(_number(head) for head in value) / len(value)
    return math.nan if value is None else value


def _not_probed(axes: Any) -> None:
    axes.text(0.5, 0.5, "not probed", ha="center", va="center", transform=axes.transAxes, color="0.5")


def _some_layers(names: list[str]) -> list[int]:
    """The blocks among metrics that name one; of more than four the first, the middle and the last."""
    layers = _layers(names)
    return layers if len(layers) <= 4 else [layers[0], layers[len(layers) // 2], layers[-1]]


def _layers(names: list[str]) -> list[int]:
    return sorted({int(match["block"]) for name in names if (match := _BLOCK.fullmatch(name))})


def _selection(names: list[str]) -> str:
    """Which of how many blocks `_some_layers` shows, for a title; '' where it shows all."""
    shown, all_layers = _some_layers(names), _layers(names)
    return "" if shown == all_layers else f" (blocks {', '.join(map(str, shown))} of {len(all_layers)})"


def run_lines(record: RunRecord) -> list[tuple[str, str]]:
    """The picture of a run for a terminal: name and sparkline with first and last value, one per curve and block.

    Of more than `MOST_LINES` blocks so many are shown.
    """
    curves, probes = _curves(record.path / "metrics.jsonl"), record.probes()
    names = [name for name in ("train/loss", "val/loss", "grad_norm/global") if name in curves]
    lines = [(name, curve_text(curves[name][1])) for name in names]
    for name, *_ in HEAT_MAPS:
        grid = heat_values(probes, name)
        count = min(len(grid), MOST_LINES)
        for i in range(count):
            block = round(i * (len(grid) - 1) / max(count - 1, 1))
            lines.append((f"{name}, block {block}" if not i else f"  block {block}", curve_text(grid[block])))
        if count < len(grid):
            lines.append((f"  {count} of {len(grid)} blocks", ""))
    return lines


def curve_text(values: Sequence[float]) -> str:
    """`2.31 █▅▃▁ 1.87`; '' without two finite values."""
    finite = [value for value in values if math.isfinite(value)]
    return f"{finite[0]:.3g} {curve} {finite[-1]:.3g}" if (curve := sparkline(finite)) else ""


def _plain(axes: Any) -> None:
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
