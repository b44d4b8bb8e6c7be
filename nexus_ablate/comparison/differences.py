"""How two configurations differ, read from their config.yaml alone, so that runs of any version can be compared."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from nexus_ablate.config.grammar import show
from nexus_ablate.config.run_config import RunConfig, flat
from nexus_ablate.study.schema import Study

CUT = re.compile(r",\+[0-9a-f]{6}$")
"""The ending of an arm's name that was too long for a directory."""


def differing(config: dict[str, Any], base: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Keys that were set differently: key to (baseline's value, arm's value); '' for a key that does not exist."""
    values, base_values = flat(config), flat(base)
    differences = {}
    for key in base_values | values:
        if key not in values or key not in base_values or values[key] != base_values[key]:
            differences[key] = (_text(base_values, key), _text(values, key))
    return differences


def consequences(config: dict[str, Any], base: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The same for the resolved values of `auto`: what an arm changes besides the requested overrides."""
    values, base_values = config.get("resolved") or {}, base.get("resolved") or {}
    left_out = {key.split(".")[-1] for key in differing(config, base)} | {"prescribed", "notes"}
    changed = {}
    for key, value in values.items():
        if key in base_values and value != base_values[key] and key not in left_out:
            changed[key] = (_text(base_values, key), _text(values, key))
    return changed


def label(config: dict[str, Any], base: dict[str, Any]) -> str:
    """An arm in words: `norm=layer, bias=on`. If the option itself differs, its keys are left out."""
    differences = differing(config, base)
    words = []
    for key, (_, value) in differences.items():
        option = key.partition(".")[0]
        if value and (option == key or option not in differences):
            words.append(f"{key}={value}")
    return ",".join(words)


def changes(name: str, config: dict[str, Any]) -> set[str]:
    """How an arm differs from the default configuration, from its name or, if that was cut, its configuration."""
    understood = _understood(config) if CUT.search(name) else None
    if understood is None:  # where it was cut, the name is all there is
        return set(name.split(",")) - {"baseline"}
    from nexus_ablate.config.compose import differences

    return {f"{key}={value}" for key, value in differences(understood).items()}


def _understood(config: dict[str, Any]) -> RunConfig | None:
    """A config.yaml as this version reads it; None where it was written by another one or with a plugin's option."""
    from nexus_ablate.config.resolve import from_values
    from nexus_ablate.errors import ConfigError

    try:
        return from_values({key: value for key, value in config.items() if key != "resolved"})
    except ConfigError:
        return None


def science_key(config: dict[str, Any], without: tuple[str, ...] = ()) -> str:
    """A text that is equal for configurations that differ only in the keys of `without`."""
    return json.dumps({k: v for k, v in flat(config).items() if k not in without}, sort_keys=True, default=str)


def config_hash(config: dict[str, Any], study: Study) -> str:
    """The hash that a study keeps of an arm's configuration: the defaults of its options included, without the seed.

    With a learning-rate grid, without the rate.
    """
    key = science_key(config, without=("optim.lr",) if study.lr_grid else ())
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def departure(config: dict[str, Any], arm: str, study: Study) -> str:
    """What a run's configuration is, if not the one that its study keeps for the arm; '' if it is that one.

    An arm that the study does not know, such as one trained into its folder by hand, has none to depart from.
    """
    key = config_hash(config, study)
    latest = {hashes[-1] for hashes in study.configs.values()}
    known = {former for hashes in study.configs.values() for former in hashes}
    if key in latest or (key not in known and arm not in study.configs):
        return ""
    return "was replaced" if key in known else "is not that of the study"


def _text(keys: dict[str, Any], key: str) -> str:
    if key not in keys:
        return ""
    value = keys[key]
    return show(value["name"]) if isinstance(value, dict) and "name" in value else show(value)
