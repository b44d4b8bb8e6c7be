"""A study: a question, a baseline, its arms and its seeds. One class for a study's file, a command line and study.yaml.

    question: Does QK-norm help at a higher rate, also with grouped-query heads?
    baseline: [model=pico]                overrides of every arm, on top of the default configuration
    arms: {qk: qk_norm=rms, both: qk_norm=rms optim.lr=2x}
    vary: {norm: [layer, rms]}            in place of arms: a key and its values
    design: one_at_a_time                 of vary: one_at_a_time or grid
    seeds: 0-7                            or a list
    endpoints: [{name: val_loss, delta_min: 2% compute}, attn/sink_rate]        the first one decides
    settings: {code: data=stdlib, prose: data=files data.files=[notes.txt]}     each is a table of the same arms
    match: params                         or flops, tokens: what every arm shares with the baseline
    worth: on                             trains the baseline at half and twice its tokens too
    lr_grid: auto                         seven rates around each arm's default, or a list of rates

A launch adds what it made of this: see `Study`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from nexus_ablate.config.foreign_words import meaning
from nexus_ablate.config.grammar import show
from nexus_ablate.config.groups import default_keys
from nexus_ablate.config.run_config import OPTION_GROUPS
from nexus_ablate.errors import ConfigError, did_you_mean
from nexus_ablate.runs.naming import BASELINE, NAME, NAME_BYTES
from nexus_ablate.study.arm_overrides import OF_ONE_RUN, in_yaml, merged, overrides_of
from nexus_ablate.study.endpoint import Endpoint

FEWEST_SEEDS = 5
"""Fewer pairs give an interval and no word about it."""
MAX_SEEDS = 1000
WORTH_ARMS = {"baseline-0.5x": 0.5, "baseline-2x": 2.0}
"""The runs of `worth`: the baseline at these multiples of its tokens."""
RATES = 7
STEP = 2**0.5
"""Rates of `lr_grid: auto`, and the factor between neighbours."""
STUDY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9=,+._-]{0,119}")
SETTING_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
DESIGNS = ("one_at_a_time", "grid")
MATCHES = ("none", "params", "flops", "tokens")


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question, a baseline, its arms and seeds.

    Attributes:
        baseline: Overrides of every arm.
        arms: Overrides of each arm beside the baseline's, by its name.
        vary: In place of arms: values of each key.
        lr_grid: Learning rates; "auto" means `RATES` around each arm's own; [] means that rates are not tuned.
        setting: The setting whose runs lie in this study's folder; set by a launch, as all below.
        added_seeds: Those of `seeds` that were added when results had been seen.
        source: Hash of the code that trains the study.
        configs: Hash of each arm's configuration with every default, by its name.
        equal: Arms with the configuration of another one, which is not trained twice.
        refused: Arms that cannot be run, each with the reason.
        multirun: Made by `-m`.
        own: Of a launched study the one of each setting, as it was launched: there, other arms may be equal, refused or
            matched.
    """

    name: str
    question: str = ""
    baseline: list[str] = field(default_factory=list)
    arms: dict[str, list[str]] = field(default_factory=dict)
    vary: dict[str, list[str]] = field(default_factory=dict)
    design: str = "one_at_a_time"
    seeds: list[int] = field(default_factory=lambda: [*range(8)])
    endpoints: list[Endpoint] = field(default_factory=lambda: [Endpoint("val_loss")])
    settings: dict[str, list[str]] = field(default_factory=dict)
    lr_grid: list[float] | str = field(default_factory=list)
    match: str = "none"
    worth: bool = False
    setting: str = ""
    added_seeds: list[int] = field(default_factory=list)
    source: str = ""
    configs: dict[str, str] = field(default_factory=dict)
    equal: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    multirun: bool = False
    own: dict[str, Study] = field(default_factory=dict, compare=False)

    @property
    def folder_name(self) -> str:
        """The folder of its runs in runs_dir."""
        return f"{self.name}@{self.setting}" if self.setting else self.name

    @property
    def primary(self) -> Endpoint:
        """The endpoint that decides."""
        return self.endpoints[0]

    @property
    def cells(self) -> int:
        """Words about differences that share the error rate: arms x endpoints x settings, refused arms included.

        An arm that equals another one in this setting may differ from it in the next.
        """
        arms = len(self.arms) + len(self.refused) + (len(self.equal) if self.settings else 0)
        return arms * len(self.endpoints) * max(len(self.settings), 1)

    def overrides_of(self, arm: str) -> list[str]:
        """All overrides of an arm of this study, in its setting; of the baseline too."""
        own = [] if arm == BASELINE else self.arms[arm]
        return merged(self.baseline, self.settings.get(self.setting, []), own)

    def rates(self, default: float) -> list[float]:
        """The learning rates of an arm whose own is `default`; [] without a grid."""
        if self.lr_grid == "auto":
            steps = range(-(RATES // 2), RATES // 2 + 1)
            return [float(f"{default * STEP**step:.3g}") if step else default for step in steps]
        return [*map(float, self.lr_grid)]


# ------------------------------------------------------------------------------------------------------------- reading


def from_values(values: Mapping[str, Any], typed: Collection[str] = ()) -> Study:
    """The study that a file, a command line or both describe.

    Args:
        values: What was written, by key.
        typed: The keys from the command line, for the form of a suggestion.

    Raises:
        ConfigError: A key does not exist, a value does not fit, or two of them contradict each other.
    """
    read = {}
    for key, value in values.items():
        if key not in KEYS:
            raise unknown_key(str(key), value)
        takes, example, convert = KEYS[key]
        try:
            read[key] = convert(value)
        except (ValueError, TypeError, KeyError, AttributeError):
            is_typed = key in typed
            form = "{}={}" if is_typed else "{}: {}"
            got = form.format(key, value if is_typed and isinstance(value, str) else in_yaml(value))
            if key == "seeds" and re.fullmatch("[1-9][0-9]{0,2}", str(value)):  # three seeds, rather than the seed 3
                example = f"0-{int(value) - 1}"
            fix = form.format(key, example)
            raise ConfigError(f"{key} takes {takes}", got, shlex.quote(fix) if is_typed else fix) from None
    study = Study(**read)
    _check(study)
    return study


def unknown_key(key: str, value: Any) -> ConfigError:
    """The error for a key that a study does not have: it may be called otherwise here, or be an override."""
    got = f"{key}: {in_yaml(value)}"
    problem = "a study has no key of this name"
    if key not in OF_ONE_RUN and (key in default_keys() or key.partition(".")[0] in OPTION_GROUPS):
        return ConfigError(problem, got, f"baseline: [{key}={show(value)}]")
    if meant := meaning(key, "study"):
        return ConfigError(problem, got, f"{meant}: {KEYS[meant][1]}")
    near = did_you_mean(key, TYPED)
    return ConfigError(problem, got, f"{near}: {in_yaml(value)}" if near else f"one of {', '.join(TYPED)}")


def _check(study: Study) -> None:
    """Check what two keys say together.

    Raises:
        ConfigError: They contradict each other.
    """
    name = study.name
    if study.arms and study.vary:
        raise ConfigError(f"study {name} has arms and vary", f"vary: {in_yaml(study.vary)}", "leave vary out")
    if study.design == "grid" and not study.vary:
        raise ConfigError("design is about vary", "design: grid without vary", "leave design out")
    for arm in study.arms:
        if arm == BASELINE or arm in WORTH_ARMS:
            raise ConfigError("this name is the baseline's", f"arms: {{{arm}: ...}}", "another name, such as control")
    if len(study.settings) == 1:
        raise ConfigError("settings are two or more", in_yaml(study.settings), "its overrides in baseline")
    names = [endpoint.name for endpoint in study.endpoints]
    if len({*names}) < len(names):
        raise ConfigError(
            "two endpoints have one name", ", ".join(names), f"endpoints: {show([*dict.fromkeys(names)])}"
        )
    for endpoint in study.endpoints:
        if endpoint.compute and endpoint is not study.primary:
            raise ConfigError("a margin in compute is of the first endpoint", endpoint.name, "a number")
    if (study.worth or study.primary.compute) and study.primary.name != "val_loss":
        raise ConfigError("worth is about val_loss", study.primary.name, "endpoints: [val_loss]")
    if study.worth and study.lr_grid:
        raise ConfigError("worth cannot be read beside lr_grid", f"lr_grid: {study.lr_grid}", "leave worth out")
    if study.primary.compute and not study.worth:
        got = f"delta_min: {study.primary.delta_min} without worth"
        raise ConfigError("a margin in compute needs the runs of worth", got, "worth: on")


# ------------------------------------------------------------------------------------------------- the keys of a study


def _matching(pattern: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ValueError
        return value

    return convert


def _by_name(pattern: re.Pattern[str], of: str) -> Callable[[Any], dict[str, list[str]]]:
    """Overrides by name, each as a list or in one string."""

    def convert(value: Any) -> dict[str, list[str]]:
        overrides = {}
        for name, texts in value.items():
            if not isinstance(name, str) or not pattern.fullmatch(name) or len(name) > NAME_BYTES:
                raise ValueError
            overrides[name] = overrides_of(texts, f"{of} {name}")
        return overrides

    return convert


def _vary(value: Any) -> dict[str, list[str]]:
    keys = {}
    for key, values in value.items():
        if not isinstance(key, str) or not isinstance(values, list) or not values:
            raise ValueError
        keys[key] = [item if isinstance(item, str) else show(item) for item in values]
        overrides_of([f"{key}={item}" for item in keys[key]])
    return keys


def seeds_in(value: Any) -> list[int]:
    """Seeds from a list, or as text: `0-7`, `0,1,2`, `0-4,10-14`, `[3]`.

    Raises:
        ValueError: They are none, a seed stands twice, or there are too many.
    """
    if re.fullmatch("0*[1-9][0-9]*", str(value)):
        raise ValueError  # is 3 the seed 3, or three seeds?
    items = value if isinstance(value, list) else str(value).strip("[]").split(",")
    seeds: list[int] = []
    for item in items:
        bounds = re.fullmatch(r"\s*([0-9]{1,10})(?:-([0-9]{1,10}))?\s*", str(item))
        if bounds is None:
            raise ValueError
        named = range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)
        if not 0 < len(named) <= MAX_SEEDS:
            raise ValueError
        seeds += named
    if not seeds or len({*seeds}) < len(seeds) or len(seeds) > MAX_SEEDS or max(seeds) >= 2**31:
        raise ValueError
    return seeds


def _endpoints(value: Any) -> list[Endpoint]:
    if not isinstance(value, list) or not value:
        raise ValueError
    endpoints = []
    for item in value:
        written: dict[str, Any] = {"name": item} if isinstance(item, str) else item
        if re.fullmatch("[0-9.]+e[+-]?[0-9]+", str(written.get("delta_min"))):  # text to YAML 1.1, without a point
            written = written | {"delta_min": float(written["delta_min"])}
        endpoints.append(Endpoint(**written))
    return endpoints


def _lr_grid(value: Any) -> list[float] | str:
    if value == "auto":
        return "auto"
    rates = [float(rate) for rate in value]
    if len(rates) < 3 or min(rates) <= 0 or rates != sorted({*rates}):
        raise ValueError
    return rates


def _switch(value: Any) -> bool:
    return {"on": True, "true": True, "off": False, "false": False}[str(value).lower()]


def _overrides(value: Any) -> list[str]:
    return overrides_of(value, "the baseline")


def _of_type(kind: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return convert


KEYS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "name": ("letters, digits, . _ -", "mine", _matching(STUDY_NAME.pattern)),
    "question": ("a sentence", "Is it better?", _of_type(str)),
    "baseline": ("a list of overrides", "[model=femto]", _overrides),
    "arms": ("names with their overrides", "{rms: norm=rms, both: norm=rms bias=on}", _by_name(NAME, "arm")),
    "vary": ("keys with a list of values", "{norm: [layer, rms]}", _vary),
    "design": (" | ".join(DESIGNS), "one_at_a_time", _matching("|".join(DESIGNS))),
    "seeds": ("seeds, each once", "0-7", seeds_in),
    "endpoints": ("a list of measures", "[val_loss]", _endpoints),
    "settings": (
        "names with their overrides",
        "{shallow: model.n_layers=2, deep: model.n_layers=8}",
        _by_name(SETTING_NAME, "setting"),
    ),
    "lr_grid": ("auto, or three or more rising rates", "auto", _lr_grid),
    "match": (" | ".join(MATCHES), "params", _matching("|".join(MATCHES))),
    "worth": ("on | off", "on", _switch),
}
"""Each key: what it takes, a value that it accepts, and how it is read."""
TYPED = tuple(KEYS)
"""The keys that a user writes."""
BY_LAUNCH = {
    "setting": str,
    "added_seeds": list,
    "source": str,
    "configs": dict,
    "equal": dict,
    "refused": dict,
    "multirun": bool,
}
KEYS |= {key: ("what a launch writes", "leave it out", _of_type(kind)) for key, kind in BY_LAUNCH.items()}


def encode(study: Study) -> dict[str, Any]:
    """The study as plain data, without what is as it would be anyway."""
    default = Study(name=study.name)
    values: dict[str, Any] = {}
    for key in KEYS:
        value = getattr(study, key)
        if value != getattr(default, key) or key in ("name", "seeds", "endpoints"):
            values[key] = value
    values["endpoints"] = [endpoint.written for endpoint in study.endpoints]
    for key in ("arms", "settings"):
        if key in values:
            values[key] = {name: shlex.join(texts) for name, texts in values[key].items()}
    return values
