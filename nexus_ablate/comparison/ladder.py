"""What a difference in loss is worth in training tokens: read off runs of the baseline with smaller and larger budgets.

Each of those runs ends its own schedule. A curve before the end of its schedule would be too high, and would make every
difference look worth more tokens than it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nexus_ablate.comparison.arms import Arm, group
from nexus_ablate.comparison.differences import science_key
from nexus_ablate.comparison.load import collect
from nexus_ablate.comparison.results import Stratum, Worth
from nexus_ablate.comparison.statistics import Array
from nexus_ablate.errors import ConfigError

BUDGETS = ("train.steps", "train.tokens", "train.flops")
"""Keys in which the runs of a ladder differ."""


@dataclass(frozen=True)
class Ladder:
    """Mean final validation losses of one configuration by training tokens, both strictly monotone.

    Attributes:
        tokens, losses: (budgets,) from the smallest budget to the largest.
        key: The configuration without its budget, the code and the validation text.
    """

    tokens: Array
    losses: Array
    key: tuple[str, ...]

    def difference(self, tokens: float, share: float) -> float | None:
        """How much the loss falls if `tokens` grow by this share; None outside the ladder. The inverse of `share`."""
        if not self.tokens[0] <= tokens <= tokens * (1 + share) <= self.tokens[-1]:
            return None
        before, after = np.interp(np.log([tokens, tokens * (1 + share)]), np.log(self.tokens), self.losses)
        return float(before - after)

    def share(self, tokens: float, difference: float) -> float | None:
        """The share by which `tokens` must change for the loss to change by `difference`; None outside the ladder.

        Linear between budgets in the logarithm of tokens.
        """
        ends = np.log(self.tokens)
        loss = float(np.interp(np.log(tokens), ends, self.losses)) + difference
        if not self.losses[-1] <= loss <= self.losses[0]:
            return None
        return float(np.exp(np.interp(-loss, -self.losses, ends)) / tokens - 1)


def read_ladder(dirs: Iterable[str | Path]) -> Ladder:
    """The ladder in some directories, as the study `tokens` makes it.

    Raises:
        ConfigError: There are not two budgets of one configuration, or more tokens do not lower the loss.
    """
    paths = [Path(path) for path in dirs]
    arms, _ = group(collect(paths))
    keys = {_key(arm) for arm in arms}
    where = " ".join(map(str, paths))
    if len(keys) != 1:
        problem = "the runs of --tokens differ in more than their budget"
        raise ConfigError(problem, where, "nexus-ablate study tokens, and --tokens runs/tokens")
    steps = sorted(point for arm in arms if (point := _point(arm)) is not None)
    tokens = np.array([point[0] for point in steps])
    losses = np.array([point[1] for point in steps])
    if len(steps) < 2 or (np.diff(losses) >= 0).any() or (np.diff(tokens) <= 0).any():
        problem = "--tokens needs two budgets or more, of which a larger one has a lower loss"
        raise ConfigError(problem, where, "nexus-ablate study tokens, and --tokens runs/tokens")
    return Ladder(tokens, losses, keys.pop())


def _key(arm: Arm) -> tuple[str, ...]:
    """What all runs of a ladder share, and those that are read against it."""
    run = next(iter(arm.runs.values()))
    return science_key(arm.config, without=BUDGETS), run.source, str((run.record.summary or {}).get("eval_hash"))


def _point(arm: Arm) -> tuple[float, float] | None:
    tokens, loss = arm.mean("tokens"), arm.mean("val_loss")
    return None if tokens is None or loss is None else (tokens, loss)


def with_worth(comparison: Stratum, ladder: Ladder) -> None:
    """Fill in what each difference is worth.

    Raises:
        ConfigError: The comparison is not about the loss, or its baseline is not the ladder's configuration.
    """
    base = comparison.arms[0]
    if comparison.endpoint.name != "val_loss":
        raise ConfigError("--tokens is about differences in val_loss", comparison.endpoint.name, "leave --tokens out")
    tokens = base.mean("tokens")
    if _key(base) != ladder.key or tokens is None:
        problem = "the baseline is not the configuration, code or validation text of --tokens"
        got = ", ".join(_differing(base.config)) or comparison.baseline
        raise ConfigError(problem, got, f"nexus-ablate study tokens name=tokens_{comparison.study}, with its overrides")
    if not ladder.tokens[0] <= tokens <= ladder.tokens[-1]:
        got = f"{tokens:,.0f} tokens, and the ladder has {ladder.tokens[0]:,.0f} to {ladder.tokens[-1]:,.0f}"
        raise ConfigError("the baseline's budget lies outside --tokens", got, "a study of budgets around it")
    for row in comparison.rows[1:]:
        if row.effect is not None:
            low, middle, high = (row.effect.low, row.effect.delta, row.effect.high)
            # a higher loss is worth fewer tokens, so the ends of the interval change places
            shares = [ladder.share(tokens, difference) for difference in (middle, high, low)]
            row.worth = Worth(*shares)


def _differing(config: dict[str, Any]) -> list[str]:
    model = config.get("model") or {}
    return [f"{key}={model.get(key)}" for key in ("n_layers", "d_model", "context")]
