"""How much a loss depends on the seed alone, and which differences can be detected above that noise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nexus_ablate.comparison.arms import Arm, group
from nexus_ablate.comparison.failures import failure
from nexus_ablate.comparison.load import collect
from nexus_ablate.comparison.statistics import (
    Array,
    detectable_difference,
    residual_variance,
    seeds_needed,
    spread_interval,
    upper_bound,
)
from nexus_ablate.errors import ConfigError

SEEDS = (3, 5, 8, 10, 20)


@dataclass(frozen=True)
class ArmNoise:
    """One arm over its seeds: mean, standard deviation and its 95% interval."""

    arm: str
    seeds: int
    mean: float
    sd: float
    sd_low: float
    sd_high: float


@dataclass(frozen=True)
class Noise:
    """The seed noise of the runs in some directories.

    Attributes:
        arms: Those with at least two results.
        residual: Standard deviation of one run with the seed's common part removed, as a paired comparison sees it.
        residual_bound: Its upper 80% bound, with which seeds are planned: by the point estimate half of all plans
            would fall short.
        measured: Whether arms shared seeds, so that the common part could be removed; else none is assumed.
        detectable: Number of seeds to the smallest difference that they show with 80% power.
        needed: Requested differences to the seeds that they need; None beyond 1000.
        left_out: Runs without a result.
    """

    arms: list[ArmNoise]
    residual: float
    residual_bound: float
    measured: bool
    family: int
    detectable: dict[int, float]
    needed: dict[float, int | None]
    left_out: int


def noise(dirs: Iterable[str | Path], deltas: Iterable[float] = (), family: int = 1) -> Noise:
    """Seed noise of the validation loss.

    Args:
        dirs: As for `compare`.
        deltas: Differences in nats per token whose number of seeds is asked for.
        family: Arms that are compared with one baseline at once.

    Raises:
        ConfigError: No arm has results at two seeds.
    """
    collection = collect(Path(d) for d in dirs)
    arms, duplicates = group(collection)
    values = {arm.label: _losses(arm) for arm in arms}
    spreads = [
        ArmNoise(name, len(losses), float(np.mean(losses)), *spread_interval(losses))
        for name, losses in ((name, np.array(list(by_seed.values()))) for name, by_seed in values.items())
        if len(losses) > 1
    ]
    if not spreads:
        fix = "nexus-ablate -m KEY=VALUE seed=0,1,2 trains several"
        raise ConfigError("noise needs an arm with results at two seeds", f"{len(collection.runs)} runs", fix)
    residual, df, measured = _residual([values[arm.arm] for arm in spreads])
    bound = upper_bound(residual, df)
    return Noise(
        arms=spreads,
        residual=residual,
        residual_bound=bound,
        measured=measured,
        family=family,
        detectable={n: detectable_difference(bound, n, family) for n in SEEDS},
        needed={delta: seeds_needed(delta, bound, family) for delta in deltas},
        left_out=len(collection.excluded) + len(duplicates),
    )


def _losses(arm: Arm) -> dict[int, float]:
    trained = [seed for seed, run in arm.runs.items() if not failure(run.record, run.curves)]
    losses = {seed: arm.value(seed, "val_loss") for seed in trained}
    return {seed: loss for seed, loss in losses.items() if np.isfinite(loss)}


def _residual(arms: list[dict[int, float]]) -> tuple[float, int, bool]:
    """The residual standard deviation over all arms that differ, or the spread of one arm; its degrees of freedom."""
    seeds = sorted(set().union(*arms))
    table: Array = np.array([[losses.get(seed, np.nan) for seed in seeds] for losses in arms])
    distinct = np.unique(np.nan_to_num(table, nan=np.inf), axis=0)  # copies of an arm say nothing new
    distinct[~np.isfinite(distinct)] = np.nan
    variance, df = residual_variance(distinct)
    if len(distinct) > 1 and df > 0:
        return float(np.sqrt(variance)), df, True
    losses = np.array(list(arms[0].values()))
    return float(losses.std(ddof=1)), len(losses) - 1, False
