"""The value axis: what the values of attention have besides their projection. Shapes: (B, T, G, d)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.axes.context import Context
from nexus_ablate.axes.modules import Geometry, Table
from nexus_ablate.config.options import Registry


class Value(nn.Module):
    """Abstract: takes and returns the values of a layer, after their projection, norm and gate."""

    acts = True
    """Whether it changes the values at all."""

    def forward(self, v_BTGd: Tensor, context: Context) -> Tensor:
        raise NotImplementedError


VALUE: Registry[Value] = Registry("value")


@VALUE.register("none")
class NoValue(Value):
    """The values as they are projected."""

    acts = False

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()

    def forward(self, v_BTGd: Tensor, context: Context) -> Tensor:
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


@VALUE.register("residual")
class ValueResidual(_Mixed):
    """own v + first v_1 in every layer but the first, v_1 the first layer's values. Zhou et al. 2024, arXiv:2410.17897.

    With `layers`, the first of them is the first layer.
    The authors' code (Zcchill/Value-Residual-Learning, modeling_llama_resformer.py) has the constants 0.5 and 0.5.
    """

    def __init__(self, geometry: Geometry, *, own: float, first: float, learned: bool, layers: str | list[int]) -> None:
        self.is_first = geometry.layer == (0 if isinstance(layers, str) else min(layers))
        super().__init__(own, first, learned and not self.is_first)

    def forward(self, v_BTGd: Tensor, context: Context) -> Tensor:
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

    def forward(self, v_BTGd: Tensor, context: Context) -> Tensor:
        embedded_BTGd = self.table(context.tokens_BT).view(*context.tokens_BT.shape, *v_BTGd.shape[2:])
        if context.sink:
            embedded_BTGd = F.pad(embedded_BTGd, (0, 0, 0, 0, context.sink, 0))
        return self.mixed(v_BTGd, embedded_BTGd.to(v_BTGd.dtype))
