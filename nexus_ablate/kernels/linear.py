"""Matrix products of linear layers, and the input that several layers share.

PyTorch uses BLAS for float32 products on a CPU. oneDNN, which PyTorch ships for convolutions, computes x W' and g W 5
to 20% faster on AMD cores, and g' x no faster. Both are exact up to the order of additions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

Product = Callable[..., Tensor]
"""A function of x, W and b that returns x W' + b."""

WORTH_MULTIPLYING = 2**24
"""Fewest multiply-adds for which oneDNN is used: its call takes about 30 us longer than one of BLAS."""

ONE_DNN = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + b for x (..., in), W (out, in), b (out); by oneDNN in eager float32 on an x86 CPU if the size pays."""
    if (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and x.numel() * len(weight) >= WORTH_MULTIPLYING
        and ONE_DNN
    ):
        return _OneDnn.apply(x, weight, bias)  # type: ignore[return-value]
    return F.linear(x, weight, bias)


_chosen: ContextVar[Product] = ContextVar("product", default=linear)


def chosen_product() -> Product:
    """The product that new linear layers use: `linear`, or F.linear inside `products("blas")`."""
    return _chosen.get()


@contextmanager
def products(form: str) -> Iterator[None]:
    """Set the product of linear layers built inside the `with` to `train.linear`: `auto`, or `blas` for F.linear."""
    token = _chosen.set(linear if form == "auto" else F.linear)
    try:
        yield
    finally:
        _chosen.reset(token)


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the tensor's device; False on the meta device, where PyTorch can't answer."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def shared(x: Tensor, n: int) -> tuple[Tensor, ...]:
    """The same input for n linear layers, with one shared low-precision copy instead of autocast's n copies.

    Their gradients are summed in the precision of x. In compiled code the compiler already makes a single copy.
    """
    if not autocasts(x) or torch.compiler.is_compiling():
        return (x,) * n
    return _Shared.apply(x, torch.get_autocast_dtype(x.device.type), n)  # type: ignore[return-value]


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, n: int) -> tuple[Tensor, ...]:
        ctx.dtype, low = x.dtype, x.to(dtype)
        return tuple(low.view_as(low) for _ in range(n))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        total = grads[0].to(ctx.dtype, copy=True)
        for grad in grads[1:]:
            total += grad
        return total, None, None


class _OneDnn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return (
            _product(grad, weight.t(), None) if ctx.needs_input_grad[0] else None,
            rows.t() @ x.flatten(0, -2),
            rows.sum(0) if ctx.biased else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


if ONE_DNN:

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _flops(x_shape: list[int], weight_shape: list[int], *_: Any, **__: Any) -> int:
        return 2 * math.prod(x_shape) * weight_shape[0]
