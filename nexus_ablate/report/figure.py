"""The comparison as one matplotlib figure: the losses, and what is left of them after pairing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nexus_ablate.comparison.result import Comparison
from nexus_ablate.report.table import delta, direction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME_LETTERS = 40


def comparison_figure(comparison: Comparison) -> Figure:
    """Validation losses by arm, the band from the lowest seed to the highest, beside differences with intervals."""
    from matplotlib.figure import Figure

    compared = [i for i, row in enumerate(comparison.rows) if delta(row) is not None]
    figure = Figure(figsize=(12, max(3.6, 1.6 + 0.35 * len(compared))), layout="constrained")
    losses, differences = figure.subplots(1, 2)
    _losses(losses, comparison)
    _differences(differences, comparison, compared)
    for axes in (losses, differences):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def _losses(axes: Any, comparison: Comparison) -> None:
    from matplotlib.ticker import EngFormatter

    tops = []
    for i, arm in enumerate(comparison.arms):
        curves = [run.curves for run in arm.runs.values() if len(run.curves.val) > 1]
        if not curves:
            continue
        tokens = min((c.tokens for c in curves), key=lambda t: t[-1])
        values = np.array([np.interp(tokens, c.tokens, c.val) for c in curves])
        axes.plot(tokens, values.mean(0), color=f"C{i}", linewidth=1.4, label=_short(arm.label))
        axes.fill_between(tokens, values.min(0), values.max(0), color=f"C{i}", alpha=0.2, linewidth=0)
        tops.append(np.nanquantile(values, 0.9))
    if tops:  # the first validations are far above all others; the picture is about the rest
        axes.set_ylim(top=max(tops))
        axes.legend(frameon=False, fontsize=8)
    axes.set(xlabel="tokens", ylabel="validation loss, nats per token")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _differences(axes: Any, comparison: Comparison, compared: list[int]) -> None:
    axes.axvspan(-comparison.delta_min, comparison.delta_min, color="0.9", zorder=0)
    axes.axvline(0, color="0.4", linewidth=0.8)
    for place, i in enumerate(reversed(compared)):
        row = comparison.rows[i]
        seeds = [d for d in row.differences if d is not None]
        axes.plot(seeds, [place - 0.25] * len(seeds), ".", color=f"C{i}", alpha=0.6, markersize=4)
        if row.effect:
            axes.plot([row.effect.low, row.effect.high], [place, place], color=f"C{i}", linewidth=2)
        axes.plot(delta(row), place, "o", color=f"C{i}")
    names = [f"{_short(comparison.rows[i].arm)}\n{comparison.rows[i].verdict}" for i in reversed(compared)]
    axes.set_yticks(range(len(compared)), names, fontsize=8)
    axes.set_ylim(-0.6, max(len(compared), 1) - 0.4)
    axes.set(xlabel=f"difference to {_short(comparison.baseline)}, {direction(comparison)}")


def _short(name: str) -> str:
    shown = name.replace("$", r"\$")  # matplotlib would read formulas
    return shown if len(shown) <= NAME_LETTERS else shown[: NAME_LETTERS - 1] + "…"
