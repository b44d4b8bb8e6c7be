"""Finished runs that a launch cannot use: by other code, retrained only on request, of another text, or unprobed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from nexus_ablate.comparison.differences import science_key
from nexus_ablate.console import several
from nexus_ablate.errors import ConfigError, UserError
from nexus_ablate.planning.design import PROBE_LEVELS
from nexus_ablate.planning.jobs import Job
from nexus_ablate.provenance import differ
from nexus_ablate.runs import SETTLED, OtherCode, made_by_other_code, read_run, read_status
from nexus_ablate.runs.record import read_config, read_env
from nexus_ablate.study.schema import Study
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


def check_text(study: Study, jobs: Iterable[Job]) -> None:
    """Check that finished runs have read the text of today: runs on another one can't be paired with the missing ones.

    Raises:
        ConfigError: Some have read another text.
    """
    others = []
    for job in jobs:
        if not job.path.exists():
            others += [run for run in job.path.parent.glob(f"s{job.seed}-*") if _is_of_another_text(run, job)]
    if others:
        problem = f"study {study.name} has finished runs on another text than the {job.config.data.name} of today"
        got = f"{several(len(others), 'run')}, such as {others[0].parent.name}/{others[0].name}"
        raise ConfigError(problem, got, f"restore the text, or name={study.of or study.name}_2 to train all anew")


def _is_of_another_text(path: Path, job: Job) -> bool:
    """Whether a run has a result and is in all but its text and its code what a job would train."""
    try:
        state, config, env = read_status(path)["state"], read_config(path), read_env(path)
    except UserError:  # damaged: `status` and `compare` report it
        return False
    if state not in SETTLED or not config or not env or env.get("config_hash") in (None, job.config_hash):
        return False
    return science_key(config) == science_key(job.config.nested())


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
