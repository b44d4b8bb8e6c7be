"""One word and one plain sentence for each arm, decided in a fixed order from what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from nexus_ablate.comparison.statistics import Effect, divergence_p, seeds_needed

NOT_COMPARABLE = "NOT COMPARABLE"
INCOMPLETE = "INCOMPLETE"
IDENTICAL = "IDENTICAL"
DIVERGED = "DIVERGED"
UNSTABLE = "UNSTABLE"
BETTER = "BETTER"
WORSE = "WORSE"
EQUIVALENT = "EQUIVALENT"
INCONCLUSIVE = "INCONCLUSIVE"

MEANINGS = {
    BETTER: "lower loss: the simultaneous 95% interval lies below 0",
    WORSE: "higher loss: the simultaneous 95% interval lies above 0",
    EQUIVALENT: "the difference is smaller than the smallest that matters (two one-sided tests at 5%)",
    IDENTICAL: "every loss agrees with the baseline's to the last bit",
    INCONCLUSIVE: "the seeds do not decide; the sentence says how many would",
    UNSTABLE: "came to grief at some seed",
    DIVERGED: "came to grief at every seed",
    NOT_COMPARABLE: "a condition of fairness is broken",
    INCOMPLETE: "no pair of runs has come to a result yet",
}
CLAIM_SEEDS = 5
"""Below this a verdict is called screening."""


@dataclass(frozen=True)
class Evidence:
    """What decides about an arm.

    Attributes:
        effect: Against the baseline; None without two pairs.
        delta_min: The smallest difference that matters, in the endpoint's unit.
        unfair: Conditions that the arm breaks.
        pairs: Seeds at which arm and baseline both came to a number.
        runs: Runs that came to a result, `diverged` of them to a bad one.
        identical: All losses agree with the baseline's to the last bit.
        waiting: Runs without a result yet.
        family: Arms tested together.
        single: The difference, where one pair is all there is.
        tuned_delta: The difference with each arm at its own best learning rate.
    """

    effect: Effect | None
    delta_min: float
    unfair: list[str] = field(default_factory=list)
    pairs: int = 0
    runs: int = 0
    diverged: int = 0
    hows: str = ""
    baseline_runs: int = 0
    baseline_diverged: int = 0
    identical: bool = False
    waiting: int = 0
    family: int = 1
    single: float | None = None
    tuned_delta: float | None = None
    unit: str = "nats per token"


@dataclass(frozen=True)
class Verdict:
    """The word, what qualifies it, and the sentence that says why."""

    word: str
    sentence: str
    screening: bool = False
    qualifiers: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = ("screening: " if self.screening else "") + self.word
        return shown + (f" ({', '.join(self.qualifiers)})" if self.qualifiers else "")


def word(evidence: Evidence) -> str:
    """The word alone."""
    e, effect = evidence, evidence.effect
    if e.unfair:
        return NOT_COMPARABLE
    if not e.runs or (not e.pairs and not e.diverged):
        return INCOMPLETE
    if e.identical:
        return IDENTICAL
    if e.diverged:
        return DIVERGED if e.diverged == e.runs else UNSTABLE
    if effect is None:
        return INCONCLUSIVE
    if effect.high < 0 or effect.low > 0:
        return BETTER if effect.delta < 0 else WORSE
    return EQUIVALENT if effect.equivalent(e.delta_min) else INCONCLUSIVE


def decide(evidence: Evidence) -> Verdict:
    """The whole verdict."""
    e, effect = evidence, evidence.effect
    chosen = word(e)
    qualifiers = []
    if chosen in (BETTER, WORSE) and effect is not None:
        if abs(effect.delta) < e.delta_min:
            qualifiers.append("negligible")
        if e.tuned_delta is not None and e.tuned_delta * effect.delta < 0:
            qualifiers.append("depends on LR")
    if e.waiting and chosen not in (NOT_COMPARABLE, INCOMPLETE):
        qualifiers.append("incomplete")
    weighed = chosen in (BETTER, WORSE, EQUIVALENT, INCONCLUSIVE)
    return Verdict(chosen, _sentence(chosen, e), weighed and e.pairs < CLAIM_SEEDS, tuple(qualifiers))


def _sentence(chosen: str, e: Evidence) -> str:
    if chosen == NOT_COMPARABLE:
        return f"fairness fails on {', '.join(e.unfair)}; --allow {','.join(e.unfair)} compares all the same"
    if chosen == INCOMPLETE:
        return f"{e.waiting} runs without a result" if e.waiting else "no run yet"
    if chosen == IDENTICAL:
        return f"every loss equals the baseline's to the last bit, in {e.pairs} of {e.pairs} seeds"
    if chosen in (DIVERGED, UNSTABLE):
        p = divergence_p(e.diverged, e.runs, e.baseline_diverged, e.baseline_runs)
        return (
            f"{e.hows} at {e.diverged} of {e.runs} seeds, the baseline at {e.baseline_diverged} of "
            f"{e.baseline_runs} (Fisher p = {p:.2g})"
        )
    effect = e.effect
    if effect is None:
        if e.single is None:
            return "no difference that could be weighed"
        return f"one pair differs by {e.single:+.4f} {e.unit}; without a second seed its noise is unknown"
    interval = f"95% interval {effect.low:+.4f} to {effect.high:+.4f}"
    if chosen in (BETTER, WORSE):
        side = "lower" if effect.delta < 0 else "higher"
        agree = effect.wins if effect.delta < 0 else effect.n - effect.wins
        return f"{abs(effect.delta):.4f} {e.unit} {side} ({interval}), in {agree} of {effect.n} seeds"
    if chosen == EQUIVALENT:
        low, high = effect.delta - effect.narrow, effect.delta + effect.narrow
        return f"within ±{e.delta_min:.4f} {e.unit} (90% interval {low:+.4f} to {high:+.4f})"
    return f"{effect.delta:+.4f} {e.unit} ({interval}); {_seeds_sentence(effect, e)}"


def _seeds_sentence(effect: Effect, e: Evidence) -> str:
    needed = needs(effect, e)
    if needed is None:
        return f"more than 1000 seeds would be needed to show ±{e.delta_min:.4f}"
    if needed <= effect.n:
        return f"{effect.n} seeds would mostly have shown ±{e.delta_min:.4f}; a smaller effect is not excluded"
    return f"about {needed} seeds would show ±{e.delta_min:.4f}"


def needs(effect: Effect, e: Evidence) -> int | None:
    """Seeds after which a difference of delta_min would be shown with 80% power."""
    return _needs(e.delta_min, effect.spread, 1 if effect.noisy else e.family)


@cache
def _needs(delta_min: float, spread: float, family: int) -> int | None:
    return seeds_needed(delta_min, spread, family)
