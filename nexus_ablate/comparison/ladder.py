"""What a difference in loss is worth in training tokens: read off runs of the baseline with smaller and larger budgets.

Each of those runs ends its own schedule. A curve before the end of its schedule would be too high, and would make every
difference look worth more tokens than it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nexus_ablate.comparison.arms import Arm, group
from nexus_ablate.comparison.differences import science_key
from nexus_ablate.comparison.load import collect
from nexus_ablate.comparison.results import Stratum, Worth
from nexus_ablate.comparison.statistics import Array
from nexus_ablate.errors import ConfigError
from nexus_ablate.study.arm_overrides import BUDGETS


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


def read_ladder(folder: str | Path) -> Ladder:
    """The ladder in a folder, as the study `tokens` makes it.

    Raises:
        ConfigError: There are not two budgets of one configuration, or more tokens do not lower the loss.
    """
    arms, _ = group(collect([Path(folder)]))
    keys = {_key(arm) for arm in arms}
    fix = "nexus-ablate study tokens, and --tokens runs/tokens"
    if len(keys) != 1:
        raise ConfigError("the runs of --tokens differ in more than their budget", str(Path(folder)), fix)
    points = []
    for arm in arms:
        tokens, loss = arm.mean("tokens"), arm.mean("val_loss")
        if tokens is not None and loss is not None:
            points.append((tokens, loss))
    tokens, losses = np.array(sorted(points)).reshape(-1, 2).T
    if len(points) < 2 or (np.diff(losses) >= 0).any() or (np.diff(tokens) <= 0).any():
        problem = "--tokens needs two budgets or more, of which a larger one has a lower loss"
        raise ConfigError(problem, str(Path(folder)), fix)
    return Ladder(tokens, losses, keys.pop())


def _key(arm: Arm) -> tuple[str, ...]:
    """What all runs of a ladder share, and those that are read against it."""
    run = next(iter(arm.runs.values()))
    return science_key(arm.config, without=BUDGETS), run.source, str((run.record.summary or {}).get("eval_hash"))


def with_worth(stratum: Stratum, ladder: Ladder) -> None:
    """Fill in what each difference is worth.

    Raises:
        ConfigError: The comparison is not about the loss, or its baseline is not the ladder's configuration.
    """
    base = stratum.arms[0]
    if stratum.endpoint.name != "val_loss":
        raise ConfigError("--tokens is about differences in val_loss", stratum.endpoint.name, "leave --tokens out")
    tokens = base.mean("tokens")
    if _key(base) != ladder.key or tokens is None:
        problem = "the baseline is not the configuration, code or validation text of --tokens"
        model = base.config.get("model") or {}
        got = ", ".join(f"{key}={model.get(key)}" for key in ("n_layers", "d_model", "context"))
        raise ConfigError(problem, got, f"nexus-ablate study tokens name=tokens_{stratum.study}, with its overrides")
    if not ladder.tokens[0] <= tokens <= ladder.tokens[-1]:
        got = f"{tokens:,.0f} tokens, and the ladder has {ladder.tokens[0]:,.0f} to {ladder.tokens[-1]:,.0f}"
        raise ConfigError("the baseline's budget lies outside --tokens", got, "a study of budgets around it")
    for row in stratum.rows[1:]:
        if row.effect is not None:
            # a higher loss is worth fewer tokens, so the ends of the interval change places
            differences = row.effect.delta, row.effect.high, row.effect.low
            row.worth = Worth(*(ladder.share(tokens, difference) for difference in differences))
