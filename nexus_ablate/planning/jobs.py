"""The runs of a study: list, directories and states.

Every arm is trained with every seed. With a learning-rate grid, every arm is first tuned over all rates with the tuning
seeds, and then trained with every seed at its best rate and at those around it. With looks, every arm is trained with
the seeds of the first look; later looks only train the undecided arms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from nexus_ablate import errors
from nexus_ablate.comparison.curves import read_curves
from nexus_ablate.comparison.failures import failure
from nexus_ablate.comparison.learning_rates import best_rate, mean_loss, rate_at, steps_around
from nexus_ablate.config.compose import differences
from nexus_ablate.config.grammar import show
from nexus_ablate.config.options import Option, evaluation_name, evaluation_of
from nexus_ablate.config.resolve import changed
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.data import fingerprint_of
from nexus_ablate.errors import UserError
from nexus_ablate.planning.design import Configs, expand
from nexus_ablate.planning.margin import with_margin
from nexus_ablate.runs import (
    SETTLED,
    arm_name,
    effective_state,
    has_status,
    read_run,
    read_status,
    read_summary,
    run_path,
)
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.study.arm_overrides import merged
from nexus_ablate.study.decoding import read_study
from nexus_ablate.study.definition import Request
from nexus_ablate.study.schema import Study, StudyArm
from nexus_ablate.training.session import identity_of

STATUS = {"finished": errors.OK, "diverged": errors.DIVERGED, "failed": errors.BUG, "running": errors.ALIVE}
"""The exit status of each state; any other run can be resumed, or has not begun."""


@dataclass(frozen=True)
class Job:
    """One run of a study.

    Attributes:
        of: The arm that is trained.
        arm: The folder of its runs: the arm's, or one for the arm at another learning rate.
        name: What progress calls the arm.
        path: The run directory, existing or not.
        overrides: Everything that composes it, machine settings included.
        config: The composed configuration, without machine settings.
        config_hash: Equal for runs of the same configuration by other code.
        conditions: What env.json says besides about how the run was carried out.
        again: Carry it out even if it has ended: for a rerun, or for further evaluations.
    """

    of: str
    arm: str
    name: str
    seed: int
    path: Path
    overrides: list[str]
    config: RunConfig
    config_hash: str
    conditions: dict[str, Any] = field(default_factory=dict)
    again: bool = False

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

    @property
    def exit_status(self) -> int:
        """The exit status that the run has on its own: of a failed run as recorded, 75 of one that can be resumed."""
        state, _ = self.state()
        recorded = None
        if state == "failed":
            with suppress(UserError):  # a damaged run
                recorded = read_status(self.path).get("exit_status")
        return recorded or STATUS.get(state, errors.PREEMPTED)

    @property
    def has_result(self) -> bool:
        """Whether the run finished or diverged."""
        return self.state()[0] in SETTLED

    @property
    def has_ended(self) -> bool:
        """Whether the run has a result or failed."""
        return self.state()[0] in (*SETTLED, "failed")

    @property
    def lacks_evaluations(self) -> bool:
        """Whether a finished run was stopped before its evaluations, or is asked for further ones."""
        wanted = {evaluation_name(evaluation_of(text)) for text in self.config.evals}
        if not wanted or self.state()[0] != "finished":
            return False
        return not wanted <= (read_summary(self.path, read_status(self.path)) or {}).keys()


class Runs:
    """The jobs of a study.

    Args:
        study, configs: From `expand`.
        request: Says how its runs are carried out.
    """

    def __init__(self, study: Study, configs: Configs, request: Request) -> None:
        self.study, self.configs, self.request = study, configs, request
        self._fingerprints: dict[str, str] = {}
        self._jobs: dict[tuple[str, int, float | None], Job] = {}
        self._losses: dict[Path, float] = {}

    @classmethod
    def of(cls, request: Request) -> Runs:
        """Those of a study, with added seeds and the margin; what an earlier launch matched or measured stays.

        Raises:
            ConfigError: The study cannot be run.
        """
        study, launched = request.study, read_study(request.directory)
        if launched is not None:
            added = {seed for entry in launched.added for seed in entry.seeds}
            if study.seeds == [seed for seed in launched.seeds if seed not in added]:
                study = replace(study, seeds=launched.seeds)
        study, configs = expand(study, launched, request.launch)
        study = with_margin(study, configs[BASELINE], request.runs_dir, launched)
        return cls(study, configs, request)

    @property
    def claims(self) -> list[Job]:
        """The runs of the first look, or all: every arm with every seed; with a grid, at the rates known so far."""
        return self.deciding(self.study.all_arms, self.study.first_seeds)

    @cached_property
    def premise(self) -> list[Job]:
        """The runs that come before all others: the baseline's, where the claim requires something of it.

        A learning-rate grid has none, because the rate at which the baseline is judged is not known yet.
        """
        study = self.study
        if not study.requires or study.lr_grid:
            return []
        return [job for job in self.claims if job.of == BASELINE]

    @cached_property
    def tuning(self) -> list[Job]:
        """Every arm at every rate of the grid with every tuning seed."""
        study = self.study
        return [
            self._job(arm, seed, lr) for seed in study.tuning_seeds for lr in study.lr_grid for arm in study.all_arms
        ]

    def later(self) -> list[Job]:
        """The runs that looks after the first can need: every arm with every later seed."""
        study = self.study
        return self.deciding(study.all_arms, study.seeds[len(study.first_seeds) :])

    def deciding(self, arms: Sequence[StudyArm], seeds: Sequence[int]) -> list[Job]:
        """The runs that a verdict is based on, ordered by seed so that partial results can be compared."""
        rates = [(arm, rate) for arm in arms for rate in self.rates(arm)]
        return [self._job(arm, seed, rate) for seed in seeds for arm, rate in rates]

    def seeds_with_result(self, arm: StudyArm) -> set[int]:
        """The seeds with which an arm has a result."""
        return {job.seed for job in self.deciding([arm], self.study.seeds) if job.has_result}

    def rates(self, arm: StudyArm) -> list[float | None]:
        """The rates that an arm is judged at: None for that of the study; [] until all tuning runs have ended.

        With a grid: the best one of the tuning runs and those around it, as far as the runs so far say. An arm of which
        a run failed to train at each rate of the grid fails with the study's rate.
        """
        study = self.study
        losses: dict[float, list[float]] = {}
        for lr in study.lr_grid:
            for seed in study.tuning_seeds:
                if (loss := self._loss(arm, seed, lr)) is None:
                    return []
                losses.setdefault(lr, []).append(loss)
        best = best_rate(losses)
        if best is None:
            return [None]
        steps: set[int] = set()
        for count in study.looks or [len(study.seeds)]:
            steps |= self._steps(arm, best, study.seeds[:count])
        return [rate_at(best, step) for step in sorted(steps)]

    def at_lowest_rate(self, arm: StudyArm) -> list[Job]:
        """The runs of an arm with each seed; with a grid, at the rate of the lowest mean loss so far."""
        study = self.study
        means = {}
        for rate in self.rates(arm):
            mean = self._mean_loss(arm, study.first_seeds, rate)
            means[rate] = math.inf if mean is None else mean
        if not means:
            return []
        lowest = min(means, key=means.__getitem__)
        return [self._job(arm, seed, lowest) for seed in study.seeds]

    def _steps(self, arm: StudyArm, best: float, seeds: Sequence[int]) -> set[int]:
        return {*steps_around(lambda step: self._mean_loss(arm, seeds, rate_at(best, step)))}

    def _mean_loss(self, arm: StudyArm, seeds: Sequence[int], rate: float | None) -> float | None:
        """Of an arm's runs at a rate; infinite where one failed to train, None until all have ended."""
        return mean_loss([self._loss(arm, seed, rate) for seed in seeds])

    def _loss(self, arm: StudyArm, seed: int, rate: float | None) -> float | None:
        """The validation loss of a run that has ended, infinite if it failed to train; None until then."""
        job = self._job(arm, seed, rate)
        if job.path not in self._losses and job.has_result:
            record = read_run(job.path)
            loss = (record.summary or {}).get("val_loss")
            if loss is None or failure(record, read_curves(job.path / "metrics.jsonl")):
                loss = math.inf
            self._losses[job.path] = loss
        return self._losses.get(job.path)

    def _job(self, arm: StudyArm, seed: int, lr: float | None) -> Job:
        """A run of an arm, at its own learning rate or at `lr`; composed once."""
        place, study = (arm.name, seed, lr), self.study
        if place in self._jobs:
            return self._jobs[place]
        config, name, extra = self.configs[arm.name], arm.name, []
        if lr is not None and lr != config.schedule.lr:
            config = changed(config, optim=Option(config.optim.name, config.optim.keys | {"lr": lr}))
            name = arm_name(differences(config, self.configs[BASELINE]))
            extra = [f"optim.lr={show(lr)}"]
        config = changed(config, seed=seed)
        text = repr((config.data, config.model.context))
        if text not in self._fingerprints:
            self._fingerprints[text] = fingerprint_of(config.data, config.model.context)
        ident = identity_of(config, self._fingerprints[text])
        pinned = f"train.precision={config.train.precision}"  # `auto` could mean something else where the job runs
        extra += [f"seed={seed}", f"experiment={study.name}"]
        overrides = merged([pinned], study.baseline, arm.overrides, extra, self.request.launch)
        self._jobs[place] = Job(
            of=arm.name,
            arm=name,
            name=name,
            seed=seed,
            path=run_path(self.request.runs_dir, study.name, name, seed, ident),
            overrides=overrides,
            config=config,
            config_hash=ident.config_hash,
        )
        return self._jobs[place]


def data_of(configs: Iterable[RunConfig]) -> list[tuple[Option, int]]:
    """Each distinct data option, with the longest context that needs it."""
    longest: dict[str, tuple[Option, int]] = {}
    for config in configs:
        key = str(config.data.flat())
        _, context = longest.get(key, (config.data, 0))
        longest[key] = (config.data, max(context, config.model.context))
    return list(longest.values())
