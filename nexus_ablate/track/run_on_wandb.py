"""A run's project, name, config and tags on W&B, all read from the run directory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nexus_ablate.config.options import AXES, Option, option_files
from nexus_ablate.runs import RunRecord
from nexus_ablate.runs.formats import WandbRun
from nexus_ablate.runs.lookup import id_of
from nexus_ablate.runs.reading import read_document
from nexus_ablate.track.account import redact

PLACE_FILE = "wandb.json"
MAX_TAG, MAX_NAME = 64, 128  # characters; W&B refuses a run with longer ones


def place_of(run_dir: Path, option: Option, project: str | None = None, entity: str | None = None) -> WandbRun:
    """Where a run goes: to the given project, else where it was before, else to the project of its `tracker` option.

    The id is made once and is the same in every project, so that a run that goes to another one and back is continued.
    It is random, because equal runs of two people are two runs; one that `wandb agent` started has the agent's.

    Raises:
        UserError: The file that says where the run was is damaged.
    """
    own_id = os.environ.get("WANDB_RUN_ID") if "WANDB_SWEEP_ID" in os.environ else None
    before = read_document(run_dir / PLACE_FILE, WandbRun) or {"id": own_id or secrets.token_hex(8)}
    if before.get("project") is None:
        keys = {key: part.default for key, part in option_files("tracker")["wandb"].keys.items()} | option.keys
        before |= {"project": str(keys["project"]), "entity": None if keys["entity"] == "none" else str(keys["entity"])}
    return WandbRun(before["id"], project or before["project"], entity or before.get("entity"))


def project_page(run_dir: Path) -> str:
    """The address of the project that a run was sent to; '' where W&B has not accepted it.

    Raises:
        UserError: The file that says where the run is is damaged.
    """
    place = read_document(run_dir / PLACE_FILE, WandbRun) or {}
    return place.get("url", "").partition("/runs/")[0]


def config_of(record: RunRecord) -> dict[str, Any]:
    """The nested configuration, the resolved values of `auto`, and flat `axis/norm: rms` entries to group by.

    Beside `study`, `arm` and `seed`, `id` is what the run is called here, and `repetition` is 2 for the second run of
    the same arm and seed. Secrets are masked.
    """
    flat = {f"axis/{axis}": name for axis, name in _axes(record).items()}
    names = {"study": record.study, "arm": record.arm, "seed": record.seed, "id": id_of(record.path)}
    return redact(names | {"repetition": record.rerun} | (record.config or {}) | flat)


def settings_of(
    record: RunRecord, place: WandbRun, mode: str, root: Path, init: float, finish: float
) -> dict[str, Any]:
    """Arguments of `wandb.Settings`.

    Args:
        record: The run.
        place: From `place_of`; the entity None is the account's default.
        mode: `online` or `offline`.
        root: W&B's own files go under it.
        init: Seconds until W&B must have accepted the run.
        finish: Seconds until it must have taken the remaining rows at the end.
    """
    tags = [f"{axis}={name}"[:MAX_TAG] for axis, name in _axes(record).items()]
    seed = f"/s{record.seed}"
    if record.rerun > 1:
        seed += f"-r{record.rerun}"
    return {
        "run_id": place.id,
        "project": place.project,
        "entity": place.entity,
        "resume": "allow",
        "mode": mode,
        "run_group": record.study[:MAX_NAME],
        "run_job_type": "train",
        "run_name": f"{record.arm[: MAX_NAME - len(seed)]}{seed}",
        "run_tags": tuple(dict.fromkeys(tags)),
        **quiet(root, init, finish),
    }


def quiet(root: Path, init: float, finish: float) -> dict[str, Any]:
    """Settings under which W&B records nothing but the rows it is given."""
    return {
        "root_dir": str(root),
        # The run must neither end nor replace a W&B run of the calling program.
        "reinit": "create_new",
        # By default the Stop button in the browser interrupts this process.
        "stop_fn": lambda: None,
        "silent": True,
        "quiet": True,
        "console": "off",
        "disable_code": True,
        "disable_git": True,
        "disable_job_creation": True,
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_save_requirements": False,
        # By default, a killed run would lose its last 15 s.
        "x_transaction_log_flush_interval": 1.0,
        "init_timeout": init,
        "finish_timeout": finish,
        "finish_timeout_raises": True,
    }


def _axes(record: RunRecord) -> dict[str, str]:
    """The option chosen on each axis."""
    config = record.config or {}
    return {axis: str(config[axis]["name"]) for axis in AXES if isinstance(config.get(axis), Mapping)}
