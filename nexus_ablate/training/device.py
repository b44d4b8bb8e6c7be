"""Where a run computes: the device, the CPU threads that are free for it, the precision of matrix products."""

from __future__ import annotations

import fcntl
import itertools
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

from nexus_ablate.config.resolve import check_graphs
from nexus_ablate.config.run_config import TrainConfig
from nexus_ablate.errors import ConfigError

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class IdleCores:
    """How many cores other processes leave idle, from the machine's own counters since the last time it was asked.

    Spinning OpenMP threads make an oversubscribed step tens of times slower, so a run takes only what is free.
    """

    def __init__(self) -> None:
        self._start = self._read()

    @staticmethod
    def cores() -> int:
        """Cores that this process may use; in a SLURM job those that it was given."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        given = os.environ.get("SLURM_CPUS_ON_NODE", "")  # not every cluster binds its jobs to them
        return min(cores, int(given)) if given.isdecimal() else cores

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
        """Idle cores since the last count, at least 1; all of them where the system does not tell."""
        now = self._read()
        cores = self.cores()
        if self._start is None or now is None or now[0] - self._start[0] < 0.05:
            return cores
        wall, busy, own = (b - a for a, b in zip(self._start, now, strict=True))
        self._start = now
        machine = max(cores, os.cpu_count() or 1)  # where this process has a share of it, others may keep to theirs
        return max(1, min(cores, machine - round(max(0.0, busy - own) / wall)))


IDLE = IdleCores()
"""Counts from this module's import: torch is imported meanwhile, so the time is not lost."""


def share_cores_politely() -> None:
    """Make OpenMP threads wait passively soon after they find no work; must run before torch is imported.

    With the default, two processes of two threads on two cores slow each other down 50 times.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def choose_threads(asked: int | str, idle: IdleCores) -> tuple[int, str]:
    """The number of CPU threads, and a warning where it is more than the machine has free."""
    free = idle.count()
    if asked == "auto":
        bound = os.environ.get("OMP_NUM_THREADS", "")  # set by the user, or by a launcher that runs several at a time
        if bound.isdecimal() and 1 <= int(bound) < free:
            return int(bound), ""
        return free, "" if free == idle.cores() else f"{free} of {idle.cores()} cores free: as many threads train"
    threads = int(asked)
    if threads > free:
        return threads, f"train.threads={threads}, but {free} of {idle.cores()} cores free: steps can be much slower"
    return threads, ""


def visible_gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them, found without torch."""
    if (listed := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


_leases: list[int] = []
"""Open descriptors: a lease is a lock that ends with this process, however that ends."""


def lease_gpu() -> None:
    """Take the least used of the visible GPUs for the life of this process and make it the only visible one.

    Without it every process of a launcher that assigns no GPUs trains on the first. The lease is a lock on the first
    free file of `gpu-0.0, gpu-1.0, ..., gpu-0.1, ...`, so that each GPU is taken once before one is shared. Nothing
    happens where CUDA is in use already, or where torchrun gives each process its GPU.
    """
    torch = sys.modules.get("torch")
    gpus = visible_gpus()
    if not gpus or _leases or "LOCAL_RANK" in os.environ or (torch is not None and torch.cuda.is_initialized()):
        return
    folder = Path(tempfile.gettempdir()) / f"nexus_ablate-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for level, gpu in ((level, gpu) for level in itertools.count() for gpu in gpus):
        name = re.sub(r"[^A-Za-z0-9-]", "_", gpu)
        descriptor = os.open(folder / f"gpu-{name}.{level}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        _leases.append(descriptor)
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        return


def device_of(train: TrainConfig):
    """The torch device of a run.

    Raises:
        ConfigError: A device that is not there, or CUDA graphs without CUDA.
    """
    device = choose_device(train.device)
    if train.compile == "graphs":
        check_graphs(device.type)
    return device


def choose_device(asked: str):
    """The torch device of this name.

    Raises:
        ConfigError: A device that is not there.
    """
    if asked == "auto":
        lease_gpu()
    import torch

    if asked == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(name)
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise ConfigError("train.device is no device", asked, "auto, cpu, cuda, cuda:1 or mps") from error
    available = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= available.get(device.type, 0):
        raise ConfigError("train.device is not on this machine", asked, "train.device=auto")
    return device


def processor_name(device_type: str) -> str:
    """The model of the GPU or the CPU, as its maker names it."""
    if device_type == "cuda":
        import torch

        return torch.cuda.get_device_name()
    told = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", told.read_text()) if told.is_file() else []
    return names[0].strip() if names else platform.processor() or platform.machine()


def device_memory(device) -> int:
    """Bytes of a GPU's memory, whoever uses them; 0 of any other device."""
    import torch

    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def precision_context(precision: str, device_type: str) -> AbstractContextManager:
    """The context of forward passes: autocast to the low precision, or nothing. Weights stay float32."""
    import contextlib

    import torch

    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=torch.bfloat16 if precision == "bf16" else torch.float16)


def cxx_compiler() -> str:
    """The C++ compiler that torch.compile would call for a CPU, or nothing."""
    return next((name for name in (os.environ.get("CXX"), "g++", "clang++") if name and shutil.which(name)), "")
