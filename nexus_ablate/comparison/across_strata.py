"""A whole study: a comparison in each stratum, how differences change across strata, and the claim's outcome."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from nexus_ablate.comparison.arms import NoResult
from nexus_ablate.comparison.claim import judge_claim
from nexus_ablate.comparison.ladder import read_ladder, with_worth
from nexus_ablate.comparison.results import ArmResult, Change, Comparison, Stratum
from nexus_ablate.comparison.terms import read_terms
from nexus_ablate.comparison.within_stratum import compare_stratum
from nexus_ablate.errors import ConfigError
from nexus_ablate.runs.record import with_strata
from nexus_ablate.study.schema import Study


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
    paths = [path for name in names for path in _strata(Path(name))]
    if not paths:
        raise ConfigError("there is nothing to compare", "no folders", 'compare("runs/norms")')
    studies = [read_terms(path).study for path in paths]
    missing: dict[str, str] = {}
    whole = _study_left_out(paths, studies[0])
    wholes = {study.of for study in studies}
    if (len(paths) > 1 or not whole) and len(wholes) == 1 and all(study.stratum for study in studies):
        name, strata, no_result = studies[0].of, [], None
        folders = {study.stratum: path for study, path in zip(studies, paths, strict=True)}
        for stratum in dict.fromkeys([*studies[0].all_strata, *folders]):
            if stratum not in folders:
                if not whole:  # else it was left out on the command line
                    missing[stratum] = "no folder"
                continue
            try:
                strata.append(compare_stratum(folders[stratum], baseline, allow, arm))
            except NoResult as error:
                missing[stratum] = error.got
                no_result = error
        if no_result is not None and not strata:
            raise no_result
    else:
        strata = [compare_stratum(paths, baseline, allow, arm)]
        name = strata[0].study
    if tokens is not None:
        ladder = read_ladder(tokens)
        for stratum in strata:
            with_worth(stratum, ladder)
    claim = None if whole else judge_claim(strata, bool(missing))
    return Comparison(name, strata, changes(strata), claim, missing, whole)


def _strata(path: Path) -> list[Path]:
    """The folders of a study's strata, without confirmations of them, which judge fresh seeds; else the path itself."""
    folders = with_strata(path)
    return [folder for folder in folders if folders == [path] or not read_terms(folder).study.confirms]


def _study_left_out(paths: list[Path], study: Study) -> str:
    """The study of the first path, if the paths leave out one of its strata that has a folder; else ''."""
    if not study.stratum:
        return ""
    folders = [Path(os.path.abspath(path)) for path in paths]  # `.` has no name
    whole = folders[0].with_name(study.of)
    names = {folder.name for folder in folders}
    strata = {folder.name for folder in _strata(whole)}
    return "" if strata <= names else str(whole)


def changes(strata: list[Stratum]) -> list[Change]:
    """Each arm's result in every stratum, and its change from the first stratum with a difference to the last."""
    if len(strata) < 2:
        return []
    by_arm: dict[str, list[ArmResult | None]] = {}
    for place, stratum in enumerate(strata):
        for row in stratum.rows[1:]:
            by_arm.setdefault(row.arm, [None] * len(strata))[place] = row
    across = []
    for arm, rows in by_arm.items():
        measured = [row for row in rows if row is not None and row.effect is not None]
        first, last = (measured[0].stratum, measured[-1].stratum) if measured else ("", "")
        change, agree, order = None, None, ""
        if len(measured) > 1:
            change = measured[0].change_to(measured[-1])
            deltas = np.array([row.effect.delta for row in measured if row.effect])
            agree = len({*(deltas > 0)}) == 1
            steps = np.diff(deltas)
            if (steps > 0).all():
                order = "rises"
            elif (steps < 0).all():
                order = "falls"
        across.append(Change(arm, rows, first, last, change, agree, order))
    return across
