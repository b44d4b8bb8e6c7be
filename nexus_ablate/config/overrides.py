"""Overrides checked against the schema before anything is composed, with suggestions that work."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection

from nexus_ablate.config.foreign_words import meaning, unknown_word
from nexus_ablate.config.grammar import show
from nexus_ablate.config.groups import GROUPS, choices_of, keys_under, option_names
from nexus_ablate.config.options import Key, option_files
from nexus_ablate.config.override_syntax import MOST_RUNS, WITH_LAUNCHER, Override, read_override, replacements
from nexus_ablate.config.run_config import OPTION_GROUPS
from nexus_ablate.errors import ConfigError

NO_KEY = "there is no key of this name"
BUDGETS = ("train.steps", "train.tokens", "train.flops")
_DECIMAL_COMMA = re.compile(r"\d+,\d+(e[+-]?\d+)?")
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}


def check_overrides(overrides: list[str], sweeps: bool, beside: Collection[str] = ()) -> list[Override]:
    """Read command-line overrides and check them against the schema, before anything is composed or created.

    Args:
        sweeps: Whether a key may have several values, as in a multirun.
        beside: Keys that may be meant too, those of a study.

    Returns:
        Those that are not about Hydra itself.

    Raises:
        ConfigError: An override cannot be read, names what does not exist, or contradicts another one.
    """
    given = []
    for override in map(read_override, overrides):
        if not override.is_hydra:
            given.append(override)
        elif not sweeps:
            raise ConfigError("only -m and study use Hydra's keys, those of a launcher", override.text, WITH_LAUNCHER)
    for former, later in replacements(given):
        if former.is_sweep:  # it would be lost
            both = f"{former.text},{later.typed}"
            fix = former.text if "(" in both else both
            if not sweeps:
                rest = [text for text in overrides if text not in (former.text, later.text)]
                fix = shlex.join(["nexus-ablate", "-m", *rest, fix])
            raise ConfigError(f"{later.name} is swept, and given twice", f"{former.text} {later.text}", fix)
    chosen = _chosen_options(given)
    keys = keys_under(chosen)
    for override in given:
        if override.name not in keys:
            raise _unknown_key(override, chosen, [*keys, *beside])
        if override.is_added:
            raise ConfigError("the key already exists", override.text, override.text.lstrip("+"))
        key = keys[override.name]
        if key is not None:
            _check_values(override, key)
        if override.is_sweep and not sweeps:
            raise _not_one_value(override, key, overrides)
    if (runs := math.prod(len(override.values) for override in given)) > MOST_RUNS:
        raise ConfigError(f"a multirun has at most {MOST_RUNS} runs", f"{runs} runs", "nexus-ablate -m seed=0,1,2")
    budgets = [override.text for override in given if override.name in BUDGETS]
    if len({text.partition("=")[0] for text in budgets}) > 1:
        raise ConfigError("a run has one budget", " and ".join(budgets), budgets[0])
    return given


def _chosen_options(given: list[Override]) -> dict[str, list[str]]:
    """The options that are chosen in each group, several where it is swept.

    Raises:
        ConfigError: There is no such option.
    """
    chosen = {group: [option] for group, option in choices_of("config").items()}
    named = {override.name: _options(override) for override in given if override.name in GROUPS}
    presets = [choices_of(f"preset/{preset}") for preset in named.get("preset", ())]
    for group in GROUPS:
        of_presets = [choices[group] for choices in presets if group in choices]
        chosen[group] = named.get(group) or of_presets or chosen[group]
    return chosen


def _options(override: Override) -> list[str]:
    """The options that an override of a group names."""
    group = override.name
    known, names = option_names(group), []
    for value in override.values:
        name = "none" if value is None and group == "preset" else show(value)
        if name not in known:
            typed = f"{group}={name}" if override.is_sweep else override.text
            raise unknown_word(f"{group} has no option of this name", typed, name, known, f"{group}={{}}")
        names.append(name)
    return names


def _unknown_key(override: Override, chosen: dict[str, list[str]], known: list[str]) -> ConfigError:
    """The error for a key that does not exist, or not beside the chosen options."""
    name, typed = override.name, override.typed
    group, _, key = name.partition(".")
    form = f"{{}}={typed}"
    if not key or group not in OPTION_GROUPS:
        return unknown_word(NO_KEY, override.text, name, known, form, otherwise="nexus-ablate list")
    option = f"{group}={','.join(chosen[group])}"
    problem = f"{option} has no key {key}"
    owners = [owner for owner in option_files(group).values() if key in owner.keys]
    if owners:
        suggested = _suggested_value(owners[0].keys[key], name, typed)
        fix, meant = f"{group}={owners[0].name} {name}={suggested}", meaning(override.text)
        return ConfigError(problem, override.text, meant if meant.startswith(f"{group}=") else fix)
    keys = [other for other in known if other.startswith(f"{group}.")]
    return unknown_word(problem, override.text, name, keys, form, otherwise=f"nexus-ablate list {group}")


def _check_values(override: Override, key: Key) -> None:
    """Raises:
    ConfigError: The key does not take a value of the override.
    """
    for value in override.values:
        if isinstance(value, str) and "${" in value:
            continue  # checked once it is replaced
        try:
            key.constraint.accept(override.name, value)
        except ConfigError as error:
            if error.fix == key.constraint.text:  # no word of it is near
                suggested = f"{override.name}={_suggested_value(key, override.name, override.typed)}"
                error.fix = _spelled_out(override) or suggested
            meant, problem = meaning(override.text), error.problem
            if _DECIMAL_COMMA.fullmatch(override.typed):
                problem += ", and a decimal has a point"
            names_a_value = meant and not meant.endswith(f"={override.typed}")  # else a word for another key
            raise ConfigError(problem, override.text, meant if names_a_value else error.fix) from None


def _spelled_out(override: Override) -> str:
    """The sweep that `seed=0-4` means; '' for any other value."""
    bounds = re.fullmatch(r"(\d{1,4})-(\d{1,4})", override.typed)
    if bounds is None or override.name != "seed":
        return ""
    seeds = range(int(bounds[1]), int(bounds[2]) + 1)
    return f"nexus-ablate -m seed={','.join(map(str, seeds))}" if 0 < len(seeds) <= 20 else ""


def _suggested_value(key: Key, name: str, typed: str) -> str:
    """The value as typed if the key takes it, or as it was probably meant: `20k`, `1_000`, `0,003` or a lone item of a
    list; else the default."""
    number = re.fullmatch(r"(\d{1,9}(?:[.,]\d{1,9})?(?:e[+-]?\d{1,3})?)([kKmMbB]?)", typed.replace("_", ""))
    forms = [typed, f"[{typed}]"] if typed else []
    if number is not None:
        forms.append(f"{float(number[1].replace(',', '.')) * _UNITS[number[2].lower()]:.10g}")
    for form in forms:
        try:
            given = read_override(f"{name}={form}")
            key.constraint.accept(name, given.values[0])
        except ConfigError:
            continue
        if not given.is_sweep:
            return form
    return show(key.default)


def _not_one_value(override: Override, key: Key | None, overrides: list[str]) -> ConfigError:
    """The error for a sweep, or a decimal comma, where a run takes one value."""
    takes_decimals = key is not None and any(interval.kind != "int" for interval in key.constraint.intervals)
    if takes_decimals and _DECIMAL_COMMA.fullmatch(override.typed):
        problem = "a run takes one value per key (-m trains each of several), and a decimal has a point"
        return ConfigError(problem, override.text, override.text.replace(",", "."))
    multirun = shlex.join(["nexus-ablate", "-m", *overrides])
    return ConfigError("a run takes one value per key", override.text, multirun)
