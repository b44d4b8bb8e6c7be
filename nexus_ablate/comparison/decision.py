"""The verdict of an arm: one word and one sentence, decided in a fixed order."""

from __future__ import annotations

from nexus_ablate.comparison.endpoint import Endpoint
from nexus_ablate.comparison.results import ArmResult
from nexus_ablate.comparison.statistics import LEVEL, Effect, failure_p, seeds_needed
from nexus_ablate.comparison.terms import Terms
from nexus_ablate.comparison.verdict import (
    BETTER,
    CLAIM_SEEDS,
    DIFFERENT,
    DIVERGED,
    EQUIVALENT,
    FAILS,
    HIGHER,
    IDENTICAL,
    INCOMPLETE,
    INCONCLUSIVE,
    LOWER,
    MEANINGS,
    NOT_COMPARABLE,
    PRELIMINARY,
    SATURATED,
    TOO_SMALL,
    UNSTABLE,
    WORSE,
    Verdict,
    interval_name,
)
from nexus_ablate.console import several


def decide(result: ArmResult, terms: Terms) -> Verdict:
    """The verdict of an arm whose pairs, failures and interval are known."""
    chosen = word(result)
    effect = result.effect
    is_by_failures = _is_by_failures(chosen, result)
    is_weighed = chosen in (*DIFFERENT, EQUIVALENT, INCONCLUSIVE, *SATURATED)
    qualifiers = []
    if chosen in DIFFERENT and effect is not None:
        if effect.within(result.delta_min):
            qualifiers.append(TOO_SMALL)
        if result.at_shared_lr is not None and result.at_shared_lr.mean * effect.delta < 0:
            qualifiers.append("depends on LR")
    is_worse = effect is not None and effect.excludes_zero and _direction(effect, result.endpoint) == WORSE
    if chosen == BETTER and is_by_failures and is_worse:
        qualifiers.append("worse where both train")
    if is_weighed and result.failed:
        qualifiers.append(f"{len(result.failed)} of {result.runs} failed")
    if is_weighed and result.unmeasured:
        qualifiers.append(f"{result.unmeasured} not measured")
    if result.waiting and chosen not in (NOT_COMPARABLE, INCOMPLETE):
        qualifiers.append("incomplete")
    seeds = min(result.runs, result.baseline_runs) if is_by_failures else result.compared
    prefix = ""
    if seeds < CLAIM_SEEDS and (is_weighed or chosen in FAILS):
        prefix = PRELIMINARY
    if is_weighed and terms.exploratory:
        prefix += "exploratory: "
    return Verdict(chosen, _sentence(chosen, result, terms), prefix, tuple(qualifiers))


# ------------------------------------------------------------------------------------------------------------ the word


def word(result: ArmResult) -> str:
    """The word alone."""
    effect = result.effect
    if result.unfair:
        return NOT_COMPARABLE
    if not result.runs:
        return INCOMPLETE
    if result.is_identical:
        return IDENTICAL
    if len(result.failed) == result.runs and _fails_more(result):
        return DIVERGED
    if _fails_more(result) and _failure_p(result) < LEVEL:
        return UNSTABLE
    if _trains_where_the_baseline_fails(result) and result.endpoint.better:
        return BETTER
    if result.is_equal:
        return EQUIVALENT
    if effect is None:
        return INCOMPLETE if result.waiting and not result.compared else INCONCLUSIVE
    if result.saturated:
        return result.saturated
    if effect.excludes_zero:
        return _direction(effect, result.endpoint)
    return EQUIVALENT if effect.within(result.delta_min) else INCONCLUSIVE


def _direction(effect: Effect, endpoint: Endpoint) -> str:
    if not endpoint.better:
        return LOWER if effect.delta < 0 else HIGHER
    return BETTER if (effect.delta < 0) == (endpoint.better == "lower") else WORSE


def _failure_p(result: ArmResult) -> float:
    """Of the arm's failures to train against the baseline's."""
    return failure_p(len(result.failed), result.runs, result.baseline_failed, result.baseline_runs)


def _fails_more(result: ArmResult) -> bool:
    return len(result.failed) * result.baseline_runs > result.baseline_failed * result.runs


def _trains_where_the_baseline_fails(result: ArmResult) -> bool:
    return not _fails_more(result) and _failure_p(result) < LEVEL / max(result.family, result.arms)


def _is_by_failures(word: str, result: ArmResult) -> bool:
    """Whether the counts of failures to train decided."""
    return word in FAILS or (word == BETTER and _trains_where_the_baseline_fails(result))


# -------------------------------------------------------------------------------------------------------- the sentence


