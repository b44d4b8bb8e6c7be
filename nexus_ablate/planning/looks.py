"""What is worth training after the runs so far: the arms at all, and further seeds of the undecided ones (looks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nexus_ablate.planning.jobs import Job, Runs

if TYPE_CHECKING:
    from nexus_ablate.comparison.results import Stratum


def judge(runs: Runs) -> Stratum | None:
    """The comparison of the runs so far; None until the baseline has every run of the first look."""
    baseline = runs.deciding(runs.study.all_arms[:1], runs.study.first_seeds)
    if not baseline or not all(job.has_result for job in baseline):
        return None
    from nexus_ablate.comparison.within_stratum import compare_stratum

    return compare_stratum(runs.request.directory)


def lacking(runs: Runs) -> str:
    """What the claim requires and the baseline lacks, in a sentence; '' if nothing, or if its runs have not ended.

    Without that no arm can show or contradict the claim, so none is trained.
    """
    stratum = judge(runs) if runs.premise else None
    if stratum is None:
        return ""
    from nexus_ablate.comparison.claim import NOT_TESTABLE, requirements_of

    unmet = [requirement.sentence for requirement in requirements_of(stratum) if not requirement.met]
    return f"{NOT_TESTABLE}, so no other arm is trained: {'; '.join(unmet)}" if unmet else ""


def next_look(runs: Runs, stratum: Stratum) -> list[Job]:
    """The runs of the look after the last complete one, for the undecided arms and the baseline.

    Empty if no look is complete, no arm is undecided, or no look is left.
    """
    study = runs.study
    baseline, *arms = study.all_arms
    undecided = [arm for arm in arms if arm.name in stratum.undecided]
    if not undecided or not 0 < stratum.look < len(study.looks):
        return []
    before, after = study.looks[stratum.look - 1 : stratum.look + 1]
    return runs.deciding([baseline, *undecided], study.seeds[before:after])


def ended_later(runs: Runs) -> list[Job]:
    """The runs of later looks that have a result or failed."""
    return [job for job in runs.later() if job.has_ended]


def outcomes(runs: Runs, stratum: Stratum) -> list[str]:
    """One line per arm: the number of seeds used and the verdict."""
    study = runs.study
    verdicts = {}
    for row in stratum.rows:
        verdicts.setdefault(row.name, row.verdict)  # the baseline's name may come again, for an arm that equals it
    lines = []
    for arm in study.all_arms:
        used, verdict = len(runs.seeds_with_result(arm)), verdicts.get(arm.name)
        line = f"{arm.name}: {used} of at most {len(study.seeds)} seeds"
        lines.append(f"{line}, {verdict}" if verdict else line)
    return lines
