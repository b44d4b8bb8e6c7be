"""How often small models agree with the calibration panel.

Decision accuracy is the share of changes whose difference has the published sign (DataDecide, arXiv:2504.11393). The
arm and its baseline are read at the rate at which each has the lowest mean loss over the seeds: both are chosen alike,
on the same seeds. The rates on both sides of it must be trained, those beyond need not be.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import astuple

from nexus_ablate.comparison.arms import group
from nexus_ablate.comparison.failures import failure
from nexus_ablate.comparison.load import collect
from nexus_ablate.comparison.statistics import LEVEL, mean_interval
from nexus_ablate.config.options import conf_dir
from nexus_ablate.errors import ConfigError
from nexus_ablate.plain_data import UNREADABLE
from nexus_ablate.runs.files import atomic_write_text
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.study.panel import STUDY, Panel, PanelChange, stratum_of

Agreement = Literal["right", "wrong", "reversed", "not decided"]
"""wrong: the mean lies on the other side; of a null change, the interval lies outside the margin.
reversed: the interval of a directional change excludes 0 on the other side.
not decided: the interval of a null change crosses its margin, or both arms fail to train."""


class PanelRun(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The final validation loss of one run; None if it failed to train."""

    study: str
    arm: str
    size: str
    rate: float
    seed: int
    loss: float | None


class PanelRuns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ended runs of the panel, the hash of the code that trained them, and its commits."""

    source: str
    commits: list[str]
    runs: list[PanelRun]


@dataclass(frozen=True)
class ChangeOutcome:
    """One change at one size.

    Attributes:
        difference: Mean of the paired differences in nats per token; infinite where one of the two failed to train, NaN
            where both did.
        low, high: Its 95% interval over the seeds.
        at_edge: One of the two is at its best at the edge of the rates.
    """

    name: str
    change: PanelChange
    size: str
    difference: float
    low: float
    high: float
    at_edge: bool

    @property
    def agreement(self) -> Agreement:
        if math.isnan(self.difference):
            return "not decided"
        if self.change.is_null:
            margin = self.change.margin
            if -margin < self.low and self.high < margin:
                return "right"
            return "wrong" if self.low > margin or self.high < -margin else "not decided"
        sign = 1 if self.change.expected == "higher" else -1
        if sign * self.difference > 0:
            return "right"
        return "reversed" if max(sign * self.low, sign * self.high) < 0 else "wrong"


@dataclass(frozen=True)
class Share:
    """How many of a number of changes are right."""

    right: int
    of: int

    @property
    def interval(self) -> tuple[float, float]:
        """The exact 95% interval of the share (Clopper and Pearson 1934), as if the changes were independent."""
        from scipy.stats import beta

        wrong = self.of - self.right
        low, high = 0.0, 1.0
        if self.right:
            low = float(beta.ppf(LEVEL / 2, self.right, wrong + 1))
        if wrong:
            high = float(beta.ppf(1 - LEVEL / 2, self.right + 1, wrong))
        return low, high


def share(outcomes: Sequence[ChangeOutcome]) -> Share:
    return Share(sum(outcome.agreement == "right" for outcome in outcomes), len(outcomes))


def no_difference(outcomes: Sequence[ChangeOutcome]) -> Share:
    """What it scores to call every change null."""
    return Share(sum(outcome.change.is_null for outcome in outcomes), len(outcomes))


def newer_wins(outcomes: Sequence[ChangeOutcome]) -> Share:
    """What it scores to expect of every change that the newer of the two has the lower loss."""
    lower = {"lower": "arm", "higher": "baseline"}
    agreeing = sum(lower.get(outcome.change.expected) == outcome.change.newer for outcome in outcomes)
    return Share(agreeing, len(outcomes))


def fewest_right(of: int) -> int:
    """How many of a number of changes must be right for the interval to exclude a coin's half; `of` + 1 if none do."""
    return bisect_left(range(of + 1), True, key=lambda right: Share(right, of).interval[0] > 0.5)


def chance_of(right: int, of: int, accuracy: float) -> float:
    """The probability that so many of a number of independent changes or more are right."""
    from scipy.stats import binom

    return float(binom.sf(right - 1, of, accuracy))


# ---------------------------------------------------------------------------------------------------------- outcomes


