"""Cross-entropy over a vocabulary, with all logits at once or a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nexus_ablate.kernels.linear import autocasts

LOGIT_BYTES, GPU_LOGIT_BYTES = 2**26, 2**29
"""Most bytes of float32 logits per chunk. Each chunk adds a gradient of the head's size, so a GPU, which is limited by
memory bandwidth, takes larger chunks."""
WORTH_BYTES = 2**28
"""Fewest bytes of float32 logits per micro-batch for which `train.loss=auto` uses chunks."""
COMPILED_BYTES, MEMORY_SHARE = 8, 0.25
"""Bytes per logit of a compiled step (approximate), and the share of the GPU's memory up to which `train.loss=auto`
leaves it unchunked."""


def chunks_losses(requested: str, rows: int, vocab_size: int, precision: str, compiled_memory: int = 0) -> bool:
    """Whether `train.loss` chunks a micro-batch with this number of rows.

    `auto` never chunks float16: gradients are computed before the loss scale is known, and small ones would vanish.

    Args:
        compiled_memory: Memory in bytes of the GPU for which the step will be compiled; 0 if uncompiled, or on a CPU.
    """
    if requested != "auto":
        return requested == "chunked"
    logits = rows * vocab_size
    fits = logits * COMPILED_BYTES <= MEMORY_SHARE * compiled_memory
    return precision != "fp16" and logits * 4 >= WORTH_BYTES and not fits


def losses(logits_NV: Tensor, targets_N: Tensor, z_factor: float) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy in nats and the z-loss: `z_factor` times the mean square of log sum exp(logits).

    Both are over the targets that count, which are those from 0 on.
    """
    logits_NV = logits_NV.float()
    z_loss = logits_NV.new_zeros(())
    if z_factor:
        counts_N = targets_N >= 0
        weight_N = len(targets_N) * counts_N / counts_N.sum()  # exactly 1 where all count
        z_loss = z_factor * (logits_NV.logsumexp(-1).square() * weight_N).mean()
    return F.cross_entropy(logits_NV, targets_N), z_loss


def chunked_losses(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    z_factor: float,
    product: Callable[[Tensor, Tensor], Tensor] = F.linear,
    softcap: float | None = None,
    most_bytes: int = LOGIT_BYTES,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`losses` of the capped logits x W', and the gradients of their sum, without holding all logits at once.

    The gradients of a chunk are computed while its logits exist, so nothing is computed twice (as in Hsu et al. 2024,
    arXiv:2410.10989, section 3.2). They are returned, not left to autograd, for which a compiled step would keep all
    logits; `attach_gradients` connects them. Equal to `losses` up to the order of additions.

    Args:
        x_ND, weight_VD: Detached from the graph.
        product: Computes logits from rows and the weight.
        most_bytes: Most bytes of a chunk's logits in float32.

    Returns:
        The cross-entropy, the z-loss, the gradient by x and the gradient by the weight.
    """
    low_ND, low_VD = _lowered(x_ND), _lowered(weight_VD)  # once; autocast would do it for each chunk
    loss, z_loss = torch.zeros(2, device=x_ND.device).unbind()
    x_grads, weight_grad = [], None
    with torch.no_grad():
        for x_RD, targets_R in _chunks(low_ND, targets_N, weight_VD, most_bytes):
            logits_RV = _capped(product(x_RD, low_VD), softcap)
            log_p_RV = torch.log_softmax(logits_RV, -1)
            loss = loss - log_p_RV.gather(1, targets_R[:, None]).sum()
            log_sum_R = logits_RV[:, 0] - log_p_RV[:, 0]
            z_loss = z_loss + z_factor * log_sum_R.square().sum()
            slope_RV = None if softcap is None else 1 - (logits_RV / softcap).square()
            del logits_RV
            grad_RV = log_p_RV.exp_()
            if z_factor:
                grad_RV *= (1 + 2 * z_factor * log_sum_R)[:, None]
            grad_RV = _minus_one_hot(grad_RV, targets_R)
            if slope_RV is not None:
                grad_RV *= slope_RV
            del log_p_RV
            grad_RV = grad_RV.to(low_ND.dtype)
            x_grads.append(product(grad_RV, low_VD.t()).to(x_ND.dtype))
            chunk_grad = grad_RV.t() @ x_RD
            weight_grad = chunk_grad.to(weight_VD.dtype) if weight_grad is None else weight_grad.add_(chunk_grad)
    assert weight_grad is not None
    N = len(x_ND)
    return loss / N, z_loss / N, torch.cat(x_grads).div_(N), weight_grad.div_(N)


def chunked_nats(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    product: Callable[[Tensor, Tensor], Tensor],
    softcap: float | None,
    most_bytes: int,
) -> Tensor:
    """Cross-entropy of each target in nats, (N,) float32, without holding all logits at once; for evaluation."""
    return torch.cat(
        [
            F.cross_entropy(_capped(product(x, weight_VD), softcap), targets, reduction="none")
            for x, targets in _chunks(x_ND, targets_N, weight_VD, most_bytes)
        ]
    )


def _chunks(x_ND: Tensor, targets_N: Tensor, weight_VD: Tensor, most_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of each chunk, and their targets."""
    rows = max(1, most_bytes // (4 * len(weight_VD)))
    return zip(x_ND.split(rows), targets_N.split(rows), strict=True)


def _lowered(x: Tensor) -> Tensor:
    """x in the precision of matrix products."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if autocasts(x) else x


def _capped(logits_RV: Tensor, softcap: float | None) -> Tensor:
    """Logits in float32, capped as the model caps them."""
    return (logits_RV if softcap is None else softcap * torch.tanh(logits_RV / softcap)).float()


def _minus_one_hot(x_RV: Tensor, targets_R: Tensor) -> Tensor:
    """x minus 1 at the target of each row; may overwrite x."""
    if torch.compiler.is_compiling():  # the compiler fuses this form with its neighbours
        return x_RV - (torch.arange(x_RV.shape[1], device=x_RV.device) == targets_R[:, None]).to(x_RV.dtype)
    return x_RV.scatter_add_(1, targets_R[:, None], x_RV.new_full((len(targets_R), 1), -1.0))


def attach_gradients(loss: Tensor, x: Tensor, weight: Tensor, x_grad: Tensor, weight_grad: Tensor) -> Tensor:
    """The loss, connected to gradients by x and the weight that are already computed."""
    return _Attached.apply(loss, x, weight, x_grad, weight_grad)  # type: ignore[return-value]


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, x: Tensor, weight: Tensor, x_grad: Tensor, weight_grad: Tensor) -> Tensor:
        ctx.save_for_backward(x_grad, weight_grad)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        x_grad, weight_grad = ctx.saved_tensors
        return None, grad * x_grad, grad * weight_grad, None, None
