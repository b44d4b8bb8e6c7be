"""The conv axis: short causal convolutions over time, each channel by itself, at four sites of a block.

Sites: `attn_in` attention's input, `qkv` the projected queries, keys and values, `ffn_in` the FFN's input, `ffn_hidden`
the FFN's hidden layer before its activation. Input and output are (B, T, width).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.axes.modules import Geometry
from nexus_ablate.config.options import Registry
from nexus_ablate.config.roles import SMALL_MAP


class Conv(nn.Module):
    """Abstract convolution at one site, of this width.

    Args:
        site: `attn_in`, `qkv`, `ffn_in` or `ffn_hidden`.
    """

    acts = True
    """Whether there is a convolution at this site."""

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


CONV: Registry[Conv] = Registry("conv")


@CONV.register("none")
class NoConv(Conv):
    """No convolution at any site."""

    acts = False

    def __init__(self, geometry: Geometry, site: str, width: int) -> None:
        super().__init__()


@CONV.register("canon")
class Canon(Conv):
    """x_t + sum_j w_j x_(t - j) over the last `kernel` tokens, w for each channel. Allen-Zhu 2025 (Physics of LMs 4.1).

    As in the authors' code (facebookresearch/PhysicsLM4, canon_helper.py): residual, without bias and activation. The
    weights start with the standard deviation of that code's layer, 1 / sqrt(3 kernel).
    """

    def __init__(
        self,
        geometry: Geometry,
        site: str,
        width: int,
        *,
        attn_in: bool,
        qkv: bool,
        ffn_in: bool,
        ffn_hidden: bool,
        kernel: int,
    ) -> None:
        super().__init__()
        sites = {"attn_in": attn_in, "qkv": qkv, "ffn_in": ffn_in, "ffn_hidden": ffn_hidden}
        self.acts, self.kernel = sites[site], kernel
        if self.acts:
            self.weight = nn.Parameter(torch.empty(width, kernel))
            self.roles, self.stds = {"weight": SMALL_MAP}, {"weight": (3 * kernel) ** -0.5}

    def forward(self, x: Tensor) -> Tensor:
        return plus_convolution(x, x, self.weight)


class ShortConv(nn.Module):
    """silu(sum_j w_j x_(t - j)) over the last `kernel` tokens, w for each channel: the convolution of linear attention.

    Its weights start with the standard deviation of PyTorch's layer, 1 / sqrt(3 kernel).
    """

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, kernel))
        self.roles, self.stds = {"weight": SMALL_MAP}, {"weight": (3 * kernel) ** -0.5}

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(plus_convolution(torch.zeros_like(x), x, self.weight))


def plus_convolution(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """y plus the causal convolution of x, (B, T, width), with a weight (width, kernel) whose last column is of now."""
    T, kernel = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, kernel - 1, 0))
    for first in range(kernel):
        y = y + padded[:, first : first + T] * weight[:, first].to(x.dtype)
    return y


def no_conv(site: str, width: int) -> Conv:
    """The part of a branch without convolutions."""
    return NoConv(None, site, width)  # type: ignore[reportArgumentType]
