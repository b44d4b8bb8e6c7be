"""What a run ran in: versions, machine, git commit and command line, without secrets."""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
from importlib import metadata
from typing import Any

from nexus_ablate import __version__
from nexus_ablate.provenance import git_state

_PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "safetensors", "tokenizers", "datasets", "wandb", "scipy")


def environment(argv: list[str]) -> dict[str, Any]:
    """Versions, machine, git commit and command line, for env.json; of environment variables, which GPUs were given."""
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


_SECRET_KEY = r"(?:\w+_)?(?:api_?key|secret|password)|(?:hf_|api_|auth_|access_)?token"
_SECRETS = (
    (re.compile(r"(?<=://)[^/\s'\"]+@"), "<secret>@"),
    (re.compile(rf"(?i)(?P<key>(?<![\w])(?:{_SECRET_KEY})=)[^\s'\"]+"), r"\g<key><secret>"),
    (re.compile(rf"(?i)(?P<key>--(?:{_SECRET_KEY.replace('_', '[_-]')})\s)\s*\S+"), r"\g<key><secret>"),
    (re.compile(r"\bhf_[A-Za-z0-9]{20,}"), "<secret>"),
)


def mask(text: str) -> str:
    """`text` with <secret> for passwords in URLs, values of secret keys, and what secret environment variables hold."""
    for name, value in os.environ.items():
        if len(value) >= 8 and re.search(r"(KEY|TOKEN|SECRET|PASSWORD)$", name):
            text = text.replace(value, "<secret>")
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text
