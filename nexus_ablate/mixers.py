"""The options of the mixer axis. Those that attend have the same order of steps, in `MultiHead`.

Project, clip, norm q, k (and v), gate them, apply the score's map and positions, attend (attention_core.py), gate,
inner norm, output projection, gate. No option of another axis is named here.

Shape letters: B batch, T queries, S keys, D d_model, H query heads, G key/value heads, h query heads of each, d head
width, k key width, w value width.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.attention_core import AttentionCore
from nexus_ablate.axes.context import Context
from nexus_ablate.axes.conv import ShortConv
from nexus_ablate.axes.gate import GATE
from nexus_ablate.axes.mixer import MIXER, Mixer, MixerParts
from nexus_ablate.axes.modules import Linear, projections
from nexus_ablate.axes.qk_norm import QK_NORM
from nexus_ablate.axes.value import VALUE
from nexus_ablate.kernels.delta import gated_delta_rule


class MultiHead(Mixer):
    """Abstract multi-head attention. q, k and v are separate projections: placements scale and norm them separately.

    `kv_bias` adds one learned key per key head, with a learned value or the value 0. Every query sees it, and no norm,
    gate or position acts on it (Sun et al. 2024, arXiv:2402.17762; Gu et al. 2024, arXiv:2410.10781; the authors' code
    of both). It decays like the key and value projections. The init sets it as a matrix of their roles with
    head_dim inputs: N(0, 0.02^2) under init=gpt2, as in the first authors' code (gpt-2/model_attn_bias.py), and
    N(0, 1 / head_dim) under init=fan_in, where the keys of the text start with a variance of about 1.

    The sink token is the first of the sequence: its query and key are not rotated, it has no position bias, and every
    query sees it, even outside its window. The text's positions count from 0 with and without it.
    """

    core: AttentionCore

    def __init__(self, parts: MixerParts) -> None:
        super().__init__()
        config, geometry, d = parts.config, parts.geometry, parts.geometry.head_dim
        assert geometry.layer is not None
        resolved, self.layer = config.resolved, geometry.layer
        D, HD, GD = geometry.d_model, geometry.n_heads * d, geometry.n_kv_heads * d
        self.head_dim = d
        self.qk_norm = QK_NORM.build_at(self.layer, resolved.qk_norm, geometry)
        self.core = AttentionCore(config, geometry, self.qk_norm.scale, parts.score_factor)
        self.core.norm_placed = self.qk_norm.forward if self.qk_norm.after_rotation else None
        self.gate = GATE.build_at(self.layer, config.gate, geometry)
        self.gated = self.gate.site != "none"
        self.values = VALUE.build_at(self.layer, config.value, geometry)
        self.conv_in, self.conv_query = parts.conv("attn_in", D), parts.conv("qkv", HD)
        self.conv_key, self.conv_value = parts.conv("qkv", GD), parts.conv("qkv", GD)
        # A key bias b adds q.b to every score of a query. Softmax ignores that unless it differs between keys.
        key_bias = (
            parts.rotates
            or self.qk_norm.norms_keys
            or self.gate.site == "key"
            or self.conv_key.acts  # of fewer keys at the beginning
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
        x_BTD = self.conv_in(x_BTD) if self.conv_in.acts else x_BTD
        projected = projections(x_BTD, (self.query, self.key, self.value))
        q, k, v = (x.view(B, T, -1, self.head_dim) for x in projected)
        if self.clip is not None:
            q, k, v = (x.clamp(-self.clip, self.clip) for x in (q, k, v))
        if not self.qk_norm.after_rotation:
            q, k, v = self.qk_norm(q, k, v)
        if self.conv_query.acts:
            convolutions = zip((self.conv_query, self.conv_key, self.conv_value), (q, k, v), strict=True)
            q, k, v = (conv(x.flatten(2)).view_as(x) for conv, x in convolutions)
        if self.gated:
            q, k, v = self.gate("query", q, x_BTD), self.gate("key", k, x_BTD), self.gate("value", v, x_BTD)
        v = self.values(v, x_BTD, context)
        q_BHTd, k_BGTd = self.core.score.query(q.transpose(1, 2)), k.transpose(1, 2)
        q_BHTd, k_BGTd, bias = self.core.place(q_BHTd, k_BGTd, context.positions[self.layer])
        k_BGSd, v_BGSd = self._keys(k_BGTd, self.learned_key_Gd), self._keys(v.transpose(1, 2), self.learned_value_Gd)
        out_BTHd = self.attended(q_BHTd, k_BGSd, v_BGSd, bias)
        out_BTHd = self.gate("sdpa", out_BTHd, x_BTD) if self.gated else out_BTHd
        out_BTD = self.out(self.inner_norm(out_BTHd.flatten(2)))
        return self.dropout(self.gate("output", out_BTD, x_BTD) if self.gated else out_BTD)

    def attended(self, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        """The outputs of the heads, (B, T, heads, width), of H d channels together."""
        raise NotImplementedError

    def _keys(self, k_BGTd: Tensor, learned_Gd: Tensor | None) -> Tensor:
        """Keys (or values), (B, G, S, d), with the learned one first."""
        if self.learned_key_Gd is None:
            return k_BGTd
        first_Gd = torch.zeros_like(k_BGTd[0, :, 0]) if learned_Gd is None else learned_Gd.to(k_BGTd.dtype)
        return torch.cat((first_Gd[None, :, None].expand(len(k_BGTd), -1, 1, -1), k_BGTd), 2)


@MIXER.register("attention")
class Attention(MultiHead):
    """Every head attends by itself, and the output projection sums them. Vaswani et al. 2017, arXiv:1706.03762, 3.2."""

    def attended(self, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        return self.core(q_BHTd, k_BGSd, v_BGSd, bias).transpose(1, 2)


@MIXER.register("exclusive")
class ExclusiveAttention(MultiHead):
    """The output of each head minus its projection on the token's own value. Zhai 2026, arXiv:2603.09078, Eq. 2.

    z = y - (y.v) v / |v|^2, before gates and the output projection, as in its Algorithm 1: v / max(|v|, 1e-12). The
    first token, which sees only itself, has the output 0. Heads that share a value have it subtracted from each.
    """

    def attended(self, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        out_BHTd = self.core(q_BHTd, k_BGSd, v_BGSd, bias)
        precise = torch.promote_types(out_BHTd.dtype, torch.float32)
        out_BGhTd = out_BHTd.unflatten(1, (v_BGSd.shape[1], -1)).to(precise)
        own_BG1Td = F.normalize(v_BGSd[:, :, None, -q_BHTd.shape[2] :].to(precise), dim=-1)
        out_BGhTd = out_BGhTd - (out_BGhTd * own_BG1Td).sum(-1, keepdim=True) * own_BG1Td
        return out_BGhTd.flatten(1, 2).to(out_BHTd.dtype).transpose(1, 2)


@MIXER.register("differential")
class DifferentialAttention(MultiHead):
    """(1 - lambda_0) N((map_1 - lambda map_2) v) for each pair of heads, whose values are twice as wide.

    lambda = exp(q_1.k_1) - exp(q_2.k_2) + lambda_0, with learned vectors shared by the heads of a layer and
    lambda_0 = 0.8 - 0.6 exp(-0.3 l) in layer l, from 0. N is an RMSNorm with one gain for all pairs. Ye et al. 2024,
    arXiv:2410.05258, Eq. 1 to 3, as in the authors' code (microsoft/unilm, Diff-Transformer/multihead_diffattn.py). The
    projections have the sizes of those of ordinary attention with the same heads. The vectors start at N(0, 0.1^2).
    """

    def __init__(self, parts: MixerParts, *, eps: float, lambda_start: float | str) -> None:
        super().__init__(parts)
        geometry = parts.geometry
        pairs = replace(geometry, n_heads=geometry.n_heads // 2, head_dim=2 * geometry.head_dim)
        if self.gate.site == "sdpa":
            self.gate = GATE.build_at(self.layer, parts.config.gate, pairs)
        published = 0.8 - 0.6 * math.exp(-0.3 * self.layer)
        self.lambda_start = published if lambda_start == "auto" else float(lambda_start)
        vectors = [nn.Parameter(torch.empty(geometry.head_dim)) for _ in range(4)]
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = vectors
        self.stds = dict.fromkeys(("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"), 0.1)
        self.eps, self.pair_gain = eps, nn.Parameter(torch.ones(2 * geometry.head_dim))

    def difference(self) -> Tensor:
        """lambda, a scalar."""
        first = torch.exp((self.lambda_q1 * self.lambda_k1).sum())
        return first - torch.exp((self.lambda_q2 * self.lambda_k2).sum()) + self.lambda_start

    def attended(self, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        v_BPSw = torch.cat((v_BGSd[:, ::2], v_BGSd[:, 1::2]), -1)
        out_BHTw = self.core(q_BHTd, k_BGSd, v_BPSw.repeat_interleave(2, 1), bias)
        out_BPTw = out_BHTw[:, ::2] - self.difference().to(out_BHTw.dtype) * out_BHTw[:, 1::2]
        normed_BPTw = F.rms_norm(out_BPTw.float(), out_BPTw.shape[-1:], self.pair_gain, self.eps)
        return ((1 - self.lambda_start) * normed_BPTw).to(out_BHTw.dtype).transpose(1, 2)


@MIXER.register("gated_delta")
class GatedDelta(Mixer):
    """o_t = S_t q_t, S_t = a_t S_(t-1) (I - b_t k_t k_t') + b_t v_t k_t'. Yang et al. 2024, arXiv:2412.06464.

    Convolutions, gates, norm and sizes (6 d_model^2 parameters) are those of the authors' code (NVlabs/GatedDeltaNet,
    lit_gpt/gated_delta_net.py), but b has no bias, as in fla (fla/layers/gated_deltanet.py). Both draw A from U(0, 16)
    and softplus(d) log-uniformly from 0.001 to 0.1. Here the heads have the points of a Fibonacci lattice in that
    rectangle, the same for every seed.
    """

    def __init__(self, parts: MixerParts, *, expand_k: float, expand_v: float, kernel: int, eps: float) -> None:
        super().__init__()
        D, self.heads, self.eps = parts.geometry.d_model, parts.geometry.n_heads, eps
        K, V = round(expand_k * D), round(expand_v * D)
        self.query, self.key = Linear(D, K, False, role="query"), Linear(D, K, False, role="key")
        self.value, self.gate = Linear(D, V, False, role="value"), Linear(D, V, False, role="gate")
        self.decay, self.strength = Linear(D, self.heads, False, role="gate"), Linear(D, self.heads, False, role="gate")
        self.conv_query, self.conv_key = ShortConv(K, kernel), ShortConv(K, kernel)
        self.conv_value = ShortConv(V, kernel)
        head_H = torch.arange(self.heads)
        rate_H = 16 * (head_H + 0.5) / self.heads
        step_H = 0.001 * 100 ** (head_H * (5**0.5 - 1) / 2 % 1)
        self.log_rate_H = nn.Parameter(rate_H.log())
        self.step_H = nn.Parameter(step_H.expm1().log())  # the inverse of softplus
        self.head_gain = nn.Parameter(torch.ones(V // self.heads))
        self.out = Linear(V, D, False, role="attn_out")
        self.dropout = nn.Dropout(parts.config.model.dropout)

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        q_BHTk, k_BHTk, v_BHTw = (
            conv(project(x_BTD)).unflatten(2, (self.heads, -1)).transpose(1, 2).float()
            for project, conv in (
                (self.query, self.conv_query),
                (self.key, self.conv_key),
                (self.value, self.conv_value),
            )
        )
        q_BHTk, k_BHTk = unit(q_BHTk) * q_BHTk.shape[-1] ** -0.5, unit(k_BHTk)
        beta_BHT = self.strength(x_BTD).float().sigmoid().mT
        log_decay_BHT = -(self.log_rate_H.exp() * F.softplus(self.decay(x_BTD).float() + self.step_H)).mT
        out_BHTw = gated_delta_rule(q_BHTk, k_BHTk, v_BHTw, log_decay_BHT, beta_BHT)
        normed_BHTw = F.rms_norm(out_BHTw, out_BHTw.shape[-1:], self.head_gain, self.eps)
        gated_BTV = normed_BHTw.transpose(1, 2).flatten(2).to(x_BTD.dtype) * F.silu(self.gate(x_BTD))
        return self.dropout(self.out(gated_BTV))


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1, with the eps of the authors' code."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
