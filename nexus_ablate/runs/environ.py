"""What a run ran in: versions, machine, code state and command line, without secrets."""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from nexus_ablate import __version__

_PACKAGES = ("torch", "numpy", "hydra-core", "omegaconf", "safetensors", "tokenizers", "datasets", "wandb", "scipy")


def environment(argv: list[str]) -> dict[str, Any]:
    """Versions, machine, code state and command line, for env.json; of environment variables, which GPUs were given."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "packages": {name: _package_version(name) for name in _PACKAGES},
        **_git_state(Path(__file__).resolve().parent.parent),
        "command": mask(shlex.join(argv)),
    }


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git_state(root: Path) -> dict[str, Any]:
    """Commit and uncommitted changes of the checkout at `root`; None where it is none or git is absent."""

    def git(*arguments: str) -> str | None:
        variables = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, env=variables, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if not (root / ".git").exists():  # an installed package may lie inside a checkout of something else
        return {"git_commit": None, "git_dirty": None}
    changes = git("status", "--porcelain")
    return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": None if changes is None else bool(changes)}


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
