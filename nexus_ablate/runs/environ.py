"""The environment of a run: versions, machine, git commit and command line, without secrets."""

from __future__ import annotations

import os
import platform
import shlex
import socket
from importlib import metadata
from typing import Any

from nexus_ablate import __version__
from nexus_ablate.masking import mask
from nexus_ablate.provenance import git_state

_PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "safetensors", "tokenizers", "datasets", "wandb", "scipy")


def environment(argv: list[str]) -> dict[str, Any]:
    """Versions, machine, git commit and command line for env.json, and CUDA_VISIBLE_DEVICES."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "packages": {name: _package_version(name) for name in _PACKAGES},
        **git_state(),
        "command": mask(shlex.join(argv)),
    }


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
