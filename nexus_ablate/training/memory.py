"""Memory of this process: keeping freed memory between steps, and the peak."""

from __future__ import annotations

import ctypes
import os
import resource
import sys

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
    """Whether an error means out of memory, on a GPU or in PyTorch's CPU allocator."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def resident_peak_bytes() -> int:
    """Peak resident memory of this process so far, in bytes."""
    try:  # on Linux, getrusage starts from the size of the parent process
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
