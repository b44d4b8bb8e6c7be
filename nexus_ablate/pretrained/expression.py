"""Express a config.json as overrides, or list what can't be expressed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexus_ablate.config.compose import compose_values
from nexus_ablate.config.grammar import show
from nexus_ablate.config.options import AXES, default_option, option_files
from nexus_ablate.config.run_config import ModelConfig, RunConfig, keys_of
from nexus_ablate.errors import ConfigError
from nexus_ablate.pretrained.families import FAMILIES, Family, Settings
from nexus_ablate.pretrained.fields import Fields
from nexus_ablate.runs.files import read_regular

CONFIG_BYTES = 2**24


@dataclass(frozen=True)
class Expression:
    """A published decoder as overrides.

    Attributes:
        overrides: The overrides for its architecture and sizes.
        context: The number of its positions, if it gives one.
    """

    family: Family
    model_type: str
    overrides: list[str]
    context: int


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json, given by its path or its directory.

    Raises:
        ConfigError: It doesn't exist, or isn't a JSON mapping.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        data = read_regular(file, CONFIG_BYTES, follow=True)
    except OSError as error:
        raise ConfigError("config.json cannot be read", f"{file}: {error.strerror}", "copy it again") from error
    if data is None:
        fix = "give a config.json or the directory that holds it"
        raise ConfigError("there is no config.json here", str(path), fix)
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError("config.json is not valid JSON", f"{file}: {error}", "copy it again") from error
    if not isinstance(values, dict):
        raise ConfigError("config.json is not a mapping", str(file), "copy it again")
    return values


def express(values: dict[str, Any]) -> Expression:
    """The overrides that express a config.json.

    Raises:
        ConfigError: Its architecture is unknown, or can't be expressed; the message lists everything that can't be.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError("config.json does not name its architecture", f"model_type={kind!r}", "copy it again")
    if kind not in FAMILIES:
        raise ConfigError("this architecture is not supported", f"model_type={kind}", f"one of {', '.join(FAMILIES)}")
    family, fields = FAMILIES[kind], Fields(values)
    try:
        settings = family.settings(fields)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ConfigError("config.json has a value of the wrong type", f"{kind}: {error}", "copy it again") from error
    fields.finish()
    if fields.refused:
        problem = f"this {kind} cannot be expressed"
        raise ConfigError(
            problem, "; ".join(dict.fromkeys(fields.refused)), "`nexus-ablate list` shows the options that exist"
        )
    preset = settings.pop("preset", family.preset)
    return Expression(family, kind, overrides_of(settings, preset), settings["model.context"])


def overrides_of(settings: Settings, preset: str) -> list[str]:
    """The overrides that turn a preset into the settings; keys that aren't in the settings are as in the baseline."""
    start, base = compose_values([f"preset={preset}"]), compose_values([])
    overrides = [f"preset={preset}"]
    for axis in AXES:
        name = settings.get(axis, base[axis]["name"])
        values = start[axis]
        if values["name"] != name:
            overrides.append(f"{axis}={name}")
            values = default_option(axis, name).keys
        for key, spec in option_files(axis)[name].keys.items():
            value = spec.constraint.accept(f"{axis}.{key}", settings.get(f"{axis}.{key}", spec.default))
            if value != spec.constraint.accept(f"{axis}.{key}", values[key]):
                overrides.append(f"{axis}.{key}={show(value)}")
    scalars = {key: c for key, c in keys_of(RunConfig).items() if key in ARCHITECTURE}
    for key, constraint in scalars.items():
        value = constraint.accept(key, settings.get(key, base[key]))
        if value != constraint.accept(key, start[key]):
            overrides.append(f"{key}={show(value)}")
    for key, constraint in keys_of(ModelConfig).items():
        name = f"model.{key}"
        if name in settings and constraint.accept(name, settings[name]) != base["model"][key]:
            overrides.append(f"{name}={show(settings[name])}")
    return overrides


ARCHITECTURE = (
    *("bias", "norm_bias", "d_ff_ratio", "final_norm", "embed_scale", "embed_norm", "d_embed", "tie_embeddings"),
    *("head_bias", "logit_scale", "qkv_bias", "attn_out_bias", "ffn_bias", "n_kv_heads", "nope_every", "clip_qkv"),
    *("window", "attn_scale", "attn_softcap", "final_softcap", "kv_bias", "sink_token", "vocab_size"),
)
"""The top-level keys that determine the function."""
