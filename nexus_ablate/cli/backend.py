"""The flags that say what runs the jobs of a study or multirun: this machine, a SLURM cluster or a Hydra launcher."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any

from nexus_ablate.cli.flags import BACKEND, SLURM, TIME, WORKERS, Flags, typed_words
from nexus_ablate.errors import ConfigError

if TYPE_CHECKING:
    from nexus_ablate.launch.launch import Backend
    from nexus_ablate.launch.local import LocalPool
    from nexus_ablate.launch.slurm import Slurm


ACCEPTED = {
    "local": (WORKERS, TIME),
    "slurm": (WORKERS, TIME, *SLURM),
}
"""The flags that each backend takes; Hydra's launchers take none, but settings: hydra.launcher.KEY=VALUE."""
SAME = {"basic": "local", "submitit_slurm": "slurm"}
"""Hydra's names of our own backends."""
SUBMITIT_KEYS = {"timeout_min": TIME, "mem_gb": SLURM[0], "cpus_per_task": SLURM[1], "array_parallelism": WORKERS}
"""The flag for each setting of Hydra's submitit launcher that has one; others are options of sbatch."""
SBATCH_NAMES = {"tasks_per_node": "ntasks-per-node", "name": "job-name"}
SET_HERE = ("max_num_timeout", "signal_delay_s", "stderr_to_stdout", "submitit_folder")
"""Settings of Hydra's submitit launcher that say how a job is resumed and where its output goes."""


def split_launcher(words: list[str], flags: Flags) -> tuple[list[str], str, list[str]]:
    """The words without those for a launcher, the launcher's name, and its settings: `hydra.launcher.KEY=VALUE`.

    Raises:
        ConfigError: Two launchers, or settings without a launcher.
    """
    settings = [word for word in words if word.lstrip("+").startswith("hydra.launcher.")]
    chosen = [word.partition("=")[2] for word in words if word.startswith("hydra/launcher=")]
    chosen += [flags["launcher"]] if "launcher" in flags else []
    names = {SAME.get(name, name) for name in chosen}
    if len(names) > 1:
        raise ConfigError("the jobs are run by one launcher", " and ".join(chosen), f"leave {chosen[0]} out")
    if wrong := [name for name in names if not name.isidentifier()]:
        raise ConfigError("--launcher takes the name of a launcher", wrong[0], "--launcher local")
    if settings and not names:
        raise ConfigError("only a launcher has these settings", settings[0], f"--launcher joblib {settings[0]}")
    rest = [word for word in words if word not in settings and not word.startswith("hydra/launcher=")]
    return rest, names.pop() if names else "local", settings


def backend_of(words: list[str], flags: Flags) -> tuple[list[str], Backend]:
    """The words without those for a launcher, and the backend that runs the jobs, checked.

    Raises:
        ConfigError: The flags contradict each other, or the backend is not available here.
    """
    words, name, settings = split_launcher(words, flags)
    accepted = ACCEPTED.get(name, ())
    for flag in BACKEND[1:]:
        if flag.key in flags and flag not in accepted:
            owner = "local" if flag in ACCEPTED["local"] else "slurm"
            given = shlex.join(typed_words(flag, flags))
            raise ConfigError(
                f"{flag.name} is for --launcher {owner}", f"--launcher {name} {given}", f"--launcher {owner} {given}"
            )
    device = next((word.partition("=")[2] for word in reversed(words) if word.startswith("train.device=")), "auto")
    if name == "local":
        return words, _local(flags, device, settings)
    if name == "slurm":
        return words, _slurm(words, flags, device, settings)
    from nexus_ablate.launch.hydra import HydraLauncher

    launcher = HydraLauncher(name, tuple(settings))
    launcher.check()
    return words, launcher


def _local(flags: Flags, device: str, settings: list[str]) -> LocalPool:
    from nexus_ablate.launch.local import LocalPool

    if settings:
        raise ConfigError("the launcher of this machine has other settings", settings[0], "--workers 2")
    if device not in ("auto", "cpu") and "," not in device:
        from nexus_ablate.training.device import choose_device

        choose_device(device)  # raises where this machine lacks it, before a folder is made
    limit = 60 * flags["time"] if "time" in flags else math.inf
    return LocalPool(flags.get("workers", "auto"), limit)


def _slurm(words: list[str], flags: Flags, device: str, settings: list[str]) -> Slurm:
    from nexus_ablate.launch.slurm import Slurm, refuse_secrets
    from nexus_ablate.plain_data import UNREADABLE, load_yaml
    from nexus_ablate.study.arm_overrides import key_of
    from nexus_ablate.study.definition import runs_dir_of

    refuse_secrets(word for word in words if not word.startswith("question="))
    folder = runs_dir_of([word for word in words if key_of(word) == "runs_dir"]).absolute()
    if "%" in str(folder):  # in the names of a job's files, SLURM replaces what follows it
        raise ConfigError("SLURM cannot write into a folder with % in its path", str(folder), "runs_dir=runs_slurm")
    resources: dict[str, Any] = {flag.key: flags[flag.key] for flag in ACCEPTED["slurm"] if flag.key in flags}
    options = resources.pop("sbatch", [])
    for setting in settings:
        key, _, value = setting.lstrip("+").removeprefix("hydra.launcher.").partition("=")
        if key in SET_HERE:
            fix = f"leave {key} out; --time says when a job is requeued"
            raise ConfigError("nexus-ablate sets this for every job", setting, fix)
        if key in SUBMITIT_KEYS and value != "null":
            flag = SUBMITIT_KEYS[key]
            resources[flag.key] = flag.value(value)
        elif key == "setup":
            try:
                lines = load_yaml(value)
            except UNREADABLE:
                raise ConfigError("setup is a list of lines", setting, "--sbatch 'setup=module load cuda'") from None
            lines = lines if isinstance(lines, list) else [lines]
            options += [("setup", str(line)) for line in lines if line is not None]
        elif value != "null":
            option = key.removeprefix("additional_parameters.")
            options.append((SBATCH_NAMES.get(option, option.replace("_", "-")), value))
    refuse_secrets(value for _, value in options)
    workers = resources.pop("workers", "auto")
    if workers != "auto":
        resources["parallel"] = workers
    sbatch = {name: "" if value == "true" else value for name, value in options if name != "setup"}
    if device != "cpu" and not any("gpu" in name for name in sbatch):
        sbatch.setdefault("gres", "gpu:1")
    setup = tuple(line for name, line in options if name == "setup")
    slurm = Slurm(**resources, sbatch=sbatch, setup=setup)
    slurm.check()
    return slurm
