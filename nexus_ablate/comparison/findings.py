"""What a study found: a comparison for each stratum, how differences change across strata, and the claim's outcome."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nexus_ablate.comparison.arms import NoResult
from nexus_ablate.comparison.claim import Claim, judge_claim
from nexus_ablate.comparison.ladder import read_ladder, with_worth
from nexus_ablate.comparison.load import Plan, read_plan
from nexus_ablate.comparison.result import Comparison, Row, compare
from nexus_ablate.comparison.scaling import Scaling, over_rungs
from nexus_ablate.comparison.statistics import Interval, mean_interval
from nexus_ablate.runs.record import with_strata


@dataclass(frozen=True)
class Across:
    """An arm's difference in each stratum, and how it changes from the first to the last that have it.

    Attributes:
        rows: By stratum; None where it has no difference.
        change: Paired by seed, with its own 95% interval; descriptive.
        agree: Whether all differences have the same sign; None below two.
    """

    arm: str
    rows: list[Row | None]
    change: Interval | None
    agree: bool | None


@dataclass(frozen=True)
class Findings:
    """Everything that a report of a study shows.

    Attributes:
        strata: The names of the tables; [''] in a study without strata.
        tables: The comparison in each stratum.
        claim: The claim's outcome; None without a claim, or if `whole` is set.
        scaling: Of a ladder: each arm's compute multiplier over the sizes.
        missing: The strata without a result so far, and the states of their runs.
        whole: The study, if only some of its strata are compared; its claim is about all.
    """

    name: str
    strata: list[str]
    tables: list[Comparison]
    across: list[Across]
    claim: Claim | None
    scaling: list[Scaling] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    whole: str = ""


def findings(
    dirs: str | Path | Iterable[str | Path],
    baseline: str | None = None,
    allow: Iterable[str] = (),
    arm: str | None = None,
    tokens: str | None = None,
) -> Findings:
    """Compare runs as `compare` does, in each stratum of a study by itself.

    Args:
        dirs: Runs, arms, studies or a runs_dir. `runs/depth` stands for the strata `runs/depth@...` of a study.
        baseline: The arm to compare with, in each stratum.
        allow: Fairness conditions whose FAIL is waived.
        arm: Compare this arm alone with `baseline`.
        tokens: Runs of the baseline with other budgets, by which differences in loss are worth training tokens.

    Raises:
        ConfigError: There is nothing to compare, or a name does not exist.
    """
    paths = [path for name in ([dirs] if isinstance(dirs, str | Path) else dirs) for path in with_strata(Path(name))]
    plans = [_plan(path) for path in paths]
    missing: dict[str, str] = {}
    if len(paths) > 1 and all(plan.stratum for plan in plans) and len({plan.of for plan in plans}) == 1:
        study, strata, tables = plans[0].of, [], []
        named = {plan.stratum for plan in plans}
        missing = {name: "no folder" for plan in plans for name in plan.all_strata if name not in named}
        for plan, path in zip(plans, paths, strict=True):
            try:
                tables.append(compare(path, baseline, allow, arm))
                strata.append(plan.stratum)
            except NoResult as error:
                missing[plan.stratum] = error.got
                if not tables and plan is plans[-1]:
                    raise
    else:
        tables = [compare(paths, baseline, allow, arm)]
        study, strata = tables[0].study, [tables[0].plan.stratum]
    if tokens is not None:
        ladder = read_ladder([tokens])
        for table in tables:
            with_worth(table, ladder)
    side_by_side = across(tables) if len(tables) > 1 else []
    scaling = [] if missing else over_rungs(tables)
    whole = _left_out(paths, plans[0])
    claim = None if whole else judge_claim(tables, bool(missing))
    return Findings(study, strata, tables, side_by_side, claim, scaling, missing, whole)


def _plan(path: Path) -> Plan:
    return read_plan(path / "study.yaml") if (path / "study.yaml").exists() else Plan("")


def _left_out(paths: list[Path], plan: Plan) -> str:
    """The study of the first path, if the paths leave out one of its strata; else ''."""
    if not plan.stratum:
        return ""
    folders = [Path(os.path.abspath(path)) for path in paths]  # `.` has no name
    study = folders[0].with_name(plan.of)
    names, strata = {folder.name for folder in folders}, {folder.name for folder in with_strata(study)}
    return "" if len(names) > 1 and strata <= names else str(study)


def across(tables: list[Comparison]) -> list[Across]:
    """Each arm's difference in every stratum."""
    by_arm = [{row.arm: row for row in table.rows[1:] if row.effect} for table in tables]
    arms = []
    for arm in dict.fromkeys(arm for rows in by_arm for arm in rows):
        rows = [rows.get(arm) for rows in by_arm]
        present = [row for row in rows if row is not None]
        signs = {row.effect.delta > 0 for row in present if row.effect}
        change = _change(present[0], present[-1]) if len(present) > 1 else None
        arms.append(Across(arm, rows, change, len(signs) == 1 if len(present) > 1 else None))
    return arms


def _change(first: Row, last: Row) -> Interval | None:
    """How much more the last row differs from its baseline than the first one, over the seeds of both."""
    one, other = (
        {s: d for s, d in zip(row.seeds, row.differences, strict=True) if d is not None} for row in (first, last)
    )
    return mean_interval(np.array([other[seed] - one[seed] for seed in one if seed in other]))
