"""The number of concurrent runs on this machine, and each one's CPU threads and GPU."""

from __future__ import annotations

from dataclasses import dataclass

from nexus_ablate.console import several
from nexus_ablate.gpus import visible_gpus
from nexus_ablate.planning.jobs import Job
from nexus_ablate.training.device import IdleCores, bound_of_threads


@dataclass(frozen=True)
class Places:
    """The number of workers, the CPU threads of each, and the GPUs that they take in turn."""

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


def places_for(jobs: list[Job], requested: int | str, per_gpu: int = 1) -> Places:
    """How to share this machine among jobs.

    Args:
        jobs: The jobs to run.
        requested: Number of workers; `auto`: `per_gpu` on each visible GPU, or without GPUs one per CPU core.
        per_gpu: Workers per GPU.
    """
    train = jobs[0].config.train
    gpus = visible_gpus() if train.device in ("auto", "cuda") else []
    cores = IdleCores.cores()
    if requested != "auto":
        workers = int(requested)
    elif gpus or train.device not in ("auto", "cpu"):
        workers = per_gpu * len(gpus)
    else:
        workers = cores
    workers = max(1, min(workers, len(jobs)))
    share = min(max(1, cores // workers), bound_of_threads() or cores)
    threads = share if train.threads == "auto" else int(train.threads)
    return Places(workers, threads, gpus)
