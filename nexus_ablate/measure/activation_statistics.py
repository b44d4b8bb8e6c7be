"""Statistics of activations: pure functions of a tensor, in float32.

Shape letters: B batch, T time, D width, V vocabulary. Units are those of the tensor unless a line says "no unit".
Kurtosis is always Pearson's, 3 for a Gaussian, never excess.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

MASSIVE_RATIO = 1000.0
"""A massive activation is this many times the median magnitude. Sun et al. 2024, arXiv:2402.17762, section 2."""
MASSIVE_SIZE = 100.0
"""In the strict form it is also larger than this, a threshold that depends on the scale of the residual stream."""
CLOSED_GATE = 0.1
"""A gate counts as closed if the magnitude of its score is at most this."""

SITES = {
    "resid": "act/{block}/resid",
    "attn": "act/{block}/attn",
    "ffn": "act/{block}/ffn",
    "scores": "attn/{block}",
    "map": "attn/{block}",
    "query": "attn/{block}/query",
    "key": "attn/{block}/key",
    "value": "attn/{block}/value",
    "gate": "gate/{block}",
    "logits": "logits",
    "matrix": "weight/{matrix}",
}
"""The sites of statistics, and the prefix of their names.

`resid` is the residual stream after a block, `attn` and `ffn` are the outputs of its branches, `scores` the scaled
attention scores before cap and mask, `map` the attention shares, `query`, `key` and `value` the input of attention by
head, with positions, `gate` the scores of a multiplying gate, `matrix` a matrix of a block.
"""


@dataclass(frozen=True)
class Statistic:
    """A function of a tensor that a probe evaluates; see `statistic`.

    Attributes:
        needs: The names of its further inputs.
    """

    name: str
    function: Callable[..., Any]
    sites: tuple[str, ...]
    full: bool
    needs: tuple[str, ...]


STATISTICS: list[Statistic] = []
"""The statistics that probes evaluate, in the order of registration."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def statistic(*sites: str, name: str = "", full: bool = False) -> Callable[[_Function], _Function]:
    """Decorator: probes evaluate the function at these sites. It has a row in `measures.py` too.

    The function returns a number, one number per head, numbers by the end of their names, or None if it isn't defined.
    Its first argument is the tensor of the site. Further arguments without a default are passed by name:

        stream_BTD        the residual stream that enters the block; at `resid`, `attn` and `ffn` of a full probe
        tokens_BT, kinds  the probe batch, and token ids by kind; at `resid`
        sink              1 if a sink token precedes the text, else 0; at `resid`
        first             index of token 0 among tokens or keys; at `resid`, `scores`, `map`, `query`, `key` or `value`
        seen_TS           which query sees which key; at `scores`

    Args:
        sites: Some of SITES.
        name: The last part of its metric's name, or the start of several names. Default: the function's name.
        full: Whether only full probes evaluate it.
    """

    def add(function: _Function) -> _Function:
        parameters = [*inspect.signature(function).parameters.values()][1:]
        needs = tuple(p.name for p in parameters if p.default is p.empty)
        STATISTICS.append(Statistic(name or function.__name__, function, sites, full, needs))
        return function

    return add


@statistic("resid", "attn", "ffn", "matrix")
def rms(x: Tensor) -> Tensor:
    """Root of the mean square of all entries."""
    return x.float().square().mean().sqrt()


@statistic("resid", "attn", "ffn", "logits")
def max_abs(x: Tensor) -> Tensor:
    """Largest magnitude of all entries: the infinity norm of the flattened tensor."""
    return x.float().abs().max()


@statistic("resid")
def max_over_median(x_BTD: Tensor) -> Tensor:
    """Largest magnitude divided by the median magnitude of a sequence's hidden state, mean over the batch; no unit.

    The ratio behind massive activations: Sun et al. 2024, arXiv:2402.17762, section 2.
    """
    magnitude_BN, median_B1 = _magnitudes(x_BTD)
    return (magnitude_BN.amax(1) / median_B1[:, 0]).mean()


