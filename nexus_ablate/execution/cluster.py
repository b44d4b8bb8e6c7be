"""A study on a SLURM cluster: submits the missing runs as one array and returns."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from nexus_ablate import errors
from nexus_ablate.config.plugins import VARIABLE as PLUGINS
from nexus_ablate.data import prepare
from nexus_ablate.errors import ConfigError
from nexus_ablate.execution.cluster_job import REQUEUES, Task
from nexus_ablate.execution.cluster_queue import FOLDER, Queue
from nexus_ablate.execution.launch import SETTLED_STATUS
from nexus_ablate.execution.progress import StudyProgress
from nexus_ablate.execution.queue import mark_failed
from nexus_ablate.masking import mask
from nexus_ablate.planning.design import ComposedStudy
from nexus_ablate.planning.jobs import Job, Runs
from nexus_ablate.planning.looks import ended_later, judge, lacking, next_look, outcomes, title
from nexus_ablate.planning.other_code import check_code
from nexus_ablate.planning.record import expanded, write_record
from nexus_ablate.provenance import git_state, source_hash
from nexus_ablate.runs import atomic_write_json, make_directory
from nexus_ablate.runs.files import storage
from nexus_ablate.runs.ownership import release, take_lock
from nexus_ablate.study.definition import Request

if TYPE_CHECKING:
    from nexus_ablate.comparison.results import Stratum as Comparison

LONGEST_ARRAY = 1000
"""Jobs: SLURM's own limit (MaxArraySize) is 1001 unless the cluster says otherwise."""


