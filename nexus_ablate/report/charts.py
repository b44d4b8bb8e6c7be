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

from nexus_ablate.comparison.load import Trained
from nexus_ablate.comparison.results import ArmResult, Comparison, Secondary, Stratum
from nexus_ablate.console import middle
from nexus_ablate.errors import printable
from nexus_ablate.report.arm_tables import TONES, bounds, difference_text
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
INK, MUTED, LINE, BAD = (PALETTE[name][0] for name in ("ink", "muted", "line", "bad"))
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
LINE_POINTS = 4000
"""Points of all lines of a picture together: a report of a thousand runs must still open."""
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


def _bar(row: ArmResult, index: int, label: str, note: str) -> Bar:
    """The difference of an arm; one that has none is a row with its note alone.

    Args:
        index: Of its row in the table, whose colour it has.
    """
    ends, dots = NOT_DRAWN, []
    if row.difference is not None:
        ends = (row.difference, row.difference, row.difference)
        if row.effect:
            ends = (row.effect.low, row.difference, row.effect.high)
        for seed, difference in zip(row.seeds, row.differences, strict=True):
            if difference is not None:
                dots.append((difference, f"{row.arm}, seed {seed}: {row.endpoint.signed(difference)}"))
    hint = f"{row.arm}: {difference_text(row)} {bounds(row)}"
    short = middle(printable(label), 2 * LABEL_LETTERS - 2).replace(",", ", ")
    lines = fill(short, LABEL_LETTERS, max_lines=2, placeholder="…")
    return Bar(lines, ends, note, TONES.get(row.word, "ink"), shade(index), dots, hint)


def _bars(rows: Sequence[ArmResult]) -> list[Bar]:
    return [_bar(row, index, row.arm, row.word) for index, row in enumerate(rows) if not row.is_baseline]


def forest(stratum: Stratum) -> str:
    """Each arm's mean difference with its simultaneous interval, a dot for each seed, the equivalence band."""
    return intervals(_bars(stratum.rows), direction(stratum), stratum.endpoint, stratum.endpoint.margin)


def secondary(other: Secondary) -> str:
    """Each arm's difference in a secondary endpoint with its interval."""
    bars = []
    for index, row in enumerate(other.rows):
        if row.difference is not None:
            bars.append(_bar(row, index, row.arm, difference_text(row)))
    return intervals(bars, other.endpoint.axis(), other.endpoint)


def strata(comparison: Comparison) -> str:
    """Each arm's difference in each stratum with its interval."""
    bars = []
    for index, change in enumerate(comparison.changes, start=1):
        for row in change.rows:
            if row is not None:
                bars.append(_bar(row, index, f"{row.stratum}: {row.arm}", row.word))
    if all(bar.ends is NOT_DRAWN for bar in bars):
        return ""
    return intervals(bars, direction(comparison.strata[0]), comparison.strata[0].endpoint)


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


def losses(stratum: Stratum, axis: str, whole: bool = False) -> str:
    """Validation loss against a budget as SVG, see `draw_losses`; '' where no run has two validations."""
    with picture(f"validation loss against {axis}{' from the start' * whole}") as (figure, axes):
        draw_losses(axes, stratum, axis, whole)
        return svg(figure)


def draw_losses(axes: Any, stratum: Stratum, axis: str, whole: bool = False) -> None:
    """Validation loss against tokens, FLOPs or seconds: one thin line per run that has two validations.

    The first validations are far above all others. Without `whole` the picture starts after them.
    """
    runs = []
    for index, arm in enumerate(stratum.arms):
        runs += [(index, run) for run in arm.runs.values() if _has_curve(run)]
    seen, ends = [], []
    for index, run in runs:
        budgets, values = getattr(run.curves, axis), run.curves.val
        points = min(len(values), _points(len(runs)))
        keep = np.unique(np.linspace(0, len(values) - 1, points).astype(int))  # the first and the last among them
        text = hover(f"{stratum.arms[index].label}, seed {run.seed}")
        axes.plot(budgets[keep], values[keep], color=colour(index), linewidth=1.1, alpha=0.75, gid=text)
        seen.append(values[keep][min(1, len(keep) - 2) :])  # the first is of the untrained model
        ends.append(values[-1])
    _label_budget(axes, axis, f"validation {LOSS}")
    ends = [end for end in ends if np.isfinite(end)]
    if whole or not ends:
        return
    values = np.concatenate(seen)
    values = values[np.isfinite(values)]
    low = float(values.min())
    usual = 2 * np.median(ends)
    top = max(float(np.quantile(values, 0.75)), max(end for end in ends if end < usual))
    pad = 0.03 * (top - low or 1)
    starts = [line.get_xdata()[line.get_ydata() <= top] for line in axes.lines]
    axes.set_xlim(left=min(float(start[0]) for start in starts if len(start)))
    axes.set_ylim(low - pad, top + pad)


