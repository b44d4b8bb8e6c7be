"""The value axis: what the values of attention have besides their projection. Shapes: (B, T, G, d)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.axes.context import Context
from nexus_ablate.axes.modules import Geometry, Table
from nexus_ablate.config.options import Registry
from nexus_ablate.config.roles import SMALL_MAP


class Value(nn.Module):
    """Abstract: takes and returns the values of a layer, after their projection, norm and gate.

    x_BTD is the input of that projection.
    """

    acts = True
    """Whether it changes the values at all."""

    def forward(self, v_BTGd: Tensor, x_BTD: Tensor, context: Context) -> Tensor:
        raise NotImplementedError


VALUE: Registry[Value] = Registry("value")


@VALUE.register("none")
class NoValue(Value):
    """The values as they are projected."""

    acts = False

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()

    def forward(self, v_BTGd: Tensor, x_BTD: Tensor, context: Context) -> Tensor:
        return v_BTGd


class _Mixed(Value):
    """Abstract: own * v + other * w, two numbers that may be learned for each layer."""

    def __init__(self, own: float, other: float, learned: bool) -> None:
        super().__init__()
        factors = torch.tensor([own, other])
        if learned:
            self.factors = nn.Parameter(factors)
        else:
            self.register_buffer("factors", factors, persistent=False)

    def mixed(self, v_BTGd: Tensor, other_BTGd: Tensor) -> Tensor:
        own, other = self.factors.to(v_BTGd.dtype)
        return own * v_BTGd + other * other_BTGd


def embedded(table: Table, v_BTGd: Tensor, context: Context) -> Tensor:
    """The values of the tokens in a table, of the shape and type of `v_BTGd`; 0 for the sink token."""
    embedded_BTGd = table(context.tokens_BT).view(*context.tokens_BT.shape, *v_BTGd.shape[2:])
    if context.sink:
        embedded_BTGd = F.pad(embedded_BTGd, (0, 0, 0, 0, context.sink, 0))
    return embedded_BTGd.to(v_BTGd.dtype)


@VALUE.register("residual")
class ValueResidual(_Mixed):
    """own v + first v_1 in every layer but the first, v_1 the first layer's values. Zhou et al. 2024, arXiv:2410.17897.

    With `layers`, the first of them is the first layer.
    The authors' code (Zcchill/Value-Residual-Learning, modeling_llama_resformer.py) has the constants 0.5 and 0.5.
    """

    def __init__(self, geometry: Geometry, *, own: float, first: float, learned: bool, layers: str | list[int]) -> None:
        self.is_first = geometry.layer == (0 if isinstance(layers, str) else min(layers))
        super().__init__(own, first, learned and not self.is_first)

    def forward(self, v_BTGd: Tensor, x_BTD: Tensor, context: Context) -> Tensor:
        if self.is_first:
            context.store["first_values"] = v_BTGd
            return v_BTGd
        return self.mixed(v_BTGd, context.store["first_values"])


@VALUE.register("embedding")
class ValueEmbedding(_Mixed):
    """own v + embedding E[token], a table of values for each layer. Jordan et al. 2024, KellerJordan/modded-nanogpt.

    As there (records/track_1_short/2024-12-04_ValueEmbed), E starts at N(0, 1) under every init; there one number a
    gives both factors, 1 - a and a. The sink token has no row: its values are only scaled.
    """

    def __init__(self, geometry: Geometry, *, own: float, embedding: float, learned: bool) -> None:
        super().__init__(own, embedding, learned)
        self.table = Table(geometry.vocab_size, geometry.n_kv_heads * geometry.head_dim, role="embedding")
        self.stds = {"table.weight": 1.0}

    def forward(self, v_BTGd: Tensor, x_BTD: Tensor, context: Context) -> Tensor:
        return self.mixed(v_BTGd, embedded(self.table, v_BTGd, context))


@VALUE.register("gated_embedding")
class GatedValueEmbedding(Value):
    """v + scale sigmoid(G x') E[token] in every other layer, the last one included. Karpathy 2026, karpathy/nanochat.

    E is a table for each of these layers, and G, without a bias and initially 0, maps the first channels of attention's
    input to a number for each key head. Layers and tables as in the authors' code of 2026-01-16 (commit e85db6b,
    gpt.py; dev/LOG.md, 2026-01-17), where E starts at 1 / sqrt(d_model), as here under init=fan_in. The gate is that of
    KellerJordan/modded-nanogpt (records/track_1_short/2025-12-29_VeSkipGates). The sink token has no row.
    """

    def __init__(self, geometry: Geometry, *, channels: int, scale: float) -> None:
        super().__init__()
        assert geometry.layer is not None
        self.acts = (geometry.n_layers - 1 - geometry.layer) % 2 == 0
        if not self.acts:
            return
        self.channels, self.scale = channels, scale
        self.table = Table(geometry.vocab_size, geometry.n_kv_heads * geometry.head_dim, role="embedding")
        self.gate = nn.Parameter(torch.empty(geometry.n_kv_heads, channels))
        self.roles, self.stds = {"gate": SMALL_MAP}, {"gate": 0.0}

    def forward(self, v_BTGd: Tensor, x_BTD: Tensor, context: Context) -> Tensor:
        if not self.acts:
            return v_BTGd
        factor_BTG = self.scale * torch.sigmoid(F.linear(x_BTD[..., : self.channels], self.gate))
        embedded_BTGd = embedded(self.table, v_BTGd, context)
        return v_BTGd + factor_BTG[..., None].to(v_BTGd.dtype) * embedded_BTGd
