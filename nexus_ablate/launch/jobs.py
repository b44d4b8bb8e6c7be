"""The runs of a study: every arm with every seed, and with a grid of learning rates at every rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nexus_ablate import errors
from nexus_ablate.config.evaluations import evaluation_name, evaluation_of
from nexus_ablate.config.grammar import show
from nexus_ablate.config.options import Option
from nexus_ablate.config.override_syntax import quoted
from nexus_ablate.config.resolve import changed
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.console import several
from nexus_ablate.data import fingerprint_of
from nexus_ablate.errors import ConfigError, UserError
from nexus_ablate.gpus import on_gpu
from nexus_ablate.launch.arm_configs import Configs, budget
from nexus_ablate.provenance import code_of, differ, differing_files
from nexus_ablate.runs import SETTLED, arm_name, effective_state, has_status, read_status, read_summary, run_path
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.runs.reading import read_config, read_env
from nexus_ablate.study.arm_overrides import merged
from nexus_ablate.study.record import config_hash, planned
from nexus_ablate.study.study import WORTH_ARMS, Study
from nexus_ablate.training.device import compiles_on_cpu
from nexus_ablate.training.session import code_for, identity_of

STATUS = {"finished": errors.OK, "diverged": errors.DIVERGED, "failed": errors.BUG, "running": errors.ALIVE}
"""The exit status of each state; any other run can be resumed, or has not begun."""


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes:
        status: The exit status that the run would have on its own.
        reason: Why the status is not 0.
        path: The run directory, if it is not the job's (`rerun=on` makes a new one).
        warnings: What the run warned of, where nobody has seen it.
    """

    status: int
    reason: str = ""
    path: Path | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One run of a study.

    Attributes:
        arm: The arm that is trained.
        folder: The folder of its runs: the arm's, or one for the arm at another learning rate than its own.
        path: The run directory, existing or not.
        overrides: Everything that composes it, machine settings included.
        config: The composed configuration.
        plan: What its study planned.
    """

    arm: str
    seed: int
    folder: str
    path: Path
    overrides: list[str]
    config: RunConfig
    plan: dict[str, Any] = field(default_factory=dict)

    def state(self) -> tuple[str, str]:
        """The run's effective state and its reason; `missing` if there is no run."""
        if not has_status(self.path):
            return "missing", ""
        try:
            status = read_status(self.path)
            read_summary(self.path, status)
        except UserError as error:
            return "failed", f"{error.problem}: {error.got}; {error.fix}"
        return effective_state(status, self.path), status.get("reason") or ""

    def result(self) -> JobResult:
        """The result that the run has on its own: of a failed one as recorded; status 75 if it can be resumed."""
        state, reason = self.state()
        recorded = None
        if state == "failed":
            with suppress(UserError):  # a damaged run
                recorded = read_status(self.path).get("exit_status")
        return JobResult(recorded or STATUS.get(state, errors.PREEMPTED), reason)

    @property
    def lacks_evaluations(self) -> bool:
        """Whether a finished run was stopped before its evaluations."""
        wanted = {evaluation_name(evaluation_of(text)) for text in self.config.evals}
        if not wanted or self.state()[0] != "finished":
            return False
        return not wanted <= (read_summary(self.path, read_status(self.path)) or {}).keys()


