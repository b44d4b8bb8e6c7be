"""What a comparison says: an `ArmResult` for each arm, endpoint and stratum, and the `Comparison` that holds them.

Differences are arm minus baseline, on the endpoint's scale. None: not measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.cell import Effect
from nexus_ablate.comparison.fairness import LEARNED, Check
from nexus_ablate.comparison.load import Excluded
from nexus_ablate.comparison.statistics import FAILURES, LEVEL, Interval, mean_interval
from nexus_ablate.comparison.terms import Terms
from nexus_ablate.comparison.verdict import FAILS, NOT_COMPARABLE, Verdict
from nexus_ablate.study.endpoint import Endpoint


@dataclass(frozen=True)
class Worth:
    """A difference in loss as the share of training tokens that the baseline would need more for it; -0.1: 10% fewer.

    An end is None where the runs of `compare --tokens` do not reach so far.
    """

    share: float | None
    low: float | None
    high: float | None


@dataclass
class ArmResult:
    """One arm against its baseline on one endpoint, in one stratum.

    Figures below `delta_over_sd` are measured once for each arm, and stand with the primary endpoint.

    Attributes:
        arm: Its name in tables.
        name: The name of its directory.
        verdict: The word and its reason; None for the baseline, and on an endpoint that the study expects nothing of.
        values: The endpoint at each seed.
        differences: The difference at each seed; None without a pair.
        effect: The difference with the interval that decided.
        runs: Runs with a result, of which `failed` failed to train, each with how.
        waiting: Runs without a result yet.
        unmeasured: Seeds at which the arm and the baseline trained and one of them lacks the endpoint.
        compared: Seeds at which both have a value; of unpaired runs, the smaller number of the two.
        unfair: Fairness conditions that the arm breaks.
        is_identical: All losses equal the baseline's to the last bit.
        is_equal: All pairs, two at least, have the same value, which is known more exactly than `delta_min`.
        is_early: It or the baseline saw fewer than 10 tokens per parameter of its blocks.
        saturated: The word of AT_CHANCE and AT_CEILING that holds, if one does.
        failure_level: Of the test of its failures to train.
        effect_with_failures: The difference with each failed run counted as one that has learned nothing.
        look: The look that the verdict is of, from 1; 0 in a study without looks.
        seeds_to_differ: Pairs that would show a difference of the measured size with 80% power.
        seeds_to_equal: Pairs that would show that it is within `delta_min`.
        worth: What the difference is worth in tokens, where `compare` was given runs that say so.
        own_rates: Its own best learning rate and the baseline's, where each is judged at its own.
        lr_curve, claim_curve: Final losses by learning rate, of the tuning runs and of those that are judged.
        figures: Mean and standard deviation over seeds of diagnostics and evaluations.
        requested: Keys that were set differently: (baseline's value, arm's value).
        followed: What the arm changes besides, by `auto`.
    """

    arm: str
    endpoint: Endpoint = Endpoint("val_loss")
    verdict: Verdict | None = None
    seeds: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)
    differences: list[float | None] = field(default_factory=list)
    stratum: str = ""
    name: str = ""
    is_baseline: bool = False
    is_primary: bool = True
    runs: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    waiting: int = 0
    unmeasured: int = 0
    compared: int = 0
    baseline_runs: int = 0
    baseline_failed: int = 0
    unfair: list[str] = field(default_factory=list)
    is_identical: bool = False
    is_equal: bool = False
    is_early: bool = False
    saturated: str = ""
    failure_level: float = FAILURES
    mean: float | None = None
    sd: float | None = None
    effect: Effect | None = None
    effect_with_failures: Effect | None = None
    look: int = 0
    seeds_to_differ: int | None = None
    seeds_to_equal: int | None = None
    delta_over_sd: float | None = None
    at_flops: Interval | None = None
    at_seconds: Interval | None = None
    at_tokens: Interval | None = None
    token_ratio: Interval | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: float | None = None
    params: float | None = None
    params_share: float | None = None
    flops_share: float | None = None
    spike_score: float | None = None
    spiky: bool = False
    rising: int = 0
    lr: float | None = None
    best_lr: float | None = None
    lr_edge: bool = False
    lr_sensitivity: float | None = None
    own_rates: tuple[float, float] | None = None
    lr_curve: dict[float, list[float]] = field(default_factory=dict)
    claim_curve: dict[float, list[float]] = field(default_factory=dict)
    worth: Worth | None = None
    figures: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    requested: dict[str, tuple[str, str]] = field(default_factory=dict)
    followed: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        """The verdict's word; '' without a verdict."""
        return self.verdict.word if self.verdict else ""

    @property
    def reason(self) -> str:
        """The verdict's sentence; '' without a verdict."""
        return self.verdict.sentence if self.verdict else ""

    @property
    def unfair_runs(self) -> list[str]:
        """The conditions that its own runs break, beside that of the baseline's having learned something."""
        return [name for name in self.unfair if name != LEARNED]

    @property
    def seeds_to_decide(self) -> int | None:
        """Pairs that would decide an effect of the measured size with 80% power."""
        counts = (self.seeds_to_differ, self.seeds_to_equal)
        return min((count for count in counts if count is not None), default=None)

    @property
    def trained(self) -> int:
        """Runs that have a value."""
        return sum(value is not None for value in self.values)

    @property
    def pairs(self) -> list[float]:
        """The differences of the seeds at which both trained."""
        return [difference for difference in self.differences if difference is not None]

    def seeds_on_side(self, sign: float) -> int:
        """The seeds whose difference has this sign; a tie is on neither side."""
        return sum(difference * sign > 0 for difference in self.pairs)

    @property
    def wins(self) -> int | None:
        """The seeds at which the arm was better, or lower where neither side is; None without an effect or pairs."""
        if self.effect is None or not self.pairs:
            return None
        return self.seeds_on_side(1 if self.endpoint.better == "higher" else -1)

    def change_to(self, other: ArmResult, level: float = LEVEL) -> Interval | None:
        """How much more the arm differs from its baseline in another stratum, over the seeds of both."""
        elsewhere = dict(zip(other.seeds, other.differences, strict=True))
        after = np.array([elsewhere.get(seed) for seed in self.seeds], dtype=float)  # None becomes NaN
        return mean_interval(after - np.array(self.differences, dtype=float), level)

    @property
    def difference(self) -> float | None:
        """The mean difference; None for an arm that cannot be compared, or whose failures to train decided."""
        if self.is_baseline or self.word in (NOT_COMPARABLE, *FAILS):
            return None
        if self.effect is not None:
            return self.effect.delta
        return sum(self.pairs) / len(self.pairs) if self.pairs else None

    def record(self) -> dict[str, Any]:
        """Its row of the frame: words and numbers by name, without nesting."""
        row: dict[str, Any] = {
            "stratum": self.stratum,
            "endpoint": self.endpoint.name,
            "unit": self.endpoint.unit,
            "arm": self.arm,
            "is_primary": self.is_primary,
            "is_baseline": self.is_baseline,
            "verdict": str(self.verdict or ""),
            "word": self.word,
            "sentence": self.reason,
            "trained": self.trained,
            "failed": len(self.failed),
            "waiting": self.waiting,
            "pairs": len(self.pairs),
            "mean": self.mean,
            "sd": self.sd,
            "delta": self.difference,
        }
        for name in EFFECT_COLUMNS:
            row[name] = getattr(self.effect, name, None)
        row["margin"] = self.endpoint.margin
        for name in NUMBER_COLUMNS:
            row[name] = getattr(self, name)
        for name in INTERVAL_COLUMNS:
            interval = getattr(self, name)
            row[name] = getattr(interval, "mean", None)
            row[f"{name}_low"] = getattr(interval, "low", None)
            row[f"{name}_high"] = getattr(interval, "high", None)
        if self.worth is not None:
            row |= {"worth": self.worth.share, "worth_low": self.worth.low, "worth_high": self.worth.high}
        for name, (mean, _) in self.figures.items():
            row[name] = mean
        for seed, value in zip(self.seeds, self.values, strict=True):
            row[f"seed {seed}"] = value
        return row


