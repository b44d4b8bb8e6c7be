"""Arms against their baseline on one endpoint: which seeds count, what each arm is judged by, and its verdict.

A study of fixed seeds is judged once, over all of them. A study with looks is judged at each look whose runs are
complete, at a share of what may be claimed falsely that is fixed beforehand; an arm keeps the verdict of the look that
decided it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.budget import is_early
from nexus_ablate.comparison.cell import Pairs, judge_cell
from nexus_ablate.comparison.decision import decide, seeds_to_differ, seeds_to_equal
from nexus_ablate.comparison.endpoint import Endpoint
from nexus_ablate.comparison.failures import failed_seeds, uninformed_loss
from nexus_ablate.comparison.learning_rates import at_own_rate
from nexus_ablate.comparison.pairs import same_curves
from nexus_ablate.comparison.results import ArmResult
from nexus_ablate.comparison.statistics import Array
from nexus_ablate.comparison.terms import Terms
from nexus_ablate.comparison.text_sample import TextDifferences, differences_over_text
from nexus_ablate.comparison.verdict import UNDECIDED

EXACT = 1e-9
"""Numbers with fewer decimals than this step were rounded."""


@dataclass
class ResultTable:
    """The results of the runs, arms x seeds, the baseline first.

    Attributes:
        names: The arms' directories, and `labels` their names in tables.
        values: The endpoint; `losses` is on its scale; NaN where there is no result or the run failed to train.
        ended: Whether a run has a result, a failure to train included.
        failed: By arm, the seeds at which it failed to train, and how.
        same: Whether a run's losses equal the baseline's to the last bit.
        unfair: By arm, the fairness conditions that it breaks.
        begun: By arm, seeds of runs without a result.
        own_rates: By arm, its own best learning rate and the baseline's, where they are judged at those.
        saturated: By arm, the word for it and the baseline where both are at chance or at the ceiling.
        texts: By arm, its differences to the baseline by block of evaluation text.
        uninformed: The endpoint of a run that has learned nothing; NaN where that is not known.
        is_early: By arm, whether it or the baseline was trained for so few tokens that it is early in training.
    """

    names: list[str]
    labels: list[str]
    seeds: list[int]
    values: Array
    losses: Array
    ended: NDArray[np.bool_]
    failed: list[dict[int, str]]
    same: NDArray[np.bool_]
    unfair: list[list[str]]
    begun: list[set[int]]
    own_rates: list[tuple[float, float] | None]
    saturated: list[str]
    texts: list[TextDifferences]
    uninformed: float = math.nan
    is_early: list[bool] = field(default_factory=list)

    def pairs(self, arm: int, terms: Terms, step: float, count: int) -> Pairs:
        """The pairs of an arm at the first seeds."""
        text = self.texts[arm]
        by_block = None if text.by_block is None else text.by_block[:count]
        losses, base_losses = self.losses[arm, :count], self.losses[0, :count]
        return Pairs(losses, base_losses, terms.is_paired, step, by_block, text.shares)

    def with_failures(self, arm: int, terms: Terms, count: int) -> Pairs:
        """The same with every run that failed to train counted as one that has learned nothing."""
        filled = self.losses[[0, arm], :count].copy()
        for row, failures in zip(filled, (self.failed[0], self.failed[arm]), strict=True):
            row[[seed in failures for seed in self.seeds[:count]]] = self.uninformed
        return Pairs(filled[1], filled[0], terms.is_paired)


@dataclass
class Judgement:
    """All arms on one endpoint, the baseline first.

    Attributes:
        comparisons: Cells that share what may be claimed falsely.
        texts: By arm, its differences to the baseline by block of evaluation text.
        look: Looks that are complete; 0 in a study without looks.
        undecided: Names of the arms that the next look is for.
    """

    results: list[ArmResult]
    comparisons: int
    texts: list[TextDifferences]
    look: int = 0
    undecided: list[str] = field(default_factory=list)


def table_of(arms: list[Arm], unfair: list[list[str]], terms: Terms) -> ResultTable:
    """The table of some arms, the baseline first."""
    base, endpoint = arms[0], terms.endpoint
    if terms.study.looks:
        seeds = list(terms.study.seeds)
    elif terms.is_paired:
        seeds = sorted(base.runs)
    else:
        seeds = sorted(set().union(*(arm.runs for arm in arms)))
    failed = [failed_seeds(arm.runs, base.runs) for arm in arms]
    values = np.array([arm.values(endpoint.name, seeds) for arm in arms])
    for row, failures in zip(values, failed, strict=True):
        row[[seed in failures for seed in seeds]] = np.nan
    losses = np.array([arm.on_scale(endpoint, seeds) for arm in arms])
    losses[~np.isfinite(values)] = np.nan
    ended, same, own_rates, texts = [], [], [], []
    for row, arm in enumerate(arms):
        ended.append([seed in arm.runs for seed in seeds])
        same.append([_is_same(arm, base, seed, terms) for seed in seeds])
        is_tuned = arm.best_rate and base.best_rate
        own_rates.append((arm.best_rate, base.best_rate) if is_tuned else None)
        texts.append(differences_over_text(arm, base, seeds, losses[[row, 0]], terms))
    return ResultTable(
        names=[arm.name for arm in arms],
        labels=[arm.label for arm in arms],
        seeds=seeds,
        values=np.where(np.isfinite(losses), values, np.nan),
        losses=losses,
        ended=np.array(ended),
        failed=failed,
        same=np.array(same),
        unfair=unfair,
        begun=[{run.seed for run in arm.waiting if run.seed is not None} for arm in arms],
        own_rates=own_rates,
        saturated=[_saturation(arm, base, seeds, endpoint) for arm in arms],
        texts=texts,
        uninformed=uninformed_loss(arms, endpoint),
        is_early=[not terms.is_listed and is_early(arm, base) for arm in arms],
    )


def _is_same(arm: Arm, base: Arm, seed: int, terms: Terms) -> bool:
    if seed not in arm.runs or seed not in base.runs or not terms.is_paired:
        return False
    if terms.is_listed:  # a row has nothing but its endpoint; rounded ones may be equal by chance
        return terms.step < EXACT
    return same_curves(arm.runs[seed], base.runs[seed])


def _saturation(arm: Arm, base: Arm, seeds: list[int], endpoint: Endpoint) -> str:
    return endpoint.saturation(lambda name: np.array([base.values(name, seeds), arm.values(name, seeds)]))


def judge(arms: list[Arm], unfair: list[list[str]], terms: Terms) -> Judgement:
    """Every arm against the first.

    Args:
        unfair: By arm, the fairness conditions that it breaks.
    """

    def table_at(count: int) -> ResultTable:
        """The table at a look: where an arm's best learning rate lies is read from the seeds of that look alone."""
        return table_of([at_own_rate(arm, terms.study.seeds[:count]) for arm in arms], unfair, terms)

    table = table_of(arms, unfair, terms)
    is_tuned = any(arm.rates for arm in arms)
    return judge_table(table, terms, table_at if is_tuned else lambda count: table)


