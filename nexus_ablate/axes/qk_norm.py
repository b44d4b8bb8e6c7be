"""The qk_norm axis: norms of queries, keys and values after their projections, by default before rotation.

Statistics are in float32, gains start at 1. With grouped queries the keys have G heads. `eps` is a number here: `auto`
has already been resolved.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.axes.modules import Geometry
from nexus_ablate.axes.norm import LayerNorm, LayerNormNonparametric, RMSNorm, RMSNormZero
from nexus_ablate.config.options import Registry
from nexus_ablate.config.roles import VECTOR

QKV = tuple[Tensor, Tensor, Tensor]


class QKNorm(nn.Module):
    """Abstract: takes and returns queries (B, T, H, d), keys and values (B, T, G, d)."""

    norms_keys = True
    """Whether keys are normed, so that a key bias contributes differently to each score."""
    scale: float | None = None
    """Replaces the score's own factor unless None."""
    after_rotation = False
    """Whether it norms queries and keys after the position scheme; the values that it returns are then ignored."""

    def forward(self, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor) -> QKV:
        raise NotImplementedError


QK_NORM: Registry[QKNorm] = Registry("qk_norm")


def rms(width: int, eps: float) -> RMSNorm:
    return RMSNorm(width, bias=False, site="qk", eps=eps, gain_init=1.0, fp32=True)


@QK_NORM.register("none")
class NoQKNorm(QKNorm):
    """Queries, keys and values unchanged."""

    norms_keys = False

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()

    def forward(self, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor) -> QKV:
        return q_BTHd, k_BTGd, v_BTGd


