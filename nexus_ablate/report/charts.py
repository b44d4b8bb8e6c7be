"""The pictures of a comparison, drawn by matplotlib. They show the numbers of the comparison and compute no new ones.

A report holds them as SVG: the page's variables take the place of the colours, so that they follow its light and dark
theme, and what an artist says under the pointer stands in its gid, which becomes a `<title>`.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.compare import Comparison, Row, Table
from nexus_ablate.console import middle
from nexus_ablate.errors import printable
from nexus_ablate.report.columns import TONES, difference, interval_text
from nexus_ablate.report.sentences import direction
from nexus_ablate.study.endpoint import Endpoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = {
    "ink": ("#1b1f24", "#e6e8eb"),
    "muted": ("#5f6672", "#9aa3ad"),
    "line": ("#e3e6ea", "#2c3238"),
    "good": ("#11743a", "#5fd08a"),
    "bad": ("#b3261e", "#ff8a80"),
    "same": ("#0b6b8a", "#6cc6e8"),
    "warn": ("#8a5a00", "#e3b341"),
    "c0": ("#6b7280", "#9aa3ae"),
    "c1": ("#0072b2", "#56a8e8"),
    "c2": ("#d55e00", "#ff8f4d"),
    "c3": ("#009e73", "#2fd3a5"),
    "c4": ("#cc4b97", "#f08cc4"),
    "c5": ("#b58900", "#e6c14a"),
    "c6": ("#3fa7e0", "#8fd0ff"),
    "c7": ("#7b52c7", "#b79bff"),
    "c8": ("#8c564b", "#d3a394"),
    "c9": ("#5b8c00", "#a4d04a"),
}
"""Each colour in the light and in the dark theme. Pictures are drawn in the light one."""
INK, MUTED, LINE = (PALETTE[name][0] for name in ("ink", "muted", "line"))
ARM_COLOURS = 10

WIDTH, HEIGHT = 470, 270
"""Points of a picture. At this width its letters are readable on a phone of 390 pixels."""
STYLE: dict[Any, Any] = {
    "font.size": 13,
    "font.sans-serif": ["DejaVu Sans"],
    "text.color": INK,
    "text.parse_math": False,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 13,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 13,
    "svg.fonttype": "none",
}
POINTS = 60
"""Of a curve."""
NAME_LETTERS = 32
RATIO_STEPS = (1.02, 1.05, 1.1, 1.25, 1.5, 2, 5, 10, 100, 1000, 1e6)
LABEL_LETTERS = 20
"""Letters of a line of a name beside intervals."""
BUDGETS = {"tokens": "training tokens", "flops": "training FLOPs", "seconds": "seconds of training"}
LOSS = "loss, nats per token"


@contextmanager
def picture(
    title: str, height: float = HEIGHT, width: float = WIDTH, panels: Sequence[float] = (1,)
) -> Iterator[tuple[Figure, Any]]:
    """A figure with the axes of one plot, or an array of those of several, in the style of all pictures.

    Args:
        title: For screen readers.
        height, width: Points.
        panels: The relative height of each plot, from the top.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained", label=title)
        yield figure, figure.subplots(len(panels), height_ratios=panels)


def svg(figure: Figure) -> str:
    """A `picture` as an SVG element that the page's style applies to; '' if no line was drawn."""
    from html import escape

    if not figure.axes[0].lines:
        return ""
    out = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the reader's browser has the font
        figure.savefig(out, format="svg", transparent=True)
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", out.getvalue(), flags=re.S)
    text = re.sub(r' id="\w+_\d+"| xmlns(:xlink)?="[^"]*"', "", text[text.index("<svg") :])
    text = re.sub(r'<g id="title:([^"]*)">', r"<g><title>\1</title>", text)
    text = re.sub(r' (d|x|y|transform)="[^"]*"', lambda place: re.sub(r"(\.\d)\d+", r"\1", place[0]), text)
    for name, (light, _) in PALETTE.items():
        text = text.replace(light, f"var(--{name})")
    text = re.sub(r"\s*\n\s*", "\n", text.replace("'DejaVu Sans', ", ""))
    title = escape(printable(str(figure.get_label())))
    return re.sub(r'width="\S+" height="\S+"', f'role="img" aria-label="{title}"', text, count=1)


