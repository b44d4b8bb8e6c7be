"""Check overrides against the schema, with messages for users.

Overrides are parsed by Hydra's grammar and checked before anything is composed, because Hydra accepts an added key
(`+x=1`) and a misspelt `hydra.` key, and its messages contain internal types.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

from nexus_ablate.config.grammar import Constraint, show
from nexus_ablate.config.options import OPTIONS, Key, conf_dir, option_files
from nexus_ablate.config.run_config import CLOSED_GROUPS, OPTION_GROUPS, RunConfig, keys_of
from nexus_ablate.errors import ConfigError, did_you_mean, unknown
from nexus_ablate.plain_data import load_yaml

MOST_RUNS = 10_000
"""Most values of a sweep, and most runs of a multirun: more are a typing error."""
_HYDRA_VALUES = {
    "hydra.launcher.n_jobs": Constraint("int (-inf, -1] | int [1, inf)"),
}
"""Keys of Hydra's plugins for which a wrong value would end in a traceback."""
GROUPS = (*OPTION_GROUPS, *CLOSED_GROUPS, "preset")
NO_KEY = "there is no key of this name"


def refuse_hydra_keys(overrides: list[str]) -> None:
    """Raises:
    ConfigError: A key of Hydra's, which only a multirun has a use for: it would be ignored silently.
    """
    for text in overrides:
        if text.lstrip("+~").startswith(("hydra.", "hydra/")):
            problem = "one run uses none of Hydra's keys; a multirun (-m) takes those of a launcher"
            raise ConfigError(problem, text, "nexus-ablate -m norm=rms,layer hydra/launcher=joblib")


@dataclasses.dataclass(frozen=True)
class _Given:
    """An override as it was given.

    Attributes:
        text: All of it.
        name: Its key or group.
        typed: What follows the equals sign.
        values: Several if it is a sweep.
    """

    text: str
    name: str
    typed: str
    values: list[Any]
    is_sweep: bool
    is_added: bool


def check_overrides(overrides: list[str], sweeps: bool, beside: Collection[str] = ()) -> None:
    """Check command-line overrides against the schema, before anything is composed or created.

    Args:
        sweeps: Whether a key may have several values, as in a multirun.
        beside: Keys that may be meant too, those of a study.

    Raises:
        ConfigError: An override cannot be read, names what does not exist (all of these are named), or contradicts
            another one.
    """
    given = [_read(text) for text in overrides]
    given = [override for override in given if override.name.split(".")[0].split("/")[0] != "hydra"]
    _check_given_once(given)
    if wrong := _wrong_names(given, beside):
        raise _together(wrong)
    if (runs := math.prod(len(override.values) or 1 for override in given)) > MOST_RUNS:
        raise ConfigError(f"a multirun has at most {MOST_RUNS} runs", f"{runs} runs", "nexus-ablate -m seed=0,1,2")
    names = {override.name for override in given}
    budget = [key for key in ("train.steps", "train.tokens", "train.flops") if key in names]
    if len(budget) > 1:
        raise ConfigError("a run has one budget", " and ".join(budget), "give one of them")
    swept = [override.text for override in given if override.is_sweep]
    if swept and not sweeps:
        raise ConfigError("a run takes one value per key", " ".join(swept), _multirun_of(overrides))


def _read(text: str) -> _Given:
    """Raises:
    ConfigError: The text cannot be read, or is nothing that an override may be.
    """
    from hydra.errors import HydraException

    if "_target_" in text:
        raise ConfigError("_target_ is not accepted: it could run any code", text, "choose an option by its name")
    try:
        override = _parser().parse_override(text)
    except (HydraException, ValueError, RecursionError) as error:  # ValueError: a number of 5000 digits
        fix = 'KEY=VALUE, without spaces around "="; quote values with special characters: key=\'"..."\''
        raise ConfigError("this override cannot be read", text, fix) from error
    name, typed = override.key_or_group, text.partition("=")[2]
    if name == "study":
        fix = f"nexus-ablate study {typed}"
        raise ConfigError("study is a verb; the folder of a run is experiment=NAME", text, fix)
    if override.is_delete():
        raise ConfigError("nothing can be removed from the configuration", text, f"choose another {name}")
    values = _values(override)
    if name.split(".")[0].split("/")[0] == "hydra":
        _check_hydra_key(name, values)
    is_added = override.is_add() and not override.is_force_add()
    return _Given(text, name, typed, values, override.is_sweep_override(), is_added)


