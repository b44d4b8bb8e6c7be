"""The placement axis: how a block wires its two branches, its norms and its residual path.

A placement is one final class with a forward of a few lines. It owns the wiring, whether q, k and v are normed, and
the init gain by role; its YAML says whether a final norm belongs to it. It receives ready parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from nexus_ablate.axes.position import Position
from nexus_ablate.registry import Registry


@dataclass(frozen=True)
class Parts:
    """What a block is made of: two branches, a maker of norms by site, and where in the stack it stands."""

    attn: nn.Module
    ffn: nn.Module
    norm: Callable[[str], nn.Module]
    layer: int
    n_layers: int


class Block(nn.Module):
    """Abstract block. `forward` maps the residual stream (B, T, D) to itself; `position` goes to attention as it is."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.attn, self.ffn = parts.attn, parts.ffn

    @staticmethod
    def init_gains(n_layers: int) -> dict[str, float]:
        """Factors on the init axis's standard deviations, by role. A role that is not named has 1."""
        return {}

    def forward(self, x_BTD: Tensor, position: Position) -> Tensor:
        raise NotImplementedError


PLACEMENTS: Registry[Block] = Registry("placement")


@PLACEMENTS.register("pre")
class PreNorm(Block):
    """x + f(N(x)). Xiong et al. 2020, arXiv:2002.04745, Table 1."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.norm_attn, self.norm_ffn = parts.norm("attn"), parts.norm("ffn")

    def forward(self, x_BTD: Tensor, position: Position) -> Tensor:
        x_BTD = x_BTD + self.attn(self.norm_attn(x_BTD), position)
        return x_BTD + self.ffn(self.norm_ffn(x_BTD))


@PLACEMENTS.register("post")
class PostNorm(Block):
    """N(x + f(x)). Vaswani et al. 2017, arXiv:1706.03762, section 3.1."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.norm_attn, self.norm_ffn = parts.norm("attn"), parts.norm("ffn")

    def forward(self, x_BTD: Tensor, position: Position) -> Tensor:
        x_BTD = self.norm_attn(x_BTD + self.attn(x_BTD, position))
        return self.norm_ffn(x_BTD + self.ffn(x_BTD))


@PLACEMENTS.register("hybrid")
class Hybrid(Block):
    """x + A(N(x)), then N(x + F(x)): pre-norm attention, post-norm FFN.

    Not the published HybridNorm (arXiv:2503.04598), which norms q, k and v and feeds the FFN a normed stream.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.norm_attn, self.norm_ffn = parts.norm("attn"), parts.norm("ffn")

    def forward(self, x_BTD: Tensor, position: Position) -> Tensor:
        x_BTD = x_BTD + self.attn(self.norm_attn(x_BTD), position)
        return self.norm_ffn(x_BTD + self.ffn(x_BTD))


@PLACEMENTS.register("deepnorm")
class DeepNorm(Block):
    """N(residual_scale x + f(x)), residual_scale (2L)^(1/4); init gain (8L)^(-1/4) on value, output and both FFN maps.

    Wang et al. 2022, arXiv:2203.00555, Fig. 2 (decoder-only). The paper's FFN has two matrices; of a gated FFN the
    gate is scaled like the other input map.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.norm_attn, self.norm_ffn = parts.norm("attn"), parts.norm("ffn")
        self.residual_scale = (2 * parts.n_layers) ** 0.25

    @staticmethod
    def init_gains(n_layers: int) -> dict[str, float]:
        return dict.fromkeys(("value", "attn_out", "ffn_in", "ffn_out"), (8 * n_layers) ** -0.25)

    def forward(self, x_BTD: Tensor, position: Position) -> Tensor:
        x_BTD = self.norm_attn(self.residual_scale * x_BTD + self.attn(x_BTD, position))
        return self.norm_ffn(self.residual_scale * x_BTD + self.ffn(x_BTD))
