"""From a study to its arms: named, matched and composed; the equal and the refused ones with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import chain, product
from pathlib import Path

from nexus_ablate.config.compose import compose, differences
from nexus_ablate.config.override_syntax import quoted
from nexus_ablate.config.overrides import check_overrides
from nexus_ablate.config.resolve import changed, default_tokens
from nexus_ablate.config.rules import check_vocabulary
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import ConfigError
from nexus_ablate.launch.cost import cost_of, vocabulary
from nexus_ablate.measure.measures import find
from nexus_ablate.runs import arm_name
from nexus_ablate.runs.naming import BASELINE
from nexus_ablate.study.arm_overrides import BUDGETS, is_override, key_of, merged
from nexus_ablate.study.record import config_hash
from nexus_ablate.study.study import WORTH_ARMS, Study
from nexus_ablate.training.refusals import check_groups

PROBE_LEVELS = ("off", "standard", "full")
FARTHEST_MATCH = 0.05
"""Largest relative difference to the baseline of an arm that counts as matched."""
Configs = dict[str, RunConfig]
"""The configuration of each arm with seed 0, by name."""


def resolve(study: Study, launch: Sequence[str]) -> tuple[Study, Configs]:
    """The study with its arms named and matched, and the configuration of each, those of `worth` among them.

    Args:
        study: Of one setting.
        launch: Overrides for how runs are carried out.

    Raises:
        ConfigError: The baseline or every other arm cannot be composed, or an arm names a key, an option or a value
            that does not exist.
    """
    study, base = _with_whole_baseline(study, launch)
    written = _written_arms(study)
    _check_names(study, [overrides for _, overrides in written])
    configs = {BASELINE: base}
    names = {arm_key(base): BASELINE}
    arms, equal, refused = {}, {**study.equal}, {**study.refused}
    for given, overrides in written:
        title = given or " ".join(overrides)
        try:
            config = composed(study, overrides, launch)
            if (key := arm_key(config)) in names:
                equal[title] = names[key]
                continue
            if study.match != "none":
                overrides = [*overrides, *matching(study.match, base, overrides, config)]
                config = composed(study, overrides, launch)
        except ConfigError as error:
            refused[title] = f"{error.problem}; got {error.got}; try {error.fix}"
            continue
        name = given or arm_name(differences(config, base))
        names[key] = name
        arms[name] = overrides
        configs[name] = config
    if not arms and not study.multirun:
        reasons = [f"{title}: {reason}" for title, reason in refused.items()]
        reasons += [f"{title} is equal to {name}" for title, name in equal.items()]
        problem = f"study {study.name} has no arm other than its baseline"
        raise ConfigError(problem, "; ".join(reasons), "arms that differ from the baseline: vary.norm=layer,rms")
    if study.lr_grid:
        _check_rates(configs, arms)
    for name in WORTH_ARMS if study.worth else ():
        configs[name] = composed(study, [budget(name, base)], launch)
    hashes = {name: config_hash(config.nested(), bool(study.lr_grid)) for name, config in configs.items()}
    study = replace(study, arms=arms, vary={}, design="one_at_a_time", equal=equal, refused=refused, configs=hashes)
    return study, configs


def composed(study: Study, overrides: Sequence[str], launch: Sequence[str]) -> RunConfig:
    """The configuration of an arm of a study with seed 0.

    Raises:
        ConfigError: It cannot be run.
    """
    setting = study.settings.get(study.setting, [])
    words = merged(study.baseline, setting, [*overrides], [*launch])
    config = compose([*words, f"experiment={quoted(Path(study.folder_name))}"])
    check_groups(config)
    if config.vocab_size != "auto":
        check_vocabulary(config, vocabulary(config))
    return config


def arm_key(config: RunConfig) -> str:
    """Everything that determines an arm's result except the seed, as text: arms with equal keys are equal."""
    return repr((changed(config, seed=0).science(), config.data.flat()))


def budget(name: str, baseline: RunConfig) -> str:
    """The override of one of `WORTH_ARMS`: a multiple of the baseline's budget."""
    cost = cost_of(baseline)
    if baseline.train.steps != "auto":
        return f"train.steps={round(WORTH_ARMS[name] * cost.steps)}"
    return f"train.tokens={round(WORTH_ARMS[name] * cost.tokens)}"


# ------------------------------------------------------------------------------------------------------------- written


def _with_whole_baseline(study: Study, launch: Sequence[str]) -> tuple[Study, RunConfig]:
    """The study with what its endpoints and this machine add to the baseline, and the baseline's configuration."""
    base = composed(study, [], launch)
    added = _measuring(base, [endpoint.name for endpoint in study.endpoints])
    if base.train.precision != "fp32" and not any(key_of(text) == "train.precision" for text in study.baseline):
        # What `auto` means on this machine holds for the whole study, whichever machine resumes it.
        added.append(f"train.precision={base.train.precision}")
    if base.train.steps == base.train.tokens == base.train.flops == "auto" and not study.multirun:
        # What `auto` means at the baseline's size is the budget of every arm, whatever its size or batch.
        added.append(f"train.tokens={default_tokens(base.model)}")
    if not added:
        return study, base
    study = replace(study, baseline=merged(study.baseline, added))
    return study, composed(study, [], launch)


