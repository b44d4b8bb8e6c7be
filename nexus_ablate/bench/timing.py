"""Time candidates in turn: other load affects all of them equally, and ratios compare blocks of the same round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

BLOCK_SECONDS = 0.004
"""Seconds for which a block repeats its work, unless one call takes longer: far above the clock's resolution."""
LEAST_ROUNDS = 5

Name = TypeVar("Name", bound=Hashable)

MOST_PROGRAMS = 1000
"""Most compiled programs per function. With PyTorch's limit of 8 further candidates would run eagerly, with only a
warning."""


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of some values."""

    median: float
    low: float
    high: float

    def text(self, digits: int) -> str:
        """`1.02 (1.01-1.04)`."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def spread(values: list[float]) -> Spread:
    """Median and quartiles of two or more values."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratios(values: list[float], base: list[float]) -> Spread:
    """Spread of the ratios of blocks that ran in the same round."""
    return spread([a / b for a, b in zip(values, base, strict=True)])


@dataclass(frozen=True)
class Clock:
    """How to measure time on a device.

    Attributes:
        now: Seconds. With one CPU thread it is the CPU time of the process, which excludes other processes on the core.
        wait: Returns when the device has finished its work.
    """

    now: Callable[[], float]
    wait: Callable[[], object]


def clock_of(device: torch.device) -> Clock:
    """The clock for work on a device with the current number of threads."""
    import torch

    if device.type == "cuda":
        return Clock(time.perf_counter, lambda: torch.cuda.synchronize(device))
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return Clock(time.process_time if alone else time.perf_counter, lambda: None)


def in_turn(works: Mapping[Name, Callable[[], object]], seconds: float, clock: Clock) -> dict[Name, list[float]]:
    """Seconds per call of each work, by round. Each round has one block per work; every other round runs backwards.

    Args:
        works: What to time, by name. Each must have been called before, so that the timing excludes its setup.
        seconds: Approximate total time; there are at least LEAST_ROUNDS rounds.
    """

    def block(work: Callable[[], object], calls: int) -> float:
        clock.wait()
        start = clock.now()
        for _ in range(calls):
            work()
        clock.wait()
        return (clock.now() - start) / calls

    calls = {name: max(1, round(BLOCK_SECONDS / max(block(work, 1), 1e-7))) for name, work in works.items()}
    times: dict[Name, list[float]] = {name: [] for name in works}
    order, end = list(works), time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[order[0]]) < LEAST_ROUNDS:
        for name in order:
            times[name].append(block(works[name], calls[name]))
        order.reverse()
    return times
