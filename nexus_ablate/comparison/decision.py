"""The verdict of an arm: one word and one sentence, decided in a fixed order."""

from __future__ import annotations

from nexus_ablate.comparison.cell import Effect
from nexus_ablate.comparison.results import ArmResult
from nexus_ablate.comparison.statistics import POWER, failure_p, seeds_needed
from nexus_ablate.comparison.terms import Terms
from nexus_ablate.comparison.verdict import (
    BETTER,
    CLAIM_SEEDS,
    DIFFERENT,
    DIVERGED,
    EARLY,
    EQUIVALENT,
    FAILS,
    HIGHER,
    IDENTICAL,
    INCOMPLETE,
    INCONCLUSIVE,
    LOWER,
    MEANINGS,
    NOT_COMPARABLE,
    SATURATED,
    TOO_FEW_SEEDS,
    TOO_SMALL,
    UNSTABLE,
    WORSE,
    Verdict,
)
from nexus_ablate.console import several
from nexus_ablate.study.endpoint import Endpoint

MOST_ADVISED = 200
"""Seeds, beyond which nobody adds them; the condition `text` says where more validation text helps instead."""


def decide(result: ArmResult, terms: Terms) -> Verdict:
    """The verdict of an arm whose pairs, failures and interval are known."""
    chosen = word(result)
    effect = result.effect
    is_weighed = chosen in (*DIFFERENT, EQUIVALENT, INCONCLUSIVE, TOO_FEW_SEEDS, *SATURATED)
    qualifiers = []
    if chosen in DIFFERENT and effect is not None and effect.within(result.endpoint.margin):
        qualifiers.append(TOO_SMALL)
    if chosen == _word_of_failures(result) == BETTER and _word_of_interval(effect, result.endpoint) == WORSE:
        qualifiers.append("worse where both train")
    if is_weighed and result.failed:
        qualifiers.append(f"{len(result.failed)} of {result.runs} failed")
    if is_weighed and result.unmeasured:
        qualifiers.append(f"{result.unmeasured} not measured")
    if result.waiting and chosen not in (NOT_COMPARABLE, INCOMPLETE):
        qualifiers.append("incomplete")
    if result.is_early and (is_weighed or chosen in FAILS):
        qualifiers.append(EARLY)
    prefix = "exploratory: " if is_weighed and terms.exploratory else ""
    sentence = _sentence(chosen, result, terms)
    if effect is not None and result.own_rates:
        rate, base_rate = result.own_rates
        if rate == base_rate:
            sentence += f"; both are best at a learning rate of {rate:g}"
        else:
            sentence += f"; each at its own best learning rate ({rate:g} against {base_rate:g})"
    return Verdict(chosen, sentence, prefix, tuple(qualifiers))


# ------------------------------------------------------------------------------------------------------------ the word


def word(result: ArmResult) -> str:
    """The word alone."""
    effect = result.effect
    if result.unfair_runs:
        return NOT_COMPARABLE
    if not result.runs:
        return INCOMPLETE
    if result.is_identical:
        return IDENTICAL
    if decided := _word_of_failures(result):
        return decided
    if result.unfair:
        return NOT_COMPARABLE
    if result.waiting and not result.compared:
        return INCOMPLETE
    if len(result.failed) == result.runs >= CLAIM_SEEDS:
        return INCONCLUSIVE
    if result.compared < CLAIM_SEEDS:
        return TOO_FEW_SEEDS
    if result.is_equal and not _fails_more(result):
        return EQUIVALENT
    if effect is None:
        return INCONCLUSIVE
    if result.saturated:
        return result.saturated
    chosen = _word_of_interval(effect, result.endpoint)
    if chosen == WORSE or not _fails_more(result):
        return chosen
    return chosen if _word_of_interval(result.effect_with_failures, result.endpoint) == chosen else INCONCLUSIVE


def _word_of_interval(effect: Effect | None, endpoint: Endpoint) -> str:
    if effect is None:
        return INCONCLUSIVE
    if effect.excludes_zero:
        return _direction(effect, endpoint)
    return EQUIVALENT if effect.within(endpoint.margin) else INCONCLUSIVE


def _direction(effect: Effect, endpoint: Endpoint) -> str:
    if not endpoint.better:
        return LOWER if effect.delta < 0 else HIGHER
    return BETTER if (effect.delta < 0) == (endpoint.better == "lower") else WORSE


def _failure_p(result: ArmResult) -> float:
    """Of the arm's failures to train against the baseline's."""
    return failure_p(len(result.failed), result.runs, result.baseline_failed, result.baseline_runs)


def _fails_more(result: ArmResult) -> bool:
    return len(result.failed) * result.baseline_runs > result.baseline_failed * result.runs


def _word_of_failures(result: ArmResult) -> str:
    """The word that the counts of failures to train decide; '' where they don't."""
    if min(result.runs, result.baseline_runs) < CLAIM_SEEDS or _failure_p(result) >= result.failure_level:
        return ""
    if _fails_more(result):
        return DIVERGED if len(result.failed) == result.runs else UNSTABLE
    return BETTER if result.endpoint.better else ""


# -------------------------------------------------------------------------------------------------------- the sentence


