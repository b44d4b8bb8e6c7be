"""The words of a verdict, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nexus_ablate.study.schema import CLAIM_SEEDS

NOT_COMPARABLE = "NOT COMPARABLE"
INCOMPLETE = "INCOMPLETE"
IDENTICAL = "IDENTICAL"
DIVERGED = "DIVERGED"
UNSTABLE = "UNSTABLE"
TOO_FEW_SEEDS = "TOO FEW SEEDS"
BETTER = "BETTER"
WORSE = "WORSE"
LOWER = "LOWER"
HIGHER = "HIGHER"
EQUIVALENT = "EQUIVALENT"
INCONCLUSIVE = "INCONCLUSIVE"
AT_CHANCE = "AT CHANCE"
AT_CEILING = "AT CEILING"

MEANINGS = {
    BETTER: "the whole interval lies on the better side of 0: below it for a loss",
    WORSE: "the whole interval lies on the worse side of 0: above it for a loss",
    LOWER: "the whole interval lies below 0, of a measure that is better neither lower nor higher",
    HIGHER: "the whole interval lies above 0, of a measure that is better neither lower nor higher",
    EQUIVALENT: "the whole interval is closer to 0 than the declared smallest difference that matters",
    IDENTICAL: "every loss equals the baseline's to the last bit",
    INCONCLUSIVE: "not enough seeds to decide; the sentence says how many more would",
    TOO_FEW_SEEDS: f"fewer than {CLAIM_SEEDS} pairs trained: an interval, and no verdict",
    UNSTABLE: "fails to train at some seeds, more often than the baseline",
    DIVERGED: "fails to train at every seed, and the baseline does not",
    NOT_COMPARABLE: "a fairness condition fails, or the baseline has learned nothing",
    AT_CHANCE: "neither the arm nor the baseline is shown to answer better than guessing",
    AT_CEILING: "neither the arm nor the baseline is shown to make a mistake",
    INCOMPLETE: "no pair of runs has a result yet",
}
DIFFERENT = (BETTER, WORSE, LOWER, HIGHER)
"""Words of an interval that excludes 0."""
SATURATED = (AT_CHANCE, AT_CEILING)
"""Words of a share of right answers that differences can't be read from."""
UNDECIDED = (INCONCLUSIVE, INCOMPLETE, TOO_FEW_SEEDS)
"""Words that further seeds can change."""
FAILS = (DIVERGED, UNSTABLE)
"""Words of an arm that fails to train."""

TOO_SMALL = "below the threshold that matters"
EARLY = "early training"


@dataclass(frozen=True)
class Verdict:
    """The word, what qualifies it, and the sentence that says why."""

    word: str
    sentence: str
    prefix: str = ""
    qualifiers: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.prefix + self.word + (f" ({', '.join(self.qualifiers)})" if self.qualifiers else "")


def interval_names(levels: Iterable[float]) -> str:
    """`95% intervals`; of arms that several looks decided, each at its level, `99.85% and 99.93% intervals`."""
    names = dict.fromkeys(interval_name(level).partition(" ")[0] for level in sorted(levels, reverse=True))
    return f"{' and '.join(names)} intervals"


def interval_name(level: float) -> str:
    """`95% interval`; of one of many cells, each with its share of what may be claimed falsely, `99.5% interval`."""
    return f"{100 * (1 - level):.4g}% interval"
