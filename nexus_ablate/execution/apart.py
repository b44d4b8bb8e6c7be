"""Trains one run at a time in a separate process, for a process that must outlive its runs: a Hydra launcher.

A run that takes its process down (a crash in native code, no memory, `os._exit`) is marked failed; the next run starts.
"""

from __future__ import annotations

from multiprocessing import connection, get_all_start_methods, get_start_method, set_start_method, util
from pathlib import Path

from nexus_ablate import errors
from nexus_ablate.execution.queue import POLL_SECONDS, Worker, mark_failed
from nexus_ablate.execution.worker import STOPPING, Answer, Order
from nexus_ablate.training.signals import StopRequest


class Apart:
    """A worker process for the runs of this process, started on demand; `stopped` is the signal that stopped it, or ''.

    The worker imports torch once, as long as no run takes it down.
    """

    def __init__(self) -> None:
        self.stopped = ""
        self._worker: Worker | None = None

    def train(self, order: Order, path: Path) -> Answer:
        """Train a run and wait for it. After a stop signal no further run starts.

        Args:
            order: The run.
            path: Its directory, whose status is set to failed if the process dies.
        """
        if self.stopped:
            return Answer(errors.PREEMPTED, f"not started, because of {self.stopped}")
        if self._worker is None or not self._worker.process.is_alive():
            if get_start_method() not in get_all_start_methods():  # joblib's own, which a child cannot import
                set_start_method("spawn", force=True)
            self._worker = Worker(None, False, None)
            # Python waits for its children at exit; closing the pipe makes this one end.
            util.Finalize(None, self._worker.pipe.close, exitpriority=1)
        worker = self._worker
        worker.send(order)
        with StopRequest() as stop:
            while not connection.wait([worker.pipe, worker.process.sentinel], POLL_SECONDS):
                if stop.signal_name and not self.stopped:
                    self.stopped = stop.signal_name
                    worker.process.terminate()
            self.stopped = self.stopped or stop.signal_name
            stop.obeyed = bool(self.stopped)
        answer = worker.receive()
        if answer is not None:
            return answer
        reason = worker.end()
        if self.stopped and worker.process.exitcode == -STOPPING:
            return Answer(errors.PREEMPTED, "stopped before its first step")
        mark_failed(path, reason)
        return Answer(errors.BUG, reason)


APART = Apart()
"""The worker of this process."""
