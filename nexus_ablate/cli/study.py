"""`nexus-ablate study NAME ...`: run a study, or its missing runs, on this machine or on a cluster."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import Flag, Verb, one_of, whole
from nexus_ablate.errors import ConfigError


def _sbatch(text: str) -> tuple[str, str]:
    name, equals, value = text.removeprefix("--").partition("=")
    if not equals or not name:
        raise ConfigError("--sbatch takes NAME=VALUE", text, "--sbatch account=mine")
    return name, value


WORKERS = Flag(
    "--workers", "N", "runs at the same time (auto: one per GPU, or per core)", whole("--workers", 2, also=("auto",))
)
JOB_FLAGS = (
    Flag("--partition", "NAME", "SLURM partition"),
    Flag("--mem-gb", "N", "memory of a job (16)", whole("--mem-gb", 16)),
    Flag("--cpus", "N", "cores of a job (4)", whole("--cpus", 4)),
    Flag("--gres", "TEXT", "devices of a job (gpu:1; none with train.device=cpu)"),
    Flag("--parallel", "N", "most jobs at the same time (256)", whole("--parallel", 256)),
    Flag("--sbatch", "K=V", "any other option of sbatch; may be repeated", _sbatch, repeated=True),
)
RUN_FLAGS = (
    WORKERS,
    Flag("--workers-per-gpu", "N", "concurrent runs on each free GPU (1)", whole("--workers-per-gpu", 2, most=64)),
    Flag("--time", "MINUTES", "per run (240 in a job); the next launch resumes it", whole("--time", 240, "of minutes")),
    Flag("--retry", "failed", "run failed runs again (diverged runs have a result)", one_of("--retry", "failed")),
    Flag("--retrain", "", "train again, with the current code, runs finished by other code"),
    Flag("--cluster", "slurm", "submit the runs and return (docs/clusters.md)", one_of("--cluster", "slurm")),
    *JOB_FLAGS,
    Flag("--launcher", "NAME", "run them by an installed Hydra launcher: joblib, ray ... (docs/clusters.md)"),
)
"""Flags of every verb that runs a study."""

VERB = Verb(
    "study",
    "run a study, or its missing runs (docs/studies.md)",
    "STUDY [KEY=VALUE ...]",
    (
        ("study norms", "a shipped study (nexus-ablate list studies)"),
        ("study path/to/mine.yaml", "your own"),
        ("study mine vary.norm=layer,rms vary.bias=on,off seeds=0,1,2", ""),
        ("study mine vary.norm=layer seeds.looks=5,8,12,20", "more seeds only for undecided arms"),
        ("study mine", "resume: train only the missing runs"),
        ("study norms name=norms_mini model=mini", "another baseline is another study"),
        ("study norms --cluster slurm --partition gpu", "one array of jobs; returns at once"),
        ("study norms --launcher joblib hydra.launcher.n_jobs=4", "by a Hydra launcher"),
    ),
    (
        Flag("--amend", "", "accept a change of the study since its first launch; study.yaml records it"),
        *RUN_FLAGS,
    ),
    "`nexus-ablate plan STUDY` shows arms and costs and runs nothing.",
    "a study",
    kind="studies",
)


def run(words: list[str], flags: dict[str, Any]) -> int:
    """Run the study."""
    words, settings = launcher_settings(words)
    start = starter(flags, words, settings)

    from nexus_ablate.planning.record import expanded, write_record
    from nexus_ablate.study.definition import read_request, strata_of

    whole_request = read_request(words)
    requests = strata_of(whole_request)
    if len(requests) > 1:
        for request, study in [(request, expanded(request)) for request in requests]:
            write_record(study, request.directory, "amend" in flags)  # so that `compare` knows what is to come
    statuses = []
    for request in requests:
        statuses.append(start(request, amend="amend" in flags))
        if statuses[-1] == errors.PREEMPTED:
            break
    if len(requests) > 1:
        print(f"\nall strata: nexus-ablate compare {shlex.quote(str(whole_request.directory))}", file=sys.stderr)
    return max(statuses, key=lambda status: (status == errors.PREEMPTED, status != errors.OK))


def launcher_settings(words: list[str]) -> tuple[list[str], list[str]]:
    """The words of a command without the settings of its launcher, and those: `hydra.launcher.KEY=VALUE`."""
    settings = [word for word in words if word.lstrip("+").startswith("hydra.launcher.")]
    return [word for word in words if word not in settings], settings


def starter(flags: dict[str, Any], overrides: list[str], settings: list[str]) -> Callable[..., int]:
    """`launch` or `submit` with these flags; takes a request, and `amend` if the study may change.

    Args:
        overrides: Those that say how the runs are carried out.
        settings: Of the launcher.

    Raises:
        ConfigError: The flags contradict each other, or this machine lacks the device.
    """
    from nexus_ablate.gpus import on_gpu
    from nexus_ablate.training.distributed import require_one_process

    require_one_process("a study")
    if settings and "launcher" not in flags:
        raise ConfigError("only a launcher has these settings", settings[0], f"--launcher joblib {settings[0]}")
    if "launcher" in flags and (
        other := next((name for name in ("cluster", "workers", "workers_per_gpu", "time") if name in flags), "")
    ):
        other = f"--{other.replace('_', '-')}"
        problem = f"--launcher runs the study in its own way, without {other}"
        raise ConfigError(problem, f"--launcher {flags['launcher']} {other}", f"--launcher {flags['launcher']}")
    if "workers_per_gpu" in flags and (clash := next((name for name in ("workers", "cluster") if name in flags), "")):
        fix = "--workers-per-gpu alone" if clash == "workers" else "several runs in one job: docs/clusters.md"
        raise ConfigError(f"--workers-per-gpu and --{clash} contradict each other", "both", fix)
    device = next((text.partition("=")[2] for text in reversed(overrides) if text.startswith("train.device=")), "auto")
    if "workers_per_gpu" in flags and not on_gpu(device):
        got = f"--workers-per-gpu {flags['workers_per_gpu']}, train.device={device}"
        raise ConfigError("there is no GPU to share", got, "--workers 2")
    retry, retrain = "retry" in flags, "retrain" in flags
    jobs = {flag.key: flags[flag.key] for flag in JOB_FLAGS if flag.key in flags}
    if "cluster" in flags:
        if "workers" in flags:
            raise ConfigError("--workers is for this machine", f"--workers {flags['workers']}", "--parallel 8")
        from nexus_ablate.execution.cluster import Resources, submit

        own = {"gres": ""} if "train.device=cpu" in overrides else {}
        jobs |= {"time": flags["time"]} if "time" in flags else {}
        resources = Resources(**{**own, **jobs, "sbatch": dict(jobs.get("sbatch", ()))})
        return partial(submit, resources=resources, retry_failed=retry, retrain=retrain)
    if jobs:
        name = next(flag.name for flag in JOB_FLAGS if flag.key in jobs)
        raise ConfigError(f"{name} is for a cluster", f"{name} without --cluster", f"--cluster slurm {name} ...")
    from nexus_ablate.execution.launch import launch

    if "launcher" in flags:
        from nexus_ablate.execution.launcher import Launcher

        launcher = Launcher(flags["launcher"], tuple(settings))
        launcher.check()
        return partial(launch, launcher=launcher, retry_failed=retry, retrain=retrain)
    if device not in ("auto", "cpu"):
        from nexus_ablate.training.device import choose_device

        choose_device(device)  # raises where this machine lacks it, before a folder is made
    limit = 60 * flags["time"] if "time" in flags else math.inf
    return partial(
        launch,
        workers=flags.get("workers", "auto"),
        retry_failed=retry,
        limit=limit,
        retrain=retrain,
        per_gpu=flags.get("workers_per_gpu", 1),
    )
