"""The param axis: how initial values, learning rates and multipliers change with the size of the model.

Every factor is relative to the standard parametrization and depends on the role of a parameter alone. Sizes are taken
relative to a base model, at which every factor is 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nexus_ablate.axes.modules import Geometry
from nexus_ablate.config.options import Registry
from nexus_ablate.config.roles import MATRICES, SMALL_MAP

HIDDEN = frozenset(MATRICES) - {"head", SMALL_MAP}
"""Roles of the matrices whose two sides grow with the width."""


@dataclass(frozen=True)
class Factors:
    """On the initial standard deviation, learning rate, weight decay and AdamW's eps of a parameter."""

    init: float = 1.0
    lr: float = 1.0
    decay: float = 1.0
    eps: float = 1.0


class Parametrization:
    """Abstract: factors by role, and multipliers in the forward pass; None is no multiplication."""

    logits: float | None = None
    branches: float | None = None
    """On the outputs of attention and FFN, before they join the residual stream."""
    scores: float | None = None
    """On the scores, besides their published factor."""

    constrains = False
    """Whether `constrain` changes anything."""

    def factors(self, role: str, in_block: bool) -> Factors:
        """Of a parameter, by its role and whether it is in a block."""
        raise NotImplementedError

    def constrain(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Change weights in place, at the start and after every optimizer step.

        Args:
            parameters: The role and the tensor of every parameter.
        """

    def constrained_std(self, role: str, shape: Sequence[int]) -> float | None:
        """The standard deviation of a weight of this shape (last two axes) under the constraint; None without one."""
        return None


PARAM: Registry[Parametrization] = Registry("param")


@PARAM.register("sp")
class Standard(Parametrization):
    """Every factor is 1."""

    def __init__(self, geometry: Geometry | None = None) -> None:
        pass

    def factors(self, role: str, in_block: bool) -> Factors:
        return Factors()


@PARAM.register("ngpt")
class UnitWeights(Standard):
    """Every matrix and table has vectors of length 1 along d_model, at the start and after every step.

    Loshchilov et al. 2024 (nGPT), arXiv:2410.01131, section 2.6; `normalize_matrices` in the authors' code
    (NVIDIA/ngpt, train.py). Output projections are normed by column, all others by row.
    """

    constrains = True

    @torch.no_grad()
    def constrain(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        for role, weight in parameters:
            if (axis := self._axis(role)) is not None:
                weight.div_(weight.norm(dim=axis, keepdim=True).clamp(min=1e-12))

    def constrained_std(self, role: str, shape: Sequence[int]) -> float | None:
        axis = self._axis(role)
        return None if axis is None else shape[axis] ** -0.5

    def _axis(self, role: str) -> int | None:
        """The axis along which a weight's vectors have length 1."""
        if role not in (*HIDDEN, "head", "embedding"):
            return None
        return -2 if role in ("attn_out", "ffn_out") else -1


class _Width(Parametrization):
    """Abstract: the rules for the width m, shared by muP and CompleteP."""

    def __init__(self, geometry: Geometry, base_width: int, base_head_dim: int) -> None:
        self.width = geometry.d_model / base_width
        self.logits = 1 / self.width
        self.scores = (base_head_dim / geometry.head_dim) ** 0.5

    def factors(self, role: str, in_block: bool) -> Factors:
        m = self.width
        return Factors(init=m**-0.5, lr=1 / m, decay=m) if role in HIDDEN else Factors()


@PARAM.register("mup")
class MaximalUpdate(_Width):
    """muP for Adam. Yang et al. 2022, arXiv:2203.03466, Tables 3 and 8, and the `mup` package 1.0.0.

    The package divides the learning rate of matrices by m and multiplies their weight decay by m (`MuAdamW`; AdamW
    multiplies the decay by the learning rate). Its `MuReadout` divides the logits by m, with initial values that do not
    depend on m. The factor on the scores is 1 / d times sqrt(base_head_dim), so that it is the usual one at the base.
    """

    def __init__(self, geometry: Geometry, *, base_width: int, base_head_dim: int) -> None:
        super().__init__(geometry, base_width, base_head_dim)


@PARAM.register("completep")
class CompleteP(_Width):
    """muP over the width; branches divided by the depth k, eps by m and k. Dey et al. 2025, arXiv:2505.01618, Table 1.

    With alpha = 1, learning rates do not depend on the depth. The authors' minimal implementation is the branch
    `completep` of github.com/EleutherAI/nanoGPT-mup.
    """

    def __init__(self, geometry: Geometry, *, base_width: int, base_head_dim: int, base_depth: int) -> None:
        super().__init__(geometry, base_width, base_head_dim)
        self.depth = geometry.n_layers / base_depth
        self.branches = 1 / self.depth

    def factors(self, role: str, in_block: bool) -> Factors:
        eps = 1 / (self.width * self.depth) if in_block else 1 / self.width
        own = super().factors(role, in_block)
        return Factors(own.init, own.lr, own.decay, eps)
