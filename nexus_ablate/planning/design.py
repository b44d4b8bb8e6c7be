"""Turns a study into arms by its design, composes them and names them by their difference from the baseline.

An arm that cannot be composed is refused with a reason and doesn't stop the others. An arm with the same configuration
as an earlier one is listed as equal to it and not trained twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, product

from msgspec.structs import replace

from nexus_ablate.comparison.differences import config_hash, science_key
from nexus_ablate.config.compose import compose, differences
from nexus_ablate.config.overrides import check_overrides
from nexus_ablate.config.resolve import default_tokens
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import ConfigError, unknown
from nexus_ablate.measure.measures import find
from nexus_ablate.planning.match import solve
from nexus_ablate.runs import arm_name
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.study.arm_overrides import key_of, merged
from nexus_ablate.study.schema import ArmMatch, EqualArm, RefusedArm, Study, StudyArm
from nexus_ablate.training.start import check_groups

PROBE_LEVELS = ("off", "standard", "full")
Configs = dict[str, RunConfig]
"""The configuration of each arm with seed 0, by name; that of the baseline among them."""


def expand(study: Study, launched: Study | None = None, launch: Sequence[str] = ()) -> tuple[Study, Configs]:
    """The study with its arms named and matched, and the configuration of each with seed 0.

    Args:
        study: From a command or a study.yaml.
        launched: Its study.yaml, if it was launched before: a figure measured then (match=seconds) is not measured
            again.
        launch: Overrides for how runs are carried out.

    Raises:
        ConfigError: The baseline or every other arm cannot be composed, or an arm names a key, an option or a value
            that does not exist.
    """
    study, base = _with_baseline(study, launch)
    _check_names(study)
    expansion = _Expansion(study, launch, names={arm_key(base): BASELINE}, configs={BASELINE: base})
    same = [] if launched is None or launched.baseline != study.baseline else launched.arms
    for arm in (*same, *study.arms):
        if arm.match and arm.match.kind == study.match:
            expansion.matched[label(arm.requested)] = arm.match
    expansion.add_all()
    if not expansion.arms:
        reasons = [f"{label(arm.overrides)}: {arm.reason}" for arm in expansion.refused]
        reasons += [f"{label(arm.overrides)} is equal to it" for arm in expansion.equal]
        fix = "arms that differ from the baseline: vary.norm=layer,rms"
        raise ConfigError(f"study {study.name} has no arm other than its baseline", "; ".join(reasons), fix)
    if study.lr_grid:
        _check_rates(study, expansion)
    study = replace(
        study,
        arms=expansion.arms,
        equal=expansion.equal,
        refused=expansion.refused,
        expects=[replace(expected, arm=expansion.name_of(expected.arm)) for expected in study.expects],
    )
    return study, expansion.configs


def _check_rates(study: Study, expansion: _Expansion) -> None:
    """Check that no two arms differ in the learning rate alone, which a grid tunes for each.

    Raises:
        ConfigError: Two do.
    """
    names = {config_hash(expansion.configs[BASELINE].nested(), study): BASELINE}
    for arm in expansion.arms:
        first = names.setdefault(config_hash(expansion.configs[arm.name].nested(), study), arm.name)
        if first != arm.name:
            problem = f"{first} and {arm.name} differ in the learning rate alone, which lr_grid tunes for each"
            raise ConfigError(problem, " ".join(arm.requested), "leave the arm out, or lr_grid")


def _with_baseline(study: Study, launch: Sequence[str]) -> tuple[Study, RunConfig]:
    """The study with its whole baseline: what the design, the endpoints and the machine add; and its configuration."""
    if study.design == "leave_one_out":
        whole = [levels[0] for levels in levels_of(study)]
        study = replace(study, baseline=merged(study.baseline, whole))
    base = compose_arm(study, [], launch)
    measured = [*(endpoint.name for endpoint in study.endpoints), *study.requires]
    added = measuring(base.probe.name, base.evals, measured)
    if base.train.precision != "fp32" and not any(key_of(text) == "train.precision" for text in study.baseline):
        # What `auto` means on this machine holds for the whole study, whichever machine resumes it.
        added.append(f"train.precision={base.train.precision}")
    if base.train.steps == base.train.tokens == base.train.flops == "auto":
        # What `auto` means at the baseline's size is the budget of every arm, whatever its size or batch.
        added.append(f"train.tokens={default_tokens(base.model)}")
    if not added:
        return study, base
    study = replace(study, baseline=merged(study.baseline, added), pinned=merged(study.pinned, added))
    return study, compose_arm(study, [], launch)


def _check_names(study: Study) -> None:
    """Check that arms are written correctly: a typing error is no contradiction, for which an arm is left out.

    Keys of an option are not checked in factors, since they exist only beside that option.

    Raises:
        ConfigError: A key, option or value does not exist.
    """
    written = [arm.requested for arm in study.arms]
    written += [[level] for level in chain(*levels_of(study)) if "." not in key_of(level)]
    for overrides in written:
        check_overrides(merged(study.baseline, overrides), sweeps=False)


def levels_of(study: Study) -> list[list[str]]:
    """The overrides that each factor has the choice of."""
    factors = []
    for name, values in study.factors.items():
        factors.append([f"{name}={value}" for value in values])
    return factors


@dataclass
class _Expansion:
    """The arms of a study while they are being made.

    Attributes:
        names: The name of each configuration, by `arm_key`; that of the baseline comes with it.
        configs: The configuration of each arm, by name; likewise.
        matched: How arms were matched before, by their requested overrides.
    """

    study: Study
    launch: Sequence[str]
    names: dict[str, str]
    configs: Configs
    arms: list[StudyArm] = field(default_factory=list)
    equal: list[EqualArm] = field(default_factory=list)
    refused: list[RefusedArm] = field(default_factory=list)
    matched: dict[str, ArmMatch] = field(default_factory=dict)

    def add_all(self) -> None:
        """Add the arms of the study, or those that its design makes from its factors."""
        study = self.study
        if study.arms:
            for arm in study.arms:
                self.add(arm.requested, arm.name if arm.named else "")
            for left_out in (*study.equal, *study.refused):
                self.add(left_out.overrides)
            return
        factors = levels_of(study)
        if study.design == "grid":
            for requested in product(*factors):
                self.add([*requested])
            return
        made = []
        for levels in factors:
            made.append([level for level in levels if self.add([level])])
        if study.design == "pairwise_interactions":
            for one, other in combinations(made, 2):
                for pair in product(one, other):
                    self.add([*pair])

    def add(self, requested: list[str], given: str = "") -> bool:
        """Add an arm with these overrides and the name given to it. Returns whether it is new and can be composed."""
        overrides, match, base = requested, None, self.configs[BASELINE]
        try:
            config = compose_arm(self.study, requested, self.launch)
            notes = [note for note in config.resolved.notes if note not in base.resolved.notes]
            key = arm_key(config)
            if key in self.names:
                self.equal.append(EqualArm(overrides=requested, arm=self.names[key]))
                return False
            if self.study.match != "none":
                match = self.matched.get(label(requested)) or solve(self.study.match, base, requested, config)
                overrides = [*requested, *match.solved]
                config = compose_arm(self.study, overrides, self.launch)
            name = given or arm_name(differences(config, base))
        except ConfigError as error:
            reason = f"{error.problem}; got {error.got}; try {error.fix}"
            self.refused.append(RefusedArm(overrides=requested, reason=reason))
            return False
        also_changes = [note for note in notes if " also changes " in note]
        arm = StudyArm(name=name, overrides=overrides, also_changes=also_changes, match=match, named=bool(given))
        self.names[key] = name
        self.configs[name] = config
        self.arms.append(arm)
        return True

    def name_of(self, words: str) -> str:
        """The name of the arm that a claim expects something of; its overrides if it is no arm in this setting.

        Raises:
            ConfigError: The study doesn't ask for such an arm.
        """
        given = {arm.name: label(arm.requested) for arm in self.study.arms if arm.named}
        overrides = given.get(words, words)
        for arm in self.equal:
            if overrides == label(arm.overrides):
                return overrides if arm.arm == BASELINE else arm.arm
        if overrides in [label(arm.overrides) for arm in self.refused]:
            return overrides
        for arm in self.arms:
            if words == arm.name or overrides == label(arm.requested):
                return arm.name
        raise unknown("the study has no such arm", words, [label(arm.requested) for arm in self.arms])


def compose_arm(study: Study, overrides: list[str], launch: Sequence[str]) -> RunConfig:
    """The configuration of an arm with seed 0.

    Raises:
        ConfigError: It cannot be run.
    """
    config = compose([*merged(study.baseline, overrides, [*launch]), f"experiment={study.name}"])
    check_groups(config)
    return config


def arm_key(config: RunConfig) -> str:
    """Everything that determines an arm's result except the seed, as text: arms with equal keys are equal."""
    return science_key(config.science() | {"data": config.data.flat()}, without=("seed",))


def label(overrides: list[str]) -> str:
    """Overrides as one line of text; `baseline` if there are none."""
    return " ".join(overrides) or BASELINE


def measuring(probe: str, evals: list[str], names: list[str]) -> list[str]:
    """The overrides with which runs of a configuration with this probe and these evaluations measure the numbers."""
    level, evaluations = probe, [*evals]
    for name in names:
        measure = find(name)
        levels = [place for place in PROBE_LEVELS if place in measure.where]
        if "probe=standard" in measure.only:
            levels.append("standard")
        if levels:
            level = max(level, levels[0], key=PROBE_LEVELS.index)
        elif not {"step", "summary"} & {*measure.where}:
            evaluations.append(name.partition("/")[0])
    overrides = [f"probe={level}"] if level != probe else []
    if set(evaluations) != set(evals):
        overrides.append(f"evals=[{','.join(dict.fromkeys(evaluations))}]")
    return overrides
