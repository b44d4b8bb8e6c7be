"""How many runs of a study this machine trains at a time, each with how many threads, on which GPU."""

from __future__ import annotations

from dataclasses import dataclass

from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.study.cost import PROCESS_BYTES, cost_of, free_memory
from nexus_ablate.study.jobs import Job
from nexus_ablate.training.device import IdleCores, visible_gpus


@dataclass(frozen=True)
class Places:
    """Where workers run: so many, each with so many CPU threads, each on one of the GPUs where there are any."""

    workers: int
    threads: int
    gpus: list[str]

    def gpu(self, worker: int) -> str | None:
        return self.gpus[worker % len(self.gpus)] if self.gpus else None

    @property
    def run_conditions(self) -> dict[str, int]:
        """For env.json: a run that shared its device is slower than one alone."""
        return {"workers": self.workers, "runs_per_device": -(-self.workers // max(1, len(self.gpus)))}


def places(asked: int | str, jobs: list[Job], memory_bytes: int, free_bytes: int | None) -> Places:
    """How to share this machine among jobs.

    Args:
        asked: Number of workers; `auto`: one a GPU, or one a core as far as the memory goes.
        jobs: What is to be run.
        memory_bytes: Of the largest one.
        free_bytes: Of this machine, None where unknown.
    """
    device = jobs[0].config.train.device
    gpus = visible_gpus() if device in ("auto", "cuda") else []
    cores = IdleCores.cores()
    if asked != "auto":
        workers = int(asked)
    elif gpus or device not in ("auto", "cpu"):
        workers = max(1, len(gpus))
    else:
        workers = cores if free_bytes is None else max(1, min(cores, free_bytes // memory_bytes))
    workers = max(1, min(workers, len(jobs)))
    given = jobs[0].config.train.threads
    threads = max(1, cores // workers) if given == "auto" else int(given)
    return Places(workers, threads, gpus)


def places_for(jobs: list[Job], workers: int | str) -> Places:
    """How to share this machine among the jobs, with regard to the memory of the largest one."""
    if workers != "auto":  # who says a number gets it, without the seconds that building the models takes
        return places(workers, jobs, PROCESS_BYTES, None)
    arms = {job.arm: job.config for job in jobs}
    return places(workers, jobs, max(map(_memory, arms.values())), free_memory())


def _memory(config: RunConfig) -> int:
    try:
        return cost_of(config).memory_bytes
    except Exception:  # a model that cannot be built fails in its worker, where its log says why
        return PROCESS_BYTES
