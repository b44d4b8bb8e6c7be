"""The groups of options and of keys, and which of their members a command begins with."""

from __future__ import annotations

from nexus_ablate.config.options import conf_dir, conf_yaml, option_files
from nexus_ablate.config.run_config import CLOSED_GROUPS, OPTION_GROUPS

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