@dataclass(frozen=True)
class Resources:
    """The resources of each run, in SLURM's terms; '' uses the cluster's default.

    Attributes:
        time: Minutes until the job is requeued; its run then resumes.
        mem_gb: GiB of memory.
        parallel: Largest number of concurrent jobs.
        sbatch: Other options of sbatch, by their long names.
    """

    partition: str = ""
    time: int = 240
    mem_gb: int = 16
    cpus: int = 4
    gres: str = "gpu:1"
    parallel: int = 256
    sbatch: dict[str, str] = field(default_factory=dict)

    @property
    def signal_seconds(self) -> int:
        """Seconds before the time limit at which the run gets the signal to save."""
        return min(120, self.time * 60 // 4)

    def flags(self) -> list[str]:
        """The options of sbatch."""
        named = {"partition": self.partition, "gres": self.gres}
        flags = {k: v for k, v in named.items() if v}
        flags |= {"time": str(self.time), "mem": f"{self.mem_gb}G", "cpus-per-task": str(self.cpus)} | self.sbatch
        return [f"--{name}={value}" for name, value in flags.items()]


def submit(
    request: Request, resources: Resources, retry_failed: bool = False, amend: bool = False, retrain: bool = False
) -> int:
    """Submit the runs of a study that are missing and not yet in SLURM's queue.

    Args:
        request: From `read_request`.
        resources: For each run.
        retry_failed, amend, retrain: As in `launch`.

    Returns:
        The exit status: 0 if runs were submitted or all succeeded, otherwise the first nonzero status of a run.

    Raises:
        ConfigError: The study cannot be run, or SLURM refuses the resources; nothing was written.
        AlreadyRunning: Another command is submitting the study now.
    """
    require_slurm()
    try_out(resources.flags())
    study = expanded(request)
    for arm in study.all_arms:
        refuse_secrets([*study.definition.baseline, *arm.overrides, *request.launch])
    runs = Runs(study, request)
    for option, context in runs.data():
        prepare(option, context=context)  # once, here; nodes may have no network
    make_directory(request.directory, request.runs_dir)
    with storage(request.directory / "LOCK"):
        lock = take_lock(request.directory, "is being submitted")
    try:  # the lock is held until the submission is recorded, so no other command submits the same runs
        return _submit_missing(study, runs, request, resources, retry_failed, amend, retrain)
    finally:
        release(lock)


def _submit_missing(
    study: ComposedStudy,
    runs: Runs,
    request: Request,
    resources: Resources,
    retry_failed: bool,
    amend: bool,
    retrain: bool,
) -> int:
    first_round = [*runs.claims, *runs.tuning]
    tuned = runs.tuned() if study.definition.lr_grid else []
    by_other_code = check_code(study.definition.name, [*first_round, *tuned, *runs.later()], retrain)
    comparison = judge(runs) if study.definition.looks else None
    further = next_look(runs, comparison) if comparison else []
    queue = Queue(request.directory)
    write_record(study, request.directory, amend, source_hash())
    progress = StudyProgress(study, request.directory)
    if by_other_code:
        progress.say(by_other_code)
    unmet = lacking(runs)
    baseline_first = any(job.state()[0] not in (*SETTLED_STATUS, "failed") for job in runs.premise)
    jobs = runs.premise if unmet or baseline_first else [*first_round, *tuned, *ended_later(runs), *further]
    waiting, queued, status = [], 0, errors.OK
    for job in {job.path: job for job in jobs}.values():
        if job.state()[0] == "lost" and (why := queue.crash(job.path)):
            mark_failed(job.path, why)
        state, reason = job.state()
        if state in SETTLED_STATUS or (state == "failed" and not retry_failed):
            progress.already_ended(job, state, reason)
            status = status or SETTLED_STATUS.get(state, errors.BUG)
        elif queue.live(job.path):
            queued += 1
        else:
            waiting.append(job)
    starts = range(0, len(waiting), LONGEST_ARRAY)
    arrays = [_submit(waiting[start : start + LONGEST_ARRAY], request, resources) for start in starts]
    submitted = f"{len(waiting)} runs submitted" + (f" as SLURM job {' and '.join(arrays)}" if arrays else "")
    progress.say(submitted + (f", {queued} already in the queue" if queued else ""))
    if unmet or baseline_first:
        progress.say(unmet or "after the baseline's runs, run the same command to submit the other arms")
    else:
        _say_what_follows(runs, comparison, further, bool(waiting or queued), progress)
    progress.handed_over(bool(waiting or queued))
    return errors.OK if waiting or queued else status


def _say_what_follows(
    runs: Runs, comparison: Comparison | None, further: list[Job], has_live_jobs: bool, progress: StudyProgress
) -> None:
    study = runs.study
    if study.definition.lr_grid and any(runs.best_rate(arm) is None for arm in study.all_arms):
        progress.say("after the tuning runs, run the same command to submit every arm at its best learning rate")
    if not study.definition.looks:
        return
    if further:
        progress.say(title(runs, further))
    if has_live_jobs:
        progress.say("after these runs, run the same command to judge the arms and submit the next look")
    elif comparison and comparison.look and not further:
        for line in outcomes(runs, comparison):
            progress.say(line)
    else:
        progress.say(f"look {comparison.look + 1 if comparison else 1} is incomplete, so no arm gets more seeds")


def require_slurm() -> None:
    """Raises:
    ConfigError: submitit or SLURM is not installed.
    """
    if importlib.util.find_spec("submitit") is None:
        raise ConfigError("--cluster slurm needs submitit", "not installed", "pip install 'nexus-ablate[slurm]'")
    for command in ("sbatch", "squeue", "scontrol"):
        if shutil.which(command) is None:
            fix = "run it on a node of the cluster; without --cluster the study runs on this machine"
            raise ConfigError("--cluster slurm needs SLURM's commands", f"{command} is not installed", fix)


def refuse_secrets(overrides: list[str]) -> None:
    """Refuse overrides that contain a secret, because submitit saves them in files.

    Raises:
        ConfigError: One contains a secret.
    """
    for text in overrides:
        if mask(text) != text:
            fix = "pass it in an environment variable, a netrc file or a credential store that jobs can read"
            raise ConfigError("a job's overrides are saved in files, and this one contains a secret", text, fix)


def try_out(flags: list[str]) -> None:
    """Let SLURM check the requested resources without submitting a job.

    Args:
        flags: Options of sbatch.

    Raises:
        ConfigError: SLURM could never grant them.
    """
    command = ["sbatch", "--test-only", *flags, "--wrap=true"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode:
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in answer.stderr.splitlines()]
        why = next((line for line in lines if line), f"exit status {answer.returncode}")
        fix = "request what the cluster has: `nexus-ablate doctor` lists its partitions and GPUs"
        raise ConfigError(f"SLURM refuses these resources: {why}", " ".join(flags), fix)


def _submit(waiting: list[Job], request: Request, resources: Resources) -> str:
    """Submit all jobs as one array. Returns its job number."""
    import submitit
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3]
    folder = (request.directory / FOLDER / stamp).absolute()
    make_directory(folder, request.runs_dir.absolute())
    executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=REQUEUES)
    executor.update_parameters(
        name=f"nexus-{request.definition.name}"[:60],
        timeout_min=resources.time,
        mem_gb=resources.mem_gb,
        cpus_per_task=resources.cpus,
        slurm_signal_delay_s=resources.signal_seconds,
        slurm_array_parallelism=resources.parallel,
        stderr_to_stdout=True,
        **{f"slurm_{k}": v for k in ("partition", "gres") if (v := getattr(resources, k))},
        **({"slurm_additional_parameters": resources.sbatch} if resources.sbatch else {}),
    )
    plugins = os.environ.get(PLUGINS, "")
    tasks = [
        Task(job.overrides, job.arm, job.path.name.partition("-")[2], source_hash(), plugins, folder) for job in waiting
    ]
    try:
        with executor.batch():
            submitted = [executor.submit(task) for task in tasks]
    except (FailedJobError, FailedSubmissionError) as error:
        why = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        raise ConfigError("SLURM did not take the jobs", why, "see `nexus-ablate doctor`") from error
    names = [job.job_id for job in submitted]
    submission = {
        "when": stamp,
        "source": source_hash(),
        **git_state(),
        "sbatch": mask(resources.flags()),
        "jobs": {name: str(job.path.relative_to(request.directory)) for name, job in zip(names, waiting, strict=True)},
    }
    atomic_write_json(folder / "submission.json", submission)
    return names[0].partition("_")[0] + (f" (array of {len(names)})" if len(names) > 1 else "")