EFFECT_COLUMNS = (
    "low",
    "high",
    "level",
    "p",
    "n",
    "se",
    "df",
    "critical",
    "rho",
    "spread",
    "spread_bound",
    "seed_se",
    "text_se",
    "detectable",
)
NUMBER_COLUMNS = (
    "wins",
    "delta_over_sd",
    "seeds_to_differ",
    "seeds_to_equal",
    "is_early",
    "unmeasured",
    "look",
    "tokens_per_second",
    "peak_memory_bytes",
    "params",
    "params_share",
    "flops_share",
    "spike_score",
    "spiky",
    "rising",
    "lr",
    "best_lr",
    "lr_edge",
    "lr_sensitivity",
)
INTERVAL_COLUMNS = ("at_tokens", "at_flops", "at_seconds", "token_ratio")


@dataclass
class Interaction:
    """How far two changes together differ from the sum of each; negative: they help one another."""

    both: str
    one: str
    other: str
    interval: Interval


@dataclass
class Secondary:
    """An endpoint beside the primary one: the baseline's result first."""

    endpoint: Endpoint
    rows: list[ArmResult]


@dataclass
class Stratum:
    """The arms of one stratum, and the conditions under which they are compared. Most studies have one stratum.

    Attributes:
        rows: The results on the primary endpoint, the baseline first.
        comparisons: Cells that share what may be claimed falsely: arms x endpoints x strata.
        looks: Seeds at each look of the study, if it has any; `look` of them are complete.
        undecided: The folders of the arms that the next look is for.
        exploratory: What was chosen when results had been seen.
        tuning_runs: Runs that chose learning rates.
        arms: The arms behind the rows, in the same order, for the curves.
        regime: The baseline's regime, then what it rules out, one line each; of logs, what another rule says.
        terms: What the study fixed before its runs, and what was chosen later.
    """

    question: str
    study: str
    baseline: str
    endpoint: Endpoint
    match: str
    seed_sd: float | None
    comparisons: int
    looks: tuple[int, ...]
    look: int
    undecided: list[str]
    exploratory: tuple[str, ...]
    checks: list[Check]
    rows: list[ArmResult]
    together: list[Interaction]
    secondary: list[Secondary]
    tuning_runs: int
    excluded: list[Excluded]
    amendments: list[str]
    equal: list[tuple[str, str]]
    refused: list[tuple[str, str]]
    regime: list[str]
    arms: list[Arm] = field(repr=False)
    terms: Terms = field(repr=False)

    @property
    def name(self) -> str:
        """The stratum's name; '' in a study without strata."""
        return self.terms.study.stratum

    @property
    def results(self) -> Iterator[ArmResult]:
        """Every result, by endpoint in the study's order and then by arm, the baseline first."""
        yield from self.rows
        for secondary in self.secondary:
            yield from secondary.rows

    def result(self, arm: str, endpoint: str) -> ArmResult | None:
        """The result of an arm, by the name of its directory; None where it has none."""
        for result in self.results:
            if result.name == arm and result.endpoint.name == endpoint and not result.is_baseline:
                return result
        return None


