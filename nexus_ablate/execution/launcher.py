"""A study's runs by one of Hydra's launchers (joblib, ray, ...) instead of this package's own queue.

A launcher takes an explicit list of overrides. It collects the return values of its jobs and gives up if one of them is
gone, so the state of a run is always read from its directory, and the same command launches what is missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from nexus_ablate import errors
from nexus_ablate.config.compose import search_plugins
from nexus_ablate.config.options import conf_dir
from nexus_ablate.config.overrides import check_overrides
from nexus_ablate.config.plugins import VARIABLE as PLUGINS
from nexus_ablate.errors import ConfigError
from nexus_ablate.execution.apart import APART
from nexus_ablate.execution.cluster_job import in_job, train_in_job
from nexus_ablate.execution.worker import Answer, Order
from nexus_ablate.planning.jobs import Job
from nexus_ablate.provenance import source_hash
from nexus_ablate.study.overrides import key_of

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

LAUNCHERS = {
    "slurm": ("submitit", "nexus-ablate[slurm]"),
    "submitit_slurm": ("submitit", "nexus-ablate[slurm]"),
    "submitit_local": ("submitit", "nexus-ablate[slurm]"),
    "joblib": ("joblib", "hydra-joblib-launcher"),
    "ray": ("ray", "hydra-ray-launcher"),
    "rq": ("rq", "hydra-rq-launcher"),
}
"""Hydra's launchers: the plugin that contains each, and the package to install."""

SWEEPERS = ("optuna", "ax", "nevergrad")
"""Hydra's sweepers that are plugins: NAME is in the package hydra-NAME-sweeper."""

STATUS = {"finished": errors.OK, "diverged": errors.DIVERGED, "failed": errors.BUG, "running": errors.ALIVE}
"""The exit status of each state; any other run can be resumed, or has not begun."""
NO_REASON = {"missing": "not started", "lost": "its process is gone"}
SETTLING_SECONDS = 10.0
"""Time that runs have to save themselves after their launcher has given up."""


@dataclass(frozen=True)
class Launcher:
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
        if "slurm" in self.name:
            fix = "--cluster slurm, which returns at once and needs no driver"
            raise ConfigError("this launcher is for multiruns", f"--launcher {self.name}", fix)
        require(self.name)
        check_overrides([f"hydra/launcher={self.name}", *self.settings], sweeps=False)
        with self._created(lambda composed: None):
            pass

    def run(self, jobs: list[Job], ended: Callable[[Job, Answer], None], say: Callable[[str], None]) -> str:
        """Let the launcher run the jobs.

        Args:
            ended: Called for each job when the launcher has returned.
            say: Prints a line.

        Returns:
            The stop signal, or ''.
        """
        overrides = [tuple(anywhere(job)) for job in jobs]
        runs = {text: (job.arm, job.path.absolute()) for text, job in zip(overrides, jobs, strict=True)}
        task = LauncherTask(runs, self.name, source_hash(), os.environ.get(PLUGINS, ""))
        returned: list[Any] = []
        with stops_at_signals() as stopped, self._created(task) as launcher:
            try:
                returned = list(launcher.launch([list(text) for text in overrides], initial_job_idx=0))
            except KeyboardInterrupt:
                stopped[:] = stopped or ["SIGINT"]
            except Exception as error:  # a launcher can raise anything if a job is gone
                first = next((line for line in str(error).splitlines() if line.strip()), "")
                say(f"{self.name} gave up ({type(error).__name__}: {first}); the same command launches what is missing")
        if not returned:
            _settle(jobs)
        for number, job in enumerate(jobs):
            ended(job, _answer(job, returned[number] if returned else None))
        return stopped[0] if stopped else ""

    @contextmanager
    def _created(self, task: Callable[[Any], Any]) -> Iterator[Any]:
        """Hydra's launcher, set up for a task; its own files are removed at the end.

        Raises:
            ConfigError: Hydra can't create it.
        """
        from hydra._internal.callbacks import Callbacks
        from hydra.core.plugins import Plugins
        from hydra.errors import HydraException
        from hydra.types import HydraContext, RunMode
        from omegaconf.errors import OmegaConfBaseException

        words = [f"hydra/launcher={self.name}", *self.settings]
        with open_hydra() as (hydra, scratch):
            try:
                everything = [*words, f"hydra.sweep.dir='{scratch}'"]
                config = hydra.compose_config("config", everything, RunMode.MULTIRUN, with_log_configuration=False)
                context = HydraContext(hydra.config_loader, Callbacks())
                launcher = Plugins.instance().instantiate_launcher(
                    hydra_context=context, task_function=task, config=config
                )
            except (HydraException, OmegaConfBaseException, ImportError) as error:
                problem = str(error).strip().splitlines()[0]
                fix = "--launcher joblib" if len(words) == 1 else f"--launcher {self.name}, without settings"
                raise ConfigError(problem, " ".join(words), fix) from error
            yield launcher


