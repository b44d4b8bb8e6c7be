"""Deciding a study's claim: its expectations are compared with the intervals of the arms."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from nexus_ablate.comparison.cell import Effect
from nexus_ablate.comparison.results import ArmResult, Claim, Dependence, Finding, Requirement, Stratum
from nexus_ablate.comparison.statistics import DIFFERENCES, LEVEL, mean_interval, sidak, t_tail
from nexus_ablate.comparison.terms import amends_claim
from nexus_ablate.comparison.verdict import (
    CLAIM_SEEDS,
    DIFFERENT,
    FAILS,
    INCOMPLETE,
    INCONCLUSIVE,
    NOT_COMPARABLE,
    SATURATED,
    TOO_FEW_SEEDS,
    interval_name,
)
from nexus_ablate.console import several
from nexus_ablate.study.endpoint import Endpoint
from nexus_ablate.study.schema import CONDITION, Expectation, Study

SUPPORTED = "SUPPORTED"
CONTRADICTED = "CONTRADICTED"
OPPOSITE = "OPPOSITE"
BETTER_THAN_EXPECTED = "BETTER THAN EXPECTED"
NOT_SHOWN = "NOT SHOWN"
NOT_TESTABLE = "NOT TESTABLE HERE"
OUTCOMES = (CONTRADICTED, OPPOSITE, BETTER_THAN_EXPECTED, NOT_SHOWN, SUPPORTED)
"""Of an expectation; that of a setting is the first of these that one of its expectations has."""
OVER_SETTINGS = (CONTRADICTED, OPPOSITE, BETTER_THAN_EXPECTED, SUPPORTED, NOT_SHOWN, NOT_TESTABLE)
"""That of a claim is the first of these that one of its settings has."""


def judge_claim(strata: list[Stratum], is_incomplete: bool = False) -> Claim | None:
    """The outcome of the claim that the strata of a study share; None where there is no claim.

    Strata of which the same is expected are settings, each with an outcome; others are parts of one setting. In a
    setting all expectations must hold for SUPPORTED. One that a worse arm or too small a difference misses makes it
    CONTRADICTED; one that a benefit misses, OPPOSITE or BETTER THAN EXPECTED. A stratum whose baseline lacks what the
    claim is about says nothing; a setting where none is left is not testable.

    Args:
        strata: Those with a result.
        is_incomplete: Others have none yet.
    """
    claiming = [stratum for stratum in strata if stratum.terms.study.claim]
    if not claiming:
        return None
    study = claiming[0].terms.study
    are_settings = all(stratum.terms.study.expects == study.expects for stratum in claiming)
    findings: list[Finding] = []
    requirements: list[Requirement] = []
    testable: list[Stratum] = []
    settings: dict[str, set[str]] = {}
    is_preliminary = is_incomplete
    for stratum in claiming:
        required, rows = requirements_of(stratum), stratum.rows
        requirements += required
        words = settings.setdefault(stratum.name if are_settings else "", set())
        if all(requirement.met for requirement in required):
            testable.append(stratum)
            for expectation in stratum.terms.study.expects:
                findings.append(_finding(stratum, expectation))
                words.add(findings[-1].outcome)
        else:
            rows = rows[:1]
        is_preliminary |= any(row.waiting for row in rows) or len(rows[0].seeds) < CLAIM_SEEDS
    is_preliminary |= any(requirement.seeds < CLAIM_SEEDS for requirement in requirements)
    outcomes = {setting: _first(OUTCOMES, words) for setting, words in settings.items()}
    outcome = _first(OVER_SETTINGS, outcomes.values())
    sentences = [f"{_where(each.stratum)}{each.arm} {each.sentence}" for each in findings if each.outcome == outcome]
    if not findings:
        sentences = [requirement.sentence for requirement in requirements if not requirement.met]
    return Claim(
        study.claim,
        outcome,
        "; ".join(sentences) or "the study expects nothing of its arms",
        findings,
        requirements,
        is_preliminary,
        outcomes,
        _dependences_of(study, testable),
        exploratory=any(stratum.exploratory for stratum in claiming),
        amended=any(amends_claim(stratum.amendments) for stratum in claiming),
    )


def _first(order: Iterable[str], words: Collection[str]) -> str:
    """The first word in this order that is among the words."""
    return next((word for word in order if word in words), NOT_TESTABLE)


def _where(stratum: str) -> str:
    return f"{stratum}: " if stratum else ""


def _dependences_of(study: Study, strata: list[Stratum]) -> list[Dependence]:
    """How each expected difference in the primary endpoint changes between the two strata of every `depends_on`.

    The interval is a cell's: changes share what may be claimed falsely with the differences. It is over seeds; where
    both strata are read on one text, what the text adds to a difference is largely in both. Where an arm or a stratum
    shows nothing there is no change to report, but that the arm fails to train is said.

    Args:
        study: What all strata share of it.
        strata: Those whose baseline has what the claim is about.
    """
    by_name = {stratum.name: stratum for stratum in strata}
    dependences = []
    for on, (first, last) in study.depends_on.items():
        if first not in by_name or last not in by_name:
            continue
        before, after = by_name[first], by_name[last]
        level = sidak(DIFFERENCES, before.comparisons)
        for arm in dict.fromkeys(expectation.arm for expectation in before.terms.study.expects):
            row, later = before.result(arm, before.endpoint.name), after.result(arm, after.endpoint.name)
            if row is None or later is None:
                continue
            failing = [(name, cell) for name, cell in ((first, row), (last, later)) if cell.word in FAILS]
            if failing:
                why = "; ".join(f"in {name} {arm} is {_no_evidence(cell)}" for name, cell in failing)
                dependences.append(Dependence(on, False, f"is not known to depend on {on}: {why}"))
                continue
            if _no_evidence(row) or _no_evidence(later):
                continue
            change = row.change_to(later, level)
            if change is None or change.low is None or change.high is None or change.n < CLAIM_SEEDS:
                continue
            is_shown = change.low > 0 or change.high < 0
            mean, low, high = (before.endpoint.signed(value) for value in (change.mean, change.low, change.high))
            word = "depends on" if is_shown else "is not shown to depend on"
            by = f"changes by {mean} ({interval_name(level)} {low} to {high}) from {first} to {last}"
            dependences.append(Dependence(on, is_shown, f"{word} {on}: the difference of {arm} {by}"))
    return dependences


def requirements_of(stratum: Stratum) -> list[Requirement]:
    """What the claim requires of the baseline, and whether the one-sided 95% bound of its runs' mean meets it."""
    base, requirements = stratum.arms[0], []
    for name, condition in stratum.terms.study.requires.items():
        match = CONDITION.fullmatch(condition)
        assert match is not None
        interval = mean_interval(base.values(name, list(base.runs)), 2 * LEVEL)  # each end is a one-sided bound
        measured, met = "not measured at two seeds", False
        if interval is not None and interval.low is not None and interval.high is not None:
            if match[1] == ">=":
                side, limit, met = "at least", interval.low, interval.low >= float(match[2])
            else:
                side, limit, met = "at most", interval.high, interval.high <= float(match[2])
            endpoint, verb = Endpoint(name), "as required" if met else "and the claim requires"
            mean = f"{endpoint.value(interval.mean)} ({side} {endpoint.value(limit)} with 95% confidence)"
            measured = f"{mean}, {verb} {condition}"
        sentence = f"{_where(stratum.name)}the baseline's {name} is {measured}"
        requirements.append(Requirement(stratum.name, sentence, met, interval.n if interval else 0))
    return requirements


