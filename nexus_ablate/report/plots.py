"""The pictures of a report as SVG texts. They show the numbers of the comparison and compute no new ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.curves import spikes
from nexus_ablate.comparison.findings import Across
from nexus_ablate.comparison.load import Trained
from nexus_ablate.comparison.result import Comparison, Secondary
from nexus_ablate.comparison.scaling import Scaling
from nexus_ablate.comparison.statistics import Array
from nexus_ablate.console import middle
from nexus_ablate.report.svg import LETTER, Frame, colour, hover, plain, tick_text
from nexus_ablate.report.table import bounds, compact, delta, direction, interval_of

LINE_POINTS = 4000
"""Points of all lines of a picture together: a report of a thousand runs must still open."""
NAME_LETTERS = 32
NAMES_BESIDE = 184
"""Units right of a plot for the names of its lines."""
MOST_FACTOR = 64.0
"""Compute multipliers beyond this, or below its inverse, are drawn at the edge."""
BUDGETS = {"tokens": "training tokens", "flops": "training FLOPs", "seconds": "seconds of training"}


@dataclass(frozen=True)
class Bar:
    """One interval of a picture of intervals: a name over it, its ends, the mean, and a dot per seed.

    Attributes:
        dots: Value and hover text per seed.
        text: What is shown when the pointer rests on the bar.
        note: Words to the right of the name, such as the verdict.
    """

    name: str
    low: float
    mean: float
    high: float
    stroke: str
    text: str
    note: str = ""
    dots: tuple[tuple[float, str], ...] = ()


def intervals(bars: Sequence[Bar], axis: str, band: float, limit: float, title: str) -> str:
    """Intervals below one another, each under its name, with zero and the band in which a difference doesn't matter.

    Args:
        axis: The label of the x axis.
        band: Half the width of the band; 0: none.
        limit: Largest distance from zero that is drawn; farther means become arrows.
        title: For screen readers.
    """
    if not bars:
        return ""
    ends = [band, -band]
    ends += [
        end for bar in bars for end in (bar.low, bar.mean, bar.high, *(d for d, _ in bar.dots)) if abs(end) <= limit
    ]
    pad = 0.04 * (max(ends) - min(ends)) or 1e-6
    frame = Frame((min(ends) - pad, max(ends) + pad), (-0.4, len(bars) - 0.4), height=62 + 40 * len(bars), left=14)
    left, right = frame.x(-band), frame.x(band)
    frame.add("rect", x=left, y=frame.top, width=right - left, height=frame.bottom - frame.top, class_="band")
    frame.axes(axis, y_ticks=False)
    frame.add("line", x1=frame.x(0), x2=frame.x(0), y1=frame.top, y2=frame.bottom, class_="zero")
    for number, bar in enumerate(bars):
        y = len(bars) - 1 - number
        frame.words(frame.left, frame.y(y) - 9, _short(bar.name), class_="over")
        frame.words(frame.right, frame.y(y) - 9, bar.note, "end", "over")
        for value, text in bar.dots:
            if frame.x_range[0] <= value <= frame.x_range[1]:
                frame.dot(value, y - 0.22, bar.stroke, 2.4, text, "seed")
        if abs(bar.mean) > limit:
            side, at = ("end", frame.right) if bar.mean > 0 else ("start", frame.left)
            frame.words(at, frame.y(y) + 6, f"{bar.mean:+.3f} →" if bar.mean > 0 else f"← {bar.mean:+.3f}", side)
        else:
            inside = [min(max(end, frame.x_range[0]), frame.x_range[1]) for end in (bar.low, bar.high)]
            frame.line(inside, [y, y], bar.stroke, "interval", bar.text)
            frame.dot(bar.mean, y, bar.stroke, 4.5, bar.text)
    return frame.svg(title)


def forest(comparison: Comparison) -> str:
    """Each arm's mean difference with its simultaneous interval, a dot for each seed, the equivalence band."""
    bars = []
    for i, row in enumerate(comparison.rows):
        centre = delta(row)
        if i == 0 or centre is None:
            continue
        low, high = (row.effect.low, row.effect.high) if row.effect else (centre, centre)
        text = f"{row.arm}: {row.endpoint.signed(centre)} {interval_of(row)}"
        dots = tuple(
            (d, f"{row.arm}, seed {seed}: {row.endpoint.signed(d)}")
            for seed, d in zip(row.seeds, row.differences, strict=True)
            if d is not None
        )
        note = row.verdict.word if row.verdict else ""
        bars.append(Bar(row.arm, low, centre, high, colour(i), text, note, dots))
    label = f"difference to {_short(comparison.baseline)}, {direction(comparison)}"
    title = "differences to the baseline with intervals"
    return intervals(bars, label, comparison.delta_min, _reach(comparison), title)


