"""The comparison: directories in, one object with every number out. Each output shows this object and adds nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from nexus_ablate.comparison.arms import Arm, gather
from nexus_ablate.comparison.curves import AXES
from nexus_ablate.comparison.differences import consequences, differing
from nexus_ablate.comparison.divergence import diverged_seeds, rising
from nexus_ablate.comparison.fairness import FAIL, Check, checks, unfair
from nexus_ablate.comparison.load import Excluded, Plan, Trained, collect
from nexus_ablate.comparison.pairs import at_equal, log_token_ratio, same_curves
from nexus_ablate.comparison.statistics import Array, Effect, Interval, effects, interaction, mean_interval
from nexus_ablate.comparison.tuning import attach, best_lr, lr_points, lr_sensitivity, tuned_difference
from nexus_ablate.comparison.verdict import Evidence, Verdict, decide, needs
from nexus_ablate.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

UNITS = {"val_loss": "nats per token", "val_bpb": "bits per byte"}
SHARE_THAT_MATTERS = 0.002
"""Of the baseline's loss: the smallest difference that matters, or one seed SD if larger, unless a study fixes it."""


@dataclass
class Row:
    """One arm in the table. Differences are arm minus baseline: negative is better. None: not measured."""

    arm: str
    verdict: Verdict | None
    seeds: list[int]
    values: list[float | None]
    differences: list[float | None]
    waiting: int = 0
    diverged: dict[int, str] = field(default_factory=dict)
    mean: float | None = None
    sd: float | None = None
    effect: Effect | None = None
    seeds_needed: int | None = None
    delta_over_sd: float | None = None
    at_flops: Interval | None = None
    at_seconds: Interval | None = None
    at_tokens: Interval | None = None
    token_ratio: Interval | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: float | None = None
    params: float | None = None
    params_share: float | None = None
    flops_share: float | None = None
    spike_score: float | None = None
    spiky: bool = False
    rising: int = 0
    lr: float | None = None
    best_lr: float | None = None
    lr_edge: bool = False
    lr_sensitivity: float | None = None
    lr_curve: dict[float, list[float]] = field(default_factory=dict)
    at_best_lr: Interval | None = None
    figures: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    asked: dict[str, tuple[str, str]] = field(default_factory=dict)
    followed: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Together:
    """How far two changes together differ from the sum of each; negative: they help one another."""

    both: str
    one: str
    other: str
    interval: Interval


@dataclass
class Comparison:
    """Everything a report shows.

    Attributes:
        rows: The baseline first.
        tuning_runs: Runs that chose learning rates.
        tuned_runs: Runs of an arm at its own best learning rate, where that is not the study's.
        arms: The arms behind the rows, in the same order, for the curves.
    """

    question: str
    study: str
    baseline: str
    endpoint: str
    unit: str
    match: str
    delta_min: float
    delta_min_source: str
    seed_sd: float | None
    family: int
    checks: list[Check]
    rows: list[Row]
    together: list[Together]
    tuning_runs: int
    tuned_runs: int
    excluded: list[Excluded]
    amendments: list[str]
    equal: list[tuple[str, str]]
    refused: list[tuple[str, str]]
    arms: list[Arm] = field(repr=False, default_factory=list)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.status == FAIL]

    def frame(self, lines: Literal["arms", "runs", "curves"] = "arms") -> pandas.DataFrame:
        """The arms with verdict, difference and costs; or each arm at each seed; or each validation of each run."""
        from nexus_ablate.comparison.frames import arms_frame, curves_frame, runs_frame

        return {"arms": arms_frame, "runs": runs_frame, "curves": curves_frame}[lines](self)

    def figure(self) -> Figure:
        """Losses by arm with their spread over seeds, and the paired differences with intervals."""
        from nexus_ablate.comparison.figure import comparison_figure

        return comparison_figure(self)


