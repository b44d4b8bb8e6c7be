"""A worker process: imports torch once, then trains one job after another as the driver sends them.

torch is imported with the first job, after this worker's threads and GPU are set.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, replace
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

from nexus_ablate import errors
from nexus_ablate.masking import masked_streams
from nexus_ablate.runs import open_regular

STOPPING = signal.SIGTERM
"""The signal that makes a worker save and stop."""


@dataclass(frozen=True)
class Order:
    """A run that the driver sends to a worker.

    Attributes:
        overrides: What composes its configuration.
        arm: The folder of its runs.
        run_conditions: Saved in env.json.
        brief: Print messages and progress; otherwise nothing.
        source: `provenance.source_hash` of the driver. A worker with other code refuses to train.
    """

    overrides: list[str]
    arm: str
    run_conditions: dict[str, Any]
    brief: bool = False
    source: str = ""


@dataclass(frozen=True)
class Answer:
    """The result that a worker sends back.

    Attributes:
        status: The exit status that the run would have on its own.
        reason: Why the status is not 0.
        path: The run directory, if the run succeeded.
        leaves: The worker ends now.
    """

    status: int
    reason: str = ""
    path: Path | None = None
    leaves: bool = False


def work(pipe: connection.Connection, threads: int | None, leases: bool, log: Path | None) -> None:
    """Train the orders from the pipe until the driver closes it or dies.

    Returns after one run where the peak memory cannot be reset, so that the next run gets its own measurement.

    Args:
        threads: Number of CPU threads; None: each run decides.
        leases: Whether it reserves a GPU before its first run, and until it ends.
        log: The file for its output; None: the driver's output.
    """
    for name in ("SIGINT", "SIGHUP"):  # they reach the whole process group; the driver handles them
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_stop_with_driver, daemon=True).start()
    if log is not None:
        descriptor = open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(descriptor, stream.fileno())
    if threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[variable] = str(threads)

    from nexus_ablate.training.device import lease_gpu, share_cores_politely

    share_cores_politely()
    if leases:
        lease_gpu()
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        with masked_streams():
            answer = _train(order)
        gc.collect()
        leaves = not _forget_peaks()
        pipe.send(replace(answer, leaves=leaves))
        if leaves:
            return


def _train(order: Order) -> Answer:
    from nexus_ablate.config.compose import compose
    from nexus_ablate.provenance import refuse_other_source
    from nexus_ablate.training.session import train

    try:
        refuse_other_source(order.source)
        outcome = train(
            compose(order.overrides),
            order.overrides,
            quiet=not order.brief,
            brief=order.brief,
            arm=order.arm,
            run_conditions=order.run_conditions,
        )
    except errors.UserError as error:
        if order.brief:
            print(error, file=sys.stderr)
        return Answer(error.status, error.problem)
    except Exception as error:  # a bug in one run must not stop the others; its traceback is in its status.json
        traceback.print_exc()
        return Answer(errors.BUG, errors.described(error))
    return Answer(outcome.status, path=outcome.path)


def _forget_peaks() -> bool:
    """Reset the peak memory counters before the next run. Returns whether that worked."""
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
    """Save and stop when the driver dies: a killed driver cannot stop its workers."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), STOPPING)
