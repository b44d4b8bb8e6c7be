"""The axes inside attention: scores (`attention`), `normalizer`, `qk_norm` and `gate`.

model.py runs them in one order: project, norm q and k, rotate, score, bias, mask, normalize, mix values, gate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nexus_ablate.axes.roles import Geometry
from nexus_ablate.registry import Registry


class Score(nn.Module):
    """Abstract: (B, H, T, d) queries and (B, H, S, d) keys to scores (B, H, T, S)."""

    fused = False
    """Whether the score is the scaled dot product that fused kernels compute."""


class Normalizer(nn.Module):
    """Abstract: scores (B, H, T, S), -inf where a key may not be seen, to weights of the same shape."""

    fused = False
    """Whether the weights are the softmax that fused kernels compute."""
    shift_invariant = False
    """Whether adding the same number to all scores of a query changes nothing."""


class QKNorm(nn.Module):
    """Abstract: queries (B, H, T, d) and keys (B, H, S, d) to themselves, before rotation."""

    active = True
    """Whether anything is normed: then a key bias is not the same for all keys."""


class Gate(nn.Module):
    """Abstract: head outputs (B, H, T, d) and the branch's input (B, T, D) to head outputs."""


SCORES: Registry[Score] = Registry("attention")
NORMALIZERS: Registry[Normalizer] = Registry("normalizer")
QK_NORMS: Registry[QKNorm] = Registry("qk_norm")
GATES: Registry[Gate] = Registry("gate")


@SCORES.register("dot")
class Dot(Score):
    """q.k / sqrt(head_dim). Vaswani et al. 2017, arXiv:1706.03762, Eq. 1."""

    fused = True

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.scale = geometry.head_dim**-0.5

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor) -> Tensor:
        return q_BHTd @ k_BHSd.transpose(-1, -2) * self.scale


@NORMALIZERS.register("softmax")
class Softmax(Normalizer):
    """exp(z) over its sum, in float32. Masked scores are -inf."""

    fused = True
    shift_invariant = True

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()

    def forward(self, score_BHTS: Tensor) -> Tensor:
        return torch.softmax(score_BHTS.float(), -1).to(score_BHTS.dtype)


@QK_NORMS.register("none")
class NoQKNorm(QKNorm):
    """Queries and keys as they are."""

    active = False

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor) -> tuple[Tensor, Tensor]:
        return q_BHTd, k_BHSd


@GATES.register("none")
class NoGate(Gate):
    """Head outputs as they are."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()

    def forward(self, out_BHTd: Tensor, x_BTD: Tensor) -> Tensor:
        return out_BHTd
