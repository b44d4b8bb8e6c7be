"""How often small models agree with the calibration panel.

Decision accuracy is the share of changes whose difference has the published sign (DataDecide, arXiv:2504.11393). The
arm and its baseline are read at the rate at which each has the lowest mean loss over the seeds: both are chosen alike,
on the same seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from nexus_ablate.comparison.arms import group
from nexus_ablate.comparison.failures import failure
from nexus_ablate.comparison.load import Trained, collect
from nexus_ablate.comparison.statistics import LEVEL, Array, mean_interval
from nexus_ablate.config.options import conf_dir
from nexus_ablate.errors import ConfigError
from nexus_ablate.plain_data import UNREADABLE
from nexus_ablate.runs.files import atomic_write_text
from nexus_ablate.study.panel import BASELINE, STUDY, Panel, PanelChange, stratum_of

Agreement = Literal["right", "wrong", "reversed", "not decided"]
"""wrong: the mean lies on the other side; of a null change, the interval lies outside the margin.
reversed: the interval of a directional change excludes 0 on the other side.
not decided: the interval of a null change crosses its margin."""


class PanelRun(msgspec.Struct, frozen=True, array_like=True):
    """The final validation loss of one run; None if it failed to train."""

    study: str
    arm: str
    size: str
    rate: float
    seed: int
    loss: float | None


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The published runs of the panel, and the commit of the code that trained them."""

    commit: str
    runs: list[PanelRun]


@dataclass(frozen=True)
class ChangeOutcome:
    """One change at one size.

    Attributes:
        difference: Mean of the paired differences in nats per token; infinite where one of the two failed to train.
        low, high: Its 95% interval over the seeds.
        arm_rate, baseline_rate: The learning rates that are compared.
        at_edge: One of the two is at its best at the edge of the grid.
    """

    name: str
    change: PanelChange
    size: str
    difference: float
    low: float
    high: float
    arm_rate: float
    baseline_rate: float
    at_edge: bool

    @property
    def agreement(self) -> Agreement:
        low, high, margin = self.low, self.high, self.change.margin
        if self.change.is_null:
            if -margin < low and high < margin:
                return "right"
            return "wrong" if low > margin or high < -margin else "not decided"
        is_higher = self.change.expected == "higher"
        if self.difference > 0 if is_higher else self.difference < 0:
            return "right"
        return "reversed" if (high < 0 if is_higher else low > 0) else "wrong"


@dataclass(frozen=True)
class Share:
    """How many of a number of changes are right."""

    right: int
    of: int

    @property
    def interval(self) -> tuple[float, float]:
        """The exact 95% interval of the share (Clopper and Pearson 1934), as if the changes were independent."""
        from scipy.stats import beta

        low = float(beta.ppf(LEVEL / 2, self.right, self.of - self.right + 1)) if self.right else 0.0
        high = float(beta.ppf(1 - LEVEL / 2, self.right + 1, self.of - self.right)) if self.right < self.of else 1.0
        return low, high


def share(outcomes: Sequence[ChangeOutcome]) -> Share:
    return Share(sum(outcome.agreement == "right" for outcome in outcomes), len(outcomes))


def no_difference(outcomes: Sequence[ChangeOutcome]) -> Share:
    """What it scores to call every change null."""
    return Share(sum(outcome.change.is_null for outcome in outcomes), len(outcomes))


def newer_wins(outcomes: Sequence[ChangeOutcome]) -> Share:
    """What it scores to expect of every change that the newer of the two has the lower loss."""
    lower = {"lower": "arm", "higher": "baseline"}
    agreeing = [outcome.change for outcome in outcomes if lower.get(outcome.change.expected) == outcome.change.newer]
    return Share(len(agreeing), len(outcomes))


def fewest_right(of: int) -> int:
    """How many of a number of changes must be right for the interval to exclude a coin's half; `of` + 1 if none do."""
    return next((right for right in range(of + 1) if Share(right, of).interval[0] > 0.5), of + 1)


# ---------------------------------------------------------------------------------------------------------- outcomes


def outcomes(panel: Panel, runs: Iterable[PanelRun]) -> list[ChangeOutcome]:
    """The changes whose runs have all ended, size by size, in the panel's order."""
    losses: dict[tuple[str, str, str], dict[float, dict[int, float]]] = {}
    for run in runs:
        by_rate = losses.setdefault((run.study, run.arm, run.size), {})
        by_rate.setdefault(run.rate, {})[run.seed] = math.inf if run.loss is None else run.loss
    found = []
    for size in panel.sizes:
        for name, change in panel.changes.items():
            arm = _table(panel, losses.get((change.study, name, size), {}))
            baseline = _table(panel, losses.get((change.study, BASELINE, size), {}))
            if arm and baseline and (outcome := _outcome(name, change, size, arm, baseline)):
                found.append(outcome)
    return found


