"""Gradient norms (global, by part and by role) and clipping, in one pass over all gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nexus_ablate.axes.modules import parameter_roles

ROLE = "role/"


class GradientNorms:
    """Gradient norms (global, by part and by role) from one pass over all gradients, and clipping by the global norm.

    The parts of a block are `attn`, `ffn` and `norm` (everything else in it). Outside the blocks, a part is the name of
    the top-level module. A role, such as `role/query`, is one of `config.roles` over all blocks. Each parameter is in
    exactly one part and has exactly one role.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        roles = parameter_roles(model)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        groups = [*map(part_of, names), *(f"{ROLE}{roles[name]}" for name in names)]
        self.parts = sorted(set(groups))
        device = self._parameters[0].device
        self._zero = torch.zeros((), device=device)  # the gradient of what the loss does not depend on
        self._index = torch.tensor([self.parts.index(group) for group in groups], device=device)

    def measure(self) -> tuple[Tensor, Tensor]:
        """The global norm (scalar) and the norms in the order of `parts`, both on the device, before clipping."""
        gradients = [self._zero if p.grad is None else p.grad for p in self._parameters]
        norms = torch.stack(torch._foreach_norm(gradients))  # type: ignore[reportPrivateImportUsage]
        squares = norms.float().square()
        by_part = torch.zeros(len(self.parts), device=squares.device).index_add_(0, self._index, squares.repeat(2))
        return squares.sum().sqrt(), by_part.sqrt()

    def clip(self, norm: Tensor, largest: float) -> None:
        """Scale all gradients so that their global norm is at most `largest`."""
        factor = (largest / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(self.gradients(), factor)  # type: ignore[reportPrivateImportUsage]

    def gradients(self) -> list[Tensor]:
        """All gradients that are not None, in the order of the parameters."""
        return [p.grad for p in self._parameters if p.grad is not None]


def first_over_last(norms: Mapping[str, float], n_layers: int) -> float:
    """Gradient norm of the first block over that of the last, from the norms of the parts; nan where that is 0."""
    blocks = ("block_000/", f"block_{n_layers - 1:03d}/")
    first, last = (math.hypot(*(norms[part] for part in norms if part.startswith(block))) for block in blocks)
    return first / last if last else math.nan


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to, as in metric names: `block_003/attn`, `embedding` ..."""
    pieces = name.split(".")
    if pieces[0] != "blocks":
        return pieces[0]
    return f"block_{int(pieces[1]):03d}/{pieces[2] if pieces[2] in ('attn', 'ffn') else 'norm'}"
