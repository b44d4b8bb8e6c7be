"""Grouping runs into arms, one configuration each with one run per seed, and choosing the baseline."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nexus_ablate.comparison.differences import CUT, changes, departure, label
from nexus_ablate.comparison.load import Collection, Excluded, Trained
from nexus_ablate.comparison.pairs import same_curves, unlike_code
from nexus_ablate.comparison.statistics import Array
from nexus_ablate.comparison.terms import Terms
from nexus_ablate.console import several
from nexus_ablate.errors import ConfigError, unknown
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.study.endpoint import Endpoint


@dataclass
class Arm:
    """One configuration at its seeds.

    Attributes:
        name: Its directory's name.
        label: Its name in tables, unique in a comparison.
        runs: The run of each seed, finished or diverged.
        waiting: Runs of the arm without a result: running, failed, lost, damaged.
        studies: Where its runs lie.
        tuning: Runs at the tuning seeds of the study, over its learning rates.
        rates: Runs at the other seeds by learning rate, in a study with a grid of them.
        around: Where the arm's values are those at its own best learning rate: the runs at the rates around it, by
            seed, each rate with what it counts for. `runs` are those at the nearest one.
        best_rate: Its own best learning rate.
    """

    name: str
    label: str
    runs: dict[int, Trained]
    waiting: list[Excluded] = field(default_factory=list)
    studies: set[str] = field(default_factory=set)
    tuning: list[Trained] = field(default_factory=list)
    rates: dict[float | None, dict[int, Trained]] = field(default_factory=dict)
    around: list[tuple[float, dict[int, Trained]]] = field(default_factory=list)
    best_rate: float | None = None

    @property
    def names(self) -> list[str]:
        """What a user may call it."""
        return [self.name, self.label, *(f"{study}/{self.name}" for study in self.studies)]

    @property
    def config(self) -> dict:
        return next((run.config for run in (*self.runs.values(), *self.tuning)), {})

    @property
    def lr(self) -> float | None:
        return (self.config.get("optim") or {}).get("lr")

    @property
    def claim_runs(self) -> list[Trained]:
        """Every run of the arm at other seeds than the tuning ones, at any learning rate."""
        by_rate = self.rates.values() or [self.runs]
        return [run for runs in by_rate for run in runs.values()]

    @property
    def all_runs(self) -> list[Trained]:
        """Every run of the arm, at any learning rate."""
        return [*self.tuning, *self.claim_runs]

    def value(self, seed: int, name: str) -> float:
        """A figure of a finished run; NaN where there is none."""
        return float(self.values(name, [seed])[0])

    def values(self, name: str, seeds: Sequence[int]) -> Array:
        """A figure at each seed; at the arm's own best learning rate, where it has one."""
        return self._at_best(lambda runs: _figures(runs, name, seeds))

    def on_scale(self, endpoint: Endpoint, seeds: Sequence[int]) -> Array:
        """An endpoint's values on its scale."""
        return self._at_best(lambda runs: endpoint.on_scale(lambda name: _figures(runs, name, seeds)))

    def runs_at(self, seed: int) -> list[tuple[float, Trained]]:
        """The runs that the arm's value at a seed is read from, each with what it counts for."""
        return [(weight, runs[seed]) for weight, runs in self._weighted]

    def _at_best(self, values: Callable[[dict[int, Trained]], Array]) -> Array:
        """Values of runs at one rate, weighted over the rates around the arm's best one."""
        return np.sum([weight * values(runs) for weight, runs in self._weighted], axis=0)

    @property
    def _weighted(self) -> list[tuple[float, dict[int, Trained]]]:
        """The runs at each rate that the arm's values are read from, with what the rate counts for."""
        return self.around or [(1.0, self.runs)]

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the runs that have it."""
        values = self.values(name, list(self.runs))
        values = values[np.isfinite(values)]
        return float(np.mean(values)) if len(values) else None


def _figures(runs: dict[int, Trained], name: str, seeds: Sequence[int]) -> Array:
    trained = {seed: run for seed, run in runs.items() if run.record.state not in ("diverged", "failed")}
    return np.array([trained[seed].figure(name) if seed in trained else np.nan for seed in seeds])


# ----------------------------------------------------------------------------------------------- grouping of runs


class NoResult(ConfigError):
    """Runs that have not ended, or none."""


def against_baseline(
    arms: list[Arm], left_out: list[Excluded], studies: dict[str, Terms], requested: str | None
) -> tuple[Arm, list[Arm], Terms]:
    """The baseline, the other arms, and the terms that hold for the comparison.

    Args:
        arms: From `group`; of a study that tunes learning rates, one for all rates.
        left_out: Runs that are not in the table.
        studies: Their terms by name.
        requested: The baseline's name, where the user gave one.

    Raises:
        NoResult: No run has ended.
        ConfigError: An unknown baseline, or several that could be meant.
    """
    if not arms:
        states = Counter(out.state or "no run" for out in left_out)
        counts = ", ".join(f"{count} {state}" for state, count in states.items()) or "no run has started"
        raise NoResult("no run here has a result yet", counts, "nexus-ablate status DIR shows what they do")
    baseline = _baseline(arms, left_out, studies, requested)
    terms = studies.get(min(baseline.studies & studies.keys(), default=""), Terms())
    chosen_late = list(terms.exploratory)
    for other in studies.values():
        if other.name != terms.name:
            chosen_late += (f"{reason} in {other.name}" for reason in other.exploratory)
            if other.study.looks:
                chosen_late.append(f"the looks of {other.name} chose its seeds")
    others = [arm for arm in arms if arm is not baseline]
    if baseline.name != BASELINE or any(CUT.search(arm.name) for arm in arms):
        _relabel(baseline, others, {arm.name for arm in terms.study.arms if arm.named})
    order = {name: place for place, name in enumerate(terms.arm_names)}
    others.sort(key=lambda arm: (order.get(arm.name, len(order)), arm.label))
    without_result = {name: Arm(name, name, {}) for name in terms.arm_names}
    for out in left_out:
        if out.arm:
            without_result.setdefault(out.arm, Arm(out.arm, out.arm, {})).waiting.append(out)
    for arm in arms:
        without_result.pop(arm.name, None)
    return baseline, [*others, *without_result.values()], replace(terms, exploratory=tuple(chosen_late))


def group(collection: Collection) -> tuple[list[Arm], list[Excluded]]:
    """Arms by name and configuration, with one run per seed, which is never chosen for its result.

    The configuration of a run is the one that its study keeps for the arm, where it keeps one. All runs of an arm are
    by one code: that of the study's last launch, or where it has made none (or there is no study) that of the run begun
    last. Of several runs by that code the first stands.
    """
    kept, excluded = [], []
    for run in collection.runs:
        if departs := departure(run.config, run.record.arm, collection.study_of(run)):
            reason = f"its configuration {departs}: defaults of options included, an arm is trained with one alone"
            excluded.append(run.excluded(reason, "inconsistent"))
        else:
            kept.append(run)
    by_configuration: dict[tuple[str, str], list[Trained]] = {}
    for run in sorted(kept, key=lambda run: (run.record.rerun, run.record.study, str(run.record.path))):
        by_configuration.setdefault((run.record.arm, run.config_hash), []).append(run)
    arms = []
    for (name, _), runs in by_configuration.items():
        launched = [run for run in runs if run.source == collection.study_of(run).source]
        last = max(launched or runs, key=lambda run: run.begun)
        current = [run for run in runs if (run.source, run.plugins) == (last.source, last.plugins)]
        by_seed = {run.seed: run for run in reversed(current)}
        excluded += [_left_out(run, by_seed.get(run.seed, last)) for run in runs if run is not by_seed.get(run.seed)]
        arms.append(Arm(name, name, dict(sorted(by_seed.items())), studies={run.record.study for run in runs}))
    for arm, (_, requested) in zip(arms, by_configuration, strict=True):
        namesakes = [other for other in arms if other.name == arm.name and other is not arm]
        if namesakes:  # the same words for two configurations
            is_only_of_study = all(arm.studies.isdisjoint(other.studies) for other in namesakes)
            which = "+".join(sorted(arm.studies)) if is_only_of_study else f"#{requested[:8]}"
            arm.label = f"{arm.name} ({which})"
    for out in collection.excluded:
        namesakes = [arm for arm in arms if arm.name == out.arm and out.path.parent.parent.name in arm.studies]
        if namesakes:
            namesakes[0].waiting.append(out)
    return arms, excluded


def _left_out(run: Trained, kept: Trained) -> Excluded:
    """Why a run is left out in favour of another run of the same arm and seed."""
    where = f"{kept.record.path.name} of {kept.record.study}"
    if code := unlike_code(run, kept):
        age = "newer" if run.begun > kept.begun else "older"
        return run.excluded(f"{age} run by other code than {where}: {code}")
    same = "with the same losses" if same_curves(run, kept) else "with other losses"
    return run.excluded(f"duplicate: same arm and seed as {where}, {same}")


def _baseline(arms: list[Arm], excluded: list[Excluded], studies: dict[str, Terms], requested: str | None) -> Arm:
    def called(*wanted: str) -> list[Arm]:
        return [arm for arm in arms if not {*arm.names}.isdisjoint(wanted)]

    if requested is not None:
        candidates = called(requested)
        if not candidates:
            raise unknown("there is no arm of this name", requested, [arm.label for arm in arms])
    else:
        planned = [f"{study}/{BASELINE}" for study in studies]
        candidates = called(*planned or [BASELINE])
        lost = [run for run in excluded if planned and run.arm == BASELINE]
        if lost and not candidates:
            got = f"{several(len(lost), 'run')} excluded, the first because: {lost[0].reason}"
            fix = f"nexus-ablate status {shlex.quote(str(lost[0].path.parent))}"
            raise NoResult("no run of the study's baseline has a result that can be used", got, fix)
        if not candidates:  # the arm that makes no change which another does not make too, where there is one
            changed = [changes(arm.name, arm.config) for arm in arms]
            shared = set.intersection(*changed)
            candidates = [arm for arm, keys in zip(arms, changed, strict=True) if keys == shared]
    if not candidates or any(arm.studies.isdisjoint(candidates[0].studies) for arm in candidates):
        meant = candidates or arms
        first = meant[0]
        name = first.label if len(called(first.label)) == 1 else f"{min(first.studies)}/{first.name}"
        fix = f"name one: --baseline {shlex.quote(name)}"
        raise ConfigError("several arms could be the baseline", ", ".join(arm.label for arm in meant), fix)
    return max(candidates, key=lambda arm: len(arm.runs))  # of two identities under one name, that with more seeds


def _relabel(baseline: Arm, others: list[Arm], named: set[str]) -> None:
    """Name arms by how they differ from this baseline, where that is a name for each of them."""
    labels = [arm.name if arm.name in named else label(arm.config, baseline.config) for arm in others]
    if all(labels) and len(set(labels)) == len(labels) and baseline.label not in labels:
        for arm, text in zip(others, labels, strict=True):
            arm.label = text
        if CUT.search(baseline.name) and BASELINE not in labels:
            baseline.label = BASELINE
