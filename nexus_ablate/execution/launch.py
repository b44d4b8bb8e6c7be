"""A study from its request to its exit status: what is missing is run, what has ended is left as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nexus_ablate import errors
from nexus_ablate.data import prepare
from nexus_ablate.execution.progress import Progress
from nexus_ablate.execution.queue import run_queue
from nexus_ablate.execution.worker import Answer
from nexus_ablate.provenance import source_hash
from nexus_ablate.study.definition import Request
from nexus_ablate.study.jobs import Job, Runs
from nexus_ablate.study.looks import ended_later, judge, next_look, outcomes, title
from nexus_ablate.study.other_code import check_code
from nexus_ablate.study.places import places_for
from nexus_ablate.study.record import expanded, write_record

SETTLED_STATUS = {"finished": errors.OK, "diverged": errors.DIVERGED}


def launch(
    request: Request,
    workers: int | str = "auto",
    retry_failed: bool = False,
    amend: bool = False,
    limit: float = math.inf,
    retrain: bool = False,
) -> int:
    """Run what is missing of a study on this machine.

    Args:
        request: From `read_request`.
        workers: Processes at the same time; `auto`: one a GPU, or one a core.
        retry_failed: Try failed runs again. One that diverged has a result and is never tried again.
        amend: Accept that the study changed since its first launch.
        limit: Seconds of a run in this launch.
        retrain: Train with today's code what other code has finished.

    Returns:
        The exit status: the first of its runs' that is not 0, after all had their turn; 75 if it was asked to stop.

    Raises:
        ConfigError: The study cannot be run, or is not what it was.
    """
    study = expanded(request)
    runs = Runs(study, request)
    first = [*runs.claims, *runs.tuning]
    by_other_code = check_code(study.definition.name, [*first, *runs.tuned(), *runs.later()], retrain)
    if any(job.state()[0] == "missing" for job in first):
        for option, context in runs.data():
            prepare(option, context=context)  # once, before there are workers and before anything is made
    write_record(study, request.directory, amend, source_hash())
    progress = Progress(study, request.directory)
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
    )
    stopped = run(first)
    if not stopped and study.definition.lr_grid:
        for arm in study.all_arms:
            if runs.best_rate(arm) is None:
                progress.say(f"{arm.name}: no best learning rate, because a tuning run failed or all diverged")
        stopped = run(runs.tuned())
    if not stopped and study.definition.looks:
        stopped = _run_looks(runs, run, progress, statuses)
    progress.end(stopped)
    if stopped:
        return errors.PREEMPTED
    return next((status for status in statuses.values() if status != errors.OK), errors.OK)


def _run_looks(runs: Runs, run: Callable[[list[Job]], str], progress: Progress, statuses: dict[Path, int]) -> str:
    """Judge after each look and run the next one, until every arm is decided; the signal that asked to stop, or ''."""
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
        if stopped := run([job for job in jobs if job.path not in statuses]):
            return stopped
    progress.say(f"look {judged + 1} is not complete, so no arm gets further seeds")
    return ""


def _run(
    jobs: list[Job],
    request: Request,
    workers: int | str,
    retry_failed: bool,
    progress: Progress,
    statuses: dict[Path, int],
    limit: float,
) -> str:
    """Run those of the jobs that have not ended; fills `statuses` in the jobs' order."""
    waiting = []
    for job in jobs:
        state, reason = job.state()
        statuses[job.path] = SETTLED_STATUS.get(state, errors.BUG)
        if state in SETTLED_STATUS or (state == "failed" and not retry_failed):
            progress.found(job, state, reason)
        else:
            waiting.append(job)
    if not waiting:
        return ""

    def ended(job: Job, answer: Answer) -> None:
        statuses[job.path] = answer.status
        progress.ended(job, answer)

    where = places_for(waiting, workers)
    with progress.live(len(waiting), where):
        log_dir = request.directory / ".workers"
        return run_queue(waiting, where, log_dir, progress.began, ended, progress.tick, limit)
