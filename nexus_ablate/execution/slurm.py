"""The jobs of a study or multirun on a SLURM cluster: submits those not yet in its queue as an array, and returns.

SLURM then runs them. The same command again submits what is missing by then.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from nexus_ablate import errors
from nexus_ablate.errors import ConfigError, require_module
from nexus_ablate.execution.job_progress import JobProgress
from nexus_ablate.execution.local_pool import mark_failed
from nexus_ablate.execution.slurm_job import REQUEUES, SlurmTask
from nexus_ablate.execution.slurm_queue import FOLDER, answer_to, entries_of, submitted_jobs
from nexus_ablate.execution.worker import JobResult, Task
from nexus_ablate.masking import mask
from nexus_ablate.planning.jobs import Job
from nexus_ablate.provenance import git_state, source_hash
from nexus_ablate.runs import atomic_write_json, make_directory
from nexus_ablate.runs.files import storage
from nexus_ablate.runs.ownership import LIVE, release, take_lock

LONGEST_ARRAY = 1000
"""Jobs: SLURM's own limit (MaxArraySize) is 1001 unless the cluster says otherwise."""


@dataclass(frozen=True)
class Slurm:
    """A SLURM cluster, and the resources of each run in its terms; '' uses the cluster's default.

    Attributes:
        time: Minutes until the job is requeued; its run then resumes.
        mem_gb: GiB of memory.
        parallel: Largest number of concurrent jobs.
        sbatch: Other options of sbatch, by their long names.
        retry_failed: Submit runs whose job crashed (out of memory, in native code) again.
    """

    partition: str = ""
    time: int = 240
    mem_gb: int = 16
    cpus: int = 4
    gres: str = "gpu:1"
    parallel: int = 256
    sbatch: dict[str, str] = field(default_factory=dict)
    retry_failed: bool = False

    def check(self) -> None:
        """Let SLURM check the resources, without submitting a job.

        Raises:
            ConfigError: submitit or SLURM is not installed, or SLURM could never grant the resources.
        """
        require_module("submitit", "--launcher slurm", "pip install 'nexus-ablate[slurm]'")
        for command in ("sbatch", "squeue", "scontrol"):
            if shutil.which(command) is None:
                fix = "run it on a node of the cluster; without --launcher the jobs run on this machine"
                raise ConfigError("--launcher slurm needs SLURM's commands", f"{command} is not installed", fix)
        options = {
            "partition": self.partition,
            "gres": self.gres,
            "time": str(self.time),
            "mem": f"{self.mem_gb}G",
            "cpus-per-task": str(self.cpus),
            **self.sbatch,
        }
        flags = [f"--{name}={value}" for name, value in options.items() if value]
        answer = answer_to(["sbatch", "--test-only", *flags, "--wrap=true"])
        if answer.returncode:
            lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in answer.stderr.splitlines()]
            why = next((line for line in lines if line), f"exit status {answer.returncode}")
            fix = "request what the cluster has: `nexus-ablate doctor` lists its partitions and GPUs"
            raise ConfigError(f"SLURM refuses these resources: {why}", " ".join(flags), fix)

    def run(self, jobs: list[Job], progress: JobProgress) -> str:
        """Submit the jobs that are not in the queue yet. Returns ''.

        Raises:
            ConfigError: A job's overrides contain a secret, or SLURM does not take the jobs.
            AlreadyRunning: Another command is submitting jobs of the same experiment now.
        """
        refuse_secrets(text for job in jobs for text in job.overrides)
        for directory, group in groupby(jobs, lambda job: job.path.parents[1]):
            make_directory(directory, directory.parent)
            with storage(directory / "LOCK"):
                lock = take_lock(directory, "is being submitted")
            try:  # until the submission is recorded, so that no other command submits the same runs
                self._submit_missing(list(group), directory, progress)
            finally:
                release(lock)
        return ""

    def _submit_missing(self, jobs: list[Job], directory: Path, progress: JobProgress) -> None:
        entries, waiting, in_queue = entries_of(submitted_jobs(directory)), [], 0
        for job in jobs:
            entry = entries.get(str(job.path.relative_to(directory)))
            if entry and entry.has_crashed and job.state()[0] in ("lost", *LIVE):
                mark_failed(job.path, entry.description())
                if not self.retry_failed:
                    progress.already_ended(job, JobResult(errors.BUG, entry.description()))
                    continue
            if entry and entry.live:
                in_queue += 1
            else:
                waiting.append(job)
        starts = range(0, len(waiting), LONGEST_ARRAY)
        arrays = [self._submit(waiting[start : start + LONGEST_ARRAY], directory) for start in starts]
        progress.submitted(len(waiting), in_queue, arrays)

    def _submit(self, jobs: list[Job], directory: Path) -> str:
        """Submit jobs as one array. Returns its job number."""
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3]
        folder = (directory / FOLDER / stamp).absolute()
        make_directory(folder, directory.parent.absolute())
        chosen = {"slurm_partition": self.partition, "slurm_gres": self.gres}
        executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=REQUEUES)
        executor.update_parameters(
            name=f"nexus-{directory.name}"[:60],
            timeout_min=self.time,
            mem_gb=self.mem_gb,
            cpus_per_task=self.cpus,
            slurm_signal_delay_s=min(120, self.time * 60 // 4),
            slurm_array_parallelism=self.parallel,
            slurm_additional_parameters=self.sbatch,
            stderr_to_stdout=True,
            **{name: value for name, value in chosen.items() if value},
        )
        tasks = [SlurmTask(Task.of(job, {}), folder) for job in jobs]
        try:
            with executor.batch():
                submitted = [executor.submit(task) for task in tasks]
        except (FailedJobError, FailedSubmissionError) as error:
            why = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
            raise ConfigError("SLURM did not take the jobs", why, "see `nexus-ablate doctor`") from error
        names = [job.job_id for job in submitted]
        paths = [str(job.path.relative_to(directory)) for job in jobs]
        submission = {
            "when": stamp,
            "source": source_hash(),
            **git_state(),
            "jobs": dict(zip(names, paths, strict=True)),
        }
        atomic_write_json(folder / "submission.json", submission)
        return names[0].partition("_")[0] + (f" (array of {len(names)})" if len(names) > 1 else "")


def refuse_secrets(overrides: Iterable[str]) -> None:
    """Refuse overrides that contain a secret, because submitit saves them in files.

    Raises:
        ConfigError: One contains a secret.
    """
    for text in overrides:
        if mask(text) != text:
            fix = "pass it in an environment variable, a netrc file or a credential store that jobs can read"
            raise ConfigError("a job's overrides are saved in files, and this one contains a secret", text, fix)
