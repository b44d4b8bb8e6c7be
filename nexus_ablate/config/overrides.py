"""Overrides checked against the schema before anything is composed, with suggestions that work."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection
from typing import Any

from nexus_ablate.config.grammar import Constraint, show
from nexus_ablate.config.groups import GROUPS, choices_of, option_names
from nexus_ablate.config.meanings import (
    meant_key,
    meant_list,
    meant_number,
    meant_path,
    meant_seeds,
    meant_word,
    option_named,
    plain_word,
    synonyms,
)
from nexus_ablate.config.options import OPTIONS, Key, conf_yaml, option_files
from nexus_ablate.config.override_syntax import MOST_RUNS, Override, read_override
from nexus_ablate.config.run_config import CLOSED_GROUPS, OPTION_GROUPS, RunConfig, keys_of
from nexus_ablate.errors import ConfigError, did_you_mean, unknown

NO_KEY = "there is no key of this name"


def check_overrides(overrides: list[str], sweeps: bool, beside: Collection[str] = ()) -> list[Override]:
    """Read command-line overrides and check them against the schema, before anything is composed or created.

    Args:
        sweeps: Whether a key may have several values, as in a multirun.
        beside: Keys that may be meant too, those of a study.

    Returns:
        Those that are not about Hydra itself.

    Raises:
        ConfigError: An override cannot be read, names what does not exist (all of these are named), or contradicts
            another one.
    """
    given = [override for override in map(read_override, overrides) if not override.is_hydra]
    _check_given_once(given)
    if wrong := _wrong_names(given, beside):
        raise together(wrong)
    if (runs := math.prod(len(override.values) or 1 for override in given)) > MOST_RUNS:
        raise ConfigError(f"a multirun has at most {MOST_RUNS} runs", f"{runs} runs", "nexus-ablate -m seed=0,1,2")
    names = {override.name for override in given}
    budget = [key for key in ("train.steps", "train.tokens", "train.flops") if key in names]
    if len(budget) > 1:
        raise ConfigError("a run has one budget", " and ".join(budget), "give one of them")
    swept = [override.text for override in given if override.is_sweep]
    if swept and not sweeps:
        raise ConfigError("a run takes one value per key", " ".join(swept), _multirun_of(overrides))
    return given


def _default_choices() -> dict[str, list[str]]:
    return {group: [option] for group, option in choices_of("config").items()}


def _check_given_once(given: list[Override]) -> None:
    """Raises:
    ConfigError: A key is swept and then given again: the last one counts, and the sweep would be lost.
    """
    before: dict[str, Override] = {}
    for override in given:
        former = before.get(override.name)
        if former is not None and former.is_sweep:
            fix = f"{former.text},{override.typed}"
            if "(" in fix:
                fix = former.text if "(" in former.text else override.text
            raise ConfigError(f"{override.name} is swept, and given twice", f"{former.text} {override.text}", fix)
        before[override.name] = override


def _wrong_names(given: list[Override], beside: Collection[str]) -> list[ConfigError]:
    """An error for each option, key and value that does not exist, options first.

    Keys of an option that does not exist, or of what a preset that does not exist would choose, are not checked.
    """
    wrong = []
    chosen, unknown_groups = _default_choices(), set()
    for override in given:
        if override.name not in GROUPS:
            continue
        try:
            names = _check_choices(override.name, override.values, "" if override.is_sweep else override.typed)
        except ConfigError as error:
            wrong.append(error)
            unknown_groups |= {*OPTION_GROUPS} if override.name == "preset" else {override.name}
            continue
        chosen[override.name] = names
        if override.name == "preset":
            of_presets = [choices_of(f"preset/{preset}") for preset in names]
            for group in set(GROUPS) - {other.name for other in given}:
                chosen[group] = [choices[group] for choices in of_presets if group in choices] or chosen[group]
    for override in given:
        group, _, key = override.name.partition(".")
        if key and group in unknown_groups:
            continue
        try:
            if override.is_added:
                raise _added(override, chosen)
            if override.name not in GROUPS:
                _check_values(override.name, override.values, chosen, override.typed)
        except ConfigError as error:
            if error.problem == NO_KEY and (meant := did_you_mean(override.name, beside)):
                error = ConfigError(NO_KEY, error.got, f"{meant}={override.typed}")
            wrong.append(error)
    return wrong


def _added(override: Override, chosen: dict[str, list[str]]) -> ConfigError:
    """The error for `+KEY=VALUE`."""
    if override.name in _known_keys(chosen):
        return ConfigError("the key already exists", override.text, override.text.lstrip("+"))
    return _unknown_key(override.name, override.values, chosen, override.typed)


def together(wrong: list[ConfigError]) -> ConfigError:
    """One error for several, whose suggestions can be typed together where all of them are overrides."""
    if len(wrong) == 1:
        return wrong[0]
    problems = list(dict.fromkeys(error.problem for error in wrong))
    fixes = [error.fix for error in wrong]
    are_overrides = all(re.match(r"[\w.]+=", fix) for fix in fixes)
    problem = "there are no keys of these names" if problems == [NO_KEY] else "; ".join(problems)
    return ConfigError(problem, " ".join(error.got for error in wrong), (" " if are_overrides else "; ").join(fixes))


def _check_choices(group: str, values: list[Any], typed: str = "") -> list[str]:
    """The options that the values name.

    Args:
        typed: The value as the user typed it, for the error: `true` is a boolean here.
    """
    names = option_names(group)
    chosen = []
    for value in values:
        name = show(value) if value is not None else "none" if group == "preset" else "null"
        if name not in names:
            meant = {plain_word(word): name for word, name in synonyms()["options"].get(group, {}).items()}
            meant |= {plain_word(known): known for known in names}
            problem, word = f"{group} has no option of this name", meant.get(plain_word(name), name)
            if word == name and (path := meant_path(group, name)):
                raise ConfigError(problem, f"{group}={name}", path)
            if "=" in word:
                raise ConfigError(problem, f"{group}={name}", word)
            if word in ("all", "any", "every"):
                raise ConfigError(problem, f"{group}={name}", f"nexus-ablate -m '{group}=glob(*)'")
            raise unknown(problem, word, names, f"{group}={{}}", typed or name)
        chosen.append(name)
    return chosen


def _check_values(name: str, values: list[Any], chosen: dict[str, list[str]], typed: str) -> None:
    known = _known_keys(chosen)
    if name not in known:
        group, _, rest = name.partition(".")
        if rest and group in OPTION_GROUPS and group in chosen:
            raise _unknown_option_key(group, rest, values, chosen, typed)
        raise _unknown_key(name, values, chosen, typed)
    for value in values:
        if word := meant_word(name, value):
            raise ConfigError(f"{name} has another name for this value", f"{name}={show(value)}", f"{name}={word}")
        if known[name] is None or (isinstance(value, str) and "${" in value):
            continue
        try:
            known[name].accept(name, value)
        except ConfigError as error:
            if error.fix == known[name].text:
                error.fix = f"{name}={_default(name, chosen)}"
            raise _with_meant_value(error, name, known[name], typed) from None


def _known_keys(chosen: dict[str, list[str]]) -> dict[str, Any]:
    """Every key that may be set under the chosen options, with its constraint (None for groups)."""
    known: dict[str, Any] = dict(keys_of(RunConfig)) | dict.fromkeys(GROUPS)
    for group, cls in CLOSED_GROUPS.items():
        known |= {f"{group}.{k}": constraint for k, constraint in keys_of(cls).items() if k != "name"}
    for group in OPTION_GROUPS:
        for name in chosen.get(group, []):
            keys: dict[str, Key] = option_files(group)[name].keys
            known |= {f"{group}.{k}": spec.constraint for k, spec in keys.items()}
    return known


def _default(name: str, chosen: dict[str, list[str]]) -> str:
    """The default of a key under the chosen options, as it is typed."""
    group, _, key = name.rpartition(".")
    if group in OPTION_GROUPS:
        specs: dict[str, Key] = option_files(group)[chosen[group][-1]].keys
        return show(specs[key].default)
    return show(conf_yaml(f"{group}/{chosen[group][-1]}" if group else "config")[key])


def _accepts(constraint: Constraint, typed: str) -> bool:
    """Whether a constraint accepts a value as it would be typed."""
    value = read_override(f"key={typed}").values[0]
    try:
        constraint.accept("key", value)
    except ConfigError:
        return False
    return True


def _with_meant_value(error: ConfigError, name: str, constraint: Constraint, typed: str) -> ConfigError:
    """The error for a value that a key doesn't accept, with what was probably meant if the key accepts that."""
    if name == "seed" and (seeds := meant_seeds(typed)):
        return ConfigError(error.problem, typed, f"nexus-ablate -m seed={seeds}")
    for meant in (meant_number(typed), meant_list(typed)):
        if meant and _accepts(constraint, meant):
            return ConfigError(error.problem, typed, f"{name}={meant}")
    return error