def secondary(comparison: Comparison, other: Secondary) -> str:
    """Each arm's difference in a secondary endpoint with its interval; on a logarithmic scale, as its logarithm."""
    bars = [
        Bar(
            row.arm,
            row.effect.low,
            row.effect.delta,
            row.effect.high,
            colour(i),
            f"{row.arm}: {other.endpoint.signed(row.effect.delta)} {bounds(other.endpoint, row.effect)}",
            other.endpoint.signed(row.effect.delta),
        )
        for i, row in enumerate(other.rows)
        if row.effect
    ]
    unit = "natural logarithm of the ratio" if other.endpoint.log else other.endpoint.axis()
    return intervals(
        bars,
        f"difference, {unit}",
        0.0,
        _farthest(bars),
        f"differences in {other.endpoint.name} with intervals",
    )


def strata(names: Sequence[str], across: Sequence[Across]) -> str:
    """Each arm's difference in each stratum with its interval."""
    bars = [
        Bar(
            f"{one.arm} in {name}",
            row.effect.low,
            row.effect.delta,
            row.effect.high,
            colour(i + 1),
            f"{one.arm} in {name}: {row.endpoint.signed(row.effect.delta)} {interval_of(row)}",
            row.verdict.word if row.verdict else "",
        )
        for i, one in enumerate(across)
        for name, row in zip(names, one.rows, strict=True)
        if row is not None and row.effect
    ]
    return intervals(bars, "difference to the baseline", 0.0, _farthest(bars), "differences by stratum with intervals")


def multipliers(scaling: Sequence[Scaling], across: Sequence[Across]) -> str:
    """Each arm's compute multiplier with its interval against the compute of the baseline, both logarithmic."""
    numbers = {one.arm: i + 1 for i, one in enumerate(across)}
    shown = [end for one in scaling for cell in one.multipliers for end in (cell.low, cell.mean, cell.high)]
    shown = [end for end in shown if end is not None and math.isfinite(end)]
    low, high = max(MOST_FACTOR**-1, min(shown, default=1.0)), min(MOST_FACTOR, max(shown, default=1.0))
    compute = scaling[0].compute
    ends = (math.log2(min(low, 0.9)) - 0.1, math.log2(max(high, 1.1)) + 0.1)
    frame = Frame((compute[0] / 1.5, compute[-1] * 1.5), ends, height=340, right=NAMES_BESIDE, log_x=True)
    frame.axes("training FLOPs of the baseline", "compute multiplier", y_ticks=False)
    for power in range(math.ceil(frame.y_range[0]), math.floor(frame.y_range[1]) + 1):
        at = frame.y(power)
        frame.add("line", x1=frame.left, x2=frame.right, y1=at, y2=at, class_="zero" if power == 0 else "grid")
        frame.words(frame.left - 6, at + 4, f"x{2.0**power:.4g}", "end")
    placed: list[tuple[float, float, float]] = []
    for i, one in enumerate(scaling):
        stroke, shift = colour(numbers[one.arm]), 1.06 ** (i - (len(scaling) - 1) / 2)  # intervals side by side
        heights = [_log2(cell.mean, low, high) for cell in one.multipliers]
        frame.line([c * shift for c in compute], heights, stroke, "mean", f"{one.arm}: {one.outcome}")
        for c, at, cell in zip(compute, heights, one.multipliers, strict=True):
            ends = [_log2(end, low, high) for end in (cell.low, cell.high)]
            text = f"{one.arm} at {tick_text(c, c)} FLOPs: x{cell.mean:.3g} [x{cell.low:.3g}, x{cell.high:.3g}]"
            frame.line([c * shift] * 2, ends, stroke, "mean", text)
            frame.dot(c * shift, at, stroke, 3.5, text)
        name = _short(one.arm, int(NAMES_BESIDE / LETTER) - 1)
        if at := _free(placed, 0, 1, frame.y(heights[-1]) + 4, frame.top + 12, frame.bottom):
            placed.append((0, 1, at))
            frame.add("text", plain(name), x=frame.right + 6, y=at, class_="over", style=f"fill:{stroke}")
    return frame.svg("compute multipliers against compute")


