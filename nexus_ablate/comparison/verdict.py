"""The verdict of an arm: the first word that holds, and its sentence."""

from __future__ import annotations

from dataclasses import dataclass

from nexus_ablate.comparison.statistics import POWER, Effect, seeds_needed, upper_bound
from nexus_ablate.console import several
from nexus_ablate.study.endpoint import Endpoint
from nexus_ablate.study.study import FEWEST_SEEDS

NOT_COMPARABLE = "NOT COMPARABLE"
INCOMPLETE = "INCOMPLETE"
IDENTICAL = "IDENTICAL"
DIVERGED = "DIVERGED"
TOO_FEW_SEEDS = "TOO FEW SEEDS"
BETTER = "BETTER"
WORSE = "WORSE"
LOWER = "LOWER"
HIGHER = "HIGHER"
EQUIVALENT = "EQUIVALENT"
INCONCLUSIVE = "INCONCLUSIVE"

MEANINGS = {
    BETTER: "the whole interval lies on the better side of 0: below it for a loss",
    WORSE: "the whole interval lies on the worse side of 0: above it for a loss",
    LOWER: "the whole interval lies below 0, of a measure that is better neither lower nor higher",
    HIGHER: "the whole interval lies above 0, of a measure that is better neither lower nor higher",
    EQUIVALENT: "the whole interval is closer to 0 than the smallest difference that matters",
    INCONCLUSIVE: "not decided; the sentence says how many new seeds would",
    IDENTICAL: "every loss equals the baseline's to the last bit, and so does the measure",
    DIVERGED: "no run has a finite loss, and all of the baseline's have",
    NOT_COMPARABLE: "a fairness condition fails, or the baseline has learned nothing",
    TOO_FEW_SEEDS: f"fewer than {FEWEST_SEEDS} pairs: an interval, and no word",
    INCOMPLETE: "no pair of runs has a result yet",
}
DIFFERENT = (BETTER, WORSE, LOWER, HIGHER)
"""Words of an interval that excludes 0."""
WEIGHED = (*DIFFERENT, EQUIVALENT, INCONCLUSIVE, TOO_FEW_SEEDS)
"""Words of an interval."""
LEARNED = "learned"
"""The fairness condition that the baseline has learned something."""
EXPLORATORY, EARLY = "exploratory", "early training"
TOO_SMALL = "below the threshold that matters"
MOST_ADVISED = 200
"""Seeds, beyond which nobody adds them."""


@dataclass(frozen=True)
class Counts:
    """The runs of an arm and of the baseline.

    Attributes:
        runs, base_runs: That ended.
        shared: Seeds at which both have one.
        failed, base_failed: Of these, without a finite loss.
        above_start: Of the arm's, ended above their loss at the start.
        waiting: Of the arm, without a result.
    """

    runs: int
    failed: int
    base_runs: int
    base_failed: int
    shared: int = 0
    above_start: int = 0
    waiting: int = 0


def word_of(endpoint: Endpoint, effect: Effect | None, counts: Counts, unfair: list[str], is_identical: bool) -> str:
    """The word alone.

    Args:
        unfair: The fairness conditions that fail.
    """
    if unfair and not (is_identical and unfair == [LEARNED]):
        return NOT_COMPARABLE
    if not counts.runs or not counts.base_runs:
        return INCOMPLETE
    if is_identical:
        return IDENTICAL
    if counts.failed == counts.runs >= FEWEST_SEEDS and not counts.base_failed:
        return DIVERGED
    if effect is None and counts.waiting:
        return INCOMPLETE
    if effect is None or effect.n < FEWEST_SEEDS:
        return TOO_FEW_SEEDS
    word = word_of_interval(effect, endpoint)
    flattered = {BETTER: counts.failed > counts.base_failed, WORSE: counts.base_failed > counts.failed}
    if flattered.get(word, counts.failed != counts.base_failed):  # survivors flatter
        return INCONCLUSIVE
    return word


