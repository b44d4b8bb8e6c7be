"""Grouping runs into arms, one configuration each with one run per seed, and choosing the baseline."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from nexus_ablate.comparison.differences import CUT, changes, departure, label
from nexus_ablate.comparison.load import Collection, Excluded, Trained
from nexus_ablate.comparison.pairs import same_curves, unlike_code
from nexus_ablate.comparison.statistics import Array
from nexus_ablate.comparison.terms import Terms
from nexus_ablate.console import several
from nexus_ablate.errors import ConfigError, unknown
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
        around: What each of these rates counts for in the arm's values, which are then those at its own best rate;
            `runs` are those at the nearest one of them.
        best_rate: Its own best learning rate.
    """

    name: str
    label: str
    runs: dict[int, Trained]
    waiting: list[Excluded] = field(default_factory=list)
    studies: set[str] = field(default_factory=set)
    tuning: list[Trained] = field(default_factory=list)
    rates: dict[float | None, dict[int, Trained]] = field(default_factory=dict)
    around: dict[float, float] = field(default_factory=dict)
    best_rate: float | None = None

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
        if not self.around:
            return [(1.0, self.runs[seed])]
        return [(weight, self.rates[rate][seed]) for rate, weight in self.around.items()]

    def _at_best(self, values: Callable[[dict[int, Trained]], Array]) -> Array:
        """Values of runs at one rate, weighted over the rates around the arm's best one."""
        if not self.around:
            return values(self.runs)
        parts = []
        for rate, weight in self.around.items():
            runs = self.rates.get(rate, {})
            parts.append(weight * values({seed: runs[seed] for seed in self.runs}))
        return np.sum(parts, axis=0)

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the runs that have it."""
        values = self.values(name, list(self.runs))
        values = values[np.isfinite(values)]
        return float(np.mean(values)) if len(values) else None

    @cached_property
    def figure_names(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs.values() for name in run.figures))


def _figures(runs: dict[int, Trained], name: str, seeds: Sequence[int]) -> Array:
    values = np.full(len(seeds), np.nan)
    for place, seed in enumerate(seeds):
        run = runs.get(seed)
        if run is not None and run.record.state != "diverged":
            values[place] = run.figure(name)
    return values


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
    terms = replace(terms, exploratory=tuple(chosen_late))
    others = [arm for arm in arms if arm is not baseline]
    if baseline.name != "baseline" or any(CUT.search(arm.name) for arm in arms):
        _relabel(baseline, others, {arm.name for arm in terms.study.arms if arm.named})
    order = {name: place for place, name in enumerate(terms.arm_names)}
    others.sort(key=lambda arm: (order.get(arm.name, len(order)), arm.label))
    begun = {arm.name for arm in arms}
    without_result = {name: Arm(name, name, {}) for name in terms.arm_names if name not in begun}
    for out in left_out:
        if out.arm and out.arm not in begun:
            without_result.setdefault(out.arm, Arm(out.arm, out.arm, {})).waiting.append(out)
    return baseline, [*others, *without_result.values()], terms


def group(collection: Collection) -> tuple[list[Arm], list[Excluded]]:
    """Arms by name and configuration, with one run per seed, which is never chosen for its result.

    All runs of an arm are by one code: that of the study's last launch, or where it has made none (or there is no
    study) that of the run begun last. Of several runs by that code the first stands.
    """
    trained, excluded = _as_fixed(collection)
    arms, hashes = [], []
    by_configuration: dict[tuple[str, str], list[Trained]] = {}
    for run in sorted(trained, key=lambda run: (run.record.rerun, run.record.study, str(run.record.path))):
        by_configuration.setdefault((run.record.arm, run.config_hash), []).append(run)
    for (name, requested), runs in by_configuration.items():
        launched = [run for run in runs if run.source == collection.study_of(run).source]
        last = max(launched or runs, key=lambda run: run.begun)
        kept: dict[int, Trained] = {}
        for run in runs:
            if (run.source, run.plugins) == (last.source, last.plugins):
                kept.setdefault(run.seed, run)
        for run in runs:
            counted = kept.get(run.seed, last)
            if counted is not run:
                excluded.append(_left_out(run, counted))
        studies = {run.record.study for run in runs}
        arms.append(Arm(name, name, dict(sorted(kept.items())), studies=studies))
        hashes.append(requested[:8])
    for arm, requested in zip(arms, hashes, strict=True):
        namesakes = [other for other in arms if other.name == arm.name]
        if len(namesakes) > 1:  # the same words for two configurations
            is_only_of_study = all(other is arm or not other.studies & arm.studies for other in namesakes)
            which = "+".join(sorted(arm.studies)) if is_only_of_study else f"#{requested}"
            arm.label = f"{arm.name} ({which})"
    for out in collection.excluded:
        namesakes = [arm for arm in arms if arm.name == out.arm and out.path.parent.parent.name in arm.studies]
        if namesakes:
            namesakes[0].waiting.append(out)
    return arms, excluded


def _as_fixed(collection: Collection) -> tuple[list[Trained], list[Excluded]]:
    """The runs whose configuration is the one that their study keeps for the arm, and those that have another."""
    kept, excluded = [], []
    for run in collection.runs:
        if departs := departure(run.config, run.record.arm, collection.study_of(run)):
            reason = f"its configuration {departs}: defaults of options included, an arm is trained with one alone"
            excluded.append(run.excluded(reason, "inconsistent"))
        else:
            kept.append(run)
    return kept, excluded


def _left_out(run: Trained, kept: Trained) -> Excluded:
    """Why a run is left out in favour of another run of the same arm and seed."""
    where = f"{kept.record.path.name} of {kept.record.study}"
    if code := unlike_code(run, kept):
        age = "newer" if run.begun > kept.begun else "older"
        return run.excluded(f"{age} run by other code than {where}: {code}")
    same = "with the same losses" if same_curves(run, kept) else "with other losses"
    return run.excluded(f"duplicate: same arm and seed as {where}, {same}")


def _baseline(arms: list[Arm], excluded: list[Excluded], terms: dict[str, Terms], requested: str | None) -> Arm:
    def names(arm: Arm) -> set[str]:
        return {arm.name, arm.label, *(f"{study}/{arm.name}" for study in arm.studies)}

    if requested is not None:
        candidates = [arm for arm in arms if requested in names(arm)]
        if not candidates:
            raise unknown("there is no arm of this name", requested, [arm.label for arm in arms])
    else:
        wanted = {f"{study}/{of_study.baseline}" for study, of_study in terms.items()} or {"baseline"}
        candidates = [arm for arm in arms if names(arm) & wanted]
        baselines = {of_study.baseline for of_study in terms.values()}
        lost = [run for run in excluded if run.arm in baselines]
        if lost and not candidates:
            got = f"{several(len(lost), 'run')} excluded, the first because: {lost[0].reason}"
            fix = f"nexus-ablate status {shlex.quote(str(lost[0].path.parent))}"
            raise NoResult("no run of the study's baseline has a result that can be used", got, fix)
        if not candidates:  # the arm that makes no change which another does not make too, where there is one
            parts = [changes(arm.name, arm.config) for arm in arms]
            candidates = [arm for arm, own in zip(arms, parts, strict=True) if own == set.intersection(*parts)]
    within = [arm for arm in candidates if arm.studies & candidates[0].studies]
    if len(within) < len(candidates) or not candidates:
        listed = [arm.label for arm in candidates or arms]
        first = (candidates or arms)[0]
        is_unique = sum(first.label in names(arm) for arm in arms) == 1
        name = first.label if is_unique else f"{min(first.studies)}/{first.name}"
        fix = f"name one: --baseline {shlex.quote(name)}"
        raise ConfigError("several arms could be the baseline", ", ".join(listed), fix)
    return max(candidates, key=lambda arm: len(arm.runs))  # of two identities under one name, that with more seeds


def _relabel(baseline: Arm, others: list[Arm], named: set[str]) -> None:
    """Name arms by how they differ from this baseline, where that is a name for each of them."""
    labels = []
    for arm in others:
        labels.append(arm.name if arm.name in named else label(arm.config, baseline.config))
    if all(labels) and len(set(labels)) == len(labels) and baseline.label not in labels:
        for arm, text in zip(others, labels, strict=True):
            arm.label = text
        if CUT.search(baseline.name) and "baseline" not in labels:
            baseline.label = "baseline"
