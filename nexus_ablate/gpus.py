"""The NVIDIA GPUs of this machine, as far as they can be known without importing torch."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BF16_CAPABILITY = 8.0
"""Compute capability from which a GPU's tensor cores multiply in bfloat16."""


@dataclass(frozen=True)
class Gpu:
    """What nvidia-smi says about a GPU: product name, compute capability, and bytes of memory."""

    name: str
    capability: float
    memory: int


def visible_gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if (listed := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def gpu_of_worker(number: int) -> str | None:
    """The visible GPU of a worker, from worker 0 on GPU 0 in turn; None where no GPU is visible."""
    gpus = visible_gpus()
    return gpus[number % len(gpus)] if gpus else None


@cache
def described_gpus() -> tuple[Gpu, ...]:
    """All GPUs of this machine, whichever are visible; empty where nvidia-smi is missing or does not answer."""
    command = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        rows = [line.rsplit(",", 2) for line in answer.stdout.splitlines()]
        return tuple(Gpu(name.strip(), float(cap), int(mib) * 2**20) for name, cap, mib in rows)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def on_gpu(device: str) -> bool:
    """Whether `train.device` means an NVIDIA GPU on this machine."""
    return device.partition(":")[0] == "cuda" or (device == "auto" and bool(visible_gpus()))


def multiplies_bf16(device: str) -> bool:
    """Whether `train.device` means a GPU on this machine, and all of its GPUs multiply in bfloat16."""
    gpus = described_gpus() if on_gpu(device) else ()
    return bool(gpus) and all(gpu.capability >= BF16_CAPABILITY for gpu in gpus)
