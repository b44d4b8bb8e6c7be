"""Statistics of attention maps: pure functions, by head, in float32 and without unit.

Shape letters: B batch, H heads, T queries, S keys. `first` is the column of token 0. The columns before it are keys
without a query (a learned key, the normalizer's own), which every query sees. A sink token counts as token 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nexus_ablate.measure.activation_statistics import statistic

SINK_THRESHOLD = 0.3
"""Share of attention above which a token is a sink. Gu et al. 2024, arXiv:2410.10781, section 3.1."""


def shares(weight_BHTS: Tensor, own_key: bool) -> Tensor:
    """Attention weights as shares: rows that sum to 1, or to 0 if all weights are 0.

    Args:
        weight_BHTS: From a normalizer; rows need not sum to 1.
        own_key: Whether the normalizer has its own key, which becomes the first column, with 1 minus the sum of the
            row. Otherwise rows are divided by their sum, as Gu et al. 2024 (arXiv:2410.10781, section 7) do to
            compare kernels other than softmax.
    """
    weight_BHTS = weight_BHTS.float()
    total_BHT1 = weight_BHTS.sum(-1, keepdim=True)
    if own_key:
        return torch.cat(((1 - total_BHT1).clamp(min=0), weight_BHTS), -1)
    return weight_BHTS / total_BHT1.clamp(min=torch.finfo(torch.float32).tiny)


@statistic("map")
def first_token_mass(share_BHTS: Tensor, first: int) -> Tensor:
    """Share of attention from queries 1 .. T - 1 to token 0, mean over queries and batch, (H,).

    Uniform attention over the tokens gives (1/2 + ... + 1/T) / (T - 1): 0.059 at T = 64.
    """
    return share_BHTS[:, :, 1:, first].mean((0, 2))


@statistic("map")
def sink_rate(share_BHTS: Tensor, first: int, k: int = 1, threshold: float = SINK_THRESHOLD) -> Tensor:
    """Share of sequences in which token k (from 1) gets more than `threshold` on average over queries k .. T, (H,).

    Sink_k of Gu et al. 2024, arXiv:2410.10781, Eq. 3: a query's attention to itself counts, the threshold is applied
    to each sequence. The mean over heads and layers is their metric.
    """
    alpha_BH = share_BHTS[:, :, k - 1 :, first + k - 1].mean(-1)
    return (alpha_BH > threshold).float().mean(0)


def _register_sink_rate(k: int) -> None:
    @statistic("map", name=f"sink_rate_{k}", full=True)
    def sink_rate_k(share_BHTS: Tensor, first: int) -> Tensor | None:
        return sink_rate(share_BHTS, first, k) if k <= share_BHTS.shape[2] else None


for _k in (2, 3, 4):
    _register_sink_rate(_k)


@statistic("map")
def entropy(share_BHTS: Tensor, first: int) -> Tensor:
    """-sum a ln a of each row divided by that of uniform attention to all keys so far, mean over rows and batch, (H,).

    1: uniform over all keys so far; 0: one key gets everything. The row of token i is divided by ln(keys before or at
    i), whatever a window hides, so that inside a window the largest value is below 1; rows with one key are left out.
    Zhai et al. 2023, arXiv:2303.06296.
    """
    T = share_BHTS.shape[2]
    keys_T = torch.arange(1 + first, T + 1 + first, device=share_BHTS.device)
    start = 0 if first else 1
    row_BHT = torch.special.entr(share_BHTS[:, :, start:]).sum(-1) / keys_T[start:].log()
    return row_BHT.mean((0, 2))


@statistic("map")
def front_mass(share_BHTS: Tensor, first: int) -> Tensor | None:
    """Share of attention to the keys without a query (learned, or the normalizer's own), mean over queries, (H,)."""
    return share_BHTS[..., :first].sum(-1).mean((0, 2)) if first else None


@statistic("scores")
def max_logit(score_BHTS: Tensor, seen_TS: Tensor) -> Tensor:
    """Largest magnitude of a scaled score with position bias, before the cap, over visible keys, (H,).

    Dehghani et al. 2023, arXiv:2302.05442: its growth breaks attention at high learning rates.
    """
    return score_BHTS.float().abs().masked_fill(~seen_TS, 0).amax((0, 2, 3))


@statistic("scores", name="score_at/", full=True)
def score_by_distance(score_BHTS: Tensor, seen_TS: Tensor, first: int) -> dict[str, Tensor]:
    """Mean score by distance, `0`, `1`, `2-3`, `4-7` ...: scaled, with its position bias, before the cap; (H,) each.

    Token 0, which may be a sink, is left out among the keys, and so is what a window hides.
    """
    T = seen_TS.shape[0]
    tokens_T = torch.arange(T, device=seen_TS.device)
    distance_TS, seen_TS = tokens_T[:, None] - tokens_T[1:], seen_TS[:, first + 1 :]
    score_HTS = score_BHTS[..., first + 1 :].float().mean(0)
    means, low, high = {}, 0, 0
    while low < T - 1:
        pairs_TS = seen_TS & (distance_TS >= low) & (distance_TS <= high)
        if pairs_TS.any():
            means[str(low) if low == high else f"{low}-{high}"] = score_HTS[:, pairs_TS].mean(1)
        low, high = high + 1, 2 * high + 1
    return means
