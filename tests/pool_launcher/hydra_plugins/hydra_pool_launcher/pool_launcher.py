"""A Hydra launcher for tests: each job goes, pickled by value, to a process of a pool that has imported nothing."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import cloudpickle
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict

NODE = {"_target_": "hydra_plugins.hydra_pool_launcher.pool_launcher.PoolLauncher", "workers": 1}
ConfigStore.instance().store(group="hydra/launcher", name="pool", node=NODE, provider="pool_launcher")


class PoolLauncher(Launcher):
    def __init__(self, workers: int) -> None:
        self.workers = workers

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        setup_globals()
        state = Singleton.get_state()
        with ProcessPoolExecutor(self.workers, get_context("spawn")) as pool:
            futures = []
            for number, overrides in enumerate(job_overrides, initial_job_idx):
                job = (self.context, self.task, self.config, [*overrides], number, state)
                futures.append(pool.submit(execute, cloudpickle.dumps(job)))
            return [cloudpickle.loads(future.result()) for future in futures]


def execute(pickled: bytes) -> bytes:
    """Run a job as Hydra does. Takes and returns pickles."""
    context, task, config, overrides, number, state = cloudpickle.loads(pickled)
    setup_globals()
    Singleton.set_state(state)
    composed = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(composed):
        composed.hydra.job.id, composed.hydra.job.num = str(number), number
    HydraConfig.instance().set_config(composed)
    keys = {"job_dir_key": "hydra.sweep.dir", "job_subdir_key": "hydra.sweep.subdir"}
    return cloudpickle.dumps(run_job(hydra_context=context, config=composed, task_function=task, **keys))