def _meant_value(key: str, typed: str, values: list[Any], chosen: dict[str, list[str]]) -> str:
    """The value as typed if the key accepts it, else one that it accepts."""
    constraint = _known_keys(chosen)[key]
    if any(meant_word(key, value) for value in values):
        return ",".join(meant_word(key, value) or show(value) for value in values)
    try:
        if constraint is None:
            _check_choices(key, values)
        else:
            _ = [constraint.accept(key, value) for value in values]
    except ConfigError as error:
        default = choices_of("config")[key] if constraint is None else _default(key, chosen)
        return error.fix.partition("=")[2] or default
    return typed


def _unknown_key(name: str, values: list[Any], chosen: dict[str, list[str]], typed: str) -> ConfigError:
    """The error for a key that doesn't exist, with an override that works."""
    known = _known_keys(chosen)
    fix = _meant_switch(name, values) or meant_key(name, known) or did_you_mean(name, known)
    if fix in known:
        fix = f"{fix}={_meant_value(fix, typed, values, chosen)}"
    return ConfigError(NO_KEY, f"{name}={typed}", fix or "nexus-ablate list")


def _meant_switch(name: str, values: list[Any]) -> str:
    """The override for an option that is switched on or off by its name, as in `swiglu=true`; '' for any other key."""
    words = [show(value) for value in values]
    override = option_named(name) if words in (["on"], ["off"]) else ""
    if words == ["on"] or not override:
        return override
    group = override.partition("=")[0]
    off = synonyms()["options"].get(group, {}).get("off", "none")
    return f"{group}={off}" if off in option_names(group) else f"nexus-ablate list {group}"


