"""Runs of a study by other code: they are never used as its results, and retrained only on request."""

from __future__ import annotations

from collections.abc import Iterable

from nexus_ablate.errors import ConfigError
from nexus_ablate.planning.jobs import Job
from nexus_ablate.provenance import differ
from nexus_ablate.runs import OtherCode, made_by_other_code
from nexus_ablate.training.session import code_for


def check_code(name: str, jobs: list[Job], retrain: bool) -> str:
    """A message about this study's runs by other code; '' if there are none.

    Args:
        name: The study's name.
        jobs: All jobs of the study.
        retrain: Whether the current code may retrain what other code has finished.

    Raises:
        ConfigError: Other code has finished runs, and `retrain` is false.
    """
    last = []
    for job in jobs:
        runs = [] if job.path.exists() else made_by_other_code(job.path, job.config_hash, code_for(job.config))
        if runs:
            last.append((job, max(reversed(runs), key=lambda run: run.has_result)))
    finished = [(job, run) for job, run in last if run.has_result]
    if finished and not retrain:
        job, run = finished[0]
        commit = f" at commit {run.commit[:8]}" if run.commit else ""
        raise ConfigError(
            f"study {name} has finished runs by other code: {_files(run for _, run in finished)}",
            f"{len(finished)} of {len(jobs)} runs, such as {job.arm}/{run.path.name}{commit}",
            "add --retrain to train them again with the current code; the old runs are kept but not compared",
        )
    if not last:
        return ""
    return f"{len(last)} runs by other code are kept and trained again: {_files(run for _, run in last)}"


def _files(runs: Iterable[OtherCode]) -> str:
    """The files of the runs' code that differ from the current code, as text."""
    return differ(sorted({file for run in runs for file in run.files}))
