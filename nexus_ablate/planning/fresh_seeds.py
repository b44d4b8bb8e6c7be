"""Fresh seeds for a study that was launched: more of them in it, or a new study that judges its claims."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from nexus_ablate.config.grammar import show
from nexus_ablate.errors import ConfigError, unknown
from nexus_ablate.planning.design import label
from nexus_ablate.planning.jobs import Runs
from nexus_ablate.planning.study_yaml import write_record
from nexus_ablate.runs import SETTLED
from nexus_ablate.runs.lookup import seed_of
from nexus_ablate.runs.record import find_runs
from nexus_ablate.study.decoding import read_study
from nexus_ablate.study.definition import Request, each_stratum, read_request, strata_of
from nexus_ablate.study.schema import Study, StudyArm

if TYPE_CHECKING:
    from nexus_ablate.comparison.results import Stratum


def find_launched(text: str, launch: list[str]) -> Request:
    """A study as its study.yaml has it.

    Args:
        text: Its name, its file or its directory.
        launch: Overrides for how runs are carried out.

    Raises:
        ConfigError: There is no such study, or it has no runs.
    """
    request = read_request([text, *launch])
    strata = strata_of(request)
    if len(strata) > 1:
        raise each_stratum(request.study.name, [stratum.study.name for stratum in strata])
    study = read_study(request.directory)
    if study is None or not find_runs([request.directory]):
        fix = shlex.join(["nexus-ablate", "study", text, *launch])
        raise ConfigError("this study has no runs yet", str(request.directory), fix)
    return Request(study, request.launch)


def with_more_seeds(request: Request, number: int) -> Request:
    """The study with `number` additional unused seeds.

    If the same number was added before and those runs have not all ended, returns the study unchanged to resume it.

    Raises:
        ConfigError: It has looks, or no more seeds are left.
    """
    study = request.study
    if study.looks:
        problem = f"study {study.name} has looks, which give undecided arms more seeds"
        raise ConfigError(problem, f"looks {show(study.looks)}", f"nexus-ablate study {study.name}")
    last = study.added[-1].seeds if study.added else []
    if len(last) == number and _unsettled(request, last, but=("failed",)):
        return request
    write_record(Runs.of(request))  # refuses a study that has changed
    used = _used(request.directory)
    unused = (seed for seed in count(max(study.seeds) + 1) if seed not in used)
    seeds = [*study.seeds, *islice(unused, number)]
    return replace(request, study=structs.replace(study, seeds=seeds))


def confirmation(request: Request, names: Sequence[str], number: int | None) -> Request:
    """A study that judges arms of a launched study on fresh seeds only, or the same confirmation if it has not ended.

    Args:
        request: The launched study.
        names: Its arms; empty: those with a claim, that is a verdict of a difference or of EQUIVALENT.
        number: Number of seeds; None: as many as the claims are based on.

    Raises:
        ConfigError: An arm does not exist, no arm has a claim, or another confirmation has not ended.
    """
    study, directory = request.study, request.directory
    if study.confirms:
        fix = f"nexus-ablate study {study.confirms} --confirm, for other fresh seeds"
        raise ConfigError(f"study {study.name} is a confirmation itself", f"confirms: {study.confirms}", fix)
    runs = Runs.of(request)
    arms = {arm.name: arm for arm in runs.study.arms}
    for name in names:
        if name not in arms:
            raise unknown(f"study {study.name} has no arm of this name", name, arms)
    earlier = _confirmations(directory)
    last = Request(earlier[-1], request.launch) if earlier else None
    if last and _unsettled(last, last.study.seeds):
        arms_of_last = {label(arm.requested) for arm in last.study.arms}
        same = not names or arms_of_last == {label(arms[name].requested) for name in names}
        if same and number in (None, len(last.study.seeds)):
            return last
        got = f"{len(last.study.arms)} arms x {len(last.study.seeds)} seeds"
        fix = f"nexus-ablate study {study.name} --confirm, which resumes it"
        raise ConfigError(f"{last.study.name} has not ended", got, fix)

    from nexus_ablate.comparison.within_stratum import compare_stratum

    stratum = compare_stratum(directory)
    chosen = [arms[name] for name in names or _claimed(study, arms, stratum)]
    if number is None and study.looks:
        number = max(len(runs.seeds_with_result(arm)) for arm in chosen)
    number = number or len(study.seeds)
    first = max(_used(directory)) + 1
    end = first + number
    confirming = Study(
        name=_free_name(directory),
        question=f"On fresh seeds: {study.question}",
        baseline=study.baseline,
        design="list",
        arms=[StudyArm(overrides=arm.requested, match=arm.match) for arm in chosen],
        seeds=list(range(first, end)),
        lr_grid=study.lr_grid,
        tuning_seeds=list(range(end, end + len(study.tuning_seeds))),
        endpoints=study.endpoints,
        match=study.match,
        confirms=study.name,
    )
    return Request(confirming, request.launch)


def _claimed(study: Study, arms: dict[str, StudyArm], stratum: Stratum) -> list[str]:
    """The arms with a claim, in the order of the study."""
    from nexus_ablate.comparison.verdict import DIFFERENT, EQUIVALENT

    words = {row.name: row.verdict.word for row in stratum.rows if row.verdict and row.name in arms}
    claimed = [name for name in arms if words.get(name) in (*DIFFERENT, EQUIVALENT)]
    if not claimed:
        got = ", ".join(f"{name} {word}" for name, word in words.items())
        fix = f"name the arms: nexus-ablate study {stratum.terms.place} {next(iter(arms))} --confirm"
        raise ConfigError(f"study {study.name} has no claim to confirm", got or "no verdict", fix)
    return claimed


def _unsettled(request: Request, seeds: Sequence[int], but: Sequence[str] = ()) -> bool:
    """Whether a run with these seeds has no result, ignoring runs in the states `but`."""
    runs = Runs.of(request)
    needed = {*seeds, *request.study.tuning_seeds}
    jobs = [job for job in [*runs.tuning, *runs.claims] if job.seed in needed]
    return any(job.state()[0] not in (*SETTLED, *but) for job in jobs)


def _used(directory: Path) -> set[int]:
    """All seeds used by a study, its tuning, its runs and its confirmations."""
    used: set[int] = set()
    for study in (read_study(directory), *_confirmations(directory)):
        if study is None:
            continue
        used |= {*study.seeds, *study.tuning_seeds}
        for run in directory.with_name(study.name).glob("*/s*-*"):
            seed = seed_of(run)
            if seed is not None and not run.parent.is_symlink():
                used.add(seed)
    return used


def _confirmations(directory: Path) -> list[Study]:
    """The studies that confirm this one, in their order."""
    files = directory.parent.glob(f"{glob.escape(directory.name)}-confirm*/study.yaml")
    studies = [study for path in files if (study := read_study(path.parent))]
    confirming = [study for study in studies if study.confirms == directory.name]
    return sorted(confirming, key=lambda study: (len(study.name), study.name))


def _free_name(directory: Path) -> str:
    """The name of the next confirmation of a study."""
    name, number = f"{directory.name}-confirm", 1
    while any(directory.with_name(name).glob("*")):
        number += 1
        name = f"{directory.name}-confirm{number}"
    return name
