"""The definition of a study, from a YAML file, `key=value` on the command line, or both.

    question: Does RMSNorm lose anything against LayerNorm?
    baseline: [train.steps=400]           overrides of every arm, on top of the default configuration
    design: one_at_a_time                 or leave_one_out, grid, pairwise_interactions, list
    factors: {norm: [layer, rms]}         a key and its values; not with `arms`
    arms: [norm=layer, [norm=rms, bias=on]]    overrides, as typed or as a list; design: list
    seeds: [0, 1, 2, 3, 4]                or {looks: [5, 8, 12, 20]}: more seeds only for arms that are undecided

Endpoints, strata and claims: study/question.py. The other keys are in `Definition`. On the command line `vary.KEY=A,B`
is a factor, the keys above are themselves, and every other override joins the baseline.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from nexus_ablate.config.grammar import Constraint, show
from nexus_ablate.config.options import conf_dir
from nexus_ablate.config.run_config import key, keys_of
from nexus_ablate.errors import ConfigError, did_you_mean, unknown
from nexus_ablate.plain_data import UNREADABLE, load_yaml, misfit
from nexus_ablate.runs.files import read_regular
from nexus_ablate.runs.record import DOCUMENT_BYTES, read_study
from nexus_ablate.study.overrides import YAML, is_override, key_of, merged, overrides_of, says_how
from nexus_ablate.study.question import (
    Expected,
    arm_name_from,
    endpoints_from,
    expects_from,
    number,
    requires_from,
    rungs_from,
    share_of,
    share_of_tokens,
    strata_from,
)

_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")
"""The names that `experiment`, the folder of a study's runs, can have."""
SEEDS = [0, 1, 2, 3, 4]
TUNING_SEEDS = [1001]
MAX_SEEDS = 1000
TOKENS_PER_PARAMETER = 2.0
"""About that of the default run. 20 is near the best use of compute (arXiv:2203.15556), ten times as long."""
LOOK_WEIGHTS = [0.15, 0.20, 0.25, 0.40]
"""Of four looks; another number of looks is weighted by their seeds."""
_LOOKS = {"looks": f"list of int [2, {MAX_SEEDS}]", "weights": "list of float (0, 1)"}
_SCALAR = (bool, int, float, str)
_VALUE = (*_SCALAR, [_SCALAR])
"""What a level of a factor may be: a list is the value of a key such as `data.files`."""


