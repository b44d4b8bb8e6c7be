"""The former shape of `results.Comparison`, for callers that have not moved to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from nexus_ablate.comparison.across_strata import compare
from nexus_ablate.comparison.claim import Claim
from nexus_ablate.comparison.results import Change, Comparison, Stratum
from nexus_ablate.comparison.scaling import Scaling

Across = Change


@dataclass(frozen=True)
class Findings:
    name: str
    strata: list[str]
    tables: list[Stratum]
    across: list[Across]
    claim: Claim | None
    scaling: list[Scaling] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    whole: str = ""


def of(comparison: Comparison) -> Findings:
    c = comparison
    names = [stratum.name for stratum in c.strata]
    return Findings(c.name, names, c.strata, c.changes, c.claim, c.scaling, c.missing, c.whole)


def findings(
    dirs: str | Path | Iterable[str | Path],
    baseline: str | None = None,
    allow: Iterable[str] = (),
    arm: str | None = None,
    tokens: str | None = None,
) -> Findings:
    return of(compare(dirs, baseline, allow, arm, tokens))
