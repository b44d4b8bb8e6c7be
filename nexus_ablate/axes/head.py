"""The head axis: from the residual stream to logits.

A head has two parts, so that the loss can compute the logits a few rows at a time: the rows that enter the product, and
the matrix that they are multiplied by. The cap on the logits (`final_softcap`) follows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nexus_ablate.axes.context import Context
from nexus_ablate.axes.modules import Geometry
from nexus_ablate.config.options import Registry


class Head(nn.Module):
    """Abstract: logits = rows(x) matrix(E)', with the embedding E as the weight if the head is tied to it.

    Args:
        geometry: The sizes of the model.
        width: Width of the embedding and of the head's input.
        tied: Whether the weight is the embedding.
        bias: Whether the logits have a bias, which starts at 0.
        scale: A fixed factor on the logits before the bias, if there is one.
    """

    def __init__(self, geometry: Geometry, width: int, tied: bool, bias: bool, scale: float | None) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(geometry.vocab_size, width))
        self.bias = nn.Parameter(torch.zeros(geometry.vocab_size)) if bias else None
        self.scale = scale
        self.roles = {"weight": "head"}

    def rows(self, x_BTD: Tensor, context: Context) -> Tensor:
        """The input of the product. With a bias it has one more column, of ones."""
        if self.scale is not None:
            x_BTD = self.scale * x_BTD
        return x_BTD if self.bias is None else nn.functional.pad(x_BTD, (0, 1), value=1.0)

    def matrix(self, embedding_VD: Tensor) -> Tensor:
        """The matrix of the product, (V, D). A bias is one more column."""
        weight_VD = self.scaled(embedding_VD if self.weight is None else self.weight)
        return weight_VD if self.bias is None else torch.cat((weight_VD, self.bias[:, None]), 1)

    def scaled(self, weight_VD: Tensor) -> Tensor:
        """The weight as it is multiplied."""
        return weight_VD


HEAD: Registry[Head] = Registry("head")


@HEAD.register("linear")
class LinearHead(Head):
    """x W', W the embedding or a matrix of its own. Press & Wolf 2017, arXiv:1608.05859."""


@HEAD.register("scaled")
class ScaledHead(Head):
    """s_v times the logit of token v, s learned and initially `start`. Loshchilov et al. 2024 (nGPT), arXiv:2410.01131.

    Eq. 3. As in the authors' code (NVIDIA/ngpt, model.py), the parameter is s times `scale` / `start`.
    """

    def __init__(
        self,
        geometry: Geometry,
        width: int,
        tied: bool,
        bias: bool,
        scale: float | None,
        *,
        start: float,
        scale_start: float | str,
    ) -> None:
        super().__init__(geometry, width, tied, bias, scale)
        first = geometry.d_model**-0.5 if scale_start == "auto" else float(scale_start)
        self.factor = start / first
        self.logit_scale_V = nn.Parameter(torch.full((geometry.vocab_size,), first))

    def scaled(self, weight_VD: Tensor) -> Tensor:
        return weight_VD * (self.factor * self.logit_scale_V)[:, None]
