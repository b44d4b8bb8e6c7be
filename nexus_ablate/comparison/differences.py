"""How two configurations differ, read from their config.yaml alone."""

from __future__ import annotations

from typing import Any

from nexus_ablate.config.grammar import show
from nexus_ablate.config.run_config import flat


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


def _text(keys: dict[str, Any], key: str) -> str:
    if key not in keys:
        return ""
    value = keys[key]
    return show(value["name"]) if isinstance(value, dict) and "name" in value else show(value)
