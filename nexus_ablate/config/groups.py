"""The groups of options and of keys, and which of their members a command begins with."""

from __future__ import annotations

import re

from nexus_ablate.config.options import conf_dir, option_files
from nexus_ablate.config.run_config import CLOSED_GROUPS, OPTION_GROUPS
from nexus_ablate.plain_data import load_yaml

GROUPS = (*OPTION_GROUPS, *CLOSED_GROUPS, "preset")


def default_choices() -> dict[str, list[str]]:
    defaults = load_yaml(conf_dir().joinpath("config.yaml").read_text(encoding="utf-8"))["defaults"]
    pairs = [next(iter(entry.items())) for entry in defaults if isinstance(entry, dict)]
    return {group: [name] for group, name in pairs if group in GROUPS}


def preset_choices(presets: list[str]) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for preset in presets:
        text = conf_dir().joinpath("preset", f"{preset}.yaml").read_text(encoding="utf-8")
        for group, name in re.findall(r"^\s*- override /(\w+): (\w+)", text, flags=re.MULTILINE):
            options.setdefault(group, []).append(name)
    return options


def option_names(group: str) -> set[str]:
    if group in OPTION_GROUPS:
        return set(option_files(group))
    return {path.stem for path in conf_dir().joinpath(group).glob("*.yaml")}