def _check_given_once(given: list[_Given]) -> None:
    """Raises:
    ConfigError: A key is swept and then given again: the last one counts, and the sweep would be lost.
    """
    before: dict[str, _Given] = {}
    for override in given:
        former = before.get(override.name)
        if former is not None and former.is_sweep:
            fix = f"{former.text},{override.typed}"
            if "(" in fix:
                fix = former.text if "(" in former.text else override.text
            raise ConfigError(f"{override.name} is swept, and given twice", f"{former.text} {override.text}", fix)
        before[override.name] = override


def _wrong_names(given: list[_Given], beside: Collection[str]) -> list[ConfigError]:
    """An error for each option, key and value that does not exist, options first.

    Keys of an option that does not exist are not checked: which it has is unknown.
    """
    wrong = []
    chosen, unknown_groups = default_choices(), set()
    for override in given:
        if override.name not in GROUPS:
            continue
        try:
            names = _check_choices(override.name, override.values, "" if override.is_sweep else override.typed)
        except ConfigError as error:
            wrong.append(error)
            unknown_groups.add(override.name)
            continue
        chosen[override.name] = names
        if override.name == "preset":
            own = {other.name for other in given}
            chosen |= {group: options for group, options in preset_choices(names).items() if group not in own}
    for override in given:
        if override.name.partition(".")[0] in unknown_groups:
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


def _added(override: _Given, chosen: dict[str, list[str]]) -> ConfigError:
    """The error for `+KEY=VALUE`."""
    if override.name in _known_keys(chosen):
        return ConfigError("the key already exists", override.text, override.text.lstrip("+"))
    return _unknown_key(override.name, override.values, chosen, override.typed)


def _together(wrong: list[ConfigError]) -> ConfigError:
    """One error for several, whose suggestions can be typed together where all of them are overrides."""
    if len(wrong) == 1:
        return wrong[0]
    problems = list(dict.fromkeys(error.problem for error in wrong))
    fixes = [error.fix for error in wrong]
    are_overrides = all(re.match(r"[\w.]+=", fix) for fix in fixes)
    problem = "there are no keys of these names" if problems == [NO_KEY] else "; ".join(problems)
    return ConfigError(problem, " ".join(error.got for error in wrong), (" " if are_overrides else "; ").join(fixes))


def typed_values(overrides: Iterable[str]) -> list[tuple[str, Any]]:
    """Key or group and value of each override without a sweep, in their order, without Hydra's own keys."""
    parsed = map(_parser().parse_override, overrides)
    pairs = [(override.key_or_group, _values(override)[0]) for override in parsed]
    return [(name, value) for name, value in pairs if re.split("[./]", name)[0] != "hydra"]


@cache
def _parser() -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


