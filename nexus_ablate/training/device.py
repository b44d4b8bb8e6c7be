"""Device, number of CPU threads and precision of a run."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import shutil
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from nexus_ablate.config.foreign_words import meaning
from nexus_ablate.config.rules import check_graphs
from nexus_ablate.config.run_config import RunConfig, TrainConfig
from nexus_ablate.console import several
from nexus_ablate.errors import ConfigError
from nexus_ablate.gpus import multiplies_bf16

COMPILE_FLOPS = 2e12
"""Training FLOPs from which `train.compile=auto` compiles on a CPU: a minute of two cores, of which a compiled step
saves a fifth. Compiling takes 15 to 20 seconds, and 3 where an earlier run has compiled the program."""

_CGROUP = Path("/sys/fs/cgroup")
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Where versions 2 and 1 of control groups keep the CPU time of a container per period, and the period."""
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True)
class Hardware:
    """A device: `cpu`, `cuda` or `mps`, and a GPU's product name and memory in bytes."""

    kind: str
    name: str = ""
    memory: int = 0


class IdleCores:
    """Counts the CPU cores that other processes left idle since the last count, from /proc/stat.

    Spinning OpenMP threads make an oversubscribed step tens of times slower, so a run only uses idle cores.
    """

    def __init__(self) -> None:
        self._start = self._read()

    @staticmethod
    def cores() -> int:
        """Cores that this process may use; in a container or a SLURM job, at most those allotted to it."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        cores = min(cores, _container_cores() or cores)
        allotted = os.environ.get("SLURM_CPUS_ON_NODE", "")  # not every cluster sets the CPU affinity of its jobs
        return min(cores, int(allotted)) if allotted.isdecimal() else cores

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Wall clock, busy seconds of all cores, busy seconds of this process; None where the system has no /proc."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, fields)
        own = time.process_time()
        return time.monotonic(), (user + nice + system + irq + softirq) / _TICKS, own

    def count(self) -> int:
        """Idle cores since the last count, at least 1; all cores where the system has no /proc."""
        now = self._read()
        cores = self.cores()
        if self._start is None or now is None or now[0] - self._start[0] < 0.05:
            return cores
        wall, busy, own = (b - a for a, b in zip(self._start, now, strict=True))
        self._start = now
        machine = max(cores, os.cpu_count() or 1)  # busy cores outside this process's affinity don't compete with it
        return max(1, min(cores, machine - round(max(0.0, busy - own) / wall)))


def _container_cores() -> int:
    """The number of cores, rounded up, whose time this process's container may use; 0 where it has no limit."""
    for names in _QUOTAS:
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((_CGROUP / name).read_text() for name in names).split()
            if quota not in ("max", "-1"):
                return math.ceil(int(quota) / int(period))
    return 0


IDLE = IdleCores()
"""Counts from this module's import: torch is imported meanwhile, so the time is not lost."""


def share_cores_politely() -> None:
    """Make idle OpenMP threads sleep instead of spinning. Call it before torch is imported.

    With the default, two processes of two threads each on two cores slow each other down 50 times.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def bound_of_threads() -> int:
    """OMP_NUM_THREADS, which a user sets, or a launcher that runs several processes; 0 where it is not set."""
    bound = os.environ.get("OMP_NUM_THREADS", "")
    return int(bound) if bound.isdecimal() else 0


def choose_threads(requested: int | str, idle: IdleCores) -> tuple[int, str]:
    """The number of CPU threads, and a warning where it is more than the machine has free."""
    free, cores = idle.count(), idle.cores()
    busy = f"{free} of {cores} cores {'is' if free == 1 else 'are'} idle"
    if requested == "auto":
        if 1 <= bound_of_threads() < free:
            return bound_of_threads(), ""
        return free, "" if free == cores else f"{busy}: training with {several(free, 'thread')}"
    threads = int(requested)
    if threads > free:
        return threads, f"train.threads={threads}, but {busy}: steps can be much slower"
    return threads, ""


def device_of(train: TrainConfig):
    """The torch device of a run.

    Raises:
        ConfigError: The device does not exist, PyTorch can't use the GPU that `auto` means, or CUDA graphs were
            requested without CUDA.
    """
    device = choose_device(train.device)
    if train.device == "auto" and device.type == "cpu" and multiplies_bf16("auto"):
        import torch

        fix = "train.device=cpu, or install PyTorch for CUDA: https://pytorch.org/get-started"
        raise ConfigError("PyTorch cannot use the GPU of this machine", f"torch {torch.__version__}", fix)
    if train.compile == "graphs":
        check_graphs(device.type)
    return device


def choose_device(requested: str):
    """The torch device of this name; `auto` prefers CUDA, then MPS, then the CPU.

    Raises:
        ConfigError: The device does not exist.
    """
    import torch

    if requested == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(name)
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        fix = meaning(f"device={requested}") or "train.device=auto"
        raise ConfigError("train.device is not a device", requested, fix) from error
    available = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= available.get(device.type, 0):
        raise ConfigError("train.device is not on this machine", requested, "train.device=auto")
    return device


def device_again(requested: str):
    """The torch device for a finished run: the one that it was to train on, or `auto` if this machine lacks it."""
    try:
        return choose_device(requested)
    except ConfigError:
        return choose_device("auto")


def processor_name(device_type: str) -> str:
    """The product name of the GPU or the CPU."""
    if device_type == "cuda":
        import torch

        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    return names[0].strip() if names else platform.processor() or platform.machine()


def hardware_of(device) -> Hardware:
    """What `choices` needs to know of a device."""
    if device.type != "cuda":
        return Hardware(device.type)
    import torch

    return Hardware("cuda", torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory)


def precision_context(precision: str, device_type: str) -> AbstractContextManager:
    """The context manager for forward passes: autocast to bf16 or fp16, or nothing. Weights stay float32."""
    import torch

    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)


def cxx_compiler() -> str:
    """The C++ compiler that torch.compile would use on a CPU; '' where there is none."""
    return next((name for name in (os.environ.get("CXX"), "g++", "clang++") if name and shutil.which(name)), "")


def compiles_on_cpu(config: RunConfig) -> tuple[bool, str]:
    """Whether `train.compile=auto` compiles a run on a CPU, and why.

    The FLOPs are those of the default blocks at this size (12 n_layers d_model^2 parameters), whatever the run has
    instead, so that it means the same for all arms of a size and a budget.
    """
    model, resolved = config.model, config.resolved
    if resolved.steps is None:
        flops = float(config.train.flops)
    else:
        flops = 6 * 12 * model.n_layers * model.d_model**2 * resolved.tokens_per_step * resolved.steps
    if flops < COMPILE_FLOPS:
        return False, f"{flops:.1e} FLOPs; compiling pays from {COMPILE_FLOPS:.0e}"
    if not cxx_compiler():
        return False, "there is no C++ compiler"
    return True, f"{flops:.1e} FLOPs; compiling pays from {COMPILE_FLOPS:.0e}"
