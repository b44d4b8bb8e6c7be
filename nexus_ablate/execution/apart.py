"""One run at a time in a process apart, for a process that must outlive its runs: the launcher of a Hydra multirun.

A run that ends its process (a crash in native code, no memory, `os._exit`) is marked failed and the next one begins.
"""

from __future__ import annotations

from multiprocessing import connection, get_all_start_methods, get_start_method, set_start_method, util
from pathlib import Path

from nexus_ablate import errors
from nexus_ablate.execution.queue import POLL_SECONDS, Worker, mark_failed
from nexus_ablate.execution.worker import STOPPING, Answer, Order
from nexus_ablate.training.signals import StopRequest


class Apart:
    """A worker process for the runs of this process, made when it is needed; `stopped` names the signal that ended it.

    Imports are paid once, as long as no run takes the worker down.
    """

    def __init__(self) -> None:
        self.stopped = ""
        self._worker: Worker | None = None

    def train(self, order: Order, path: Path) -> Answer:
        """Train a run and wait for it; after a signal asked to stop, nothing is begun any more.

        Args:
            order: The run.
            path: Its directory, for a word there if its process dies.
        """
        if self.stopped:
            return Answer(errors.PREEMPTED, f"not begun, because {self.stopped} asked to stop")
        if self._worker is None or not self._worker.process.is_alive():
            if get_start_method() not in get_all_start_methods():  # joblib's own, which no child could find
                set_start_method("spawn", force=True)
            self._worker = Worker(None, None, None)
            # Python waits for its children when it ends; this one leaves when nobody can send it anything.
            util.Finalize(None, self._worker.pipe.close, exitpriority=1)
        worker = self._worker
        worker.send(order)
        with StopRequest() as stop:
            while not connection.wait([worker.pipe, worker.process.sentinel], POLL_SECONDS):
                if stop.asked and not self.stopped:
                    self.stopped = stop.asked
                    worker.process.terminate()
            self.stopped = self.stopped or stop.asked
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
"""Of this process."""
