"""The identity of a run (a hash of everything that can change its result) and the name of its arm."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexus_ablate.errors import ConfigError
from nexus_ablate.masking import mask

NAME_BYTES = 120
BASELINE = "baseline"
"""The name of the arm that differs in nothing."""
_UNSAFE = re.compile(r"^\.|[^A-Za-z0-9=,.@_+-]")
NAME = re.compile(r"[A-Za-z0-9=,_+-][A-Za-z0-9=,.@_+-]*")
"""The name of an experiment's or an arm's directory."""


@dataclass(frozen=True)
class Identity:
    """The hashes that identify a run.

    Attributes:
        run_hash: sha256 over everything that can change its result.
        arm_hash: The same without the seed.
        config_hash: Without the seed and the code: equal for two runs of the same configuration.
    """

    run_hash: str
    arm_hash: str
    config_hash: str

    @property
    def hash8(self) -> str:
        return self.run_hash[:8]


def identity(science: dict[str, Any], data_fingerprint: str, source: str, plugins: dict[str, str]) -> Identity:
    """The identity of a run.

    Args:
        science: The part of the configuration that can change the result, as plain data, with its "seed".
        data_fingerprint: Identifies the data.
        source: `provenance.source_hash()`.
        plugins: The hash of each plugin's source by name.
    """

    def sha256(**parts: Any) -> str:
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    seedless = dict(science)
    seed = seedless.pop("seed")
    config_hash = sha256(science=seedless, data=data_fingerprint)
    arm_hash = sha256(config=config_hash, source=source, plugins=plugins)
    return Identity(sha256(arm=arm_hash, seed=seed), arm_hash, config_hash)


def arm_name(differences: dict[str, str]) -> str:
    """How an arm differs from the baseline, as a directory name of at most 120 bytes: `norm=layer,placement=post`."""
    if not differences:
        return BASELINE
    full = ",".join(f"{key}={value}" for key, value in sorted(differences.items()))
    readable = mask(full).replace("/", "over")
    name = _UNSAFE.sub("_", readable)
    if name == readable and len(name) <= NAME_BYTES:
        return name
    # Two different arms must not get the same name by escaping or shortening.
    ending = ",+" + hashlib.sha256(full.encode("utf-8", "backslashreplace")).hexdigest()[:6]
    if len(name) + len(ending) > NAME_BYTES:
        name = name[: NAME_BYTES - len(ending)]
        name = name[: name.rfind(",")] if "," in name else name
    return name + ending


def run_path(runs_dir: str | Path, experiment: str, arm: str, seed: int, identity: Identity) -> Path:
    """`<runs_dir>/<experiment>/<arm>/s<seed>-<hash8>`.

    Raises:
        ConfigError: The experiment or arm can't name a directory.
    """
    for kind, name in (("experiment", experiment), ("arm", arm)):
        if not NAME.fullmatch(name) or len(name) > NAME_BYTES:
            raise ConfigError(f"this {kind} cannot name a directory", name, "letters, digits and = , . @ _ + - only")
    return Path(runs_dir) / experiment / arm / f"s{seed}-{identity.hash8}"
