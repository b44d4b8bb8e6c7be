"""The normalizer axis: scores (B, H, T, S), -inf where a key may not be seen, to weights of the same shape, in float32.

A normalizer never puts weight on a key that may not be seen. Rows need not sum to 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nexus_ablate.axes.modules import Geometry
from nexus_ablate.config.options import Registry


class Normalizer(nn.Module):
    """Abstract: scores to weights."""

    fused = False
    """Whether the weights are a softmax over the keys and the normalizer's own key, if it has one."""
    shift_invariant = False
    """Whether adding the same number to all scores of a query leaves the weights unchanged."""
    sharpens = False
    """Whether `sharpness` multiplies the scores of each query, capped and with their bias, before the normalizer."""

    def sharpness(self, seen_T: Tensor) -> Tensor:
        """The factor on the scores of each query, (H, T, 1), from the number of keys that it sees."""
        raise NotImplementedError

    def own_key(self) -> float | Tensor | None:
        """The score (one number or (H,)) of an extra key with value 0 that every query sees; None if there is none."""
        return None


NORMALIZER: Registry[Normalizer] = Registry("normalizer")


@NORMALIZER.register("softmax")
class Softmax(Normalizer):
    """exp(z) over its sum. Vaswani et al. 2017, arXiv:1706.03762, Eq. 1."""

    fused = True
    shift_invariant = True

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()

    def forward(self, score_BHTS: Tensor) -> Tensor:
        return torch.softmax(score_BHTS.float(), -1)


@NORMALIZER.register("softmax1")
class SoftmaxOne(Normalizer):
    """exp(z) / (1 + sum exp(z)): an extra key of score 0 and value 0. Miller 2023, "Attention Is Off By One"."""

    fused = True

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()

    def own_key(self) -> float:
        return 0.0

    def forward(self, score_BHTS: Tensor) -> Tensor:
        zero_BHT1 = torch.zeros_like(score_BHTS[..., :1], dtype=torch.float32)
        return torch.softmax(torch.cat((zero_BHT1, score_BHTS.float()), -1), -1)[..., 1:]


@NORMALIZER.register("sink")
class Sink(Normalizer):
    """exp(z) / (exp(s) + sum exp(z)), s learned for each query head in every layer. gpt-oss, arXiv:2508.10925.

    As in the authors' code (openai/gpt-oss, torch/model.py), s is added next to the masked and scaled scores and isn't
    scaled itself. The initial value is our choice: with 0 it starts as softmax1.
    """

    fused = True

    def __init__(self, geometry: Geometry, *, start: float) -> None:
        super().__init__()
        self.logit_H = nn.Parameter(torch.full((geometry.n_heads,), start))

    def own_key(self) -> Tensor:
        return self.logit_H

    def forward(self, score_BHTS: Tensor) -> Tensor:
        sink_BHT1 = self.logit_H.float().view(1, -1, 1, 1).expand(*score_BHTS.shape[:-1], 1)
        return torch.softmax(torch.cat((sink_BHT1, score_BHTS.float()), -1), -1)[..., 1:]


@NORMALIZER.register("ssmax")
class ScalableSoftmax(Normalizer):
    """exp(s ln(n) z) over its sum, n the number of visible keys, s learned for each head in every layer.

    Nakanishi 2025 (SSMax), arXiv:2501.19399, Eq. 3. The initial value is our choice, that of the paper's figure 1.
    """

    fused = True
    shift_invariant = True
    sharpens = True

    def __init__(self, geometry: Geometry, *, start: float) -> None:
        super().__init__()
        self.s_H = nn.Parameter(torch.full((geometry.n_heads,), start))

    def sharpness(self, seen_T: Tensor) -> Tensor:
        return self.s_H.float()[:, None, None] * seen_T.float().log()[:, None]

    def forward(self, score_BHTS: Tensor) -> Tensor:
        return torch.softmax(score_BHTS.float(), -1)


@NORMALIZER.register("clipped")
class ClippedSoftmax(Normalizer):
    """clip((zeta - gamma) softmax(z) + gamma, 0, 1), gamma = -alpha / T. Bondarenko et al. 2023, arXiv:2306.12929.

    T is the training context, also for sequences of other lengths, as in the authors' code
    (Qualcomm-AI-research/outlier-free-transformers, opt_attention.py). Clipped weights have no gradient.
    """

    shift_invariant = True

    def __init__(self, geometry: Geometry, *, zeta: float, gamma: float | str, alpha: float) -> None:
        super().__init__()
        self.zeta = zeta
        self.gamma = -alpha / geometry.context if gamma == "auto" else float(gamma)

    def forward(self, score_BHTS: Tensor) -> Tensor:
        stretched_BHTS = (self.zeta - self.gamma) * torch.softmax(score_BHTS.float(), -1) + self.gamma
        return stretched_BHTS.clamp(0, 1)


@NORMALIZER.register("sigmoid")
class Sigmoid(Normalizer):
    """sigmoid(z + b) of each score by itself. Gu et al. 2024, arXiv:2410.10781, without b.

    `normalized` divides a row by its sum + 1e-8, as in the authors' code (sail-sg/Attention-Sink, model_attn_sim.py).
    b = -ln(context) is that of Ramapuram et al. 2024, arXiv:2409.04431: the weights of a row then start with a sum of
    about 1, as those of softmax.
    """

    def __init__(self, geometry: Geometry, *, normalized: bool, bias: float | str) -> None:
        super().__init__()
        self.normalized = normalized
        known = {"off": 0.0, "auto": -math.log(geometry.context)}
        self.bias = known[bias] if isinstance(bias, str) else bias

    def forward(self, score_BHTS: Tensor) -> Tensor:
        weight_BHTS = torch.sigmoid(score_BHTS.float() + self.bias if self.bias else score_BHTS.float())
        return weight_BHTS / (weight_BHTS.sum(-1, keepdim=True) + 1e-8) if self.normalized else weight_BHTS
