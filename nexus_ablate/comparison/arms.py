"""From runs to arms: one configuration each, with one run for each seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nexus_ablate.comparison.rates import CRITERION, best_rate, lowest_mean, weights_at_best
from nexus_ablate.comparison.read import LeftOut, Run
from nexus_ablate.comparison.statistics import Array
from nexus_ablate.config.run_config import flat
from nexus_ablate.errors import ConfigError, unknown
from nexus_ablate.provenance import differ, differing_files
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.study.endpoint import Endpoint
from nexus_ablate.study.record import config_hash
from nexus_ablate.study.study import WORTH_ARMS, Study


@dataclass(frozen=True)
class Arm:
    """One configuration at its seeds.

    Attributes:
        overrides: What it changes, as its study says; [] without a study.
        runs: The run of each seed, finished or diverged; with a grid of learning rates, those at the rate of the
            largest weight, or of the lowest mean loss where no rate is the best.
        by_rate: All runs by learning rate and seed; {} without a grid.
        weights: What each rate counts for; {} without a grid, or where there is no best rate.
        no_best_rate: Why there is none, in a study with a grid; "" otherwise.
    """

    name: str
    overrides: list[str] = field(default_factory=list)
    runs: dict[int, Run] = field(default_factory=dict)
    by_rate: dict[float, dict[int, Run]] = field(default_factory=dict)
    weights: dict[float, float] = field(default_factory=dict)
    no_best_rate: str = ""

    @property
    def config(self) -> dict[str, Any]:
        return next((run.config for run in self.runs.values()), {})

    @property
    def best_rate(self) -> float | None:
        """Its own best learning rate, in a study with a grid."""
        return best_rate(self.weights) if self.weights else None

    @property
    def counted(self) -> list[tuple[float, dict[int, Run]]]:
        """The runs by seed that the arm's values are read from, those of each rate with their weight."""
        return [(weight, self.by_rate[rate]) for rate, weight in self.weights.items()] or [(1.0, self.runs)]

    @property
    def failed(self) -> set[int]:
        """The seeds at which a run that counts ended without a finite loss."""
        return {seed for _, runs in self.counted for seed, run in runs.items() if not run.has_loss}

    @property
    def all_runs(self) -> list[Run]:
        """Every run of the arm, at any learning rate."""
        by_rate = self.by_rate.values() or [self.runs]
        return [run for runs in by_rate for run in runs.values()]

    def at_best(self, seed: int, value: Callable[[Run], Any]) -> Any:
        """A value of the run at a seed, or its weighted sum over the rates that count."""
        return sum(weight * value(runs[seed]) for weight, runs in self.counted)

    def values(self, name: str, seeds: Sequence[int]) -> Array:
        """(seeds,) a figure at each seed, at the arm's own best rate where it has one; NaN where there is none."""
        return self._by_seed(seeds, lambda run: run.figure(name))

    def on_scale(self, endpoint: Endpoint, seeds: Sequence[int]) -> Array:
        """(seeds,) the same of an endpoint, on its scale."""
        return self._by_seed(seeds, lambda run: run.on_scale(endpoint))

    def _by_seed(self, seeds: Sequence[int], value: Callable[[Run], float]) -> Array:
        values = np.full(len(seeds), math.nan)
        for place, seed in enumerate(seeds):
            if all(seed in runs for _, runs in self.counted):
                values[place] = self.at_best(seed, value)
        return values

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the runs that have it."""
        values = self.values(name, list(self.runs))
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else None


def arms_of(runs: list[Run], study: Study | None) -> tuple[list[Arm], list[LeftOut]]:
    """The arms of a folder, with one run per seed (and rate), which is never chosen for its result.

    All runs of an arm are by one code, that of the study's launch, or without a study that of the run begun last. Of
    several runs of a seed the first one stands.

    Returns:
        The arms that the study planned, then others with a run, and the runs that belong to none.
    """
    planned = [BASELINE, *study.arms] if study is not None else []
    groups: dict[str, list[Run]] = {name: [] for name in planned}
    left_out = []
    for run in sorted(runs, key=lambda run: (run.record.rerun, str(run.path))):
        if study is not None and run.arm not in (*planned, *WORTH_ARMS):
            left_out.append(run.left_out("not an arm of the study"))
        elif study is not None and run.seed not in study.seeds:
            left_out.append(run.left_out(f"seed {run.seed} is not one of the study's"))
        else:
            groups.setdefault(run.arm, []).append(run)
    arms = []
    for name, group in groups.items():
        arm, others = _arm(name, group, study)
        arms.append(arm)
        left_out += others
    return arms, left_out


def _arm(name: str, runs: list[Run], study: Study | None) -> tuple[Arm, list[LeftOut]]:
    """The arm of some runs of one name, and those that don't belong to it."""
    overrides = study.arms.get(name, []) if study is not None else []
    if not runs:
        return Arm(name, overrides), []
    has_grid = study is not None and bool(study.lr_grid)
    launched = [run for run in runs if study is not None and run.source == study.source]
    last = max(launched or runs, key=lambda run: str(run.record.status.get("started")))  # UTC, as text that sorts
    planned = study.configs.get(name) if study is not None else None
    wanted = planned or config_hash(last.config, has_grid)
    by_rate: dict[float, dict[int, Run]] = {}
    left_out = []
    for run in runs:
        rate = run.rate if has_grid else 0.0
        twin = by_rate.get(rate, {}).get(run.seed)
        if files := differing_files(run.code, last.code):
            left_out.append(run.left_out(f"by other code than {last.path.name}: {differ(files)}"))
        elif config_hash(run.config, has_grid) != wanted:
            left_out.append(run.left_out("its configuration, defaults included, is not that of the arm"))
        elif twin is not None:
            left_out.append(run.left_out(f"a second run of this arm and seed, beside {twin.path.name}"))
        else:
            by_rate.setdefault(rate, {})[run.seed] = run
    by_rate = {rate: dict(sorted(of_rate.items())) for rate, of_rate in sorted(by_rate.items())}
    if study is None or not has_grid:
        return Arm(name, overrides, by_rate.get(0.0, {})), left_out
    seeds = set.intersection(*map(set, by_rate.values())) if by_rate else set()
    if not seeds or len(by_rate) < len(study.rates(last.rate)):
        return Arm(name, overrides, by_rate=by_rate), left_out  # runs are missing
    losses = {rate: np.array([of_rate[seed].figure(CRITERION) for seed in seeds]) for rate, of_rate in by_rate.items()}
    weights, why = weights_at_best(losses)
    nearest = max(weights, key=lambda rate: weights[rate], default=lowest_mean(losses))
    return Arm(name, overrides, by_rate[nearest], by_rate, weights, why), left_out


def baseline_of(arms: list[Arm], requested: str | None) -> Arm:
    """The arm to compare with.

    Args:
        requested: Its name, where the user gave one.

    Raises:
        ConfigError: There is no such arm; or none was requested, and it is not plain which.
    """
    names = {arm.name: arm for arm in arms}
    wanted = requested or BASELINE
    if wanted in names:
        return names[wanted]
    if requested is not None:
        raise unknown("there is no arm of this name", requested, names)
    for arm in _plain(arms):
        return arm
    raise ConfigError("several arms could be the baseline", ", ".join(names), f"--baseline {min(names, key=len)}")


def _plain(arms: list[Arm]) -> list[Arm]:
    """The arms that have the default wherever arms differ."""
    from nexus_ablate.config.compose import compose

    default, configs = flat(compose([]).nested()), [flat(arm.config) for arm in arms]
    varied = []
    for key in {key for config in configs for key in config}:
        if any(config.get(key) != configs[0].get(key) for config in configs):
            varied.append(key)
    plain = []
    for arm, config in zip(arms, configs, strict=True):
        if all(config.get(key) == default.get(key) for key in varied):
            plain.append(arm)
    return plain