def hover(text: str) -> str:
    """The gid of an artist that shows this text when the pointer rests on it."""
    return f"title:{printable(text, 2000)}"


def colour(index: int) -> str:
    """The colour of the arm in a row of the table."""
    return PALETTE[shade(index)][0]


def shade(index: int) -> str:
    """The name in `PALETTE` of the colour of the arm in a row of the table; the first is the baseline's alone."""
    if index == 0:
        return "c0"
    return f"c{1 + (index - 1) % (ARM_COLOURS - 1)}"


# ------------------------------------------------------------------------------------------------------- intervals


NOT_DRAWN = (math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Bar:
    """A difference with its interval in a picture of such.

    Attributes:
        label: To the left of the plot.
        ends: The lower end of the interval, the mean and the upper end; of one pair the mean alone, three times;
            NOT_DRAWN where there is no difference, and the note says why.
        note: To the right of the plot, such as the verdict.
        tone: Of the note, a name of `PALETTE`.
        shade: Of the interval, a name of `PALETTE`.
        dots: The difference of each seed, and what is under the pointer there; so is `hint` at the interval.
    """

    label: str
    ends: tuple[float, float, float]
    note: str
    tone: str
    shade: str
    dots: Sequence[tuple[float, str]] = ()
    hint: str = ""


def _bar(row: Row, index: int, label: str) -> Bar:
    """The difference of an arm; one that has none is a row with its word alone.

    Args:
        index: Of its row in the table, whose colour it has.
    """
    ends, dots, hint, delta = NOT_DRAWN, [], row.arm.name, difference(row)
    if row.effect is not None and delta is not None:
        ends = (row.effect.low, delta, row.effect.high)
        hint = f"{row.arm.name}: {row.endpoint.signed(delta)} ({interval_text(row)})"
        for seed, value in zip(row.seeds, row.differences.tolist(), strict=True):
            dots.append((value, f"{row.arm.name}, seed {seed}: {row.endpoint.signed(value)}"))
    short = middle(printable(label), 2 * LABEL_LETTERS - 2).replace(",", ", ")
    lines = fill(short, LABEL_LETTERS, max_lines=2, placeholder="…")
    return Bar(lines, ends, row.word, TONES.get(row.word, "ink"), shade(index), dots, hint)


def _bars(rows: Sequence[Row]) -> list[Bar]:
    return [_bar(row, index, row.arm.name) for index, row in enumerate(rows) if not row.is_baseline]


def forest(table: Table, rows: Sequence[Row] = ()) -> str:
    """Each arm's mean difference with its interval, a dot for each seed, and the band that does not matter.

    Args:
        rows: Of a secondary endpoint. Default: of the first.
    """
    endpoint = rows[0].endpoint if rows else table.endpoint
    axis = endpoint.axis() if rows else direction(table)
    return intervals(_bars(rows or table.rows), axis, endpoint, endpoint.margin)


def settings(comparison: Comparison) -> str:
    """Each arm's difference in each setting with its interval."""
    bars = []
    for table in comparison.tables:
        for index, row in enumerate(table.rows):
            if not row.is_baseline:
                bars.append(_bar(row, index, f"{table.setting or table.name}: {row.arm.name}"))
    first = comparison.tables[0]
    margins = [table.endpoint.margin for table in comparison.tables]
    return intervals(bars, direction(first), first.endpoint, min(margins))


def intervals(bars: Sequence[Bar], axis: str, endpoint: Endpoint, band: float = 0.0) -> str:
    """Intervals below one another as SVG; '' without any. See `draw_intervals`."""
    if not bars:
        return ""
    lines = sum(1 + bar.label.count("\n") for bar in bars)
    with picture(f"{axis}, with intervals", height=58 + 17 * lines + 8 * len(bars)) as (figure, axes):
        draw_intervals(axes, bars, axis, band, endpoint)
        return svg(figure)


def draw_intervals(
    axes: Any,
    bars: Sequence[Bar],
    axis: str,
    band: float = 0.0,
    endpoint: Endpoint | None = None,
    limit: float | None = None,
) -> None:
    """Intervals below one another, with zero and the band in which a difference doesn't matter.

    Labels are to the left of the plot and notes to its right. A mean beyond the limit becomes an arrow at the edge, and
    an interval that is cut has one at its end.

    Args:
        axis: The label of the x axis.
        band: Half the width of the band; 0: none.
        endpoint: Says how differences are written at the axis where its scale is logarithmic.
        limit: The largest difference that is drawn. By default a few times the usual one, so that one distant arm does
            not squeeze all others together.
    """
    from matplotlib.ticker import MultipleLocator

    if limit is None:
        farthest = [max(abs(bar.ends[0]), abs(bar.ends[2])) for bar in bars if bar.ends[0] < bar.ends[2]]
        limit = max(8 * float(np.median(farthest or [math.inf])), 3 * band)
    seen = [band, -band]
    for bar in bars:
        values = [*bar.ends, *(value for value, _ in bar.dots)]
        seen += [value for value in values if abs(value) <= limit]
    pad = 0.04 * (max(seen) - min(seen)) or 1e-6
    left, right = min(seen) - pad, max(seen) + pad
    axes.set(xlim=(left, right), ylim=(len(bars) - 0.4, -0.6), xlabel=middle(axis, 50))
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.tick_params(length=0, pad=8)
    axes.locator_params(axis="x", nbins=4)
    if not any(seen):
        axes.set_xticks([0])
    if endpoint is not None and endpoint.log:
        step = next((math.log(ratio) for ratio in RATIO_STEPS if right - left < 4 * math.log(ratio)), right - left)
        axes.xaxis.set_major_locator(MultipleLocator(step))
        axes.xaxis.set_major_formatter(lambda difference, _: endpoint.signed(difference))
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.axvspan(-band, band, color=MUTED, alpha=0.15, linewidth=0)
    axes.axvline(0, color=MUTED, linewidth=1, linestyle="--")
    beside = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "va": "center"}
    for y, bar in enumerate(bars):
        shade, (low, mean, high), hint = PALETTE[bar.shade][0], bar.ends, hover(bar.hint)
        axes.annotate(bar.note, (1, y), (10, 0), color=PALETTE[bar.tone][0], weight="bold", **beside)
        for value, text in bar.dots:
            if abs(value) <= limit:
                axes.plot(value, y + 0.3, ".", color=shade, alpha=0.55, markersize=8, mew=0, gid=hover(text))
        if abs(mean) > limit:
            edge, arrow = (right, ">") if mean > 0 else (left, "<")
            axes.plot(edge, y, arrow, color=shade, markersize=10, clip_on=False, gid=hint)
            continue
        axes.plot([low, high], [y, y], color=shade, linewidth=2.5, gid=hint)
        axes.plot(mean, y, "o", color=shade, markersize=8, gid=hint)
        for end, edge, arrow in ((low, left, "<"), (high, right, ">")):
            if abs(end) > limit:
                axes.plot(edge, y, arrow, color=shade, markersize=7, clip_on=False)


