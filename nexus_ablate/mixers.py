"""The options of the mixer axis: multi-head causal self-attention in the same order of steps for all options.

Project, clip, norm q, k (and v), gate them, apply the score's map and positions, attend (see attention.py), gate, inner
norm, output projection, gate. No option of another axis is named here.

Shape letters: B batch, T queries, S keys, D d_model, H query heads, G key/value heads, d head width, w value width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nexus_ablate.attention import AttentionCore
from nexus_ablate.axes.context import Context
from nexus_ablate.axes.gate import GATE
from nexus_ablate.axes.mixer import MIXER, Mixer, MixerParts
from nexus_ablate.axes.qk_norm import QK_NORM
from nexus_ablate.axes.roles import Linear
from nexus_ablate.kernels.linear import shared


class MultiHead(Mixer):
    """Abstract multi-head attention. q, k and v are separate projections: placements scale and norm them separately.

    `kv_bias` adds one learned key per key head, with a learned value or the value 0. Every query sees it, and no norm,
    gate or position acts on it (Sun et al. 2024, arXiv:2402.17762; Gu et al. 2024, arXiv:2410.10781; the authors' code
    of both). Its initial values and weight decay are those of the key and value projections. The sink token is the
    first of the sequence: its query and key are not rotated, it has no position bias, and every query sees it, even
    outside its window. The text's positions count from 0 with and without it.
    """

    core: AttentionCore

    def __init__(self, parts: MixerParts) -> None:
        super().__init__()
        config, geometry, d = parts.config, parts.geometry, parts.geometry.head_dim
        assert geometry.layer is not None
        resolved, self.layer = config.resolved, geometry.layer
        D, HD, GD = geometry.d_model, geometry.n_heads * d, geometry.n_kv_heads * d
        self.head_dim = d
        self.qk_norm = QK_NORM.build(resolved.qk_norm, geometry)
        self.core = AttentionCore(config, geometry, self.qk_norm.scale, parts.score_factor)
        self.core.norm_placed = self.qk_norm.forward if self.qk_norm.after_rotation else None
        self.gate = GATE.build(config.gate, geometry)
        self.gated = self.gate.site != "none"
        # A key bias b adds q.b to every score of a query. Softmax ignores that unless it differs between keys.
        key_bias = (
            parts.rotates
            or self.qk_norm.norms_keys
            or self.gate.site == "key"
            or config.kv_bias != "off"
            or config.clip_qkv != "off"
            or not self.core.score.dot
            or self.core.softcap is not None
            or not self.core.normalizer.shift_invariant
        )
        self.query = Linear(D, HD, resolved.qkv_bias, role="query")
        self.key = Linear(D, GD, resolved.qkv_bias and key_bias, role="key")
        self.value = Linear(D, GD, resolved.qkv_bias, role="value")
        self.inner_norm = parts.inner_norm
        self.out = Linear(HD, D, resolved.attn_out_bias, role="attn_out")
        self.dropout = nn.Dropout(config.model.dropout)
        self.clip = None if config.clip_qkv == "off" else config.clip_qkv
        shape = geometry.n_kv_heads, d
        self.learned_key_Gd = nn.Parameter(torch.empty(shape)) if config.kv_bias != "off" else None
        self.learned_value_Gd = nn.Parameter(torch.empty(shape)) if config.kv_bias == "key_value" else None
        self.roles = {"learned_key_Gd": "key", "learned_value_Gd": "value"}

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        B, T, _ = x_BTD.shape
        projections = zip((self.query, self.key, self.value), shared(x_BTD, 3), strict=True)
        q, k, v = (project(x).view(B, T, -1, self.head_dim) for project, x in projections)
        if self.clip is not None:
            q, k, v = (x.clamp(-self.clip, self.clip) for x in (q, k, v))
        if not self.qk_norm.after_rotation:
            q, k, v = self.qk_norm(q, k, v)
        if self.gated:
            q, k, v = self.gate("query", q, x_BTD), self.gate("key", k, x_BTD), self.gate("value", v, x_BTD)
        q_BHTd, k_BGTd = self.core.score.query(q.transpose(1, 2)), k.transpose(1, 2)
        q_BHTd, k_BGTd, bias = self.core.place(q_BHTd, k_BGTd, context.positions[self.layer])
        k_BGSd, v_BGSw = self._keys(k_BGTd, self.learned_key_Gd), self._keys(v.transpose(1, 2), self.learned_value_Gd)
        out_BTHd = self.core(q_BHTd, k_BGSd, v_BGSw, bias).transpose(1, 2)
        out_BTHd = self.gate("sdpa", out_BTHd, x_BTD) if self.gated else out_BTHd
        out_BTD = self.out(self.inner_norm(out_BTHd.flatten(2)))
        return self.dropout(self.gate("output", out_BTD, x_BTD) if self.gated else out_BTD)

    def _keys(self, k_BGTd: Tensor, learned_Gd: Tensor | None) -> Tensor:
        """Keys (or values), (B, G, S, d), with the learned one first."""
        if self.learned_key_Gd is None:
            return k_BGTd
        first_Gd = torch.zeros_like(k_BGTd[0, :, 0]) if learned_Gd is None else learned_Gd.to(k_BGTd.dtype)
        return torch.cat((first_Gd[None, :, None].expand(len(k_BGTd), -1, 1, -1), k_BGTd), 2)


@MIXER.register("attention")
class Attention(MultiHead):
    """Every head attends by itself, and the output projection sums them. Vaswani et al. 2017, arXiv:1706.03762, 3.2."""
