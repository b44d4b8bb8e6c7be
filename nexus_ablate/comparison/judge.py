"""Arms against their baseline: which seeds count, what each arm is judged by, and its verdict.

A study of fixed seeds is judged once, over all of them. A study with looks is judged at each look whose runs are
complete, at a share of the 5% that is fixed beforehand; an arm keeps the verdict of the look that decided it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.endpoint import Endpoint
from nexus_ablate.comparison.failures import failed_seeds
from nexus_ablate.comparison.load import Plan
from nexus_ablate.comparison.pairs import same_curves
from nexus_ablate.comparison.statistics import (
    LEVEL,
    Array,
    Effect,
    effects,
    robust_spread,
    robust_spread_of_runs,
    unlike_noise,
    unpaired_effects,
)
from nexus_ablate.comparison.tuning import shared_difference
from nexus_ablate.comparison.verdict import UNDECIDED, Evidence, Verdict, decide

SHARE_THAT_MATTERS = 0.002
"""Of the baseline's loss: the smallest difference that matters unless a study declares it, or the noise if larger."""
EXACT = 1e-9
"""Numbers with fewer decimals than this step were rounded."""


@dataclass
class ResultTable:
    """The results of the runs, arms x seeds, the baseline first.

    Attributes:
        losses: The endpoint on its scale; NaN where there is no result or the run failed to train.
        ended: Whether a run has a result, a failure to train included.
        failed: By arm, the seeds at which it failed to train, and how.
        same: Whether a run's losses equal the baseline's to the last bit.
        unfair: By arm, the fairness conditions that it breaks.
        begun: By arm, seeds of runs without a result.
        shared_rate: By arm, the difference at the study's learning rate, where arms are judged at their own.
        saturated: By arm, the word for it and the baseline where both are at chance or at the ceiling.
    """

    names: list[str]
    seeds: list[int]
    losses: Array
    ended: NDArray[np.bool_]
    failed: list[dict[int, str]]
    same: NDArray[np.bool_]
    unfair: list[list[str]]
    begun: list[set[int]]
    shared_rate: list[float | None]
    saturated: list[str] = field(default_factory=list)


@dataclass
class Judged:
    """One arm and what it was judged by.

    Attributes:
        seeds: Those that count.
        losses: The endpoint at each of them, on its scale; NaN where there is no result or the run failed to train.
        failed: Seeds at which it failed to train, and how.
        evidence: What decided; None for the baseline.
        unmeasured: Seeds at which it and the baseline trained and one of them lacks the endpoint.
        look: The look that the verdict is of, from 1; 0 in a study without looks.
    """

    seeds: list[int]
    losses: Array
    failed: dict[int, str]
    waiting: int
    effect: Effect | None = None
    evidence: Evidence | None = None
    verdict: Verdict | None = None
    unmeasured: int = 0
    look: int = 0


@dataclass
class Judgement:
    """All arms, the baseline first.

    Attributes:
        family: Arms that share the 5%.
        noisy: The rows that are noisier than the rest, for which every arm is judged alone.
        look: Looks that are complete; 0 in a study without looks.
        undecided: Names of the arms that the next look is for.
    """

    arms: list[Judged]
    delta_min: float
    delta_min_source: str
    family: int
    noisy: list[int]
    look: int = 0
    undecided: list[str] = field(default_factory=list)


def table_of(arms: list[Arm], unfair: list[list[str]], plan: Plan) -> ResultTable:
    """The table of some arms, the baseline first."""
    base = arms[0]
    seeds = (
        list(plan.seeds) if plan.looks else sorted(base.runs if plan.paired else set().union(*(a.runs for a in arms)))
    )
    failed = [failed_seeds(arm.runs, base.runs) for arm in arms]
    losses = np.array([arm.on_scale(plan.endpoint, seeds) for arm in arms])
    for row, lost in enumerate(failed):
        losses[row][[seed in lost for seed in seeds]] = np.nan
    shared = [shared_difference(arm, base, plan.endpoint) for arm in arms]
    return ResultTable(
        names=[arm.name for arm in arms],
        seeds=seeds,
        losses=losses,
        ended=np.array([[seed in arm.runs for seed in seeds] for arm in arms]),
        failed=failed,
        same=np.array([[_same(arm, base, seed, plan) for seed in seeds] for arm in arms]),
        unfair=unfair,
        begun=[{out.seed for out in arm.waiting if out.seed is not None} for arm in arms],
        shared_rate=[interval.mean if interval else None for interval in shared],
        saturated=[_saturation(arm, base, seeds, plan.endpoint) for arm in arms],
    )