@dataclass(frozen=True)
class Change:
    """An arm's difference in each stratum, and how it changes from one stratum to another.

    Attributes:
        rows: By stratum; None where it has no result.
        first, last: The strata, in the study's order, from and to which it changes: those that have a difference.
        change: Paired by seed, with its own 95% interval; descriptive.
        agree: Whether all differences have the same sign; None below two.
        order: `rises` or `falls` where the differences do from stratum to stratum, in the study's order; '' else.
    """

    arm: str
    rows: list[ArmResult | None]
    first: str
    last: str
    change: Interval | None
    agree: bool | None
    order: str


@dataclass(frozen=True)
class Finding:
    """The outcome of one expectation, in a sentence.

    Attributes:
        seeds: Of one that is not shown: with how many seeds it would be decided, if the difference were the measured
            one; None beyond 1000.
        p: Of the test that decided it, of this cell alone; None where no test of a difference did.
        note: What is seen of one that is not shown: `fails to train`; `unequal`, where equality is expected and there
            is a difference that may be too small to matter.
    """

    stratum: str
    arm: str
    endpoint: str
    expected: str
    outcome: str
    sentence: str
    seeds: int | None = None
    p: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Dependence:
    """How much an arm's difference changes between two strata.

    Attributes:
        on: What is changed between them, in a word.
        is_shown: The interval of the change excludes 0.
    """

    on: str
    is_shown: bool
    sentence: str


