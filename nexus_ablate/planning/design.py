"""Expands a definition into arms by its design, composes them and names them by their difference from the baseline.

An arm that cannot be composed is refused with a reason and doesn't stop the others. An arm with the same configuration
as an earlier one is listed as equal to it and not trained twice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nexus_ablate.config.compose import compose, differences
from nexus_ablate.config.overrides import check_overrides
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import ConfigError, unknown
from nexus_ablate.planning.match import solve
from nexus_ablate.runs import arm_name
from nexus_ablate.study.definition import Definition
from nexus_ablate.study.overrides import key_of, merged
from nexus_ablate.study.question import measuring
from nexus_ablate.training.start import check_groups

BASELINE = "baseline"


@dataclass(frozen=True)
class ComposedArm:
    """One configuration of a study.

    Attributes:
        name: How it differs from the study's baseline; the folder of its runs.
        requested: Its overrides besides the baseline's.
        overrides: `requested` plus what matching added.
        config: Composed with seed 0.
        also_changes: What its options change besides the requested overrides.
        match: How it was made equal to the baseline, as study.yaml keeps it.
    """

    name: str
    requested: list[str]
    overrides: list[str]
    config: RunConfig
    also_changes: list[str] = field(default_factory=list)
    match: dict[str, Any] | None = None


@dataclass(frozen=True)
class LeftOut:
    """Overrides that make no arm of their own: equal to arm `why`, or refused because of `why`."""

    requested: list[str]
    why: str


@dataclass(frozen=True)
class ComposedStudy:
    """A definition with its arms; `baseline` is not among `arms`."""

    definition: Definition
    baseline: ComposedArm
    arms: list[ComposedArm]
    equal: list[LeftOut]
    refused: list[LeftOut]

    def arm(self, words: str) -> ComposedArm:
        """The arm of this name or with these overrides.

        Raises:
            ConfigError: There is none.
        """
        for arm in self.arms:
            if words in (arm.name, label(arm.requested)):
                return arm
        raise unknown("the study has no such arm", words, [label(arm.requested) for arm in self.arms])

    def expected(self, words: str) -> str:
        """The name of the arm that a claim expects something of; its overrides if it is no arm in this setting.

        Raises:
            ConfigError: The study doesn't ask for such an arm.
        """
        left_out = {text: left for left in self.equal for text in self._names(left)}
        if words in left_out and left_out[words].why != BASELINE:
            return left_out[words].why
        left_out |= {text: left for left in self.refused for text in self._names(left)}
        return label(left_out[words].requested) if words in left_out else self.arm(words).name

    def _names(self, left: LeftOut) -> set[str]:
        words = label(left.requested)
        return {words, self.definition.names.get(words, words)}

    @property
    def unshowable(self) -> list[str]:
        """What the claim expects something of although it is no arm in this setting."""
        arms = {arm.name for arm in self.arms}
        names = (self.expected(expectation.arm) for expectation in self.definition.expects)
        return [name for name in dict.fromkeys(names) if name not in arms]

    @property
    def all_arms(self) -> list[ComposedArm]:
        return [self.baseline, *self.arms]


def expand(
    definition: Definition,
    solved_before: dict[str, dict[str, Any]] | None = None,
    launch: Sequence[str] = (),
) -> ComposedStudy:
    """Compose every arm.

    Args:
        definition: From `read_request`.
        solved_before: The `match` of each arm of study.yaml by its overrides, so that a figure measured at the first
            launch (match=seconds) is not measured again.
        launch: Overrides for how runs are carried out.

    Raises:
        ConfigError: The baseline or every other arm cannot be composed, or an arm names a key, an option or a value
            that does not exist.
    """
    whole = [f"{k}={v[0]}" for k, v in definition.factors.items()] if definition.design == "leave_one_out" else []
    definition = replace(definition, baseline=merged([*definition.baseline, *whole]))
    base = compose_arm(definition, [], launch)
    measured = [*definition.endpoints, *definition.requires]
    if more := measuring(base.probe.name, base.evals, measured):
        definition = replace(definition, baseline=merged([*definition.baseline, *more]))
        base = compose_arm(definition, [], launch)
    if base.train.precision != "fp32" and not any(key_of(text) == "train.precision" for text in definition.baseline):
        # What `auto` means on this machine holds for the whole study, whichever machine resumes it.
        pinned = f"train.precision={base.train.precision}"
        definition = replace(definition, baseline=merged([*definition.baseline, pinned]))
    _check_names(definition)
    baseline = ComposedArm(BASELINE, [], [], base)
    study = ComposedStudy(definition, baseline, [], [], [])
    names = {science_key(base): BASELINE}

    def add(overrides: list[str]) -> bool:
        """Add an arm with these overrides. Returns whether it is new and can be composed."""
        try:
            config = compose_arm(definition, overrides, launch)
            if same := names.get(science_key(config)):
                study.equal.append(LeftOut(overrides, same))
                return False
            arm = _matched(study, overrides, config, launch, solved_before or {})
        except ConfigError as error:
            study.refused.append(LeftOut(overrides, f"{error.problem}; got {error.got}; try {error.fix}"))
            return False
        names[science_key(config)] = arm.name
        study.arms.append(arm)
        return True

    _add_arms(definition, add)
    if not study.arms:
        reasons = [f"{label(left.requested)}: {left.why}" for left in study.refused]
        reasons += [f"{label(left.requested)} is equal to it" for left in study.equal]
        fix = "arms that differ from the baseline: vary.norm=layer,rms"
        raise ConfigError(f"study {definition.name} has no arm other than its baseline", "; ".join(reasons), fix)
    for expectation in definition.expects:
        study.expected(expectation.arm)
    return study


def _check_names(definition: Definition) -> None:
    """Check that arms are written correctly: a typing error is no contradiction, for which an arm is left out.

    Keys of an option are not checked in factors, since they exist only beside that option.

    Raises:
        ConfigError: A key, an option or a value does not exist.
    """
    levels = [[f"{name}={value}"] for name, values in definition.factors.items() for value in values if "." not in name]
    for overrides in [*definition.arms, *levels]:
        check_overrides(merged([*definition.baseline, *overrides]), sweeps=False)


def _add_arms(definition: Definition, add: Any) -> None:
    factors = {name: [f"{name}={value}" for value in values] for name, values in definition.factors.items()}
    if definition.arms:
        for requested in definition.arms:
            add(requested)
    elif definition.design == "grid":
        for requested in itertools.product(*factors.values()):
            add(list(requested))
    else:
        made = {name: [level for level in levels if add([level])] for name, levels in factors.items()}
        if definition.design == "pairwise_interactions":
            for one, other in itertools.combinations(made.values(), 2):
                for pair in itertools.product(one, other):
                    add(list(pair))


def compose_arm(definition: Definition, overrides: list[str], launch: Sequence[str] = ()) -> RunConfig:
    """The configuration of an arm with seed 0.

    Raises:
        ConfigError: It cannot be run.
    """
    config = compose([*merged([*definition.baseline, *overrides, *launch]), f"experiment={definition.name}"])
    check_groups(config)
    return config


def science_key(config: RunConfig) -> str:
    """Everything that determines an arm's result except the seed, as text: arms with equal keys are equal."""
    return json.dumps({**config.science(), "seed": None, "data": config.data.flat()}, sort_keys=True)


def _matched(
    study: ComposedStudy,
    requested: list[str],
    config: RunConfig,
    launch: Sequence[str],
    solved_before: dict[str, dict[str, Any]],
) -> ComposedArm:
    base = study.baseline.config
    notes = [note for note in config.resolved.notes if note not in base.resolved.notes]
    also = [note for note in notes if " also changes " in note]
    match, overrides = None, requested
    if study.definition.match != "none":
        match = solved_before.get(" ".join(requested)) or solve(study.definition, base, requested, config)
        if match["solved"]:
            overrides = [*requested, *match["solved"]]
            config = compose_arm(study.definition, overrides, launch)
    name = study.definition.names.get(" ".join(requested)) or arm_name(differences(config, base))
    return ComposedArm(name, requested, overrides, config, also, match)


def label(overrides: list[str]) -> str:
    """Overrides as one line of text; `baseline` if there are none."""
    return " ".join(overrides) or BASELINE
