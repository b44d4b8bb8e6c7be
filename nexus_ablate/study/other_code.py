"""Runs of a study that other code made: they are neither taken for its results nor trained again without a word."""

from __future__ import annotations

from collections.abc import Iterable

from nexus_ablate.errors import ConfigError
from nexus_ablate.provenance import differ
from nexus_ablate.runs import OtherCode
from nexus_ablate.study.jobs import Job


def by_other_code(jobs: Iterable[Job]) -> list[tuple[Job, OtherCode]]:
    """The jobs that only other code has begun, each with its last such run, one with a result where there is one."""
    others = [(job, found) for job in jobs if (found := job.made_by_other_code())]
    return [(job, next((run for run in reversed(found) if run.has_result), found[-1])) for job, found in others]


def files_of(found: Iterable[tuple[Job, OtherCode]]) -> str:
    """The files of that code that differ from today's."""
    return differ(sorted({file for _, run in found for file in run.files}))


def check_code(name: str, jobs: list[Job], retrain: bool) -> str:
    """What to say of runs that other code made of this study; '' where there are none.

    Args:
        name: Of the study.
        jobs: Everything that belongs to it.
        retrain: Today's code may train again what other code has finished.

    Raises:
        ConfigError: It may not.
    """
    found = by_other_code(jobs)
    finished = [(job, run) for job, run in found if run.has_result]
    if finished and not retrain:
        job, run = finished[0]
        commit = f" at commit {run.commit[:8]}" if run.commit else ""
        raise ConfigError(
            f"study {name} holds finished runs of other code: {files_of(finished)}",
            f"{len(finished)} of {len(jobs)} runs, such as {job.arm}/{run.path.name}{commit}",
            "add --retrain to train them again with today's code; the old runs stay, and one code is compared",
        )
    return f"{len(found)} runs of other code stay as they are and are trained again: {files_of(found)}" if found else ""
