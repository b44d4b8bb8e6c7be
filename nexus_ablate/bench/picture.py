"""A picture of what the options of an axis cost."""

from __future__ import annotations

from pathlib import Path

from nexus_ablate.bench.options import Bench, OptionCost
from nexus_ablate.console import several
from nexus_ablate.report.run_picture import save_figure


def draw(bench: Bench, path: Path) -> None:
    """One panel per place: forward and backward time of each option as stacked bars, and its ratio with quartiles."""
    from matplotlib.figure import Figure

    places = [p for p in ("alone", "block") if any(c.place == p for c in bench.costs)]
    modes = [m for m in ("eager", "compiled") if any(c.mode == m for c in bench.costs)]
    options = list(dict.fromkeys(cost.option for cost in bench.costs))
    height = 1.2 + 0.24 * len(options) * len(modes)
    figure = Figure(figsize=(4.6 * len(places), height), layout="constrained")
    for axes, place in zip(figure.subplots(1, len(places), squeeze=False)[0], places, strict=True):
        shown = [
            c
            for option in options
            for m in modes
            for c in bench.costs
            if (c.option, c.place, c.mode) == (option, place, m)
        ]
        rows = range(len(shown))
        forward, backward = ([1000 * c.seconds[p].median for c in shown] for p in ("forward", "backward"))
        axes.barh(rows, forward, color="#4477aa", label="forward")
        axes.barh(rows, backward, left=forward, color="#88bbdd", label="backward")
        for row, cost in zip(rows, shown, strict=True):
            axes.annotate(
                _ratio(cost),
                (forward[row] + backward[row], row),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
        axes.set_yticks(rows, [c.option if len(modes) == 1 else f"{c.option}, {c.mode}" for c in shown], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("ms", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.margins(x=0.3)
        subject = bench.layer if place == "alone" else "the block around it"
        axes.set_title(subject, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=7, frameon=False, loc="lower right")
    figure.suptitle(f"{bench.axis}: time, and times {bench.baseline} (quartiles); {described(bench)}", fontsize=8)
    save_figure(figure, path)


def described(bench: Bench) -> str:
    """Shape and machine in a few words."""
    shape = f"{bench.shape['batch']} x {bench.shape['context']} tokens, d_model {bench.shape['d_model']}"
    return f"{shape}, {bench.precision}, {bench.device}, {several(bench.threads, 'thread')}"


def _ratio(cost: OptionCost) -> str:
    ratio = cost.ratio["both"]
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
