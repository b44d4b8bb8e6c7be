"""`nexus-ablate doctor`: checks whether this machine is ready, and says how to fix what isn't.

Each check reports one thing. None imports torch into this process or asks a server, SLURM's apart. Credentials are
reported as present or absent, and never shown.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from nexus_ablate.cli.flags import JSON, SUBMIT, Flags
from nexus_ablate.cli.verb import Verb
from nexus_ablate.console import several
from nexus_ablate.errors import CONFIG, OK, ConfigError, printable

VERB = Verb(
    "doctor",
    "what is ready on this machine, and how to fix what is not",
    "[RUNS_DIR]",
    (
        ("doctor", "packages, device, disk, W&B, launchers, SLURM"),
        ("doctor /scratch/runs", "another folder for the runs"),
        ("doctor /scratch/runs --submit", "a one-second SLURM job checks whether the nodes see it"),
    ),
    (SUBMIT, JSON),
    "Keys are never shown. The exit status is 2 if something is missing that every run needs, otherwise 0.",
)

SRUN_SECONDS = 120.0
IMPORT_SECONDS = 300.0
LITTLE_SPACE = 2 * 2**30
"""Fewest free bytes: enough for a study of small runs with checkpoints, token files and logs."""

EXTRAS = {
    "submitit": ("submitit", "nexus-ablate[slurm]"),
    "hydra-joblib-launcher": ("hydra joblib launcher", "hydra-joblib-launcher"),
    "hydra-ray-launcher": ("hydra ray launcher", "hydra-ray-launcher"),
    "transformers": ("transformers", "nexus-ablate[import]"),
    "wandb-workspaces": ("wandb workspaces", "nexus-ablate[dashboard]"),
}
"""What optional packages are for, and what installs them."""


class MachineCheck(NamedTuple):
    """What was checked, whether it can be used, what was found, and how to fix it ('' if nothing is missing).

    `need` says whether runs are impossible without it.
    """

    name: str
    ready: bool
    detail: str
    fix: str = ""
    need: bool = False


def run(words: list[str], flags: Flags) -> int:
    """Print a line for each check."""
    from rich.text import Text

    from nexus_ablate.console import open_console
    from nexus_ablate.runs import strict_json

    if len(words) > 1 or any("=" in word for word in words):
        raise ConfigError("doctor takes one directory", " ".join(words), "nexus-ablate doctor runs")
    console, results = open_console(), []
    for check in checks(Path(*words or ["runs"]), "submit" in flags):
        results.append(check)
        if "json" in flags:
            continue
        missing = Text("missing ", "red" if check.need else "yellow")
        line = Text("ready   ", "green") if check.ready else missing
        line.append(f"{check.name:<24}", "bold").append(printable(check.detail))
        if check.fix:
            line.append(f"  -> {printable(check.fix)}", "dim")
        console.print(line, soft_wrap=True)
    broken = [check.name for check in results if check.need and not check.ready]
    if "json" in flags:
        print(strict_json({"ready": not broken, "checks": [check._asdict() for check in results]}, indent=2))
    elif broken:
        print(f"fix this before training any run: {', '.join(broken)}")
    return CONFIG if broken else OK


def checks(runs_dir: Path, submit: bool = False) -> Iterator[MachineCheck]:
    """Every check, one after the other.

    Args:
        runs_dir: The folder for runs.
        submit: Whether to let a SLURM job look for a file in `runs_dir`.
    """
    from nexus_ablate.data.cache import default_cache_dir
    from nexus_ablate.training.device import cxx_compiler

    yield from packages()
    yield device()
    yield directory("runs", runs_dir, "runs_dir=DIR")
    yield directory("cache", default_cache_dir(), "NEXUS_ABLATE_CACHE=DIR")
    yield wandb()
    compiler = cxx_compiler()
    none = "none: torch.compile cannot be used on the CPU"
    fix = "" if compiler else "train.compile=off, or install g++"
    yield MachineCheck("C++ compiler", bool(compiler), compiler or none, fix)
    for package, (name, install) in EXTRAS.items():
        version = _version(package)
        fix = "" if version else f"pip install '{install}'"
        yield MachineCheck(name, bool(version), version or "not installed", fix)
    yield from slurm(runs_dir, submit)


def packages() -> Iterator[MachineCheck]:
    """The installed packages that don't satisfy this package's requirements or can't be imported, or that all do."""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(text) for text in metadata.requires("nexus-ablate") or []]
    except metadata.PackageNotFoundError:
        yield MachineCheck("packages", False, "nexus-ablate is not installed: versions are unknown", "pip install -e .")
        return
    fit, modules = True, []
    for each in required:
        version = _version(each.name)
        is_needed = each.marker is None or each.marker.evaluate({"extra": ""})
        if is_needed:
            modules.append("hydra" if each.name == "hydra-core" else each.name.replace("-", "_"))
        if is_needed and not (version and each.specifier.contains(version, prereleases=True)):
            fit = False
            fix = f"pip install '{each.name}{each.specifier}'"
            yield MachineCheck(each.name, False, version or "not installed", fix, need=True)
    module, reason = import_error(tuple(modules)) if fit else ("", "")
    if module:
        fix = f"pip install --force-reinstall {module}"
        yield MachineCheck(module, False, f"cannot be imported: {reason}", fix, need=True)
    elif fit:
        detail = f"within their bounds, torch {_version('torch')}, Python {platform.python_version()}"
        yield MachineCheck("packages", True, detail, need=True)


