"""The test of a cell: all arms against the baseline on one endpoint in one stratum.

The methods are in `statistics`. What they need of a table, and what they say of it, passes through `judge_cell` alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from nexus_ablate.comparison.statistics import (
    Array,
    Effect,
    effects,
    robust_spread,
    robust_spread_of_runs,
    unlike_noise,
    unpaired_effects,
)


@dataclass(frozen=True)
class Pairs:
    """The results that are tested together.

    Attributes:
        losses: (arms, seeds) on the endpoint's scale, the baseline first; NaN where there is no result.
        are_paired: Whether a column is one seed; else its place has no meaning.
        family: Comparisons that share the level, if they are more than the arms of the table.
        absent: Further arms of the table, without a result so far.
        step: To which the losses were rounded.
    """

    losses: Array
    are_paired: bool = True
    family: int = 0
    absent: int = 0
    step: float = 0.0


@dataclass(frozen=True)
class CellResult:
    """What a test says of a cell.

    Attributes:
        effects: By arm; None for the baseline, and where there is no interval.
        family: Comparisons that share the level.
        noise: Standard deviation of one run without the seed's part, taken robustly; None where nothing says it.
        noisy: Arms that are noisier than the rest, for which each arm is judged by its own paired differences.
    """

    effects: list[Effect | None]
    family: int
    noise: float | None
    noisy: list[int]


def judge_cell(pairs: Pairs, level: float) -> CellResult:
    """Test every arm against the baseline, at a chance `level` of any false word in the cell."""
    losses = pairs.losses
    test = effects if pairs.are_paired else unpaired_effects
    found = test(losses, level, pairs.family, pairs.step, pairs.absent)
    distinct = {losses[arm].tobytes(): arm for arm in reversed(range(len(losses))) if found[arm] is not None}
    rows = [0, *sorted(distinct.values())]  # a copy of an arm says nothing new about the noise
    family = max(len(distinct) + pairs.absent, pairs.family, 1)
    if not pairs.are_paired:
        return CellResult(found, family, robust_spread_of_runs(losses[rows]), [])
    noisy = [rows[row] for row in unlike_noise(losses[rows])]
    return CellResult(found, family, robust_spread(losses[rows]), noisy)
