"""Timing in turn: whatever else the machine does falls on all candidates alike; ratios are of neighbours in time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK_SECONDS = 0.004
"""A block repeats its work for so long, unless one call takes longer: far above the clock's resolution."""
LEAST_ROUNDS = 5

MOST_PROGRAMS = 1000
"""Compiled programs of one function: beyond PyTorch's 8 a candidate would run eager, with no more than a warning."""


@dataclass(frozen=True)
class Spread:
    """The median of some values and their quartiles."""

    median: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    """Median and quartiles; of one value, the value."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratios(values: list[float], base: list[float]) -> Spread:
    """Spread of the ratios of blocks that ran in the same round."""
    return spread([a / b for a, b in zip(values, base, strict=True)])


@dataclass(frozen=True)
class Clock:
    """How time is taken on a device.

    Attributes:
        now: Seconds. With one CPU thread the clock is that of the process, which stands while others have the core.
        wait: Returns when the device has done what it was given.
    """

    now: Callable[[], float]
    wait: Callable[[], object]


def clock_of(device: torch.device) -> Clock:
    """The clock for work on a device, at the number of threads that is set."""
    import torch

    if device.type == "cuda":
        return Clock(time.perf_counter, lambda: torch.cuda.synchronize(device))
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return Clock(time.process_time if alone else time.perf_counter, lambda: None)


def in_turn(works: Mapping[str, Callable[[], object]], seconds: float, clock: Clock) -> dict[str, list[float]]:
    """Seconds that each work takes, by round; every work has one block in each round, every other round backwards.

    Args:
        works: What is timed, by name; each has been called before, so that nothing is built while the clock runs.
        seconds: Time for all of it, about; LEAST_ROUNDS rounds are made whatever they take.
    """

    def block(work: Callable[[], object], calls: int) -> float:
        clock.wait()
        start = clock.now()
        for _ in range(calls):
            work()
        clock.wait()
        return (clock.now() - start) / calls

    calls = {name: max(1, round(BLOCK_SECONDS / max(block(work, 1), 1e-7))) for name, work in works.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    order, end = list(works), time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[order[0]]) < LEAST_ROUNDS:
        for name in order:
            times[name].append(block(works[name], calls[name]))
        order.reverse()
    return times