@dataclass(frozen=True)
class Requirement:
    """A condition on the baseline's runs: whether the 95% bound of their mean over some seeds meets it."""

    stratum: str
    sentence: str
    met: bool
    seeds: int


@dataclass(frozen=True)
class Claim:
    """The claim of a study and its outcome over all strata.

    Attributes:
        settings: The outcome in each setting.
        dependences: How expected differences change between settings.
        preliminary: Runs that the outcome needs are missing, or there are fewer seeds than a claim needs, or fewer
            pairs of them because runs failed. Where the baseline lacks what the claim is about, it needs no other arm.
        exploratory: Something was chosen when results had been seen.
        amended: The claim, or what decides it, was changed after the first run.
    """

    text: str
    outcome: str
    sentence: str
    results: list[Finding]
    requirements: list[Requirement]
    preliminary: bool
    settings: dict[str, str]
    dependences: list[Dependence]
    exploratory: bool = False
    amended: bool = False

    def __str__(self) -> str:
        qualifiers = [word for word in ("preliminary", "exploratory", "amended") if getattr(self, word)]
        depends_on = dict.fromkeys(each.on for each in self.dependences if each.is_shown)
        outcome = in_settings(self.outcome, self.settings, depends_on, self.results)
        return ": ".join([*qualifiers, outcome, self.text])


def in_settings(outcome: str, settings: dict[str, str], depends_on: Iterable[str], findings: Iterable[Finding]) -> str:
    """`SUPPORTED IN 3 OF 4 SETTINGS, not shown in 1 (unequal in 1), DEPENDS ON text`; of one setting the outcome."""
    text = outcome
    if len(settings) > 1:
        noted = dict.fromkeys((each.stratum, each.outcome, each.note) for each in findings if each.note)
        notes = Counter((word, note) for stratum, word, note in noted if settings[stratum] == word)

        def beside(outcome: str) -> str:
            parts = [f"{note} in {count}" for (word, note), count in notes.items() if word == outcome]
            return f" ({', '.join(parts)})" if parts else ""

        counts = Counter(settings.values())
        text += f" IN {counts.pop(outcome)} OF {len(settings)} SETTINGS{beside(outcome)}"
        text += "".join(f", {word.lower()} in {count}{beside(word)}" for word, count in counts.items())
    return text + "".join(f", DEPENDS ON {on}" for on in depends_on)


@dataclass(frozen=True)
class Comparison:
    """Everything that a report of a study shows.

    Attributes:
        name: The study, the runs' directory, or the table that was judged.
        strata: In the study's order.
        changes: How differences change over the strata; [] for one stratum.
        claim: The claim's outcome; None without a claim, or if `whole` is set.
        missing: The strata without a result so far, and the states of their runs.
        whole: The study, if only some of its strata are compared; its claim is about all.
    """

    name: str
    strata: list[Stratum]
    changes: list[Change]
    claim: Claim | None
    missing: dict[str, str] = field(default_factory=dict)
    whole: str = ""

    @property
    def results(self) -> list[ArmResult]:
        """By stratum, endpoint and arm, each in the study's order, the baseline first."""
        return [result for stratum in self.strata for result in stratum.results]
