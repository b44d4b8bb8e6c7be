"""The gated delta rule in chunks: matrix products of a chunk's tokens instead of one token after the other.

Shape letters: B batch, H heads, T time, N chunks, C tokens of a chunk, k width of keys, v width of values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64
"""Tokens of a chunk, as in the authors' kernels."""


def gated_delta_rule(
    q_BHTk: Tensor, k_BHTk: Tensor, v_BHTv: Tensor, log_decay_BHT: Tensor, beta_BHT: Tensor, chunk: int = CHUNK
) -> Tensor:
    """o_t = S_t q_t, S_t = a_t S_(t-1) (I - b_t k_t k_t') + b_t v_t k_t', S_0 = 0: (B, H, T, v) in the dtype of v.

    Token t adds u_t k_t' with u_t = b_t (v_t - a_t S_(t-1) k_t), and the u of a chunk solve a triangular system. Yang
    et al. 2024, arXiv:2412.06464.

    Args:
        log_decay_BHT: ln a, at most 0.
        beta_BHT: b, in [0, 1] with keys of length 1.
    """
    T = q_BHTk.shape[2]
    chunk = min(chunk, T)
    padding = -T % chunk
    vectors = (F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, chunk)) for x in (q_BHTk, k_BHTk, v_BHTv))
    q_BHNCk, k_BHNCk, v_BHNCv = vectors
    log_decay_BHNC, beta_BHNC = (F.pad(x, (0, padding)).unflatten(2, (-1, chunk)) for x in (log_decay_BHT, beta_BHT))
    since_BHNC = log_decay_BHNC.cumsum(-1)  # ln of the decay since the chunk began
    between_BHNCC = since_BHNC[..., :, None] - since_BHNC[..., None, :]
    later_CC = torch.ones(chunk, chunk, dtype=torch.bool, device=between_BHNCC.device).triu(1)
    decay_BHNCC = between_BHNCC.masked_fill(later_CC, -torch.inf).exp()
    decayed_BHNC1 = since_BHNC.exp()[..., None]
    b_BHNC1 = beta_BHNC[..., None]

    system_BHNCC = b_BHNC1 * decay_BHNCC * (k_BHNCk @ k_BHNCk.mT)  # its diagonal counts as 1
    right_BHNCw = torch.cat((b_BHNC1 * v_BHNCv, b_BHNC1 * decayed_BHNC1 * k_BHNCk), -1)
    solved_BHNCw = torch.linalg.solve_triangular(
        system_BHNCC.to(v_BHTv.dtype), right_BHNCw, upper=False, unitriangular=True
    )
    own_BHNCv, from_state_BHNCk = solved_BHNCw.split((v_BHTv.shape[-1], k_BHTk.shape[-1]), -1)
    score_BHNCC = decay_BHNCC * (q_BHNCk @ k_BHNCk.mT)
    query_BHNCk = decayed_BHNC1 * q_BHNCk
    key_BHNCk = (since_BHNC[..., -1:] - since_BHNC).exp()[..., None] * k_BHNCk

    state_BHkv = v_BHTv.new_zeros(*k_BHTk.shape[:2], k_BHTk.shape[-1], v_BHTv.shape[-1])
    outputs = []
    for n in range(q_BHNCk.shape[2]):
        u_BHCv = own_BHNCv[:, :, n] - from_state_BHNCk[:, :, n] @ state_BHkv
        outputs.append(query_BHNCk[:, :, n] @ state_BHkv + score_BHNCC[:, :, n] @ u_BHCv)
        state_BHkv = decayed_BHNC1[:, :, n, -1:] * state_BHkv + key_BHNCk[:, :, n].mT @ u_BHCv
    return torch.cat(outputs, 2)[:, :, :T].to(v_BHTv.dtype)
