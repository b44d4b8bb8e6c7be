"""`nexus-ablate -m KEY=A,B ...`: every combination as a job, for the backends that also run studies.

Hydra's own parser reads the overrides.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from nexus_ablate import errors
from nexus_ablate.config.compose import compose, differences
from nexus_ablate.config.overrides import check_overrides
from nexus_ablate.console import nearer
from nexus_ablate.data import fingerprint_of, prepare
from nexus_ablate.errors import ConfigError, UserError
from nexus_ablate.execution.job_progress import JobProgress
from nexus_ablate.execution.launch import Backend, run_missing
from nexus_ablate.planning.jobs import Job, data_of
from nexus_ablate.runs import arm_name, has_status, run_path
from nexus_ablate.runs.files import refuse_url
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.training.session import identity_of, other_arithmetic
from nexus_ablate.training.start import check_groups

EXAMPLE = "nexus-ablate -m norm=layer,rms seed=0,1,2"


def multirun(overrides: list[str], backend: Backend) -> int:
    """Train every combination. Failed runs are run again, as by a single command.

    Returns:
        The first nonzero exit status of a run, after all have run; 75 after a stop signal; 0 if a cluster has jobs in
        its queue.

    Raises:
        UserError: Overrides that cannot be read, or with which no combination can be run; nothing was written.
    """
    combinations, group = expanded(overrides)
    if not combinations:  # of a glob that matches nothing
        raise ConfigError("a multirun has no run", "no combination", EXAMPLE)
    shared = set.intersection(*map(set, combinations))
    by_path: dict[Path, Job] = {}
    refused: dict[str, UserError] = {}
    for combination in combinations:
        varied = [text for text in combination if text not in shared]
        changes = [text for text in varied if not text.startswith("seed=")]
        name = re.sub(r"\\(.)", r"\1", ",".join(changes)) or BASELINE  # without what Hydra escapes
        try:
            job = job_of(combination, name, group)
            by_path[job.path] = job
        except UserError as error:
            if "$" in " ".join(varied):  # an interpolation that leads nowhere is no contradiction of options
                raise
            refused[name] = error
    jobs = list(by_path.values())
    if not jobs:
        raise next(iter(refused.values()))
    refuse_url(jobs[0].path.parents[2])
    for option, context in data_of(job.config for job in jobs if job.state()[0] == "missing"):
        prepare(option, context=context)  # once, before starting workers and before writing anything
    progress = JobProgress(jobs[0].path.parents[1])
    for name, error in refused.items():
        progress.refused(name, error)
    stopped = run_missing(jobs, backend, progress, retry_failed=True)
    begun = jobs if progress.pending else [job for job in jobs if has_status(job.path)]
    progress.end(stopped, jobs, compare=next_words(begun or jobs))
    return errors.PREEMPTED if stopped else progress.status


def expanded(overrides: list[str]) -> tuple[list[list[str]], str]:
    """The overrides of each run, and what varies as typed (`norm=layer,rms`; '' if an experiment gathers the runs).

    Raises:
        ConfigError: An override cannot be read, or contradicts another one.
    """
    given = check_overrides(overrides, sweeps=True)
    assignments = {override.name: override.assignments() for override in given}  # the last one of a key counts
    combinations = [list(combination) for combination in itertools.product(*assignments.values())]
    if any(override.name == "experiment" for override in given):
        return combinations, ""
    swept = [override.text for override in given if override.is_sweep and override.name != "seed"]
    return combinations, errors.printable(" ".join(swept)) or BASELINE


def job_of(overrides: list[str], name: str, group: str) -> Job:
    """The job of one combination.

    Args:
        name: Of its arm, in the summary.
        group: What the multirun varies, saved in env.json.

    Raises:
        UserError: The combination can't be run.
    """
    config = compose(overrides)
    check_groups(config)
    identity = identity_of(config, fingerprint_of(config.data, config.model.context))
    arm = arm_name(differences(config))
    path = run_path(config.runs_dir, config.experiment, arm, config.seed, identity)
    has_other_numbers = has_status(path) and bool(other_arithmetic(config, path))
    pinned = f"train.precision={config.train.precision}"  # `auto` could mean something else where the job runs
    return Job(
        of=name,
        arm=arm,
        name=name,
        seed=config.seed,
        path=path,
        overrides=[pinned, *overrides],
        config=config,
        config_hash=identity.config_hash,
        conditions={"multirun": group},
        again=config.rerun or bool(config.evals) or has_other_numbers,
    )


def next_words(jobs: list[Job]) -> list[str]:
    """The words of the command that compares the arms; `--baseline` if no arm is contained in all others."""
    folders = {job.path.parent: job.config for job in jobs}
    changes = [set(differences(config).items()) for config in folders.values()]
    words = ["compare" if len(folders) > 1 else "status", *sorted(map(nearer, folders))]
    if set.intersection(*changes) not in changes:
        words += ["--baseline", next(iter(folders)).name]
    return words