def _log2(factor: float | None, low: float, high: float) -> float:
    return math.nan if factor is None or math.isnan(factor) else math.log2(min(max(factor, low), high))


def slopes(comparison: Comparison) -> str:
    """The baseline's loss and the arm's at each seed, joined: lines that all lean one way show an effect."""
    rows = [row for row in comparison.rows[1:] if delta(row) is not None]
    base = comparison.rows[0]
    values = [v for row in (base, *rows) for v in row.values if v is not None]
    if not rows or not values:
        return ""
    low, high = min(values), max(values)
    pad = 0.05 * (high - low)
    frame = Frame((-0.2, len(rows) - 0.3), (low - pad, high + pad), height=240, bottom=10)
    frame.axes("", comparison.endpoint.unit or comparison.endpoint.name, x_ticks=False)
    for i, row in enumerate(rows):
        stroke = colour(comparison.rows.index(row))
        for seed, value, base_value in zip(row.seeds, row.values, base.values, strict=True):
            if value is not None and base_value is not None:
                text = f"{row.arm}, seed {seed}: {row.endpoint.value(base_value)} to {row.endpoint.value(value)}"
                frame.line([i, i + 0.5], [base_value, value], stroke, "pair", text)
                frame.dot(i, base_value, "var(--muted)", 2.5)
                frame.dot(i + 0.5, value, stroke, 2.5, text)
    return frame.svg("losses of each pair of runs")


def losses(comparison: Comparison, axis: str, whole: bool = False) -> str:
    """Validation loss against tokens, FLOPs or seconds: one thin line per run.

    The first validations are far above all others. Without `whole` the picture starts after them.
    """
    runs = [
        (i, arm, run) for i, arm in enumerate(comparison.arms) for run in arm.runs.values() if len(run.curves.val) > 1
    ]
    if not runs:
        return ""
    points = _points(len(runs))
    lines = [(i, arm, run, *_thinned(getattr(run.curves, axis), run.curves.val, points)) for i, arm, run in runs]
    ends = [run.curves.val[-1] for _, _, run in runs if np.isfinite(run.curves.val[-1])]
    seen = np.concatenate([y for *_, y in lines])
    seen = seen[np.isfinite(seen)]
    if not len(seen) or not ends:
        return ""
    top = float(seen.max() if whole else min(seen.max(), max(np.quantile(seen, 0.75), max(_inner(ends)))))
    starts = [float(x[y <= top][0]) for *_, x, y in lines if (y <= top).any()]
    first, last = 0.0 if whole else min(starts), max(float(x[-1]) for *_, x, _ in lines)
    frame = Frame((first, last), (float(seen.min()), top))
    frame.axes(BUDGETS[axis], "validation loss, nats per token")
    for i, arm, run, x, y in lines:
        frame.line(x, np.where(y <= top, y, np.nan), colour(i), "thin", f"{arm.label}, seed {run.seed}")
    return frame.svg(f"validation loss against {axis}")


