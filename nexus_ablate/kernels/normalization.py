"""LayerNorm and RMSNorm over the last axis, in the fastest form for a precision and a device.

In bfloat16 and float16 every intermediate is rounded (see low_precision.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nexus_ablate.kernels.low_precision import is_low, normalize_low


def layer_norm(x: Tensor, eps: float, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """gain (x - mean) / sqrt(var + eps) + bias over the last axis, in the precision of x."""
    if is_low(x):
        return normalize_low(x, x.new_ones(x.shape[-1]) if gain is None else gain, bias, eps, centred=True)
    return F.layer_norm(x, x.shape[-1:], gain, bias, eps)


def rms_norm(x: Tensor, eps: float, gain: Tensor, bias: Tensor | None = None) -> Tensor:
    """gain x / sqrt(mean(x^2) + eps) + bias over the last axis, in the precision of x."""
    if is_low(x):
        return normalize_low(x, gain, bias, eps, centred=False)
    # The compiler fuses the plain form, and doesn't cache programs with autograd functions.
    form = plain_rms_norm if torch.compiler.is_compiling() else _RootMeanSquare.apply
    y: Tensor = form(x, gain, eps)  # type: ignore[assignment]
    return y if bias is None else y + bias


def plain_rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """The reference for the fused form, values and gradients."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


class _RootMeanSquare(torch.autograd.Function):
    """gain x / sqrt(mean(x^2) + eps) with its gradient written out.

    Without it, autograd reads and writes the tensor twice as often. With n = x / rms and gradient g, d gain is the sum
    of g n over the rows, and d x = (g gain - n mean(g gain n)) / rms.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, gain)
        return normed * gain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[reportIncompatibleMethodOverride]
        normed, inverse, gain = ctx.saved_tensors
        product = (grad * normed).flatten(0, -2)
        along = (product @ gain).view(inverse.shape) / normed.shape[-1]
        return (grad * gain).addcmul_(normed, along, value=-1).mul_(inverse), product.sum(0), None
