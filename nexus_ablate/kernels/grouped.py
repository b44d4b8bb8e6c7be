"""Products of groups of rows with a matrix each, as a mixture of experts computes them, without a loop.

Shape letters: N rows, E groups, I inputs, O outputs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from nexus_ablate.kernels.linear import autocasts

ALIGNED_BYTES = 16
"""grouped_mm takes rows whose length is a multiple of this."""


def grouped_linear(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """x W' of each row, (N, O), with the weight of the row's group.

    Args:
        ends_E: int32; the rows of group e end before this index and begin where those of the group before end.
    """
    outputs = weight_EOI.shape[1]
    if autocasts(x_NI):
        dtype = torch.get_autocast_dtype(x_NI.device.type)
        x_NI, weight_EOI = x_NI.to(dtype), weight_EOI.to(dtype)
    multiple = ALIGNED_BYTES // x_NI.element_size()
    more_in, more_out = -x_NI.shape[1] % multiple, -outputs % multiple
    if more_in or more_out:  # zeros add nothing
        x_NI, weight_EOI = F.pad(x_NI, (0, more_in)), F.pad(weight_EOI, (0, more_in, 0, more_out))
    return grouped_product(x_NI, weight_EOI, ends_E)[:, :outputs]


@torch.library.custom_op("nexus_ablate::grouped_product", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear` of aligned rows; an operator of its own, since PyTorch's has no shapes in float32.

    In float32 a GPU's kernel reads the ends on the CPU, which no CUDA graph can.
    """
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


@grouped_product.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


@torch.library.custom_op("nexus_ablate::grouped_weight_gradient", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def grouped_weight_gradient(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """grad' x of each group's rows, (E, O, I)."""
    return F.grouped_mm(grad.transpose(0, 1), x, offs=ends)


@grouped_weight_gradient.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(ends), grad.shape[1], x.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    x_grad = grouped_product(grad, weight.transpose(1, 2).contiguous(), ends)
    return x_grad, grouped_weight_gradient(grad, x, ends), None


grouped_product.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.nexus_ablate.grouped_product)
def _flops(x_shape: list[int], weight_shape: list[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(x_shape) * weight_shape[1]
