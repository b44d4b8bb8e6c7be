"""One run as one picture: loss, gradient norms by block, and the outliers of the residual stream, block by step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from nexus_ablate.comparison.load import series
from nexus_ablate.errors import UserError
from nexus_ablate.runs import RunRecord

_BLOCK = re.compile(r"(?P<before>.*)/block_(?P<block>\d+)/(?P<after>.*)")


def draw(record: RunRecord, path: Path) -> Path:
    """Draw the run into a PNG or PDF.

    Raises:
        UserError: The run has no rows yet.
    """
    from matplotlib.figure import Figure

    rows, probes = record.metrics(), record.probes()
    if not rows:
        raise UserError("this run has no rows yet", str(record.path), "wait for its first steps")
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    (loss, gradients), (kurtosis, ratio) = figure.subplots(2, 2)
    figure.suptitle(f"{record.arm}  seed {record.seed}", fontsize=13)
    _loss(loss, rows, record)
    _gradients(gradients, rows)
    _heat_map(figure, kurtosis, probes, "kurtosis_token", "kurtosis of the residual stream (Gaussian 3)")
    _heat_map(figure, ratio, probes, "max_over_median", "largest over median magnitude, residual stream")
    figure.savefig(path, dpi=130)
    return path


def _loss(axes: Any, rows: list[dict], record: RunRecord) -> None:
    axes.plot(*series(rows, "train/loss"), color="0.65", linewidth=1, label="training")
    tokens, losses = series(rows, "val/loss")
    axes.plot(tokens, losses, color="C0", marker="o", markersize=4, label="validation")
    if losses:
        axes.annotate(
            f"{losses[-1]:.3f}", (tokens[-1], losses[-1]), textcoords="offset points", xytext=(0, 8), ha="right"
        )
    axes.set(xlabel="tokens", ylabel="nats per token", title="loss")
    axes.legend(frameon=False)
    _plain(axes)


def _gradients(axes: Any, rows: list[dict]) -> None:
    axes.plot(*series(rows, "grad_norm/global"), color="black", linewidth=1.2, label="global")
    names = sorted({name for row in rows for name in row if _BLOCK.fullmatch(name) and name.startswith("grad_norm/")})
    layers = sorted({_layer(name) for name in names})
    shown = {0, layers[len(layers) // 2], layers[-1]} if layers else set()
    for name in names:
        part = name.rpartition("/")[2]
        if _layer(name) in shown and part in ("attn", "ffn"):
            colour = f"C{sorted(shown).index(_layer(name))}"
            style = "-" if part == "attn" else "--"
            axes.plot(*series(rows, name), style, color=colour, linewidth=0.9, label=f"block {_layer(name)} {part}")
    axes.set(xlabel="tokens", ylabel="norm before clipping", title="gradients", yscale="log")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    _plain(axes)


def _heat_map(figure: Any, axes: Any, probes: list[dict], statistic: str, title: str) -> None:
    from matplotlib.colors import LogNorm

    axes.set(title=title, xlabel="step", ylabel="block")
    names = sorted(
        n for n in (probes[-1] if probes else {}) if n.startswith("act/") and n.endswith(f"/resid/{statistic}")
    )
    if not names:
        axes.text(0.5, 0.5, "not probed", ha="center", va="center", transform=axes.transAxes, color="0.5")
        return
    grid = [[row.get(name) or float("nan") for row in probes] for name in names]
    seen = [value for row in grid for value in row if value == value]
    wide = bool(seen) and min(seen) > 0 and max(seen) > 30 * min(seen)
    mesh = axes.pcolormesh(grid, norm=LogNorm() if wide else None, cmap="viridis")
    ticks = range(0, len(probes), max(1, len(probes) // 8))
    axes.set_xticks([t + 0.5 for t in ticks], [str(probes[t]["step"]) for t in ticks])
    every = max(1, len(names) // 8)
    axes.set_yticks([i + 0.5 for i in range(0, len(names), every)], [str(i) for i in range(0, len(names), every)])
    figure.colorbar(mesh, ax=axes)


def _layer(name: str) -> int:
    match = _BLOCK.fullmatch(name)
    assert match is not None
    return int(match["block"])


def _plain(axes: Any) -> None:
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