def judge_losses(losses: Array, terms: Terms, **known: Any) -> Judgement:
    """The judgement of bare losses.

    Args:
        losses: (arms, seeds) on the endpoint's scale, the baseline first; NaN where there is no result.
        known: What else is known of them: attributes of `ResultTable`.
    """
    arms, seeds = losses.shape
    names = ["baseline", *(f"arm {i}" for i in range(1, arms))]
    plain = {
        "names": names,
        "labels": names,
        "seeds": list(range(seeds)),
        "values": losses,
        "losses": losses,
        "ended": np.isfinite(losses),
        "failed": [{} for _ in range(arms)],
        "same": np.zeros(losses.shape, dtype=bool),
        "unfair": [[] for _ in range(arms)],
        "begun": [set() for _ in range(arms)],
        "own_rates": [None] * arms,
        "saturated": [""] * arms,
        "texts": [TextDifferences()] * arms,
        "is_early": [False] * arms,
    }
    table = ResultTable(**plain | known)
    return judge_table(table, terms, lambda count: table)


def judge_table(table: ResultTable, terms: Terms, table_at: Callable[[int], ResultTable]) -> Judgement:
    """The judgement over all seeds, or look by look as far as the looks are complete.

    Args:
        table_at: From a look's number of seeds to its table.
    """
    looks = terms.study.looks
    if not looks:
        return _judge_at(table, terms, len(table.seeds))
    judgement = _judge_at(table_at(looks[0]), terms, looks[0], terms.study.look_weights[0])
    planned = terms.arm_names or table.names  # simulated losses have no plan
    undecided = list(range(1, len(table.names)))
    for look, (seeds, weight) in enumerate(zip(looks, terms.study.look_weights, strict=True), 1):
        waited_for = [arm for arm in undecided if table.names[arm] in planned]
        at_look = table_at(seeds)
        if (look > 1 and not waited_for) or not at_look.ended[[0, *waited_for], :seeds].all():
            break
        now = judgement if look == 1 else _judge_at(at_look, terms, seeds, weight)
        now.look = look
        for arm in range(len(table.names)):
            if arm and arm not in undecided:
                now.results[arm] = judgement.results[arm]
            else:
                now.results[arm].look = look
        judgement = now
        undecided = [arm for arm in undecided if judgement.results[arm].word in UNDECIDED]
    if judgement.look < len(looks):
        judgement.undecided = [table.names[arm] for arm in undecided if table.names[arm] in planned]
    return judgement


