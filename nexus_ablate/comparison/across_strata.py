"""A whole study: a comparison in each stratum, how differences change across strata, and the claim's outcome."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from nexus_ablate.comparison.arms import NoResult
from nexus_ablate.comparison.claim import judge_claim
from nexus_ablate.comparison.ladder import read_ladder, with_worth
from nexus_ablate.comparison.load import Plan, read_plan
from nexus_ablate.comparison.result import compare as compare_stratum
from nexus_ablate.comparison.results import ArmResult, Change, Comparison, Stratum
from nexus_ablate.comparison.scaling import over_rungs
from nexus_ablate.comparison.statistics import Interval, mean_interval
from nexus_ablate.runs.record import with_strata


def compare(
    dirs: str | Path | Iterable[str | Path],
    baseline: str | None = None,
    allow: Iterable[str] = (),
    arm: str | None = None,
    tokens: str | None = None,
) -> Comparison:
    """Compare runs with a baseline, in each stratum of a study by itself.

    Args:
        dirs: Runs, arms, studies or a runs_dir. `runs/depth` stands for the strata `runs/depth@...` of a study.
        baseline: The arm to compare with, in each stratum. Default: the study's, or the one called `baseline`.
        allow: Fairness conditions whose FAIL is waived.
        arm: Compare this arm alone with `baseline`.
        tokens: Runs of the baseline with other budgets, by which differences in loss are worth training tokens.

    Raises:
        ConfigError: There is nothing to compare, or a name does not exist.
    """
    names = [dirs] if isinstance(dirs, str | Path) else dirs
    paths = [path for name in names for path in with_strata(Path(name))]
    plans = [_plan(path) for path in paths]
    missing: dict[str, str] = {}
    if len(paths) > 1 and all(plan.stratum for plan in plans) and len({plan.of for plan in plans}) == 1:
        study, strata = plans[0].of, []
        order = [*plans[0].all_strata, *(plan.stratum for plan in plans)]
        in_order = sorted(zip(plans, paths, strict=True), key=lambda pair: order.index(pair[0].stratum))
        present = {plan.stratum for plan in plans}
        missing = {name: "no folder" for name in order if name not in present}
        for plan, path in in_order:
            try:
                strata.append(compare_stratum(path, baseline, allow, arm))
            except NoResult as error:
                missing[plan.stratum] = error.got
                if not strata and plan is in_order[-1][0]:
                    raise
    else:
        strata = [compare_stratum(paths, baseline, allow, arm)]
        study = strata[0].study
    if tokens is not None:
        ladder = read_ladder([tokens])
        for stratum in strata:
            with_worth(stratum, ladder)
    scaling = [] if missing else over_rungs(strata)
    whole = _study_left_out(paths, plans[0])
    claim = None if whole else judge_claim(strata, bool(missing))
    return Comparison(study, strata, changes(strata), claim, scaling, missing, whole)


def _plan(path: Path) -> Plan:
    return read_plan(path / "study.yaml") if (path / "study.yaml").exists() else Plan("")


def _study_left_out(paths: list[Path], plan: Plan) -> str:
    """The study of the first path, if the paths leave out one of its strata; else ''."""
    if not plan.stratum:
        return ""
    folders = [Path(os.path.abspath(path)) for path in paths]  # `.` has no name
    study = folders[0].with_name(plan.of)
    names = {folder.name for folder in folders}
    strata = {folder.name for folder in with_strata(study)}
    return "" if len(names) > 1 and strata <= names else str(study)


def changes(strata: list[Stratum]) -> list[Change]:
    """Each arm's difference in every stratum, and its change from the first stratum that has one to the last."""
    if len(strata) < 2:
        return []
    results = [{row.arm: row for row in stratum.rows[1:] if row.effect} for stratum in strata]
    across = []
    for arm in dict.fromkeys(arm for by_arm in results for arm in by_arm):
        rows = [by_arm.get(arm) for by_arm in results]
        present = [row for row in rows if row is not None]
        first, last = present[0], present[-1]
        change, agree = None, None
        if len(present) > 1:
            change = _change(first, last)
            agree = len({row.effect.delta > 0 for row in present if row.effect}) == 1
        across.append(Change(arm, rows, first.stratum, last.stratum, change, agree))
    return across


def _change(first: ArmResult, last: ArmResult) -> Interval | None:
    """How much more the arm differs from its baseline in the last stratum than in the first, over the seeds of both."""
    before = dict(zip(first.seeds, first.differences, strict=True))
    after = dict(zip(last.seeds, last.differences, strict=True))
    pairs = [(before[seed], after[seed]) for seed in before if seed in after]
    return mean_interval(np.array([b - a for a, b in pairs if a is not None and b is not None]))
