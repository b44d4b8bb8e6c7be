"""Arms against their baseline on one endpoint: which seeds count, what each arm is judged by, and its verdict.

A study of fixed seeds is judged once, over all of them. A study with looks is judged at each look whose runs are
complete, at a share of what may be claimed falsely that is fixed beforehand; an arm keeps the verdict of the look that
decided it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.budget import is_early
from nexus_ablate.comparison.cell import judge_cell
from nexus_ablate.comparison.decision import decide, seeds_to_differ, seeds_to_equal
from nexus_ablate.comparison.failures import failed_seeds, uninformed_loss
from nexus_ablate.comparison.fairness import Check, unfair
from nexus_ablate.comparison.learning_rates import at_own_rate
from nexus_ablate.comparison.load import Trained
from nexus_ablate.comparison.pairs import same_curves
from nexus_ablate.comparison.results import ArmResult
from nexus_ablate.comparison.statistics import Array, mean_interval
from nexus_ablate.comparison.terms import Terms
from nexus_ablate.comparison.text_sample import TextDifferences, differences_over_text
from nexus_ablate.comparison.verdict import AT_CEILING, AT_CHANCE, FAILS, UNDECIDED
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.study.endpoint import Endpoint, logits

EXACT = 1e-9
"""Numbers with fewer decimals than this step were rounded."""


@dataclass
class ArmRuns:
    """The runs of an arm on one endpoint.

    Attributes:
        name: The arm's directory, and `label` its name in tables.
        values: (seeds,) the endpoint, and `losses` on its scale; NaN without a result and where a run failed to train.
        ended: (seeds,) whether a run has a result, a failure to train included.
        same: (seeds,) whether a run's losses equal the baseline's to the last bit.
        failed: The seeds at which it failed to train, and how.
        unfair: The fairness conditions that it breaks.
        begun: Seeds of runs without a result.
        own_rates: Its own best learning rate and the baseline's, where they are judged at those.
        saturated: The word for it and the baseline where both are at chance or at the ceiling.
        texts: Its differences to the baseline by block of evaluation text.
        uninformed: The endpoint of a run that has learned nothing; NaN where that is not known.
        is_early: Whether it or the baseline was trained for so few tokens that it is early in training.
    """

    name: str
    label: str
    seeds: list[int]
    values: Array
    losses: Array
    ended: NDArray[np.bool_]
    same: NDArray[np.bool_]
    failed: dict[int, str] = field(default_factory=dict)
    unfair: list[str] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)
    own_rates: tuple[float, float] | None = None
    saturated: str = ""
    texts: TextDifferences = TextDifferences()
    uninformed: float = math.nan
    is_early: bool = False

    @property
    def has_failed(self) -> NDArray[np.bool_]:
        """(seeds,) whether it failed to train."""
        return np.array([seed in self.failed for seed in self.seeds])

    @property
    def has_trained(self) -> NDArray[np.bool_]:
        """(seeds,) whether it has a result, and trained."""
        return self.ended & ~self.has_failed

    @property
    def with_failures(self) -> Array:
        """The losses with every run that failed to train counted as one that has learned nothing."""
        return np.where(self.has_failed, self.uninformed, self.losses)


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


def _table(arms: list[Arm], conditions: list[Check], seeds: list[int], terms: Terms) -> list[ArmRuns]:
    """The runs of some arms at some seeds, the baseline first."""
    base, endpoint = arms[0], terms.endpoint
    uninformed = uninformed_loss(arms, endpoint)
    table: list[ArmRuns] = []
    for arm in arms:
        pairs = arm.runs.keys() & base.runs.keys()
        same = [s in pairs and _may_be_same(arm.runs[s], base.runs[s], terms) for s in seeds]
        runs = ArmRuns(
            name=arm.name,
            label=arm.label,
            seeds=seeds,
            values=endpoint.readable(arm.values(endpoint.name, seeds)),
            losses=arm.on_scale(endpoint, seeds),
            ended=np.isin(seeds, list(arm.runs)),
            same=np.array(same),
            failed={seed: how for seed, how in failed_seeds(arm.runs, base.runs).items() if seed in seeds},
            unfair=unfair(arm, conditions, endpoint),
            begun={run.seed for run in arm.waiting if run.seed is not None} - arm.runs.keys(),
            saturated=saturation(
                endpoint, lambda name, arm=arm: np.array([base.values(name, seeds), arm.values(name, seeds)])
            ),
            uninformed=uninformed,
            is_early=not terms.is_listed and is_early(arm, base),
        )
        if arm.best_rate and base.best_rate:
            runs.own_rates = arm.best_rate, base.best_rate
        has_result = ~runs.has_failed & np.isfinite(runs.values) & np.isfinite(runs.losses)
        runs.values[~has_result] = runs.losses[~has_result] = np.nan
        table.append(runs)
        has_pair = has_result & np.isfinite(table[0].losses)
        runs.texts = differences_over_text(arm, base, seeds, has_pair, terms)
    return table


def _may_be_same(run: Trained, base_run: Trained, terms: Terms) -> bool:
    """Whether all else that two runs recorded is equal; rows of a table made elsewhere have nothing but a result."""
    if terms.is_listed:
        return run.record.state == base_run.record.state == "finished"
    return same_curves(run, base_run)


def judge(arms: list[Arm], conditions: list[Check], terms: Terms) -> Judgement:
    """Every arm against the first.

    Args:
        conditions: Of fairness.
    """
    tables = []
    for count in terms.study.looks:
        seeds = terms.study.seeds[:count]
        # where an arm's best learning rate lies is read from the seeds of this look alone
        tables.append(_table([at_own_rate(arm, seeds) for arm in arms], conditions, seeds, terms))
    if not tables:
        seeds = sorted(arms[0].runs if terms.is_paired else set().union(*(arm.runs for arm in arms)))
        tables.append(_table(arms, conditions, seeds, terms))
    return _judge_by_look(tables, terms)


def judge_losses(losses: Array, terms: Terms, uninformed: float = math.nan, **known: Any) -> Judgement:
    """The judgement of bare losses.

    Args:
        losses: (arms, seeds) on the endpoint's scale, the baseline first; NaN where there is no result.
        uninformed: The loss of a run that has learned nothing.
        known: What else is known of them in a study without looks: attributes of `ArmRuns`, each by arm.
    """
    assert not (terms.study.looks and known), "they would have to be known at each look"
    tables = []
    for count in terms.study.looks or [losses.shape[1]]:
        table = []
        for place, row in enumerate(losses[:, :count]):
            name = f"arm {place}" if place else "baseline"
            further = {"values": row, "ended": np.isfinite(row), "same": np.zeros(count, dtype=bool)}
            further |= {attribute: by_arm[place] for attribute, by_arm in known.items()}
            table.append(ArmRuns(name, name, list(range(count)), losses=row, uninformed=uninformed, **further))
        tables.append(table)
    return _judge_by_look(tables, terms)


def saturation(endpoint: Endpoint, figures: Callable[[str], Array]) -> str:
    """AT_CHANCE or AT_CEILING where no mean is above guessing, or below the largest value, with 95% confidence.

    Args:
        figures: The values of a figure by its name; each row is an arm, each column a run.
    """
    if not endpoint.is_share:
        return ""
    items = figures(endpoint.beside("items"))
    scaled = endpoint.on_scale(figures)
    above_floor = scaled - logits(figures(endpoint.beside(endpoint.measure.floor)), items)
    below_ceiling = logits(np.full(items.shape, endpoint.measure.most), items) - scaled
    for name, distances in ((AT_CHANCE, above_floor), (AT_CEILING, below_ceiling)):
        intervals = map(mean_interval, distances)
        lows = [interval.low for interval in intervals if interval is not None and interval.low is not None]
        if lows and max(lows) <= 0:
            return name
    return ""


def _judge_by_look(tables: list[list[ArmRuns]], terms: Terms) -> Judgement:
    """The judgement look by look, as far as the looks are complete.

    Args:
        tables: One for each look; one alone in a study without looks.
    """
    if not terms.study.looks:
        return _judge_at(tables[0], terms)
    weights = terms.study.look_weights
    judgement = _judge_at(tables[0], terms, weights[0])
    undecided = list(range(1, len(tables[0])))
    planned = terms.arm_names or [runs.name for runs in tables[0]]  # simulated losses have no plan
    for look, (table, weight) in enumerate(zip(tables, weights, strict=True), 1):
        waited_for = [table[arm] for arm in undecided if table[arm].name in planned]
        is_complete = all(runs.ended.all() for runs in (table[0], *waited_for))
        if not is_complete or (look > 1 and not waited_for):
            judgement.undecided = [runs.name for runs in waited_for]
            break
        if look > 1:
            before, judgement = judgement, _judge_at(table, terms, weight)
            for arm in range(1, len(table)):
                if arm not in undecided:
                    judgement.results[arm] = before.results[arm]
        judgement.look = look
        for arm in (0, *undecided):
            judgement.results[arm].look = look
        undecided = [arm for arm in undecided if judgement.results[arm].word in UNDECIDED]
    return judgement


def _judge_at(table: list[ArmRuns], terms: Terms, weight: float = 1.0) -> Judgement:
    """The judgement over the seeds of a table, at a look's share of what may be claimed falsely."""
    base, margin = table[0], terms.endpoint.margin
    arms = _compared(table, terms)
    step, level = _step(table, terms), terms.level(arms, weight)
    results = []
    for runs in table:
        result = _measured(runs, base, terms)
        results.append(result)
        result.failure_level = terms.failure_level(arms, weight)
        result.is_equal = len(result.pairs) > 1 and not any(result.pairs) and step < margin
        if runs is base:
            continue
        if not result.unfair_runs and not result.is_identical:
            by_block, shares = runs.texts.by_block, runs.texts.shares
            result.effect = judge_cell(runs.losses, base.losses, level, terms.is_paired, step, by_block, shares)
            if result.failed and math.isfinite(runs.uninformed):
                losses, base_losses = runs.with_failures, base.with_failures
                result.effect_with_failures = judge_cell(losses, base_losses, level, terms.is_paired)
        result.verdict = decide(result, terms)
        if result.word in FAILS:
            result.effect = None  # it is over the seeds that trained, and they flatter an arm that fails
        if result.effect is not None:
            result.seeds_to_differ = seeds_to_differ(result.effect)
            result.seeds_to_equal = seeds_to_equal(result.effect, margin)
    return Judgement(results, terms.comparisons(arms), [runs.texts for runs in table])


