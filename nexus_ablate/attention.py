"""Causal self-attention: the same order of steps for all options.

Project, clip, norm q, k (and v), gate them, apply positions, score, scale, add the position bias, cap, mask, normalize,
drop out, mix values, gate, inner norm, output projection, gate. No option is named here.

Shape letters: B batch, T queries, S keys, D d_model, H query heads, G key/value heads, d head width. Each key/value
head serves H / G query heads. The keys of the `Prefix` come before the keys of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.axes.attention import ATTENTION
from nexus_ablate.axes.gate import GATE
from nexus_ablate.axes.normalizer import NORMALIZER
from nexus_ablate.axes.position import Position, by_distance
from nexus_ablate.axes.qk_norm import QK_NORM
from nexus_ablate.axes.roles import Geometry, Linear
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.kernels.blockwise import blockwise_attention, pays
from nexus_ablate.kernels.linear import shared

SHORTEST_FLEX = 128
"""Fewest queries for which FlexAttention has a block to skip."""


@dataclass(frozen=True)
class Prefix:
    """The keys before the text. Every query sees them, even outside its window, and they have no position.

    Each count is 0 or 1. The keys come in this order:

    Attributes:
        own: The normalizer's own key: a score without a vector. The attention map has no column for it.
        learned: The learned key of `kv_bias`: a column of the attention map without a query.
        sink: The sink token: a column and a query.
    """

    own: int
    learned: int
    sink: int

    @property
    def columns(self) -> int:
        """Columns of the attention map before the first token of the text."""
        return self.learned + self.sink


Attend = Callable[["AttentionCore", Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""A replacement for a core's `forward`: takes the core and the arguments of `forward`, and returns the same result."""


@contextmanager
def substituted(model: nn.Module, attend: Attend) -> Iterator[None]:
    """Inside the `with`, every core of the model computes `attend(core, q, k, v, bias)`. Hooks on cores still run."""
    cores = [module for module in model.modules() if isinstance(module, AttentionCore)]
    try:
        for core in cores:
            core.substitute = attend
        yield
    finally:
        for core in cores:
            core.substitute = None


