"""From runs to arms: one configuration each, one run per seed, and the one arm that the others are held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from nexus_ablate.comparison.curves import SPIKE_WINDOW, spikes
from nexus_ablate.comparison.differences import CUT, changes, label
from nexus_ablate.comparison.load import Collection, Excluded, Plan, Trained
from nexus_ablate.comparison.pairs import same_curves
from nexus_ablate.comparison.statistics import Array
from nexus_ablate.errors import ConfigError, unknown


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
        tuned: The same configuration at its own best learning rate, where the study trained it.
        shared: The same configuration at the study's learning rate, where this one is judged at its own.
    """

    name: str
    label: str
    runs: dict[int, Trained]
    waiting: list[Excluded] = field(default_factory=list)
    studies: set[str] = field(default_factory=set)
    tuning: list[Trained] = field(default_factory=list)
    tuned: Arm | None = None
    shared: Arm | None = None

    @property
    def config(self) -> dict:
        return next((run.config for run in (*self.runs.values(), *self.tuning)), {})

    @property
    def lr(self) -> float | None:
        return (self.config.get("optim") or {}).get("lr")

    def value(self, seed: int, name: str) -> float:
        """A figure of a finished run; NaN where there is none."""
        run = self.runs.get(seed)
        if run is None or run.record.state == "diverged":
            return float("nan")
        return run.figures.get(name, float("nan"))

    def values(self, name: str, seeds: Sequence[int]) -> Array:
        return np.array([self.value(seed, name) for seed in seeds])

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the runs that have it."""
        found = [self.value(seed, name) for seed in self.runs]
        found = [v for v in found if np.isfinite(v)]
        return float(np.mean(found)) if found else None

    @cached_property
    def figure_names(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs.values() for name in run.figures))

    @cached_property
    def spike_score(self) -> float | None:
        """Mean share of spikes among the logged training losses: as the run counted them, else counted here."""
        found = [
            run.figures.get("spike_score/train/loss", float(spikes(run.curves.train)[SPIKE_WINDOW:].mean()))
            for run in self.runs.values()
            if len(run.curves.train) > SPIKE_WINDOW
        ]
        return float(np.mean(found)) if found else None


# ----------------------------------------------------------------------------------------------- grouping of runs


def gather(collection: Collection, asked: str | None = None) -> tuple[Arm, list[Arm], list[Excluded], Plan]:
    """The baseline, the other arms, further exclusions, and the plan that holds for the comparison.

    Args:
        collection: From `collect`.
        asked: The baseline's name, where the user gave one.

    Raises:
        ConfigError: No result yet, an unknown baseline, or several that could be meant.
    """
    arms, excluded = group(collection)
    if not arms:
        states = ", ".join(f"{n} {s or 'no run'}" for s, n in Counter(e.state for e in collection.excluded).items())
        raise ConfigError("no run here has a result yet", states, "nexus-ablate status DIR shows what they do")
    baseline = _baseline(arms, collection.plans, asked)
    plan = next((collection.plans[study] for study in sorted(baseline.studies) if study in collection.plans), Plan(""))
    others = [arm for arm in arms if arm is not baseline]
    if baseline.name != "baseline" or any(CUT.search(arm.name) for arm in arms):
        _relabel(baseline, others)
    order = {name: i for i, name in enumerate(plan.arms)}
    others.sort(key=lambda arm: (order.get(arm.name, len(order)), arm.label))
    others += _not_begun(collection, plan, {arm.name for arm in arms})
    return baseline, others, excluded, plan


def group(collection: Collection) -> tuple[list[Arm], list[Excluded]]:
    """Arms by (name, identity without the seed); of the same arm and seed the first run stands, never the best."""
    groups: dict[tuple[str, str], Arm] = {}
    excluded = []
    for run in sorted(collection.runs, key=lambda r: (r.record.rerun, r.record.study, str(r.record.path))):
        key = (run.record.arm, run.arm_hash)
        arm = groups.setdefault(key, Arm(run.record.arm, run.record.arm, {}))
        arm.studies.add(run.record.study)
        if run.seed not in arm.runs:
            arm.runs[run.seed] = run
            continue
        kept = arm.runs[run.seed]
        same = "with the same losses" if same_curves(run, kept) else "with other losses"
        reason = f"duplicate: same arm and seed as {kept.record.path.name} of {kept.record.study}, {same}"
        excluded.append(Excluded(run.record.path, reason, run.record.arm, run.seed, run.record.state))
    arms = list(groups.values())
    names = Counter(arm.name for arm in arms)
    hashes = {id(arm): arm_hash[:8] for (_, arm_hash), arm in groups.items()}
    for arm in arms:
        arm.runs = dict(sorted(arm.runs.items()))
        if names[arm.name] > 1:  # the same words for two configurations
            study = "+".join(sorted(arm.studies))
            twins = [a for a in arms if a.name == arm.name and a.studies & arm.studies]
            arm.label = f"{arm.name} ({study})" if len(twins) == 1 else f"{arm.name} (#{hashes[id(arm)]})"
    for out in collection.excluded:
        namesakes = [arm for arm in arms if arm.name == out.arm and out.path.parent.parent.name in arm.studies]
        if namesakes:
            namesakes[0].waiting.append(out)
    return arms, excluded


def _baseline(arms: list[Arm], plans: dict[str, Plan], asked: str | None) -> Arm:
    def names(arm: Arm) -> set[str]:
        return {arm.name, arm.label, *(f"{study}/{arm.name}" for study in arm.studies)}

    if asked is not None:
        found = [arm for arm in arms if asked in names(arm)]
        if not found:
            raise unknown("there is no arm of this name", asked, [arm.label for arm in arms])
    else:
        wanted = {f"{study}/{plan.baseline}" for study, plan in plans.items()} or {"baseline"}
        found = [arm for arm in arms if names(arm) & wanted] or _plainest(arms)
    within = [arm for arm in found if arm.studies & found[0].studies]
    if len(within) < len(found) or not found:
        listed = ", ".join(arm.label for arm in found or arms)
        raise ConfigError("several arms could be the baseline", listed, "name one with --baseline ARM")
    return max(found, key=lambda arm: len(arm.runs))  # of two identities under one name, that with more seeds


def _plainest(arms: list[Arm]) -> list[Arm]:
    """The arm that makes no change which another does not make too, where there is one."""
    parts = {id(arm): changes(arm.name, arm.config) for arm in arms}
    return [arm for arm in arms if all(parts[id(arm)] <= parts[id(other)] for other in arms)]


def _relabel(baseline: Arm, others: list[Arm]) -> None:
    """Name arms by how they differ from this baseline, where that is a name for each of them."""
    found = [label(arm.config, baseline.config) for arm in others]
    if all(found) and len(set(found)) == len(found) and baseline.label not in found:
        for arm, text in zip(others, found, strict=True):
            arm.label = text
        if CUT.search(baseline.name) and "baseline" not in found:
            baseline.label = "baseline"


def _not_begun(collection: Collection, plan: Plan, present: set[str]) -> list[Arm]:
    """Arms without a result: declared by the plan or met only as excluded runs."""
    found = {name: Arm(name, name, {}) for name in plan.arms if name not in present}
    for out in collection.excluded:
        if out.arm and out.arm not in present:
            found.setdefault(out.arm, Arm(out.arm, out.arm, {})).waiting.append(out)
    return list(found.values())