def _unknown_option_key(
    group: str, rest: str, values: list[Any], chosen: dict[str, list[str]], typed: str
) -> ConfigError:
    """The error for a key that the chosen option doesn't have, with the option that has it."""
    name, option = f"{group}.{rest}", f"{group}={','.join(chosen[group])}"
    path = meant_path(group, show(values[0])) if rest in ("path", "file", "files") else ""
    if path:
        return ConfigError(f"{option} has no key {rest}", f"{name}={typed}", path)
    others = [option_files(axis)[name] for axis in OPTIONS if axis != group for name in chosen.get(axis, [])]
    prescribed = {option.prescribes.get(group) for option in others}
    owners = [owner for owner in option_files(group).values() if rest in owner.keys]
    owners.sort(key=lambda owner: owner.name not in prescribed)  # what `auto` means beside the other options
    for owner in owners:
        for meant in (typed, meant_list(typed)):
            if meant and _accepts(owner.keys[rest].constraint, meant):
                fix = f"{group}={owner.name} {name}={meant}"
                return ConfigError(f"{option} has no key {rest}", f"{name}={typed}", fix)
    if owners:
        fix = f"{group}={owners[0].name} {name}={show(owners[0].keys[rest].default)}"
        return ConfigError(f"{option} has no key {rest}", f"{name}={typed}", fix)
    keys = [key for key in _known_keys(chosen) if key.startswith(f"{group}.")]
    if not keys:
        return ConfigError(f"{option} has no keys", name, "leave it out")
    meant = did_you_mean(name, keys)
    if meant:
        fix = f"{meant}={_meant_value(meant, typed, values, chosen)}"
        return ConfigError(f"{option} has no key of this name", f"{name}={typed}", fix)
    return unknown(f"{option} has no key of this name", name, keys, f"{{}}={typed}")


def _multirun_of(overrides: list[str]) -> str:
    return shlex.join(["nexus-ablate", "-m", *overrides])


def respelled(text: str) -> str:
    """`norm rms`, `norm = rms`, `norm:rms` and `gpu` as an override or command that works; '' for any other text."""
    match = re.match(r"([A-Za-z_][\w.-]*)(?:\s*[=:\s]\s*([^\s=:]\S*))?", text)
    if match is None:
        return ""
    known = _known_keys(_default_choices())
    key = match[1] if match[1] in known else meant_key(match[1], known)
    if key.startswith("nexus-ablate"):
        return key
    if "=" not in key and match[2] is None:
        return ""
    override = key if "=" in key else f"{key}={match[2]}"
    try:
        check_overrides([override], sweeps=False)
    except ConfigError as error:
        return error.fix if key and error.fix.startswith(key) else ""
    return override