def _compared(table: list[ArmRuns], terms: Terms) -> int:
    """How many arms are compared: the rows, arms of one name in several studies too, and planned arms without a row.

    A row that repeats the baseline, of an arm that is it in this setting, compares nothing.
    """
    base, missing = table[0], {*terms.arm_names} - {runs.name for runs in table}
    repeated = [runs.name == base.name and np.array_equal(runs.losses, base.losses, equal_nan=True) for runs in table]
    return len(table) - sum(repeated) + len(missing)


def _step(table: list[ArmRuns], terms: Terms) -> float:
    """To which losses are rounded; of an onset, the step between measurements, which it cannot be known better than."""
    if terms.endpoint.log:
        return 0.0
    if terms.step or not terms.endpoint.name.startswith("onsets/"):
        return terms.step
    losses = np.array([runs.losses for runs in table])
    gaps = np.diff(np.unique(losses[np.isfinite(losses)]))
    return float(gaps.min()) if len(gaps) else 0.0


def _measured(runs: ArmRuns, base: ArmRuns, terms: Terms) -> ArmResult:
    """An arm's result as far as its runs and the baseline's say it, without a test."""
    partner = base if terms.is_paired else runs
    both = np.isfinite(runs.losses) & np.isfinite(partner.losses)
    unmeasured = runs.has_trained & partner.has_trained & ~both
    differences = runs.losses - base.losses if terms.is_paired else np.full(len(runs.seeds), np.nan)
    shown = runs.ended | terms.is_paired
    both_ended = runs.ended & base.ended
    is_equal = runs.same & ((differences == 0) | ~np.isfinite(runs.losses))
    can_be_identical = terms.is_paired and terms.step < EXACT  # rounded values may be equal by chance
    planned = runs.begun
    if runs.name in (BASELINE, *terms.arm_names):
        planned = set(runs.seeds if terms.study.looks else terms.study.seeds)
    finite = runs.values[np.isfinite(runs.losses)]
    return ArmResult(
        arm=runs.label,
        endpoint=terms.endpoint,
        seeds=list(compress(runs.seeds, shown)),
        values=numbers(runs.values[shown]),
        differences=numbers(differences[shown]),
        stratum=terms.study.stratum,
        name=runs.name,
        is_baseline=runs is base,
        runs=int(runs.ended.sum()),
        failed=runs.failed,
        waiting=len(planned - set(compress(runs.seeds, runs.ended))),
        unmeasured=0 if runs is base else int(unmeasured.sum()),
        compared=int(min(both.sum(), np.isfinite(base.losses).sum())),
        baseline_runs=int(base.ended.sum()),
        baseline_failed=len(base.failed),
        unfair=runs.unfair,
        is_identical=bool(can_be_identical and both_ended.any() and is_equal[both_ended].all()),
        mean=float(finite.mean()) if len(finite) else None,
        sd=spread(finite),
        own_rates=runs.own_rates,
        saturated=runs.saturated,
        is_early=runs.is_early,
    )


def numbers(values: Array) -> list[float | None]:
    """The values, None for what is not finite."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def spread(values: Array) -> float | None:
    """The standard deviation of the finite values; None below two."""
    values = values[np.isfinite(values)]
    return float(values.std(ddof=1)) if len(values) > 1 else None
