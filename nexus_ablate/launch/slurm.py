"""The jobs of a study on a SLURM cluster: submits those not yet in its queue as an array, and returns.

SLURM then runs them. The same command again submits what is missing by then.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nexus_ablate import errors
from nexus_ablate.errors import ConfigError, require_module
from nexus_ablate.launch import slurm_queue
from nexus_ablate.launch.job_progress import JobProgress
from nexus_ablate.launch.jobs import Job, JobResult
from nexus_ablate.launch.local import mark_failed
from nexus_ablate.launch.slurm_job import REQUEUES, SlurmTask, announcement
from nexus_ablate.launch.slurm_queue import FOLDER, ask_slurm, entries_of, no_answer
from nexus_ablate.launch.worker import Task
from nexus_ablate.masking import mask
from nexus_ablate.provenance import git_state, source_hash
from nexus_ablate.runs import atomic_write_json, make_directory
from nexus_ablate.runs.files import storage
from nexus_ablate.runs.ownership import LIVE, release, take_lock

REPLACED_BY = {"mem-per-cpu": "mem", "mem-per-gpu": "mem", "cpus-per-gpu": "cpus-per-task"}
"""The option that sbatch does not take beside another one."""
LONGEST_ARRAY = 1000
"""Jobs: SLURM's own limit (MaxArraySize) is 1001 unless the cluster says otherwise."""


