"""A study: one class, decoded from a study's file and from study.yaml, encoded to study.yaml.

    question: Does RMSNorm lose anything against LayerNorm?
    baseline: [train.steps=400]           overrides of every arm, on top of the default configuration
    design: one_at_a_time                 or leave_one_out, grid, pairwise_interactions, list
    factors: {norm: [layer, rms]}         a key and its values; not with `arms`
    arms: [norm=layer, {name: rms+bias, overrides: [norm=rms, bias=on]}]      design: list
    seeds: [0, 1, 2, 3, 4]                or {looks: [8, 12, 20]}: more seeds only for arms that are undecided
    endpoints:                            the first is the primary one
      - {name: attn/sink_rate, delta_min: 0.05}
      - {name: val_loss, delta_min: 2% tokens}       what 2% more training tokens are worth; see planning/margin.py
    strata: {shallow: model.n_layers=4, deep: [model.n_layers=24, optim.lr=5e-4]}
    strata: {model.n_layers: [4, 24]}     the same for one key
    claim: Without a sink there are no massive activations
    expects:
      - {arm: gate=headwise, attn/sink_rate: lower}
      - {arm: placement=post, stratum: deep, val_loss: fails}        without `stratum`: in each
    requires: {attn/sink_rate: ">= 0.1"}  of the baseline, or the claim is not testable here
    stated: Massive activations and attention sinks are one phenomenon
    fidelity: {weaker: one direction of it, in small models}      how near the claim is to what is stated
    depends_on: {depth: [shallow, deep]}  does each expected difference change between these two strata?

A launch adds to study.yaml what the design made of this: named arms, what matching solved, arms that equal another or
cannot be run; and its history. The file's order of strata, arms and endpoints is kept.
"""

from __future__ import annotations

import math
import re
from itertools import combinations
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct, field, to_builtins

from nexus_ablate.config.grammar import show
from nexus_ablate.errors import ConfigError, unknown
from nexus_ablate.measure.measures import find
from nexus_ablate.runs.formats import Positive
from nexus_ablate.runs.naming import BASELINE, NAME, NAME_BYTES
from nexus_ablate.study.endpoint import Endpoint

FIRST_SEEDS = tuple(range(8))
FIRST_TUNING_SEEDS = (1001, 1002)
MAX_SEEDS = 1000
CLAIM_SEEDS = 5
"""Fewer give an interval and no word about it."""

Text = Annotated[str, Meta(min_length=1)]
Seed = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=2, le=MAX_SEEDS)]
Override = Annotated[str, Meta(pattern="=")]
ArmName = Annotated[str, Meta(pattern=rf"\A({NAME.pattern})?\Z", max_length=NAME_BYTES)]
StratumName = Annotated[str, Meta(pattern=r"\A(?!(arm|change|sign|order)\Z)[A-Za-z0-9][A-Za-z0-9_.-]{0,59}\Z")]
"""No other column of the table over strata."""
STUDY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")
"""The folder of a study's runs."""
StudyName = Annotated[str, Meta(pattern=rf"\A{STUDY_NAME.pattern}\Z")]
CONDITION = re.compile(r"(>=|<=) *(-?\d+(?:\.\d+)?(?:e-?\d+)?)")
"""What a study can require of its baseline."""
Condition = Annotated[str, Meta(pattern=rf"\A{CONDITION.pattern}\Z")]
Outcome = Literal["lower", "higher", "equivalent", "trains", "fails"]
"""What a study can expect of an arm."""
NO_STRATUM = "the study has no stratum of this name"
TWO_STRATA = "strata: {shallow: model.n_layers=4, deep: model.n_layers=24}"
OPPOSITES = ({"lower", "higher"}, {"trains", "fails"})
Design = Literal["one_at_a_time", "leave_one_out", "grid", "pairwise_interactions", "list"]
Match = Literal["none", "params", "flops", "tokens", "seconds"]
Fidelity = Literal["same", "weaker", "different"]
"""How near a claim is to the claim as it is usually made."""