def paired_differences(stratum: Stratum, axis: str) -> str:
    """Arm minus baseline at the same budget: one thin line per seed, a thick mean. Before the end both still learn."""
    base, *others = stratum.arms
    points = _points(max(1, sum(len(arm.runs) for arm in others)))
    last = []
    with picture(f"difference to the baseline against {axis}") as (figure, axes):
        _label_budget(axes, axis, "difference, nats per token")
        axes.axhline(0, color=MUTED, linewidth=1, linestyle="--")
        for index, (arm, row) in enumerate(zip(stratum.arms, stratum.rows, strict=True)):
            pairs = []
            for seed, difference in zip(row.seeds, row.differences, strict=True):
                run, base_run = arm.runs.get(seed), base.runs.get(seed)
                if difference is not None and run and base_run and _has_curve(run) and _has_curve(base_run):
                    pairs.append((run, base_run))
            if row.difference is None or not pairs:
                continue
            budgets = [getattr(run.curves, axis) for pair in pairs for run in pair]
            # before its second validation a run has none but that of the untrained model
            start, end = max(float(each[1]) for each in budgets), min(float(each[-1]) for each in budgets)
            if start >= end:
                continue
            grid = np.linspace(start, end, points)
            gaps = []
            for pair in pairs:
                loss, base_loss = (np.interp(grid, getattr(each.curves, axis), each.curves.val) for each in pair)
                gap = loss - base_loss
                name = hover(f"{arm.label}, seed {pair[0].seed}")
                axes.plot(grid, gap, color=colour(index), linewidth=0.8, alpha=0.35, gid=name)
                gaps.append(gap)
                last.append(float(gap[-1]))
            mean = np.mean(gaps, axis=0)
            axes.plot(grid, mean, color=colour(index), linewidth=2.2, gid=hover(arm.label))
        if last:
            usual = 8 * float(np.median(np.abs(last)))
            ends = [0.0, *(end for end in last if abs(end) <= usual)]
            pad = 0.15 * (max(ends) - min(ends)) or 1e-6
            axes.set_ylim(min(ends) - pad, max(ends) + pad)
        return svg(figure) if last else ""


def _has_curve(run: Trained) -> bool:
    """Whether it has two validations, so that there is a line."""
    return len(run.curves.val) > 1


def _points(lines: int) -> int:
    return min(80, max(12, LINE_POINTS // lines))


def _label_budget(axes: Any, axis: str, label: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set(xlabel=BUDGETS[axis], ylabel=label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.locator_params(nbins=6)
    axes.margins(x=0)


# ------------------------------------------------------------------------------------------------------------ rates


def learning_rates(stratum: Stratum) -> str:
    """Mean loss over the learning rate; the best rate ringed, in red where it lies at the edge.

    A thin line is of the tuning runs, a thick one of the runs that are judged.
    """
    tuned = []
    for index, row in enumerate(stratum.rows):
        if any(math.isfinite(value) for values in row.lr_curve.values() for value in values):
            tuned.append((index, row))
    if not tuned:
        return ""
    with picture("loss over the learning rate") as (figure, axes):
        axes.set(xscale="log", xlabel="learning rate", ylabel=f"validation {LOSS}")
        rates = sorted({rate for _, row in tuned for rate in row.lr_curve})
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        for index, row in tuned:
            judged = row.claim_curve or row.lr_curve
            for curve in (row.lr_curve, row.claim_curve):
                means = [float(np.mean(values)) for values in curve.values()]
                width = 2.2 if curve is judged else 0.8
                axes.plot(list(curve), means, color=colour(index), linewidth=width, gid=hover(row.arm))
                for rate, values in curve.items():
                    for value in filter(math.isfinite, values):
                        text = hover(f"{row.arm}, {rate:g}: {value:.4f}")
                        axes.plot(rate, value, ".", color=colour(index), gid=text)
            if (best := row.best_lr) is not None:
                place, ring = ("edge", BAD) if row.lr_edge else ("best", INK)
                nearest = min(judged, key=lambda rate: abs(math.log(rate / best)))
                text = hover(f"{row.arm}: best {best:g}, {place}")
                lowest = float(np.mean(judged[nearest]))
                axes.plot(best, lowest, "o", mfc="none", mec=ring, markersize=14, gid=text)
        return svg(figure)


# -------------------------------------------------------------------------------------------------------- notebooks


def comparison_figure(stratum: Stratum) -> Figure:
    """Validation losses, a line per run, beside the differences to the baseline where there is another arm."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    bars = _bars(stratum.rows)
    with matplotlib.rc_context({**STYLE, "font.size": 10, "axes.labelsize": 10, "legend.fontsize": 9}):
        figure = Figure(figsize=(12, max(3.6, 1.2 + 0.5 * len(bars))), layout="constrained")
        panels = figure.subplots(1, 2 if bars else 1, squeeze=False)[0]
        draw_losses(panels[0], stratum, "tokens")
        labels = [middle(arm.label, NAME_LETTERS) for arm in stratum.arms]
        panels[0].legend([Line2D([], [], color=colour(index)) for index in range(len(labels))], labels)
        if bars:
            draw_intervals(panels[1], bars, direction(stratum), stratum.endpoint.margin, stratum.endpoint)
    return figure
