"""Checks whether this machine is ready for runs. Doesn't import torch, and uses the network only on request.

Each check reports one thing; `need` says whether runs are impossible without it. Credentials are reported as present or
absent, and never shown.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from nexus_ablate.config.options import Option
from nexus_ablate.data.cache import default_cache_dir
from nexus_ablate.execution.cluster_queue import accounting
from nexus_ablate.gpus import visible_gpus
from nexus_ablate.track import resolve_mode
from nexus_ablate.track.account import credentials
from nexus_ablate.training.device import IdleCores, cxx_compiler

LITTLE_SPACE = 2 * 2**30
"""Fewest free bytes: enough for a study of small runs with checkpoints, token files and logs."""

SHARED_FILE_SYSTEMS = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "wekafs",
    "panfs",
    "pvfs2",
    "glusterfs",
    "afs",
)

EXTRAS = {
    "submitit": "nexus-ablate[slurm]",
    "hydra_plugins.hydra_submitit_launcher": "nexus-ablate[slurm]",
    "hydra_plugins.hydra_joblib_launcher": "hydra-joblib-launcher",
    "hydra_plugins.hydra_ray_launcher": "hydra-ray-launcher",
    "wandb_workspaces": "nexus-ablate[dashboard]",
}
"""Optional modules, and the packages that install them."""


@dataclass(frozen=True)
class MachineCheck:
    """The result of one check.

    Attributes:
        name: What was checked.
        ready: Whether it can be used.
        detail: What was found.
        fix: How to fix it; '' if nothing is missing.
        need: Whether runs are impossible without it.
    """

    name: str
    ready: bool
    detail: str
    fix: str = ""
    need: bool = False


def checks(runs_dir: Path, online: bool = False, submit: bool = False) -> Iterator[MachineCheck]:
    """Every check, one after the other.

    Args:
        runs_dir: The folder for runs.
        online: Whether to connect to W&B and the Hugging Face Hub.
        submit: Whether to let a SLURM job look for a file in `runs_dir`.
    """
    yield python()
    yield from packages()
    yield from device()
    yield MachineCheck("cores", True, f"{IdleCores.cores()} of {os.cpu_count()} for a process")
    yield directory("runs", runs_dir, "runs_dir=DIR")
    yield directory("cache", default_cache_dir(), "NEXUS_ABLATE_CACHE=DIR")
    yield wandb()
    yield hugging_face()
    if online:
        yield reachable("W&B's server", os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai")
        yield reachable("Hugging Face's hub", os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    yield compiler()
    yield from extras()
    yield from slurm(runs_dir, submit)


def python() -> MachineCheck:
    version = platform.python_version()
    ready = (3, 11) <= sys.version_info < (3, 14)
    return MachineCheck("python", ready, version, "" if ready else "Python 3.11, 3.12 or 3.13", need=True)


def packages() -> Iterator[MachineCheck]:
    """Whether the installed packages satisfy this package's requirements."""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(text) for text in metadata.requires("nexus-ablate") or []]
    except metadata.PackageNotFoundError:
        yield MachineCheck("packages", False, "nexus-ablate is not installed: versions are unknown", "pip install -e .")
        return
    required = [each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    wrong = 0
    for each in required:
        try:
            version = metadata.version(each.name)
        except metadata.PackageNotFoundError:
            version = "not installed"
        if version == "not installed" or not each.specifier.contains(version, prereleases=True):
            wrong += 1
            yield MachineCheck(each.name, False, version, f"pip install '{each.name}{each.specifier}'", need=True)
    if not wrong:
        yield MachineCheck(
            "packages", True, f"{len(required)} within their bounds, torch {_version('torch')}", need=True
        )


def device() -> Iterator[MachineCheck]:
    """The accelerator that `train.device=auto` would use, as far as it is known without torch."""
    gpus = visible_gpus()
    if not gpus:
        mac = sys.platform == "darwin" and platform.machine() == "arm64"
        yield MachineCheck("device", True, "Apple GPU (mps)" if mac else "CPU; no NVIDIA GPU is visible")
        return
    names = _said("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    said = "; ".join(names.splitlines()) if names else "nvidia-smi reports no names"
    if "+cpu" in _version("torch"):
        fix = "install torch for CUDA: https://pytorch.org/get-started"
        yield MachineCheck(
            "device", False, f"{len(gpus)} GPUs, but torch {_version('torch')} is built for the CPU", fix
        )
        return
    yield MachineCheck("device", True, f"{len(gpus)} GPUs ({said})")


def directory(name: str, path: Path, other: str) -> MachineCheck:
    """Whether files can be created and locked in a directory, and its free space."""
    there = path.absolute()
    while not there.is_dir() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            locks = _lockable(file.fileno())
        free = shutil.disk_usage(there).free
    except OSError as error:
        return MachineCheck(name, False, f"{path}: {error.strerror}", f"make it writable, or {other}", need=True)
    detail = f"{path}: {free / 2**30:,.0f} GiB free" if free >= 2**30 else f"{path}: {free / 2**20:,.0f} MiB free"
    if free < LITTLE_SPACE:
        return MachineCheck(name, False, detail, f"free some space, or {other}", need=True)
    if not locks:
        return MachineCheck(name, True, f"{detail}; no file locks there: a killed run is taken over after two minutes")
    return MachineCheck(name, True, detail, need=True)


def _lockable(descriptor: int) -> bool:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def wandb() -> MachineCheck:
    """The meaning of `tracker=auto` on this machine."""
    mode = resolve_mode(Option("auto"), os.environ)
    key = "a key is present" if credentials(os.environ) else "no key"
    meaning = {"files": "runs are saved in files only", "wandb": "runs are mirrored", "wandb_offline": "offline copies"}
    fix = "" if mode == "wandb" else "for a mirror: set WANDB_API_KEY or run `wandb login`"
    return MachineCheck("W&B", mode != "files", f"{key}: {meaning[mode]}", fix)


def hugging_face() -> MachineCheck:
    """The Hub's token and cache, which data=hub uses."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    token = os.environ.get("HF_TOKEN") or (home / "token").is_file()
    offline = ", HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
    cached = "a cache" if (home / "hub").is_dir() or (home / "datasets").is_dir() else "no cache yet"
    detail = f"{'a token' if token else 'no token'}, {cached} in {home}{offline}"
    return MachineCheck(
        "Hugging Face", True, detail, "" if token else "only private data needs a token: `hf auth login`"
    )


def reachable(name: str, url: str) -> MachineCheck:
    """Whether a connection to a server can be made; nothing is sent."""
    parts = urlsplit(url)
    host, port = parts.hostname or url, parts.port or (80 if parts.scheme == "http" else 443)
    try:
        with socket.create_connection((host, port), timeout=5):
            return MachineCheck(name, True, f"{host}:{port} answers")
    except OSError as error:
        return MachineCheck(name, False, f"{host}:{port}: {error}", "train with tracker=files and local data meanwhile")


def compiler() -> MachineCheck:
    """The C++ compiler that torch.compile needs on a CPU."""
    detail = cxx_compiler()
    fix = "" if detail else "train.compile=off, or install g++"
    return MachineCheck("C++ compiler", bool(detail), detail or "none: torch.compile cannot be used on the CPU", fix)


def extras() -> Iterator[MachineCheck]:
    """Optional packages."""
    for module, package in EXTRAS.items():
        name = module.rpartition(".")[2].replace("_", " ")
        try:
            there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            there = False
        yield MachineCheck(
            name, there, "installed" if there else "not installed", "" if there else f"pip install '{package}'"
        )


def slurm(runs_dir: Path, submit: bool) -> Iterator[MachineCheck]:
    """The cluster, if this machine belongs to one."""
    absent = [command for command in ("sbatch", "squeue", "scontrol") if shutil.which(command) is None]
    if absent:
        yield MachineCheck(
            "SLURM", False, f"no {', '.join(absent)} here", "studies run on this machine; or log in to a cluster"
        )
        return
    answer = _said("sinfo", "--noheader", "--format=%R %a %l %D %G")
    if not answer:
        yield MachineCheck("SLURM", False, "sinfo does not answer", "is SLURM's controller running?")
        return
    rows = [line.split() for line in answer.splitlines() if line]
    names = ", ".join(f"{r[0]} ({r[3]} nodes, {r[4].replace('(null)', 'no GPUs')}, {r[1]})" for r in rows if len(r) > 4)
    yield MachineCheck("SLURM", True, f"partitions {names}")
    answer = accounting()
    fix = "" if answer else "`study NAME --cluster slurm` needs none; -m hydra/launcher=slurm would wait forever"
    yield MachineCheck("sacct", answer, "answers" if answer else "absent, or without a database", fix)
    settings = dict(re.findall(r"^(\w+)\s*=\s*(.*)$", _said("scontrol", "show", "config"), flags=re.MULTILINE))
    if settings.get("PreemptMode", "OFF") != "OFF":
        sent = "preempt_send_user_signal" in settings.get("SlurmctldParameters", "")
        detail = (
            "runs are signalled before preemption" if sent else "no preempt_send_user_signal in SlurmctldParameters"
        )
        fix = "" if sent else "a preempted run resumes from its last checkpoint: set train.checkpoint_every"
        yield MachineCheck("preemption", sent, detail, fix)
    yield shared(runs_dir, submit)


def shared(runs_dir: Path, submit: bool) -> MachineCheck:
    """Whether compute nodes see the runs."""
    path = runs_dir.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    if submit:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".doctor") as file:
            done = subprocess.run(
                ["srun", "--ntasks=1", "--time=1", "--mem=100", "--immediate=60", "test", "-e", file.name],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        if done.returncode == 0:
            return MachineCheck("runs on nodes", True, f"a job saw a file in {path}")
        why = (done.stderr.strip().splitlines() or ["it is not there"])[0]
        return MachineCheck(
            "runs on nodes", False, f"a job saw no file in {path}: {why}", "runs_dir on a shared file system"
        )
    kind = _said("stat", "--file-system", "--format=%T", str(path)).strip()
    if kind in SHARED_FILE_SYSTEMS:
        return MachineCheck("runs on nodes", True, f"{path} is on {kind}")
    fix = "nexus-ablate doctor --submit checks it with a job"
    return MachineCheck(
        "runs on nodes", False, f"{path} is on {kind or 'an unknown file system'}, maybe a local one", fix
    )


def _said(*command: str) -> str:
    """The output of a command; '' if it doesn't exist or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
