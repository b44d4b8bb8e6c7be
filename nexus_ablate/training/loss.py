"""Cross-entropy of a vocabulary, whole or a few rows of logits at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LOGIT_BYTES = 2**26
"""Largest float32 logits that are formed at a time in the chunked form; its gradient has the same size."""
WORTH_BYTES = 2**28
"""From so many bytes of float32 logits in a micro-batch on, `train.loss=auto` chunks."""

LogitsOf = Callable[[Tensor, Tensor], Tensor]
"""Logits (rows, V) of a stream (rows, D) and the head's weight (V, D)."""


def chunks_losses(asked: str, rows: int, vocab_size: int, precision: str) -> bool:
    """What `train.loss` means for a micro-batch of so many rows.

    float16 is never chunked by itself: gradients are taken before the loss scale is known, and small ones would vanish.
    """
    return asked == "chunked" or (asked == "auto" and precision != "fp16" and rows * vocab_size * 4 >= WORTH_BYTES)


def losses(logits_NV: Tensor, targets_N: Tensor, z_factor: float) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy in nats and the z-loss: `z_factor` times the mean square of log sum exp(logits)."""
    logits_NV = logits_NV.float()
    z_loss = z_factor * logits_NV.logsumexp(-1).square().mean() if z_factor else logits_NV.new_zeros(())
    return F.cross_entropy(logits_NV, targets_N), z_loss


def chunked_losses(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, z_factor: float, logits_of: LogitsOf
) -> tuple[Tensor, Tensor]:
    """The same without ever holding all logits; the gradient of the first result is that of the sum of both.

    Gradients are taken chunk by chunk in the forward pass, while the chunk's logits are there, so nothing is computed
    twice (as in Hsu et al. 2024, arXiv:2410.10989, section 3.2). Equal to `losses` up to the order of additions.
    """
    return _Chunked.apply(x_ND, weight_VD, targets_N, z_factor, logits_of, torch.is_grad_enabled())  # type: ignore[return-value]


def chunked_nats(x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, logits_of: LogitsOf) -> Tensor:
    """Cross-entropy of each target in nats, (N,) float32, without ever holding all logits; for evaluation."""
    rows = chunk_rows(weight_VD)
    return torch.cat(
        [
            F.cross_entropy(logits_of(x, weight_VD).float(), targets, reduction="none")
            for x, targets in zip(x_ND.split(rows), targets_N.split(rows), strict=True)
        ]
    )


def chunk_rows(weight_VD: Tensor) -> int:
    """Rows whose logits are formed at a time."""
    return max(1, LOGIT_BYTES // (4 * len(weight_VD)))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, z_factor: float, logits_of: LogitsOf, graded: bool
    ) -> tuple[Tensor, Tensor]:
        rows = chunk_rows(weight_VD)
        loss, z_loss = torch.zeros(2, device=x_ND.device).unbind()
        x_grads, weight_grad = [], torch.zeros_like(weight_VD) if graded else None
        weight = weight_VD.detach().requires_grad_(graded)
        for x, targets in zip(x_ND.detach().split(rows), targets_N.split(rows), strict=True):
            share = len(x) / len(x_ND)
            with torch.set_grad_enabled(graded):
                x.requires_grad_(graded)
                part, z_part = (share * term for term in losses(logits_of(x, weight), targets, z_factor))
                if weight_grad is not None:
                    x_grad, chunk_grad = torch.autograd.grad(part + z_part, (x, weight))
                    x_grads.append(x_grad)
                    weight_grad += chunk_grad
            loss, z_loss = loss + part.detach(), z_loss + z_part.detach()
        if weight_grad is not None:
            ctx.save_for_backward(torch.cat(x_grads), weight_grad)
        ctx.mark_non_differentiable(z_loss)
        return loss, z_loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        x_grad, weight_grad = ctx.saved_tensors
        return grad * x_grad, grad * weight_grad, None, None, None, None
