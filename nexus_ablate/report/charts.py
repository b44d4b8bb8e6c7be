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
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nexus_ablate.comparison.compare import Comparison, Row, Table
from nexus_ablate.console import middle
from nexus_ablate.errors import printable
from nexus_ablate.report.columns import TONES, interval_text
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

WIDTH, HEIGHT = 430, 250
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
FEWEST_POINTS = 5
"""Validations from which a curve says more than its end."""
NAME_LETTERS = 32
LINE_LETTERS = 20
"""Of a name beside an interval."""
RATIO_STEPS = (1.02, 1.05, 1.1, 1.25, 1.5, 2, 5, 10, 100, 1000, 1e6)
"""Between the ticks of an axis of ratios."""
LOSS = "validation loss, nats per token"


@contextmanager
def picture(title: str, height: float = HEIGHT) -> Iterator[tuple[Figure, Any]]:
    """A figure with its axes, in the style of all pictures.

    Args:
        title: For screen readers.
        height: Points.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained", label=title)
        yield figure, figure.subplots()


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


class Bar(NamedTuple):
    """An arm in a picture of intervals: its label, and the place of its row in the table, whose colour it has."""

    label: str
    place: int
    row: Row


def _bars(rows: Sequence[Row], setting: str = "") -> list[Bar]:
    bars = []
    for place, row in enumerate(rows):
        if not row.is_baseline:
            short = middle(printable(setting + row.arm.name), 2 * LINE_LETTERS - 2).replace(",", ", ")
            bars.append(Bar(fill(short, LINE_LETTERS, max_lines=2, placeholder="…"), place, row))
    return bars


def forest(rows: Sequence[Row]) -> str:
    """Each arm's mean difference with its interval, a dot for each seed, and the band that does not matter, as SVG."""
    return _intervals(_bars(rows))


def settings(comparison: Comparison) -> str:
    """Each arm's difference in each setting with its interval, as SVG; '' where tables have unlike endpoints."""
    if len({table.endpoint.name for table in comparison.tables}) > 1:
        return ""
    bars = []
    for table in comparison.tables:
        bars += _bars(table.rows, f"{comparison.name_of(table)}: ")
    return _intervals(bars)


def _intervals(bars: Sequence[Bar]) -> str:
    if not bars:
        return ""
    lines = sum(1 + bar.label.count("\n") for bar in bars)
    with picture("differences with intervals", height=58 + 17 * lines + 8 * len(bars)) as (figure, axes):
        draw_intervals(axes, bars)
        return svg(figure)


def draw_intervals(axes: Any, bars: Sequence[Bar]) -> None:
    """Intervals below one another, each with its seeds, its verdict and the band in which a difference doesn't matter.

    What is beyond a few times the usual difference is an arrow at the edge, so that a distant arm does not squeeze all
    others together.
    """
    endpoint = bars[0].row.endpoint
    left, right = _ends(bars)
    axes.set(xlim=(left, right), ylim=(len(bars) - 0.4, -0.6), xlabel=middle(direction(endpoint), 50))
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.tick_params(length=0, pad=8)
    _label_differences(axes, endpoint, right - left)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.axvline(0, color=MUTED, linewidth=1, linestyle="--")
    for y, (_, place, row) in enumerate(bars):
        tone, shade, margin = PALETTE[TONES.get(row.word, "ink")][0], colour(place), row.endpoint.margin
        axes.fill_betweenx((y - 0.5, y + 0.5), -margin, margin, color=MUTED, alpha=0.15, linewidth=0)
        beside = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "va": "center"}
        axes.annotate(row.word, (1, y), (10, 0), color=tone, weight="bold", **beside)
        if row.effect is None:
            continue
        delta = row.effect.delta
        for seed, value in zip(row.seeds, row.differences.tolist(), strict=True):
            text = hover(f"{row.arm.name}, seed {seed}: {row.endpoint.signed(value)}")
            axes.plot(value, y + 0.3, ".", color=shade, alpha=0.55, markersize=8, mew=0, gid=text)
        text = hover(f"{row.arm.name}: {row.endpoint.signed(delta)} ({interval_text(row)})")
        low, high = row.effect.low, row.effect.high
        axes.plot(np.clip((low, high), left, right), (y, y), color=shade, linewidth=2.5, gid=text)
        axes.plot(delta, y, "o", color=shade, markersize=8, gid=text)
        for is_cut, end, arrow in ((low < left, left, "<"), (high > right, right, ">")):
            if is_cut:
                axes.plot(end, y, arrow, color=shade, markersize=8, clip_on=False, gid=text)


