"""Upload one run to W&B: open it, send the rows it doesn't have, close it. Nothing is sent twice."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from nexus_ablate.report.run_picture import HEAT_MAPS, heat_maps
from nexus_ablate.runs import SETTLED, RunRecord, atomic_write_json, read_jsonl
from nexus_ablate.runs.formats import WandbRun
from nexus_ablate.runs.ownership import release, take_lock
from nexus_ablate.runs.reading import leaves, parse_row, read_lines
from nexus_ablate.track.account import set_up
from nexus_ablate.track.run_on_wandb import PLACE_FILE, config_of

X_AXIS = "tokens"


@contextmanager
def only_sender(run_dir: Path) -> Iterator[None]:
    """Inside, no other process sends the run: W&B would get rows and pictures twice, and one would end it for both.

    Raises:
        AlreadyRunning: Another process sends it.
    """
    lock = take_lock(run_dir, "is being sent to W&B", "wandb.lock")
    try:
        yield
    finally:
        release(lock)


class Upload:
    """An open W&B run.

    Attributes:
        url: The URL of its page; '' if offline.
        before: Number of rows of metrics.jsonl that W&B had when it was opened.
        sent: Number of rows sent since.

    Args:
        record: The run, whose rows are sent.
        place: The destination; saved in the run directory, so that later uploads resume the same W&B run.
        settings: From `settings_of` the same run and place.
    """

    def __init__(self, record: RunRecord, place: WandbRun, settings: Mapping[str, Any]) -> None:
        config = config_of(record)
        self._run_dir = record.path
        file = record.path / PLACE_FILE
        if not file.exists():
            # The id alone, before W&B is asked: a killed upload is continued and not repeated. The destination follows
            # when W&B has accepted the run; one that it refuses changes nothing.
            atomic_write_json(file, asdict(WandbRun(place.id)))
        self._run = begin(settings, config)
        self.url = self._run.url or ""
        self.before = self.sent = 0
        # `wandb agent` sets id, project and entity in spite of the settings.
        entity = self._run.entity or place.entity
        atomic_write_json(file, asdict(WandbRun(self._run.id, self._run.project, entity, self.url)))
        self._run.define_metric("*", step_metric=X_AXIS)
        self._read = 0  # bytes of metrics.jsonl that have been read
        self._next = self._run.starting_step  # the first step that W&B does not have

    def bring(self) -> None:
        """Send the rows of metrics.jsonl that W&B doesn't have. A half-written line is sent next time.

        The training step is W&B's step, so W&B keeps rows in order and drops repeated ones.

        Raises:
            UserError: The log is damaged.
        """
        path = self._run_dir / "metrics.jsonl"
        for chunk in read_lines(path, self._read):
            for line in chunk.splitlines(keepends=True):
                row = parse_row(path, line)
                self._read += len(line)
                if row["step"] < self._next:
                    self.before += 1
                    continue
                numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
                # Without them W&B's last value would be an earlier one.
                numbers |= dict.fromkeys(row.get("nonfinite", ()), math.nan)
                self._run.log(numbers, step=row["step"])
                self._next, self.sent = row["step"] + 1, self.sent + 1

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        """Send the remaining rows, the heat maps of the probe, and the summary; then end the W&B run.

        Raises:
            UserError: A log is damaged.
            Exception: W&B did not take it in time.
        """
        self.bring()
        # Pictures close the last row, and may take up a step, after which W&B would refuse rows.
        closed = status in SETTLED and self._send_blocks()
        if self.sent and not closed:  # an open row would replace values of the summary
            self._run.log({}, commit=True)
        self._run.summary.update(_figures(summary) | {"status": status})
        if status == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)

    def abandon(self) -> None:
        """End the W&B run of a run whose rows can't be read."""
        self._run.finish(exit_code=1)

    def _send_blocks(self) -> bool:
        """The heat maps as pictures, unless W&B has them; returns whether any were sent."""
        import wandb

        probes = read_jsonl(self._run_dir / "probes.jsonl")
        media = {}
        for name, figure in heat_maps(probes):
            media[f"heat_map/{name}"] = wandb.Image(_pixels(figure), caption=HEAT_MAPS[name].title)
        lacking = bool(media.keys() - set(self._run.summary.keys()))
        if lacking:
            self._run.log(media)
        return lacking


def begin(settings: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """Open a W&B run; settings that this version of W&B doesn't have are left out."""
    import wandb

    # W&B's telemetry logs warnings through this logger, which `silent` doesn't cover.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    # Without the mode here, even an offline run sends telemetry.
    set_up(mode=settings["mode"])
    known = {key: value for key, value in settings.items() if key in wandb.Settings.model_fields}
    return wandb.init(config=dict(config), settings=wandb.Settings(**known))


def _pixels(figure: Any) -> Any:
    """A figure as pixels. W&B accepts figures only from `pyplot`, which would choose a window system."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())


def _figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """`{"extrapolation/sliding/2": 4.1}` and so on, without None and non-finite numbers."""
    figures = {}
    for names, value in leaves(summary):
        if value is not None and (not isinstance(value, float) or math.isfinite(value)):
            figures["/".join(names)] = value
    return figures
