"""The optimizer: which parameters decay, the learning rate of a step, gradient norms and clipping in one pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nexus_ablate.axes.roles import EMBEDDINGS, MATRICES, parameter_roles
from nexus_ablate.config import OptimConfig

DECAYED_ROLES = {"matrices": set(MATRICES), "matrices_embeddings": {*MATRICES, *EMBEDDINGS}}


def decay_groups(model: nn.Module, decay: str) -> dict[str, list[str]]:
    """Parameter names by whether they decay: `{"decayed": [...], "free": [...]}`; each name in exactly one."""
    roles = parameter_roles(model)
    decayed = [n for n, role in roles.items() if decay == "all" or role in DECAYED_ROLES[decay]]
    return {"decayed": decayed, "free": [name for name in roles if name not in set(decayed)]}


def build_optimizer(model: nn.Module, config: OptimConfig, weight_decay: float) -> torch.optim.AdamW:
    """Fused AdamW with decoupled decay. Loshchilov & Hutter 2017, arXiv:1711.05101, Alg. 2."""
    parameters = dict(model.named_parameters())
    groups = decay_groups(model, config.decay)
    return torch.optim.AdamW(
        [
            {"params": [parameters[n] for n in groups["decayed"]], "weight_decay": weight_decay},
            {"params": [parameters[n] for n in groups["free"]], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def warmup_steps(config: OptimConfig, steps: int) -> int:
    """`auto` is an eighth of the run up to 100 steps, or one step in a hundred where that is more."""
    return max(min(100, steps // 8), steps // 100) if config.warmup == "auto" else config.warmup


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of step 0 .. steps - 1: linear warm-up, then the schedule down to `final_lr` of the peak."""
    warmup = warmup_steps(config, steps)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return config.lr
    first = max(warmup, steps - round(config.cooldown * steps)) if config.schedule == "wsd" else warmup
    progress = min(1.0, max(0.0, (step - first) / max(1, steps - first)))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.lr * (config.final_lr + (1 - config.final_lr) * left)


class GradientNorms:
    """Gradient norms, global and by block and part, from one pass over all gradients; and clipping by the global one.

    Parts of a block are `attn`, `ffn` and `norm` (everything else in it); outside the blocks, the top module's name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        names = [part_of(name) for name, p in model.named_parameters() if p.requires_grad]
        self.parts = sorted(set(names))
        device = self._parameters[0].device
        self._index = torch.tensor([self.parts.index(name) for name in names], device=device)

    def measure(self) -> tuple[Tensor, Tensor]:
        """The global norm (a scalar) and the norms in the order of `parts`, on the device, before clipping."""
        norms = torch.stack(torch._foreach_norm(self._gradients()))  # type: ignore[reportPrivateImportUsage]
        squares = norms.float().square()
        by_part = torch.zeros(len(self.parts), device=squares.device).index_add_(0, self._index, squares)
        return squares.sum().sqrt(), by_part.sqrt()

    def clip(self, norm: Tensor, largest: float) -> None:
        """Scale all gradients so that their global norm is at most `largest`."""
        factor = (largest / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(self._gradients(), factor)  # type: ignore[reportPrivateImportUsage]

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to, as in metric names: `block_003/attn`, `embedding` ..."""
    pieces = name.split(".")
    if pieces[0] != "blocks":
        return pieces[0]
    return f"block_{int(pieces[1]):03d}/{pieces[2] if pieces[2] in ('attn', 'ffn') else 'norm'}"
