"""Requests to stop: a signal sets a flag that the loop looks at after each step, so that a step is never torn."""

from __future__ import annotations

import signal
import threading
from types import FrameType

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


class StopRequest:
    """Catches the signals of schedulers, of Ctrl-C and of a closed terminal while it is entered.

    `asked` is the name of the first one, or ''.
    """

    def __init__(self) -> None:
        self.asked = ""
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python forbids handlers
            for name in SIGNALS:
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or signal.Signals(number).name