def _sentence(word: str, result: ArmResult, terms: Terms) -> str:
    effect, signed = result.effect, result.endpoint.signed
    if word == NOT_COMPARABLE:
        return f"fairness fails on {', '.join(result.unfair)}; --allow {','.join(result.unfair)} compares anyway"
    if word == INCOMPLETE:
        return f"{several(result.waiting, 'run')} without a result" if result.waiting else "no run yet"
    if word == IDENTICAL:
        return f"every loss equals the baseline's to the last bit, at {result.runs} of {several(result.runs, 'seed')}"
    if _is_by_failures(word, result):
        where_both_train = f"; where both train, {signed(effect.delta)}" if effect and word == BETTER else ""
        return _failures(result) + where_both_train
    if effect is None:
        return _without_interval(result)
    if word in SATURATED:
        return f"{MEANINGS[word]}, at {several(effect.n, 'seed')} and 95% confidence"
    interval = f"{interval_name(effect.level)} {signed(effect.low)} to {signed(effect.high)}"
    failures = f"; {_failures(result)}" if result.failed else ""
    if word in DIFFERENT:
        side = "lower" if effect.delta < 0 else "higher"
        sentence = f"{result.endpoint.size(effect.delta)} {side} ({interval})"
        if effect.wins is not None:
            agreeing = effect.wins if effect.delta < 0 else effect.n - effect.wins
            sentence += f", in {agreeing} of {several(effect.n, 'seed')}"
        return sentence + failures
    if word == EQUIVALENT:
        return f"within {result.endpoint.within(result.delta_min)} ({interval}){failures}"
    unit = "" if result.endpoint.log else result.endpoint.unit
    difference = f"{signed(effect.delta)} {unit}".rstrip()
    return f"{difference} ({interval}); {_needed_seeds(effect, result, terms)}{failures}"


def _without_interval(result: ArmResult) -> str:
    if result.is_equal:
        return f"all {result.compared} pairs have equal values, within {result.endpoint.within(result.delta_min)}"
    if len(result.failed) == result.runs:
        return f"{_failures(result)}: neither trains"
    if result.unmeasured:
        return f"not measured at {several(result.unmeasured, 'seed')} at which arm and baseline trained"
    if not result.pairs:
        return "fewer than two runs that trained, or no difference between them"
    difference = f"{result.endpoint.signed(result.pairs[0])} {result.endpoint.unit}".rstrip()
    return f"one pair differs by {difference}; without a second seed its noise is unknown"


def _failures(result: ArmResult) -> str:
    kinds = ", ".join(sorted(set(result.failed.values())))
    how = f" ({kinds})" if kinds else ""
    return (
        f"fails to train at {len(result.failed)} of {several(result.runs, 'seed')}{how}, the baseline at "
        f"{result.baseline_failed} of {result.baseline_runs} (Barnard's exact test, p = {_failure_p(result):.2g})"
    )


# ------------------------------------------------------------------------------------------------------ planning seeds


def _needed_seeds(effect: Effect, result: ArmResult, terms: Terms) -> str:
    needed = seeds_to_decide(effect, result)
    for_margin = seeds_for_margin(effect, result)
    endpoint, delta_min = result.endpoint, result.delta_min
    margin = endpoint.within(delta_min) if endpoint.log else f"±{endpoint.value(delta_min)}"
    margin += f" needs about {for_margin}" if for_margin else " needs more than 1000"
    if needed is None:
        return f"more than 1000 seeds would be needed to decide an effect of this size; {margin}"
    command = ""
    if terms.place and not terms.study.looks:
        command = f" (nexus-ablate study {terms.place} --add-seeds {max(needed - effect.n, 1)})"
    return f"about {needed} seeds would decide an effect of this size{command}; {margin}"


def seeds_to_decide(effect: Effect, result: ArmResult) -> int | None:
    """Seeds after which the verdict would be decided with 80% power if the true difference were the measured one.

    Either the interval excludes 0, or it lies inside the margin. Planned with the upper 80% bound of the spread, since
    with the point estimate half of all plans fall short.
    """
    spread, size = effect.spread_bound, abs(effect.delta)
    counts = [seeds_needed(size, spread, result.family, alone=effect.alone)]
    if size < result.delta_min:  # both ends of the interval must hold: 90% each
        margin = result.delta_min - size
        counts.append(seeds_needed(margin, spread, result.family, power=0.9, alone=effect.alone))
    return min((count for count in counts if count is not None), default=None)


def seeds_for_margin(effect: Effect, result: ArmResult) -> int | None:
    """Seeds after which a true difference of `delta_min` would be shown with 80% power."""
    return seeds_needed(result.delta_min, effect.spread_bound, result.family, alone=effect.alone)