def compare(
    dirs: str | Path | Iterable[str | Path], baseline: str | None = None, allow: Iterable[str] = ()
) -> Comparison:
    """Compare every run in the given directories with a baseline.

    Args:
        dirs: Runs, arms, studies or a runs_dir, in any mixture, also while runs are going on.
        baseline: The arm to compare with; the study's, or the one called `baseline`, unless given.
        allow: Fairness conditions whose FAIL is waived.

    Raises:
        ConfigError: There is nothing to compare, or a name does not exist.
    """
    given = [dirs] if isinstance(dirs, str | Path) else list(dirs)
    collection = collect(Path(d) for d in given)
    base, others, duplicates, plan = gather(collection, baseline)
    others = attach(base, others, plan) if plan.lr_grid else others
    if not base.runs:
        raise ConfigError("the baseline has no result yet", base.label, "nexus-ablate status DIR shows what it does")
    excluded = collection.excluded + duplicates + _unpaired(base, others)
    found = checks(base, others, plan, excluded, tuple(allow))
    everyone = [base, *others, *_copies(base, plan)]
    _require_endpoint(everyone, plan.endpoint)
    seeds = sorted(base.runs)
    grief = [diverged_seeds(arm.runs, base.runs) for arm in everyone]
    losses = np.array([_losses(arm, plan.endpoint, seeds, lost) for arm, lost in zip(everyone, grief, strict=True)])
    identical = [_identical(arm, base) for arm in everyone]
    tested = [
        i
        for i, arm in enumerate(everyone)
        if i == 0 or not (unfair(arm, found) or grief[i] or identical[i] or not arm.runs)
    ]
    tests = dict(zip(tested, effects(losses[tested]), strict=True))
    family = len({losses[i].tobytes() for i in tested if tests[i] is not None})
    seed_sd = _spread(losses[0])
    delta_min, source = _smallest(plan, losses[0], seed_sd)
    unit = UNITS.get(plan.endpoint, plan.endpoint)
    rows = []
    for i, arm in enumerate(everyone):
        row = _row(arm, base, seeds, losses[i], losses[0], plan)
        row.diverged, row.effect = grief[i], tests.get(i)
        broken = unfair(arm, found)
        if i and not broken and not grief[i]:
            _descriptive(row, arm, base)
        evidence = Evidence(
            effect=row.effect,
            delta_min=delta_min,
            unfair=broken,
            pairs=sum(d is not None for d in row.differences),
            runs=len(arm.runs),
            diverged=len(grief[i]),
            hows=", ".join(sorted(set(grief[i].values()))),
            baseline_runs=len(base.runs),
            baseline_diverged=len(grief[0]),
            identical=identical[i],
            waiting=row.waiting,
            family=family,
            single=next((d for d in row.differences if d is not None), None),
            tuned_delta=row.at_best_lr.mean if row.at_best_lr else None,
            unit=unit,
        )
        row.verdict = decide(evidence) if i else None
        if row.effect:
            row.seeds_needed = needs(row.effect, evidence)
            row.delta_over_sd = row.effect.delta / seed_sd if seed_sd else None
        rows.append(row)
    for row in rows[1:]:  # three times the baseline's spikes, and more than one in a thousand rows
        row.spiky = (row.spike_score or 0.0) > 3 * max(rows[0].spike_score or 0.0, 0.001)
    return Comparison(
        question=plan.question,
        study=plan.name,
        baseline=base.label,
        endpoint=plan.endpoint,
        unit=unit,
        match=plan.match,
        delta_min=delta_min,
        delta_min_source=source,
        seed_sd=seed_sd,
        family=family,
        checks=found,
        rows=rows,
        together=_interactions([everyone[i] for i in tested], losses[tested]),
        tuning_runs=sum(len(arm.tuning) for arm in everyone),
        tuned_runs=sum(len(arm.tuned.runs) for arm in everyone if arm.tuned),
        excluded=excluded,
        amendments=list(plan.amendments),
        equal=list(plan.equal),
        refused=list(plan.refused),
        arms=everyone,
    )


def _copies(base: Arm, plan: Plan) -> list[Arm]:
    """The arms of a study that came out as the baseline: its runs under their own name."""
    return [
        replace(base, label=asked, waiting=[], tuning=[], tuned=None) for asked, arm in plan.equal if arm == base.name
    ]


def _unpaired(base: Arm, others: list[Arm]) -> list[Excluded]:
    return [
        Excluded(run.record.path, f"the baseline has no result at seed {seed}", arm.name, seed, run.record.state)
        for arm in others
        for seed, run in arm.runs.items()
        if seed not in base.runs
    ]


def _losses(arm: Arm, endpoint: str, seeds: list[int], lost: dict[int, str]) -> Array:
    """The endpoint at each seed; NaN where there is no result or the run came to grief."""
    return np.where([seed in lost for seed in seeds], np.nan, arm.values(endpoint, seeds))


def _require_endpoint(arms: list[Arm], endpoint: str) -> None:
    names = {name for arm in arms for name in arm.figure_names}
    if endpoint not in names and names:
        near = did_you_mean(endpoint, names)
        fix = f"did you mean {near!r}?" if near else "the study's endpoint must be a number of summary.json"
        raise ConfigError("no run has the endpoint of the study", endpoint, fix)


def _identical(arm: Arm, baseline: Arm) -> bool:
    shared = arm.runs.keys() & baseline.runs.keys()
    return arm is not baseline and bool(shared) and all(same_curves(arm.runs[s], baseline.runs[s]) for s in shared)


def _spread(values: Array) -> float | None:
    values = values[np.isfinite(values)]
    return float(values.std(ddof=1)) if len(values) > 1 else None


def _smallest(plan: Plan, base: Array, seed_sd: float | None) -> tuple[float, str]:
    """The smallest difference that matters, and where it comes from."""
    if plan.delta_min is not None:
        return plan.delta_min, "fixed by the study"
    share = SHARE_THAT_MATTERS * abs(float(np.nanmean(base))) if np.isfinite(base).any() else 0.0
    if seed_sd is not None and seed_sd > share:
        return seed_sd, "one standard deviation over the baseline's seeds"
    return share, "0.2% of the baseline's loss"