def _finding(stratum: Stratum, expectation: Expectation) -> Finding:
    primary = stratum.result(expectation.arm, stratum.endpoint.name)
    result = stratum.result(expectation.arm, expectation.endpoint)
    arm, expected, seeds, p, note = expectation.arm, expectation.expected, None, None, ""
    if primary is None or result is None:
        refused, outcome, sentence = dict(stratum.refused), NOT_SHOWN, "has no result"
        if arm in refused:
            sentence = f"is refused in this setting: {refused[arm]}"
        elif arm in dict(stratum.equal):
            sentence = "is the baseline in this setting"
    elif expected in ("trains", "fails"):
        outcome, sentence = _training(expected, primary)
    else:
        outcome, sentence = _measured(expected, result)
        if outcome == NOT_SHOWN:
            seeds, note = result.seeds_to_decide, _note(expected, result)
        if result.effect:
            p = _p(outcome, expected, result.effect, result.endpoint.margin)
    label = primary.arm if primary else arm
    return Finding(stratum.name, label, expectation.endpoint, expected, outcome, sentence, seeds, p, note)


def _p(outcome: str, expected: str, effect: Effect, margin: float) -> float:
    """Of the test that decided an expectation, or would: of a difference, or of its place inside or outside the margin.

    The two one-sided tests say that it lies inside; a one-sided one that it lies outside.
    """
    if expected != "equivalent" and not (outcome == CONTRADICTED and effect.within(margin)):
        return effect.p
    beyond = abs(effect.delta) - margin
    tail = t_tail(beyond / effect.se, effect.df) / 2 if effect.se else 0.0
    is_outside = outcome in (CONTRADICTED, BETTER_THAN_EXPECTED) and not effect.within(margin)
    return tail if (beyond < 0) != is_outside else 1 - tail


