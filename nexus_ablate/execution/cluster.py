"""A study on a SLURM cluster: what is missing is submitted as one array, and the command returns."""

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
from nexus_ablate.execution.progress import Progress
from nexus_ablate.execution.queue import mark_failed
from nexus_ablate.masking import mask
from nexus_ablate.provenance import git_state, source_hash
from nexus_ablate.runs import atomic_write_json, make_directory
from nexus_ablate.runs.files import storage
from nexus_ablate.runs.ownership import release, take_lock
from nexus_ablate.study.definition import Request
from nexus_ablate.study.design import Study
from nexus_ablate.study.jobs import Job, Runs
from nexus_ablate.study.looks import ended_later, judge, next_look, outcomes, title
from nexus_ablate.study.other_code import check_code
from nexus_ablate.study.record import expanded, write_record

if TYPE_CHECKING:
    from nexus_ablate.comparison.result import Comparison

LONGEST_ARRAY = 1000
"""Jobs: SLURM's own limit (MaxArraySize) is 1001 unless the cluster says otherwise."""


@dataclass(frozen=True)
class Resources:
    """What each run gets, in SLURM's words; '' leaves it to the cluster.

    Attributes:
        time: Minutes until the job is put back into the queue, from where its run goes on.
        mem_gb: GiB of memory.
        parallel: Most jobs at the same time.
        sbatch: Any further option of sbatch, by its long name.
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
        """How long before the time limit the run is told to save."""
        return min(120, self.time * 60 // 4)

    def flags(self) -> list[str]:
        """For sbatch."""
        given = {"partition": self.partition, "gres": self.gres}
        asked = {k: v for k, v in given.items() if v}
        asked |= {"time": str(self.time), "mem": f"{self.mem_gb}G", "cpus-per-task": str(self.cpus)} | self.sbatch
        return [f"--{name}={value}" for name, value in asked.items()]


def submit(
    request: Request, resources: Resources, retry_failed: bool = False, amend: bool = False, retrain: bool = False
) -> int:
    """Submit what is missing of a study and is not in the queue yet.

    Args:
        request: From `read_request`.
        resources: For each run.
        retry_failed, amend, retrain: As in `launch`.

    Returns:
        The exit status: 0 where something was submitted or everything ended well, else the first of the runs' that is
        not 0.

    Raises:
        ConfigError: The study cannot be run, or SLURM refuses the resources; nothing was written.
        AlreadyRunning: Another command is submitting the study at this moment.
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
    try:  # nobody else looks at what is missing before it is written down what was submitted
        return _submit_missing(study, runs, request, resources, retry_failed, amend, retrain)
    finally:
        release(lock)


def _submit_missing(
    study: Study, runs: Runs, request: Request, resources: Resources, retry_failed: bool, amend: bool, retrain: bool
) -> int:
    asked = [*runs.claims, *runs.tuning]
    tuned = runs.tuned() if study.definition.lr_grid else []
    by_other_code = check_code(study.definition.name, [*asked, *tuned, *runs.later()], retrain)
    comparison = judge(runs) if study.definition.looks else None
    further = next_look(runs, comparison) if comparison else []
    queue = Queue(request.directory)
    write_record(study, request.directory, amend, source_hash())
    progress = Progress(study, request.directory)
    if by_other_code:
        progress.say(by_other_code)
    waiting, queued, status = [], 0, errors.OK
    for job in {job.path: job for job in [*asked, *tuned, *ended_later(runs), *further]}.values():
        if job.state()[0] == "lost" and (why := queue.crash(job.path)):
            mark_failed(job.path, why)
        state, reason = job.state()
        if state in SETTLED_STATUS or (state == "failed" and not retry_failed):
            progress.found(job, state, reason)
            status = status or SETTLED_STATUS.get(state, errors.BUG)
        elif queue.live(job.path):
            queued += 1
        else:
            waiting.append(job)
    starts = range(0, len(waiting), LONGEST_ARRAY)
    arrays = [_submit(waiting[start : start + LONGEST_ARRAY], request, resources) for start in starts]
    said = f"{len(waiting)} runs submitted" + (f" as SLURM job {' and '.join(arrays)}" if arrays else "")
    progress.say(said + (f", {queued} are in the queue already" if queued else ""))
    if study.definition.lr_grid and any(runs.best_rate(arm) is None for arm in study.all_arms):
        progress.say("when the tuning runs have ended, the same command submits every arm at its best learning rate")
    if study.definition.looks:
        _say_looks(runs, comparison, further, bool(waiting or queued), progress)
    progress.handed_over(bool(waiting or queued))
    return errors.OK if waiting or queued else status


def _say_looks(
    runs: Runs, comparison: Comparison | None, further: list[Job], going_on: bool, progress: Progress
) -> None:
    if further:
        progress.say(title(runs, further))
    if going_on:
        progress.say(
            "when these have ended, the same command judges the arms; those that are undecided get the next look"
        )
    elif comparison and comparison.look and not further:
        for line in outcomes(runs, comparison):
            progress.say(line)
    else:
        progress.say(f"look {comparison.look + 1 if comparison else 1} is not complete, so no arm gets further seeds")


def require_slurm() -> None:
    """Raises:
    ConfigError: No submitit here, or no SLURM.
    """
    if importlib.util.find_spec("submitit") is None:
        raise ConfigError("--cluster slurm needs submitit", "not installed", "pip install 'nexus-ablate[slurm]'")
    for command in ("sbatch", "squeue", "scontrol"):
        if shutil.which(command) is None:
            fix = "run it on a node of the cluster; without --cluster the study runs on this machine"
            raise ConfigError("--cluster slurm needs SLURM's commands", f"no {command} here", fix)


def refuse_secrets(overrides: list[str]) -> None:
    """Refuse overrides that hold a secret: submitit keeps what a job is to do in files.

    Raises:
        ConfigError: One does.
    """
    for text in overrides:
        if mask(text) != text:
            fix = "give it by an environment variable, a netrc file or a credential store, which jobs can read"
            raise ConfigError("a job's overrides are kept in files, and this one holds a secret", text, fix)


def try_out(flags: list[str]) -> None:
    """Let SLURM check what a job asks for, without submitting one.

    Args:
        flags: Of sbatch.

    Raises:
        ConfigError: No job could ever get that.
    """
    command = ["sbatch", "--test-only", *flags, "--wrap=true"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if told.returncode:
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in told.stderr.splitlines()]
        why = next((line for line in lines if line), f"exit status {told.returncode}")
        fix = "ask for what the cluster has: `nexus-ablate doctor` names its partitions and GPUs"
        raise ConfigError(f"SLURM refuses these resources: {why}", " ".join(flags), fix)


def _submit(waiting: list[Job], request: Request, resources: Resources) -> str:
    """One array of all the jobs; its number."""
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
    told = {
        "when": stamp,
        "source": source_hash(),
        **git_state(),
        "sbatch": mask(resources.flags()),
        "jobs": {name: str(job.path.relative_to(request.directory)) for name, job in zip(names, waiting, strict=True)},
    }
    atomic_write_json(folder / "submission.json", told)
    return names[0].partition("_")[0] + (f" (array of {len(names)})" if len(names) > 1 else "")