def _measuring(base: RunConfig, names: list[str]) -> list[str]:
    """The overrides with which runs of a configuration measure figures of these names."""
    level, evaluations = base.probe.name, [*base.evals]
    for name in names:
        measure = find(name)
        levels = [place for place in PROBE_LEVELS if place in measure.where]
        if "probe=standard" in measure.only:
            levels.append("standard")
        if levels:
            level = max(level, levels[0], key=PROBE_LEVELS.index)
        elif not {"step", "summary"} & {*measure.where}:
            evaluations.append(name.partition("/")[0])
    added = [f"probe={level}"] if level != base.probe.name else []
    if set(evaluations) != set(base.evals):
        added.append(f"evals=[{','.join(dict.fromkeys(evaluations))}]")
    return added


def _written_arms(study: Study) -> list[tuple[str, list[str]]]:
    """The name given to each arm ('' for none) and its overrides, those that `vary` makes included."""
    if not study.vary:
        return [*study.arms.items()]
    levels = [[f"{key}={value}" for value in values] for key, values in study.vary.items()]
    if study.design == "grid":
        return [("", [*combination]) for combination in product(*levels)]
    return [("", [level]) for level in chain(*levels)]


def _check_names(study: Study, written: list[list[str]]) -> None:
    """Check that arms are written correctly: a typing error is no contradiction, for which an arm is left out.

    Keys of an option that `vary` changes alone are not checked, since they exist only beside that option.

    Raises:
        ConfigError: A key, an option or a value does not exist.
    """
    for overrides in written:
        if study.vary and any("." in key_of(text) for text in overrides):
            continue
        try:
            check_overrides(merged(study.baseline, overrides), sweeps=False)
        except ConfigError as error:
            raise _in_vary(error, study.vary) from None


def _in_vary(error: ConfigError, vary: dict[str, list[str]]) -> ConfigError:
    """The error for an override of an arm as one for the varied key that it comes from, if it comes from one."""
    wrong, right = key_of(error.got), key_of(error.fix)
    if wrong not in vary or " " in error.fix or not is_override(error.fix):
        return error
    values = [error.fix.partition("=")[2] if f"{wrong}={value}" == error.got else value for value in vary[wrong]]
    return ConfigError(error.problem, f"vary.{wrong}={','.join(vary[wrong])}", f"vary.{right}={','.join(values)}")


def _check_rates(configs: Configs, arms: dict[str, list[str]]) -> None:
    """Check that no two arms differ in the learning rate alone, which a grid tunes for each.

    Raises:
        ConfigError: Two do.
    """
    names: dict[str, str] = {}
    for name, config in configs.items():
        first = names.setdefault(config_hash(config.nested(), without_rate=True), name)
        if first != name:
            problem = f"{first} and {name} differ in the learning rate alone, which lr_grid tunes for each"
            raise ConfigError(problem, " ".join(arms[name]), "leave the arm out, or lr_grid")


# ------------------------------------------------------------------------------------------------------------ matching


def matching(kind: str, baseline: RunConfig, overrides: list[str], config: RunConfig) -> list[str]:
    """What makes an arm equal to the baseline in parameters, FLOPs per token or tokens, as closely as possible.

    Parameters and FLOPs are matched by the width of the FFN, or by the depth if the arm sets the width itself; tokens
    by the budget.

    Args:
        kind: params, flops or tokens.
        overrides, config: The arm's.

    Raises:
        ConfigError: The nearest is more than 5% away.
    """
    named = {key_of(text) for text in overrides}
    target = _amount(kind, baseline)
    if kind == "tokens":
        got, solved = _amount(kind, config), []
        if named.isdisjoint(BUDGETS):
            per_step = config.resolved.tokens_per_step
            steps = max(1, round(target / per_step))
            got = steps * per_step
            solved = [f"train.steps={steps}"] if steps != cost_of(config).steps else []
    else:
        got, solved = _sized(kind, target, named, config)
    residual = got / target - 1
    if abs(residual) > FARTHEST_MATCH:
        unit = {"params": "parameters", "flops": "FLOPs per token"}.get(kind, kind)
        problem = f"the arm cannot match the baseline's {unit}: the nearest is {residual:+.1%}"
        fix = "match=none, or model.d_ff_multiple=1"
        if "d_ff_ratio" in named:
            fix = "match=none, or leave d_ff_ratio to be solved"
        raise ConfigError(problem, f"{got:,.0f} against {target:,.0f}", fix)
    return solved


def _sized(kind: str, target: float, named: set[str], config: RunConfig) -> tuple[float, list[str]]:
    """The amount of the size that comes nearest to a target, and the override for that size if it is another one."""
    model = config.model
    if named >= {"d_ff_ratio", "model.n_layers"}:
        return _amount(kind, config), []
    by_width = "d_ff_ratio" not in named
    start = config.resolved.d_ff // model.d_ff_multiple if by_width else model.n_layers

    def sized(size: int) -> tuple[float, str]:
        if by_width:
            ratio = str(Fraction(size * model.d_ff_multiple, model.d_model))
            return _amount(kind, changed(config, d_ff_ratio=ratio)), f"d_ff_ratio={ratio}"
        return _amount(kind, changed(config, model=replace(model, n_layers=size))), f"model.n_layers={size}"

    first, second = sized(start)[0], sized(start + 1)[0]
    best = max(1, start + round((target - first) / (second - first)))  # the amount grows linearly
    amount, override = sized(best)
    return amount, [] if best == start else [override]


def _amount(kind: str, config: RunConfig) -> float:
    """Parameters, FLOPs per token or tokens of a configuration."""
    from nexus_ablate.measure.counts import flops_per_token, parameters
    from nexus_ablate.model import countable_model

    if kind == "tokens":
        return cost_of(config).tokens
    if kind == "params":
        return parameters(countable_model(config, vocabulary(config)))[0]
    return flops_per_token(config, vocabulary(config))
