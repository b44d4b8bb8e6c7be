"""The memory of this process: what it keeps of what a step frees, and the most that it held."""

from __future__ import annotations

import ctypes
import os
import resource
import sys

KEPT_BYTES = 2**30
"""A single block beyond it is mapped, and unmapped, by itself."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let freed memory stay with this process, unless glibc's own variables say what to do; without glibc do nothing.

    glibc hands the top of the heap back to the system whenever a step frees it, and the next step pays a page fault for
    every 4 KiB of it: hundreds to thousands a step, 1 to 6% of a small model's step on CPU.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, KEPT_BYTES)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: of a GPU, or of PyTorch's allocator for CPUs."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def resident_peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    try:  # Linux's getrusage begins with the size of whatever process started this one
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
