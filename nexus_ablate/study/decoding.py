"""From the values of a YAML to a `Study`: the short forms that people write, and messages about what is wrong."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
import yaml
from msgspec import Meta

from nexus_ablate.config.foreign_words import meaning
from nexus_ablate.config.grammar import show
from nexus_ablate.config.groups import default_keys
from nexus_ablate.console import several
from nexus_ablate.errors import ConfigError, did_you_mean
from nexus_ablate.plain_data import UNREADABLE, load_yaml
from nexus_ablate.runs.files import LINK
from nexus_ablate.runs.record import damaged, read_text
from nexus_ablate.study.arm_overrides import overrides_of
from nexus_ablate.study.schema import (
    FIRST_TUNING_SEEDS,
    KEYS,
    TAKES,
    WRITTEN_BY_A_LAUNCH,
    Count,
    Outcome,
    Positive,
    Study,
)

LOOK_WEIGHTS = [0.3, 0.3, 0.4]
"""Of three looks; another number of looks is weighted by their seeds."""
_TOKENS = re.compile(r"(\d+(?:\.\d+)?) ?% tokens")
_SINGLE = ("endpoint", "delta_min")
"""Keys for a single endpoint, as on a command line."""


def decode(values: Mapping[str, Any], typed: Collection[str] = ()) -> Study:
    """A checked study from the values of its file and of its command line, defaults filled in.

    Args:
        values: By key.
        typed: The keys that come from the command line, for the form of a suggestion.

    Raises:
        ConfigError: A key is unknown (all of them are named), or a value is invalid.
    """
    _check_keys(values)
    try:
        written = _written_out(values)
        study = msgspec.convert(written, Study, strict=False)
    except msgspec.ValidationError as error:
        raise _misfit(str(error), values, typed) from None
    if not values.get("share"):
        study = msgspec.structs.replace(study, share=share_of(study))
    return study


def decode_file(values: Mapping[str, Any], typed: Collection[str] = ()) -> Study:
    """`decode` of what a user wrote, which has no keys that a launch writes, and has either factors or arms."""
    if written := [name for name in WRITTEN_BY_A_LAUNCH if name in values]:
        problem = f"a launch writes {' and '.join(written)} into study.yaml; a study's file cannot set it"
        got = ", ".join(f"{name}: {in_yaml(values[name])}" for name in written)
        raise ConfigError(problem, got, f"leave {' and '.join(written)} out")
    _check_keys(values)
    factors, arms = values.get("factors"), values.get("arms")
    if not factors and not arms:
        raise ConfigError(
            f"study {values.get('name')} needs factors or arms", "neither", "factors: {norm: [layer, rms]}"
        )
    if factors and arms:
        number = len(arms) if isinstance(arms, list | dict) else 1
        got = f"factors {in_yaml(factors)} beside {several(number, 'arm')}"
        raise ConfigError(
            f"study {values.get('name')} needs factors or arms",
            got,
            "a new study, with a name of its own: nexus-ablate study mine vary.KEY=A,B",
        )
    study = decode(values, typed)
    if len(study.tuning_seeds) == 1:
        problem = "one tuning seed takes noise for a better learning rate; two or more can choose it"
        fix = f"tuning_seeds={study.tuning_seeds[0]},{max(*study.seeds, *study.tuning_seeds) + 1}"
        raise ConfigError(problem, f"tuning_seeds={study.tuning_seeds[0]}", fix)
    named = [msgspec.structs.replace(arm, named=bool(arm.name)) for arm in study.arms]
    return msgspec.structs.replace(study, arms=named)


def read_study(directory: Path) -> Study | None:
    """The study.yaml of a study's directory, with the directory's name; None if there is none.

    Raises:
        UserError: It is damaged or not a study, or the directory is a link, which could lead out of runs_dir.
    """
    if directory.is_symlink():
        raise damaged(directory, LINK)
    path = directory / "study.yaml"
    if (text := read_text(path)) is None:
        return None
    try:
        values = load_yaml(text)
        if not isinstance(values, dict):
            raise ValueError("not a mapping" if text.strip() else "the file is empty")
        if values.pop("checksum", None) not in (None, checksum(values)):
            raise ValueError("it was changed after a launch wrote it; a launch with --amend can change a study")
        if missing := [name for name in ("arms", "seeds") if name not in values]:  # those of a default study are others
            raise ValueError(f"{missing[0]} is missing")
        return decode(values | {"name": directory.name})
    except ConfigError as error:
        raise damaged(path, f"{error.problem}: {error.got}") from None
    except UNREADABLE as error:
        raise damaged(path, str(error)) from None


def checksum(values: Mapping[str, Any]) -> str:
    """sha256 of what a study.yaml says, without its checksum; earlier versions wrote none."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------- short forms