class Part(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of a study: unknown keys are refused."""


class ArmMatch(Part, frozen=True, kw_only=True):
    """How an arm was made equal to the baseline.

    Attributes:
        target: What the baseline has of `kind`.
        got: What the arm has of it.
        residual: What is left, as a share.
        solved: The overrides that matching added.
    """

    kind: Match
    target: float = math.nan
    got: float = math.nan
    residual: float = 0.0
    solved: list[Override] = []


class StudyArm(Part, frozen=True, kw_only=True):
    """One configuration beside the baseline.

    Attributes:
        name: The folder of its runs: given, or how it differs from the baseline; '' until a launch names it.
        overrides: Those of the baseline not included, what matching added included.
        also_changes: What its options change besides the overrides.
        named: The name was given.
    """

    name: ArmName = ""
    overrides: list[Override]
    also_changes: list[str] = []
    match: ArmMatch | None = None
    named: bool = False

    @property
    def requested(self) -> list[str]:
        """The overrides that were asked for, without those that matching added."""
        solved = self.match.solved if self.match else []
        return [text for text in self.overrides if text not in solved]


class Expectation(Part, frozen=True, kw_only=True):
    """What a claim expects of an arm, given by its name or its overrides; `stratum` '' means each."""

    arm: str
    endpoint: str
    expected: Outcome
    stratum: str = ""


class Amendment(Part, frozen=True, kw_only=True):
    """What changed in a study after its first launch."""

    when: str
    changes: list[str]


class AddedSeeds(Part, frozen=True, kw_only=True):
    """Seeds that were added after results had been seen."""

    when: str
    seeds: list[Seed]


class EqualArm(Part, frozen=True, kw_only=True):
    """Requested overrides that give the same configuration as another arm."""

    overrides: list[Override]
    arm: str


class RefusedArm(Part, frozen=True, kw_only=True):
    """Requested overrides that cannot be run."""

    overrides: list[Override]
    reason: str


class Study(Part, frozen=True, kw_only=True, omit_defaults=False):
    """A question, a baseline, its arms and seeds.

    Attributes:
        baseline: Overrides of every arm.
        stated: The claim as it is usually made, before it was restated so that it can be tested.
        fidelity: How near the claim is to the stated one: one word and the reason.
        depends_on: By what is changed, two strata between which each expected difference may change: each is a cell.
        looks: Rising numbers of seeds, up to that of `seeds`. After each look only undecided arms get the seeds of the
            next.
        look_weights: Each look's share of the error rate; they add up to 1.
        requires: Conditions on the baseline, by measure.
        share: Of the 5%, for each endpoint that gets a verdict.
        stratum: Of a study that is one stratum of the study `of`, whose strata are `all_strata`.
        confirms: The study whose claims this one judges on fresh seeds.
        source: Hash of the code of the last launch.
        configs: By arm, hashes of its resolved configuration, defaults of option files included: the last is that of
            its runs; earlier ones were replaced.
    """

    name: StudyName
    question: Text
    claim: str = ""
    stated: str = ""
    fidelity: Annotated[dict[Fidelity, Text], Meta(max_length=1)] = {}
    cost: str = ""
    baseline: list[Override] = []
    design: Design = "one_at_a_time"
    factors: dict[str, Annotated[list[str], Meta(min_length=1)]] = {}
    arms: list[StudyArm] = []
    strata: dict[StratumName, list[Override]] = {}
    seeds: Annotated[list[Seed], Meta(min_length=1)] = field(default_factory=lambda: [*FIRST_SEEDS])
    looks: list[Count] = []
    look_weights: list[Positive] = []
    endpoints: Annotated[list[Endpoint], Meta(min_length=1)] = field(default_factory=lambda: [Endpoint("val_loss")])
    expects: list[Expectation] = []
    requires: dict[str, Condition] = {}
    depends_on: dict[str, Annotated[list[StratumName], Meta(min_length=2, max_length=2)]] = {}
    match: Match = "none"
    lr_grid: list[Positive] = []
    tuning_seeds: list[Seed] = []
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    stratum: str = ""
    of: str = ""
    all_strata: list[StratumName] = []
    confirms: str = ""
    amendments: list[Amendment] = []
    added: list[AddedSeeds] = []
    pinned: list[Override] = []
    source: str = ""
    configs: dict[str, list[str]] = {}
    equal: list[EqualArm] = []
    refused: list[RefusedArm] = []

    @property
    def primary(self) -> Endpoint:
        """The endpoint that decides."""
        return self.endpoints[0]

    @property
    def all_arms(self) -> list[StudyArm]:
        """The baseline, which has no overrides of its own, and the other arms."""
        return [StudyArm(name=BASELINE, overrides=[]), *self.arms]

    @property
    def first_seeds(self) -> list[int]:
        """The seeds that every arm is trained with: those of the first look, or all."""
        return self.seeds[: self.looks[0]] if self.looks else self.seeds

    def __post_init__(self) -> None:
        _check_arms(self)
        _check_seeds(self)
        _check_endpoints(self)
        _check_claim(self)
        _check_strata(self)


def _check_arms(study: Study) -> None:
    design, factors = f"design={study.design}", study.factors
    if factors and study.design == "list":
        raise ConfigError(f"study {study.name} has factors, but {design} does not use them", design, "design=grid")
    if not factors and study.design != "list":
        problem = f"study {study.name} has no factors, from which {design} builds arms"
        raise ConfigError(problem, design, "design=list" if study.arms else "vary.norm=layer,rms")
    short = [name for name, values in factors.items() if len(values) < 2]
    if study.design == "leave_one_out" and short:
        fix = "the value in the full configuration, then its replacements: {qk_norm: [rms, none]}"
        raise ConfigError("leave_one_out needs two values of each factor", ", ".join(short), fix)
    names = [arm.name for arm in study.arms if arm.name]
    if BASELINE in names:
        raise ConfigError("no other arm can have the baseline's name", BASELINE, "another name, such as control")
    if len({*names}) < len(names):
        raise ConfigError("two arms have one name", ", ".join(names), "a name for each")


def _check_seeds(study: Study) -> None:
    seeds, tuning_seeds, looks, weights = study.seeds, study.tuning_seeds, study.looks, study.look_weights
    for name, values in (("seeds", seeds), ("tuning_seeds", tuning_seeds), ("lr_grid", study.lr_grid)):
        once = dict.fromkeys(values)
        if len(once) < len(values):
            raise ConfigError(f"{name} has duplicates", show(values), f"{name}={','.join(map(show, once))}")
    if len(seeds) > MAX_SEEDS:
        raise ConfigError(f"a study has at most {MAX_SEEDS} seeds", str(len(seeds)), "seeds=0,1,2,3,4")
    first, second = FIRST_TUNING_SEEDS
    if shared := {*seeds} & {*tuning_seeds}:
        problem = "tuning_seeds and seeds overlap: a seed that chose the learning rate favours its arm"
        after = max(seeds) + first
        raise ConfigError(problem, show(sorted(shared)), f"tuning_seeds={after},{after + 1}")
    if bool(study.lr_grid) != bool(tuning_seeds):
        got = f"lr_grid={show(study.lr_grid)} and tuning_seeds={show(tuning_seeds)}"
        fix = f"lr_grid=3e-4,1e-3,3e-3 tuning_seeds={first},{second}"
        raise ConfigError("lr_grid and tuning_seeds require each other", got, fix)
    if len(looks) == 1 or looks != sorted({*looks}):
        raise ConfigError(f"seeds.looks takes {TAKES['looks'][0]}", show(looks), "seeds.looks=8,12,20")
    if looks and looks[-1] != len(seeds):
        got = f"{looks[-1]} seeds at the last look, {len(seeds)} seeds"
        raise ConfigError("the last look has all seeds", got, "seeds.looks=8,12,20 without seeds")
    if len(weights) != len(looks) or (weights and not math.isclose(math.fsum(weights), 1, abs_tol=1e-6)):
        problem = f"seeds.weights takes {len(looks)} positive numbers that add up to 1, one per look"
        raise ConfigError(problem, show(weights), "leave seeds.weights out")


def _check_endpoints(study: Study) -> None:
    names = [endpoint.name for endpoint in study.endpoints]
    once = [*dict.fromkeys(names)]
    if len(once) < len(names):
        raise ConfigError("two endpoints have one name", ", ".join(names), f"endpoints: {show(once)}")
    for place, endpoint in enumerate(study.endpoints):
        if endpoint.tokens and (place or endpoint.name != "val_loss"):
            problem = "a margin in training tokens is about val_loss, as the primary endpoint"
            raise ConfigError(problem, endpoint.name, "a number")


def _check_claim(study: Study) -> None:
    endpoints = [endpoint.name for endpoint in study.endpoints]
    for expectation in study.expects:
        if expectation.endpoint not in endpoints:
            raise unknown("the study has no endpoint of this name", expectation.endpoint, endpoints)
        if expectation.stratum and expectation.stratum not in study.strata:
            raise unknown(NO_STRATUM, expectation.stratum, study.strata)
    for one, other in combinations(study.expects, 2):
        is_same_cell = (one.arm, one.endpoint) == (other.arm, other.endpoint)
        is_same_cell &= one.stratum == other.stratum or "" in (one.stratum, other.stratum)
        if is_same_cell and {one.expected, other.expected} in OPPOSITES:
            got = f"{one.arm}: {one.expected} and {other.expected}"
            raise ConfigError("no result can meet two opposite expectations", got, "one of them, or a stratum for each")
    for name in study.requires:
        find(name)
    if study.stated and not study.fidelity:
        problem = f"study {study.name} restates a claim, and doesn't say how near it is to the stated one"
        raise ConfigError(problem, f"stated: {study.stated}", "fidelity: {weaker: in small models}")
    strata = study.all_strata or [*study.strata]
    for on, pair in study.depends_on.items():
        for stratum in pair:
            if stratum not in strata:
                raise unknown(NO_STRATUM, stratum, strata, otherwise="" if strata else TWO_STRATA)
        if pair[0] == pair[1]:
            fix = f"{on}: {show(strata[:2])}"
            raise ConfigError("a change is from one stratum to another", f"{on}: {show(pair)}", fix)


def _check_strata(study: Study) -> None:
    if len(study.strata) == 1:
        raise ConfigError("strata are two or more", show([*study.strata]), TWO_STRATA)
    if bool(study.stratum) != bool(study.of) or (study.all_strata and study.stratum not in study.all_strata):
        got = f"stratum {study.stratum or 'missing'}, of {study.of or 'missing'}, all_strata {show(study.all_strata)}"
        fix = "stratum: shallow, of: mine, all_strata: [shallow, deep]"
        raise ConfigError("stratum, of and all_strata say together which stratum a study is", got, fix)


def encode(study: Study) -> dict[str, Any]:
    """The study as plain data without what is empty; defaults are written out, as another version may have others."""
    return {name: value for name, value in to_builtins(study).items() if value not in ("", [], {}, 0)}


TAKES: dict[str, tuple[str, Any]] = {
    "name": ("letters, digits, . _ @ -", "mine"),
    "question": ("what it is to decide", "is it better?"),
    "claim": ("a sentence", "RMSNorm loses nothing"),
    "stated": ("a sentence", "RMSNorm is as good"),
    "fidelity": ("same, weaker or different with the reason", {"weaker": "at 0.2M"}),
    "cost": ("runs and time, in words", "30 runs, about 8 minutes"),
    "baseline": ("a list of overrides", ["train.steps=400"]),
    "design": (" | ".join(get_args(Design)), "one_at_a_time"),
    "factors": ("a mapping of keys to lists of values", {"norm": ["layer", "rms"]}),
    "arms": ("a list of overrides", ["norm=layer", "bias=on"]),
    "strata": (
        "a mapping of names (letters, digits, . _ -; not arm, change, sign, order) to overrides",
        {"shallow": "model.n_layers=4", "deep": "model.n_layers=24"},
    ),
    "seeds": ("a list of seeds", [0, 1, 2, 3, 4]),
    "looks": (f"two or more increasing numbers of seeds, from {CLAIM_SEEDS} to {MAX_SEEDS}", [8, 12, 20]),
    "look_weights": ("one positive number per look", [0.3, 0.3, 0.4]),
    "endpoints": ("a list of measures", ["val_loss"]),
    "expects": ("a list of mappings", [{"arm": "norm=layer", "val_loss": "equivalent"}]),
    "requires": ("bounds on the baseline, by measure", {"attn/sink_rate": ">= 0.1"}),
    "depends_on": ("a mapping of names to two strata", {"depth": ["shallow", "deep"]}),
    "match": (" | ".join(get_args(Match)), "none"),
    "lr_grid": ("a list of rates", [3e-4, 1e-3, 3e-3]),
    "tuning_seeds": ("a list of seeds", [*FIRST_TUNING_SEEDS]),
    "share": ("a share of the 5%, above 0 and at most 1", 1),
}
"""What a key takes, in words, and a value that it accepts. A key without a row, and `share`, is written by a launch."""
KEYS = tuple(name for name in TAKES if name != "share")
"""Keys of a study's file."""
WRITTEN_BY_A_LAUNCH = tuple(name for name in Study.__struct_fields__ if name not in KEYS)
"""Keys of study.yaml that nobody types."""
