"""The norm axis. A norm is built for a width and a site (`attn`, `ffn` or `final`) and maps (..., width) to itself.

Gains start at 1 and biases at 0 unless the class says otherwise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.registry import Registry

NORMS: Registry[nn.Module] = Registry("norm")


def statistics_dtype(x: Tensor, fp32: bool) -> torch.dtype:
    """float32, or the precision of the matrix products around the norm."""
    if fp32:
        return torch.float32
    return torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on where the tensor is; on the meta device torch cannot tell, and it is not."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


class _Affine(nn.Module):
    """Gain and optional bias over the width; the rest of a norm is its subclass's forward."""

    def __init__(self, width: int, bias: bool, fp32: bool) -> None:
        super().__init__()
        self.fp32 = fp32
        self.gain = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def lower(self, x: Tensor) -> Tensor:
        """The input in the precision in which statistics are taken."""
        return x.to(statistics_dtype(x, self.fp32))

    def affine(self, y: Tensor) -> Tensor:
        y = y * self.gain.to(y.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)


@NORMS.register("layer")
class LayerNorm(_Affine):
    """(x - mean) / sqrt(var + eps), over the width, biased variance. Ba et al. 2016, arXiv:1607.06450, Eq. 4."""

    def __init__(self, width: int, bias: bool, site: str, *, eps: float, fp32: bool) -> None:
        super().__init__(width, bias, fp32)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = self.lower(x)
        gain, bias = self.gain.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        if not autocasts(x):
            return F.layer_norm(x, gain.shape, gain, bias, self.eps)
        with torch.autocast(x.device.type, enabled=False):  # it would overrule fp32=off
            return F.layer_norm(x, gain.shape, gain, bias, self.eps)


@NORMS.register("rms")
class RMSNorm(_Affine):
    """x / sqrt(mean(x^2) + eps), over the width. Zhang & Sennrich 2019, arXiv:1910.07467, Eq. 4; eps as in Llama."""

    def __init__(self, width: int, bias: bool, site: str, *, eps: float, fp32: bool) -> None:
        super().__init__(width, bias, fp32)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = self.lower(x)
        return self.affine(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


@NORMS.register("batch")
class BatchNorm(_Affine):
    """(x - mean) / sqrt(var + eps) per channel over batch and time. Ioffe & Szegedy 2015, arXiv:1502.03167, Alg. 1.

    In training the statistics at position t contain later positions and other sequences: the model sees its targets,
    and the training loss is not the loss of a language model. In evaluation running statistics are used and nothing
    leaks. Gradient accumulation makes the batch of the statistics smaller.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, bias: bool, site: str, *, eps: float, momentum: float, fp32: bool) -> None:
        super().__init__(width, bias, fp32)
        self.eps, self.momentum = eps, momentum
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.lower(x).flatten(0, -2)
        if self.training:
            var, mean = torch.var_mean(rows, 0, correction=0)
            with torch.no_grad():
                unbiased = var * (len(rows) / max(1, len(rows) - 1))
                self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
                self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)
        else:
            var, mean = self.running_var.to(rows), self.running_mean.to(rows)
        return self.affine((rows - mean) * torch.rsqrt(var + self.eps)).view(x.shape)


@NORMS.register("scale")
class ScaleNorm(nn.Module):
    """g x / max(||x||, eps), one scalar g, sqrt(width) at first. Nguyen & Salazar 2019, arXiv:1910.05895, Eq. 5."""

    def __init__(self, width: int, bias: bool, site: str, *, eps: float, fp32: bool) -> None:
        super().__init__()
        self.eps, self.fp32 = eps, fp32
        self.gain = nn.Parameter(torch.tensor(math.sqrt(width)))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(statistics_dtype(x, self.fp32))
        y = x * (self.gain.to(x.dtype) / x.norm(dim=-1, keepdim=True).clamp(min=self.eps))
        return y if self.bias is None else y + self.bias.to(y.dtype)


DYT_ALPHA = {1024: (1.0, 1.0), 2048: (1.0, 0.5), 4096: (0.8, 0.2), 8192: (0.2, 0.05)}
"""First alpha of DyT before attention and elsewhere, by width: Table 11 of the paper; the nearest width is taken."""


@NORMS.register("dyt")
class DynamicTanh(_Affine):
    """gain * tanh(alpha x) + bias, one scalar alpha per site. Zhu et al. 2025, arXiv:2503.10622, Eq. 1."""

    def __init__(
        self, width: int, bias: bool, site: str, *, alpha_attn: float | str, alpha_other: float | str, fp32: bool
    ) -> None:
        super().__init__(width, bias, fp32)
        nearest = min(DYT_ALPHA, key=lambda known: abs(math.log(known / width)))
        asked = alpha_attn if site == "attn" else alpha_other
        self.alpha = nn.Parameter(torch.tensor(DYT_ALPHA[nearest][site != "attn"] if asked == "auto" else float(asked)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lower(x)
        return self.affine(torch.tanh(self.alpha.to(x.dtype) * x))


@NORMS.register("none")
class NoNorm(nn.Module):
    """The identity."""

    def __init__(self, width: int, bias: bool, site: str) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x
