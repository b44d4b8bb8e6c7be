"""A margin in training tokens, `delta_min: 2% tokens`: what they are worth in nats, fixed before the study's runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from nexus_ablate.comparison.differences import science_key
from nexus_ablate.comparison.ladder import BUDGETS, Ladder, read_ladder
from nexus_ablate.errors import ConfigError
from nexus_ablate.planning.design import ComposedStudy, label

LADDERS = "tokens*"
"""Names of the studies that vary only the baseline's budget."""


def with_margin(study: ComposedStudy, runs_dir: Path, record: dict[str, Any] | None) -> ComposedStudy:
    """The study with its margin in nats. One that was launched before keeps the number of its first launch.

    Args:
        study: From `expand`.
        runs_dir: Has the runs that say what tokens are worth: a study `tokens...` of the same baseline.
        record: Its study.yaml, if it was launched before.

    Raises:
        ConfigError: There are no such runs, or their budgets do not reach so far.
    """
    definition = study.definition
    share = definition.delta_min_tokens
    if not share or definition.delta_min != "auto":
        return study
    if record and record.get("delta_min_tokens") == share:
        nats = record["endpoints"][definition.endpoint]["delta_min"]
    else:
        nats = _worth(study, share, runs_dir)
    return replace(study, definition=replace(definition, delta_min=nats))


def _worth(study: ComposedStudy, share: float, runs_dir: Path) -> float:
    """How much lower the baseline's loss is after this share of tokens more."""
    config, definition = study.baseline.config, study.definition
    key = science_key(config.nested(), without=BUDGETS)
    ladders = [path for path in sorted(runs_dir.glob(LADDERS)) if (path / "study.yaml").is_file()]
    fitting = next((ladder for path in ladders if (ladder := _ladder(path)) and ladder.key[0] == key), None)
    fix = f"nexus-ablate study tokens name=tokens_{definition.name} {label(definition.baseline)}"
    if fitting is None:
        problem = f"a margin of {100 * share:.3g}% of the training tokens needs runs of the baseline with other budgets"
        got = f"no study {LADDERS} of this baseline in {runs_dir}"
        raise ConfigError(problem, got, fix if definition.baseline else "nexus-ablate study tokens")
    tokens = (config.resolved.steps or 0) * config.resolved.tokens_per_step
    if (nats := fitting.difference(tokens, share)) is None:
        got = f"{tokens:,} tokens, and the runs have {fitting.tokens[0]:,.0f} to {fitting.tokens[-1]:,.0f}"
        raise ConfigError("the margin lies outside the budgets of those runs", got, "a study of budgets around it")
    return nats


def _ladder(path: Path) -> Ladder | None:
    """The runs in a folder as a ladder; None while they are none, such as before they have ended."""
    try:
        return read_ladder([path])
    except ConfigError:
        return None
