"""The verdict of an arm: one word and one sentence, decided in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass, field

from nexus_ablate.comparison.endpoint import AT_CEILING, AT_CHANCE, Endpoint
from nexus_ablate.comparison.statistics import LEVEL, Effect, failure_p, seeds_needed
from nexus_ablate.console import several

NOT_COMPARABLE = "NOT COMPARABLE"
INCOMPLETE = "INCOMPLETE"
IDENTICAL = "IDENTICAL"
DIVERGED = "DIVERGED"
UNSTABLE = "UNSTABLE"
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
    IDENTICAL: "every loss equals the baseline's to the last bit",
    INCONCLUSIVE: "not enough seeds to decide; the sentence says how many would",
    UNSTABLE: "fails to train at some seeds, more often than the baseline",
    DIVERGED: "fails to train at every seed, and the baseline does not",
    NOT_COMPARABLE: "a fairness condition fails",
    AT_CHANCE: "neither the arm nor the baseline is shown to answer better than guessing",
    AT_CEILING: "neither the arm nor the baseline is shown to make a mistake",
    INCOMPLETE: "no pair of runs has a result yet",
}
DIFFERENT = (BETTER, WORSE, LOWER, HIGHER)
"""Words of an interval that excludes 0."""
SATURATED = (AT_CHANCE, AT_CEILING)
"""Words of a share of right answers that differences can't be read from."""
UNDECIDED = (INCONCLUSIVE, INCOMPLETE)
FAILS = (DIVERGED, UNSTABLE)
"""Words of an arm that fails to train."""
CLAIM_SEEDS = 5
"""With fewer a verdict is called preliminary."""

PRELIMINARY = "preliminary: "
TOO_SMALL = "below the threshold that matters"


@dataclass(frozen=True)
class Evidence:
    """What decides about an arm.

    Attributes:
        effect: Against the baseline, over the pairs in which both trained; None without two of them.
        delta_min: The smallest difference that matters, on the endpoint's scale.
        unfair: Fairness conditions that the arm breaks.
        pairs: Seeds at which arm and baseline both trained.
        runs: Runs with a result, of which `failed` failed to train, in the ways that `failures` names.
        identical: All losses equal the baseline's to the last bit.
        waiting: Runs without a result yet.
        family: Arms judged together.
        arms: Arms whose failures to train are tested together, if they are more.
        unmeasured: Seeds at which arm and baseline trained and one of them lacks the endpoint.
        single: The difference, where there is only one pair.
        shared_rate_delta: The difference at the shared learning rate, where each arm is judged at its own.
        saturated: The word of SATURATED that holds, if one does.
        more_seeds: The command that adds as many seeds as follow it, if there is one.
        exploratory: Seeds were added after their predecessors had been looked at.
    """

    effect: Effect | None
    delta_min: float
    unfair: list[str] = field(default_factory=list)
    pairs: int = 0
    runs: int = 0
    failed: int = 0
    failures: str = ""
    baseline_runs: int = 0
    baseline_failed: int = 0
    identical: bool = False
    waiting: int = 0
    family: int = 1
    arms: int = 1
    unmeasured: int = 0
    single: float | None = None
    shared_rate_delta: float | None = None
    endpoint: Endpoint = Endpoint()
    saturated: str = ""
    more_seeds: str = ""
    exploratory: bool = False

    @property
    def failure_p(self) -> float:
        """Of the arm's failures to train against the baseline's."""
        return failure_p(self.failed, self.runs, self.baseline_failed, self.baseline_runs)

    @property
    def fails_more(self) -> bool:
        return self.failed * self.baseline_runs > self.baseline_failed * self.runs

    @property
    def trains_where_the_baseline_fails(self) -> bool:
        return not self.fails_more and self.failure_p < LEVEL / max(self.family, self.arms)


@dataclass(frozen=True)
class Verdict:
    """The word, what qualifies it, and the sentence that says why."""

    word: str
    sentence: str
    prefix: str = ""
    qualifiers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.prefix + self.word + (f" ({', '.join(self.qualifiers)})" if self.qualifiers else "")


def word(evidence: Evidence) -> str:
    """The word alone."""
    e, effect = evidence, evidence.effect
    if e.unfair:
        return NOT_COMPARABLE
    if not e.runs:
        return INCOMPLETE
    if e.identical:
        return IDENTICAL
    if e.failed == e.runs and e.fails_more:
        return DIVERGED
    if e.fails_more and e.failure_p < LEVEL:
        return UNSTABLE
    if e.trains_where_the_baseline_fails and e.endpoint.better:
        return BETTER
    if effect is None:
        return INCOMPLETE if e.waiting and not e.pairs else INCONCLUSIVE
    if e.saturated:
        return e.saturated
    if effect.excludes_zero:
        return _direction(effect, e.endpoint)
    return EQUIVALENT if effect.within(e.delta_min) else INCONCLUSIVE


def _direction(effect: Effect, endpoint: Endpoint) -> str:
    if not endpoint.better:
        return LOWER if effect.delta < 0 else HIGHER
    return BETTER if (effect.delta < 0) == (endpoint.better == "lower") else WORSE


