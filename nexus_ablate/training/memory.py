"""Memory of this process: keeping what is freed between steps, whether it has run out, and the peak."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

KEPT_BYTES = 2**30
"""Bytes. glibc maps, and unmaps, a single allocation above this size separately."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h


def keep_freed_memory() -> None:
    """Make malloc keep freed memory. Does nothing without glibc, or where glibc's own variables are set.

    By default glibc returns the top of the heap to the system when a step frees it, and the next step takes a page
    fault for every 4 KiB: hundreds to thousands per step, 1 to 6% of a small model's step on CPU.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, KEPT_BYTES)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory: on a GPU, in PyTorch's CPU allocator, or in Python."""
    import torch

    said = "DefaultCPUAllocator: can't allocate memory" in str(error) or "std::bad_alloc" in str(error)
    refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return said or refused or isinstance(error, torch.OutOfMemoryError | MemoryError)


def resident_peak_bytes() -> int:
    """Peak resident memory of this process so far, in bytes."""
    try:  # on Linux, getrusage starts from the size of the parent process
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class TrainingPeak:
    """Peak memory of training: on a GPU without evaluations and probes, on a CPU that of the whole process."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._earlier = device, 0

    def pause(self) -> None:
        """Leave out what is allocated until `resume`."""
        if self._device.type == "cuda":
            self._earlier = self.bytes()

    def resume(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)

    def bytes(self) -> int:
        if self._device.type != "cuda":
            return resident_peak_bytes()
        import torch

        return max(self._earlier, torch.cuda.max_memory_allocated(self._device))
