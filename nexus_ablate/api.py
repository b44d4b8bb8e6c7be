"""The notebook API: runs and comparisons with data frames and figures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nexus_ablate.comparison import result
from nexus_ablate.runs import read_run
from nexus_ablate.runs import record as run_record

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


class Comparison(result.Comparison):
    """A comparison with its data frames and its figure."""

    def frame(self, rows: Literal["arms", "runs", "curves"] = "arms") -> pandas.DataFrame:
        """One row per arm with verdict, difference and costs; or per arm and seed; or per validation of each run."""
        from nexus_ablate.report.frames import arms_frame, curves_frame, runs_frame

        return {"arms": arms_frame, "runs": runs_frame, "curves": curves_frame}[rows](self)

    def figure(self) -> Figure:
        """Losses by arm with their spread over seeds, and the paired differences with intervals."""
        from nexus_ablate.report.figure import comparison_figure

        return comparison_figure(self)


class RunRecord(run_record.RunRecord):
    """A run with its data frames and its figure."""

    def metrics_frame(self) -> pandas.DataFrame:
        """metrics.jsonl with one row per logged step and one column per metric; NaN where it wasn't measured."""
        from nexus_ablate.report.frames import metrics_frame

        return metrics_frame(self.metrics())

    def probes_frame(self) -> pandas.DataFrame:
        """probes.jsonl with one row per number: `step tokens flops seconds name block head value`."""
        from nexus_ablate.report.frames import probes_frame

        return probes_frame(self.probes())

    def figure(self) -> Figure:
        """The picture of `nexus-ablate show` as a matplotlib figure.

        Raises:
            UserError: The run has no rows yet.
        """
        from nexus_ablate.report.run_picture import run_figure

        return run_figure(self)


def compare(
    dirs: str | Path | Iterable[str | Path], baseline: str | None = None, allow: Iterable[str] = ()
) -> Comparison:
    """Compare every run in the given directories with a baseline; see `comparison.result.compare`."""
    return Comparison(**vars(result.compare(dirs, baseline, allow)))


def load_run(path: str | Path) -> RunRecord:
    """Load one run: its status, configuration, summary, rows and data frames, and `figure()`.

    Raises:
        UserError: The path is not a run, or one of its files is damaged.
    """
    return RunRecord(**vars(read_run(Path(path))))
