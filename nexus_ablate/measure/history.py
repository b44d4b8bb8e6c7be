"""Loss spikes and onsets, computed from all rows of a run's metrics. Doesn't import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

ONSETS = {"attn/sink_rate": 0.1, "act/resid/max_over_median": 1000.0, "repeats/accuracy": 0.5}
"""Thresholds of onsets: a tenth of all (sequence, layer, head) are sinks; the residual stream has a massive entry; half
of a repeated segment is predicted right."""

SCORED = ("train/loss", "grad_norm/global")
FINAL = ("grad_norm/global", "grad_norm/first_over_last")
"""Metrics of which the summary has the mean over the rows of the last tenth of the steps."""

KEPT = ("step", "tokens", "train/loss", *FINAL, *ONSETS)
"""The metrics of a row that these functions use."""


def onsets(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Step and tokens at which a metric first reached its threshold in ONSETS; absent if it never did."""
    first = {}
    for name, threshold in ONSETS.items():
        row = next((row for row in rows if (row.get(name) or -math.inf) >= threshold), None)
        if row is not None:
            first[name] = {"step": row["step"], "tokens": row["tokens"]}
    return first


def spike_score(values: Sequence[float], window: int = 128, deviations: float = 6.0) -> float | None:
    """Share of values above mean + `deviations` standard deviations of the previous `window`; None with too few values.

    OLMo-core's stability monitor: one-sided, population standard deviation, a window that excludes the value itself, no
    spike if the deviation is below 1e-10. `values` should exclude warm-up.
    """
    spikes = []
    for index in range(window, len(values)):
        recent = values[index - window : index]
        mean = math.fsum(recent) / window
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in recent) / window)
        spikes.append(deviation >= 1e-10 and values[index] - mean > deviations * deviation)
    return sum(spikes) / len(spikes) if spikes else None


def final_means(rows: Sequence[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """The means of FINAL over the rows of the last tenth of the steps; absent where none has a value."""
    last = [row for row in rows if row["step"] > 0.9 * steps]
    means = {}
    for name in FINAL:
        values = [row[name] for row in last if row.get(name) is not None]
        if values:
            means[name] = math.fsum(values) / len(values)
    return means


def spike_scores(rows: Sequence[Mapping[str, Any]], warmup: int) -> dict[str, float]:
    """The scores of the logged losses and gradient norms after warm-up; absent if too few were logged."""
    results = {}
    for name in SCORED:
        values = [row[name] for row in rows if row["step"] > warmup and row.get(name) is not None]
        score = spike_score(values)
        if score is not None:
            results[f"spike_score/{name}"] = score
    return results