def _saturation(arm: Arm, base: Arm, seeds: list[int], endpoint: Endpoint) -> str:
    return endpoint.saturation(lambda name: np.array([base.values(name, seeds), arm.values(name, seeds)]))


def _same(arm: Arm, base: Arm, seed: int, plan: Plan) -> bool:
    if seed not in arm.runs or seed not in base.runs or not plan.paired:
        return False
    if plan.listed:  # a row has nothing but its endpoint; rounded ones may be equal by chance
        return plan.step < EXACT
    return same_curves(arm.runs[seed], base.runs[seed])


def judge(arms: list[Arm], unfair: list[list[str]], plan: Plan) -> Judgement:
    """Every arm against the first.

    Args:
        unfair: By arm, the fairness conditions that it breaks.
    """
    return judge_table(table_of(arms, unfair, plan), plan)


def judge_losses(losses: Array, plan: Plan) -> Judgement:
    """The judgement of bare losses.

    Args:
        losses: (arms, seeds), the baseline first; NaN where there is no result.
    """
    arms, seeds = losses.shape
    empty: list[list[str]] = [[] for _ in range(arms)]
    ended, same = np.isfinite(losses), np.zeros(losses.shape, dtype=bool)
    names = ["baseline", *(f"arm {i}" for i in range(1, arms))]
    failed: list[dict[int, str]] = [{} for _ in range(arms)]
    begun: list[set[int]] = [set() for _ in range(arms)]
    table = ResultTable(names, list(range(seeds)), losses, ended, failed, same, empty, begun, [None] * arms)
    return judge_table(table, plan)


def judge_table(table: ResultTable, plan: Plan) -> Judgement:
    """The judgement over all seeds, or look by look as far as the looks are complete."""
    if not plan.looks:
        return _at(table, plan, len(table.seeds), LEVEL * plan.share, plan.family)
    result = _at(table, plan, plan.looks[0], LEVEL * plan.share * plan.look_weights[0], plan.family)
    margin, family = (result.delta_min, result.delta_min_source), result.family  # those of the first look
    undecided = list(range(1, len(table.names)))

    def waited_for() -> list[int]:
        """The undecided arms that further seeds are for: those of the plan, which simulated losses lack."""
        return [arm for arm in undecided if not plan.arms or table.names[arm] in plan.arms]

    for look, (seeds, weight) in enumerate(zip(plan.looks, plan.look_weights, strict=True), 1):
        if not table.ended[[0, *waited_for()], :seeds].all():
            break
        now = _at(table, plan, seeds, LEVEL * plan.share * weight, family, margin) if look > 1 else result
        now.look = look
        for arm in range(len(table.names)):
            if arm and arm not in undecided:
                now.arms[arm] = result.arms[arm]
            else:
                now.arms[arm].look = look
        result = now
        undecided = [arm for arm in undecided if (v := now.arms[arm].verdict) is not None and v.word in UNDECIDED]
        if not waited_for():
            break
    if result.look < len(plan.looks):
        result.undecided = [table.names[arm] for arm in waited_for()]
    return result


