"""Deciding a study's claim: its expectations are compared with the intervals of the arms."""

from __future__ import annotations

import numpy as np

from nexus_ablate.comparison.endpoint import Endpoint
from nexus_ablate.comparison.load import Expectation, amends_claim
from nexus_ablate.comparison.results import ArmResult, Claim, Finding, Requirement, Stratum
from nexus_ablate.comparison.statistics import LEVEL, t_quantile
from nexus_ablate.comparison.verdict import (
    CLAIM_SEEDS,
    FAILS,
    INCOMPLETE,
    NOT_COMPARABLE,
    SATURATED,
    interval_name,
)
from nexus_ablate.console import several
from nexus_ablate.runs.formats import CONDITION

SUPPORTED = "SUPPORTED"
CONTRADICTED = "CONTRADICTED"
NOT_SHOWN = "NOT SHOWN"
NOT_TESTABLE = "NOT TESTABLE HERE"


def judge_claim(tables: list[Stratum], incomplete: bool = False) -> Claim | None:
    """The outcome of the claim that the strata of a study share; None where there is no claim.

    All expectations must hold for SUPPORTED, and any one of them can contradict it. A stratum whose baseline lacks what
    the claim is about says nothing; where none is left, the claim is not testable here.

    Args:
        tables: The strata with a result.
        incomplete: Others have none yet.
    """
    claims = [table for table in tables if table.plan.claim]
    if not claims:
        return None
    requirements = [one for table in claims for one in requirements_of(table)]
    unmet = {requirement.stratum for requirement in requirements if not requirement.met}
    judged = [(table, one) for table in claims if table.plan.stratum not in unmet for one in table.plan.expects]
    results = [_result(table, expectation) for table, expectation in judged]
    outcomes = {one.outcome for one in results}
    outcome = next((one for one in (CONTRADICTED, NOT_SHOWN, SUPPORTED) if one in outcomes), NOT_TESTABLE)
    sentence = _joined([one for one in results if one.outcome == outcome])
    if not results:
        lacking = [requirement.sentence for requirement in requirements if not requirement.met]
        sentence = "; ".join(lacking) or "the study expects nothing of its arms"
    needed = [row for table in claims for row in (table.rows[:1] if table.plan.stratum in unmet else table.rows)]
    few = any(len(table.rows[0].seeds) < CLAIM_SEEDS for table in claims)
    few |= any(_lost_pairs(*one) for one, result in zip(judged, results, strict=True) if result.outcome != NOT_SHOWN)
    few |= any(requirement.seeds < CLAIM_SEEDS for requirement in requirements)
    preliminary = incomplete or few or any(row.waiting for row in needed)
    return Claim(
        claims[0].plan.claim,
        outcome,
        sentence,
        results,
        requirements,
        preliminary,
        exploratory=any(table.exploratory for table in claims),
        amended=any(amends_claim(table.amendments) for table in claims),
    )


def _lost_pairs(comparison: Stratum, expectation: Expectation) -> bool:
    """Whether a measured difference has fewer pairs than a claim needs, for instance because baseline runs failed."""
    index = next(i for i, arm in enumerate(comparison.arms) if i and arm.name == expectation.arm)
    effect = _cell(comparison, expectation.endpoint, index)[2].effect
    return expectation.expected not in ("trains", "fails") and effect is not None and effect.n < CLAIM_SEEDS


def _joined(results: list[Finding]) -> str:
    return "; ".join(f"{f'{one.stratum}: ' if one.stratum else ''}{one.arm} {one.sentence}" for one in results)


def requirements_of(comparison: Stratum) -> list[Requirement]:
    """What the claim requires of the baseline, and whether its runs meet it."""
    return [_requirement(comparison, *condition) for condition in comparison.plan.requires]


def _requirement(comparison: Stratum, name: str, condition: str) -> Requirement:
    """Whether the one-sided 95% bound of the baseline's mean, at the end of its runs, meets a condition."""
    match = CONDITION.fullmatch(condition)
    assert match is not None
    sign, bound = (1 if match[1] == ">=" else -1), float(match[2])
    base, stratum = comparison.arms[0], comparison.plan.stratum
    values = base.values(name, list(base.runs))
    values = values[np.isfinite(values)]
    where = f"{stratum}: " if stratum else ""
    text = f"{where}the baseline's {name}"
    endpoint = Endpoint(name)
    if len(values) < 2:
        return Requirement(stratum, f"{text} is not measured at two seeds", False, len(values))
    half = t_quantile(1 - LEVEL, len(values) - 1) * float(values.std(ddof=1)) / len(values) ** 0.5
    mean = float(values.mean())
    limit = mean - sign * half
    met = sign * limit >= sign * bound
    side = "at least" if sign > 0 else "at most"
    verb = "as required" if met else "and the claim requires"
    sentence = f"{text} is {endpoint.value(mean)} ({side} {endpoint.value(limit)} with 95% confidence), {verb}"
    return Requirement(stratum, f"{sentence} {condition}", met, len(values))


