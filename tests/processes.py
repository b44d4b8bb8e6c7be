"""Commands in processes of their own.

Several processes of one run are forked from this one, so that torch is imported once, as a launcher would start them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nexus_ablate.cli import main


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Processes:
    """The processes of a run under way.

    Args:
        size: How many.
        overrides: The command.
        said: The file that their standard error goes to.
        before: Called in each with its rank before the command.
    """

    def __init__(
        self, size: int, overrides: list[str], said: Path, before: Callable[[int], object] = lambda rank: None
    ) -> None:
        port = free_port()
        self.said = said
        self.pids = [self._start(rank, size, port, overrides, before) for rank in range(size)]
        self.statuses: dict[int, int] = {}

    def _start(self, rank: int, size: int, port: int, overrides: list[str], before: Callable[[int], object]) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            descriptor = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stderr = sys.stdout = os.fdopen(2, "w", buffering=1, closefd=False)
            os.environ |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            before(rank)
            status = main(overrides)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)

    def ended(self) -> dict[int, int]:
        """The exit status of each rank that has ended, negative for a signal."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.statuses and (done := os.waitpid(pid, os.WNOHANG))[0]:
                self.statuses[rank] = os.waitstatus_to_exitcode(done[1])
        return dict(self.statuses)

    def wait(self, ranks: set[int], seconds: float) -> dict[int, int]:
        """The exit status of each rank once `ranks` have ended, or time is up; the others are killed."""
        end = time.monotonic() + seconds
        while not ranks <= self.ended().keys() and time.monotonic() < end:
            time.sleep(0.02)
        statuses = self.ended()
        for rank, pid in enumerate(self.pids):
            if rank not in statuses:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return statuses


def answers(commands: list[list[str]], cwd: Path) -> list[tuple[int, list[str]]]:
    """Exit status and lines of each command, in one process that has no torch at its end."""
    code = (
        "import contextlib, io, json, sys\nfrom nexus_ablate.cli import main\nfound = []\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as said:\n        status = main(command)\n"
        "    found.append([status, said.getvalue().splitlines()])\n"
        "assert 'torch' not in sys.modules\nprint(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True, cwd=cwd, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
