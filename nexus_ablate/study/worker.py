"""A worker process: imports once, then trains one job after another as the driver sends them.

torch is imported with the first job, after the threads and the GPU of this worker are set.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

from nexus_ablate import errors

STOPPING = signal.SIGTERM
"""What the driver sends to a worker that is to save and stop."""


@dataclass(frozen=True)
class Order:
    """What the driver sends: a run by its overrides."""

    overrides: list[str]
    arm: str
    circumstances: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What a worker sends back: the exit status that the run would have had alone, and why."""

    status: int
    reason: str = ""


def work(pipe: connection.Connection, threads: int, gpu: str | None, log: Path) -> None:
    """Train what comes through the pipe until the driver closes it or dies; prints go to `log`.

    Returns after one run where the next one's peak memory could not be told from it.
    """
    for name in ("SIGINT", "SIGHUP"):  # they reach the whole group; the driver decides what they mean
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_stop_with_driver, daemon=True).start()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(threads)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu

    from nexus_ablate.training.device import share_cores_politely

    share_cores_politely()
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        answer = _train(order)
        gc.collect()
        fresh = _forget_peaks()
        pipe.send(answer)
        if not fresh:
            return


def _train(order: Order) -> Answer:
    from nexus_ablate.composition import compose
    from nexus_ablate.training.session import train

    try:
        outcome = train(
            compose(order.overrides), order.overrides, quiet=True, arm=order.arm, circumstances=order.circumstances
        )
    except errors.UserError as error:
        return Answer(error.status, error.what)
    except Exception as error:  # a bug in one run: its traceback is in its status.json; the others have their turn
        traceback.print_exc()
        return Answer(errors.BUG, f"{type(error).__name__}: {error}")
    return Answer(outcome.status)


def _forget_peaks() -> bool:
    """Let the peak memory of the next run be its own; whether that could be done."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        with open("/proc/self/clear_refs", "w") as file:  # Linux: 5 resets the peak resident size, see proc(5)
            file.write("5")
    except OSError:
        return False
    return True


def _stop_with_driver() -> None:
    """A driver that was killed cannot stop its workers; they save and stop by themselves."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), STOPPING)
