"""Runs of a study by other code: they are never used as its results, and retrained only on request."""

from __future__ import annotations

from collections.abc import Iterable

from nexus_ablate.errors import ConfigError
from nexus_ablate.planning.jobs import Job
from nexus_ablate.provenance import differ
from nexus_ablate.runs import OtherCode


def by_other_code(jobs: Iterable[Job]) -> list[tuple[Job, OtherCode]]:
    """The jobs that only other code has started, each with its last such run, preferring one with a result."""
    others = [(job, runs) for job in jobs if (runs := job.made_by_other_code())]
    return [(job, next((run for run in reversed(runs) if run.has_result), runs[-1])) for job, runs in others]


def files_of(runs: Iterable[tuple[Job, OtherCode]]) -> str:
    """The files of the runs' code that differ from the current code, as text."""
    return differ(sorted({file for _, run in runs for file in run.files}))


def check_code(name: str, jobs: list[Job], retrain: bool) -> str:
    """A message about this study's runs by other code; '' if there are none.

    Args:
        name: The study's name.
        jobs: All jobs of the study.
        retrain: Whether the current code may retrain what other code has finished.

    Raises:
        ConfigError: Other code has finished runs, and `retrain` is false.
    """
    runs = by_other_code(jobs)
    finished = [(job, run) for job, run in runs if run.has_result]
    if finished and not retrain:
        job, run = finished[0]
        commit = f" at commit {run.commit[:8]}" if run.commit else ""
        raise ConfigError(
            f"study {name} has finished runs by other code: {files_of(finished)}",
            f"{len(finished)} of {len(jobs)} runs, such as {job.arm}/{run.path.name}{commit}",
            "add --retrain to train them again with the current code; the old runs are kept but not compared",
        )
    return f"{len(runs)} runs by other code are kept and trained again: {files_of(runs)}" if runs else ""
