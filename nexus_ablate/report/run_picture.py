"""The picture of a run: loss, gradients, weights, and the probe statistics of each block by step."""

from __future__ import annotations

import io
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    axes.set(xlabel="tokens", ylabel="norm before clipping", title="gradients", yscale="log")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    _plain(axes)


def _weights(axes: Any, curves: Curves) -> None:
    axes.set(xlabel="tokens", ylabel="RMS over its first value", title="weights of a block")
    names = [name for name in curves if name.startswith("weight_rms/")]
    for layer in _some_layers(names):
        tokens, values = curves.get(f"weight_rms/block_{layer:03d}", _NOTHING)
        if values and values[0]:  # a weight that began at 0 has no ratio to that
            axes.plot(tokens, [value / values[0] for value in values], linewidth=1.2, label=f"block {layer}")
    if not names:
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
    wide = top is None and bool(seen) and min(seen) > 0 and max(seen) > 30 * min(seen)
    norm = LogNorm() if wide else Normalize(0, top) if top is not None else None
    mesh = axes.pcolormesh(grid, norm=norm, cmap="viridis")
    ticks = range(0, len(probes), max(1, len(probes) // 5))
    axes.set_xticks([t + 0.5 for t in ticks], [str(probes[t]["step"]) for t in ticks])
    blocks = range(0, len(grid), max(1, len(grid) // 8))
    axes.set_yticks([i + 0.5 for i in blocks], [str(i) for i in blocks])
    figure.colorbar(mesh, ax=axes)


def _number(value: float | list[float | None] | None) -> float:
    """A value, or the mean over heads; nan where it is missing."""
    if isinstance(value, list):
        return sum(_number(head) for head in value) / len(value)
    return math.nan if value is None else value


def _not_probed(axes: Any) -> None:
    axes.text(0.5, 0.5, "not probed", ha="center", va="center", transform=axes.transAxes, color="0.5")


def _some_layers(names: list[str]) -> list[int]:
    """The first, the middle and the last block among metrics that name one."""
    layers = sorted({int(match["block"]) for name in names if (match := _BLOCK.fullmatch(name))})
    return sorted({layers[0], layers[len(layers) // 2], layers[-1]}) if layers else []


def _plain(axes: Any) -> None:
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