def _values(override: Any) -> list[Any]:
    """The values of an override: several if it is a sweep.

    Raises:
        ConfigError: A sweep that isn't a list of values, or has none or too many.
    """
    from hydra.core.override_parser.types import Glob, IntervalSweep, RangeSweep, Sweep

    if override.is_sweep_override():
        sweep, key = override.value(), override.key_or_group
        if isinstance(sweep, Glob):
            return sweep.filter(sorted(option_names(key)))
        if isinstance(sweep, IntervalSweep):
            got, fix = override.input_line, f"{key}={show(((sweep.start or 0) + (sweep.end or 0)) / 2)}"
            raise ConfigError("Hydra's basic sweeper takes a list of values, not an interval", got, fix)
        if isinstance(sweep, RangeSweep):
            start, stop = sweep.start or 0, sweep.stop or 0
            number = max(0, math.ceil((stop - start) / sweep.step)) if sweep.step else 0
            if not 1 <= number <= MOST_RUNS:
                problem = f"a sweep has 1 to {MOST_RUNS} values, but this one has {number}"
                raise ConfigError(problem, override.input_line, f"{key}=range(0,5)")
            return list(override.sweep_iterator())
        raw = sweep.list
        if any(isinstance(value, Sweep) for value in raw):
            single = [v for sweep in raw for v in (sweep.range() if isinstance(sweep, RangeSweep) else [sweep])]
            fix = f"{key}={','.join(show(value) for value in single[:5] if not isinstance(value, Sweep))}"
            raise ConfigError("a list of values cannot contain another sweep", override.input_line, fix)
    else:
        raw = [override.value()]
    return [_unquoted(value) for value in raw]


def _unquoted(value: Any) -> Any:
    """A value of Hydra's parser without the quotes of its texts."""
    if isinstance(value, list):
        return [_unquoted(item) for item in value]
    return getattr(value, "text", value)  # of a QuotedString


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
            meant = {_plain(word): name for word, name in synonyms()["options"].get(group, {}).items()}
            meant |= {_plain(known): known for known in names}
            problem, word = f"{group} has no option of this name", meant.get(_plain(name), name)
            if word == name and (path := _meant_path(group, name)):
                raise ConfigError(problem, f"{group}={name}", path)
            if "=" in word:
                raise ConfigError(problem, f"{group}={name}", word)
            if word in ("all", "any", "every"):
                raise ConfigError(problem, f"{group}={name}", f"nexus-ablate -m '{group}=glob(*)'")
            raise unknown(problem, word, names, f"{group}={{}}", typed or name)
        chosen.append(name)
    return chosen


# -------------------------------------------------------------------------------------------- suggestions by meaning


@cache
def synonyms() -> dict[str, Any]:
    """Names that other libraries and papers use for these verbs, keys, values and options."""
    return load_yaml(conf_dir().joinpath("synonyms.yaml").read_text(encoding="utf-8"))


