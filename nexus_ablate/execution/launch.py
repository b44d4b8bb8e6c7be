"""Launches a study on this machine: runs what is missing, keeps what has ended, returns the exit status."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nexus_ablate import errors
from nexus_ablate.data import prepare
from nexus_ablate.execution.launcher import Launcher
from nexus_ablate.execution.progress import StudyProgress
from nexus_ablate.execution.queue import run_queue
from nexus_ablate.execution.worker import Answer
from nexus_ablate.planning.jobs import Job, Runs
from nexus_ablate.planning.looks import ended_later, judge, lacking, next_look, outcomes, title
from nexus_ablate.planning.other_code import check_code
from nexus_ablate.planning.places import places_for
from nexus_ablate.planning.record import expanded, write_record
from nexus_ablate.provenance import source_hash
from nexus_ablate.study.definition import Request

SETTLED_STATUS = {"finished": errors.OK, "diverged": errors.DIVERGED}


def launch(
    request: Request,
    workers: int | str = "auto",
    retry_failed: bool = False,
    amend: bool = False,
    limit: float = math.inf,
    retrain: bool = False,
    launcher: Launcher | None = None,
    per_gpu: int = 1,
) -> int:
    """Run what is missing of a study on this machine, or by one of Hydra's launchers.

    Args:
        request: From `read_request`.
        workers: Number of concurrent processes; `auto`: one per GPU, or one per CPU core.
        retry_failed: Run failed runs again. A diverged run has a result and is never repeated.
        amend: Accept that the study changed since its first launch.
        limit: Seconds per run in this launch.
        retrain: Train again, with the current code, the runs that other code has finished.
        launcher: Runs the jobs instead of `workers`.
        per_gpu: Concurrent processes per GPU, where `workers` is `auto`.

    Returns:
        The exit status: the first nonzero status of a run, after all have run; 75 after a stop signal.

    Raises:
        ConfigError: The study cannot be run, or has changed since its first launch.
    """
    study = expanded(request)
    runs = Runs(study, request)
    first = [*runs.claims, *runs.tuning]
    by_other_code = check_code(study.definition.name, [*first, *runs.tuned(), *runs.later()], retrain)
    if any(job.state()[0] == "missing" for job in first):
        for option, context in runs.data():
            prepare(option, context=context)  # once, before starting workers and before writing anything
    write_record(study, request.directory, amend, source_hash())
    progress = StudyProgress(study, request.directory)
    if by_other_code:
        progress.say(by_other_code)
    statuses: dict[Path, int] = {}
    run = partial(
        _run,
        request=request,
        workers=workers,
        retry_failed=retry_failed,
        progress=progress,
        statuses=statuses,
        limit=limit,
        launcher=launcher,
        per_gpu=per_gpu,
    )
    stopped = run(runs.premise)
    if not stopped and (why := lacking(runs)):
        progress.say(why)
    elif not stopped:
        stopped = _run_arms(runs, run, progress)
    progress.end(stopped, runs.deciding(study.all_arms, study.definition.seeds))
    if stopped:
        return errors.PREEMPTED
    return next((status for status in statuses.values() if status != errors.OK), errors.OK)


def _run_arms(runs: Runs, run: Callable[[list[Job]], str], progress: StudyProgress) -> str:
    """Run every arm, tune it first where there is a grid, then the looks. Returns the stop signal, or ''."""
    study = runs.study
    stopped = run([*runs.claims, *runs.tuning])
    if not stopped and study.definition.lr_grid:
        for arm in study.all_arms:
            if runs.best_rate(arm) is None:
                why = "a tuning run is missing, or at every rate one failed to train"
                progress.say(f"{arm.name}: no best learning rate, because {why}")
        stopped = run(runs.tuned())
    if not stopped and study.definition.looks:
        stopped = _run_looks(runs, run, progress)
    return stopped


def _run_looks(runs: Runs, run: Callable[[list[Job]], str], progress: StudyProgress) -> str:
    """Judge after each look and run the next one until every arm is decided. Returns the stop signal, or ''."""
    run(ended_later(runs))
    judged = 0
    while (comparison := judge(runs)) is not None and comparison.look > judged:
        judged = comparison.look
        jobs = next_look(runs, comparison)
        if not jobs:
            for line in outcomes(runs, comparison):
                progress.say(line)
            return ""
        progress.say(title(runs, jobs))
        if stopped := run(jobs):
            return stopped
    progress.say(f"look {judged + 1} is incomplete, so no arm gets more seeds")
    return ""


def _run(
    jobs: list[Job],
    request: Request,
    workers: int | str,
    retry_failed: bool,
    progress: StudyProgress,
    statuses: dict[Path, int],
    limit: float,
    launcher: Launcher | None,
    per_gpu: int,
) -> str:
    """Run the jobs that have not ended and are not in `statuses`, and fill it in their order.

    Returns the stop signal, or ''.
    """
    waiting = []
    for job in (job for job in jobs if job.path not in statuses):
        state, reason = job.state()
        statuses[job.path] = SETTLED_STATUS.get(state, errors.BUG)
        if state in SETTLED_STATUS or (state == "failed" and not retry_failed):
            progress.already_ended(job, state, reason)
        else:
            waiting.append(job)
    if not waiting:
        return ""

    def ended(job: Job, answer: Answer) -> None:
        statuses[job.path] = answer.status
        progress.ended(job, answer)

    if launcher:
        progress.queued(len(waiting), f"hydra/launcher={launcher.name}", paced=False)
        for job in waiting:
            progress.began(job)
        return launcher.run(waiting, ended, progress.say)
    where = places_for(waiting, workers, per_gpu)
    progress.queued(len(waiting), where.description)
    with progress.live():
        log_dir = request.directory / ".workers"
        return run_queue(waiting, where, log_dir, progress.began, ended, progress.tick, limit)
