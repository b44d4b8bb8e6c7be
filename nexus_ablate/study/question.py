"""What a study asks: the endpoints it judges, the strata in which it repeats the comparison, and what a claim expects.

endpoints: {attn/sink_rate: {delta_min: 0.05}, val_loss: {}}     the first is the primary one
endpoints: {val_loss: {delta_min: 2% tokens}}                    what 2% more training tokens are worth; see margin.py
strata: {shallow: model.n_layers=4, deep: [model.n_layers=24, optim.lr=5e-4]}
strata: {model.n_layers: [4, 24]}                                the same for one key
rungs: [2, 3, 4, 6]                                              strata that are sizes: a ladder
claim: Without a sink there are no massive activations
expects:
  - {arm: gate=headwise, attn/sink_rate: lower}
  - {arm: placement=post, stratum: deep, val_loss: fails}        without `stratum`: in each
requires: {attn/sink_rate: ">= 0.1"}                             of the baseline, or the claim is not testable here
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from nexus_ablate.config.grammar import Constraint, show
from nexus_ablate.errors import ConfigError, did_you_mean, unknown
from nexus_ablate.measure.measures import find
from nexus_ablate.runs.formats import CONDITION, EXPECTED

_MARGIN = Constraint("auto | float (0, inf)")
_TOKENS = re.compile(r"(\d+(?:\.\d+)?) ?% tokens")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,59}")
_STRATUM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")
FEWEST_RUNGS = 4
"""With three, every line of three parameters passes through all of them."""
HEAD_DIM = 32
_LEVELS = ("off", "standard", "full")


@dataclass(frozen=True)
class Expected:
    """What the study expects of an arm, given by its overrides or its name; `stratum` '' means each."""

    arm: str
    endpoint: str
    expected: str
    stratum: str = ""


def endpoints_from(values: dict[str, Any]) -> dict[str, Any]:
    """The smallest difference that matters (`auto`, a number or `N% tokens`) by endpoint, the primary one first.

    Raises:
        ConfigError: There is no such measure, or a margin is invalid.
    """
    endpoints = values.get("endpoints")
    if endpoints is None:
        endpoints = {values.get("endpoint", "val_loss"): {"delta_min": values.get("delta_min", "auto")}}
    elif name := next((name for name in ("endpoint", "delta_min") if name in values), ""):
        raise ConfigError(f"{name} and endpoints say the same", f"{name}={show(values[name])}", "endpoints alone")
    endpoints = {name: {} for name in endpoints} if isinstance(endpoints, list) else endpoints
    if not isinstance(endpoints, dict) or not endpoints:
        raise ConfigError("endpoints maps measures to their keys", show(endpoints), "endpoints: {val_loss: {}}")
    margins = {}
    for name, keys in endpoints.items():
        measure = find(str(name))
        if measure.unit in ("text", "hash", "index") or "{" in str(name):
            raise ConfigError("an endpoint is one number", str(name), "endpoints: {val_loss: {}}")
        keys = keys or {}
        if not isinstance(keys, dict):
            raise ConfigError(f"endpoint {name} has keys", show(keys), f"{{{name}: {{delta_min: 0.01}}}}")
        if wrong := next((key for key in keys if key != "delta_min"), None):
            raise unknown(f"endpoint {name} has no key of this name", str(wrong), ["delta_min"])
        margin = number(keys.get("delta_min", "auto"))
        if share_of_tokens(margin) and (margins or name != "val_loss"):
            raise ConfigError(
                "a margin in training tokens is about val_loss, as the primary endpoint", name, "a number"
            )
        margins[str(name)] = margin if share_of_tokens(margin) else _MARGIN.accept("delta_min", margin)
    return margins


def number(value: Any) -> Any:
    """A number for a string such as `1e-3`, which YAML reads as text; other values unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def share_of_tokens(margin: Any) -> float:
    """0.02 for `2% tokens`; 0 where the margin has another form."""
    match = _TOKENS.fullmatch(margin) if isinstance(margin, str) else None
    return float(match[1]) / 100 if match else 0.0


def strata_from(value: Any) -> dict[str, Any]:
    """The overrides of each stratum by its name; {} if there are none.

    Raises:
        ConfigError: It is not a mapping, or a name cannot be that of a folder.
    """
    example = "strata: {shallow: model.n_layers=4, deep: model.n_layers=24}"
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError("strata maps names to overrides", show(value), example)
    strata = {}
    for name, overrides in value.items():
        if isinstance(overrides, list) and not any("=" in str(item) for item in overrides):
            last = str(name).rpartition(".")[2]
            strata |= {f"{last}-{show(item)}": [f"{name}={show(item)}"] for item in overrides}
        else:
            strata[str(name)] = overrides
    for name in strata:
        if not _STRATUM.fullmatch(name):
            raise ConfigError("a stratum's name is part of a folder's: letters, digits, . _ -", name, example)
    if len(strata) < 2:
        raise ConfigError("strata are two or more", show(value), example)
    return strata