def paired_differences(comparison: Comparison, axis: str) -> str:
    """Arm minus baseline at the same budget: one thin line per seed, a thick mean. Before the end both still learn."""
    base = comparison.arms[0]
    count = sum(len(arm.runs) for arm in comparison.arms[1:])
    lines: list[tuple[int, Arm, Array, list[tuple[Trained, Array]]]] = []
    for i, arm in enumerate(comparison.arms):
        if delta(comparison.rows[i]) is None:
            continue
        pairs = [(run, base.runs[seed]) for seed, run in arm.runs.items() if seed in base.runs]
        pairs = [pair for pair in pairs if all(len(run.curves.val) > 1 for run in pair)]
        if pairs:
            end = min(float(getattr(run.curves, axis)[-1]) for pair in pairs for run in pair)
            grid = np.linspace(0.1 * end, end, _points(max(count, 1)))
            lines.append((i, arm, grid, [(arm_run, _gap(arm_run, twin, axis, grid)) for arm_run, twin in pairs]))
    if not lines:
        return ""
    last = [float(gap[-1]) for *_, gaps in lines for _, gap in gaps]
    judged = comparison.endpoint.name == "val_loss"
    limit = _reach(comparison) if judged else 8 * float(np.median(np.abs(last)))
    ends = [end for end in last if abs(end) <= limit]
    ends += [comparison.delta_min, -comparison.delta_min] if judged else [0.0]
    pad = 0.15 * (max(ends) - min(ends)) or 1e-6
    low, high = min(ends) - pad, max(ends) + pad
    frame = Frame(
        (min(float(grid[0]) for _, _, grid, _ in lines), max(float(g[-1]) for _, _, g, _ in lines)), (low, high)
    )
    frame.axes(BUDGETS[axis], "difference, nats per token")
    frame.add("line", x1=frame.left, x2=frame.right, y1=frame.y(0), y2=frame.y(0), class_="zero")
    for i, arm, grid, gaps in lines:
        inside = [np.where((gap >= low) & (gap <= high), gap, np.nan) for _, gap in gaps]
        for (run, _), gap in zip(gaps, inside, strict=True):
            frame.line(grid, gap, colour(i), "faint", f"{arm.label}, seed {run.seed}")
        mean = np.mean([gap for _, gap in gaps], axis=0)
        frame.line(grid, np.where((mean >= low) & (mean <= high), mean, np.nan), colour(i), "mean", arm.label)
    return frame.svg(f"difference to the baseline against {axis}")


def stability(comparison: Comparison) -> str:
    """One line per run, with a tick at each spike of the training loss and a cross where it failed to train.

    '' where there is neither.
    """
    runs = [(i, row, arm, run) for i, (row, arm) in enumerate(zip(comparison.rows, comparison.arms, strict=True))
            for run in arm.runs.values() if len(run.curves.train)]  # fmt: skip
    spiked = [np.nonzero(spikes(run.curves.train))[0] for *_, run in runs]
    if not any(map(len, spiked)) and not any(run.seed in row.failed for _, row, _, run in runs):
        return ""
    height = 6 if len(runs) < 200 else 2
    longest = max(len(run.curves.train) for *_, run in runs)
    arms = len({i for i, *_ in runs})
    frame = Frame((0, longest), (0, 1), height=40 + height * len(runs) + 28 * arms, left=14)
    at, before = float(frame.top), -1
    for (i, row, arm, run), places in zip(runs, spiked, strict=True):
        if i != before:
            at += 22
            frame.words(frame.left, at - 6, _short(arm.label))
        before = i
        end = frame.x(len(run.curves.train))
        frame.add("line", x1=frame.left, x2=end, y1=at, y2=at, class_="strip", style=f"stroke:{colour(i)}")
        for spike in places:
            frame.add("line", x1=frame.x(float(spike)), x2=frame.x(float(spike)), y1=at - 3, y2=at + 3, class_="spike")
        if run.seed in row.failed:
            title = f"{arm.label}, seed {run.seed}: {row.failed[run.seed]}"
            frame.add("text", "×" + hover(title), x=end + 2, y=at + 4, class_="broken")
        at += height
    frame.words((frame.left + frame.right) / 2, frame.height - 6, "logged steps", "middle", "label")
    return frame.svg("spikes and divergences of each run")


def pareto(comparison: Comparison) -> str:
    """Loss against speed; lower right is better."""
    points = [(i, r.mean, r.tokens_per_second, r.sd) for i, r in enumerate(comparison.rows)
             if r.mean is not None and r.tokens_per_second]  # fmt: skip
    if len(points) < 2:
        return ""
    speeds = [speed for _, _, speed, _ in points]
    means = [mean + sign * (sd or 0.0) for _, mean, _, sd in points for sign in (-1, 1)]
    pad_x = 0.15 * (max(speeds) - min(speeds)) or 0.05 * speeds[0]
    pad_y = 0.12 * (max(means) - min(means)) or 0.01 * means[0]
    frame = Frame((min(speeds) - pad_x, max(speeds) + pad_x), (min(means) - pad_y, max(means) + pad_y), height=340)
    frame.axes("tokens per second", comparison.endpoint.unit or comparison.endpoint.name)
    placed: list[tuple[float, float, float]] = []
    for i, mean, speed, sd in sorted(points, key=lambda item: -item[1]):
        name = comparison.rows[i].arm
        if sd:
            frame.line([speed, speed], [mean - sd, mean + sd], colour(i), "thin")
        frame.dot(speed, mean, colour(i), 4.5, f"{name}: {mean:.4f} at {compact(speed)} tokens/s")
        x, text = frame.x(speed), _short(name, 20)
        width, side = LETTER * len(text), "end" if x > (frame.left + frame.right) / 2 else "start"
        left = x - 8 - width if side == "end" else x + 8
        if at := _free(placed, left, left + width, frame.y(mean) + 4, frame.top + 12, frame.bottom - 4):
            placed.append((left, left + width, at))
            frame.words(x + (-8 if side == "end" else 8), at, text, side)
    return frame.svg("loss against speed")