class AttentionCore(nn.Module):
    """Queries, keys and values to head outputs. The plain path is the reference; the fused path must equal it.

    Args:
        layer: The index of its block, from 0.
        scale: Replaces the score's published factor unless None.
        more: The parametrization's factor on the scores, if it has one.
    """

    def __init__(
        self, config: RunConfig, geometry: Geometry, layer: int, scale: float | None, more: float | None
    ) -> None:
        super().__init__()
        self.score = ATTENTION.build(config.attention, geometry)
        self.normalizer = NORMALIZER.build(config.normalizer, geometry)
        published = self.score.scale if scale is None else scale
        self.scale = published if config.attn_scale == "auto" else config.attn_scale
        if more is not None:
            self.scale *= more
        self.softcap = None if config.attn_softcap == "off" else config.attn_softcap
        self.window = config.resolved.windows[layer]
        own = self.normalizer.own_key() is not None
        self.prefix = Prefix(int(own), int(config.kv_bias != "off"), int(config.sink_token))
        self.layer = layer
        self.norm_placed: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
        """The norm that follows the positions of queries and keys, if there is one. Attention owns it."""
        self.substitute: Attend | None = None
        self.dropout = config.model.dropout
        self.fused = self.kernel[0] != "plain"
        self.chooses = config.train.attention == "auto"
        self.flexible = self.chooses and self.score.dot and self.normalizer.fused and geometry.head_dim >= 16

    @property
    def kernel(self) -> tuple[str, str]:
        """How attention is computed, and why."""
        reasons = []
        if not self.score.dot:
            reasons.append("the score is not a dot product")
        if self.softcap is not None:
            reasons.append("the soft-cap comes between scores and mask")
        if not self.normalizer.fused:
            reasons.append("the weights are not a softmax")
        if reasons:
            return "plain", "; ".join(reasons)
        masks = ["window"] if self.window else []
        masks += ["learned sink score"] if isinstance(self.normalizer.own_key(), Tensor) else []
        return "fused", "a softmax of dot products" + (f", {' and '.join(masks)} in the mask" if masks else "")

    def gpu_kernel(self, T: int, bias: Tensor | None) -> str:
        """The kernel that computes attention in a compiled training step of T tokens on a CUDA GPU.

        Args:
            bias: As in `forward`.
        """
        if self.flexes(T, bias):
            parts = ["block mask of the window"] if 0 < self.window < T else []
            parts += ["bias by distance"] if bias is not None else []
            parts += ["soft-cap"] if self.softcap is not None else []
            parts += ["own key by log-sum-exp"] if self.normalizer.own_key() is not None else []
            return f"FlexAttention: {', '.join(parts)}; uncompiled as above"
        if not self.fused:
            return "plain"
        masked = bias is not None or 0 < self.window < T or isinstance(self.normalizer.own_key(), Tensor)
        return f"scaled_dot_product_attention, {'with a full T x T mask' if masked else 'flash or cuDNN'}"

    def forward(self, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        """The values of each query, (B, H, T, d).

        Args:
            q_BHTd: Queries of the sink token and the text, with positions applied.
            k_BGSd: Keys (and values) of the learned key, the sink token and the text.
            bias: The position bias of the text, as `place` returns it.
        """
        if self.substitute is not None:
            return self.substitute(self, q_BHTd, k_BGSd, v_BGSd, bias)
        if q_BHTd.is_cuda and torch.compiler.is_compiling() and self.flexes(q_BHTd.shape[2], bias):
            return self.flex(q_BHTd, k_BGSd, v_BGSd, bias)
        if self.fused:
            return self._fused(self.score.query(q_BHTd), k_BGSd, v_BGSd, bias)
        return self.mixed(F.dropout(self.weights(q_BHTd, k_BGSd, bias), self.dropout, self.training), v_BGSd)

    def weights(self, q_BHTd: Tensor, k_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        """The attention map (B, H, T, S) in float32: each query's weights over the keys it may see.

        The weight of the normalizer's own key has no column: it is 1 minus the sum of the row.
        """
        return self.normalized(self.scores(q_BHTd, k_BGSd, bias), self.seen(q_BHTd.shape[2], q_BHTd.device))

    def mixed(self, weight_BHTS: Tensor, v_BGSd: Tensor) -> Tensor:
        """The values of each query, (B, H, T, d)."""
        return weight_BHTS.to(v_BGSd.dtype) @ spread(v_BGSd, weight_BHTS.shape[1])

    def scores(self, q_BHTd: Tensor, k_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        """Scaled scores with the position bias, (B, H, T, S), before cap and mask."""
        score_BHTS = self.score(q_BHTd, spread(k_BGSd, q_BHTd.shape[1])) * self.scale
        return score_BHTS if bias is None else score_BHTS + fitted(bias, self.prefix.columns, self.prefix.sink)

    def normalized(self, score_BHTS: Tensor, seen_TS: Tensor) -> Tensor:
        """The attention map of scores: capped, masked, normalized."""
        if self.softcap is not None:
            score_BHTS = self.softcap * torch.tanh(score_BHTS / self.softcap)
        return self.normalizer(score_BHTS.masked_fill(~seen_TS, -torch.inf))  # masked before the cap it would be -c

    def _fused(self, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        own, own_score = self.prefix.own, self.normalizer.own_key()
        if own:  # a key of zeros scores 0; a learned score is put in its place below
            k_BGSd, v_BGSd = F.pad(k_BGSd, (0, 0, own, 0)), F.pad(v_BGSd, (0, 0, own, 0))
        H, T, S = q_BHTd.shape[1], q_BHTd.shape[2], k_BGSd.shape[2]
        windowed = 0 < self.window < T
        if bias is None and not windowed and not isinstance(own_score, Tensor):
            # Add one query for each key without one: the fastest kernels need the square causal form.
            added = own + self.prefix.learned
            q_BHSd = F.pad(q_BHTd, (0, 0, added, 0)) if added else q_BHTd
            out_BHSd = self._softmax(q_BHSd, k_BGSd, v_BGSd, None)
            return out_BHSd[:, :, added:] if added else out_BHSd
        columns = own + self.prefix.columns
        mask = q_BHTd.new_zeros(1, 1, T, S) if bias is None else fitted(bias, columns, self.prefix.sink)
        if isinstance(own_score, Tensor):
            column = own_score.to(mask.dtype).view(1, H, 1, 1).expand(len(mask), H, T, 1)
            mask = torch.cat((column, mask[..., 1:].expand(-1, H, -1, -1)), -1)
        mask = mask.masked_fill(~self.seen(T, q_BHTd.device, own), -torch.inf).to(q_BHTd.dtype)
        return self._softmax(q_BHTd, k_BGSd, v_BGSd, mask)

    def _softmax(self, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, mask: Tensor | None) -> Tensor:
        dropout, H = self.dropout if self.training else 0.0, q_BHTd.shape[1]
        settings = {"dropout_p": dropout, "scale": self.scale, "is_causal": mask is None}
        if q_BHTd.is_cuda and mask is None and k_BGSd.shape[1] != H:  # flash attention shares keys by itself
            return F.scaled_dot_product_attention(q_BHTd, k_BGSd, v_BGSd, enable_gqa=True, **settings)
        k_BHSd, v_BHSd = spread(k_BGSd, H), spread(v_BGSd, H)
        if self.chooses and not dropout and pays(q_BHTd, k_BHSd):
            return blockwise_attention(q_BHTd, k_BHSd, v_BHSd, mask, self.scale)
        return F.scaled_dot_product_attention(q_BHTd, k_BHSd, v_BHSd, attn_mask=mask, **settings)

    def flexes(self, T: int, bias: Tensor | None) -> bool:
        """Whether FlexAttention replaces a full T x T mask in a compiled step on a GPU.

        A learned bias keeps the mask: FlexAttention would sum its gradient by atomic additions (pytorch issue 137452).
        """
        fixed = bias is not None and bias.ndim == 2 and not bias.requires_grad
        masked = 0 < self.window < T or self.softcap is not None or isinstance(self.normalizer.own_key(), Tensor)
        dropout = self.dropout and self.training
        return self.flexible and T >= SHORTEST_FLEX and not dropout and (fixed or (masked and bias is None))

    def flex(self, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        """The plain path's result by FlexAttention, without any (T, S) tensor.

        The window and the sink token become a block mask, soft-cap and bias change the scores inside the kernel, and
        the weight of the normalizer's own key follows from each row's log-sum-exp.
        """
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        T, S = q_BHTd.shape[2], k_BGSd.shape[2]
        learned, sink, columns = self.prefix.learned, self.prefix.sink, self.prefix.columns
        t = T if bias is None else bias.shape[-1]  # the prefix has no position

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return self.sees(i, j - learned)

        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if bias is not None:
                i, j = i - sink, j - columns
                added = bias[h, (i - j).clamp(0, t - 1)]
                value = value + (torch.where((i >= 0) & (j >= 0), added, 0.0) if columns else added)
            return value if self.softcap is None else self.softcap * torch.tanh(value / self.softcap)

        q_BHTd, own_score = self.score.query(q_BHTd).to(v_BGSd.dtype), self.normalizer.own_key()
        mask = create_block_mask(seen, None, None, T, S, device=q_BHTd.device)
        heads = {"scale": self.scale, "enable_gqa": k_BGSd.shape[1] != q_BHTd.shape[1]}
        tensors = q_BHTd, k_BGSd.to(v_BGSd.dtype), v_BGSd, score, mask
        if own_score is None:
            return flex_attention(*tensors, **heads)
        out_BHTd, more = flex_attention(*tensors, **heads, return_aux=AuxRequest(lse=True))
        assert more.lse is not None
        own_score = own_score.float()[:, None] if isinstance(own_score, Tensor) else own_score
        share_BHT = torch.sigmoid(more.lse - own_score)
        return (out_BHTd * share_BHT[..., None]).to(v_BGSd.dtype)

    def seen(self, T: int, device: torch.device, own: int = 0) -> Tensor:
        """(T, S), true where query i may see key j: i - window < j <= i, or j is in the prefix.

        Args:
            T: Number of queries: those of the text and of the sink token, if there is one.
            own: Columns for the normalizer's own key, 0 or 1.
        """
        keys_S = torch.arange(-own - self.prefix.learned, T, device=device)
        return self.sees(torch.arange(T, device=device)[:, None], keys_S)

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Whether query i sees key j. Both indices count from the first query: a key without a query is negative."""
        seen = j <= i
        return seen & ((j > i - self.window) | (j < self.prefix.sink)) if self.window else seen

    def place(self, q_BHTd: Tensor, k_BGTd: Tensor, position: Position) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries and keys with positions applied, and the position bias. Only the text has positions."""
        sink = self.prefix.sink
        text_q, text_k = (q_BHTd[:, :, sink:], k_BGTd[:, :, sink:]) if sink else (q_BHTd, k_BGTd)
        bias = position.query_bias(text_q, self.layer, self.scale)
        if bias is None:
            bias = position.score_bias(text_q.shape[2], self.layer)
        text_q, text_k = position.rotate(text_q, text_k, self.layer)
        if sink:
            text_q = torch.cat((q_BHTd[:, :, :sink], text_q), 2)
            text_k = torch.cat((k_BGTd[:, :, :sink], text_k), 2)
        if self.norm_placed is not None and position.settles:
            q, k, _ = self.norm_placed(text_q.transpose(1, 2), text_k.transpose(1, 2), text_k.transpose(1, 2))
            text_q, text_k = q.transpose(1, 2), k.transpose(1, 2)
        return text_q, text_k, bias


def spread(x_BGSd: Tensor, n_heads: int) -> Tensor:
    """Keys or values of all heads, (B, H, S, d): each of the G is repeated for the query heads that share it."""
    groups = x_BGSd.shape[1]
    return x_BGSd if groups == n_heads else x_BGSd.repeat_interleave(n_heads // groups, 1)


def fitted(bias: Tensor, columns: int, rows: int) -> Tensor:
    """A position bias of the text, (H, t) or (..., t, t), as (B or 1, H, T, S).

    Args:
        columns: Number of keys before the text; they have no position, so their bias is 0.
        rows: Number of queries before the text; their bias is 0 too.
    """
    bias = by_distance(bias) if bias.ndim == 2 else bias
    bias = bias.reshape(-1, *bias.shape[-3:])
    return F.pad(bias, (columns, 0, rows, 0)) if columns else bias


class Attention(nn.Module):
    """Multi-head causal self-attention. q, k and v are separate projections: placements scale and norm them separately.

    `kv_bias` adds one learned key per key head, with a learned value or the value 0. Every query sees it, and no norm,
    gate or position acts on it (Sun et al. 2024, arXiv:2402.17762; Gu et al. 2024, arXiv:2410.10781; the authors' code
    of both). Its initial values and weight decay are those of the key and value projections. The sink token is the
    first of the sequence: its query and key are not rotated, it has no position bias, and every query sees it, even
    outside its window. The text's positions count from 0 with and without it.
    """

    def __init__(
        self,
        config: RunConfig,
        geometry: Geometry,
        layer: int,
        rotates: bool,
        inner_norm: nn.Module,
        score_factor: float | None = None,
    ) -> None:
        super().__init__()
        resolved, d = config.resolved, geometry.head_dim
        D, HD, GD = geometry.d_model, geometry.n_heads * d, geometry.n_kv_heads * d
        self.head_dim = d
        self.qk_norm = QK_NORM.build(resolved.qk_norm, geometry)
        self.core = AttentionCore(config, geometry, layer, self.qk_norm.scale, score_factor)
        self.core.norm_placed = self.qk_norm.forward if self.qk_norm.after_rotation else None
        self.gate = GATE.build(config.gate, geometry)
        self.gated = self.gate.site != "none"
        # A key bias b adds q.b to every score of a query. Softmax ignores that unless it differs between keys.
        key_bias = (
            rotates
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
        self.inner_norm = inner_norm
        self.out = Linear(HD, D, resolved.attn_out_bias, role="attn_out")
        self.dropout = nn.Dropout(config.model.dropout)
        self.clip = None if config.clip_qkv == "off" else config.clip_qkv
        shape = geometry.n_kv_heads, d
        self.learned_key_Gd = nn.Parameter(torch.empty(shape)) if config.kv_bias != "off" else None
        self.learned_value_Gd = nn.Parameter(torch.empty(shape)) if config.kv_bias == "key_value" else None
        self.roles = {"learned_key_Gd": "key", "learned_value_Gd": "value"}

    def forward(self, x_BTD: Tensor, position: Position) -> Tensor:
        B, T, _ = x_BTD.shape
        projections = zip((self.query, self.key, self.value), shared(x_BTD, 3), strict=True)
        q, k, v = (project(x).view(B, T, -1, self.head_dim) for project, x in projections)
        if self.clip is not None:
            q, k, v = (x.clamp(-self.clip, self.clip) for x in (q, k, v))
        if not self.qk_norm.after_rotation:
            q, k, v = self.qk_norm(q, k, v)
        if self.gated:
            q, k, v = self.gate("query", q, x_BTD), self.gate("key", k, x_BTD), self.gate("value", v, x_BTD)
        q_BHTd, k_BGTd, v_BGTd = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q_BHTd, k_BGTd, bias = self.core.place(q_BHTd, k_BGTd, position)
        k_BGSd, v_BGSd = self._keys(k_BGTd, self.learned_key_Gd), self._keys(v_BGTd, self.learned_value_Gd)
        out_BTHd = self.core(q_BHTd, k_BGSd, v_BGSd, bias).transpose(1, 2)
        out_BTHd = self.gate("sdpa", out_BTHd, x_BTD) if self.gated else out_BTHd
        out_BTD = self.out(self.inner_norm(out_BTHd.flatten(2)))
        return self.dropout(self.gate("output", out_BTD, x_BTD) if self.gated else out_BTD)

    def _keys(self, k_BGTd: Tensor, learned_Gd: Tensor | None) -> Tensor:
        """Keys (or values), (B, G, S, d), with the learned one first."""
        if self.learned_key_Gd is None:
            return k_BGTd
        first_Gd = torch.zeros_like(k_BGTd[0, :, 0]) if learned_Gd is None else learned_Gd.to(k_BGTd.dtype)
        return torch.cat((first_Gd[None, :, None].expand(len(k_BGTd), -1, 1, -1), k_BGTd), 2)