def _written_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values in the form of `Study`, wherever a short form stands."""
    full = {name: value for name, value in values.items() if value is not None and name not in _SINGLE}
    for name in ("seeds", "tuning_seeds", "lr_grid"):
        if isinstance(full.get(name), float):
            full[name] = [full[name]]
    if isinstance(seeds := full.get("seeds"), dict):
        full |= _looks(seeds)
    full["baseline"] = overrides_of(full.get("baseline", []), "the baseline")
    if isinstance(factors := full.get("factors"), dict):
        full["factors"] = {name: _levels(name, levels) for name, levels in factors.items()}
    arms = full.get("arms")
    if isinstance(arms, dict):
        arms = [{"name": str(name), "overrides": overrides} for name, overrides in arms.items()]
    if isinstance(arms, list):
        full["arms"] = [_arm(entry) for entry in arms]
    full.setdefault("design", "one_at_a_time" if full.get("factors") else "list")
    full["endpoints"] = _endpoints(values)
    if isinstance(strata := full.get("strata"), dict):
        full["strata"] = _strata(strata)
    if isinstance(expects := full.get("expects"), list):
        full["expects"] = [expectation for entry in expects for expectation in _expectations(entry)]
    if full.get("lr_grid"):
        full.setdefault("tuning_seeds", [*FIRST_TUNING_SEEDS])
    return full


def _looks(seeds: dict[str, Any]) -> dict[str, Any]:
    """`{looks: [8, 12, 20], weights: [...]}` as `looks`, `look_weights` and `seeds`."""
    if wrong := [str(name) for name in seeds if name not in ("looks", "weights")]:
        raise ConfigError("seeds has no key of this name", ", ".join(wrong), "seeds: {looks: [8, 12, 20]}")
    given, weights = seeds.get("looks"), seeds.get("weights")
    try:
        looks = msgspec.convert(given, Annotated[list[Count], Meta(min_length=2)])
    except msgspec.ValidationError:
        raise ConfigError(f"seeds.looks takes {TAKES['looks'][0]}", in_yaml(given), "seeds.looks=8,12,20") from None
    if weights is None and len(looks) == len(LOOK_WEIGHTS):
        weights = LOOK_WEIGHTS
    elif weights is None:
        weights = [look / sum(looks) for look in looks]
    try:
        msgspec.convert(weights, list[Positive], strict=False)
    except msgspec.ValidationError:
        problem = f"seeds.weights takes {TAKES['look_weights'][0]}"
        raise ConfigError(problem, in_yaml(weights), "leave seeds.weights out") from None
    return {"looks": looks, "look_weights": weights, "seeds": list(range(looks[-1]))}


def _levels(name: str, levels: Any) -> Any:
    if not isinstance(levels, list):
        raise ConfigError(
            f"factors is {TAKES['factors'][0]}", f"{name}: {in_yaml(levels)}", "factors: {norm: [layer, rms]}"
        )
    overrides_of([f"{name}={show(level)}" for level in levels])  # raises where the key cannot be part of an arm
    return [show(level) for level in levels]


def _arm(entry: Any) -> dict[str, Any]:
    """An arm, from overrides or `{name: swiglu, overrides: ffn=swiglu}`; `arms: {swiglu: ffn=swiglu}` is the same."""
    if not isinstance(entry, dict):
        return {"overrides": overrides_of(entry)}
    if "overrides" not in entry:
        raise ConfigError(
            "a named arm has a name and overrides", in_yaml(entry), "{name: swiglu, overrides: ffn=swiglu}"
        )
    arm = {name: value for name, value in entry.items() if value is not None}
    return arm | {"overrides": overrides_of(entry["overrides"], f"arm {entry.get('name') or ''}".rstrip())}


def _endpoints(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Endpoints as a list, from `[val_loss]`, `{val_loss: {delta_min: 0.1}}`, or `endpoint` and `delta_min`."""
    endpoints = values.get("endpoints")
    if endpoints is None:
        endpoints = [{"name": values.get("endpoint") or "val_loss", "delta_min": values.get("delta_min")}]
    elif given := [name for name in ("endpoint", "delta_min") if name in values]:
        raise ConfigError(
            f"{given[0]} and endpoints say the same", f"{given[0]}: {values[given[0]]}", f"leave {given[0]} out"
        )
    written = []
    for keys in listed_endpoints(endpoints):
        delta_min = keys.pop("delta_min", None)
        share = _TOKENS.fullmatch(delta_min) if isinstance(delta_min, str) else None
        if share and not float(share[1]):
            raise ConfigError("a margin is above 0", f"delta_min: {delta_min}", "delta_min: 2% tokens")
        if share:
            keys["tokens"] = float(share[1]) / 100
        elif delta_min is not None:
            keys["delta_min"] = delta_min
        written.append(keys)
    return written


