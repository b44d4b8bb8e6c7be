"""Finished runs that a launch cannot use: those by other code, retrained only on request, or without a probe."""

from __future__ import annotations

from collections.abc import Iterable

from nexus_ablate.errors import ConfigError
from nexus_ablate.planning.design import PROBE_LEVELS
from nexus_ablate.planning.jobs import Job
from nexus_ablate.provenance import differ
from nexus_ablate.runs import OtherCode, made_by_other_code, read_run
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


def check_probes(name: str, jobs: list[Job]) -> None:
    """Check that finished runs have what the study's endpoints are read from, since a probe cannot be caught up on.

    Raises:
        ConfigError: They were trained with a lower level of probes.
    """
    for job in jobs:
        if job.state()[0] != "finished":
            continue
        probe = (read_run(job.path).config or {}).get("probe", {}).get("name", "")
        needed = job.config.probe.name
        if probe in PROBE_LEVELS and PROBE_LEVELS.index(probe) < PROBE_LEVELS.index(needed):
            problem = f"the finished runs have probe={probe}, and the study now needs probe={needed}"
            raise ConfigError(problem, f"{job.arm}/{job.path.name}", f"name={name}_2, which trains them anew")


def _files(runs: Iterable[OtherCode]) -> str:
    """The files of the runs' code that differ from the current code, as text."""
    return differ(sorted({file for run in runs for file in run.files}))
