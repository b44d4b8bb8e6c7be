"""Overrides checked against the schema before anything is composed, with suggestions that work."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from nexus_ablate.config.grammar import Constraint, show
from nexus_ablate.config.groups import GROUPS, choices_of, keys_under, option_names
from nexus_ablate.config.meanings import (
    meant_key,
    meant_list,
    meant_number,
    meant_option,
    meant_path,
    meant_seeds,
    meant_word,
    option_named,
    synonyms,
)
from nexus_ablate.config.options import OPTIONS, Key, option_files
from nexus_ablate.config.override_syntax import MOST_RUNS, Override, read_override, replacements
from nexus_ablate.config.run_config import OPTION_GROUPS
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
    for former, later in replacements(given):
        if former.is_sweep:  # it would be lost
            fix = f"{former.text},{later.typed}"
            if "(" in fix:
                fix = former.text if "(" in former.text else later.text
            raise ConfigError(f"{later.name} is swept, and given twice", f"{former.text} {later.text}", fix)
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
        multirun = shlex.join(["nexus-ablate", "-m", *overrides])
        raise ConfigError("a run takes one value per key", " ".join(swept), multirun)
    return given


def _default_choices() -> dict[str, list[str]]:
    return {group: [option] for group, option in choices_of("config").items()}


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
            names = _chosen_options(override.name, override.values, "" if override.is_sweep else override.typed)
        except ConfigError as error:
            wrong.append(error)
            unknown_groups |= {*OPTION_GROUPS} if override.name == "preset" else {override.name}
            continue
        chosen[override.name] = names
        if override.name == "preset":
            of_presets = [choices_of(f"preset/{preset}") for preset in names]
            for group in set(GROUPS) - {other.name for other in given}:
                chosen[group] = [choices[group] for choices in of_presets if group in choices] or chosen[group]
    known = keys_under(chosen)
    for override in given:
        group, _, key = override.name.partition(".")
        if key and group in unknown_groups:
            continue
        try:
            _check_key(override, chosen, known)
        except ConfigError as error:
            if error.problem == NO_KEY and (meant := did_you_mean(override.name, beside)):
                error = ConfigError(NO_KEY, error.got, f"{meant}={override.typed}")
            wrong.append(error)
    return wrong


def together(wrong: list[ConfigError]) -> ConfigError:
    """One error for several, whose suggestions can be typed together where all of them are overrides."""
    if len(wrong) == 1:
        return wrong[0]
    problems = list(dict.fromkeys(error.problem for error in wrong))
    fixes = [error.fix for error in wrong]
    are_overrides = all(re.match(r"[\w.]+=", fix) for fix in fixes)
    problem = "there are no keys of these names" if problems == [NO_KEY] else "; ".join(problems)
    return ConfigError(problem, " ".join(error.got for error in wrong), (" " if are_overrides else "; ").join(fixes))


def _chosen_options(group: str, values: list[Any], typed: str = "") -> list[str]:
    """The options that the values name.

    Args:
        typed: The value as the user typed it, for the error: `true` is a boolean here.
    """
    known, chosen = option_names(group), []
    for value in values:
        no_name = "none" if group == "preset" else "null"
        name = no_name if value is None else show(value)
        chosen.append(name)
        if name in known:
            continue
        problem, meant = f"{group} has no option of this name", meant_option(group, name) or name
        fix = meant_path(group, name) if meant == name else ""
        if not fix and "=" in meant:
            fix = meant
        if meant in ("all", "any", "every"):
            fix = f"nexus-ablate -m '{group}=glob(*)'"
        if fix:
            raise ConfigError(problem, f"{group}={name}", fix)
        raise unknown(problem, meant, known, f"{group}={{}}", typed or name)
    return chosen


def _check_key(override: Override, chosen: dict[str, list[str]], known: Mapping[str, Key | None]) -> None:
    """Check that a key exists and accepts its values. The options that `override` may choose are checked before.

    Args:
        chosen: The options of each group.
        known: The keys under these options.
    """
    name, typed = override.name, override.typed
    if name not in known:
        if "." in name and name.partition(".")[0] in OPTION_GROUPS and not override.is_added:
            raise _unknown_option_key(override, chosen, known)
        fix = _meant_switch(override) or meant_key(name, known) or did_you_mean(name, known)
        fix = f"{fix}={_meant_value(fix, override, known)}" if fix in known else fix
        raise ConfigError(NO_KEY, f"{name}={typed}", fix or "nexus-ablate list")
    if override.is_added:
        raise ConfigError("the key already exists", override.text, override.text.lstrip("+"))
    key = known[name]
    if key is None:
        return
    for value in override.values:
        if word := meant_word(name, value):
            raise ConfigError(f"{name} has another name for this value", f"{name}={show(value)}", f"{name}={word}")
        if isinstance(value, str) and "${" in value:
            continue
        try:
            key.constraint.accept(name, value)
        except ConfigError as error:
            if name == "seed" and (seeds := meant_seeds(typed)):
                raise ConfigError(error.problem, typed, f"nexus-ablate -m seed={seeds}") from None
            for meant in (meant_number(typed), meant_list(typed)):
                if meant and _accepts(key.constraint, meant):
                    raise ConfigError(error.problem, typed, f"{name}={meant}") from None
            if error.fix == key.constraint.text:
                error.fix = f"{name}={show(key.default)}"
            raise


def _accepts(constraint: Constraint, typed: str) -> bool:
    """Whether a constraint accepts a value as it would be typed."""
    value = read_override(f"key={typed}").values[0]
    try:
        constraint.accept("key", value)
    except ConfigError:
        return False
    return True


def _meant_value(name: str, override: Override, known: Mapping[str, Key | None]) -> str:
    """The value of an override as typed if the key that was meant accepts it, else one that it accepts."""
    key = known[name]
    words = [meant_word(name, value) for value in override.values]
    if any(words):
        return ",".join(word or show(value) for word, value in zip(words, override.values, strict=True))
    try:
        if key is None:
            _chosen_options(name, override.values)
        else:
            for value in override.values:
                key.constraint.accept(name, value)
    except ConfigError as error:
        return error.fix.partition("=")[2] or (show(key.default) if key else choices_of("config")[name])
    return override.typed


def _meant_switch(override: Override) -> str:
    """The override for an option that is switched on or off by its name, as in `swiglu=true`; '' for any other key."""
    words = [show(value) for value in override.values]
    meant = option_named(override.name) if words in (["on"], ["off"]) else ""
    if words == ["on"] or not meant:
        return meant
    group = meant.partition("=")[0]
    off = synonyms()["options"].get(group, {}).get("off", "none")
    return f"{group}={off}" if off in option_names(group) else f"nexus-ablate list {group}"


def _unknown_option_key(
    override: Override, chosen: dict[str, list[str]], known: Mapping[str, Key | None]
) -> ConfigError:
    """The error for a key that the chosen option doesn't have, with the option that has it."""
    name, typed = override.name, override.typed
    group, _, key = name.partition(".")
    option, got = f"{group}={','.join(chosen[group])}", f"{name}={typed}"
    problem = f"{option} has no key {key}"
    path = meant_path(group, show(override.values[0])) if key in ("path", "file", "files") else ""
    if path:
        return ConfigError(problem, got, path)
    others = [option_files(axis)[other] for axis in OPTIONS if axis != group for other in chosen[axis]]
    prescribed = {other.prescribes.get(group) for other in others}
    owners = [owner for owner in option_files(group).values() if key in owner.keys]
    owners.sort(key=lambda owner: owner.name not in prescribed)  # what `auto` means beside the other options
    for owner, value in itertools.product(owners, (typed, meant_list(typed))):
        if value and _accepts(owner.keys[key].constraint, value):
            return ConfigError(problem, got, f"{group}={owner.name} {name}={value}")
    if owners:
        fix = f"{group}={owners[0].name} {name}={show(owners[0].keys[key].default)}"
        return ConfigError(problem, got, fix)
    keys = [known_key for known_key in known if known_key.startswith(f"{group}.")]
    if not keys:
        return ConfigError(f"{option} has no keys", name, "leave it out")
    problem, near = f"{option} has no key of this name", did_you_mean(name, keys)
    if near:
        return ConfigError(problem, got, f"{near}={_meant_value(near, override, known)}")
    return unknown(problem, name, keys, f"{{}}={typed}")


def respelled(text: str) -> str:
    """`norm rms`, `norm = rms`, `norm:rms` and `gpu` as an override or command that works; '' for any other text."""
    match = re.match(r"([A-Za-z_][\w.-]*)(?:\s*[=:\s]\s*([^\s=:]\S*))?", text)
    if match is None:
        return ""
    known = keys_under(_default_choices())
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
