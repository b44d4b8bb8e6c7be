"""study.yaml: the study as it was first launched, in the folder of its runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

from nexus_ablate.config.run_config import flat
from nexus_ablate.errors import ConfigError, UserError
from nexus_ablate.masking import mask
from nexus_ablate.plain_data import UNREADABLE, load_yaml
from nexus_ablate.runs.files import atomic_write_text
from nexus_ablate.runs.reading import damaged, read_text
from nexus_ablate.study.study import Study, encode, from_values


def load(folder: Path) -> Study | None:
    """The study of a folder; None if there is no study.yaml.

    Raises:
        UserError: It is damaged, or of an earlier version.
    """
    path = folder / "study.yaml"
    text = read_text(path)
    if text is None:
        return None
    try:
        values = load_yaml(text)
        if not isinstance(values, dict):
            raise ValueError("not a mapping" if text.strip() else "the file is empty")
        needed = ("seeds",) if "multirun" in values else ("arms", "seeds")
        if missing := [key for key in needed if key not in values]:
            raise ValueError(f"{missing[0]} is missing")
        name, _, setting = folder.resolve().name.partition("@")
        return from_values(values | {"name": name, "setting": setting})
    except ConfigError as error:
        raise UserError(f"{path}: {error.problem}", error.got, error.fix) from None
    except UNREADABLE as error:
        raise damaged(path, str(error)) from None


def save(study: Study, folder: Path) -> None:
    """Write a study's study.yaml, without secrets.

    Raises:
        StorageError: The disk refused; an old file is untouched.
    """
    text = yaml.safe_dump(mask(encode(study)), sort_keys=False, allow_unicode=True, width=120)
    atomic_write_text(folder / "study.yaml", text)


def planned(study: Study) -> dict[str, Any]:
    """What was planned before the first result, for env.json of each run: study.yaml is held against it."""
    values = encode(study)
    seeds = [seed for seed in study.seeds if seed not in study.added_seeds]
    plan = {"seeds": seeds, "endpoints": values["endpoints"]}
    return plan | {key: getattr(study, key) for key in ("lr_grid", "match", "worth")}


def config_hash(config: dict[str, Any], without_rate: bool = False) -> str:
    """A hash of a configuration with the defaults of its options, without the seed.

    Args:
        config: As in config.yaml.
        without_rate: Equal for all learning rates, as for an arm of a study with `lr_grid`.
    """
    left_out = ("optim.lr",) if without_rate else ()
    values = {key: value for key, value in flat(config).items() if key not in left_out}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]