def listed_endpoints(endpoints: Any) -> list[dict[str, Any]]:
    """Each endpoint as a mapping with its name, from `[val_loss]` or `{val_loss: {delta_min: 0.1}}`.

    Raises:
        ConfigError: It is none of these.
    """
    listed = []
    try:
        if isinstance(endpoints, dict):
            endpoints = [{"name": name, **(keys or {})} for name, keys in endpoints.items()]
        for entry in [] if isinstance(endpoints, str) else endpoints:
            listed.append({"name": entry} if isinstance(entry, str) else {**entry})
    except TypeError:  # a number or a list where a mapping belongs
        listed = []
    if not listed or not all("name" in keys for keys in listed):
        raise ConfigError(f"endpoints takes {TAKES['endpoints'][0]}", in_yaml(endpoints), "endpoints: [val_loss]")
    return listed


def _strata(strata: dict[str, Any]) -> dict[str, Any]:
    """Overrides by name; `{d_ff_ratio: [8/3, 4]}` is `{d_ff_ratio-8over3: [d_ff_ratio=8/3], ...}`."""
    written: dict[str, Any] = {}
    for name, overrides in strata.items():
        if overrides and isinstance(overrides, list) and not any("=" in str(item) for item in overrides):
            last = str(name).rpartition(".")[2]
            of_values = {f"{last}-{show(item)}".replace("/", "over"): [f"{name}={show(item)}"] for item in overrides}
        else:
            of_values = {str(name): overrides}
        written |= {stratum: overrides_of(texts, f"stratum {stratum}") for stratum, texts in of_values.items()}
    return written


def _expectations(entry: Any) -> list[dict[str, Any]]:
    """`{arm: norm=layer, val_loss: lower, attn/sink_rate: lower}` as one expectation per endpoint."""
    if not isinstance(entry, dict) or not isinstance(entry.get("arm"), str) or len(entry) < 2:
        example = "expects: [{arm: norm=layer, val_loss: equivalent}]"
        raise ConfigError("an expectation has an arm and an endpoint", in_yaml(entry), example)
    if "expected" in entry:
        return [entry]
    of = {name: value for name, value in entry.items() if name in ("arm", "stratum")}
    if len(of) == len(entry):
        raise ConfigError(
            "an expectation has an arm and an endpoint", in_yaml(entry), in_yaml(entry | {"val_loss": "lower"})
        )
    return [of | {"endpoint": name, "expected": value} for name, value in entry.items() if name not in of]


def share_of(study: Study) -> float:
    """The share of the 5% that a cell has: the primary endpoint or an expected one in a stratum, or a `depends_on`."""
    cells = 0
    for stratum in study.strata or [""]:
        judged = {study.primary.name}
        for expectation in study.expects:
            if expectation.stratum in ("", stratum) and expectation.expected not in ("trains", "fails"):
                judged.add(expectation.endpoint)
        cells += len(judged)
    return 1 / (cells + len(study.depends_on))


# ---------------------------------------------------------------------------------------------------------- messages


def in_yaml(value: Any) -> str:
    """A value as one writes it in a YAML: `[0, 1]`, `{norm: [layer, rms]}`."""
    if value is None:
        return "nothing"
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.strip().removesuffix("...").strip()