@statistic("resid")
def mean_over_rms(x_BTD: Tensor) -> Tensor:
    """|mean| / RMS over the width of each token, mean over tokens; no unit, 0 to 1.

    What LayerNorm subtracts and RMSNorm keeps. A Gaussian token of width D has sqrt(2 / (pi D)).
    """
    x_BTD = x_BTD.float()
    return (x_BTD.mean(-1).abs() / x_BTD.square().mean(-1).sqrt()).mean()


@statistic("resid", "query", "key", "value")
def first_norm_ratio(x: Tensor, first: int) -> Tensor:
    """Norm of token 0 over the mean norm of the tokens after it, mean over the batch; (H,) of (B, H, T, d); no unit.

    Gu et al. 2024, arXiv:2410.10781, find the first token large in the residual stream, and its key and value small.
    """
    norm = x.float().norm(dim=-1)
    return (norm[..., first] / norm[..., first + 1 :].mean(-1)).mean(0)


@statistic("resid", "attn", "ffn")
def kurtosis_token(x_BTD: Tensor) -> Tensor:
    """Kurtosis E[(x - mean)^4] / var^2 over the width of each token, mean over tokens; no unit.

    A Gaussian token of width D has 3 (D - 1) / (D + 1). A constant token has 0 / 0: nan.
    """
    return _kurtosis(x_BTD).mean()


@statistic("resid", full=True)
def kurtosis_sequence(x_BTD: Tensor) -> Tensor:
    """Kurtosis over all T x D entries of a sequence, mean over the batch; no unit."""
    return _kurtosis(x_BTD.flatten(1)).mean()


@statistic("resid", full=True)
def kurtosis_channel(x_BTD: Tensor) -> Tensor:
    """mean(s^4) / mean(s^2)^2 over the channels, s the RMS of a channel over all tokens; no unit, 1 to D.

    1: all channels are equally large; D: one holds everything. He et al. 2024, arXiv:2405.19279, Eq. 1.
    """
    square_D = x_BTD.float().flatten(0, -2).square().mean(0)
    return square_D.square().mean() / square_D.mean().square()


def bondarenko_kurtosis(x_RN: Tensor) -> Tensor:
    """E[(x - mean)^4] / (s^4 + 1e-6), s the unbiased standard deviation, of each row; mean over rows; no unit.

    As in the authors' code (Qualcomm-AI-research/outlier-free-transformers); the 1e-6 makes it too small for small s.
    Bondarenko et al. 2023, arXiv:2306.12929, section 3.
    """
    x_RN = x_RN.float()
    fourth_R = (x_RN - x_RN.mean(-1, keepdim=True)).pow(4).mean(-1)
    return (fourth_R / (x_RN.std(-1).pow(4) + 1e-6)).mean()


def bondarenko_inf_norm(x_RN: Tensor) -> Tensor:
    """Largest magnitude of each row, mean over rows: the authors' infinity norm of one tensor. arXiv:2306.12929."""
    return x_RN.float().abs().amax(-1).mean()


@statistic("resid", full=True)
def massive_count(x_BTD: Tensor) -> Tensor:
    """Entries of at least MASSIVE_RATIO times the median magnitude of their sequence, per sequence; a count."""
    magnitude_BN, median_B1 = _magnitudes(x_BTD)
    return (magnitude_BN >= MASSIVE_RATIO * median_B1).float().sum(1).mean()


@statistic("resid", full=True)
def massive_count_strict(x_BTD: Tensor) -> Tensor:
    """Massive entries that also exceed MASSIVE_SIZE, as counted by Sun et al.; per sequence."""
    magnitude_BN, median_B1 = _magnitudes(x_BTD)
    massive_BN = (magnitude_BN >= MASSIVE_RATIO * median_B1) & (magnitude_BN > MASSIVE_SIZE)
    return massive_BN.float().sum(1).mean()


