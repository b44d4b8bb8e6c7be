"""The groups of options and of keys, and which of their members a command begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache

from nexus_ablate.config.options import Key, conf_dir, conf_yaml, option_files
from nexus_ablate.config.run_config import CLOSED_GROUPS, OPTION_GROUPS, RunConfig

GROUPS = (*OPTION_GROUPS, *CLOSED_GROUPS, "preset")


def choices_of(name: str) -> dict[str, str]:
    """The option that a file of conf/ chooses by group: `config` in all groups, `preset/gpt2` in some."""
    choices = {}
    for entry in conf_yaml(name).get("defaults", []):
        for group, option in entry.items() if isinstance(entry, dict) else ():
            choices[group.removeprefix("override /")] = option
    return {group: option for group, option in choices.items() if group in GROUPS}


def option_names(group: str) -> set[str]:
    if group in OPTION_GROUPS:
        return set(option_files(group))
    return {path.stem for path in conf_dir().joinpath(group).glob("*.yaml")}


def keys_of_file(name: str) -> Mapping[str, Key]:
    """The keys of a file of conf/, with its values as defaults: of `config`, `norm/rms`, `model/pico` and so on."""
    group, _, option = name.rpartition("/")
    return option_files(group)[option].keys if group in OPTION_GROUPS else _keys_of_dataclass(group, name)


@cache
def _keys_of_dataclass(group: str, name: str) -> Mapping[str, Key]:
    """The keys of a file that has those of a closed group's dataclass, or of `RunConfig`."""
    keys = {}
    for field in dataclasses.fields(CLOSED_GROUPS[group] if group else RunConfig):
        if "constraint" in field.metadata:
            key, constraint, meaning = field.name, field.metadata["constraint"], field.metadata["meaning"]
            default = constraint.accept(f"{group}.{key}" if group else key, conf_yaml(name)[key])
            keys[key] = Key(default, constraint, meaning)
    return keys


def default_keys() -> dict[str, Key | None]:
    """Every group (None), and every key beside the default options."""
    return keys_under({group: [option] for group, option in choices_of("config").items()})


def keys_under(chosen: Mapping[str, Sequence[str]]) -> dict[str, Key | None]:
    """Every group (None), and every key that may be set under the chosen options, by the name that is typed.

    Args:
        chosen: One or several options of each group. Of several that have a key, the last determines it.
    """
    keys = {**keys_of_file("config"), **dict.fromkeys(GROUPS)}
    for group in (*OPTION_GROUPS, *CLOSED_GROUPS):
        for option in chosen[group]:
            of_option = keys_of_file(f"{group}/{option}")
            keys |= {f"{group}.{key}": about for key, about in of_option.items() if key != "name"}
    return keys