@dataclass(frozen=True)
class Definition:
    """A checked study definition whose arms are not composed yet."""

    name: str = key("text", "the folder of runs_dir that holds the study")
    question: str = key("text", "what the study is to decide")
    baseline: list[str] = key("list of text", "overrides of every arm")
    design: str = key(
        "one_at_a_time | leave_one_out | grid | pairwise_interactions | list", "how factors become arms; list: by hand"
    )
    seeds: list[int] = key("list of int [0, 2147483647]", "every arm is trained with each")
    match: str = key("none | params | flops | tokens | seconds", "what every arm must have as much of as the baseline")
    lr_grid: list[float] = key("list of float (0, inf)", "learning rates that each arm is tuned over")
    tuning_seeds: list[int] = key("list of int [0, 2147483647]", "seeds of the tuning runs, none of them in `seeds`")
    endpoint: str = key("text", "the measure that is compared at the end of training")
    delta_min: Any = key("auto | float (0, inf)", "smallest difference that matters, in units of the endpoint")
    rungs: list[int] = key("list of int [1, 64]", "a ladder of sizes: n_layers of each, of width 32 n_layers")
    tokens_per_parameter: float = key("float (0, inf)", "training tokens of a rung for each parameter of its blocks")
    factors: dict[str, list[str]] = field(default_factory=dict)
    arms: list[list[str]] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    """Rising numbers of seeds, up to that of `seeds`. After each look only undecided arms get the seeds of the next."""
    look_weights: list[float] = field(default_factory=list)
    """Each look's share of the error rate; they add up to 1."""
    names: dict[str, str] = field(default_factory=dict)
    """Names of arms, by their overrides in one text."""
    secondary: dict[str, Any] = field(default_factory=dict)
    """`delta_min` of each further endpoint."""
    strata: dict[str, list[str]] = field(default_factory=dict)
    """The overrides of each stratum, which is launched as a study of its own (`strata_of`)."""
    claim: str = ""
    stated: str = ""
    """The claim as it is usually made, before it was restated so that it can be tested."""
    tier: str = "C"
    """C: minutes to hours on two CPU cores. G: needs a GPU."""
    cost: str = ""
    """Runs and time of the whole study, for readers."""
    expects: list[Expected] = field(default_factory=list)
    requires: dict[str, str] = field(default_factory=dict)
    delta_min_tokens: float = 0.0
    """The share of training tokens that `delta_min` is worth, where it was given as such."""
    share: float = 1.0
    """Of the 5%, for each endpoint that gets a verdict."""
    stratum: str = ""
    rung: int = 0
    """Of a stratum that is a size of a ladder: its n_layers."""
    of: str = ""
    """The study that this stratum belongs to."""
    all_strata: list[str] = field(default_factory=list)
    """The names of the strata of that study."""
    confirms: str = ""
    """The study whose claims this one judges on fresh seeds."""

    @property
    def endpoints(self) -> dict[str, Any]:
        """`delta_min` by endpoint, the primary one first."""
        return {self.endpoint: self.delta_min} | self.secondary

    @property
    def first_seeds(self) -> list[int]:
        """The seeds that every arm is trained with: those of the first look, or all."""
        return self.seeds[: self.looks[0]] if self.looks else self.seeds

    def __post_init__(self) -> None:
        if bool(self.factors) == bool(self.arms):
            got = f"factors {show(self.factors)} beside {len(self.arms)} arms" if self.arms else "neither"
            fix = "a study of its own for vary.KEY" if self.arms else "factors: {norm: [layer, rms]}"
            raise ConfigError(f"study {self.name} needs factors or arms", got, fix)
        if self.arms and self.design != "list":
            problem = f"study {self.name} has arms, but design={self.design} builds arms from factors"
            raise ConfigError(problem, f"design={self.design}", "design=list")
        if self.factors and self.design == "list":
            raise ConfigError(
                f"study {self.name} has factors, but design=list does not use them", "design=list", "design=grid"
            )
        if self.design == "leave_one_out" and (short := [k for k, v in self.factors.items() if len(v) < 2]):
            fix = "the value in the full configuration, then its replacements: {qk_norm: [rms, none]}"
            raise ConfigError("leave_one_out needs two values of each factor", ", ".join(short), fix)
        for name in ("seeds", "tuning_seeds", "lr_grid"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ConfigError(
                    f"{name} has duplicates", show(values), f"{name}={','.join(map(show, dict.fromkeys(values)))}"
                )
        if not self.seeds:
            raise ConfigError("a study needs seeds", "[]", "seeds=0,1,2,3,4")
        if len(self.seeds) > MAX_SEEDS:
            raise ConfigError(f"a study has at most {MAX_SEEDS} seeds", str(len(self.seeds)), "seeds=0,1,2,3,4")
        if shared := set(self.seeds) & set(self.tuning_seeds):
            problem = "tuning_seeds and seeds overlap: a seed that chose the learning rate favours its arm"
            raise ConfigError(problem, show(sorted(shared)), f"tuning_seeds={TUNING_SEEDS[0]}")
        if bool(self.lr_grid) != bool(self.tuning_seeds):
            got = f"lr_grid={show(self.lr_grid)} and tuning_seeds={show(self.tuning_seeds)}"
            fix = f"lr_grid=3e-4,1e-3,3e-3 tuning_seeds={TUNING_SEEDS[0]}"
            raise ConfigError("lr_grid and tuning_seeds require each other", got, fix)


KEYS = keys_of(Definition)
_QUESTION = (
    "endpoints",
    "strata",
    "claim",
    "stated",
    "tier",
    "cost",
    "expects",
    "requires",
    "delta_min_tokens",
    "share",
    "stratum",
    "rung",
    "of",
    "all_strata",
)
"""Further keys of a study's file; study/question.py reads them. The last six are only those of a study.yaml."""


@dataclass(frozen=True)
class Request:
    """A study as requested by a command: its definition, and the overrides for how its runs are carried out."""

    definition: Definition
    launch: list[str]
    runs_dir: Path
    solved: dict[str, dict[str, Any]] = field(default_factory=dict)
    """How the arms were matched in the study that this one confirms, by the arms' overrides."""

    @property
    def directory(self) -> Path:
        return self.runs_dir / self.definition.name


def read_request(words: list[str]) -> Request:
    """The study requested by `nexus-ablate study NAME KEY=VALUE ...`.

    Args:
        words: NAME, then the overrides. NAME is the path of a YAML file, a shipped study, a study launched before, or a
            new name together with `vary.KEY=`.

    Raises:
        ConfigError: The study does not exist, or its definition is invalid.
    """
    source, *rest = words or [""]
    if is_override(source) or not source:
        name, _, value = source.partition("=")
        command = f"nexus-ablate study {value if name in ('experiment', 'name') else f'norms {source}'}".rstrip()
        raise ConfigError("the name of the study comes first", source, command)
    values, looks, factors, overrides, launch = {}, {}, {}, [], []
    for text in rest:
        name, _, value = text.partition("=")
        if name.startswith("vary."):
            if name.removeprefix("vary.") in factors:
                raise ConfigError(f"{name} is given twice", text, f"{name}=A,B")
            factors[name.removeprefix("vary.")] = _items(name, value)
        elif name in KEYS and name != "baseline":
            values[name] = _flat(_items(name, value)) if KEYS[name].text.startswith("list") else number(value)
        elif name in ("seeds.looks", "seeds.weights"):
            looks[name.removeprefix("seeds.")] = _flat(_items(name, value))
        elif name in ("seed", "rerun", "experiment"):
            fix = f"name={value}" if name == "experiment" else "seeds=0,1,2"
            raise ConfigError(f"a study does not take {name}", text, fix)
        elif says_how(name):
            launch.append(text)
        else:
            overrides.append(text)
    if looks and "seeds" in values:
        got = f"seeds={show(values['seeds'])} beside seeds.{next(iter(looks))}"
        raise ConfigError("looks already define the seeds", got, "seeds.looks=5,8,12,20 alone, or seeds=0,1,2,3,4")
    values |= {"seeds": looks} if looks else {}
    launch = merged(launch)
    runs_dir = runs_dir_of(launch)
    definition = _definition(source, values, factors, overrides, runs_dir)
    if not _FOLDER.fullmatch(definition.name):
        safe = re.sub("[^A-Za-z0-9]+", "_", definition.name).strip("_") or "mine"
        command = f"nexus-ablate study {shlex.quote(source)} name={safe}" if source.endswith(YAML) else safe
        raise ConfigError("a study's name is that of a folder: letters, digits, . _ @ -", definition.name, command)
    return Request(replace(definition, baseline=merged([*definition.baseline, *overrides])), launch, runs_dir)


def runs_dir_of(launch: list[str]) -> Path:
    """The folder for the runs of a launch: `runs_dir` in its overrides, or `runs`."""
    return Path(next((text.partition("=")[2] for text in launch if key_of(text) == "runs_dir"), "runs"))


def _definition(
    source: str, overriding: dict[str, Any], factors: dict[str, list[Any]], overrides: list[str], runs_dir: Path
) -> Definition:
    values: dict[str, Any]
    shipped = shipped_studies()
    stored = runs_dir / source / "study.yaml"
    if source.endswith(YAML):
        values = read_file(Path(os.path.expanduser(source)))
    elif source in shipped:
        values = {"name": source} | _read(shipped[source])
    elif factors:
        varied = "; ".join(f"{k}={','.join(map(show, v))}" for k, v in factors.items())
        values = {"name": source, "question": f"What does it change: {varied}?"}
    elif source and os.path.isfile(stored):
        values = stored_definition(read_study(stored.parent) or {})
    elif choices := [text for text in overrides if "," in text and "[" not in text]:
        problem = "a key with several values in a study is written vary.KEY"
        raise ConfigError(problem, choices[0], f"nexus-ablate study {source} vary.{choices[0]}")
    else:
        raise unknown_study(source, runs_dir, "nexus-ablate study {}")
    if "delta_min" in overriding:
        values.pop("delta_min_tokens", None)
    values["factors"] = (values.get("factors") or {}) | factors
    if isinstance(endpoints := values.get("endpoints"), dict) and overriding.keys() & {"endpoint", "delta_min"}:
        first = next(iter(endpoints))  # endpoint= and delta_min= on the command line are about the primary one
        margin = overriding.pop("delta_min", (endpoints[first] or {}).get("delta_min", "auto"))
        others = {name: keys for name, keys in endpoints.items() if name != first}
        values["endpoints"] = {overriding.pop("endpoint", first): {"delta_min": margin}} | others
    return define(values | overriding)


def unknown_study(name: str, runs_dir: Path, form: str = "{}") -> ConfigError:
    """The error for a study that is neither shipped nor launched; suggests the nearest name."""
    known = [*shipped_studies(), *(path.parent.name for path in runs_dir.glob("*/study.yaml"))]
    if strata := [study for study in known if study.startswith(f"{name}@")]:
        return ConfigError("each stratum is a study of its own", name, f"one of {', '.join(sorted(strata))}")
    near = did_you_mean(name, known)
    fix = form.format(near) if near else "nexus-ablate list studies"
    return ConfigError("there is no study of this name", name, fix)


def shipped_studies() -> dict[str, Path]:
    """The studies of conf/studies by name."""
    return {path.stem: path for path in sorted(conf_dir().joinpath("studies").glob("*.yaml"))}


def define(values: dict[str, Any]) -> Definition:
    """A checked definition from the values of a YAML, defaults filled in.

    Raises:
        ConfigError: A key is unknown, or a value is invalid.
    """
    known = {**KEYS, **dict.fromkeys(("factors", "arms", *_QUESTION))}
    for name in values:
        if name not in known:
            raise unknown("a study has no key of this name", name, known)
    factors, arms = values.get("factors") or {}, values.get("arms") or []
    if (problem := misfit(factors, {str: [_VALUE]})) or [] in factors.values():
        got = problem or show(factors)
        raise ConfigError("factors is a mapping of keys to lists of values", got, "factors: {norm: [layer, rms]}")
    if not isinstance(arms, list):
        raise ConfigError("arms is a list", show(arms), "arms: [norm=layer, [norm=rms, bias=on]]")
    names, requested = {}, []
    for entry in arms:
        name, overrides = arm_name_from(entry) if isinstance(entry, dict) else ("", entry)
        requested.append(overrides_of(overrides))
        names |= {" ".join(requested[-1]): name} if name else {}
    if len(set(names.values())) < len(names):
        raise ConfigError("two arms have one name", ", ".join(names.values()), "a name for each")
    endpoints = endpoints_from(values)
    endpoint, *others = endpoints
    lr_grid = values.get("lr_grid") or []
    defaults = {
        "baseline": [],
        "design": "list" if arms else "one_at_a_time",
        "seeds": SEEDS,
        "match": "none",
        "lr_grid": [],
        "rungs": [],
        "tokens_per_parameter": TOKENS_PER_PARAMETER,
        "tuning_seeds": TUNING_SEEDS if lr_grid else [],
    }
    complete = defaults | {k: v for k, v in values.items() if k in KEYS}
    worth = share_of_tokens(endpoints[endpoint])
    complete |= {"endpoint": endpoint, "delta_min": "auto" if worth else endpoints[endpoint]}
    complete["baseline"] = overrides_of(complete["baseline"], "the baseline")
    if "question" not in complete:
        raise ConfigError(
            f"study {complete['name']} has no question", "no `question` key", "question: what the study should decide"
        )
    for name, levels in factors.items():
        overrides_of([f"{name}={show(level)}" for level in levels])  # raises where the key cannot be part of an arm
    if type(seeds := complete["seeds"]) is int:
        example = f"seeds: {show(list(range(min(max(seeds, 1), 20))))}"
        raise ConfigError("seeds is a list of seeds, not their number", f"seeds: {seeds}", example)
    looks, weights = _looks(complete["seeds"]) if isinstance(complete["seeds"], dict) else ([], [])
    if looks:
        complete["seeds"] = list(range(looks[-1]))
    complete["tokens_per_parameter"] = number(complete["tokens_per_parameter"])
    for name in ("lr_grid", "seeds", "tuning_seeds", "rungs"):
        if isinstance(complete[name], list):
            complete[name] = [number(item) for item in complete[name]]
    accepted: dict[str, Any] = {name: KEYS[name].accept(name, complete[name]) for name in KEYS}
    strata: dict[str, Any] = strata_from(values.get("strata"))
    if accepted["rungs"]:
        strata = rungs_from(accepted["rungs"], accepted["tokens_per_parameter"], strata, endpoint)
    strata = {name: overrides_of(overrides, f"stratum {name}") for name, overrides in strata.items()}
    expects = expects_from(values.get("expects") or [], endpoints, strata)
    return Definition(
        **accepted,
        factors={name: [show(value) for value in values] for name, values in factors.items()},
        arms=requested,
        names=names,
        secondary={name: endpoints[name] for name in others},
        strata=strata,
        claim=_text("claim", values.get("claim", "")),
        stated=_text("stated", values.get("stated", "")),
        tier=Constraint("C | G").accept("tier", values.get("tier", "C")),  # type: ignore[arg-type]
        cost=_text("cost", values.get("cost", "")),
        expects=expects,
        requires=requires_from(values.get("requires") or {}),
        delta_min_tokens=worth or values.get("delta_min_tokens", 0.0),
        share=values.get("share") or share_of(endpoints, expects, strata),
        stratum=values.get("stratum", ""),
        rung=values.get("rung", 0),
        of=values.get("of", ""),
        all_strata=values.get("all_strata", []),
        looks=looks,
        look_weights=weights,
    )


def strata_of(request: Request) -> list[Request]:
    """The study of each stratum, named STUDY@STRATUM; a study without strata alone."""
    definition = request.definition
    rungs = dict(zip(definition.strata, definition.rungs, strict=False))
    return [
        replace(
            request,
            definition=replace(
                definition,
                name=f"{definition.name}@{stratum}",
                baseline=merged([*definition.baseline, *overrides]),
                strata={},
                rungs=[],
                expects=[replace(e, stratum="") for e in definition.expects if e.stratum in ("", stratum)],
                stratum=stratum,
                rung=rungs.get(stratum, 0),
                of=definition.name,
                all_strata=[*definition.strata],
            ),
        )
        for stratum, overrides in definition.strata.items()
    ] or [request]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} is a sentence", show(value), f"{name}: ...")
    return value


