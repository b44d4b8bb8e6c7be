"""Launches a study: runs what is missing by a backend, keeps what has ended, returns the exit status."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from nexus_ablate import errors
from nexus_ablate.comparison.learning_rates import FURTHER_RATES
from nexus_ablate.config.compose import compose
from nexus_ablate.config.rules import check_vocabulary
from nexus_ablate.console import several
from nexus_ablate.data import prepare
from nexus_ablate.execution.job_progress import JobProgress
from nexus_ablate.execution.worker import JobResult
from nexus_ablate.measure.regime import check_passes
from nexus_ablate.planning.design import label
from nexus_ablate.planning.jobs import Job, Runs, data_of
from nexus_ablate.planning.looks import ended_later, judge, lacking, next_look, outcomes
from nexus_ablate.planning.stale_code import check_code, check_probes, check_text
from nexus_ablate.planning.study_yaml import write_record
from nexus_ablate.provenance import source_hash
from nexus_ablate.runs import SETTLED
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.study.definition import Request, strata_of
from nexus_ablate.study.schema import StudyArm
from nexus_ablate.training.session import other_arithmetic


class Backend(Protocol):
    """Runs jobs: `LocalPool`, `Slurm` or `HydraLauncher`. What became of a run is in its directory."""

    def run(self, jobs: list[Job], progress: JobProgress) -> str:
        """Run the jobs, or hand them over to a queue, and report each one. Returns the stop signal, or ''."""
        ...


def launch_strata(
    request: Request, backend: Backend, retry_failed: bool = False, amend: bool = False, retrain: bool = False
) -> int:
    """`launch` for each stratum of a study, until a stop signal; its status is 75, else the first nonzero one."""
    strata, whole = strata_of(request), strata_of(request.whole or request)
    if len(whole) > 1:
        checked = [check(stratum, amend, retrain) for stratum in whole]
        for runs, _ in checked:  # so that `compare` knows what is to come
            write_record(runs, amend, retrain=retrain)
    statuses = []
    for stratum in strata:
        statuses.append(launch(stratum, backend, retry_failed, amend, retrain))
        if statuses[-1] == errors.PREEMPTED:
            break
    if len(strata) > 1:
        print(f"\nall strata: nexus-ablate compare {shlex.quote(str(request.directory))}", file=sys.stderr)
    return max(statuses, key=lambda status: (status == errors.PREEMPTED, status != errors.OK))


def check(request: Request, amend: bool, retrain: bool) -> tuple[Runs, str]:
    """Everything that can refuse a launch, before anything is written. Returns the runs and what to say of their code.

    Raises:
        ConfigError: The study cannot be run.
    """
    runs = Runs.of(request)
    study, configs = runs.study, runs.configs
    first = [*runs.tuning, *runs.claims]
    every = [*first, *runs.later()]
    by_other_code = check_code(study.name, every, retrain)
    check_text(study, every)
    if any(job.state()[0] == "missing" for job in first):
        for option, context in data_of(configs.values()):
            text = prepare(option, context=context)
            for config in configs.values():
                if config.data == option:
                    check_passes(config, len(text.train))
                    check_vocabulary(config, text.vocab_size)
    if amend:
        check_probes(study.name, first)
    return runs, by_other_code


def launch(
    request: Request, backend: Backend, retry_failed: bool = False, amend: bool = False, retrain: bool = False
) -> int:
    """Run what is missing of a study.

    Args:
        request: From `read_request`.
        backend: Runs the jobs.
        retry_failed: Run failed runs again. A diverged run has a result and is never repeated.
        amend: Accept that the study changed since its first launch.
        retrain: Train again, with the current code, the runs that other code has finished.

    Returns:
        The exit status: the first nonzero status of a run, after all have run; 75 after a stop signal; 0 if a cluster
        has jobs of the study in its queue.

    Raises:
        ConfigError: The study cannot be run, or has changed since its first launch.
    """
    runs, by_other_code = check(request, amend, retrain)
    study = runs.study
    write_record(runs, amend, source_hash(), retrain)
    progress = JobProgress(request.directory)
    progress.say(f"study {study.name}: {study.question}")
    for equal in study.equal:
        progress.say(f"  {label(equal.overrides)} equals {equal.arm} and is not trained twice")
    for refused in study.refused:
        progress.say(f"  {label(refused.overrides)} is refused: {refused.reason}")
    if by_other_code:
        progress.say(by_other_code)
    stopped = ""
    for jobs in rounds(runs, progress):
        if stopped := run_missing(jobs, backend, progress, retry_failed):
            break
    shown = [job for arm in study.all_arms for job in runs.at_lowest_rate(arm)]
    progress.end(stopped, shown, BASELINE, "--retry failed runs the failed ones again")
    return errors.PREEMPTED if stopped else progress.status


def rounds(runs: Runs, progress: JobProgress) -> Iterator[list[Job]]:
    """The jobs of a study, round by round; each round may depend on the results of those before."""
    study = runs.study
    yield runs.premise
    if not all(job.has_result for job in runs.premise):
        failed = any(job.has_ended and not job.has_result for job in runs.premise)
        again = "the same command with --retry failed" if failed else "the same command"
        progress.say(f"after the baseline's runs, run {again} for the other arms")
        return
    if unmet := lacking(runs):
        progress.say(unmet)
        return
    if study.lr_grid:
        yield runs.tuning
        for arm in study.all_arms:
            if not runs.rates(arm) and not progress.pending:
                progress.say(f"{arm.name}: no best learning rate, because a tuning run is missing")
    yield from at_own_rates(runs, study.all_arms, len(study.first_seeds))
    if study.lr_grid and progress.pending:
        progress.say(
            "after these runs, run the same command to train every arm at its best learning rate and beside it"
        )
    looks = study.looks
    if not looks:
        return
    yield ended_later(runs)
    judged = 0
    while (stratum := judge(runs)) is not None and stratum.look > judged:
        judged = stratum.look
        jobs = next_look(runs, stratum)
        if not jobs:
            for line in outcomes(runs, stratum):
                progress.say(line)
            return
        names = {job.of for job in jobs}
        continued = [arm for arm in study.all_arms if arm.name in names]
        undecided = ", ".join(arm.name for arm in continued if arm.name != BASELINE)
        more = several(looks[judged] - looks[judged - 1], "more seed")
        progress.say(f"look {judged + 1} of {len(looks)}: {more} for the undecided {undecided}")
        yield jobs
        yield from at_own_rates(runs, continued, looks[judged])
    if progress.pending:
        progress.say("after these runs, run the same command to judge the arms and submit the next look")
    else:
        progress.say(f"look {judged + 1} is incomplete, so no arm gets more seeds")


def at_own_rates(runs: Runs, arms: Sequence[StudyArm], seeds: int) -> Iterator[list[Job]]:
    """The runs of the first seeds: with a learning-rate grid in rounds, as results can call for further rates."""
    for _ in range(1 + FURTHER_RATES if runs.study.lr_grid else 1):
        yield runs.deciding(arms, runs.study.seeds[:seeds])


def run_missing(jobs: list[Job], backend: Backend, progress: JobProgress, retry_failed: bool) -> str:
    """Run the jobs that have not ended and were not run by this command. Returns the stop signal, or ''."""
    waiting, otherwise = [], []
    for job in jobs:
        if job.path in progress.statuses:
            continue
        state, reason = job.state()
        has_ended = state in SETTLED or (state == "failed" and not retry_failed)
        if has_ended and not (job.again or job.lacks_evaluations):
            progress.already_ended(job, JobResult(job.exit_status, reason))
            if any(text.startswith(("train.device=", "train.compile=")) for text in job.overrides):
                requested = compose(job.overrides)  # job.config is without settings of the machine
                if unlike := other_arithmetic(requested, job.path):
                    otherwise.append(", ".join(unlike))
        else:
            progress.statuses[job.path] = errors.PREEMPTED
            waiting.append(job)
    for unlike, count in Counter(otherwise).items():
        kept = f"{several(count, 'finished run')} trained with {unlike} than requested, and kept"
        progress.say(f"{kept}; a study of another name (name=NAME) trains them as requested")
    return backend.run(waiting, progress) if waiting else ""
