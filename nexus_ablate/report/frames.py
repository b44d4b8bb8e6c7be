"""Comparisons and runs as tidy pandas frames for notebooks, with the numbers of the report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nexus_ablate.comparison.results import Stratum
from nexus_ablate.runs.record import FIRST_KEYS

if TYPE_CHECKING:
    import pandas

_BLOCK = re.compile(r"(?P<area>[^/]+)/block_(?P<block>\d{1,5})(?:/(?P<rest>.+))?")


def runs_frame(stratum: Stratum) -> pandas.DataFrame:
    """A line for each arm and seed of the baseline: `arm seed loss difference`; NaN: no result."""
    import pandas

    lines = [
        (row.arm, seed, loss, difference)
        for row in stratum.rows
        for seed, loss, difference in zip(row.seeds, row.values, row.differences, strict=True)
    ]
    frame = pandas.DataFrame(lines, columns=["arm", "seed", "loss", "difference"])
    return frame.astype({"loss": "float64", "difference": "float64"})


def curves_frame(stratum: Stratum) -> pandas.DataFrame:
    """A line for each validation of each run: `arm seed tokens flops seconds val_loss`."""
    import pandas

    lines = [
        (arm.label, seed, *point)
        for arm in stratum.arms
        for seed, run in arm.runs.items()
        for point in zip(run.curves.tokens, run.curves.flops, run.curves.seconds, run.curves.val, strict=True)
    ]
    return pandas.DataFrame(lines, columns=["arm", "seed", "tokens", "flops", "seconds", "val_loss"])


def metrics_frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """A line for each logged step, a column for each metric; NaN where it was not measured or not finite."""
    import pandas

    frame = pandas.DataFrame(list(rows), columns=None if rows else list(FIRST_KEYS))
    return frame.drop(columns="nonfinite", errors="ignore")


def probes_frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """A line for each measured number: `step tokens flops seconds name block head value`.

    `name` is without the block: `act/block_003/resid/kurtosis_token` is `act/resid/kurtosis_token` of block 3. `block`
    is missing where a number is the whole model's, `head` where it is the whole block's; of a list that has no heads
    (`top_magnitudes`) `head` is the place in it.
    """
    import pandas

    lines = [line for row in rows for line in _lines(row)]
    frame = pandas.DataFrame(lines, columns=[*FIRST_KEYS, "name", "block", "head", "value"])
    return frame.astype({"block": "Int64", "head": "Int64", "value": "float64"})


def _lines(row: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    start = tuple(row[key] for key in FIRST_KEYS)
    for full, value in row.items():
        if full in FIRST_KEYS or full == "nonfinite":
            continue
        match = _BLOCK.fullmatch(full)
        name = "/".join(filter(None, (match["area"], match["rest"]))) if match else full
        block = int(match["block"]) if match else None
        if isinstance(value, list):
            yield from ((*start, name, block, head, item) for head, item in enumerate(value))
        elif value is None or isinstance(value, int | float):
            yield (*start, name, block, None, value)
