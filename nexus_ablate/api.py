"""The notebook API: runs and comparisons with data frames and figures."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate.comparison import compare as comparison
from nexus_ablate.errors import PREEMPTED, printable, unknown
from nexus_ablate.runs import read_run, reading
from nexus_ablate.runs.lookup import run_at

NOTEBOOK_COLUMNS = 100
_BLOCK = re.compile(r"(?P<area>[^/]+)/block_(?P<block>\d{1,5})(?:/(?P<rest>.+))?")

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


class Comparison(comparison.Comparison):
    """A comparison with its data frames and its figure."""

    def frame(self) -> pandas.DataFrame:
        """One row per table, endpoint and arm with a column for every word and number; NaN: not measured.

        The endpoint of each run stands under `seed N`.
        """
        import pandas

        from nexus_ablate.report.columns import records

        return pandas.DataFrame([record for table in self.tables for record in records(table)])

    def curves_frame(self) -> pandas.DataFrame:
        """One row per validation of each run: `table arm seed tokens flops seconds val_loss`."""
        import pandas

        lines = []
        for table in self.tables:
            for arm in table.arms:
                for seed, run in arm.runs.items():
                    curves = run.curves
                    for point in zip(curves.tokens, curves.flops, curves.seconds, curves.val, strict=True):
                        lines.append((table.name, arm.name, seed, *point))
        return pandas.DataFrame(lines, columns=["table", "arm", "seed", "tokens", "flops", "seconds", "val_loss"])

    def figure(self, setting: str | None = None) -> Figure:
        """Losses by arm with their spread over seeds, and the paired differences with intervals, of one table.

        Args:
            setting: Its name. Default: that of the first table.

        Raises:
            ConfigError: There is no setting of this name.
        """
        from nexus_ablate.report.charts import comparison_figure

        if setting is None:
            return comparison_figure(self.tables[0])
        tables = {table.setting: table for table in self.tables}
        if setting not in tables:
            raise unknown("there is no setting of this name", setting, tables)
        return comparison_figure(tables[setting])

    def __repr__(self) -> str:
        """What `nexus-ablate compare` prints."""
        import io

        from rich.console import Console

        from nexus_ablate.report.terminal import show

        out = io.StringIO()
        show(self, Console(file=out, width=NOTEBOOK_COLUMNS, highlight=False))
        return out.getvalue().rstrip()

    def _repr_html_(self) -> str:
        """The answer, the table and the intervals of each table, in a frame of its own."""
        from html import escape

        from nexus_ablate.report.page import summary

        frames = []
        for table in self.tables:
            style = f"width:100%;height:{330 + 75 * len(table.rows)}px;border:0"
            frames.append(f'<iframe srcdoc="{escape(summary(table))}" style="{style}"></iframe>')
        return "".join(frames)


class RunRecord(reading.RunRecord):
    """A run with its data frames and its figure."""

    def metrics_frame(self) -> pandas.DataFrame:
        """metrics.jsonl with one row per logged step and one column per metric.

        NaN: it was not measured, or was not finite.
        """
        import pandas

        rows = self.metrics()
        frame = pandas.DataFrame(rows, columns=None if rows else list(reading.FIRST_KEYS))
        return frame.drop(columns="nonfinite", errors="ignore")

    def probes_frame(self) -> pandas.DataFrame:
        """probes.jsonl with one row per number: `step tokens flops seconds name block head value`.

        `name` is without the block: `act/block_003/resid/kurtosis_token` is `act/resid/kurtosis_token` of block 3.
        `block` is missing where a number is the whole model's, `head` where it is the whole block's; of a list that has
        no heads (`top_magnitudes`) `head` is the place in it.
        """
        import pandas

        lines: list[tuple[Any, ...]] = []
        for row in self.probes():
            point = [row[key] for key in reading.FIRST_KEYS]
            for full, value in row.items():
                if full in reading.FIRST_KEYS or full == "nonfinite":
                    continue
                name, block = full, None
                if match := _BLOCK.fullmatch(full):
                    name, block = "/".join(filter(None, (match["area"], match["rest"]))), int(match["block"])
                if isinstance(value, list):
                    lines += [(*point, name, block, head, item) for head, item in enumerate(value)]
                elif value is None or isinstance(value, int | float):
                    lines.append((*point, name, block, None, value))
        frame = pandas.DataFrame(lines, columns=[*reading.FIRST_KEYS, "name", "block", "head", "value"])
        return frame.astype({"block": "Int64", "head": "Int64", "value": "float64"})

    def __repr__(self) -> str:
        """State, result and folder of the run."""
        return "\n".join(f"{name:<14} {fact}" for name, fact in self._facts().items())

    def _repr_html_(self) -> str:
        """The same as a table."""
        from html import escape

        rows = (f"<tr><th>{escape(name)}</th><td>{escape(fact)}</td></tr>" for name, fact in self._facts().items())
        return f"<table>{''.join(rows)}</table>"

    def _facts(self) -> dict[str, str]:
        from nexus_ablate.training.display import result_facts

        facts = {"run": f"{self.study} / {self.arm} / seed {self.seed}", "state": self.state, "path": str(self.path)}
        if self.summary is not None:
            facts |= result_facts(self.summary)
        return {name: printable(fact, 4096) for name, fact in facts.items()}

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
    """Compare every run in the given directories with a baseline; see `comparison.compare`."""
    return Comparison(**vars(comparison.compare(dirs, baseline, allow)))


def run_study(*words: str, workers: int | str = "auto") -> Comparison:
    """Train what is missing of a study on this machine and compare its runs.

    Args:
        words: As after `nexus-ablate study`: a study's name or file, then KEY=VALUE.
        workers: Runs at the same time. `auto`: one per GPU, or per core.

    Raises:
        UserError: The study can't be run, or none of its runs has a result.
        KeyboardInterrupt: A signal stopped it. The same call goes on.
    """
    from nexus_ablate.launch.launch import launch
    from nexus_ablate.launch.local import LocalPool
    from nexus_ablate.study.definition import read_study, runs_dir_of

    study, overrides = read_study(list(words))
    if launch(study, overrides, LocalPool(workers)) == PREEMPTED:
        raise KeyboardInterrupt
    return compare(runs_dir_of(overrides) / study.name)


def load_run(run: str | Path) -> RunRecord:
    """Load one run: its status, configuration, summary, rows and data frames, and `figure()`.

    Args:
        run: Its directory, the start of its id, or `last`, as after `nexus-ablate show`.

    Raises:
        UserError: There is no such run, or one of its files is damaged.
    """
    return RunRecord(**vars(read_run(run_at(str(run), "show"))))