def _result(comparison: Stratum, expectation: Expectation) -> Finding:
    seeds = None
    index = next((i for i, arm in enumerate(comparison.arms) if i and arm.name == expectation.arm), None)
    if index is None:
        outcome, sentence, label = NOT_SHOWN, _why_absent(comparison, expectation.arm), expectation.arm
    else:
        label = comparison.rows[index].arm
        endpoint, margin, cell = _cell(comparison, expectation.endpoint, index)
        if expectation.expected in ("trains", "fails"):
            outcome, sentence = _training(expectation.expected, comparison.rows[index])
        else:
            outcome, sentence = _measured(expectation.expected, endpoint, cell, margin)
        seeds = cell.seeds_to_decide if outcome == NOT_SHOWN else None
    return Finding(comparison.plan.stratum, label, expectation.endpoint, expectation.expected, outcome, sentence, seeds)


def _why_absent(comparison: Stratum, arm: str) -> str:
    """Why an arm has no row."""
    if arm in (reasons := dict(comparison.plan.refused)):
        return f"is refused in this setting: {reasons[arm]}"
    return "is the baseline in this setting" if arm in dict(comparison.plan.equal) else "has no result"


def _cell(comparison: Stratum, name: str, index: int) -> tuple[Endpoint, float, ArmResult]:
    """An endpoint, its margin, and an arm by it."""
    if name == comparison.endpoint.name:
        return comparison.endpoint, comparison.delta_min, comparison.rows[index]
    other = next(other for other in comparison.secondary if other.endpoint.name == name)
    return other.endpoint, other.delta_min, other.rows[index]


def _training(expected: str, row: ArmResult) -> tuple[str, str]:
    trained, failed = sum(value is not None for value in row.values), len(row.failed)
    word = row.verdict.word if row.verdict else ""
    fails, trains = word in FAILS, not failed and trained >= CLAIM_SEEDS
    if word in (NOT_COMPARABLE, INCOMPLETE):
        return NOT_SHOWN, f"{word}, expected: {expected}"
    counts = f"fails to train at {failed} of {several(failed + trained, 'seed')}, expected: {expected}"
    if not fails and not trains:
        return NOT_SHOWN, counts
    return (SUPPORTED if fails == (expected == "fails") else CONTRADICTED), counts


def _measured(expected: str, endpoint: Endpoint, cell: ArmResult, margin: float) -> tuple[str, str]:
    """By the interval and not by the word: a failure to train, or an unfair pair, shows nothing about the measure.

    A difference that is shown to lie inside a declared margin contradicts `lower` and `higher` even on their side of 0,
    so no two of the three can be supported together. A margin that was estimated from the noise contradicts neither.
    Where runs that trained lack the measure, those that have it are a selection, which shows nothing.
    """
    effect, word = cell.effect, cell.verdict.word if cell.verdict else ""
    if cell.unmeasured:
        where = f"not measured at {several(cell.unmeasured, 'seed')} at which it and the baseline trained"
        return NOT_SHOWN, f"{where}, {endpoint.name} expected: {expected}"
    if effect is None or word in (NOT_COMPARABLE, INCOMPLETE, *SATURATED, *FAILS):
        return NOT_SHOWN, f"{word or 'has no interval'} in {endpoint.name}, expected: {expected}"
    low, high = effect.low, effect.high
    text = f"{endpoint.signed(effect.delta)} in {endpoint.name}"
    text += f" ({interval_name(effect.level)} {endpoint.signed(low)} to {endpoint.signed(high)}), expected: {expected}"
    inside = effect.within(margin)
    if expected == "equivalent":
        outside = low > margin or high < -margin
        text += f" within {endpoint.within(margin)}"
        return (SUPPORTED if inside else CONTRADICTED if outside else NOT_SHOWN), text
    if inside and endpoint.margin is not None:
        return CONTRADICTED, f"{text}, but within {endpoint.within(margin)}, which is too small to matter"
    if not effect.excludes_zero:
        return NOT_SHOWN, text
    return (SUPPORTED if (effect.delta < 0) == (expected == "lower") else CONTRADICTED), text