def _plain(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def _meant_key(name: str, known: Iterable[str]) -> str:
    """The key, or the whole override or command, that `name` means in other libraries; '' if there is none."""
    words, last = {_plain(word): key for word, key in synonyms()["keys"].items()}, name.rpartition(".")[2]
    owners = [key for key in known if key.rpartition(".")[2] == last]
    return words.get(_plain(name)) or (owners[0] if len(owners) == 1 else words.get(_plain(last), ""))


def _meant_path(group: str, value: str) -> str:
    """The overrides for a value that looks like a file, or like `owner/name` on a hub; '' for any other value."""
    forms = synonyms()["paths"].get(group)
    if forms is None or not re.fullmatch(r"[\w./~@+-]+", value):
        return ""
    if re.search(r"\.[A-Za-z]\w*$", value) or value.startswith(("/", ".", "~")):
        return forms["file"].format(value)
    return forms["hub"].format(value) if value.count("/") == 1 else ""


def _meant_word(key: str, value: Any) -> str:
    """The value that another library's word means for a key; '' if there is none."""
    return synonyms()["values"].get(key, {}).get(_plain(show(value)), "")


def _unknown_key(name: str, values: list[Any], chosen: dict[str, list[str]], typed: str) -> ConfigError:
    """The error for a key that doesn't exist, with an override that works."""
    known = _known_keys(chosen)
    fix = _meant_switch(name, values) or _meant_key(name, known) or did_you_mean(name, known)
    if fix in known:
        fix = f"{fix}={_meant_value(fix, known[fix], typed, values)}"
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


def option_named(word: str) -> str:
    """`ffn=swiglu` for `swiglu`, or `preset=gpt2` for `gpt2`; '' for a word that names no option, or several."""
    overrides = []
    for group in ("preset", *OPTION_GROUPS):
        meant = {_plain(other): option for other, option in synonyms()["options"].get(group, {}).items()}
        meant |= {_plain(option): option for option in option_names(group)}
        if option := meant.get(_plain(word)):
            overrides.append(option if "=" in option else f"{group}={option}")
        if overrides and group == "preset":
            return overrides[0]
    return overrides[0] if len(overrides) == 1 and _plain(word) not in ("none", "off", "on", "auto") else ""


def _multirun_of(overrides: list[str]) -> str:
    return shlex.join(["nexus-ablate", "-m", *overrides])


def _meant_seeds(typed: str) -> str:
    """`0,1,2` for `[0,1,2]`, `0..2` or `0-2`; '' for anything else."""
    if re.fullmatch(r"\[\d+(,\s*\d+)*\]", typed):
        return typed.strip("[]").replace(" ", "")
    ends = re.fullmatch(r"(\d{1,9})(?:\.\.|-|:)(\d{1,9})", typed)
    if ends is None or not 0 < int(ends[2]) - int(ends[1]) < MOST_RUNS:
        return ""
    return ",".join(str(seed) for seed in range(int(ends[1]), int(ends[2]) + 1))


def _meant_number(typed: str) -> str:
    """`20000` for `20k` and `20_000`, `1500000` for `1.5M`; '' for anything else."""
    number = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([kKmMbB])", typed.replace("_", ""))
    if number is None:
        return ""
    value = float(number[1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[number[2].lower()]
    return f"{value:.0f}" if value == int(value) else ""


def _meant_list(typed: str) -> str:
    """`[a.txt]` for `a.txt`."""
    return f"[{typed}]" if typed and not typed.startswith("[") else ""


def _meant_value(key: str, constraint: Any, typed: str, values: list[Any]) -> str:
    """The value as typed if the key accepts it, else one that it accepts."""
    if any(_meant_word(key, value) for value in values):
        return ",".join(_meant_word(key, value) or show(value) for value in values)
    try:
        if constraint is None:
            _check_choices(key, values)
        else:
            _ = [constraint.accept(key, value) for value in values]
    except ConfigError as error:
        return error.fix.partition("=")[2] or default_choices()[key][0]
    return typed


def respelled(text: str) -> str:
    """`norm rms`, `norm = rms`, `norm:rms` and `gpu` as an override or command that works; '' for any other text."""
    match = re.match(r"([A-Za-z_][\w.-]*)(?:\s*[=:\s]\s*([^\s=:]\S*))?", text)
    if match is None:
        return ""
    known = _known_keys(default_choices())
    key = match[1] if match[1] in known else _meant_key(match[1], known)
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


def option_names(group: str) -> set[str]:
    if group in OPTION_GROUPS:
        return set(option_files(group))
    return {path.stem for path in conf_dir().joinpath(group).glob("*.yaml")}


def _check_values(name: str, values: list[Any], chosen: dict[str, list[str]], typed: str) -> None:
    known = _known_keys(chosen)
    if name not in known:
        group, _, rest = name.partition(".")
        if rest and group in OPTION_GROUPS and group in chosen:
            raise _unknown_option_key(group, rest, values, chosen, typed)
        raise _unknown_key(name, values, chosen, typed)
    for value in values:
        if word := _meant_word(name, value):
            raise ConfigError(f"{name} has another name for this value", f"{name}={show(value)}", f"{name}={word}")
        if known[name] is None or (isinstance(value, str) and "${" in value):
            continue
        try:
            known[name].accept(name, value)
        except ConfigError as error:
            if not known[name].near(value) and error.fix == f"{name}={known[name].example()}":
                error.fix = f"{name}={_default(name, chosen) or known[name].example()}"
            raise _with_meant_value(error, name, known[name], typed) from None


def _default(name: str, chosen: dict[str, list[str]]) -> str:
    """The default of a key under the chosen options, as it is typed; '' where it is text that isn't given."""
    group, _, key = name.rpartition(".")
    if group in OPTION_GROUPS:
        specs: dict[str, Key] = option_files(group)[chosen[group][-1]].keys
        return show(specs[key].default)
    file = f"{group}/{chosen[group][-1]}" if group else "config"
    default = load_yaml(conf_dir().joinpath(f"{file}.yaml").read_text(encoding="utf-8")).get(key)
    return "" if default is None else show(default)


def _with_meant_value(error: ConfigError, name: str, constraint: Constraint, typed: str) -> ConfigError:
    """The error for a value that a key doesn't accept, with what was probably meant if the key accepts that."""
    if name == "seed" and (seeds := _meant_seeds(typed)):
        return ConfigError(error.problem, typed, f"nexus-ablate -m seed={seeds}")
    for meant in (_meant_number(typed), _meant_list(typed)):
        if meant and _accepts(constraint, meant):
            return ConfigError(error.problem, typed, f"{name}={meant}")
    return error


def _accepts(constraint: Constraint, typed: str) -> bool:
    """Whether a constraint accepts a value as it would be typed."""
    value = _values(_parser().parse_override(f"key={typed}"))[0]
    try:
        constraint.accept("key", value)
    except ConfigError:
        return False
    return True


def _unknown_option_key(
    group: str, rest: str, values: list[Any], chosen: dict[str, list[str]], typed: str
) -> ConfigError:
    """The error for a key that the chosen option doesn't have, with the option that has it."""
    name, option = f"{group}.{rest}", f"{group}={','.join(chosen[group])}"
    path = _meant_path(group, show(values[0])) if rest in ("path", "file", "files") else ""
    if path:
        return ConfigError(f"{option} has no key {rest}", f"{name}={typed}", path)
    others = [option_files(axis)[name] for axis in OPTIONS if axis != group for name in chosen.get(axis, [])]
    prescribed = {option.prescribes.get(group) for option in others}
    owners = [owner for owner in option_files(group).values() if rest in owner.keys]
    owners.sort(key=lambda owner: owner.name not in prescribed)  # what `auto` means beside the other options
    for owner in owners:
        for meant in (typed, _meant_list(typed)):
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
        value = _meant_value(meant, _known_keys(chosen)[meant], typed, values)
        return ConfigError(f"{option} has no key of this name", f"{name}={typed}", f"{meant}={value}")
    return unknown(f"{option} has no key of this name", name, keys, f"{{}}={typed}")


def _check_hydra_key(name: str, values: list[Any]) -> None:
    """Check Hydra's own keys against Hydra's schema, because Hydra silently accepts a misspelt one."""
    if name in _HYDRA_VALUES:
        for value in values:
            _HYDRA_VALUES[name].accept(name, value)
    from hydra.conf import HydraConf

    if "/" in name:
        groups = (
            "hydra/launcher",
            "hydra/sweeper",
            "hydra/job_logging",
            "hydra/hydra_logging",
            "hydra/help",
            "hydra/output",
        )
        if name not in groups:
            raise unknown("Hydra has no group of this name", name, groups)
        for value in values:
            if not isinstance(value, str):
                raise ConfigError(f"{name} takes the name of an option", f"{name}={show(value)}", f"{name}=basic")
        return
    node: Any = HydraConf
    seen = "hydra"
    for part in name.split(".")[1:]:
        if seen in ("hydra.launcher", "hydra.sweeper", "hydra.job_logging", "hydra.hydra_logging", "hydra.job.env_set"):
            return  # Hydra checks a plugin's schema itself, when it creates the plugin
        fields = {f.name: f for f in dataclasses.fields(node)} if dataclasses.is_dataclass(node) else {}
        if part not in fields:
            raise unknown("Hydra has no key of this name", name, [f"{seen}.{f}" for f in fields] or [seen])
        kind = fields[part].type
        default = fields[part].default_factory if fields[part].default_factory is not dataclasses.MISSING else None
        node = default if dataclasses.is_dataclass(default) else kind
        seen = f"{seen}.{part}"
