"""From a definition to arms: expanded by design, composed, named by their difference from the study's baseline.

An arm that cannot be composed is refused with its reason and stops no other; one that comes out as the same run as an
earlier arm is listed as equal to it and not trained twice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nexus_ablate.config.compose import compose, differences
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import ConfigError
from nexus_ablate.runs import arm_name
from nexus_ablate.study.definition import Definition, merged
from nexus_ablate.study.match import solve

BASELINE = "baseline"


@dataclass(frozen=True)
class Arm:
    """One configuration of a study.

    Attributes:
        name: How it differs from the study's baseline; the folder of its runs.
        asked: Its overrides besides the baseline's.
        overrides: `asked` and what matching added.
        config: Composed with seed 0.
        also_changes: What its options change besides what was asked for.
        match: How it was made equal to the baseline, as study.yaml keeps it.
    """

    name: str
    asked: list[str]
    overrides: list[str]
    config: RunConfig
    also_changes: list[str] = field(default_factory=list)
    match: dict[str, Any] | None = None


@dataclass(frozen=True)
class LeftOut:
    """What was asked for and is no arm of its own: equal to arm `why`, or refused because of `why`."""

    asked: list[str]
    why: str


@dataclass(frozen=True)
class Study:
    """A definition with its arms; `baseline` is not among `arms`."""

    definition: Definition
    baseline: Arm
    arms: list[Arm]
    equal: list[LeftOut]
    refused: list[LeftOut]

    @property
    def all_arms(self) -> list[Arm]:
        return [self.baseline, *self.arms]


def expand(
    definition: Definition,
    solved_before: dict[str, dict[str, Any]] | None = None,
    launch: Sequence[str] = (),
) -> Study:
    """Compose every arm.

    Args:
        definition: From `read_request`.
        solved_before: The `match` of each arm of study.yaml by its overrides, so that a figure measured at the first
            launch (match=seconds) is not measured again.
        launch: Overrides that say how runs are carried out.

    Raises:
        ConfigError: The baseline cannot be composed, or no arm can.
    """
    whole = [f"{k}={v[0]}" for k, v in definition.factors.items()] if definition.design == "leave_one_out" else []
    definition = replace(definition, baseline=merged([*definition.baseline, *whole]))
    base = compose_arm(definition, [], launch)
    baseline = Arm(BASELINE, [], [], base)
    study = Study(definition, baseline, [], [], [])
    names = {science_key(base): BASELINE}

    def add(asked: list[str]) -> bool:
        """Whether these overrides make an arm that was not there."""
        try:
            config = compose_arm(definition, asked, launch)
            if same := names.get(science_key(config)):
                study.equal.append(LeftOut(asked, same))
                return False
            arm = _matched(study, asked, config, launch, solved_before or {})
        except ConfigError as error:
            study.refused.append(LeftOut(asked, f"{error.problem}; got {error.got}; try {error.fix}"))
            return False
        names[science_key(config)] = arm.name
        study.arms.append(arm)
        return True

    _add_arms(definition, add)
    if not study.arms:
        reasons = [f"{label(left.asked)}: {left.why}" for left in study.refused]
        reasons += [f"{label(left.asked)} is equal to it" for left in study.equal]
        fix = "arms that differ from the baseline: vary.norm=layer,rms"
        raise ConfigError(f"study {definition.name} has no arm besides its baseline", "; ".join(reasons), fix)
    return study


def _add_arms(definition: Definition, add: Any) -> None:
    factors = {name: [f"{name}={value}" for value in values] for name, values in definition.factors.items()}
    if definition.arms:
        for asked in definition.arms:
            add(asked)
    elif definition.design == "grid":
        for asked in itertools.product(*factors.values()):
            add(list(asked))
    else:
        made = {name: [level for level in levels if add([level])] for name, levels in factors.items()}
        if definition.design == "pairwise_interactions":
            for one, other in itertools.combinations(made.values(), 2):
                for pair in itertools.product(one, other):
                    add(list(pair))


def compose_arm(definition: Definition, asked: list[str], launch: Sequence[str] = ()) -> RunConfig:
    """The configuration of an arm with seed 0.

    Raises:
        ConfigError: It cannot be run.
    """
    return compose([*merged([*definition.baseline, *asked, *launch]), f"experiment={definition.name}"])


def science_key(config: RunConfig) -> str:
    """What decides the result of an arm but the seed: equal keys are equal arms."""
    return json.dumps({**config.science(), "seed": None, "data": config.data.flat()}, sort_keys=True)


def _matched(
    study: Study, asked: list[str], config: RunConfig, launch: Sequence[str], solved_before: dict[str, dict[str, Any]]
) -> Arm:
    base = study.baseline.config
    notes = [note for note in config.resolved.notes if note not in base.resolved.notes]
    also = [note for note in notes if " also changes " in note]
    match, overrides = None, asked
    if study.definition.match != "none":
        match = solved_before.get(" ".join(asked)) or solve(study.definition, base, asked, config)
        if match["solved"]:
            overrides = [*asked, *match["solved"]]
            config = compose_arm(study.definition, overrides, launch)
    return Arm(arm_name(differences(config, base)), asked, overrides, config, also, match)


def label(overrides: list[str]) -> str:
    """Overrides as one text, for people."""
    return " ".join(overrides) or BASELINE