def jobs(study: Study, configs: Configs, runs_dir: Path, launch: Sequence[str]) -> list[Job]:
    """All runs of a study of one setting, ordered by seed so that partial results can be compared.

    Args:
        study, configs: From `resolve`.
        launch: Overrides for how runs are carried out.

    Raises:
        UserError: The data cannot be read, or a folder cannot be used.
    """
    fingerprints: dict[str, str] = {}
    made = []
    compiles = all(compiles_here(config) for config in configs.values())  # all arms, or none
    for seed in study.seeds:
        for arm, arm_config in configs.items():
            own_rate = arm_config.schedule.lr
            for rate in study.rates(own_rate) or [None]:
                config, folder, settings = changed(arm_config, seed=seed), arm, []
                if rate not in (None, own_rate):
                    config = changed(config, optim=Option(config.optim.name, config.optim.keys | {"lr": rate}))
                    folder = arm_name({f"{arm},optim.lr": show(rate)})
                    settings.append(f"optim.lr={show(rate)}")
                text = repr((config.data, config.model.context))
                if text not in fingerprints:
                    fingerprints[text] = fingerprint_of(config.data, config.model.context)
                identity = identity_of(config, fingerprints[text])
                path = run_path(runs_dir, study.folder_name, folder, seed, identity)
                settings += [f"seed={seed}", f"experiment={quoted(Path(study.folder_name))}"]
                # `auto` could mean something else where the job runs
                settings.append(f"train.precision={config.train.precision}")
                if config.train.compile == "auto" and not compiles:
                    settings.append("train.compile=off")
                overrides = merged(_overrides_of(study, arm, configs), settings, [*launch])
                made.append(Job(arm, seed, folder, path, overrides, config, planned(study)))
    return made


def compiles_here(config: RunConfig) -> bool:
    """Whether `train.compile=auto` compiles a run of a study on this machine's CPU; on a GPU it compiles none.

    The runs are ordered by seed, so with as many arms as workers each program is compiled once, by the first run of
    its arm, and the other seeds find it in the compiler's cache.
    """
    device = config.train.device
    return device in ("auto", "cpu") and not on_gpu(device) and compiles_on_cpu(config)[0]


def _overrides_of(study: Study, arm: str, configs: Configs) -> list[str]:
    """The overrides of an arm in the study's setting, without a seed."""
    if arm in WORTH_ARMS:
        return merged(study.overrides_of(BASELINE), [budget(arm, configs[BASELINE])])
    return study.overrides_of(arm)


def missing(jobs: Iterable[Job], retry_failed: bool = False) -> list[Job]:
    """The jobs without a result, read from the disk. Failed ones count as missing with `retry_failed`."""
    ended = SETTLED if retry_failed else (*SETTLED, "failed")
    return [job for job in jobs if job.state()[0] not in ended or job.lacks_evaluations or job.config.rerun]


def refuse_other_runs(study: Study, jobs: Iterable[Job]) -> None:
    """Refuse a launch beside results that its own runs could not be compared with.

    Raises:
        ConfigError: There are runs with a result by other code, of another configuration, or on another text.
    """
    found = []
    for job in jobs:
        if job.path.exists():
            continue
        for path in sorted(job.path.parent.glob(f"s{job.seed}-*")):
            with suppress(UserError):  # a damaged run, which `status` and `compare` report
                if read_status(path)["state"] in SETTLED:
                    found.append((job, path, read_env(path) or {}))
    if not found:
        return
    job, path, env = found[0]
    again = another_name(study)
    got = f"{several(len(found), 'run')}, such as {path.parent.name}/{path.name}"
    files = differing_files(code_of(code_for(job.config)), code_of(env))
    if files:
        fix = again
        if (commit := env.get("git_commit")) and not env.get("git_dirty"):
            got += f" by commit {commit[:10]}"
            fix = f"git checkout {commit[:10]}, or {again}"
        raise ConfigError(f"study {study.name} has runs by other code: {differ(files)}", got, fix)
    config = read_config(path)
    if config is not None and config_hash(config) != config_hash(job.config.nested()):
        problem = f"study {study.name} has runs of another configuration than its arms, in folders of the same names"
        raise ConfigError(problem, got, again)
    problem = f"study {study.name} has runs on another text than the {job.config.data.name} of today"
    raise ConfigError(problem, got, f"restore the text, or {again}, which trains all anew")


def another_name(study: Study) -> str:
    """The override with which the same command makes a study of its own."""
    if not study.multirun:
        return f"name={study.name}-2"
    plain = "".join(letter if letter.isalnum() or letter in "_.-" else "-" for letter in study.name)
    return f"experiment={plain}-2"