def decide(evidence: Evidence) -> Verdict:
    """The whole verdict."""
    e, effect = evidence, evidence.effect
    chosen = word(e)
    weighed = chosen in (*DIFFERENT, EQUIVALENT, INCONCLUSIVE, *SATURATED)
    qualifiers = []
    if chosen in DIFFERENT and effect is not None:
        if effect.within(e.delta_min):
            qualifiers.append(TOO_SMALL)
        if e.shared_rate_delta is not None and e.shared_rate_delta * effect.delta < 0:
            qualifiers.append("depends on LR")
    by_failures = _by_failures(chosen, e)
    if chosen == BETTER and by_failures and effect and effect.excludes_zero and _direction(effect, e.endpoint) == WORSE:
        qualifiers.append("worse where both train")
    if weighed and e.failed:
        qualifiers.append(f"{e.failed} of {e.runs} failed")
    if weighed and e.unmeasured:
        qualifiers.append(f"{e.unmeasured} not measured")
    if e.waiting and chosen not in (NOT_COMPARABLE, INCOMPLETE):
        qualifiers.append("incomplete")
    counted = min(e.runs, e.baseline_runs) if by_failures else e.pairs
    prefix = PRELIMINARY if (weighed or chosen in FAILS) and counted < CLAIM_SEEDS else ""
    if weighed and e.exploratory:
        prefix += "exploratory: "
    return Verdict(chosen, _sentence(chosen, e), prefix, tuple(qualifiers))


def _sentence(chosen: str, e: Evidence) -> str:
    if chosen == NOT_COMPARABLE:
        return f"fairness fails on {', '.join(e.unfair)}; --allow {','.join(e.unfair)} compares anyway"
    if chosen == INCOMPLETE:
        return f"{several(e.waiting, 'run')} without a result" if e.waiting else "no run yet"
    if chosen == IDENTICAL:
        return f"every loss equals the baseline's to the last bit, at {e.runs} of {several(e.runs, 'seed')}"
    effect, signed = e.effect, e.endpoint.signed
    if _by_failures(chosen, e):
        return _failures(e) + (f"; where both train, {signed(effect.delta)}" if effect and chosen == BETTER else "")
    if effect is None:
        if e.failed == e.runs:
            return f"{_failures(e)}: neither trains"
        if e.unmeasured:
            return f"not measured at {several(e.unmeasured, 'seed')} at which arm and baseline trained"
        if e.single is None:
            return "fewer than two runs that trained, or no difference between them"
        difference = f"{signed(e.single)} {e.endpoint.unit}".rstrip()
        return f"one pair differs by {difference}; without a second seed its noise is unknown"
    if chosen in SATURATED:
        return f"{MEANINGS[chosen]}, at {several(effect.n, 'seed')} and 95% confidence"
    interval = f"{interval_name(effect.level)} {signed(effect.low)} to {signed(effect.high)}"
    also = f"; {_failures(e)}" if e.failed else ""
    if chosen in DIFFERENT:
        side = "lower" if effect.delta < 0 else "higher"
        agree = ""
        if effect.wins is not None:
            agree = f", in {effect.wins if effect.delta < 0 else effect.n - effect.wins} of {several(effect.n, 'seed')}"
        return f"{e.endpoint.size(effect.delta)} {side} ({interval}){agree}{also}"
    if chosen == EQUIVALENT:
        return f"within {e.endpoint.within(e.delta_min)} ({interval}){also}"
    difference = f"{signed(effect.delta)} {'' if e.endpoint.log else e.endpoint.unit}".rstrip()
    return f"{difference} ({interval}); {_seeds_sentence(effect, e)}{also}"


def _by_failures(chosen: str, e: Evidence) -> bool:
    """Whether the counts of failures to train decided."""
    return chosen in FAILS or (chosen == BETTER and e.trains_where_the_baseline_fails)


def _failures(e: Evidence) -> str:
    how = f" ({e.failures})" if e.failures else ""
    return (
        f"fails to train at {e.failed} of {several(e.runs, 'seed')}{how}, the baseline at {e.baseline_failed} of "
        f"{e.baseline_runs} (Barnard's exact test, p = {e.failure_p:.2g})"
    )


def interval_name(level: float) -> str:
    """`95% interval`; of a look, which spends a share of the 5%, `99.25% interval`."""
    return f"{100 * (1 - level):.4g}% interval"


def _seeds_sentence(effect: Effect, e: Evidence) -> str:
    needed, for_margin = seeds_to_decide(effect, e), seeds_for_margin(effect, e)
    margin = f"{_margin(e)} needs " + (f"about {for_margin}" if for_margin else "more than 1000")
    if needed is None:
        return f"more than 1000 seeds would be needed to decide an effect of this size; {margin}"
    command = f" ({e.more_seeds} {max(needed - effect.n, 1)})" if e.more_seeds else ""
    return f"about {needed} seeds would decide an effect of this size{command}; {margin}"


def _margin(e: Evidence) -> str:
    return e.endpoint.within(e.delta_min) if e.endpoint.log else f"±{e.endpoint.value(e.delta_min)}"


def seeds_to_decide(effect: Effect, e: Evidence) -> int | None:
    """Seeds after which the verdict would be decided with 80% power if the true difference were the measured one.

    Either the interval excludes 0, or it lies inside the margin. Planned with the upper 80% bound of the spread, since
    with the point estimate half of all plans fall short.
    """
    spread, size = effect.spread_bound, abs(effect.delta)
    counts = [seeds_needed(size, spread, e.family, alone=effect.alone)]
    if size < e.delta_min:  # both ends of the interval must hold: 90% each
        counts.append(seeds_needed(e.delta_min - size, spread, e.family, power=0.9, alone=effect.alone))
    return min((count for count in counts if count is not None), default=None)


def seeds_for_margin(effect: Effect, e: Evidence) -> int | None:
    """Seeds after which a true difference of `delta_min` would be shown with 80% power."""
    return seeds_needed(e.delta_min, effect.spread_bound, e.family, alone=effect.alone)