def _at(
    table: ResultTable, plan: Plan, seeds: int, level: float, family: int = 0, margin: tuple[float, str] | None = None
) -> Judgement:
    """The judgement over the first `seeds` seeds, at some level."""
    losses, ended, counted = table.losses[:, :seeds], table.ended[:, :seeds], table.seeds[:seeds]
    failed = [{seed: how for seed, how in lost.items() if seed in counted} for lost in table.failed]
    both = ended & ended[0]
    equal = (losses == losses[0]) | ~np.isfinite(losses)
    identical = both.any(1) & (table.same[:, :seeds] & equal | ~both).all(1)
    tested = [0, *(a for a in range(1, len(losses)) if ended[a].any() and not table.unfair[a] and not identical[a])]
    test = effects if plan.paired else unpaired_effects
    step = 0.0 if plan.endpoint.log else plan.step or _spacing(losses, plan.endpoint)
    absent = len(plan.arms.keys() - {name for name, row in zip(table.names, ended, strict=True) if row.any()})
    tests = dict(zip(tested, test(losses[tested], level, family, step, absent), strict=True))
    rows = [0, *{losses[a].tobytes(): a for a in reversed(tested) if tests[a] is not None}.values()]
    arms = int(ended[1:].any(1).sum()) + absent
    family = max(len(rows) - 1 + absent, family, 1)
    trained = ended & [[seed not in lost for seed in counted] for lost in failed]
    delta_min, source = margin or smallest(plan, losses[rows])
    judged = []
    for a in range(len(losses)):
        planned = table.names[a] in {*plan.arms, plan.baseline}
        wanted = set(counted if plan.looks else plan.seeds) if planned else table.begun[a]
        waiting = len(
            wanted - {seed for seed, has_result in zip(table.seeds, table.ended[a], strict=True) if has_result}
        )
        shown = np.ones(len(counted), dtype=bool) if plan.paired else ended[a]
        seen = [seed for seed, is_shown in zip(counted, shown, strict=True) if is_shown]
        one = Judged(seen, losses[a][shown], failed[a], waiting, tests.get(a))
        judged.append(one)
        if not a:
            continue
        differences = losses[a] - losses[0]
        differences = differences[np.isfinite(differences)]
        runs = min(np.isfinite(losses[row]).sum() for row in (0, a))
        measured = np.isfinite(losses[a]) & (np.isfinite(losses[0]) | (not plan.paired))
        one.unmeasured = int((trained[a] & (trained[0] | (not plan.paired)) & ~measured).sum())
        one.evidence = Evidence(
            effect=one.effect,
            delta_min=delta_min,
            unfair=table.unfair[a],
            pairs=len(differences) if plan.paired else int(runs),
            runs=int(ended[a].sum()),
            failed=len(failed[a]),
            failures=", ".join(sorted(set(failed[a].values()))),
            baseline_runs=int(ended[0].sum()),
            baseline_failed=len(failed[0]),
            identical=bool(identical[a]),
            waiting=waiting,
            family=family,
            arms=arms,
            unmeasured=one.unmeasured,
            single=float(differences[0]) if plan.paired and len(differences) else None,
            shared_rate_delta=table.shared_rate[a],
            endpoint=plan.endpoint,
            saturated=table.saturated[a] if table.saturated else "",
            more_seeds=f"nexus-ablate study {plan.place} --add-seeds" if plan.place and not plan.looks else "",
            exploratory=bool(plan.exploratory),
        )
        one.verdict = decide(one.evidence)
    noisy = [rows[row] for row in unlike_noise(losses[rows])] if plan.paired else []
    return Judgement(judged, delta_min, source, family, noisy)


def _spacing(losses: Array, endpoint: Endpoint) -> float:
    """Of an onset, the step between measurements, which it cannot be known better than; else 0."""
    if not endpoint.name.startswith("onsets/"):
        return 0.0
    gaps = np.diff(np.unique(losses[np.isfinite(losses)]))
    return float(gaps.min()) if len(gaps) else 0.0


def smallest(plan: Plan, losses: Array) -> tuple[float, str]:
    """The smallest difference that matters, and where it comes from.

    Never the baseline's own spread over seeds: one outlying seed would make everything equivalent.
    """
    if plan.endpoint.margin is not None:
        worth = (
            f", as what {100 * plan.delta_min_tokens:.3g}% of the training tokens are worth"
            if plan.delta_min_tokens
            else ""
        )
        return plan.endpoint.margin, "declared with --delta-min" if plan.listed else f"declared by the study{worth}"
    base = losses[0][np.isfinite(losses[0])]
    mean = 1.0 if plan.endpoint.log else abs(float(base.mean())) if len(base) else 0.0
    share = SHARE_THAT_MATTERS * mean
    noise = robust_spread(losses) if plan.paired else robust_spread_of_runs(losses)
    if noise is not None and noise > share:
        return noise, "the noise of one run, estimated robustly over all arms"
    name = "loss" if plan.endpoint.name == "val_loss" else plan.endpoint.name
    return share, f"0.2% of the baseline's {name}"