def rungs_from(rungs: list[int], tokens_per_parameter: float, strata: Any, endpoint: str) -> dict[str, list[str]]:
    """The overrides of each size of a ladder, by its name: all of one shape, and all trained equally long for it.

    A block of width d has about 12 d^2 parameters, whatever its kind.

    Raises:
        ConfigError: There are too few sizes, strata beside them, or another endpoint than the loss.
    """
    if strata:
        raise ConfigError("rungs are strata of their own", "strata and rungs", "a study for each")
    if len(set(rungs)) < FEWEST_RUNGS or sorted(set(rungs)) != rungs:
        raise ConfigError(f"a ladder has {FEWEST_RUNGS} rising sizes or more", show(rungs), "rungs=2,3,4,6")
    if endpoint != "val_loss":
        raise ConfigError("a ladder is about val_loss", endpoint, "endpoints: {val_loss: {}}")
    named = {}
    for layers in rungs:
        width = HEAD_DIM * layers
        tokens = round(tokens_per_parameter * 12 * layers * width**2)
        shape = [f"model.n_layers={layers}", f"model.d_model={width}", f"model.n_heads={layers}"]
        named[f"layers-{layers}"] = [*shape, f"train.tokens={tokens}"]
    return named


def arm_name_from(entry: dict[str, Any]) -> tuple[str, Any]:
    """Name and overrides of an arm given as `{name: swiglu, set: ffn=swiglu}`.

    Raises:
        ConfigError: It has other keys, or the name cannot be that of a folder.
    """
    example = "{name: swiglu, set: ffn=swiglu}"
    if entry.keys() != {"name", "set"} or not isinstance(entry["name"], str) or not _NAME.fullmatch(entry["name"]):
        raise ConfigError("a named arm has a name (letters, digits, . _ + -) and set", show(entry), example)
    if entry["name"] == "baseline":
        raise ConfigError("no other arm can have the baseline's name", "baseline", example)
    return entry["name"], entry["set"]


def expects_from(value: Any, endpoints: dict[str, Any], strata: dict[str, Any]) -> list[Expected]:
    """What a claim expects.

    Raises:
        ConfigError: An entry has another form, or names an endpoint or a stratum that the study does not have.
    """
    example = f"expects: [{{arm: norm=layer, {next(iter(endpoints))}: equivalent}}]"
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ConfigError("expects is a list of mappings", show(value), example)
    expects = []
    for entry in value:
        arm, stratum = entry.get("arm"), entry.get("stratum", "")
        judged = {name: value for name, value in entry.items() if name not in ("arm", "stratum")}
        if not isinstance(arm, str) or not judged:
            raise ConfigError("an expectation has an arm and an endpoint", show(entry), example)
        if stratum and stratum not in strata:
            raise unknown("the study has no stratum of this name", str(stratum), strata)
        for name, expected in judged.items():
            if name not in endpoints:
                raise unknown("the study has no endpoint of this name", str(name), endpoints)
            if expected not in EXPECTED:
                near = did_you_mean(str(expected), EXPECTED) or "lower"
                raise ConfigError(f"an arm can be expected to be one of {', '.join(EXPECTED)}", show(expected), near)
            expects.append(Expected(arm, str(name), expected, stratum))
    return expects


def requires_from(value: Any) -> dict[str, str]:
    """Conditions on the baseline, by measure.

    Raises:
        ConfigError: There is no such measure, or a condition is not `>= NUMBER` or `<= NUMBER`.
    """
    if not isinstance(value, dict):
        raise ConfigError("requires maps measures to conditions", show(value), 'requires: {attn/sink_rate: ">= 0.1"}')
    for name, condition in value.items():
        find(str(name))
        if not isinstance(condition, str) or not CONDITION.fullmatch(condition):
            raise ConfigError(f"requires {name}: a bound on the baseline", show(condition), f'{name}: ">= 0.1"')
    return {str(name): condition for name, condition in value.items()}


def share_of(endpoints: dict[str, Any], expects: list[Expected], strata: dict[str, Any]) -> float:
    """The share of the 5% that each cell has: a cell is the primary endpoint, or one that is expected, in a stratum."""
    primary = next(iter(endpoints))
    cells = 0
    for stratum in strata or [""]:
        weighed = [e for e in expects if e.stratum in ("", stratum) and e.expected not in ("trains", "fails")]
        cells += len({primary, *(e.endpoint for e in weighed)})
    return 1 / cells


def needed(names: list[str]) -> tuple[str, list[str]]:
    """The probe level and the evaluations that measure these numbers."""
    level, evaluations = "off", []
    for name in names:
        where = find(name).where
        if any(place in _LEVELS for place in where):
            level = max(level, next(place for place in _LEVELS if place in where), key=_LEVELS.index)
        elif not {"step", "summary"} & {*where}:
            evaluations.append(name.partition("/")[0])
        elif "probe=standard" in find(name).only:
            level = max(level, "standard", key=_LEVELS.index)
    return level, list(dict.fromkeys(evaluations))


def measuring(probe: str, evals: list[str], names: list[str]) -> list[str]:
    """The overrides with which runs of a configuration with this probe and these evaluations measure the numbers."""
    level, evaluations = needed(names)
    more = [name for name in evaluations if name not in evals]
    overrides = [f"probe={level}"] if _LEVELS.index(level) > _LEVELS.index(probe) else []
    return overrides + ([f"evals=[{','.join([*evals, *more])}]"] if more else [])