@contextmanager
def open_hydra() -> Iterator[tuple[Hydra, str]]:
    """Hydra, and a folder for its own files that is removed at the end. Processes it launches share the cores."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from nexus_ablate.training.device import share_cores_politely

    share_cores_politely()  # launched processes inherit the environment
    search_plugins()
    with (
        tempfile.TemporaryDirectory(prefix="nexus_ablate-") as scratch,
        initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"),
    ):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        yield hydra, scratch


@dataclass(frozen=True)
class LauncherTask:
    """The work of a launcher's job; launchers pickle it.

    Attributes:
        runs: The arm and the directory of each run, by its overrides.
        launcher: Its name.
        source: `source_hash` of the driver.
        plugins: The plugins' directories.
    """

    runs: dict[tuple[str, ...], tuple[str, Path]]
    launcher: str
    source: str
    plugins: str

    def __call__(self, composed: Any) -> Answer:
        """Train the run of the current job; `composed` is Hydra's composition of the same overrides."""
        from hydra.core.hydra_config import HydraConfig

        if self.plugins:
            os.environ[PLUGINS] = self.plugins
        overrides = tuple(HydraConfig.get().overrides.task)
        arm, path = self.runs[overrides]
        order = Order(list(overrides), arm, {"launcher": self.launcher}, brief=True, source=self.source)
        return train_in_job(order, path.name.partition("-")[2]) if in_job() else APART.train(order, path)


def require(launcher: str) -> None:
    """Raises:
    ConfigError: The launcher or its cluster is not available.
    """
    from nexus_ablate.execution.cluster_queue import accounting

    plugin, package = LAUNCHERS.get(launcher, ("", ""))
    if plugin and importlib.util.find_spec(f"hydra_plugins.hydra_{plugin}_launcher") is None:
        raise ConfigError(
            f"hydra/launcher={launcher} is not installed", f"no package {package}", f"pip install '{package}'"
        )
    if launcher in ("slurm", "submitit_slurm"):
        if shutil.which("sbatch") is None:
            raise ConfigError(
                f"hydra/launcher={launcher} needs SLURM's commands", "sbatch is not installed", "hydra/launcher=basic"
            )
        if not accounting():
            fix = "nexus-ablate study NAME --cluster slurm, which needs no sacct"
            raise ConfigError(
                f"hydra/launcher={launcher} would wait forever for a killed job", "sacct does not answer", fix
            )


def require_sweeper(sweeper: str) -> None:
    """Raises:
    ConfigError: The plugin with the sweeper is not installed.
    """
    if sweeper in SWEEPERS and importlib.util.find_spec(f"hydra_plugins.hydra_{sweeper}_sweeper") is None:
        package = f"hydra-{sweeper}-sweeper"
        raise ConfigError(
            f"hydra/sweeper={sweeper} is not installed", f"no package {package}", f"pip install {package}"
        )


def anywhere(job: Job) -> list[str]:
    """The overrides of a run that is trained in another working directory."""
    runs_dir = f"runs_dir='{job.path.absolute().parents[2]}'"
    return [*(text for text in job.overrides if key_of(text) != "runs_dir"), runs_dir]


def _settle(jobs: list[Job]) -> None:
    """Wait for runs that are saving themselves because their launcher has ended their process."""
    end = time.monotonic() + SETTLING_SECONDS
    while time.monotonic() < end and any(job.state()[0] == "running" for job in jobs):
        time.sleep(0.1)


def _answer(job: Job, returned: Any) -> Answer:
    """What became of a run: its job's answer, or its state if the launcher has none.

    Args:
        returned: Hydra's `JobReturn` of the job; None if the launcher gave up.
    """
    from hydra.core.utils import JobStatus

    if returned is not None and returned.status == JobStatus.COMPLETED:
        return returned.return_value
    state, reason = job.state()
    if returned is not None and state == "missing":
        error = returned._return_value
        return Answer(errors.BUG, f"it never started: {errors.described(error)}")
    return Answer(STATUS.get(state, errors.PREEMPTED), reason or NO_REASON.get(state, ""))


@contextmanager
def stops_at_signals() -> Iterator[list[str]]:
    """End a launcher at a signal as Ctrl-C does; yields a list that then holds the signal's name."""
    stopped: list[str] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(signal.Signals(number).name)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
