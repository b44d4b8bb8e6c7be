"""The jobs of a study by one of Hydra's launchers: joblib, ray, rq, submitit_local and any other plugin.

A launcher takes an explicit list of overrides. It collects the return values of its jobs and gives up if one of them is
gone, so the state of a run is then read from its directory, and the same command launches what is missing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from multiprocessing import get_all_start_methods, get_start_method, set_start_method, util
from pathlib import Path
from typing import Any

from nexus_ablate import errors
from nexus_ablate.config.compose import search_plugins
from nexus_ablate.config.options import conf_dir
from nexus_ablate.config.override_syntax import quoted
from nexus_ablate.config.overrides import check_overrides
from nexus_ablate.errors import ConfigError, require_module, unknown
from nexus_ablate.gpus import gpu_of_worker
from nexus_ablate.launch.job_progress import JobProgress
from nexus_ablate.launch.jobs import Job, JobResult
from nexus_ablate.launch.local import Worker
from nexus_ablate.launch.slurm import refuse_secrets
from nexus_ablate.launch.worker import Task
from nexus_ablate.training.signals import StopRequest

PACKAGES = {
    "joblib": "hydra-joblib-launcher",
    "ray": "hydra-ray-launcher",
    "rq": "hydra-rq-launcher",
    "submitit_local": "nexus-ablate[slurm]",
}
"""The package to install for each of Hydra's launchers."""

NO_REASON = {"missing": "not started", "lost": "its process is gone"}
SETTLING_SECONDS = 10.0
"""Time that runs have to save themselves after their launcher has given up."""


@dataclass(frozen=True)
class HydraLauncher:
    """One of Hydra's launchers.

    Attributes:
        name: As in `hydra/launcher=NAME`.
        settings: Its `hydra.launcher.KEY=VALUE`, as typed.
    """

    name: str
    settings: tuple[str, ...] = ()

    def check(self) -> None:
        """Check that the launcher is installed and its settings can be read.

        Raises:
            ConfigError: It isn't, or they can't.
        """
        plugin = f"hydra_plugins.hydra_{self.name.partition('_')[0]}_launcher"
        if self.name in PACKAGES:
            require_module(plugin, f"hydra/launcher={self.name}", f"pip install '{PACKAGES[self.name]}'")
        check_overrides([f"hydra/launcher={self.name}", *self.settings], sweeps=True)
        with self._created(lambda composed: None):
            pass

    def run(self, jobs: list[Job], progress: JobProgress) -> str:
        """Let the launcher run the jobs, and report all of them when it has returned. Returns the stop signal, or ''.

        Raises:
            ConfigError: A job's overrides contain a secret, and the launcher would save them in files.
        """
        global _stopped_by
        _stopped_by = ""
        if "submitit" in self.name:
            refuse_secrets(text for job in jobs for text in job.overrides)
        progress.queued(
            len(jobs),
            f"hydra/launcher={self.name}",
        )
        tasks = {}
        for job in jobs:
            runs_dir = f"runs_dir={quoted(job.path.absolute().parents[2])}"  # jobs may have another working directory
            task = Task.of(job, {"launcher": self.name}, (runs_dir,))
            tasks[tuple(task.overrides)] = task
        returned: list[Any] = []
        with (
            StopRequest(("SIGTERM", "SIGHUP"), interrupt) as stop,
            self._created(partial(train_current, tasks)) as launcher,
        ):
            try:
                returned = list(launcher.launch([list(overrides) for overrides in tasks], initial_job_idx=0))
            except KeyboardInterrupt:
                stop.signal_name = stop.signal_name or "SIGINT"
            except Exception as error:  # a launcher can raise anything if a job is gone
                first = next((line for line in str(error).splitlines() if line.strip()), "")
                why = f"{type(error).__name__}: {first}"
                progress.say(f"{self.name} gave up ({why}); the same command launches what is missing")
        if not returned:
            end = time.monotonic() + SETTLING_SECONDS
            while time.monotonic() < end and any(job.state()[0] == "running" for job in jobs):
                time.sleep(0.1)
        for job, result in zip_longest(jobs, returned):
            progress.ended(job, result_from(job, result))
        return stop.signal_name or _stopped_by  # of a job in this process, which caught the signal

    @contextmanager
    def _created(self, task: Callable[[Any], Any]) -> Iterator[Any]:
        """Hydra's launcher, set up for a task; its own files are removed at the end.

        Raises:
            ConfigError: Hydra can't create it.
        """
        from hydra import initialize_config_dir
        from hydra._internal.callbacks import Callbacks
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.plugins import Plugins
        from hydra.errors import HydraException
        from hydra.types import HydraContext, RunMode
        from omegaconf.errors import OmegaConfBaseException

        from nexus_ablate.training.device import share_cores_politely

        share_cores_politely()  # launched processes inherit the environment
        search_plugins()
        words = [f"hydra/launcher={self.name}", *self.settings]
        with (
            tempfile.TemporaryDirectory(prefix="nexus_ablate-") as scratch,
            initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"),
        ):
            everything = [*words, f"hydra.sweep.dir={quoted(Path(scratch))}"]
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            try:
                config = hydra.compose_config("config", everything, RunMode.MULTIRUN, with_log_configuration=False)
                context = HydraContext(hydra.config_loader, Callbacks())
                launcher = Plugins.instance().instantiate_launcher(
                    hydra_context=context, task_function=task, config=config
                )
            except (HydraException, OmegaConfBaseException, ImportError) as error:
                known = [*hydra.config_loader.get_group_options("hydra/launcher"), "local", "slurm"]
                if self.name not in known:
                    problem, fix = "there is no launcher of this name", "--launcher local"
                    raise unknown(problem, self.name, known, "--launcher {}", otherwise=fix) from error
                problem = str(error).strip().splitlines()[0]
                raise ConfigError(problem, " ".join(words), f"--launcher {self.name}, without settings") from error
            yield launcher