def _table(panel: Panel, losses: dict[float, dict[int, float]]) -> dict[float, Array]:
    """By rate the losses in the order of the seeds; {} where a run is missing."""
    if any(seed not in losses.get(rate, {}) for rate in panel.rates for seed in panel.seeds):
        return {}
    return {rate: np.array([losses[rate][seed] for seed in panel.seeds]) for rate in panel.rates}


def _outcome(
    name: str, change: PanelChange, size: str, arm: dict[float, Array], baseline: dict[float, Array]
) -> ChangeOutcome | None:
    """The difference at the rates that are compared; None where both fail to train."""
    rates = [max(losses) if change.at == "largest" else _best(losses) for losses in (arm, baseline)]
    arm_rate, baseline_rate = rates
    arm_mean, baseline_mean = arm[arm_rate].mean(), baseline[baseline_rate].mean()
    if math.isinf(arm_mean) and math.isinf(baseline_mean):
        return None
    edges = (min(arm), max(arm))
    at_edge = change.at == "own" and not set(rates).isdisjoint(edges)
    low = mean = high = float(arm_mean - baseline_mean)
    if math.isfinite(mean):
        interval = mean_interval(arm[arm_rate] - baseline[baseline_rate])
        assert interval is not None and interval.low is not None and interval.high is not None
        low, high = interval.low, interval.high
    return ChangeOutcome(name, change, size, mean, low, high, arm_rate, baseline_rate, at_edge)


def _best(losses: dict[float, Array]) -> float:
    """The rate of the lowest mean loss; one at which a run failed to train comes last."""
    return min(losses, key=lambda rate: float(losses[rate].mean()))


# ----------------------------------------------------------------------------------------------- runs and their record


def read_runs(panel: Panel, runs_dir: Path) -> tuple[list[PanelRun], str]:
    """The ended runs of the panel's studies in a folder, and the commit of their code; [] and '' without any.

    Raises:
        ConfigError: They are by several versions of the code, or by other configurations than each other's.
    """
    read, found, commits = [], {}, set()
    for study in panel.studies():
        for size in panel.sizes:
            for rate in panel.rates:
                folder = runs_dir / f"{study}@{stratum_of(size, rate)}"
                if not folder.is_dir():
                    continue
                for arm in group(collect([folder]))[0]:
                    for seed, run in arm.runs.items():
                        found[run.source] = str(folder)
                        commits.add(str(run.env.get("git_commit") or "unknown"))
                        read.append(PanelRun(study, arm.name, size, rate, seed, _loss(run)))
    if len(found) > 1:
        fix = f"nexus-ablate study {Path(max(found.values())).name.partition('@')[0]} --retrain"
        raise ConfigError("the panel's runs are by several versions of the code", ", ".join(found.values()), fix)
    return read, ", ".join(sorted(commits))


def _loss(run: Trained) -> float | None:
    loss = run.figure("val_loss")
    return None if failure(run.record, run.curves) or not math.isfinite(loss) else loss


def record_path() -> Path:
    """Where the published runs of the panel are."""
    return conf_dir() / "panel_runs.json"


def recorded() -> Recorded | None:
    """The published runs; None where nothing is published.

    Raises:
        ConfigError: The file is damaged.
    """
    path = record_path()
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Recorded)
    except UNREADABLE as error:
        fix = f"git checkout conf/{path.name}"
        raise ConfigError(f"{path.name} has no runs of the panel", str(error), fix) from None


def publish(panel: Panel, runs_dir: Path) -> Path:
    """Write the runs of a folder to the record, one per line. Returns its path.

    Raises:
        ConfigError: The folder has no outcome of the panel.
    """
    runs, commit = read_runs(panel, runs_dir)
    if not outcomes(panel, runs):
        raise ConfigError(
            "no change of the panel has all its runs", str(runs_dir), f"nexus-ablate study {STUDY}_default"
        )
    text = msgspec.json.encode(Recorded(commit, runs)).decode()
    atomic_write_text(record_path(), text.replace("],[", "],\n[") + "\n")
    return record_path()