class UnitRMS(nn.Module):
    """x / sqrt(mean(x^2) + eps) over the last axis, nothing learned."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, self.eps)


class HeadGain(nn.Module):
    """A norm without a gain, times a separate gain for each head; input and output are (..., H, d).

    Args:
        start: Initial value of the parameter: 1, or 0 if the gain is 1 + the parameter.
    """

    def __init__(self, norm: nn.Module, n_heads: int, width: int, start: float = 1.0, bias: bool = False) -> None:
        super().__init__()
        self.norm, self.offset = norm, 1 - start
        self.gain = nn.Parameter(torch.full((n_heads, width), start))
        self.bias = nn.Parameter(torch.zeros(n_heads, width)) if bias else None
        self.roles = {"gain": VECTOR, "bias": VECTOR}

    def forward(self, x_BTHd: Tensor) -> Tensor:
        y_BTHd = self.norm(x_BTHd) * (self.gain + self.offset if self.offset else self.gain)
        return y_BTHd if self.bias is None else y_BTHd + self.bias


@QK_NORM.register("rms")
class RMSQKNorm(QKNorm):
    """RMSNorm of q and of k in each head, with one gain each, shared by the heads. Qwen3, arXiv:2505.09388.

    There may also be a gain per head, or none (Llama 4). With `zero_centred` the gain is 1 + w, w starting at 0 (Gemma
    3). With `after_rotation` the norm follows the position scheme (Llama 4, Hunyuan).
    """

    def __init__(self, geometry: Geometry, *, eps: float, gain: str, zero_centred: bool, after_rotation: bool) -> None:
        super().__init__()
        self.after_rotation = after_rotation

        def norm(n_heads: int) -> nn.Module:
            if gain == "off":
                return UnitRMS(eps)
            if gain == "per_head":
                return HeadGain(UnitRMS(eps), n_heads, geometry.head_dim, 0.0 if zero_centred else 1.0)
            kind = RMSNormZero if zero_centred else RMSNorm
            return kind(geometry.head_dim, bias=False, site="qk", eps=eps, gain_init=1.0, fp32=True)

        self.query, self.key = norm(geometry.n_heads), norm(geometry.n_kv_heads)

    def forward(self, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor) -> QKV:
        return self.query(q_BTHd), self.key(k_BTGd), v_BTGd


@QK_NORM.register("rms_full")
class FullRMSQKNorm(QKNorm):
    """RMSNorm over all heads of q together, and of k, gains of that width. OLMo-2, arXiv:2501.00656."""

    def __init__(self, geometry: Geometry, *, eps: float) -> None:
        super().__init__()
        self.query = rms(geometry.n_heads * geometry.head_dim, eps)
        self.key = rms(geometry.n_kv_heads * geometry.head_dim, eps)

    def forward(self, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor) -> QKV:
        q_BTHd = self.query(q_BTHd.flatten(2)).view_as(q_BTHd)
        return q_BTHd, self.key(k_BTGd.flatten(2)).view_as(k_BTGd), v_BTGd


@QK_NORM.register("layer")
class LayerQKNorm(QKNorm):
    """LayerNorm of q and of k in each head, with one gain each and no bias. Dehghani et al. 2023, arXiv:2302.05442.

    There may also be a gain per head (Command R+, StableLM) and a bias (Phi, Persimmon).
    """

    def __init__(self, geometry: Geometry, *, eps: float, gain: str, bias: bool, after_rotation: bool) -> None:
        super().__init__()
        self.after_rotation = after_rotation

        def norm(n_heads: int) -> nn.Module:
            if gain == "per_head":
                plain = LayerNormNonparametric(geometry.head_dim, bias=False, site="qk", eps=eps, fp32=True)
                return HeadGain(plain, n_heads, geometry.head_dim, bias=bias)
            return LayerNorm(geometry.head_dim, bias=bias, site="qk", eps=eps, gain_init=1.0, fp32=True)

        self.query, self.key = norm(geometry.n_heads), norm(geometry.n_kv_heads)

    def forward(self, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor) -> QKV:
        return self.query(q_BTHd), self.key(k_BTGd), v_BTGd


@QK_NORM.register("l2")
class L2QKNorm(QKNorm):
    """g q/|q| . k/|k|, with a learned scalar g instead of 1/sqrt(head_dim). Henry et al. 2020, arXiv:2010.04245.

    g starts at log2(N^2 - N), N the training context (the authors: the 97.5th percentile of training lengths). It
    multiplies q, so scores that aren't dot products also get a q of length g. Lengths below 1e-12 are replaced by
    1e-12, as in the authors' code (F.normalize).
    """

    scale = 1.0

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor(math.log2(geometry.context**2 - geometry.context)))

    def forward(self, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor) -> QKV:
        return self.g * F.normalize(q_BTHd.float(), dim=-1), F.normalize(k_BTGd.float(), dim=-1), v_BTGd


@QK_NORM.register("ngpt")
class NormalizedQK(QKNorm):
    """s q/|q| and s k/|k| after rotation, one learned s for each channel of each head; scores times sqrt(head_dim).

    Loshchilov et al. 2024 (nGPT), arXiv:2410.01131, Eq. 15 and 16. As in the authors' code (NVIDIA/ngpt, model.py), the
    parameter is s times `scale` / `start`.
    """

    after_rotation = True

    def __init__(self, geometry: Geometry, *, start: float, scale: float | str) -> None:
        super().__init__()
        first = geometry.d_model**-0.5 if scale == "auto" else float(scale)
        self.factor, self.scale = start / first, geometry.head_dim**0.5
        self.length_Hd = nn.Parameter(torch.full((geometry.n_heads, geometry.head_dim), first))
        self.roles = {"length_Hd": VECTOR}

    def forward(self, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor) -> QKV:
        length_Hd = self.factor * self.length_Hd
        q_BTHd, k_BTGd = F.normalize(q_BTHd.float(), dim=-1), F.normalize(k_BTGd.float(), dim=-1)
        return length_Hd * q_BTHd, length_Hd * k_BTGd, v_BTGd


@QK_NORM.register("q_only")
class QueryNorm(QKNorm):
    """RMSNorm of q in each head, keys unchanged: scores stay linear in the length of the key. A control."""

    norms_keys = False

    def __init__(self, geometry: Geometry, *, eps: float) -> None:
        super().__init__()
        self.query = rms(geometry.head_dim, eps)

    def forward(self, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor) -> QKV:
        return self.query(q_BTHd), k_BTGd, v_BTGd


@QK_NORM.register("k_only")
class KeyNorm(QKNorm):
    """RMSNorm of k in each head, queries unchanged: scores stay linear in the length of the query. A control."""

    def __init__(self, geometry: Geometry, *, eps: float) -> None:
        super().__init__()
        self.key = rms(geometry.head_dim, eps)

    def forward(self, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor) -> QKV:
        return q_BTHd, self.key(k_BTGd), v_BTGd


@QK_NORM.register("qkv")
class QKVNorm(QKNorm):
    """RMSNorm of q, of k and of v in each head, a gain each. Zhuo et al. 2025 (HybridNorm), arXiv:2503.04598."""

    def __init__(self, geometry: Geometry, *, eps: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (rms(geometry.head_dim, eps) for _ in range(3))

    def forward(self, q_BTHd: Tensor, k_BTGd: Tensor, v_BTGd: Tensor) -> QKV:
        return self.query(q_BTHd), self.key(k_BTGd), self.value(v_BTGd)
