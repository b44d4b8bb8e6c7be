"""The optimizer: which parameters decay, the learning rate of a step, gradient norms and clipping in one pass."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from nexus_ablate.axes.roles import EMBEDDINGS, MATRICES, parameter_roles
from nexus_ablate.config.run_config import OptimConfig

ROLE = "role/"
DECAYED_ROLES = {"matrices": set(MATRICES), "matrices_embeddings": {*MATRICES, *EMBEDDINGS}}


def decay_groups(model: nn.Module, decay: str) -> dict[str, list[str]]:
    """Parameter names by whether they decay: `{"decayed": [...], "free": [...]}`; each name in exactly one."""
    roles = parameter_roles(model)
    decayed = [n for n, role in roles.items() if decay == "all" or role in DECAYED_ROLES[decay]]
    return {"decayed": decayed, "free": [name for name in roles if name not in set(decayed)]}


class AdamW:
    """AdamW with decoupled decay by PyTorch's fused kernel, one call a group, or as it is written.

    Loshchilov & Hutter 2017, arXiv:1711.05101, Alg. 2, the decay times the learning rate as in PyTorch. To the bit what
    `torch.optim.AdamW(fused=True)` does, whose class imports the compiler (two seconds of every start) and spends half
    as long in Python as the kernel takes.

    Attributes:
        param_groups: Of each group `params`, `lr`, `betas`, `eps` and `weight_decay`, to be changed between steps.
        state: Of each parameter that has taken a step `step`, `exp_avg` and `exp_avg_sq`.
        found_inf: Where this scalar on the device is 1, a step changes nothing.
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, fused: bool = True
    ) -> None:
        self.param_groups = [{"lr": lr, "betas": betas, "eps": eps, **group} for group in groups]
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self.found_inf: Tensor | None = None
        self._change = self._fused if fused else self._plain

    @torch.no_grad()
    def step(self) -> None:
        """One step of every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:  # optim.decay=all leaves none free
                continue
            states = [self.state[p] for p in parameters]
            for p, state in zip(parameters, states, strict=True):
                if not state:
                    state |= {
                        "step": torch.zeros((), device=p.device),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
            self._change(group, parameters, states)

    def _fused(self, group: dict[str, Any], parameters: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)  # type: ignore[reportPrivateImportUsage]
        torch._fused_adamw_(  # type: ignore[reportPrivateImportUsage]
            parameters,
            [p.grad for p in parameters],  # type: ignore[reportArgumentType]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=self.found_inf,
        )
        if self.found_inf is not None:
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))  # type: ignore[reportPrivateImportUsage]

    def _plain(self, group: dict[str, Any], parameters: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        if self.found_inf is not None and self.found_inf:
            return
        lr, (beta1, beta2) = group["lr"], group["betas"]
        for p, state in zip(parameters, states, strict=True):
            assert p.grad is not None
            step, m, v = state["step"].add_(1), state["exp_avg"], state["exp_avg_sq"]
            m.mul_(beta1).add_((1 - beta1) * p.grad)
            v.mul_(beta2).add_((1 - beta2) * p.grad.square())
            m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
            p.mul_(1 - lr * group["weight_decay"]).sub_(lr * m_hat / (v_hat.sqrt() + group["eps"]))

    def zero_grad(self) -> None:
        """Let the gradients go."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


def build_optimizer(model: nn.Module, config: OptimConfig, weight_decay: float, fused: bool = True) -> AdamW:
    """The optimizer of a model, weight decay on the roles that `decay` names."""
    parameters = dict(model.named_parameters())
    groups = decay_groups(model, config.decay)
    return AdamW(
        [
            {"params": [parameters[n] for n in groups["decayed"]], "weight_decay": weight_decay},
            {"params": [parameters[n] for n in groups["free"]], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=fused,
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
    """Gradient norms, global, by block and by role, from one pass over all gradients; and clipping by the global one.

    Parts of a block are `attn`, `ffn` and `norm` (everything else in it); outside the blocks, the top module's name.
    Roles are those of `axes.roles` over all blocks, `role/query`; every parameter is in one part and has one role.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        roles = parameter_roles(model)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        groups = [*map(part_of, names), *(f"{ROLE}{roles[name]}" for name in names)]
        self.parts = sorted(set(groups))
        device = self._parameters[0].device
        self._index = torch.tensor([self.parts.index(group) for group in groups], device=device)

    def measure(self) -> tuple[Tensor, Tensor]:
        """The global norm (a scalar) and the norms in the order of `parts`, on the device, before clipping."""
        norms = torch.stack(torch._foreach_norm(self.gradients()))  # type: ignore[reportPrivateImportUsage]
        squares = norms.float().square()
        by_part = torch.zeros(len(self.parts), device=squares.device).index_add_(0, self._index, squares.repeat(2))
        return squares.sum().sqrt(), by_part.sqrt()

    def clip(self, norm: Tensor, largest: float) -> None:
        """Scale all gradients so that their global norm is at most `largest`."""
        factor = (largest / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(self.gradients(), factor)  # type: ignore[reportPrivateImportUsage]

    def gradients(self) -> list[Tensor]:
        """The gradients that there are, in the order of the parameters."""
        return [p.grad for p in self._parameters if p.grad is not None]


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to, as in metric names: `block_003/attn`, `embedding` ..."""
    pieces = name.split(".")
    if pieces[0] != "blocks":
        return pieces[0]
    return f"block_{int(pieces[1]):03d}/{pieces[2] if pieces[2] in ('attn', 'ffn') else 'norm'}"
