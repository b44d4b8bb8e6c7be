"""AdamW in one fused call per group, and written out as in its paper."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class AdamW:
    """AdamW by PyTorch's fused kernel, with one call per group, or written out.

    Loshchilov & Hutter 2017, arXiv:1711.05101, Alg. 2, with decoupled decay times the learning rate as in PyTorch. It
    equals `torch.optim.AdamW(fused=True)` bit by bit. That class imports the compiler, which takes two seconds at every
    start, and spends half of the kernel's time in Python.

    Attributes:
        param_groups: `params`, `lr`, `betas`, `eps` and `weight_decay` of each group; may be changed between steps.
        state: `step`, `exp_avg` and `exp_avg_sq` of each parameter that has taken a step.
        found_inf: A scalar on the device; while it is 1, a step changes nothing.
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
            if not parameters:  # with optim.decay=all the group without decay is empty
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
        changed = [*parameters, *(tensor for state in states for tensor in state.values())]
        before = [] if self.found_inf is None else [tensor.clone() for tensor in changed]
        lr, (beta1, beta2) = group["lr"], group["betas"]
        for p, state in zip(parameters, states, strict=True):
            assert p.grad is not None
            step, m, v = state["step"].add_(1), state["exp_avg"], state["exp_avg_sq"]
            m.mul_(beta1).add_((1 - beta1) * p.grad)
            v.mul_(beta2).add_((1 - beta2) * p.grad.square())
            m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
            p.mul_(1 - lr * group["weight_decay"]).sub_(lr * m_hat / (v_hat.sqrt() + group["eps"]))
        if self.found_inf is not None:  # reading it would wait for the device
            for now, old in zip(changed, before, strict=True):
                now.copy_(torch.where(self.found_inf > 0, old, now))

    def zero_grad(self) -> None:
        """Free the gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None