def word_of_interval(effect: Effect, endpoint: Endpoint) -> str:
    """What the interval says, whatever failed."""
    if effect.excludes_zero:
        if not endpoint.better:
            return LOWER if effect.delta < 0 else HIGHER
        return BETTER if (effect.delta < 0) == (endpoint.better == "lower") else WORSE
    return EQUIVALENT if effect.within(endpoint.margin) else INCONCLUSIVE


def qualifiers(word: str, counts: Counts, always: tuple[str, ...], is_early: bool) -> tuple[str, ...]:
    """What stands beside a word.

    Args:
        always: Beside every word of an interval.
    """
    if word not in (*WEIGHED, DIVERGED):
        return ()
    early = (EARLY,) if is_early else ()
    if word == DIVERGED:
        return early
    beside = [*always, *early]
    if counts.failed:
        beside.append(f"{counts.failed} of {counts.runs} failed")
    if counts.base_failed:
        beside.append(f"{counts.base_failed} of {counts.base_runs} of the baseline failed")
    if counts.above_start:
        beside.append(f"{counts.above_start} of {counts.runs} ended above their loss at the start")
    return tuple(beside)


def sentence(word: str, endpoint: Endpoint, effect: Effect | None, counts: Counts, unfair: list[str]) -> str:
    """Why the word holds, with the numbers."""
    failures = ""
    if counts.failed or counts.base_failed:
        failures = (
            f"{counts.failed} of {several(counts.runs, 'run')} failed to train, of the baseline "
            f"{counts.base_failed} of {counts.base_runs}"
        )
    if word == NOT_COMPARABLE:
        return f"fairness fails on {', '.join(unfair)}; --allow {','.join(unfair)} compares anyway"
    if word == IDENTICAL:
        return f"every loss equals the baseline's to the last bit, at {several(counts.shared, 'seed')}"
    if word == DIVERGED:
        return failures
    if effect is None:
        if not counts.runs:
            return f"{several(counts.waiting, 'run')} without a result" if counts.waiting else "no run yet"
        return failures or f"fewer than two pairs of runs have {endpoint.name}"
    interval = f"{endpoint.signed(effect.low)} to {endpoint.signed(effect.high)}"
    seeds = f"over {several(effect.n, 'seed')}"
    if word == EQUIVALENT:
        text = f"ends within {endpoint.within(endpoint.margin)} ({interval}), {seeds}"
    else:
        text = f"ends {endpoint.clause(effect.delta)} ({interval}), {seeds}"
    if word in DIFFERENT and effect.within(endpoint.margin):
        text += f"; {TOO_SMALL}"
    if word == TOO_FEW_SEEDS:
        text += f"; {FEWEST_SEEDS} pairs are the fewest for a word"
    if word == INCONCLUSIVE:
        text += f"; {_why_undecided(effect, endpoint)}"
    return f"{text}; {failures}" if failures else text


def _why_undecided(effect: Effect, endpoint: Endpoint) -> str:
    if word_of_interval(effect, endpoint) != INCONCLUSIVE:
        return "no word, since runs that failed to train are missing on one side"
    needed = seeds_to_decide(effect, endpoint)
    if needed is None:
        return f"more than {MOST_ADVISED} seeds would be needed"
    return f"{needed} new seeds would decide it"


def seeds_to_decide(effect: Effect, endpoint: Endpoint) -> int | None:
    """Pairs in all after which a difference of the measured size is decided either way; None beyond `MOST_ADVISED`.

    Planned with the upper 80% bound of the spread, since with the point estimate half of all plans fall short.
    """
    bound, text_se = upper_bound(effect.spread, effect.n - 1), effect.text_se or 0.0
    differ = seeds_needed(abs(effect.delta), bound, effect.level, POWER, text_se)
    equal = seeds_needed(endpoint.margin - abs(effect.delta), bound, effect.level, 0.9, text_se)  # both ends must
    counts = [count for count in (differ, equal) if count is not None and count <= MOST_ADVISED]
    return max(min(counts), effect.n + 1) if counts else None