@statistic("resid", full=True)
def top_magnitudes(x_BTD: Tensor, count: int = 3) -> Tensor:
    """The largest magnitudes of a sequence's hidden state, then their median, mean over the batch: (count + 1,).

    As printed by the authors' script (locuslab/massive-activations); fewer if a sequence has fewer entries.
    """
    magnitude_BN, median_B1 = _magnitudes(x_BTD)
    top_BK = magnitude_BN.topk(min(count, magnitude_BN.shape[1]), 1).values
    return torch.cat((top_BK, median_B1), 1).mean(0)


def top_entry(x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Position and channel of the largest magnitude of each sequence, (B,) each."""
    index_B = x_BTD.abs().flatten(1).argmax(1)
    return index_B // x_BTD.shape[-1], index_B % x_BTD.shape[-1]


def most_common(index_B: Tensor) -> tuple[Tensor, Tensor]:
    """The most common value (the smallest of several) and the share of the batch that has it; no unit.

    For the channels of `top_entry`: whether the largest entry is in the same channel for every input.
    """
    values, counts = index_B.unique(return_counts=True)
    return values[counts.argmax()], counts.max() / len(index_B)


@statistic("resid", name="top_", full=True)
def largest_entry(
    x_BTD: Tensor, tokens_BT: Tensor, kinds: Mapping[str, Collection[int]], sink: int
) -> dict[str, Tensor]:
    """Where the largest entry of each sequence's residual stream is: channel, position, and kind of token.

    `channel` and `position` are the most common ones, `*_agreement` the share of sequences that have it; `on_first` and
    `on_<kind>` are shares of sequences, each counted once, under the first kind that fits.

    Args:
        x_BTD: The residual stream.
        tokens_BT: The input tokens.
        kinds: Token ids by kind.
        sink: Number of sink tokens before the text; a sink token counts as the first token.
    """
    position_B, channel_B = top_entry(x_BTD)
    shares = {}
    for name, index_B in (("channel", channel_B), ("position", position_B)):
        shares[name], shares[f"{name}_agreement"] = most_common(index_B)
    token_B = tokens_BT.gather(1, (position_B - sink).clamp(min=0)[:, None])[:, 0]
    left_B = position_B > 0
    shares["on_first"] = (~left_B).float().mean()
    for kind, ids in kinds.items():
        fits_B = left_B & torch.isin(token_B, torch.tensor(sorted(ids), device=token_B.device))
        shares[f"on_{kind}"] = fits_B.float().mean()
        left_B = left_B & ~fits_B
    return shares


@statistic("attn", "ffn", full=True)
def branch_ratio(branch_BTD: Tensor, stream_BTD: Tensor) -> Tensor:
    """|branch output| / |residual stream| of each token, mean over tokens; no unit."""
    return (branch_BTD.float().norm(dim=-1) / stream_BTD.float().norm(dim=-1)).mean()


@statistic("resid", full=True)
def cosine(x_BTD: Tensor, stream_BTD: Tensor) -> Tensor:
    """Cosine between two streams at each token, mean over tokens; no unit."""
    return torch.cosine_similarity(x_BTD.float(), stream_BTD.float(), dim=-1).mean()


@statistic("logits")
def log_sum_exp(logits_BTV: Tensor) -> Tensor:
    """ln sum exp of the logits of each token, mean over tokens; nats. The z-loss keeps it near 0."""
    return logits_BTV.float().logsumexp(-1).mean()


@statistic("gate", name="closed")
def closed_share(score: Tensor) -> Tensor:
    """Share of gate scores with a magnitude of at most CLOSED_GATE; no unit."""
    return (score.abs() <= CLOSED_GATE).float().mean()


@statistic("gate", name="mean")
def mean_score(score: Tensor) -> Tensor:
    """Mean gate score; no unit."""
    return score.float().mean()


def _kurtosis(x: Tensor) -> Tensor:
    x = x.float()
    square = (x - x.mean(-1, keepdim=True)).square()
    return square.square().mean(-1) / square.mean(-1).square()


def _magnitudes(x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Magnitudes of each sequence's hidden state (B, T D) and their median (B, 1), the lower of two middle ones."""
    magnitude_BN = x_BTD.float().abs().flatten(1)
    return magnitude_BN, magnitude_BN.median(1, keepdim=True).values
