"""The number of concurrent runs on this machine, and each one's CPU threads and GPU."""

from __future__ import annotations

from dataclasses import dataclass

from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.console import several
from nexus_ablate.gpus import visible_gpus
from nexus_ablate.planning.cost import PROCESS_BYTES, cost_of, free_memory
from nexus_ablate.planning.jobs import Job
from nexus_ablate.training.device import IdleCores, free_gpus


@dataclass(frozen=True)
class Places:
    """The number of workers, the CPU threads of each, and the GPUs among which each takes the least used one."""

    workers: int
    threads: int
    gpus: list[str]

    @property
    def description(self) -> str:
        workers = f"{several(self.workers, 'worker')} of {several(self.threads, 'CPU thread')}"
        return workers + (f" on {several(len(self.gpus), 'GPU')}" if self.gpus else "")

    @property
    def run_conditions(self) -> dict[str, int]:
        """For env.json: runs that share a device are slower than one alone."""
        return {"workers": self.workers, "runs_per_device": -(-self.workers // max(1, len(self.gpus)))}


def places(
    requested: int | str, jobs: list[Job], memory_bytes: int, free_bytes: int | None, per_gpu: int = 1
) -> Places:
    """How to share this machine among jobs.

    Args:
        requested: Number of workers; `auto`: `per_gpu` on each GPU that no other study or run uses (one if there is
            none), or without GPUs one per CPU core if the memory suffices.
        jobs: The jobs to run.
        memory_bytes: Memory of the largest job.
        free_bytes: Free memory of this machine; None if unknown.
        per_gpu: Workers per GPU.
    """
    device = jobs[0].config.train.device
    gpus = visible_gpus() if device in ("auto", "cuda") else []
    free = free_gpus() if gpus else []
    cores = IdleCores.cores()
    if requested != "auto":
        workers = int(requested)
    elif gpus or device not in ("auto", "cpu"):
        workers = max(1, per_gpu * len(free))
    else:
        workers = cores if free_bytes is None else max(1, min(cores, free_bytes // memory_bytes))
    workers = max(1, min(workers, len(jobs)))
    threads_setting = jobs[0].config.train.threads
    threads = max(1, cores // workers) if threads_setting == "auto" else int(threads_setting)
    return Places(workers, threads, free or gpus)


def places_for(jobs: list[Job], workers: int | str, per_gpu: int = 1) -> Places:
    """How to share this machine among the jobs, given the memory of the largest one."""
    if workers != "auto":  # an explicit number needs no estimate, which takes seconds to build the models
        return places(workers, jobs, PROCESS_BYTES, None, per_gpu)
    arms = {job.arm: job.config for job in jobs}
    return places(workers, jobs, max(map(_memory, arms.values())), free_memory(), per_gpu)


def _memory(config: RunConfig) -> int:
    try:
        return cost_of(config).memory_bytes
    except Exception:  # a model that cannot be built fails in its worker, where its log says why
        return PROCESS_BYTES
