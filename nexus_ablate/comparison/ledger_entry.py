"""An entry of the claims ledger: what is published of a study, a file of conf/claims. planning/ledger.py writes it."""

from __future__ import annotations

from msgspec import Struct

from nexus_ablate.comparison.results import Dependence, Finding


class LedgerRow(Struct):
    """An arm at an endpoint; the difference to the baseline and its interval are on the scale of differences."""

    arm: str
    endpoint: str
    mean: float | None = None
    verdict: str = ""
    delta: float | None = None
    low: float | None = None
    high: float | None = None


class LedgerStratum(Struct):
    """A stratum of an entry.

    Attributes:
        margins: The smallest difference that matters by endpoint, on the scale of differences; 0 if none is declared.
        runs: The value of each endpoint, by arm and seed; None where a run has none.
        rates: The learning rate of each arm, if they were tuned.
    """

    rows: list[LedgerRow]
    margins: dict[str, float]
    runs: dict[str, dict[str, dict[str, float | None]]]
    rates: dict[str, float] = {}


class Made(Struct):
    """What made an entry; `validation_text` is a hash."""

    version: str | None
    commit: str | None
    python: str | None
    torch: str | None
    threads: int | None
    processor: str
    when: str
    validation_text: str | None


class LedgerEntry(Struct):
    """What is published of a study.

    Attributes:
        settings: The outcome in each stratum.
        regime: Size, length and data of the baselines, in a line.
        runs: How many there are.
        hours: Core-hours of all runs.
        source: Hash of the code that computed.
    """

    study: str
    claim: str
    stated: str
    outcome: str
    expectations: list[Finding]
    requirements: list[str]
    warnings: list[str]
    amendments: list[str]
    regime: str
    command: str
    runs: int
    hours: float
    made: Made
    source: str
    strata: dict[str, LedgerStratum]
    settings: dict[str, str]
    dependences: list[Dependence]

    @property
    def seeds(self) -> int:
        """The most seeds that any arm has."""
        return max(len(runs) for stratum in self.strata.values() for runs in stratum.runs.values())

    def row(self, expected: Finding) -> LedgerRow:
        """The numbers of an expectation's arm and endpoint; an empty row if the arm has none."""
        stratum = self.strata.get(expected.stratum)
        for row in stratum.rows if stratum else ():
            if (row.arm, row.endpoint) == (expected.arm, expected.endpoint):
                return row
        return LedgerRow(expected.arm, expected.endpoint)
