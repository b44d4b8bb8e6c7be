"""Requests to stop: a signal sets a flag that the loop looks at after each step, so that a step is never torn."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from nexus_ablate.errors import Preempted

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")

ends_with_this_command = False
"""Set by the command line: after a stop nothing is left but the exit status, which a further signal must not change."""


class StopRequest:
    """Catches the signals of schedulers, of Ctrl-C and of a closed terminal while it is entered.

    Attributes:
        asked: The name of the first signal, or ''.
        obeyed: Set where all is saved and stopped; a `Preempted` says so by itself.
    """

    def __init__(self) -> None:
        self.asked = ""
        self.obeyed = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python forbids handlers
            for name in SIGNALS:
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        last = ends_with_this_command and (self.obeyed or kind is Preempted)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if last else handler)  # type: ignore[arg-type]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or signal.Signals(number).name
