"""Softmax attention by the library's kernels: scaled_dot_product_attention, the blockwise one, and FlexAttention.

Shape letters as in `attention`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from nexus_ablate.kernels.blockwise import blockwise_attention, pays


def spread(x_BGSd: Tensor, n_heads: int) -> Tensor:
    """Keys or values of all heads, (B, H, S, d): each of the G is repeated for the query heads that share it."""
    groups = x_BGSd.shape[1]
    return x_BGSd if groups == n_heads else x_BGSd.repeat_interleave(n_heads // groups, 1)


def softmax_attention(
    q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, mask: Tensor | None, scale: float, dropout: float, blockwise: bool
) -> Tensor:
    """softmax(scale q k' + mask) v, (B, H, T, d), causal without a mask.

    Args:
        mask: Added to the scores, (B or 1, H or 1, T, S), -inf where a key is hidden.
        blockwise: Whether the kernel in blocks of queries may be used where it is faster.
    """
    H, causal = q_BHTd.shape[1], mask is None
    settings = {"dropout_p": dropout, "scale": scale, "is_causal": causal}
    if q_BHTd.is_cuda and causal and k_BGSd.shape[1] != H:  # flash attention shares keys by itself
        return F.scaled_dot_product_attention(q_BHTd, k_BGSd, v_BGSd, enable_gqa=True, **settings)
    k_BHSd, v_BHSd = spread(k_BGSd, H), spread(v_BGSd, H)
    if blockwise and not dropout and pays(q_BHTd, k_BHSd, v_BHSd):
        return blockwise_attention(q_BHTd, k_BHSd, v_BHSd, mask, scale)
    return F.scaled_dot_product_attention(q_BHTd, k_BHSd, v_BHSd, attn_mask=mask, **settings)


def flex_attention(
    q_BHTd: Tensor,
    k_BGSd: Tensor,
    v_BGSd: Tensor,
    scale: float,
    sees: Callable[[Tensor, Tensor], Tensor],
    change: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    own_score: float | Tensor | None,
) -> Tensor:
    """softmax(change(scale q k')) v by FlexAttention, (B, H, T, d), without any (T, S) tensor.

    Args:
        sees: Whether query i sees key j. It becomes a block mask.
        change: The score of head h, query i and key j, changed inside the kernel, from (score, h, i, j).
        own_score: The score, one number or (H,), of a further key of value 0. Its weight follows from each row's
            log-sum-exp.
    """
    from torch.nn.attention import flex_attention as flex

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return sees(i, j)

    def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return change(value, h, i, j)

    block_mask = flex.create_block_mask(mask, None, None, q_BHTd.shape[2], k_BGSd.shape[2], device=q_BHTd.device)
    heads = {"scale": scale, "enable_gqa": k_BGSd.shape[1] != q_BHTd.shape[1]}
    tensors = q_BHTd.to(v_BGSd.dtype), k_BGSd.to(v_BGSd.dtype), v_BGSd, score, block_mask
    if own_score is None:
        return flex.flex_attention(*tensors, **heads)
    out_BHTd, more = flex.flex_attention(*tensors, **heads, return_aux=flex.AuxRequest(lse=True))
    assert more.lse is not None
    own_score = own_score.float()[:, None] if isinstance(own_score, Tensor) else own_score
    share_BHT = torch.sigmoid(more.lse - own_score)
    return (out_BHTd * share_BHT[..., None]).to(v_BGSd.dtype)
