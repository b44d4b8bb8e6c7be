"""Statistics of activations: pure functions of a tensor, in float32.

Shape letters: B batch, T time, D width, V vocabulary. Units are those of the tensor unless a line says "no unit".
Kurtosis is always Pearson's, 3 for a Gaussian, never excess.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASSIVE_RATIO = 1000.0
"""A massive activation is this many times the median magnitude. Sun et al. 2024, arXiv:2402.17762, section 2."""
MASSIVE_SIZE = 100.0
"""And, in the strict form, larger than this: a threshold that depends on the scale of the residual stream."""
CLOSED_GATE = 0.1
"""A gate score of at most this magnitude counts as closed."""


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
    magnitude_BN, median_B1 = _magnitudes(x_BTD)
    return (magnitude_BN.amax(1) / median_B1[:, 0]).mean()


def kurtosis_token(x_BTD: Tensor) -> Tensor:
    """Kurtosis E[(x - mean)^4] / var^2 over the width of each token, mean over tokens; no unit.

    A Gaussian token of width D has 3 (D - 1) / (D + 1). A token of constant value counts as 0 / 0: nan.
    """
    return _kurtosis(x_BTD).mean()


def kurtosis_sequence(x_BTD: Tensor) -> Tensor:
    """Kurtosis over all T x D entries of a sequence, mean over the batch; no unit."""
    return _kurtosis(x_BTD.flatten(1)).mean()


def kurtosis_channel(x_BTD: Tensor) -> Tensor:
    """mean(s^4) / mean(s^2)^2 over the channels, s the RMS of a channel over all tokens; no unit, 1 to D.

    1: all channels are equally large; D: one holds everything. He et al. 2024, arXiv:2405.19279, Eq. 1.
    """
    square_D = x_BTD.float().flatten(0, -2).square().mean(0)
    return square_D.square().mean() / square_D.mean().square()


def bondarenko_kurtosis(x_RN: Tensor) -> Tensor:
    """E[(x - mean)^4] / (s^4 + 1e-6), s the unbiased standard deviation, of each row; mean over rows; no unit.

    As in the authors' code (Qualcomm-AI-research/outlier-free-transformers), which the 1e-6 makes underestimate where
    s is small. Bondarenko et al. 2023, arXiv:2306.12929, section 3.
    """
    x_RN = x_RN.float()
    fourth_R = (x_RN - x_RN.mean(-1, keepdim=True)).pow(4).mean(-1)
    return (fourth_R / (x_RN.std(-1).pow(4) + 1e-6)).mean()


def bondarenko_inf_norm(x_RN: Tensor) -> Tensor:
    """Largest magnitude of each row, mean over rows: the authors' infinity norm of one tensor. arXiv:2306.12929."""
    return x_RN.float().abs().amax(-1).mean()


def massive_count(x_BTD: Tensor) -> Tensor:
    """Entries of at least MASSIVE_RATIO times the median magnitude of their sequence, per sequence; a count."""
    magnitude_BN, median_B1 = _magnitudes(x_BTD)
    return (magnitude_BN >= MASSIVE_RATIO * median_B1).float().sum(1).mean()


def massive_count_strict(x_BTD: Tensor) -> Tensor:
    """Those that also exceed MASSIVE_SIZE, as Sun et al. count them; a count per sequence."""
    magnitude_BN, median_B1 = _magnitudes(x_BTD)
    massive_BN = (magnitude_BN >= MASSIVE_RATIO * median_B1) & (magnitude_BN > MASSIVE_SIZE)
    return massive_BN.float().sum(1).mean()


def top_magnitudes(x_BTD: Tensor, count: int = 3) -> Tensor:
    """The largest magnitudes of a sequence's hidden state, then their median, mean over the batch: (count + 1,).

    As the authors' script prints them (locuslab/massive-activations); fewer where a sequence has fewer entries.
    """
    magnitude_BN, median_B1 = _magnitudes(x_BTD)
    top_BK = magnitude_BN.topk(min(count, magnitude_BN.shape[1]), 1).values
    return torch.cat((top_BK, median_B1), 1).mean(0)


def top_entry(x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Position and channel of the largest magnitude of each sequence, (B,) each."""
    index_B = x_BTD.abs().flatten(1).argmax(1)
    return index_B // x_BTD.shape[-1], index_B % x_BTD.shape[-1]


def most_common(index_B: Tensor) -> tuple[Tensor, Tensor]:
    """The commonest value (the smallest of several) and the share of the batch that has it; no unit.

    Of the channels of `top_entry`: whether the largest entry stands in the same channel whatever the input.
    """
    values, counts = index_B.unique(return_counts=True)
    return values[counts.argmax()], counts.max() / len(index_B)


def branch_ratio(branch_BTD: Tensor, stream_BTD: Tensor) -> Tensor:
    """|branch| / |stream| of each token, mean over tokens; no unit."""
    return (branch_BTD.float().norm(dim=-1) / stream_BTD.float().norm(dim=-1)).mean()


def cosine(x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
    """Cosine between two streams at each token, mean over tokens; no unit."""
    return torch.cosine_similarity(x_BTD.float(), y_BTD.float(), dim=-1).mean()


def log_sum_exp(logits_BTV: Tensor) -> Tensor:
    """ln sum exp of the logits of each token, mean over tokens; nats. What z-loss holds near 0."""
    return logits_BTV.float().logsumexp(-1).mean()


def closed_share(score: Tensor) -> Tensor:
    """Share of gate scores of magnitude CLOSED_GATE at most; no unit."""
    return (score.abs() <= CLOSED_GATE).float().mean()


ACTIVATION = {"rms": rms, "max_abs": max_abs, "kurtosis_token": kurtosis_token}
"""What every probe takes of every activation, by the last part of its metric name."""

STREAM = {"max_over_median": max_over_median}
"""What it takes of the residual stream besides."""

STREAM_FULL = {
    "kurtosis_sequence": kurtosis_sequence,
    "kurtosis_channel": kurtosis_channel,
    "massive_count": massive_count,
    "massive_count_strict": massive_count_strict,
    "top_magnitudes": top_magnitudes,
}
"""What a full probe adds of the residual stream."""


def _kurtosis(x: Tensor) -> Tensor:
    x = x.float()
    square = (x - x.mean(-1, keepdim=True)).square()
    return square.square().mean(-1) / square.mean(-1).square()


def _magnitudes(x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Magnitudes of each sequence's hidden state (B, T D) and their median (B, 1), the lower of two middle ones."""
    magnitude_BN = x_BTD.float().abs().flatten(1)
    return magnitude_BN, magnitude_BN.median(1, keepdim=True).values
