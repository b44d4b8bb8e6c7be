"""The GPT: embedding, blocks, head. It knows no option by name; every choice arrives as a part.

Shape letters: B batch, T time, D d_model, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nexus_ablate.attention import Attention
from nexus_ablate.axes.ffn import FFN
from nexus_ablate.axes.init import INIT, initialise
from nexus_ablate.axes.norm import NORM
from nexus_ablate.axes.placement import PLACEMENT, Parts
from nexus_ablate.axes.position import POSITION
from nexus_ablate.axes.roles import Geometry, Linear, Table
from nexus_ablate.config.run_config import Option, RunConfig
from nexus_ablate.kernels.linear import chosen_product, products


class GPT(nn.Module):
    """A decoder-only transformer: `logits_BTV = model(tokens_BT)`."""

    def __init__(self, config: RunConfig, vocab_size: int) -> None:
        super().__init__()
        self.z_hashes: dict[str, str] = {}
        model, resolved = config.model, config.resolved
        geometry = Geometry(
            n_layers=model.n_layers,
            d_model=model.d_model,
            n_heads=model.n_heads,
            n_kv_heads=resolved.n_kv_heads,
            head_dim=resolved.head_dim,
            d_ff=resolved.d_ff,
            context=model.context,
            vocab_size=vocab_size,
        )

        def norm(site: str, width: int = model.d_model) -> nn.Module:
            option, sites = config.norm, config.norm_gain_sites
            if "gain_init" in option.keys and not (site != "final" if sites == "blocks" else site in sites):
                option = Option(option.name, option.keys | {"gain_init": 1.0})
            return NORM.build(option, width, resolved.norm_bias, site)

        def attention(layer: int, inner_norm: bool) -> nn.Module:
            width = geometry.n_heads * geometry.head_dim
            inner = norm("attn_inner", width) if inner_norm else nn.Identity()
            return Attention(config, geometry, layer, self.position.turns_keys(layer), inner)

        def ffn(inner_norm: bool) -> nn.Module:
            inner = norm("ffn_inner", geometry.d_ff) if inner_norm else nn.Identity()
            return FFN.build(config.ffn, geometry, resolved.ffn_bias, model.dropout, inner)

        self.geometry = geometry
        self.embedding = Table(vocab_size, model.d_model, role="embedding")
        scale = torch.tensor(model.d_model**0.5)
        self.embed_scale = nn.Parameter(scale) if resolved.embed_scale == "learned" else None
        self.fixed_embed_scale = model.d_model**0.5 if resolved.embed_scale == "sqrt_d" else None
        self.sink = Table(1, model.d_model, role="embedding") if config.sink_token else None
        self.position = POSITION.build(config.position, geometry)
        self.dropout = nn.Dropout(model.dropout)
        self.blocks = nn.ModuleList()
        for layer in range(model.n_layers):
            parts = Parts(partial(attention, layer), ffn, norm, model.d_model, layer, model.n_layers)
            self.blocks.append(PLACEMENT.build(config.placement, parts))
        self.final_norm = norm("final") if resolved.final_norm else nn.Identity()
        self.head = None if config.tie_embeddings else Linear(model.d_model, vocab_size, bias=False, role="head")
        self.product = chosen_product()
        self.recompute = config.train.activation_checkpointing
        self.softcap = None if config.final_softcap == "off" else config.final_softcap

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.logits(self.hidden(tokens_BT), self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """(V, D): the embedding, where the head is tied to it."""
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def init_gains(self) -> dict[str, float]:
        """The placement's factors on initial standard deviations, by role."""
        return self.blocks[0].init_gains  # type: ignore[return-value]

    def logits(self, x_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        """The logits that the head computes from the residual stream with a weight."""
        logits_BTV = self.product(x_BTD, weight_VD)
        return logits_BTV if self.softcap is None else self.softcap * torch.tanh(logits_BTV / self.softcap)

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """The residual stream (B, T, D) as the head reads it. In the blocks the sink token precedes the text."""
        x_BTD = self.position.embed(self._scaled(self.embedding(tokens_BT)))
        if self.sink is not None:
            x_BTD = torch.cat((self._scaled(self.sink.weight).expand(len(x_BTD), 1, -1), x_BTD), 1)
        stream = self.blocks[0].enter(self.dropout(x_BTD))  # type: ignore[reportCallIssue]
        for block in self.blocks:
            if self.recompute and torch.is_grad_enabled():
                stream = checkpoint(block, stream, self.position, use_reentrant=False)
            else:
                stream = block(stream, self.position)
        x_BTD = self.blocks[-1].leave(stream, self.final_norm)  # type: ignore[reportCallIssue]
        return x_BTD if self.sink is None else x_BTD[:, 1:]

    def _scaled(self, x_BTD: Tensor) -> Tensor:
        if self.embed_scale is not None:
            x_BTD = x_BTD * self.embed_scale
        return x_BTD if self.fixed_embed_scale is None else x_BTD * self.fixed_embed_scale


def build_model(config: RunConfig, vocab_size: int = 256) -> GPT:
    """The model of a configuration with its initial values, on the CPU.

    The hashes of the z behind each initial value are kept as `model.z_hashes`.
    """
    with products(config.train.linear):
        model = GPT(config, vocab_size)
    init = INIT.build(config.resolved.init, model.geometry)
    model.z_hashes = initialise(model, config.seed, init, model.init_gains)
    return model


def meta_model(config: RunConfig, vocab_size: int = 256) -> GPT:
    """The model without memory or values, for counting."""
    with torch.device("meta"):
        return GPT(config, vocab_size)
