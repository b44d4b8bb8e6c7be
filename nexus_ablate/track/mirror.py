"""Copy a run to W&B while it trains. A failure doesn't affect the run."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, final

from nexus_ablate.config.options import Option
from nexus_ablate.runs import read_run
from nexus_ablate.runs.lookup import name_to_type
from nexus_ablate.track.account import LOG_IN, NO_KEY, credentials, failure, resolve_mode
from nexus_ablate.track.run_on_wandb import place_of, settings_of
from nexus_ablate.track.upload import Upload, only_sender

PATIENCE = 20.0  # seconds that finish() waits for W&B
PREEMPTED_PATIENCE = 5.0  # the same if a scheduler is about to kill the process
INIT_TIMEOUT = 15.0  # seconds until W&B must have accepted the run; a process that ends earlier waits for that


class Tracker(ABC):
    """Receives a copy of a run's rows; leaving its `with` block finishes it."""

    @abstractmethod
    def row_written(self) -> None:
        """Announce a new row in `metrics.jsonl`. Returns at once, even if the copy fails."""

    @abstractmethod
    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """End the copy with the state and the summary of the run. Later calls do nothing."""

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.finish("failed" if kind else "finished", {})


@final
class FilesTracker(Tracker):
    """No copy: the run directory has everything."""

    def row_written(self) -> None:
        pass

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        pass


@final
class WandbTracker(Tracker):
    """A W&B run that is fed by a separate thread, which reads metrics.jsonl.

    The training passes no data and never waits. If W&B is slow, the copy lags behind but is complete. Only that thread
    uses W&B. It catches `Exception`, since W&B may raise anything at any point, and ends; the caller's thread then
    reports it once, at its next call.

    Reading starts when this process has written its first row: before that, a resumed run may shorten the file.

    Args:
        start: Opens the W&B run.
        run_dir: The run directory, for messages.
        say: Takes one line for the user; called on the caller's thread only.
        warn: The same, for a line that says what W&B lacks.
        patience: Seconds that `finish` waits.
    """

    def __init__(
        self,
        start: Callable[[], Upload],
        run_dir: Path,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        patience: float,
    ) -> None:
        self._start, self._run_dir, self._say, self._warn, self._patience = start, run_dir, say, warn, patience
        self._lines: queue.SimpleQueue[tuple[Callable[[str], None], str]] = queue.SimpleQueue()
        self._news = threading.Event()
        self._end: tuple[str, Mapping[str, Any]] | None = None
        self._thread = threading.Thread(target=self._mirror, name="wandb-mirror", daemon=True)
        self._thread.start()

    def row_written(self) -> None:
        self._news.set()
        self._speak()

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        if self._end is not None:
            return
        self._end = (status, summary)
        self._news.set()
        patience = min(self._patience, PREEMPTED_PATIENCE) if status == "preempted" else self._patience
        self._thread.join(patience)
        if self._thread.is_alive():
            late = f"W&B did not answer within {patience:g} s, so the upload was stopped; {self._where()}"
            self._lines.put((self._warn, late))
        self._speak()

    def _speak(self) -> None:
        while not self._lines.empty():
            speak, line = self._lines.get()
            speak(line)

    def _where(self) -> str:
        return f"nothing is lost: `nexus-ablate sync {name_to_type(self._run_dir)}` sends the rest"

    def _mirror(self) -> None:
        try:
            with only_sender(self._run_dir):
                upload = self._start()
                place = upload.url or f"offline; `nexus-ablate sync {name_to_type(self._run_dir)}` sends the run later"
                self._lines.put((self._say, f"W&B: {place}"))
                while True:
                    self._news.wait()
                    self._news.clear()
                    if self._end is not None:
                        return upload.close(*self._end)
                    upload.bring()
        except Exception as error:
            self._lines.put((self._warn, f"W&B failed ({failure(error)}); {self._where()}"))


def start_tracker(
    option: Option,
    run_dir: Path,
    say: Callable[[str], None],
    warn: Callable[[str], None],
    patience: float = PATIENCE,
) -> Tracker:
    """Start copying a run; returns at once.

    Args:
        option: The chosen `tracker` option.
        run_dir: The run directory, from which the run's data for W&B is read.
        say: Takes one line for the user.
        warn: The same, for a line that says what W&B lacks.
        patience: Seconds that `finish` may wait for W&B.
    """
    mode = resolve_mode(option)
    if mode == "files":
        if option.name.startswith("wandb"):
            say("W&B is switched off here (WANDB_MODE or WANDB_DISABLED), so the run is not sent")
        return FilesTracker()
    if mode == "wandb" and not credentials():  # W&B would ask for a key, and the run would wait for it
        warn(f"{NO_KEY}: {LOG_IN}; the run directory has every row")
        return FilesTracker()

    def start() -> Upload:
        record, place = read_run(run_dir), place_of(run_dir, option)
        online = "online" if mode == "wandb" else "offline"
        # W&B gives up before finish() does. This also limits its work when the process exits.
        settings = settings_of(record, place, online, run_dir, INIT_TIMEOUT, patience / 2)
        return Upload(record, place, settings)

    return WandbTracker(start, run_dir, say, warn, patience)
