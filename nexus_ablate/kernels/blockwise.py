"""Causal softmax attention on a CPU, a block of queries at a time.

Same result as PyTorch's fused CPU kernel, by batched matrix products (BLAS), which gain more from a second thread and
skip most masked scores.
Shape letters as in `attention`; N = B H, and b queries in a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

QUERIES = 32
"""Queries per block. A block's keys end at its last query, so smaller blocks skip more masked scores."""
SHORTEST = 96
"""Fewest queries for which blocks skip enough masked scores to pay for the extra calls."""
WORTH_MULTIPLYING = 2**22
"""Fewest multiplications of the scores, B H T S d, for which separate operations cost less than they save."""
KEPT_BYTES = 2**25
"""Largest attention map of a layer, which is kept for the backward pass. The fused kernel keeps none."""


def pays(q_BHTd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor) -> bool:
    """Whether `blockwise_attention` can replace the fused kernel and is faster."""
    B, H, T, d = q_BHTd.shape
    map_size = B * H * T * k_BHSd.shape[2]
    return (
        q_BHTd.device.type == "cpu"
        and q_BHTd.dtype == k_BHSd.dtype == v_BHSd.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and v_BHSd.shape[3] == d
        and not torch.compiler.is_compiling()
        and T >= SHORTEST
        and map_size * d >= WORTH_MULTIPLYING
        and map_size * 4 <= KEPT_BYTES
    )


def blockwise_attention(q_BHTd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale q k' + mask) v, (B, H, T, d); equal to the fused kernel up to the order of additions.

    Args:
        mask: Added to the scores, (B or 1, H or 1, T, S), -inf where a key is hidden. It can only hide more: query
            T - n never sees keys after S - n. Without a mask it sees all others.
    """
    return _Blockwise.apply(q_BHTd, k_BHSd, v_BHSd, mask, scale)  # type: ignore[return-value]


def _blocks(T: int, S: int) -> Iterator[tuple[slice, slice]]:
    """The queries of each block, and the keys that one of them may see."""
    for start in range(0, T, QUERIES):
        end = min(start + QUERIES, T)
        yield slice(start, end), slice(0, end + S - T)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        B, H, T, d = q.shape
        scaled_BHTd = torch.mul(q, scale, out=q.new_empty(q.shape))
        q_NTd, k_NSd, v_NSd = scaled_BHTd.flatten(0, 1), _flat(k), _flat(v)
        out_BTHd, maps = q.new_empty(B, T, H, d), []
        for queries, keys in _blocks(T, k.shape[2]):
            score_NbS = torch.bmm(q_NTd[:, queries], k_NSd[:, keys].transpose(1, 2))
            if mask is None:
                b = score_NbS.shape[1]
                score_NbS[..., -b:] += score_NbS.new_full((b, b), -torch.inf).triu_(1)
            else:
                score_NbS.unflatten(0, (B, H)).add_(mask[..., queries, keys])
            map_NbS = torch.softmax(score_NbS, -1)
            out_BTHd[:, queries] = torch.bmm(map_NbS, v_NSd[:, keys]).unflatten(0, (B, H)).transpose(1, 2)
            maps.append(map_NbS)
        ctx.save_for_backward(q_NTd, k_NSd, v_NSd, *maps)
        ctx.shape, ctx.scale = (B, H), scale
        ctx.mask_shape = None if mask is None else mask.shape
        return out_BTHd.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[reportIncompatibleMethodOverride]
        q_NTd, k_NSd, v_NSd, *maps = ctx.saved_tensors
        (B, H), T, S, d = ctx.shape, q_NTd.shape[1], k_NSd.shape[1], q_NTd.shape[2]
        grad_NTd = _flat(grad)
        dq_BTHd, dk_NSd, dv_NSd = grad.new_empty(B, T, H, d), None, None
        dmask = grad.new_zeros(ctx.mask_shape) if ctx.needs_input_grad[3] else None
        for (queries, keys), map_NbS in reversed(list(zip(_blocks(T, S), maps, strict=True))):
            grad_Nbd = grad_NTd[:, queries]
            dmap_NbS = torch.bmm(grad_Nbd, v_NSd[:, keys].transpose(1, 2))
            dscore_NbS = torch._softmax_backward_data(  # type: ignore[reportPrivateImportUsage]
                dmap_NbS, map_NbS, -1, map_NbS.dtype
            )
            dq_BbHd = torch.bmm(dscore_NbS, k_NSd[:, keys]).unflatten(0, (B, H)).transpose(1, 2)
            torch.mul(dq_BbHd, ctx.scale, out=dq_BTHd[:, queries])
            dk_part = torch.bmm(dscore_NbS.transpose(1, 2), q_NTd[:, queries])  # q includes the scale
            dv_part = torch.bmm(map_NbS.transpose(1, 2), grad_Nbd)
            if dk_NSd is None or dv_NSd is None:  # the last block, which is first here and sees all keys
                dk_NSd, dv_NSd = dk_part, dv_part
            else:
                dk_NSd[:, keys] += dk_part
                dv_NSd[:, keys] += dv_part
            if dmask is not None:
                part = dmask[..., queries, keys]
                part += dscore_NbS.unflatten(0, (B, H)).sum_to_size(part.shape)
        assert dk_NSd is not None and dv_NSd is not None
        return dq_BTHd.transpose(1, 2), dk_NSd.unflatten(0, (B, H)), dv_NSd.unflatten(0, (B, H)), dmask, None


def _flat(x_BHSd: Tensor) -> Tensor:
    return x_BHSd.reshape(-1, *x_BHSd.shape[2:])
