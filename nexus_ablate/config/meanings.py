"""What a word means in other libraries and papers, for the `try:` line of an error."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from nexus_ablate.config.grammar import show
from nexus_ablate.config.groups import option_names
from nexus_ablate.config.options import conf_yaml
from nexus_ablate.config.override_syntax import MOST_RUNS
from nexus_ablate.config.run_config import OPTION_GROUPS


def synonyms() -> dict[str, Any]:
    """Names that other libraries and papers use for these verbs, keys, values and options."""
    return conf_yaml("synonyms")


def plain_word(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def meant_key(name: str, known: Iterable[str]) -> str:
    """The key, or the whole override or command, that `name` means in other libraries; '' if there is none."""
    words = {plain_word(word): key for word, key in synonyms()["keys"].items()}
    if meant := words.get(plain_word(name)):
        return meant
    last = name.rpartition(".")[2]
    owners = [key for key in known if key.rpartition(".")[2] == last]
    return owners[0] if len(owners) == 1 else words.get(plain_word(last), "")


def meant_path(group: str, value: str) -> str:
    """The overrides for a value that looks like a file, or like `owner/name` on a hub; '' for any other value."""
    forms = synonyms()["paths"].get(group)
    if forms is None or not re.fullmatch(r"[\w./~@+-]+", value):
        return ""
    if re.search(r"\.[A-Za-z]\w*$", value) or value.startswith(("/", ".", "~")):
        return forms["file"].format(value)
    return forms["hub"].format(value) if value.count("/") == 1 else ""


def meant_word(key: str, value: Any) -> str:
    """The value that another library's word means for a key; '' if there is none."""
    return synonyms()["values"].get(key, {}).get(plain_word(show(value)), "")


def meant_option(group: str, word: str) -> str:
    """The option of a group, or the override, that a word means; '' if there is none."""
    meant = {plain_word(other): option for other, option in synonyms()["options"].get(group, {}).items()}
    meant |= {plain_word(option): option for option in option_names(group)}
    return meant.get(plain_word(word), "")


def option_named(word: str) -> str:
    """`ffn=swiglu` for `swiglu`, or `preset=gpt2` for `gpt2`; '' for a word that names no option, or several."""
    groups = ("preset", *OPTION_GROUPS)
    named = {group: option for group in groups if (option := meant_option(group, word))}
    overrides = [option if "=" in option else f"{group}={option}" for group, option in named.items()]
    if "preset" in named:
        return overrides[0]
    return overrides[0] if len(overrides) == 1 and plain_word(word) not in ("none", "off", "on", "auto") else ""


def meant_seeds(typed: str) -> str:
    """`0,1,2` for `[0,1,2]`, `0..2`, `0-2` or `0 to 2`; '' for anything else."""
    if re.fullmatch(r"\[\d+(,\s*\d+)*\]", typed):
        return typed.strip("[]").replace(" ", "")
    ends = re.fullmatch(r"\s*(\d{1,9})\s*(?:\.\.|-|:|to)\s*(\d{1,9})\s*", typed)
    if ends is None or not 0 < int(ends[2]) - int(ends[1]) < MOST_RUNS:
        return ""
    return ",".join(str(seed) for seed in range(int(ends[1]), int(ends[2]) + 1))


def meant_number(typed: str) -> str:
    """`20000` for `20k` and `20_000`, `1500000` for `1.5M`; '' for anything else."""
    number = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([kKmMbB])", typed.replace("_", ""))
    if number is None:
        return ""
    value = float(number[1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[number[2].lower()]
    return f"{value:.0f}" if value == int(value) else ""


def meant_list(typed: str) -> str:
    """`[a.txt]` for `a.txt`."""
    return f"[{typed}]" if typed and not typed.startswith("[") else ""
