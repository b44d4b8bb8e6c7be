"""From runs to arms: one configuration each, with one run for each seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nexus_ablate.comparison.rates import CRITERION, best_rate, weights_at_best
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
            largest weight.
        by_rate: All runs by learning rate and seed; {} without a grid.
        weights: What each rate counts for; {} without a grid, or where there is no best rate.
        no_best_rate: Why there is none, in a study with a grid; "" otherwise.
        left_out: Its runs that give no result.
    """

    name: str
    overrides: list[str] = field(default_factory=list)
    runs: dict[int, Run] = field(default_factory=dict)
    by_rate: dict[float, dict[int, Run]] = field(default_factory=dict)
    weights: dict[float, float] = field(default_factory=dict)
    no_best_rate: str = ""
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        return next((run.config for run in self.runs.values()), {})

    @property
    def best_rate(self) -> float | None:
        """Its own best learning rate, in a study with a grid."""
        return best_rate(self.weights) if self.weights else None

    @property
    def failed(self) -> set[int]:
        """The seeds at which a run that counts ended without a finite loss."""
        counted = [self.by_rate[rate] for rate in self.weights] or [self.runs]
        return {seed for runs in counted for seed, run in runs.items() if not run.has_loss}

    @property
    def all_runs(self) -> list[Run]:
        """Every run of the arm, at any learning rate."""
        by_rate = self.by_rate.values() or [self.runs]
        return [run for runs in by_rate for run in runs.values()]

    def runs_at(self, seed: int) -> list[tuple[float, Run]]:
        """The runs that the arm's values at a seed are read from, each with its weight."""
        if not self.weights:
            return [(1.0, self.runs[seed])]
        return [(weight, self.by_rate[rate][seed]) for rate, weight in self.weights.items()]

    def values(self, name: str, seeds: Sequence[int]) -> Array:
        """(seeds,) a figure at each seed, at the arm's own best rate where it has one; NaN where there is none."""
        return self._at_best(seeds, lambda run: run.figure(name))

    def on_scale(self, endpoint: Endpoint, seeds: Sequence[int]) -> Array:
        """(seeds,) the same of an endpoint, on its scale."""
        return self._at_best(seeds, lambda run: run.on_scale(endpoint))

    def _at_best(self, seeds: Sequence[int], value: Callable[[Run], float]) -> Array:
        """(seeds,) values weighted over the rates that count; NaN at a seed that lacks one of their runs."""
        counted = [self.by_rate[rate] for rate in self.weights] or [self.runs]
        values = np.full(len(seeds), math.nan)
        for place, seed in enumerate(seeds):
            if all(seed in runs for runs in counted):
                values[place] = sum(weight * value(run) for weight, run in self.runs_at(seed))
        return values

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the runs that have it."""
        values = self.values(name, list(self.runs))
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else None


def arms_of(runs: list[Run], left_out: list[LeftOut], study: Study | None) -> tuple[list[Arm], list[LeftOut]]:
    """The arms of a folder, with one run per seed (and rate), which is never chosen for its result.

    All runs of an arm are by one code, that of the study's launch, or without a study that of the run begun last. Of
    several runs of a seed the first one stands.

    Returns:
        The arms with a run, then those that the study planned and that have none, and every run that was left out.
    """
    left_out = [*left_out]
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.record.rerun, str(run.path))):
        if study is not None and run.arm not in (BASELINE, *WORTH_ARMS, *study.arms):
            left_out.append(run.left_out("not an arm of the study"))
        elif study is not None and run.seed not in study.seeds:
            left_out.append(run.left_out(f"seed {run.seed} is not one of the study's"))
        else:
            groups.setdefault(run.arm, []).append(run)
    arms = {}
    for name, group in groups.items():
        arms[name] = _arm(name, group, left_out, study)
    planned = [BASELINE, *study.arms] if study is not None else []
    ordered = [arms.pop(name, Arm(name)) for name in planned] + [*arms.values()]
    finished = []
    for arm in ordered:
        own = [out for out in left_out if out.arm == arm.name]
        overrides = study.arms.get(arm.name, []) if study is not None else []
        finished.append(replace(arm, overrides=overrides, left_out=own))
    return finished, left_out


def _arm(name: str, runs: list[Run], left_out: list[LeftOut], study: Study | None) -> Arm:
    """The arm of some runs of one name; those that don't belong to it are added to `left_out`."""
    launched = [run for run in runs if study is not None and run.source == study.source]
    last = max(launched or runs, key=lambda run: run.begun)
    has_grid = study is not None and bool(study.lr_grid)
    wanted = study.configs.get(name) if study is not None else None
    wanted = wanted or config_hash(last.config, has_grid)
    by_rate: dict[float, dict[int, Run]] = {}
    for run in runs:
        kept = by_rate.setdefault(run.rate if has_grid else 0.0, {})
        if run.source != last.source or run.plugins != last.plugins:
            left_out.append(run.left_out(f"by other code than {last.path.name}: {_unlike(run, last)}"))
        elif config_hash(run.config, has_grid) != wanted:
            left_out.append(run.left_out("its configuration, defaults included, is not that of the arm"))
        elif run.seed in kept:
            left_out.append(run.left_out(f"a second run of this arm and seed, beside {kept[run.seed].path.name}"))
        else:
            kept[run.seed] = run
    by_rate = {rate: dict(sorted(of_rate.items())) for rate, of_rate in sorted(by_rate.items()) if of_rate}
    if not has_grid:
        return Arm(name, runs=by_rate.get(0.0, {}))
    assert study is not None
    ended = set.intersection(*map(set, by_rate.values())) if by_rate else set()
    if not ended or len(by_rate) < len(study.rates(last.rate)):
        return Arm(name, by_rate=by_rate)  # the first round is not over
    losses = {rate: np.array([of_rate[seed].figure(CRITERION) for seed in ended]) for rate, of_rate in by_rate.items()}
    weights, why = weights_at_best(losses)
    nearest = max(weights, key=lambda rate: weights[rate], default=next(iter(by_rate), 0.0))
    return Arm(name, runs=by_rate.get(nearest, {}), by_rate=by_rate, weights=weights, no_best_rate=why)


def _unlike(run: Run, other: Run) -> str:
    """How the code that made two runs differs."""
    files = differing_files(run.code, other.code)
    return differ(files) if files else f"commit {str(run.env.get('git_commit'))[:8]}"


def baseline_of(arms: list[Arm], study: Study | None, requested: str | None) -> Arm:
    """The arm to compare with.

    Args:
        requested: Its name, where the user gave one.

    Raises:
        ConfigError: There is no such arm, or several could be meant.
    """
    names = {arm.name: arm for arm in arms}
    wanted = requested or BASELINE
    if wanted in names:
        return names[wanted]
    if requested is not None:
        raise unknown("there is no arm of this name", requested, names)
    plainest = _plainest(arms)
    if plainest is not None:
        return plainest
    first = next(iter(names), "")
    raise ConfigError("several arms could be the baseline", ", ".join(names), f"--baseline {first}")


def _plainest(arms: list[Arm]) -> Arm | None:
    """The arm that has the default wherever arms differ; None where there is none."""
    from nexus_ablate.config.compose import compose

    default, configs = flat(compose([]).nested()), [flat(arm.config) for arm in arms]
    keys = {key for config in configs for key in config}
    varied = [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]
    for arm, config in zip(arms, configs, strict=True):
        if all(config.get(key) == default.get(key) for key in varied):
            return arm
    return None