def outcomes(panel: Panel, runs: Iterable[PanelRun]) -> list[ChangeOutcome]:
    """The changes whose arm and baseline can be read at a rate, size by size, in the panel's order."""
    losses = {astuple(run)[:-1]: math.inf if run.loss is None else run.loss for run in runs}
    found = []
    for size, (name, change) in itertools.product(panel.sizes, panel.changes.items()):
        rates = panel.sizes[size].rates
        keys = itertools.product([change.study], [name, BASELINE], [size], rates, panel.seeds)
        of_both = np.array([losses.get(key, math.nan) for key in keys]).reshape(2, len(rates), -1)
        baseline_at = "largest" if change.at == "largest" else "own"
        read_at = [
            _rate_of(means, at) for means, at in zip(of_both.mean(axis=2), (change.at, baseline_at), strict=True)
        ]
        if None in read_at:
            continue
        at_edge = change.at == "own" and not {0, len(rates) - 1}.isdisjoint(read_at)
        arm, baseline = of_both[0, read_at[0]], of_both[1, read_at[1]]
        low = mean = high = float(arm.mean()) - float(baseline.mean())
        if math.isfinite(mean):
            interval = mean_interval(arm - baseline)
            assert interval is not None and interval.low is not None and interval.high is not None
            low, high = interval.low, interval.high
        found.append(ChangeOutcome(name, change, size, mean, low, high, at_edge))
    return found


def _rate_of(means: np.ndarray, at: str) -> int | None:
    """The index of the rate that an arm is read at, from its mean loss at each; NaN where a run is missing.

    None where a rate is missing that might be the best one. Losses are taken to have one minimum over the rates, and an
    arm that does not take the rate of its stratum has the same losses at each.
    """
    last = len(means) - 1
    best = last if at == "largest" or np.isnan(means).all() else int(np.nanargmin(means))
    beside = 1 if at == "own" else 0
    needed = means[max(best - beside, 0) : best + beside + 1]
    return None if np.isnan(needed).any() else best


def trained(panel: Panel, runs: Iterable[PanelRun]) -> dict[str, tuple[int, int]]:
    """How many runs of each size have ended, and how many there are."""
    arms = sum(len(study["arms"]) + 1 for study in panel.studies().values())
    ended = Counter(run.size for run in runs if (run.size, run.rate) in panel.strata)
    return {name: (ended[name], arms * len(size.rates) * len(panel.seeds)) for name, size in panel.sizes.items()}


# ----------------------------------------------------------------------------------------------- runs and their record


def read_runs(panel: Panel, runs_dir: Path) -> PanelRuns:
    """The ended runs of the panel's studies in a folder.

    Raises:
        ConfigError: They are by several versions of the code, or by other configurations than each other's.
    """
    read, folders, commits = [], {}, set()
    for study, (size, rate) in itertools.product(panel.studies(), panel.strata):
        folder = runs_dir / f"{study}@{stratum_of(size, rate)}"
        if not any(folder.glob("*/s*")):  # a launch writes study.yaml first
            continue
        for arm in group(collect([folder]))[0]:
            for seed, run in arm.runs.items():
                folders[run.source] = folder.name
                commits.add(str(run.env.get("git_commit") or "unknown"))
                loss = run.figure("val_loss")
                failed = failure(run.record, run.curves) or not math.isfinite(loss)
                read.append(PanelRun(study, arm.name, size, rate, seed, None if failed else loss))
    if len(folders) > 1:
        names = list(folders.values())
        fix = f"nexus-ablate study {names[0].partition('@')[0]} --retrain"
        raise ConfigError("the panel's runs are by several versions of the code", ", ".join(names), fix)
    return PanelRuns(next(iter(folders), ""), sorted(commits), read)


def record_path() -> Path:
    """Where the published runs of the panel are."""
    return conf_dir() / "panel_runs.json"


def recorded() -> PanelRuns:
    """The published runs, none at first.

    Raises:
        ConfigError: The file is damaged.
    """
    path = record_path()
    if not path.exists():
        return PanelRuns("", [], [])
    try:
        return msgspec.json.decode(path.read_bytes(), type=PanelRuns)
    except UNREADABLE as error:
        fix = f"git checkout conf/{path.name}"
        raise ConfigError(f"{path.name} has no runs of the panel", str(error), fix) from None


def publish(panel: Panel, runs_dir: Path) -> Path:
    """Add the ended runs of a folder to the record, one per line. Returns its path.

    Raises:
        ConfigError: The folder has no run of the panel, or other code than that of the record trained them.
    """
    ended, before = read_runs(panel, runs_dir), recorded()
    if not ended.runs:
        raise ConfigError("no run of the panel has ended", str(runs_dir), f"nexus-ablate study {STUDY}_default")
    if before.runs and before.source != ended.source:
        got = f"{', '.join(ended.commits)}; published: {', '.join(before.commits)}"
        raise ConfigError("the published runs of the panel are by other code", got, f"rm conf/{record_path().name}")
    runs = {astuple(run)[:-1]: run for run in [*before.runs, *ended.runs]}  # whatever its loss
    commits = sorted({*before.commits, *ended.commits})
    text = msgspec.json.encode(PanelRuns(ended.source, commits, sorted(runs.values()))).decode()
    atomic_write_text(record_path(), text.replace("],[", "],\n[") + "\n")
    return record_path()