def _check_keys(values: Mapping[str, Any]) -> None:
    known = (*Study.__struct_fields__, *_SINGLE)
    wrong = {str(name): value for name, value in values.items() if name not in known}
    if not wrong:
        return
    baseline, others = [], []
    for name, value in wrong.items():
        suggestion = _suggestion(name, value)
        if "=" in suggestion and ":" not in suggestion:
            baseline.append(suggestion)
        elif suggestion:
            others.append(suggestion)
    fixes = [f"baseline: [{', '.join(baseline)}]", *others] if baseline else others
    problem = "a study has no key of this name" if len(wrong) == 1 else "a study has no keys of these names"
    got = ", ".join(f"{name}: {in_yaml(value)}" for name, value in wrong.items())
    raise ConfigError(problem, got, ", ".join(fixes) or f"one of {', '.join(KEYS)}")


def _suggestion(name: str, value: Any) -> str:
    """What a key that a study does not have probably means: an override, `key: value`, or ''."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    meant = meaning(name, "study")
    if not meant:
        typed = f"{name}={show(value)}"
        keys = [key for key in default_keys() if key.rpartition(".")[2] == name]
        override = f"{keys[0]}={show(value)}" if len(keys) == 1 else meaning(typed)
        meant = did_you_mean(name, KEYS)
        if override or not meant:
            return override
    if meant == "seeds" and type(value) is int:
        value = [value] if plain == "seed" else _seeds_meant(value)
    elif meant in ("lr_grid", "arms", "endpoints") and not isinstance(value, list | dict):
        value = [value]
    return f"{meant}: {in_yaml(value)}"


def _misfit(message: str, values: Mapping[str, Any], typed: Collection[str]) -> ConfigError:
    """The error for a value that msgspec refused: `Expected `int`, got `str` - at `$.seeds[1]``."""
    text = message.partition(" - at ")[0]
    place = re.findall(r"\.([\w]+)|\[(\d+|\.\.\.)\]", message.rpartition("`$")[2])
    steps = [name or number for name, number in place]
    key = steps[0] if steps else ""
    if key == "endpoints" and "endpoint" in values:
        values = {**values, "endpoints": values["endpoint"]}

    def written(name: str, value: Any) -> str:
        """A key as it was given, on the command line or in YAML."""
        if name in typed:
            return f"{name}={','.join(map(show, value if isinstance(value, list) else [value]))}"
        return f"{name}: {in_yaml(value)}"

    if key == "endpoints" and "delta_min" in values:
        got = written("delta_min", values["delta_min"])
        return ConfigError(f"delta_min takes {_MEANING['delta_min']}", got, written("delta_min", 0.02))
    if key not in values:
        missing = re.search(r"required field `(\w+)`", text)
        name = missing[1] if missing else "name"
        description, example = TAKES[name]
        return ConfigError(f"a study has no {name}: {description}", f"no {name}", f"{name}: {in_yaml(example)}")
    description, example = TAKES.get(key, ("what a launch writes", ""))
    value, where = values[key], ""
    if key == "seeds":
        example = _seeds_meant(value) or example
    elif isinstance(value, str) and (near := did_you_mean(value, description.split(" | "))):
        example = near
    if len(steps) > 1:
        text = re.sub(r" matching regex .*", " of another form", text)
        text = re.sub(r"Object contains unknown field", "no key of this name:", text).replace("`", "")
        where = f" ({'/'.join(steps)}: {_MEANING.get(steps[-1]) or text[:1].lower() + text[1:]})"
    return ConfigError(f"{key} takes {description}{where}", written(key, value), written(key, example))


_MEANING = {
    "expected": f"one of {', '.join(get_args(Outcome))}",
    "delta_min": "auto, a number above 0, or as in `2% tokens`",
    "name": "letters, digits, _ . + - = and commas",
}
"""What a key inside another one takes."""


def _seeds_meant(value: Any) -> list[int]:
    """The seeds that `5` or `0-4` probably means; [] for anything else."""
    if type(value) is int:
        return list(range(min(max(value, 1), 20)))
    ends = re.fullmatch(r"\s*(\d{1,9})\s*(?:\.\.|-|:|to)\s*(\d{1,9})\s*", str(value))
    return list(range(int(ends[1]), int(ends[2]) + 1))[:20] if ends else []
