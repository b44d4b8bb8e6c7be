"""Statistics of activations and weights: pure functions of a tensor, in float32.

Shape letters: B batch, T time, D width. Units are those of the tensor unless a line says "no unit".
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms(x: Tensor) -> Tensor:
    """Root of the mean square of all entries."""
    return x.float().square().mean().sqrt()


def max_abs(x: Tensor) -> Tensor:
    """Largest magnitude of all entries: the infinity norm of the flattened tensor."""
    return x.float().abs().max()


def max_over_median(x_BTD: Tensor) -> Tensor:
    """Largest magnitude over the median magnitude of one sequence's hidden state, mean over the batch; no unit.

    The ratio behind massive activations: Sun et al. 2024, arXiv:2402.17762, section 2.
    """
    magnitude = x_BTD.float().abs().flatten(1)
    return (magnitude.amax(1) / magnitude.median(1).values).mean()


def kurtosis_token(x_BTD: Tensor) -> Tensor:
    """Pearson kurtosis E[(x - mean)^4] / var^2 over the width of each token, mean over tokens; no unit.

    Never excess: a Gaussian token of width D has 3 (D - 1) / (D + 1). A token of constant value counts as 0 / 0: nan.
    """
    x = x_BTD.float()
    square = (x - x.mean(-1, keepdim=True)).square()
    return (square.square().mean(-1) / square.mean(-1).square()).mean()


ACTIVATION = {"rms": rms, "max_abs": max_abs, "max_over_median": max_over_median, "kurtosis_token": kurtosis_token}
"""What a probe takes of every activation, by the last part of its metric name."""


def activation_summary(x_BTD: Tensor) -> Tensor:
    """All of ACTIVATION, stacked in its order: one transfer from the device instead of four."""
    return torch.stack([statistic(x_BTD) for statistic in ACTIVATION.values()])