@dataclass(frozen=True)
class Slurm:
    """A SLURM cluster, and the resources of each run in its terms.

    Attributes:
        time: Minutes until the job is requeued; its run then resumes.
        mem_gb: GiB of memory, unless `sbatch` sets the memory per core or GPU.
        cpus: Cores, unless `sbatch` sets the cores per GPU.
        parallel: Largest number of concurrent jobs.
        sbatch: Other options of sbatch, by their long names; '' for one without a value.
        setup: Lines of the job's script before the run: `module load cuda`.
    """

    time: int = 240
    mem_gb: int = 16
    cpus: int = 4
    parallel: int = 256
    sbatch: dict[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, str]:
        """Every option of sbatch."""
        options = {"time": str(self.time), "mem": f"{self.mem_gb}G", "cpus-per-task": str(self.cpus)}
        for name in self.sbatch:
            options.pop(REPLACED_BY.get(name, ""), None)
        return options | self.sbatch

    def check(self) -> None:
        """Let SLURM check the resources, without submitting a job.

        Raises:
            UserError: submitit or SLURM is not installed or does not answer, or could never grant the resources.
        """
        require_module("submitit", "--launcher slurm", "pip install 'nexus-ablate[slurm]'")
        for command in ("sbatch", "squeue", "scontrol"):
            if shutil.which(command) is None:
                fix = "run it on a node of the cluster; without --launcher the jobs run on this machine"
                raise ConfigError("--launcher slurm needs SLURM's commands", f"{command} is not installed", fix)
        for name in ("nodes", "ntasks", "ntasks-per-node"):
            if self.sbatch.get(name, "1") != "1":
                raise ConfigError("a job trains one run in one process", f"{name}={self.sbatch[name]}", f"{name}=1")
        flags = [f"--{name}={value}" if value else f"--{name}" for name, value in self.options.items()]
        answer = ask_slurm(["sbatch", "--test-only", *flags, "--wrap=true"])
        if answer.returncode:
            lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in answer.stderr.splitlines()]
            why = next((line for line in lines if line), f"exit status {answer.returncode}")
            if "contact" in why or "timed out" in why.lower():  # the controller, not the resources
                raise no_answer("sbatch", why)
            fix = "request what the cluster has: `nexus-ablate doctor` lists its partitions and GPUs"
            if "node configuration" in why:
                fix = "--mem-gb, --cpus and --gres of a node that exists: `nexus-ablate doctor` lists them"
            raise ConfigError(f"SLURM refuses these resources: {why}", " ".join(flags), fix)

    def run(self, jobs: list[Job], progress: JobProgress) -> str:
        """Submit the jobs that are not in the queue yet. Returns ''.

        Raises:
            UserError: A job's overrides contain a secret, or SLURM does not take the jobs.
            AlreadyRunning: Another command is submitting jobs of the same study now.
        """
        refuse_secrets(text for job in jobs for text in job.overrides)
        folder = progress.folder
        with storage(folder / "LOCK"):
            lock = take_lock(folder, "is being submitted")
        try:  # until the submission is recorded, so that no other command submits the same runs
            self._submit_missing(jobs, folder, progress)
        finally:
            release(lock)
        return ""

    def _submit_missing(self, jobs: list[Job], folder: Path, progress: JobProgress) -> None:
        entries, waiting, in_queue = entries_of(folder), [], 0
        for job in jobs:
            entry = entries.get(str(job.path.relative_to(folder)))
            if entry and entry.has_crashed and job.state()[0] in ("lost", *LIVE):
                mark_failed(job.path, str(entry))
                if not progress.retry_failed:
                    progress.keep(job, JobResult(errors.BUG, str(entry)))
                    continue
            if entry and entry.is_live:
                in_queue += 1
            else:
                waiting.append(job)
        starts = range(0, len(waiting), LONGEST_ARRAY)
        arrays = [self._submit(waiting[start : start + LONGEST_ARRAY], folder) for start in starts]
        progress.submitted(len(waiting), in_queue, arrays)

    def _submit(self, jobs: list[Job], study_folder: Path) -> str:
        """Submit jobs as one array. Returns its job number."""
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError
        from submitit.slurm.slurm import SlurmExecutor

        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3]
        folder = (study_folder / FOLDER / stamp).absolute()
        make_directory(folder, study_folder.parent.absolute())
        SlurmExecutor._make_submission_command = _limited_sbatch  # submitit waits for its own without end
        executor = submitit.AutoExecutor(
            folder, cluster="slurm", slurm_max_num_timeout=REQUEUES, slurm_python=python_that_waits()
        )
        executor.update_parameters(
            name=self.sbatch.get("job-name", f"nexus-{study_folder.name}"[:60]),
            timeout_min=self.time,
            slurm_signal_delay_s=min(120, self.time * 60 // 4),
            slurm_array_parallelism=self.parallel,
            slurm_additional_parameters={name: value or True for name, value in self.options.items()},
            slurm_setup=[*self.setup],
            stderr_to_stdout=True,
        )
        tasks = [SlurmTask(Task.of(job, {}), folder) for job in jobs]
        try:
            with executor.batch():
                submitted = [executor.submit(task) for task in tasks]
        except (FailedJobError, FailedSubmissionError) as error:
            why = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
            raise ConfigError("SLURM did not take the jobs", why, "see `nexus-ablate doctor`") from error
        names = [job.job_id for job in submitted]
        paths = [str(job.path.relative_to(study_folder)) for job in jobs]
        submission = {"when": stamp, "source": source_hash(), **git_state()}
        submission["jobs"] = dict(zip(names, paths, strict=True))
        atomic_write_json(folder / "submission.json", submission)
        return names[0].partition("_")[0] + (f" (array of {len(names)})" if len(names) > 1 else "")


def python_that_waits() -> str:
    """The command for Python that ignores the announcement of a preemption until submitit handles it.

    Until then it would end the process, and SLURM would call the job failed; a job that ignores it is requeued by
    SLURM at the end of its grace time.
    """
    number = announcement().name.removeprefix("SIG")
    return f"""sh -c 'trap "" {number}; exec "$0" "$@"' {shlex.quote(sys.executable)}"""


def _limited_sbatch(self: Any, submission_file_path: Path) -> list[str]:
    """The command that submits a file, and ends where SLURM does not answer."""
    return ["timeout", str(slurm_queue.ANSWER_SECONDS), "sbatch", str(submission_file_path)]


def refuse_secrets(overrides: Iterable[str]) -> None:
    """Refuse overrides that contain a secret, because submitit saves them in files.

    Raises:
        ConfigError: One contains a secret.
    """
    for text in overrides:
        if mask(text) != text:
            fix = "pass it in an environment variable, a netrc file or a credential store that jobs can read"
            raise ConfigError("a job's overrides are saved in files, and this one contains a secret", text, fix)
