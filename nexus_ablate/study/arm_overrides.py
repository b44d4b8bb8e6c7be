"""Overrides in a study: read from an arm, merged, and distinguished from those that say how runs are carried out."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from typing import Any

import yaml

from nexus_ablate.config.grammar import show
from nexus_ablate.config.groups import default_keys
from nexus_ablate.config.overrides import BUDGETS
from nexus_ablate.config.run_config import OPTION_GROUPS, TrainConfig
from nexus_ablate.errors import ConfigError

YAML = (".yaml", ".yml")
_LAUNCH = ("runs_dir", *(f"train.{f.name}" for f in fields(TrainConfig) if not f.metadata["science"]))
"""Keys that say how runs are carried out: they belong to a launch and never to a study."""
OF_ONE_RUN = {"seed": "seeds=0,1,2", "experiment": "name=mine", "rerun": "leave rerun out"}
"""Keys that a study sets itself for each of its runs, with what is meant in a study."""


def overrides_of(value: Any, name: str = "an arm") -> list[str]:
    """Overrides from a list, or from one string as typed on a command line.

    Args:
        value: The list or the string.
        name: What they are of.

    Raises:
        ConfigError: The value is neither, or has a key that does not belong in an arm.
    """
    try:
        texts = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        problem = f"{name} cannot be read: {str(error).lower()}"
        raise ConfigError(problem, show(value), "[norm=rms, bias=on]") from error
    if not isinstance(texts, list) or not all(isinstance(text, str) and "=" in text for text in texts):
        raise ConfigError(f"{name} is a list of overrides", in_yaml(value), _meant(value, name.split()[-1]))
    for text in texts:
        key = key_of(text)
        if key in OF_ONE_RUN or says_how(key):
            fix = OF_ONE_RUN.get(key, "pass it on the command line of a launch")
            raise ConfigError(f"{key} cannot be part of {name}", text, fix)
    return texts


def _meant(value: Any, name: str) -> str:
    """The list of overrides that something else probably means: `[model=femto]` of `{model: femto}`."""
    if name in default_keys() and isinstance(value, str):  # `arms: {norm: layer}`
        value = {name: value}
    texts = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            texts += [f"{key}={show(option)}" for key, option in item.items()]
    return f"[{', '.join(texts or ['norm=rms', 'bias=on'])}]"


def in_yaml(value: Any) -> str:
    """A value as one writes it in a YAML: `[0, 1]`, `{norm: [layer, rms]}`."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.strip().removesuffix("...").strip()


def merged(*layers: list[str]) -> list[str]:
    """One override per key, those of a later list instead of those of an earlier one: a baseline, an arm, a launch.

    A list that chooses another option or another budget than those before it also removes the former one's keys. Within
    a list order does not matter, as on a command line.
    """
    kept: dict[str, str] = {}
    for overrides in layers:
        chosen = {key_of(text): text for text in overrides}
        exchanged = {group for group in OPTION_GROUPS if group in chosen and chosen[group] != kept.get(group)}
        sets_budget = not chosen.keys().isdisjoint(BUDGETS)
        for name in [*kept]:
            if name in chosen or name.partition(".")[0] in exchanged or (sets_budget and name in BUDGETS):
                del kept[name]
        kept |= chosen
    return list(kept.values())


def lost(baseline: list[str], arm: list[str]) -> list[str]:
    """The baseline's overrides that an arm doesn't take over, because it chooses another option that they are of."""
    kept = {key_of(text) for text in merged(baseline, arm)}
    return [text for text in baseline if key_of(text) not in kept and key_of(text) not in BUDGETS]


def is_override(word: str) -> bool:
    """Whether a word of a command is KEY=VALUE rather than a path that contains `=`."""
    return bool(re.fullmatch(r"[+\w./@-]+", word.partition("=")[0])) and "=" in word and not word.endswith(YAML)


def key_of(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def says_how(name: str) -> bool:
    return name in _LAUNCH or name.split(".")[0] == "tracker"