def _judge_at(table: ResultTable, terms: Terms, seed_count: int, weight: float = 1.0) -> Judgement:
    """The judgement over the first seeds, at a look's share of what may be claimed falsely."""
    identical = _identical(table, seed_count)
    step = 0.0 if terms.endpoint.log else terms.step or _spacing(table.losses[:, :seed_count], terms.endpoint)
    arms = len({*terms.arm_names, *table.names} - {table.names[0]})
    level, failure_level = terms.level(arms, weight), terms.failure_level(arms, weight)
    margin = terms.endpoint.margin
    results = []
    for arm in range(len(table.names)):
        result = _measured(table, terms, arm, seed_count)
        result.failure_level = failure_level
        result.is_identical = bool(identical[arm])
        result.is_equal = len(result.pairs) > 1 and not any(result.pairs) and step < margin
        if arm and not result.unfair_runs and not identical[arm]:
            result.effect = judge_cell(table.pairs(arm, terms, step, seed_count), level)
            if result.failed:
                result.effect_with_failures = judge_cell(table.with_failures(arm, terms, seed_count), level)
        if arm:
            result.verdict = decide(result, terms)
        if result.effect is not None:
            result.seeds_to_differ = seeds_to_differ(result.effect)
            result.seeds_to_equal = seeds_to_equal(result.effect, margin)
        results.append(result)
    return Judgement(results, terms.comparisons(arms), table.texts)


def _identical(table: ResultTable, seed_count: int) -> NDArray[np.bool_]:
    """The arms of which every pair of runs is equal to the last bit."""
    losses, ended, same = (array[:, :seed_count] for array in (table.losses, table.ended, table.same))
    both = ended & ended[0]
    equal = same & ((losses == losses[0]) | ~np.isfinite(losses))
    return both.any(1) & (equal | ~both).all(1)


def _measured(table: ResultTable, terms: Terms, arm: int, seed_count: int) -> ArmResult:
    """An arm's runs at the first seeds, without what depends on the other arms."""
    seeds = table.seeds[:seed_count]
    ended, base_ended = table.ended[arm, :seed_count], table.ended[0, :seed_count]
    values, losses, base_losses = table.values[arm], table.losses[arm, :seed_count], table.losses[0, :seed_count]
    failed = {seed: how for seed, how in table.failed[arm].items() if seed in seeds}
    base_failed = [seed for seed in table.failed[0] if seed in seeds]
    differences = losses - base_losses
    measured, base_measured = np.isfinite(losses), np.isfinite(base_losses)
    shown = np.ones(len(seeds), dtype=bool)
    compared = int((measured & base_measured).sum())
    trained = ended & [seed not in failed for seed in seeds]
    unmeasured = trained & ~measured
    if terms.is_paired:
        base_trained = base_ended & [seed not in base_failed for seed in seeds]
        unmeasured = trained & base_trained & ~(measured & base_measured)
    else:
        differences[:] = np.nan
        shown = ended
        compared = int(min(measured.sum(), base_measured.sum()))
    planned = table.begun[arm]
    if table.names[arm] in (terms.baseline, *terms.arm_names):
        planned = set(seeds if terms.study.looks else terms.study.seeds)
    with_result = {seed for seed, has_result in zip(table.seeds, table.ended[arm], strict=True) if has_result}
    finite = values[:seed_count][measured]
    return ArmResult(
        arm=table.labels[arm],
        endpoint=terms.endpoint,
        verdict=None,
        seeds=[seed for seed, is_shown in zip(seeds, shown, strict=True) if is_shown],
        values=numbers(values[:seed_count][shown]),
        differences=numbers(differences[shown]),
        stratum=terms.stratum,
        name=table.names[arm],
        is_baseline=arm == 0,
        runs=int(ended.sum()),
        failed=failed,
        waiting=len(planned - with_result),
        unmeasured=int(unmeasured.sum()) if arm else 0,
        compared=compared,
        baseline_runs=int(base_ended.sum()),
        baseline_failed=len(base_failed),
        unfair=table.unfair[arm],
        mean=float(finite.mean()) if len(finite) else None,
        sd=spread(finite),
        own_rates=table.own_rates[arm],
        saturated=table.saturated[arm],
        is_early=table.is_early[arm],
    )


def numbers(values: Array) -> list[float | None]:
    """The values, None for what is not finite."""
    return [float(value) if np.isfinite(value) else None for value in values]


def spread(values: Array) -> float | None:
    """The standard deviation of the finite values; None below two."""
    values = values[np.isfinite(values)]
    return float(values.std(ddof=1)) if len(values) > 1 else None


def _spacing(losses: Array, endpoint: Endpoint) -> float:
    """Of an onset, the step between measurements, which it cannot be known better than; else 0."""
    if not endpoint.name.startswith("onsets/"):
        return 0.0
    gaps = np.diff(np.unique(losses[np.isfinite(losses)]))
    return float(gaps.min()) if len(gaps) else 0.0