def _sentence(word: str, result: ArmResult, terms: Terms) -> str:
    effect = result.effect
    if word == NOT_COMPARABLE:
        return f"fairness fails on {', '.join(result.unfair)}; --allow {','.join(result.unfair)} compares anyway"
    if word == INCOMPLETE:
        return f"{several(result.waiting, 'run')} without a result" if result.waiting else "no run yet"
    if word == IDENTICAL:
        return f"every loss equals the baseline's to the last bit, at {result.runs} of {several(result.runs, 'seed')}"
    if word == _word_of_failures(result):
        if word == BETTER and effect is not None:
            return f"{_failures(result)}; where both train, {result.endpoint.signed(effect.delta)}"
        return _failures(result)
    if effect is not None:
        failures = f"; {_failures(result)}" if result.failed else ""
        return _difference(word, effect, result, terms) + failures
    if result.is_equal:
        equal = (
            f"all {result.compared} pairs have equal values, within {result.endpoint.within(result.endpoint.margin)}"
        )
        return f"{equal}; {_failures(result)}" if result.failed else equal
    if len(result.failed) == result.runs:
        return _failures(result)
    if result.unmeasured:
        return f"not measured at {several(result.unmeasured, 'seed')} at which arm and baseline trained"
    if not result.pairs:
        return "fewer than two runs that trained, or no difference between them"
    if not any(result.pairs) and len(result.pairs) > 1:
        return f"all {result.compared} pairs have equal values; declare a delta_min above their last decimal"
    difference = f"{result.endpoint.signed(result.pairs[0])} {result.endpoint.unit}".rstrip()
    return f"one pair differs by {difference}; without a second seed its noise is unknown"


def _difference(word: str, effect: Effect, result: ArmResult, terms: Terms) -> str:
    """The difference, its interval and the seeds: `ends 0.54 nats per token lower (0.40 to 0.69), at 5 of 5 seeds`."""
    endpoint = result.endpoint
    if word in SATURATED:
        return f"{MEANINGS[word]}, at {several(effect.n, 'seed')} and 95% confidence"
    interval = f"{endpoint.signed(effect.low)} to {endpoint.signed(effect.high)}"
    if word == EQUIVALENT:
        return f"ends within {endpoint.within(endpoint.margin)} ({interval}), over {several(effect.n, 'seed')}"
    if word in DIFFERENT and not endpoint.log:
        ends = sorted((abs(effect.low), abs(effect.high)))
        interval = " to ".join(map(endpoint.value, ends))
    if result.pairs:
        seeds = f"at {result.seeds_on_side(effect.delta)} of {several(effect.n, 'seed')}"
    else:
        seeds = f"over {several(effect.n, 'run')} of each"
    sentence = f"ends {endpoint.clause(effect.delta)} ({interval}), {seeds}"
    return sentence if word in DIFFERENT else f"{sentence}; {_needed_seeds(word, effect, result, terms)}"


def _failures(result: ArmResult) -> str:
    kinds = ", ".join(sorted(set(result.failed.values())))
    how = f" ({kinds})" if kinds else ""
    return (
        f"fails to train at {len(result.failed)} of {several(result.runs, 'seed')}{how}, the baseline at "
        f"{result.baseline_failed} of {result.baseline_runs} (Barnard's exact test, p = {_failure_p(result):.2g}, "
        f"where a word needs p < {result.failure_level:.2g})"
    )


# ------------------------------------------------------------------------------------------------------ planning seeds


def _needed_seeds(word: str, effect: Effect, result: ArmResult, terms: Terms) -> str:
    """How many more seeds reach which word, if the true difference is the measured one."""
    if word == TOO_FEW_SEEDS:
        return f"{CLAIM_SEEDS} pairs that trained are the fewest for a word"
    if _word_of_interval(effect, result.endpoint) != INCONCLUSIVE:
        if result.effect_with_failures is None:
            return "no word, since the arm fails more often, and where a run ends that learned nothing is not known"
        return "no word, since the arm fails more often and the failures counted as unlearned runs would change it"
    sides = {BETTER: "is better", WORSE: "is worse"}
    side = sides.get(_direction(effect, result.endpoint), "differs")
    needed = [
        (seeds_to_differ(effect), f"decide whether it {side}"),
        (seeds_to_equal(effect, result.endpoint.margin), "show that it is equivalent"),
    ]
    reached = sorted((count, text) for count, text in needed if count and count <= MOST_ADVISED)
    if not reached:
        return f"more than {MOST_ADVISED} seeds would be needed to decide an effect of this size"
    (first, text), *others = [(max(count - effect.n, 1), text) for count, text in reached]
    advice = f"{several(first, 'more seed')} {text}"
    for more, text in others:
        advice += f"; {more} {text}"
    if terms.place and result.name in terms.arm_names and not terms.study.looks:
        advice += f" (nexus-ablate study {terms.place} --add-seeds {first})"
    return advice


def seeds_to_differ(effect: Effect) -> int | None:
    """Pairs after which the interval would exclude 0 with 80% power if the true difference were the measured one.

    Planned with the upper 80% bound of the spread, since with the point estimate half of all plans fall short.
    """
    return _seeds(effect, abs(effect.delta), POWER)


def seeds_to_equal(effect: Effect, delta_min: float) -> int | None:
    """Pairs after which it would lie inside the margin: both ends must, 90% each."""
    return _seeds(effect, delta_min - abs(effect.delta), 0.9)


def _seeds(effect: Effect, difference: float, power: float) -> int | None:
    """Pairs that show a difference of this size."""
    text_se = effect.text_se if effect.counts_text and effect.text_se else 0.0
    return seeds_needed(difference, effect.spread_bound, effect.level, power, text_se)