def _free(
    placed: Sequence[tuple[float, float, float]], left: float, right: float, at: float, top: float, bottom: float
):
    """The height nearest to `at` where a label touches none of those placed (left, right, height); None: nowhere."""
    for step in range(0, 400, 2):
        for y in (at + step, at - step):
            if top <= y <= bottom and all(
                left > end or right < start or abs(y - height) >= 18 for start, end, height in placed
            ):
                return y
    return None


def learning_rates(comparison: Comparison) -> str:
    """Mean tuning loss over the learning rate; the best rate ringed, in red where it lies at the edge."""
    rows = [(i, row) for i, row in enumerate(comparison.rows) if row.lr_curve]
    points = [(lr, v) for _, row in rows for lr, vs in row.lr_curve.items() for v in vs if math.isfinite(v)]
    if not points:
        return ""
    rates, values = [lr for lr, _ in points], [v for _, v in points]
    pad = 0.05 * (max(values) - min(values))
    frame = Frame((min(rates) * 0.8, max(rates) * 1.25), (min(values) - pad, max(values) + pad), log_x=True)
    frame.axes("learning rate", "validation loss, nats per token")
    for i, row in rows:
        means = {lr: float(np.mean(vs)) for lr, vs in row.lr_curve.items()}
        frame.line(list(means), list(means.values()), colour(i), "mean", row.arm)
        for lr, vs in row.lr_curve.items():
            for v in vs:
                if math.isfinite(v):
                    frame.dot(lr, v, colour(i), 2.5, f"{row.arm}, {tick_text(lr, lr)}: {v:.4f}")
        if row.best_lr is not None:
            edge = "edge" if row.lr_edge else "best"
            frame.dot(row.best_lr, means[row.best_lr], "none", 7, f"{row.arm}: best {row.best_lr:g}, {edge}", edge)
    return frame.svg("tuning loss over the learning rate")


def _farthest(bars: Sequence[Bar]) -> float:
    """A limit that leaves out what is far beyond most of the intervals."""
    ends = [max(abs(bar.low), abs(bar.high)) for bar in bars]
    return 8 * float(np.median(ends)) if ends else 0.0


def _gap(arm_run: Trained, twin: Trained, axis: str, grid: Array) -> Array:
    mine, base = (np.interp(grid, getattr(run.curves, axis), run.curves.val) for run in (arm_run, twin))
    return mine - base


def _thinned(x: Array, y: Array, points: int) -> tuple[Array, Array]:
    """At most about `points` of a line, the first and the last among them."""
    keep = np.unique(np.linspace(0, len(x) - 1, min(len(x), points)).astype(int))
    return x[keep], y[keep]


def _reach(comparison: Comparison) -> float:
    """The largest difference that is drawn, so that one distant arm does not squeeze all others together."""
    ends = [max(abs(row.effect.low), abs(row.effect.high)) for row in comparison.rows if row.effect]
    return max(8 * float(np.median(ends or [0])), 3 * comparison.delta_min)


def _points(lines: int) -> int:
    return min(80, max(12, LINE_POINTS // lines))


def _inner(values: Iterable[float]) -> list[float]:
    """The values without outliers, which lie further from the median than ten times the interquartile range."""
    values = list(values)
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    reach = 10 * (high - low) or math.inf
    return [v for v in values if abs(v - middle) <= reach]


def _short(name: str, letters: int = NAME_LETTERS) -> str:
    return middle(name, letters)
