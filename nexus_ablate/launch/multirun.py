"""`nexus-ablate -m KEY=A,B ...`: every combination is an arm of a study that the sweep makes.

Hydra's own parser reads the overrides.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from nexus_ablate.config.compose import compose
from nexus_ablate.config.overrides import check_overrides
from nexus_ablate.errors import ConfigError
from nexus_ablate.launch.arm_configs import arm_key
from nexus_ablate.launch.launch import Backend, launch
from nexus_ablate.runs import arm_name
from nexus_ablate.study.arm_overrides import key_of, merged, says_how
from nexus_ablate.study.study import MAX_SEEDS, Study

EXAMPLE = "nexus-ablate -m norm=layer,rms seed=0,1,2"


def multirun(overrides: list[str], backend: Backend) -> int:
    """Train every combination. Failed runs are run again, as by a single command. Returns as `launch` does.

    Raises:
        UserError: Overrides that cannot be read, or with which no combination can be run; nothing was written.
    """
    study, launch_overrides = study_of(overrides)
    return launch(study, launch_overrides, backend, retry_failed=True, seeds=study.seeds)


def study_of(overrides: list[str]) -> tuple[Study, list[str]]:
    """The study that a sweep makes, and the overrides for how its runs are carried out.

    What all combinations share is the baseline's. The baseline is the combination that equals it, else the first typed.

    Raises:
        ConfigError: An override cannot be read, or contradicts another one.
    """
    given = {
        override.name: override for override in check_overrides(overrides, sweeps=True)
    }  # the last of a key counts
    how = [key for key in given if key in ("experiment", "rerun") or says_how(key)]
    if swept := [given[key].text for key in how if given[key].is_sweep]:
        problem = "a sweep varies what is computed, and all of its runs are carried out in one way"
        raise ConfigError(problem, swept[0], EXAMPLE)
    assignments = {key: override.assignments() for key, override in given.items()}
    seeds = [_seed(text) for text in assignments.pop("seed", ["seed=0"])]
    if len(seeds) > MAX_SEEDS or len({*seeds}) < len(seeds):
        raise ConfigError(f"a sweep has up to {MAX_SEEDS} seeds, each once", given["seed"].text, EXAMPLE)
    launch_overrides = [assignments.pop(key)[0] for key in how if key != "experiment"]
    name = compose(assignments.pop("experiment")).experiment if "experiment" in given else ""
    varied = {key: texts for key, texts in assignments.items() if given[key].is_sweep}
    single = [text for key, texts in assignments.items() if key not in varied for text in texts]
    # keys of a swept option stay with each of its values
    beside = [text for text in single if key_of(text).partition(".")[0] in varied]
    shared = [text for text in single if text not in beside]
    combinations = [[*combination, *beside] for combination in itertools.product(*varied.values())]
    if not combinations:  # of a glob that matches nothing
        raise ConfigError("a multirun has no run", "no combination", EXAMPLE)
    baseline = _baseline(single, shared, combinations)
    arms = {}
    for combination in combinations:
        if combination != baseline:
            arms[_named(combination[: len(varied)])] = combination
    if not name:
        swept_keys = {key: given[key].typed for key in varied}
        name = arm_name(swept_keys or {key_of(text): text.partition("=")[2] for text in shared})
    if _key(single) != _key([*shared, *baseline]):
        single = merged(shared, baseline)
    study = Study(name=name, baseline=single, arms=arms, seeds=seeds)
    return replace(study, multirun=True), launch_overrides


def _seed(text: str) -> int:
    """The seed that `seed=VALUE` sets; an interpolation is replaced."""
    value = text.partition("=")[2]
    return int(value) if value.isdecimal() else compose([text]).seed


def _baseline(single: list[str], shared: list[str], combinations: list[list[str]]) -> list[str]:
    """The combination that changes nothing of what all of them set, `single`, else the first one that can be run."""
    keys: dict[str, list[str]] = {}
    for combination in combinations:
        keys.setdefault(_key([*shared, *combination]), combination)
    keys.pop("", None)
    if not keys:
        compose([*shared, *combinations[0]])  # raises the reason
    return keys.get(_key(single), next(iter(keys.values())))


def _key(overrides: list[str]) -> str:
    """What determines the result of a configuration, as text; '' where it cannot be run."""
    try:
        return arm_key(compose(overrides))
    except ConfigError:
        if "$" in " ".join(overrides):  # an interpolation that leads nowhere is no contradiction of options
            raise
        return ""


def _named(combination: list[str]) -> str:
    """The name of an arm: what it sets, as typed."""
    values = {}
    for text in combination:
        values[key_of(text)] = re.sub(r"\\(.)", r"\1", text.partition("=")[2])  # without what Hydra escapes
    return arm_name(values)