# ---------------------------------------------------------------------------------------------------------- curves


FEWEST_POINTS = 5
"""Validations from which a curve says more than its end."""


def losses(table: Table, axis: str) -> str:
    """Validation loss against a budget as SVG, see `draw_losses`; '' where no arm has enough validations."""
    with picture(f"validation loss against {axis}") as (figure, axes):
        draw_losses(axes, table, axis)
        return svg(figure)


def draw_losses(axes: Any, table: Table, axis: str) -> None:
    """Mean validation loss of each arm against tokens, FLOPs or seconds, in a band of one standard deviation.

    The picture starts after the first validations, which are of untrained models and far above all others.
    """
    _label_budget(axes, axis, f"validation {LOSS}")
    curves = {place: curve for place, arm in enumerate(table.arms) if (curve := _mean_curve(arm, axis)) is not None}
    if not curves:
        return
    start = min(budgets[POINTS // 3] for budgets, _, _ in curves.values())
    lowest, highest = [], []
    for place, (budgets, mean, sd) in curves.items():
        shown, name = budgets >= start, hover(table.arms[place].name)
        low, high = (mean - sd)[shown], (mean + sd)[shown]
        axes.plot(budgets[shown], mean[shown], color=colour(place), linewidth=1.8, gid=name)
        axes.fill_between(budgets[shown], low, high, color=colour(place), alpha=0.18, linewidth=0)
        lowest.append(float((mean - sd).min()))
        highest.append(float(mean[POINTS // 3]))
    top = min(max(highest), 2 * float(np.median(highest)))
    pad = 0.04 * (top - min(lowest) or 1.0)
    axes.set_ylim(min(lowest) - pad, top + pad)


def _mean_curve(arm: Arm, axis: str) -> tuple[Any, Any, Any] | None:
    """Budgets, mean and standard deviation of an arm's validation losses; None below `FEWEST_POINTS` of them."""
    curves = [run.curves for run in arm.runs.values() if run.has_loss and len(run.curves.val) >= FEWEST_POINTS]
    if not curves:
        return None
    first = max(float(getattr(curve, axis)[1]) for curve in curves)
    last = min(float(getattr(curve, axis)[-1]) for curve in curves)
    budgets = np.linspace(first, last, POINTS)
    values = np.array([np.interp(budgets, getattr(curve, axis), curve.val) for curve in curves])
    return budgets, values.mean(axis=0), values.std(axis=0)


def _label_budget(axes: Any, axis: str, label: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set(xlabel=BUDGETS[axis], ylabel=label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.locator_params(nbins=6)
    axes.margins(x=0)


# ------------------------------------------------------------------------------------------------------------ rates


def learning_rates(table: Table) -> str:
    """Mean loss over the learning rate with each run, the best rate ringed."""
    if not any(arm.by_rate for arm in table.arms):
        return ""
    with picture("loss over the learning rate") as (figure, axes):
        axes.set(xscale="log", xlabel="learning rate", ylabel=f"validation {LOSS}")
        rates = sorted({rate for arm in table.arms for rate in arm.by_rate})
        axes.set_xticks(rates[:: max(1, len(rates) // 7)], [f"{rate:g}" for rate in rates[:: max(1, len(rates) // 7)]])
        axes.minorticks_off()
        for index, arm in enumerate(table.arms):
            means = {}
            for rate, runs in arm.by_rate.items():
                values = [run.figure("val_loss") for run in runs.values()]
                means[rate] = float(np.mean(values))
                for seed, value in zip(runs, values, strict=True):
                    text = hover(f"{arm.name}, {rate:g}, seed {seed}: {value:.4f}")
                    axes.plot(rate, value, ".", color=colour(index), alpha=0.5, gid=text)
            axes.plot(list(means), list(means.values()), color=colour(index), linewidth=1.8, gid=hover(arm.name))
            if arm.best_rate is not None:
                lowest = arm.mean("val_loss")
                text = hover(f"{arm.name}: best {arm.best_rate:.3g}")
                axes.plot(arm.best_rate, lowest, "o", mfc="none", mec=INK, markersize=13, gid=text)
        return svg(figure)


# -------------------------------------------------------------------------------------------------------- notebooks


def comparison_figure(table: Table) -> Figure:
    """Validation losses beside the differences to the baseline, where there is another arm."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    bars = _bars(table.rows)
    with matplotlib.rc_context({**STYLE, "font.size": 10, "axes.labelsize": 10, "legend.fontsize": 9}):
        figure = Figure(figsize=(12, max(3.6, 1.2 + 0.5 * len(bars))), layout="constrained")
        panels = figure.subplots(1, 2 if bars else 1, squeeze=False)[0]
        draw_losses(panels[0], table, "tokens")
        labels = [middle(arm.name, NAME_LETTERS) for arm in table.arms]
        panels[0].legend([Line2D([], [], color=colour(index)) for index in range(len(labels))], labels)
        if bars:
            draw_intervals(panels[1], bars, direction(table), table.endpoint.margin, table.endpoint)
    return figure
