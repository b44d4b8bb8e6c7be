"""Modules whose parameters have roles (config/roles.py), and the role of every parameter of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nexus_ablate.config.roles import VECTOR
from nexus_ablate.kernels.linear import chosen_product, shared


@dataclass(frozen=True)
class Geometry:
    """The sizes that an option may need to know."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    context: int
    vocab_size: int
    nope_layers: frozenset[int] = frozenset()
    """Layers without positions, from 0."""
    layer: int | None = None
    """The block that an option is made for, from 0; None outside the blocks."""

    def at(self, layer: int) -> Geometry:
        """The same sizes for an option of this block."""
        return dataclasses.replace(self, layer=layer)


class Site(str):
    """The name of a norm's place, such as `attn`, with the index of its block in `layer` (None outside the blocks)."""

    layer: int | None = None

    @classmethod
    def at(cls, name: str, layer: int | None) -> Site:
        """The site of this name in this block."""
        site = cls(name)
        site.layer = layer
        return site


class Linear(nn.Linear):
    """A linear layer whose weight has a role. The init axis sets the weight; the bias starts at 0."""

    def __init__(self, d_in: int, d_out: int, bias: bool, role: str) -> None:
        super().__init__(d_in, d_out, bias=bias)
        self.roles = {"weight": role}
        self.product = chosen_product()
        self.multiplier: float | None = None
        """On the output, where the parametrization has one."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x, self.weight, self.bias)
        return y if self.multiplier is None else y * self.multiplier

    def reset_parameters(self) -> None:
        """Leave the weight unset; the init axis sets it later."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def projections(x: Tensor, linears: Sequence[Linear]) -> list[Tensor]:
    """The output of each linear layer for the same input.

    On a GPU, where a small product takes less time than its launch, they are parts of one product with the stacked
    weights. On a CPU they are separate products, which are as fast, and so they are where a layer has a hook, which
    only fires when the layer itself is called.
    """
    is_hooked = any(linear._forward_hooks or linear._forward_pre_hooks for linear in linears)
    if not x.is_cuda or is_hooked or any(linear.multiplier is not None for linear in linears):
        return [linear(part) for linear, part in zip(linears, shared(x, len(linears)), strict=True)]
    weights = [linear.weight for linear in linears]
    bias = None
    if any(linear.bias is not None for linear in linears):
        rows = [
            linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias for linear in linears
        ]
        bias = torch.cat(rows)
    stacked = linears[0].product(x, torch.cat(weights), bias)
    return [*stacked.split([len(weight) for weight in weights], -1)]


class HeadLinear(nn.Module):
    """A separate linear layer per head, (B, H, T, d_in) to (B, H, T, d_out). All have the same role."""

    def __init__(self, n_heads: int, d_in: int, d_out: int, bias: bool, role: str) -> None:
        super().__init__()
        self.maps = nn.ModuleList(Linear(d_in, d_out, bias, role) for _ in range(n_heads))
        self.biased = bias

    def weight(self) -> Tensor:
        """The matrices of all heads, (H, d_out, d_in)."""
        return torch.stack([head.weight for head in self.maps])  # type: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight().transpose(1, 2)
        return y + torch.stack([head.bias for head in self.maps])[:, None] if self.biased else y  # type: ignore[reportArgumentType]


class Table(nn.Module):
    """A learned table of vectors, (rows, width), with a role."""

    def __init__(self, rows: int, width: int, role: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.roles = {"weight": role}

    def forward(self, index: Tensor) -> Tensor:
        return nn.functional.embedding(index, self.weight)


def own_stds(model: nn.Module) -> dict[str, float]:
    """The initial standard deviations that modules give in `stds`, by the full names of the parameters."""
    stds: dict[str, float] = {}
    for module_name, module in model.named_modules():
        for name, std in getattr(module, "stds", {}).items():
            stds[f"{module_name}.{name}" if module_name else name] = std
    return stds


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """The role of every parameter by its full name, each parameter once.

    Raises:
        TypeError: A module doesn't give the role of one of its matrices.
    """
    role_of: dict[str, str] = {}
    for module_name, module in model.named_modules():
        roles = getattr(module, "roles", {})
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            role = roles.get(name, VECTOR if parameter.ndim < 2 else None)
            if role is None:
                raise TypeError(f"{full}: {type(module).__name__} must give the role of {name} in `roles`")
            role_of[full] = role
    return role_of
