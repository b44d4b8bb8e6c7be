"""The steps of NorMuon: an orthogonalized momentum whose rows are divided by their running RMS."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

PRECISION = torch.bfloat16
"""Of the Newton-Schulz iterations, as in the authors' code."""
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""a, b, c of X <- a X + b (X X') X + c (X X')^2 X. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/."""
EPS = 1e-10
"""Added to the divisors of an update, as in the authors' code."""
RMS = 0.2
"""Of an update over its learning rate: about that of AdamW's. Liu et al. 2025, arXiv:2502.16982, section 2.2."""


class NorMuonSteps:
    """NorMuon for matrices. Li et al. 2025, arXiv:2510.05491, Alg. 1.

    Attributes:
        param_groups: `params`, `lr` and `weight_decay` of each group; may be changed between steps.
        state: `momentum` and `row_squares` of each parameter that has taken a step.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        row_beta: float,
    ) -> None:
        self.param_groups = [{"lr": lr, **group} for group in groups]
        self.momentum, self.nesterov, self.ns_steps = momentum, nesterov, ns_steps
        self.row_beta = row_beta
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        """One step of every matrix that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._change(weight, weight.grad, group["lr"], group["weight_decay"])

    def _change(self, weight: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[weight]
        if not state:
            state |= {"momentum": torch.zeros_like(weight), "row_squares": torch.zeros_like(weight[:, :1])}
        momentum, row_squares = state["momentum"], state["row_squares"]
        momentum.lerp_(gradient, 1 - self.momentum)
        direction = gradient.lerp(momentum, self.momentum) if self.nesterov else momentum
        update = orthogonalized(direction, self.ns_steps)
        row_squares.lerp_(update.square().mean(1, keepdim=True), 1 - self.row_beta)
        update = update / (row_squares.sqrt() + EPS)
        size = RMS * update.numel() ** 0.5 / (update.norm() + EPS)
        weight.mul_(1 - lr * weight_decay).sub_(lr * size * update)


def orthogonalized(matrix: Tensor, steps: int) -> Tensor:
    """About U V' of the singular value decomposition U S V' of a matrix: its singular values are 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    x = matrix.to(PRECISION)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.mT
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).to(matrix.dtype)