def _ends(bars: Sequence[Bar]) -> tuple[float, float]:
    """The ends of the x axis: of what is drawn, without what is far beyond the usual difference."""
    values, reaches, margins = [0.0], [], [0.0]
    for _, _, row in bars:
        margins.append(row.endpoint.margin)
        if row.effect is not None:
            values += [row.effect.low, row.effect.high, *row.differences.tolist()]
            reaches.append(max(abs(row.effect.low), abs(row.effect.high)))
    margin = max(margins)
    limit = max(8 * float(np.median(reaches or [1.0])), 3 * margin)
    near = [-margin, margin, *(value for value in values if abs(value) <= limit)]
    pad = 0.04 * (max(near) - min(near)) or 1e-6
    return min(near) - pad, max(near) + pad


def _label_differences(axes: Any, endpoint: Endpoint, width: float) -> None:
    """Few ticks, of an endpoint on a logarithmic scale at round ratios."""
    from matplotlib.ticker import MultipleLocator

    axes.locator_params(axis="x", nbins=4)
    if endpoint.log:
        steps = [math.log(ratio) for ratio in RATIO_STEPS]
        step = next((step for step in steps if width < 4 * step), width)
        axes.xaxis.set_major_locator(MultipleLocator(step))
        axes.xaxis.set_major_formatter(lambda difference, _: endpoint.signed(difference))


# ---------------------------------------------------------------------------------------------------------- curves


def losses(table: Table) -> str:
    """Validation losses over training as SVG, see `draw_losses`; '' where no arm has enough validations."""
    with picture("validation loss over training") as (figure, axes):
        draw_losses(axes, table)
        return svg(figure)


def draw_losses(axes: Any, table: Table) -> None:
    """Mean validation loss of each arm, in a band of one standard deviation over seeds.

    The picture starts after the first third, whose losses are of untrained models and far above all others.
    """
    from matplotlib.ticker import EngFormatter

    axes.set(xlabel="training tokens", ylabel=LOSS)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.locator_params(nbins=6)
    axes.margins(x=0)
    for place, arm in enumerate(table.arms):
        curves = [run.curves for run in arm.runs.values() if run.has_loss and len(run.curves.val) >= FEWEST_POINTS]
        if not curves:
            continue
        last = min(float(curve.tokens[-1]) for curve in curves)
        tokens = np.linspace(last / 3, last, POINTS)
        values = np.array([np.interp(tokens, curve.tokens, curve.val) for curve in curves])
        mean, sd = values.mean(axis=0), values.std(axis=0)
        axes.plot(tokens, mean, color=colour(place), linewidth=1.8, gid=hover(arm.name))
        axes.fill_between(tokens, mean - sd, mean + sd, color=colour(place), alpha=0.18, linewidth=0)


def learning_rates(table: Table) -> str:
    """Mean loss over the learning rate with each run, the best rate ringed, as SVG; '' without rates."""
    rates = sorted({rate for arm in table.arms for rate in arm.by_rate})
    if not rates:
        return ""
    with picture("loss over the learning rate") as (figure, axes):
        axes.set(xscale="log", xlabel="learning rate", ylabel=LOSS)
        labelled = rates[:: max(1, len(rates) // 4)]
        axes.set_xticks(labelled, [f"{rate:.2g}" for rate in labelled])
        axes.minorticks_off()
        for place, arm in enumerate(table.arms):
            means = []
            for rate, runs in arm.by_rate.items():
                values = [run.figure("val_loss") for run in runs.values()]
                means.append(float(np.mean(values)))
                axes.plot([rate] * len(values), values, ".", color=colour(place), alpha=0.5)
            axes.plot(list(arm.by_rate), means, color=colour(place), linewidth=1.8, gid=hover(arm.name))
            if arm.best_rate is not None:
                text = hover(f"{arm.name}: best {arm.best_rate:.3g}")
                best = (arm.best_rate, arm.mean("val_loss"))
                axes.plot(*best, "o", mfc="none", mec=colour(place), mew=2, markersize=13, gid=text)
        return svg(figure)


def comparison_figure(table: Table) -> Figure:
    """Validation losses beside the differences to the baseline, where there is another arm, for a notebook."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    bars = _bars(table.rows)
    with matplotlib.rc_context({**STYLE, "font.size": 10, "axes.labelsize": 10, "legend.fontsize": 9}):
        figure = Figure(figsize=(12, max(3.6, 1.2 + 0.5 * len(bars))), layout="constrained")
        panels = figure.subplots(1, 2 if bars else 1, squeeze=False)[0]
        draw_losses(panels[0], table)
        labels = [middle(arm.name, NAME_LETTERS) for arm in table.arms]
        panels[0].legend([Line2D([], [], color=colour(place)) for place in range(len(labels))], labels)
        if bars:
            draw_intervals(panels[1], bars)
    return figure
