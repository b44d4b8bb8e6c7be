"""Memory of this process: keeping freed memory between steps, and the peak."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import errno
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import ConfigError

if TYPE_CHECKING:
    import torch

_CHUNKED_BYTES = 2**28
"""Fewest bytes of float32 logits for which `train.loss=auto` may use chunks (kernels/loss.py)."""
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


# ----------------------------------------------------------------------------------------------------- before a run


def check_memory(config: RunConfig, available: int | None, device: str = "cpu", **known: int) -> None:
    """Refuse a run that cannot fit.

    Args:
        config: The run.
        available: Bytes of memory of the device; None if unknown.
        device: The name of the device.
        known: Arguments of `least_bytes`.

    Raises:
        ConfigError: The lower bound of the memory it needs is larger.
    """
    needed = least_bytes(config, **known)
    if available is not None and needed > available:
        why = f"it needs at least {_gib(needed)}, and {device} has {_gib(available)}"
        raise too_large(config, why, available, **known)


def too_large(config: RunConfig, why: str, available: int, **known: int) -> ConfigError:
    """The error for a run that doesn't fit, with values for which the lower bound fits."""
    batch, layers = config.train.batch_size, config.model.n_layers
    fix = "model=femto train.batch_size=1, without other sizes"
    halves = [(batch >> n, layers) for n in range(1, batch.bit_length())]
    halves += [(1, layers >> n) for n in range(1, layers.bit_length())]
    for batch_size, n_layers in halves:
        smaller = copy.copy(config)
        smaller.train = dataclasses.replace(config.train, batch_size=batch_size)
        smaller.model = dataclasses.replace(config.model, n_layers=n_layers)
        if least_bytes(smaller, **known) <= available:
            fix = f"train.batch_size={batch_size}" + (f" model.n_layers={n_layers}" if n_layers < layers else "")
            break
    got = f"train.batch_size={batch}, model.n_layers={layers}, model.d_model={config.model.d_model}"
    return ConfigError(f"this run does not fit in memory: {why}", got, fix)


def least_bytes(config: RunConfig, vocab_size: int = 1, state_bytes: int = 0, processes: int = 1) -> int:
    """A lower bound on the bytes that a training step holds at once, with any kernels.

    Weights, gradients and optimizer state of the linear layers and tables are float32. From the forward pass, autograd
    keeps the inputs of the matrix products in their precision: in each block those of the first projection, the
    attention (queries, keys, values), the output projection, and the FFN's last layer. Unchunked logits are held once.

    Args:
        config: The run.
        vocab_size: Fewest tokens of the vocabulary.
        state_bytes: Least bytes of optimizer state per parameter.
        processes: Number of processes that share the batch.
    """
    model, resolved, train = config.model, config.resolved, config.train
    width, queries = model.d_model, model.n_heads * resolved.head_dim
    keys_values = 2 * resolved.n_kv_heads * resolved.head_dim
    tables = vocab_size * resolved.d_embed * (1 if config.tie_embeddings else 2)
    parameters = tables + model.n_layers * (width * (2 * queries + keys_values) + 2 * width * resolved.d_ff)
    size = 4 if train.precision == "fp32" else 2
    tokens = train.batch_size // processes * model.context
    block = width + 2 * queries + keys_values + resolved.d_ff
    blocks = model.n_layers * width + block if train.activation_checkpointing else model.n_layers * block
    chunked = train.loss == "chunked" or (train.loss == "auto" and tokens * vocab_size * 4 >= _CHUNKED_BYTES)
    forward = tokens * size * (blocks + (0 if chunked else vocab_size))
    gradients = 4 * parameters
    held = gradients + forward if train.grad_accum > 1 else max(gradients, forward)
    return (4 + state_bytes) * parameters + held


def device_memory(device: torch.device, runs: int = 1) -> tuple[int | None, str]:
    """The memory of a device in bytes for each of several runs that share it, and its name."""
    import torch

    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return total // runs, str(device) + (f", shared by {runs} runs," if runs > 1 else "")
    return machine_bytes(), device.type


def machine_bytes() -> int | None:
    """Bytes of memory that this process may use, swap included: the minimum of the machine's memory, the limits of its
    control groups and its own limit; None if the system doesn't report them."""
    limits = [resource.getrlimit(name)[0] for name in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    bounds = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        memory, swap = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "SwapTotal"))
        bounds += [memory + swap, *(limit + swap for limit in _control_groups())]
    except (OSError, ValueError, KeyError):
        pass
    return min(bounds, default=None)


def _control_groups(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """The memory limits of this process's control groups and of their parents."""
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        below = top / path.lstrip("/")
        for folder in (below, *below.parents):
            with contextlib.suppress(OSError, ValueError):  # no such group here, or `max`
                if folder.is_relative_to(top):
                    yield int((folder / name).read_text())


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


# -------------------------------------------------------------------------------------------------------- meanwhile


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
