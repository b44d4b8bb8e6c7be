"""The GPT: embedding, blocks, head. It knows no option by name; every choice arrives as a part.

Shape letters: B batch, T time, S time of keys, D d_model, H heads, d head width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.axes.attention import GATES, NORMALIZERS, QK_NORMS, SCORES
from nexus_ablate.axes.ffn import FFNS
from nexus_ablate.axes.init import INITS, initialise
from nexus_ablate.axes.norm import NORMS
from nexus_ablate.axes.placement import PLACEMENTS, Parts
from nexus_ablate.axes.position import POSITIONS, Position
from nexus_ablate.axes.roles import Geometry, Linear, Table
from nexus_ablate.config import RunConfig


class AttentionCore(nn.Module):
    """Queries, keys and values to head outputs. The plain path is the reference; the fused one computes the same."""

    def __init__(self, config: RunConfig, geometry: Geometry) -> None:
        super().__init__()
        self.score = SCORES.build(config.attention, geometry)
        self.normalizer = NORMALIZERS.build(config.normalizer, geometry)
        self.dropout = config.model.dropout
        self.fused = self.score.fused and self.normalizer.fused

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, bias_HTS: Tensor | None) -> Tensor:
        if not self.fused:
            return F.dropout(self.weights(q_BHTd, k_BHSd, bias_HTS), self.dropout, self.training) @ v_BHSd
        dropout = self.dropout if self.training else 0.0
        if bias_HTS is None:
            return F.scaled_dot_product_attention(q_BHTd, k_BHSd, v_BHSd, dropout_p=dropout, is_causal=True)
        mask_HTS = bias_HTS.masked_fill(~causal_mask(bias_HTS.shape[-1], bias_HTS.device), -torch.inf)
        return F.scaled_dot_product_attention(
            q_BHTd, k_BHSd, v_BHSd, attn_mask=mask_HTS[None].to(q_BHTd.dtype), dropout_p=dropout
        )

    def weights(self, q_BHTd: Tensor, k_BHSd: Tensor, bias_HTS: Tensor | None) -> Tensor:
        """The attention map (B, H, T, S): each query's weights over the keys it may see."""
        score_BHTS = self.score(q_BHTd, k_BHSd)
        if bias_HTS is not None:
            score_BHTS = score_BHTS + bias_HTS
        return self.normalizer(
            score_BHTS.masked_fill(~causal_mask(score_BHTS.shape[-1], score_BHTS.device), -torch.inf)
        )


def causal_mask(T: int, device: torch.device) -> Tensor:
    """(T, T), true where query i may see key j: j <= i."""
    return torch.ones(T, T, dtype=torch.bool, device=device).tril()


class Attention(nn.Module):
    """Multi-head causal self-attention with q, k and v as separate maps, since placements scale and norm them apart."""

    def __init__(self, config: RunConfig, geometry: Geometry, layer: int, rotates: bool) -> None:
        super().__init__()
        D, HD = geometry.d_model, geometry.n_heads * geometry.head_dim
        self.layer, self.n_heads = layer, geometry.n_heads
        self.core = AttentionCore(config, geometry)
        self.qk_norm = QK_NORMS.build(config.qk_norm, geometry)
        self.gate = GATES.build(config.gate, geometry)
        # Without rotation or norm a key bias adds the same q.b to every score of a query, which softmax ignores.
        key_bias = rotates or self.qk_norm.active or not self.core.normalizer.shift_invariant
        self.query = Linear(D, HD, config.bias, role="query")
        self.key = Linear(D, HD, config.bias and key_bias, role="key")
        self.value = Linear(D, HD, config.bias, role="value")
        self.out = Linear(HD, D, config.bias, role="attn_out")
        self.dropout = nn.Dropout(config.model.dropout)

    def forward(self, x_BTD: Tensor, position: Position) -> Tensor:
        heads = (self.n_heads, -1)
        q_BHTd = self.query(x_BTD).unflatten(-1, heads).transpose(1, 2)
        k_BHTd = self.key(x_BTD).unflatten(-1, heads).transpose(1, 2)
        v_BHTd = self.value(x_BTD).unflatten(-1, heads).transpose(1, 2)
        q_BHTd, k_BHTd = self.qk_norm(q_BHTd, k_BHTd)
        q_BHTd, k_BHTd = position.rotate(q_BHTd, k_BHTd, self.layer)
        out_BHTd = self.core(q_BHTd, k_BHTd, v_BHTd, position.score_bias(x_BTD.shape[1], self.layer))
        out_BHTd = self.gate(out_BHTd, x_BTD)
        return self.dropout(self.out(out_BHTd.transpose(1, 2).flatten(2)))


class GPT(nn.Module):
    """A decoder-only transformer: `logits_BTV = model(tokens_BT)`."""

    def __init__(self, config: RunConfig, vocab_size: int) -> None:
        super().__init__()
        self.z_hashes: dict[str, str] = {}
        model, resolved = config.model, config.resolved
        geometry = Geometry(
            model.n_layers, model.d_model, model.n_heads, resolved.head_dim, resolved.d_ff, model.context, vocab_size
        )

        def norm(site: str) -> nn.Module:
            return NORMS.build(config.norm, model.d_model, resolved.norm_bias, site)

        self.geometry = geometry
        self.embedding = Table(vocab_size, model.d_model, role="embedding")
        scale = torch.tensor(model.d_model**0.5)
        self.embed_scale = nn.Parameter(scale) if resolved.embed_scale == "learned" else None
        self.fixed_embed_scale = model.d_model**0.5 if resolved.embed_scale == "sqrt_d" else None
        self.position = POSITIONS.build(config.position, geometry)
        self.dropout = nn.Dropout(model.dropout)
        self.blocks = nn.ModuleList()
        for layer in range(model.n_layers):
            attn = Attention(config, geometry, layer, self.position.rotates)
            ffn = FFNS.build(config.ffn, geometry, config.bias, model.dropout)
            self.blocks.append(PLACEMENTS.build(config.placement, Parts(attn, ffn, norm, layer, model.n_layers)))
        self.final_norm = norm("final") if resolved.final_norm else nn.Identity()
        self.head = None if config.tie_embeddings else Linear(model.d_model, vocab_size, bias=False, role="head")

    def forward(self, tokens_BT: Tensor) -> Tensor:
        head = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(self.hidden(tokens_BT), head)

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """The stream (B, T, D) as the head sees it."""
        x_BTD = self.embedding(tokens_BT)
        if self.embed_scale is not None:
            x_BTD = x_BTD * self.embed_scale
        if self.fixed_embed_scale is not None:
            x_BTD = x_BTD * self.fixed_embed_scale
        x_BTD = self.dropout(self.position.embed(x_BTD))
        for block in self.blocks:
            x_BTD = block(x_BTD, self.position)
        return self.final_norm(x_BTD)


def build_model(config: RunConfig, vocab_size: int = 256) -> GPT:
    """The model of a configuration with its initial values, on the CPU.

    The hashes of the z behind each initial value are kept as `model.z_hashes`.
    """
    model = GPT(config, vocab_size)
    gains = PLACEMENTS.get(config.placement.name).init_gains(config.model.n_layers)  # type: ignore[attr-defined]
    model.z_hashes = initialise(model, config.seed, INITS.build(config.resolved.init, model.geometry), gains)
    return model


def meta_model(config: RunConfig, vocab_size: int = 256) -> GPT:
    """The model without memory or values, for counting."""
    with torch.device("meta"):
        return GPT(config, vocab_size)
