"""A margin in training tokens, `delta_min: 2% tokens`: what they are worth in nats, fixed before the study's runs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from msgspec import structs

from nexus_ablate.comparison.differences import science_key
from nexus_ablate.comparison.ladder import Ladder, read_ladder
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import ConfigError
from nexus_ablate.planning.cost import cost_of
from nexus_ablate.planning.design import label
from nexus_ablate.study.arm_overrides import BUDGETS
from nexus_ablate.study.schema import Study

LADDERS = "tokens*"
"""Names of the studies that vary only the baseline's budget."""
AROUND = (0.5, 0.7, 1.4, 2)
"""The budgets of such a study, as multiples of the baseline's."""


def with_margin(study: Study, baseline: RunConfig, runs_dir: Path, launched: Study | None) -> Study:
    """The study with its margin in nats. One that was launched before keeps the number of its first launch.

    Args:
        study, baseline: From `expand`: the study, and the configuration of its baseline.
        runs_dir: Has the runs that say what tokens are worth: a study `tokens...` of the same baseline.
        launched: Its study.yaml, if it was launched before.

    Raises:
        ConfigError: There are no such runs, or their budgets do not reach so far.
    """
    primary, *others = study.endpoints
    if not primary.tokens or primary.delta_min != "auto":
        return study
    if launched and launched.primary.tokens == primary.tokens:
        nats = launched.primary.delta_min
    else:
        nats = _worth(study, baseline, primary.tokens, runs_dir)
    endpoints = [structs.replace(primary, delta_min=nats), *others]
    return structs.replace(study, endpoints=endpoints)


def _worth(study: Study, config: RunConfig, share: float, runs_dir: Path) -> float:
    """How much lower the baseline's loss is after this share of tokens more."""
    cost = cost_of(config)
    around = ",".join(str(round(factor * cost.steps)) for factor in AROUND)
    fix = f"nexus-ablate study tokens_{study.name} {label(study.baseline)} vary.train.steps={around}"
    fitting = _ladder(runs_dir, science_key(config.nested(), without=BUDGETS))
    if fitting is None:
        problem = f"a margin of {100 * share:.3g}% of the training tokens needs runs of the baseline with other budgets"
        got = f"no study {LADDERS} of this baseline in {runs_dir}"
        raise ConfigError(problem, got, fix if study.baseline else "nexus-ablate study tokens")
    if (nats := fitting.difference(cost.tokens, share)) is None:
        got = f"{cost.tokens:,} tokens, and the runs have {fitting.tokens[0]:,.0f} to {fitting.tokens[-1]:,.0f}"
        raise ConfigError("the margin lies outside the budgets of those runs", got, fix)
    return nats


def _ladder(runs_dir: Path, key: str) -> Ladder | None:
    """The first study of budgets whose runs are otherwise of this configuration; None if there is none."""
    for path in sorted(runs_dir.glob(LADDERS)):
        if (path / "study.yaml").is_file():
            with suppress(ConfigError):  # its runs are no ladder, such as before they have ended
                ladder = read_ladder(path)
                if ladder.key[0] == key:
                    return ladder
    return None
