"""Stop requests: a signal sets a flag that the training loop checks after each step, so no step is interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from nexus_ablate.errors import Preempted

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")

ends_with_this_command = False
"""Set by the command line. Only the exit status is left after a stop, and another signal must not change it."""


class StopRequest:
    """A context manager that catches the signals of schedulers, Ctrl-C and a closed terminal.

    Args:
        signals: The names of those it catches.
        ask: What to do on each of them besides, given its name. It may raise an error.

    Attributes:
        signal_name: The first signal received; '' while there is none.
        obeyed: Set by the caller when everything is saved and stopped. Raising `Preempted` has the same effect.
    """

    def __init__(self, signals: Sequence[str] = SIGNALS, ask: Callable[[str], object] | None = None) -> None:
        self._signals, self._then = signals, ask
        self.signal_name = ""
        self.obeyed = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python forbids handlers
            for name in self._signals:
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        last = ends_with_this_command and (self.obeyed or kind is Preempted)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if last else handler)  # type: ignore[arg-type]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self.signal_name = self.signal_name or name
        if self._then is not None:
            self._then(name)
