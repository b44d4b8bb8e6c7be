"""The comparison as tidy pandas frames, for notebooks: the numbers of the report and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nexus_ablate.comparison.result import Comparison
from nexus_ablate.comparison.table import delta

if TYPE_CHECKING:
    import pandas


def arms_frame(comparison: Comparison) -> pandas.DataFrame:
    """A line an arm, the baseline first. Differences are to the baseline, negative is better; NaN: there is none.

    `low` and `high` are the interval that decided, simultaneous over the arms; `p` is adjusted for their number.
    Diagnostics and evaluations follow under their names, means over seeds.
    """
    import pandas

    lines = []
    for row in comparison.rows:
        effect = row.effect if row.verdict else None
        lines.append(
            {
                "arm": row.arm,
                "verdict": row.verdict.word if row.verdict else "baseline",
                "seeds": sum(value is not None for value in row.values),
                "loss": row.mean,
                "sd": row.sd,
                "delta": delta(row),
                "low": effect.low if effect else None,
                "high": effect.high if effect else None,
                "p": effect.p if effect else None,
                "seeds_to_decide": row.seeds_to_decide,
                "failed": len(row.failed),
                "waiting": row.waiting,
                "params": row.params,
                "tokens_per_second": row.tokens_per_second,
                "peak_memory_bytes": row.peak_memory_bytes,
                **{name: mean for name, (mean, _) in row.figures.items()},
            }
        )
    return pandas.DataFrame(lines)


def runs_frame(comparison: Comparison) -> pandas.DataFrame:
    """A line for each arm and seed of the baseline: `arm seed loss difference`; NaN: no result."""
    import pandas

    lines = [
        (row.arm, seed, loss, difference)
        for row in comparison.rows
        for seed, loss, difference in zip(row.seeds, row.values, row.differences, strict=True)
    ]
    frame = pandas.DataFrame(lines, columns=["arm", "seed", "loss", "difference"])
    return frame.astype({"loss": "float64", "difference": "float64"})


def curves_frame(comparison: Comparison) -> pandas.DataFrame:
    """A line for each validation of each run: `arm seed tokens flops seconds val_loss`."""
    import pandas

    lines = [
        (arm.label, seed, *point)
        for arm in comparison.arms
        for seed, run in arm.runs.items()
        for point in zip(run.curves.tokens, run.curves.flops, run.curves.seconds, run.curves.val, strict=True)
    ]
    return pandas.DataFrame(lines, columns=["arm", "seed", "tokens", "flops", "seconds", "val_loss"])