def interrupt(name: str) -> None:
    """End a launcher as Ctrl-C does."""
    raise KeyboardInterrupt(name)


def train_current(tasks: Mapping[tuple[str, ...], Task], composed: Any) -> JobResult:
    """Train the run of a launcher's current job, whose overrides Hydra has also composed.

    Args:
        tasks: The tasks by their overrides.
    """
    from hydra.core.hydra_config import HydraConfig

    current = HydraConfig.get()
    if composed.train.device in ("auto", "cuda"):
        _worker.gpu = gpu_of_worker(current.job.num)
    return train_apart(tasks[tuple(current.overrides.task)])


_worker = Worker()
_stopped_by = ""


def train_apart(task: Task) -> JobResult:
    """Train a run in a child of this process, which must outlive it. After a stop signal no further run starts.

    The child imports torch once, as long as no run takes it down.
    """
    global _stopped_by
    if _stopped_by:
        return JobResult(errors.PREEMPTED, f"not started, because of {_stopped_by}")
    if get_start_method() not in get_all_start_methods():  # joblib's own, which a child cannot import
        set_start_method("spawn", force=True)
    util.Finalize(None, _worker.close, exitpriority=1)  # Python waits for its children at exit
    with StopRequest() as stop:
        result = _worker.train(task, lambda: bool(stop.signal_name))
        _stopped_by = stop.signal_name
        stop.obeyed = bool(_stopped_by)
    return result


def result_from(job: Job, returned: Any) -> JobResult:
    """What became of a run: its job's result, or its state if the launcher has none.

    Args:
        returned: Hydra's `JobReturn` of the job; None if the launcher gave up.
    """
    from hydra.core.utils import JobStatus

    if returned is not None and returned.status == JobStatus.COMPLETED:
        return returned.return_value
    state, reason = job.state()
    if returned is not None and state == "missing":
        return JobResult(errors.BUG, f"it never started: {errors.described(returned._return_value)}")
    return JobResult(job.result().status, reason or NO_REASON.get(state, ""))