def _looks(seeds: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Looks and their weights from `{looks: [5, 8, 12, 20], weights: [...]}`.

    Raises:
        ConfigError: A key is unknown, or looks or weights are invalid.
    """
    for name in seeds:
        if name not in _LOOKS:
            raise unknown("seeds has no key of this name", str(name), _LOOKS)
    looks = _numbers("looks", seeds.get("looks"))
    if len(looks) < 2 or any(after <= before for before, after in pairwise(looks)):
        problem = f"seeds.looks takes two or more increasing numbers of seeds, from 2 to {MAX_SEEDS}"
        raise ConfigError(problem, show(seeds.get("looks", [])), "seeds.looks=5,8,12,20")
    if seeds.get("weights") is None:
        return looks, LOOK_WEIGHTS if len(looks) == len(LOOK_WEIGHTS) else [look / sum(looks) for look in looks]
    weights = _numbers("weights", seeds["weights"])
    if len(weights) != len(looks) or not math.isclose(math.fsum(weights), 1, abs_tol=1e-6):
        problem = f"seeds.weights takes {len(looks)} positive numbers that add up to 1, one per look"
        raise ConfigError(problem, show(seeds["weights"]), "leave seeds.weights out")
    return looks, weights


def _numbers(name: str, value: Any) -> list[Any]:
    """A list of numbers, checked as `_LOOKS` says; empty if invalid."""
    try:
        numbers = [number(item) for item in value] if isinstance(value, list) else value
        accepted: Any = Constraint(_LOOKS[name]).accept(name, numbers)
        return accepted
    except ConfigError:
        return []


def stored_definition(stored: dict[str, Any]) -> dict[str, Any]:
    """The definition in a study.yaml, as values for `define`, without the overrides that matching added."""
    arms = [
        [text for text in arm["overrides"] if text not in (arm.get("match") or {}).get("solved", [])]
        for arm in stored["arms"]
    ]
    named = {arm["arm"] for arm in stored["arms"] if arm.get("named")}
    requested = {arm["arm"]: " ".join(overrides) for arm, overrides in zip(stored["arms"], arms, strict=True)}
    entries = [
        {"name": arm["arm"], "set": o} if arm["arm"] in named else o
        for arm, o in zip(stored["arms"], arms, strict=True)
    ]
    expects = [
        {"arm": requested.get(e["arm"], e["arm"]), e["endpoint"]: e["expected"]} for e in stored.get("expects", ())
    ]
    kept = {name: stored[name] for name in (*KEYS, *_QUESTION) if name in stored and name not in ("baseline", "design")}
    kept |= {"expects": expects} if expects else {}
    if "endpoints" in kept:
        kept = {name: value for name, value in kept.items() if name not in ("endpoint", "delta_min")}
    if stored.get("looks"):
        kept["seeds"] = {"looks": stored["looks"], "weights": stored.get("look_weights")}
    entries += [other["overrides"] for name in ("equal", "refused") for other in stored.get(name, [])]
    return kept | {"baseline": stored["baseline"]["overrides"], "arms": entries}


def _items(name: str, text: str) -> list[Any]:
    """The items of `a,b,c`; brackets group items."""
    try:
        return load_yaml(f"[{text}]")
    except UNREADABLE as error:
        raise ConfigError(f"{name} cannot be read", text, f"{name}=A,B") from error


def _flat(items: list[Any]) -> Any:
    """`seeds=[0,1]` is `seeds=0,1`."""
    return items[0] if len(items) == 1 and isinstance(items[0], list | dict) else items


def read_file(path: Path) -> dict[str, Any]:
    """The values of a study's YAML, with its name.

    Raises:
        ConfigError: It cannot be read.
    """
    return {"name": path.stem} | _read(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        if (data := read_regular(path, DOCUMENT_BYTES, follow=True)) is None:
            raise OSError("there is no such file")
        values = load_yaml(data.decode())
    except OSError as error:
        here = sorted(other.name for other in path.parent.glob("*.y*ml"))
        near = did_you_mean(path.name, here) or next(iter(here), "")
        fix = f"nexus-ablate study {shlex.quote(str(path.with_name(near)))}" if near else "nexus-ablate list studies"
        problem = f"{path.name} in {path.parent.absolute()} cannot be read"
        raise ConfigError(problem, f"{path}: {error}", fix) from error
    except UNREADABLE as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: this study cannot be read", problem, f"correct {where}") from error
    if problem := misfit(values, {"factors": ({}, None)}):
        fix = "a mapping of plain values: {question: is it better?, factors: {norm: [layer, rms]}}"
        raise ConfigError(f"{path} is not a study", problem, fix)
    return values
