"""The attention axis: how a query scores a key. The core does the rest (bias, soft-cap, mask, normalizer).

Shape letters: B batch, H heads, T queries, S keys, d head width, w hidden width of a score.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from nexus_ablate.axes.modules import Geometry, HeadLinear
from nexus_ablate.config.options import Registry
from nexus_ablate.config.roles import SMALL_MAP

HIDDEN_BYTES, GPU_HIDDEN_BYTES = 2**26, 2**29
"""Largest (B, H, queries, S, w) tensor of an uncompiled additive score, with at least one query. Three of this size
exist at once."""


class Score(nn.Module):
    """Abstract: (B, H, T, d) queries and (B, H, S, d) keys to scores (B, H, T, S), before the factor `scale`."""

    scale: float = 1.0
    """The published factor on the scores. Position schemes that add to q.k scale their part by it too."""
    dot = False
    """Whether the score is the product of q and k: linear in the key, as fused kernels require."""

    def query(self, q_BHTd: Tensor) -> Tensor:
        """The queries, changed before the position scheme acts on them."""
        return q_BHTd


class DotProduct(Score):
    """Abstract: q.k."""

    dot = True

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor) -> Tensor:
        return q_BHTd @ k_BHSd.transpose(-1, -2)


ATTENTION: Registry[Score] = Registry("attention")


@ATTENTION.register("dot")
class Dot(DotProduct):
    """q.k / sqrt(head_dim). Vaswani et al. 2017, arXiv:1706.03762, Eq. 1."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.scale = geometry.head_dim**-0.5


@ATTENTION.register("luong_dot")
class LuongDot(DotProduct):
    """q.k, unscaled. Luong et al. 2015, arXiv:1508.04025, section 3.1 (dot)."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()


@ATTENTION.register("luong_general")
class LuongGeneral(DotProduct):
    """q W k, unscaled, a square W for each head. Luong et al. 2015, arXiv:1508.04025, section 3.1 (general).

    W acts before rotation, so that rotated scores depend on i - j. It adds depth but no new functions: the query
    projection could absorb it.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.map = HeadLinear(geometry.n_heads, geometry.head_dim, geometry.head_dim, bias=False, role=SMALL_MAP)

    def query(self, q_BHTd: Tensor) -> Tensor:
        return self.map(q_BHTd)


@ATTENTION.register("luong_concat")
class LuongConcat(Score):
    """v.tanh(W [q; k]), W and v for each head. Luong et al. 2015, arXiv:1508.04025, section 3.1 (concat).

    W is one matrix for the concatenation, applied to its two halves separately.
    """

    def __init__(self, geometry: Geometry, *, width: int | str) -> None:
        super().__init__()
        hidden = geometry.head_dim if width == "auto" else int(width)
        self.map = HeadLinear(geometry.n_heads, 2 * geometry.head_dim, hidden, bias=False, role=SMALL_MAP)
        self.vector = HeadLinear(geometry.n_heads, hidden, 1, bias=False, role=SMALL_MAP)

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor) -> Tensor:
        query_map, key_map = self.map.weight().chunk(2, -1)
        q_BHTw, k_BHSw = q_BHTd @ query_map.transpose(1, 2), k_BHSd @ key_map.transpose(1, 2)
        return additive_scores(q_BHTw, k_BHSw, self.vector.weight())


@ATTENTION.register("additive")
class Additive(Score):
    """v.tanh(Wq q + Wk k + b) for each head. Bahdanau et al. 2014, arXiv:1409.0473, appendix A.1.2.

    The paper prints it without the bias b of the hidden layer.
    """

    def __init__(self, geometry: Geometry, *, width: int | str, bias: bool) -> None:
        super().__init__()
        hidden = geometry.head_dim if width == "auto" else int(width)
        self.query_map = HeadLinear(geometry.n_heads, geometry.head_dim, hidden, bias=False, role=SMALL_MAP)
        self.key_map = HeadLinear(geometry.n_heads, geometry.head_dim, hidden, bias=bias, role=SMALL_MAP)
        self.vector = HeadLinear(geometry.n_heads, hidden, 1, bias=False, role=SMALL_MAP)

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor) -> Tensor:
        return additive_scores(self.query_map(q_BHTd), self.key_map(k_BHSd), self.vector.weight())


def additive_scores(q_BHTw: Tensor, k_BHSw: Tensor, v_H1w: Tensor) -> Tensor:
    """v.tanh(q + k) for every query and key, (B, H, T, S), a few queries at a time if all together would be too large.

    The backward pass recomputes each part, so the limit holds there too. A compiled step forms no hidden tensor at all.
    """
    if torch.compiler.is_compiling():
        return _FusedScores.apply(q_BHTw, k_BHSw, v_H1w)  # type: ignore[return-value]
    most = GPU_HIDDEN_BYTES if q_BHTw.is_cuda else HIDDEN_BYTES
    queries = max(1, most // (k_BHSw.numel() * k_BHSw.element_size()))
    if queries >= q_BHTw.shape[2]:
        return _additive_scores(q_BHTw, k_BHSw, v_H1w)
    parts = q_BHTw.split(queries, 2)
    if not torch.is_grad_enabled():
        return torch.cat([_additive_scores(part, k_BHSw, v_H1w) for part in parts], 2)
    again = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(_additive_scores, part, k_BHSw, v_H1w, **again) for part in parts], 2)  # type: ignore[reportArgumentType]


def _additive_scores(q_BHTw: Tensor, k_BHSw: Tensor, v_H1w: Tensor) -> Tensor:
    hidden_BHTSw = torch.tanh(q_BHTw[:, :, :, None] + k_BHSw[:, :, None])
    return (hidden_BHTSw @ v_H1w[:, None].transpose(-1, -2)).squeeze(-1)


class _FusedScores(torch.autograd.Function):
    """The same as four reductions over (B, H, T, S, w), each compiled to one kernel.

    The compiler would materialize a hidden tensor that two of them share. So the second gradient sums the transpose,
    and the third adds q + k in the other order.
    """

    @staticmethod
    def forward(ctx: Any, q_BHTw: Tensor, k_BHSw: Tensor, v_H1w: Tensor) -> Tensor:
        ctx.save_for_backward(q_BHTw, k_BHSw, v_H1w)
        return (torch.tanh(q_BHTw[:, :, :, None] + k_BHSw[:, :, None]) * v_H1w[:, None]).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHTS: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[reportIncompatibleMethodOverride]
        q_BHTw, k_BHSw, v_H1w = ctx.saved_tensors
        grad_BHTS1, v_H11w = grad_BHTS[..., None], v_H1w[:, None]
        slope_BHTSw = 1 - torch.tanh(q_BHTw[:, :, :, None] + k_BHSw[:, :, None]).square()
        slope_BHSTw = 1 - torch.tanh(k_BHSw[:, :, :, None] + q_BHTw[:, :, None]).square()
        hidden_BHTSw = torch.tanh(k_BHSw[:, :, None] + q_BHTw[:, :, :, None])
        return (
            (grad_BHTS1 * v_H11w * slope_BHTSw).sum(3),
            (grad_BHTS1.transpose(2, 3) * v_H11w * slope_BHSTw).sum(3),
            (grad_BHTS1 * hidden_BHTSw).sum((0, 2, 3))[:, None],
        )