@cache
def import_error(modules: tuple[str, ...]) -> tuple[str, str]:
    """The first module that cannot be imported, and why; two empty texts where all can.

    Another process imports them, as that may take seconds or end it.
    """
    loop = "import importlib, sys\nfor name in sys.argv[1:]: print(name, flush=True), importlib.import_module(name)"
    command = [sys.executable, "-P", "-c", loop, *modules]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        begun = (late.stdout or b"").decode().split()  # bytes, whatever `text` says
        return begun[-1] if begun else modules[0], f"it takes more than {IMPORT_SECONDS:g} s"
    if done.returncode == 0:
        return "", ""
    reason = (done.stderr.splitlines() or [f"status {done.returncode}"])[-1]
    return done.stdout.splitlines()[-1], reason


def device() -> MachineCheck:
    """The accelerator that `train.device=auto` would use, as far as it is known without torch."""
    from nexus_ablate.gpus import described_gpus, visible_gpus

    gpus = visible_gpus()
    if not gpus:
        mac = sys.platform == "darwin" and platform.machine() == "arm64"
        return MachineCheck("device", True, "Apple GPU (mps)" if mac else "CPU; no NVIDIA GPU is visible")
    count, torch = several(len(gpus), "GPU"), _version("torch")
    if "+cpu" in torch:
        fix = "install torch for CUDA: https://pytorch.org/get-started"
        return MachineCheck("device", False, f"{count}, but torch {torch} is built for the CPU", fix)
    names = ", ".join(f"{gpu.name}, {gpu.memory / 2**30:.0f} GiB" for gpu in described_gpus())
    return MachineCheck("device", True, f"{count} ({names or 'nvidia-smi reports no names'})")


def directory(name: str, path: Path, other: str) -> MachineCheck:
    """Whether files can be created and locked in a directory, and its free space."""
    import fcntl

    try:
        if any(part.is_file() for part in (path, *path.parents)):
            return MachineCheck(name, False, f"{path}: a file is where a directory is needed", other, need=True)
        there = _existing(path)
        free = shutil.disk_usage(there).free
        with tempfile.TemporaryFile(dir=there) as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return MachineCheck(name, False, f"{path}: {error.strerror}", f"make it writable, or {other}", need=True)
    fix = f"free some space, or {other}" if free < LITTLE_SPACE else ""
    return MachineCheck(name, not fix, f"{path}: {free / 2**30:,.1f} GiB free", fix, need=True)


def wandb() -> MachineCheck:
    """The meaning of `tracker=auto` on this machine."""
    from nexus_ablate.config.options import Option
    from nexus_ablate.track.account import credentials, resolve_mode

    mode = resolve_mode(Option("auto"))
    key = "a key is present" if credentials() else "no key"
    meaning = {"files": "runs are saved in files only", "wandb": "runs are mirrored", "wandb_offline": "offline copies"}
    fix = "" if mode == "wandb" else "for a mirror: set WANDB_API_KEY or run `wandb login`"
    return MachineCheck("W&B", mode != "files", f"{key}: {meaning[mode]}", fix)


def slurm(runs_dir: Path, submit: bool) -> Iterator[MachineCheck]:
    """The cluster, if this machine belongs to one."""
    absent = [command for command in ("sbatch", "squeue", "scontrol") if shutil.which(command) is None]
    if absent:
        fix = "studies run on this machine; or log in to a cluster"
        yield MachineCheck("SLURM", False, f"no {', '.join(absent)} here", fix)
        return
    command = ["sinfo", "--noheader", "--format=%R (%D nodes, %c cores and %m MB each, %G, %a)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        partitions = done.stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        partitions = []
    if not partitions:
        yield MachineCheck("SLURM", False, "sinfo does not answer", "is SLURM's controller running?")
        return
    yield MachineCheck("SLURM", True, f"partitions {', '.join(partitions)}".replace("(null)", "no GPUs"))
    if submit:
        yield shared(runs_dir)


def shared(runs_dir: Path) -> MachineCheck:
    """Whether a job on a compute node sees a file in the folder for runs."""
    path = _existing(runs_dir)
    job = ["srun", "--ntasks=1", "--time=1", "--mem=100", "--immediate=60", "test", "-e"]
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".doctor") as file:
            done = subprocess.run([*job, file.name], capture_output=True, text=True, timeout=SRUN_SECONDS, check=False)
        if done.returncode == 0:
            return MachineCheck("runs on nodes", True, f"a job saw a file in {path}")
        why = (done.stderr.strip().splitlines() or ["it is not there"])[0]
    except subprocess.TimeoutExpired:
        return MachineCheck("runs on nodes", False, "srun does not answer", "is SLURM's controller running?")
    detail = f"a job saw no file in {path}: {why}"
    return MachineCheck("runs on nodes", False, detail, "runs_dir on a shared file system")


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    there = path.absolute()
    while not there.is_dir() and there != there.parent:
        there = there.parent
    return there


def _version(package: str) -> str:
    """The installed version of a package; '' if it isn't installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