def _training(expected: str, row: ArmResult) -> tuple[str, str]:
    trained, failed, word = row.trained, len(row.failed), row.word
    fails, trains = word in FAILS, not failed and trained >= CLAIM_SEEDS
    if word in (NOT_COMPARABLE, INCOMPLETE):
        return NOT_SHOWN, f"{word}, expected: {expected}"
    counts = f"fails to train at {failed} of {several(failed + trained, 'seed')}"
    if not failed:
        counts = f"trains at {trained} of {several(trained, 'seed')}"
    text = f"{counts}, expected: {expected}"
    if not fails and not trains:
        return NOT_SHOWN, text
    return (SUPPORTED if fails == (expected == "fails") else CONTRADICTED), text


def _note(expected: str, cell: ArmResult) -> str:
    """What is seen of an arm for which the expectation of a measure is not shown; '' for nothing."""
    if cell.word in FAILS:
        return "fails to train"
    return "unequal" if expected == "equivalent" and cell.word in DIFFERENT else ""


def _no_evidence(cell: ArmResult) -> str:
    """Why the difference of an arm shows nothing, whatever is expected; '' where it may show something."""
    if cell.unmeasured:
        return f"not measured at {several(cell.unmeasured, 'seed')} at which it and the baseline trained,"
    if cell.word in FAILS:
        return f"{cell.word}, fails to train at {len(cell.failed)} of {several(cell.runs, 'seed')}, so shows nothing"
    if cell.effect is None or cell.word in (NOT_COMPARABLE, INCOMPLETE, TOO_FEW_SEEDS, *SATURATED):
        return cell.word or "has no interval"
    return ""


def _measured(expected: str, cell: ArmResult) -> tuple[str, str]:
    """By the interval and not by the word: a failure to train, or an unfair pair, shows nothing about the measure.

    A difference that is shown to lie inside a declared margin contradicts `lower` and `higher` even on their side of 0,
    so no two of the three can be supported together. Where runs that trained lack the measure, those that have it are a
    selection, which shows nothing.
    """
    endpoint, margin = cell.endpoint, cell.endpoint.margin
    effect, why = cell.effect, _no_evidence(cell)
    if effect is None or why:
        return NOT_SHOWN, f"{why} in {endpoint.name}, expected: {expected}"
    interval = f"{interval_name(effect.level)} {endpoint.signed(effect.low)} to {endpoint.signed(effect.high)}"
    text = f"{endpoint.signed(effect.delta)} in {endpoint.name} ({interval}), expected: {expected}"
    inside = effect.within(margin)
    if effect.n < CLAIM_SEEDS:
        return NOT_SHOWN, f"{text}, but only {several(effect.n, 'pair')} trained"
    if cell.word == INCONCLUSIVE and (inside or effect.excludes_zero):
        return NOT_SHOWN, f"{text}, but the arm fails to train more often"
    is_benefit = endpoint.better == ("lower" if effect.delta < 0 else "higher")
    if expected == "equivalent":
        if not margin:
            return NOT_SHOWN, f"{text}, but the study declares no delta_min for {endpoint.name}"
        text += f" within {endpoint.within(margin)}"
        if inside:
            return SUPPORTED, text
        if effect.low <= margin and effect.high >= -margin:
            by = f", but {cell.word}: whether by more than that is not shown" if cell.word in DIFFERENT else ""
            return NOT_SHOWN, text + by
        return (BETTER_THAN_EXPECTED if is_benefit else CONTRADICTED), text
    if inside:
        return CONTRADICTED, f"{text}, but within {endpoint.within(margin)}, which is too small to matter"
    if not effect.excludes_zero:
        return NOT_SHOWN, text
    if (effect.delta < 0) == (expected == "lower"):
        return SUPPORTED, text
    return (OPPOSITE if is_benefit else CONTRADICTED), text
