"""LayerNorm and RMSNorm with every intermediate rounded to the precision of their input.

PyTorch's fused LayerNorm always computes in float32, autocast casts some operations of a chain to float32, and a
compiled chain keeps float32 between its operations. With any of them `norm.fp32=off` would compare kernels, not
arithmetic. So both passes are custom operators, which autocast and the compiler leave unchanged. A mean or sum is
accumulated in float32 and rounded once, as in hardware.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nexus_ablate.kernels.linear import autocasts


def is_low(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16)


def uncast(x: Tensor) -> AbstractContextManager:
    """A context in which autocast doesn't cast operations on a low-precision x to float32."""
    lifts = is_low(x) and autocasts(x)
    return torch.autocast(x.device.type, enabled=False) if lifts else contextlib.nullcontext()


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True, dtype=torch.float32).to(x.dtype)


def _sum_of_rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(0, dtype=torch.float32).to(x.dtype)


def _forward(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the normalized input and the inverse of its scale, all in the precision of x."""
    with uncast(x):
        x = x - _mean(x) if centred else x
        inverse = torch.rsqrt(_mean(x.square()) + eps)
        normed = x * inverse
        y = normed * gain
        return y if bias is None else y + bias, normed, inverse


def _backward(
    grad: Tensor, normed: Tensor, inverse: Tensor, gain: Tensor, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, gain and bias: with h = gain grad, d x = (h - mean(h) - normed mean(h normed)) inverse."""
    with uncast(grad):
        h = grad * gain
        along = normed * _mean(h * normed)
        h = h - _mean(h) if centred else h
        return (h - along) * inverse, _sum_of_rows(grad * normed), _sum_of_rows(grad)


_OPERATORS = torch.library.Library("nexus_ablate", "DEF")
_OPERATORS.define(
    "low_precision_norm(Tensor x, Tensor gain, Tensor? bias, float eps, bool centred) -> (Tensor, Tensor, Tensor)"
)
_OPERATORS.define(
    "low_precision_norm_backward(Tensor grad, Tensor normed, Tensor inverse, Tensor gain, bool centred)"
    " -> (Tensor, Tensor, Tensor)"
)
_OPERATORS.impl("low_precision_norm", _forward, "CompositeExplicitAutograd")
_OPERATORS.impl("low_precision_norm_backward", _backward, "CompositeExplicitAutograd")


class _LowPrecisionNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
        y, normed, inverse = torch.ops.nexus_ablate.low_precision_norm(x, gain, bias, eps, centred)
        ctx.save_for_backward(normed, inverse, gain)
        ctx.centred, ctx.biased = centred, bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        d_x, d_gain, d_bias = torch.ops.nexus_ablate.low_precision_norm_backward(grad, *ctx.saved_tensors, ctx.centred)
        return d_x, d_gain, d_bias if ctx.biased else None, None, None


def normalize_low(x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    """gain x / sqrt(mean(x^2) + eps) + bias over the last axis, of x - mean(x) if `centred`.

    Args:
        x: bfloat16 or float16, and gain and bias of the same precision.
    """
    return _LowPrecisionNorm.apply(x, gain, bias, eps, centred)  # type: ignore[return-value]