def _waiting(arm: Arm, plan: Plan) -> int:
    """Seeds without a result yet: of those that the study plans, else of those that were begun."""
    planned = arm.name in {*plan.arms, plan.baseline}
    wanted = set(plan.seeds) if planned else {out.seed for out in arm.waiting}
    return len(wanted - arm.runs.keys())


def _row(arm: Arm, base: Arm, seeds: Sequence[int], ours: Array, theirs: Array, plan: Plan) -> Row:
    endpoint = plan.endpoint
    finite = ours[np.isfinite(ours)]
    own_lr, at_edge = best_lr(arm, endpoint)
    params, base_params = arm.mean("params"), base.mean("params")
    flops, base_flops = arm.mean("flops_per_token"), base.mean("flops_per_token")
    names = [n for n in arm.figure_names if "/" in n]
    return Row(
        arm=arm.label,
        verdict=None,
        seeds=list(seeds),
        values=[float(v) if np.isfinite(v) else None for v in ours],
        differences=[float(d) if np.isfinite(d) else None for d in ours - theirs],
        mean=float(finite.mean()) if len(finite) else None,
        sd=_spread(ours),
        waiting=_waiting(arm, plan),
        tokens_per_second=arm.mean("tokens_per_second"),
        peak_memory_bytes=arm.mean("peak_memory_bytes"),
        params=params,
        params_share=params / base_params - 1 if params and base_params else None,
        flops_share=flops / base_flops - 1 if flops and base_flops else None,
        spike_score=arm.spike_score,
        rising=int(sum(rising(run) for run in arm.runs.values())),
        lr=arm.lr,
        best_lr=own_lr,
        lr_edge=at_edge,
        lr_sensitivity=lr_sensitivity(arm, endpoint),
        lr_curve=lr_points(arm, endpoint),
        at_best_lr=tuned_difference(arm, base, endpoint) if arm is not base else None,
        figures={n: (m, _spread(arm.values(n, seeds))) for n in names if (m := arm.mean(n)) is not None},
        asked=differing(arm.config, base.config) if arm.runs else {},
        followed=consequences(arm.config, base.config) if arm.runs else {},
        notes=_notes(arm, base, plan),
    )


def _notes(arm: Arm, base: Arm, plan: Plan) -> list[str]:
    """What an arm changes besides what was asked for, and how it was matched."""
    ours, theirs = ((a.config.get("resolved") or {}).get("notes") or [] for a in (arm, base))
    notes = [note for note in ours if note not in theirs]
    match = plan.arms.get(arm.name, {}).get("match")
    if match:
        solved = " ".join(match.get("solved") or []) or "nothing to change"
        notes.append(f"matched {match.get('kind')} by {solved}, {float(match.get('residual') or 0):+.2%} left")
    return notes


def _descriptive(row: Row, arm: Arm, base: Arm) -> None:
    """What is read off the curves, over the seeds where both finished."""
    pairs = [(run, base.runs[seed]) for seed, run in arm.runs.items() if seed in base.runs]
    pairs = [pair for pair in pairs if all(run.record.state == "finished" for run in pair)]

    def over_pairs(measure: Callable[[Trained, Trained], float]) -> Interval | None:
        return mean_interval(np.array([measure(*pair) for pair in pairs]))

    row.at_tokens, row.at_flops, row.at_seconds = (over_pairs(at_equal(axis)) for axis in AXES)
    row.token_ratio = _exponential(over_pairs(log_token_ratio))


def _exponential(interval: Interval | None) -> Interval | None:
    """From logarithms back to ratios: the mean becomes a geometric one."""
    if interval is None or interval.low is None or interval.high is None:
        return None if interval is None else Interval(float(np.exp(interval.mean)), None, None, interval.n)
    mean, low, high = (float(np.exp(v)) for v in (interval.mean, interval.low, interval.high))
    return Interval(mean, low, high, interval.n)


def _interactions(arms: list[Arm], losses: Array) -> list[Together]:
    """Every arm that makes exactly the changes of two others together, which are no such sums themselves."""
    changes = [
        {key: ours for key, (_, ours) in differing(arm.config, arms[0].config).items()} if arm.runs else {}
        for arm in arms
    ]
    found = [
        (c, a, b)
        for c in range(1, len(arms))
        for a in range(1, len(arms))
        for b in range(a + 1, len(arms))
        if changes[a]
        and changes[b]
        and not changes[a].keys() & changes[b].keys()
        and changes[c] == changes[a] | changes[b]
    ]
    sums = {c for c, _, _ in found}
    found = [(c, a, b) for c, a, b in found if a not in sums and b not in sums]
    together = []
    for c, a, b in found:
        interval = interaction(losses[c], losses[a], losses[b], losses[0], len(found))
        if interval is not None:
            together.append(Together(arms[c].label, arms[a].label, arms[b].label, interval))
    return together
