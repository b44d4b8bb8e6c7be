"""The placement axis: how a block wires its two branches, its norms and its residual path.

A placement is one final class with a forward of a few lines. It determines the wiring, the places of norms, and the
init gain by role; its YAML says whether it has a final norm and whether q, k and v are normed. Branches and norms are
passed in. In the docstrings x is the residual stream, A attention, F the FFN, f either of them, N a norm, L the number
of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.axes.context import Context
from nexus_ablate.axes.modules import Geometry
from nexus_ablate.config.options import Registry
from nexus_ablate.config.roles import SMALL_MAP, VECTOR


@dataclass(frozen=True)
class Parts:
    """The parts of a block: functions that make its branches and norms, the sizes of the model, and the block's index.

    A branch is made with or without an inner norm, which comes before its output projection.
    """

    attn: Callable[[bool], nn.Module]
    ffn: Callable[[bool], nn.Module]
    norm: Callable[[str], nn.Module]
    geometry: Geometry
    layer: int


class Block(nn.Module):
    """Abstract block. `forward` takes and returns the residual stream; it passes `context` on to both branches.

    The residual stream is one tensor (B, T, D) unless the placement's `enter` returns something else.
    """

    norm_ffn_after_sum = False
    """Whether `norm_ffn` normalizes the residual stream after an addition to it, not just the FFN's input or output."""

    def __init__(self, parts: Parts, inner_norms: bool = False) -> None:
        super().__init__()
        self.attn, self.ffn = parts.attn(inner_norms), parts.ffn(inner_norms)
        self.init_gains: dict[str, float] = {}
        """Factors on the init axis's standard deviations, by role; 1 for all other roles."""

    def enter(self, x_BTD: Tensor) -> Any:
        """The residual stream at the first block, from the embedding."""
        return x_BTD

    def residual(self, stream: Any) -> Tensor:
        """The tensor that the next branch reads and probes measure, (B, T, D)."""
        return stream

    def leave(self, stream: Any, final_norm: nn.Module, context: Context) -> Tensor:
        """The input of the head, (B, T, D)."""
        return final_norm(stream)

    def forward(self, x_BTD: Any, context: Context) -> Any:
        raise NotImplementedError


PLACEMENT: Registry[Block] = Registry("placement")
BRANCH_MAPS = ("value", "attn_out", "ffn_in", "ffn_out")
"""Roles of the matrices that scale a branch's output: all except queries and keys."""


class NormedBranches(Block):
    """Abstract block with a norm for each branch."""

    def __init__(self, parts: Parts, inner_norms: bool = False) -> None:
        super().__init__(parts, inner_norms)
        self.norm_attn, self.norm_ffn = parts.norm("attn"), parts.norm("ffn")


@PLACEMENT.register("pre")
class PreNorm(NormedBranches):
    """x + f(N(x)). Xiong et al. 2020, arXiv:2002.04745, Table 1."""

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = x_BTD + self.attn(self.norm_attn(x_BTD), context)
        return x_BTD + self.ffn(self.norm_ffn(x_BTD), context)


@PLACEMENT.register("post")
class PostNorm(NormedBranches):
    """N(x + f(x)). Vaswani et al. 2017, arXiv:1706.03762, section 3.1."""

    norm_ffn_after_sum = True

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = self.norm_attn(x_BTD + self.attn(x_BTD, context))
        return self.norm_ffn(x_BTD + self.ffn(x_BTD, context))


@PLACEMENT.register("hybrid")
class Hybrid(NormedBranches):
    """x + A(N(x)), then N(x + F(x)): pre-norm attention, post-norm FFN.

    Not the published HybridNorm (arXiv:2503.04598), which norms q, k and v and feeds the FFN a normed stream.
    """

    norm_ffn_after_sum = True

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = x_BTD + self.attn(self.norm_attn(x_BTD), context)
        return self.norm_ffn(x_BTD + self.ffn(x_BTD, context))


@PLACEMENT.register("hybridnorm")
class HybridNorm(Block):
    """z = N(x + A(x)), then z + F(z), with q, k and v normed in A. Zhuo et al. 2025, arXiv:2503.04598, Eq. 6.

    The FFN adds to the normed stream; nothing norms attention's input or the block's output.
    """

    norm_ffn_after_sum = True

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.norm_ffn = parts.norm("ffn")

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = self.norm_ffn(x_BTD + self.attn(x_BTD, context))
        return x_BTD + self.ffn(x_BTD, context)


@PLACEMENT.register("hybridnorm_star")
class HybridNormStar(Block):
    """HybridNorm whose first block is pre-norm, q, k and v normed as elsewhere. arXiv:2503.04598, Eq. 7."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.norm_attn = parts.norm("attn") if parts.layer == 0 else None
        self.norm_ffn = parts.norm("ffn")
        self.norm_ffn_after_sum = parts.layer > 0

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        if self.norm_attn is None:
            x_BTD = self.norm_ffn(x_BTD + self.attn(x_BTD, context))
            return x_BTD + self.ffn(x_BTD, context)
        x_BTD = x_BTD + self.attn(self.norm_attn(x_BTD), context)
        return x_BTD + self.ffn(self.norm_ffn(x_BTD), context)


@PLACEMENT.register("deepnorm")
class DeepNorm(NormedBranches):
    """N(residual_scale x + f(x)), residual_scale (2L)^(1/4); init gain (8L)^(-1/4) on value, output and both FFN maps.

    Wang et al. 2022, arXiv:2203.00555, Fig. 2 (decoder-only), with Xavier init. The paper's FFN has two matrices; in a
    gated FFN the gate is scaled like the other input projection. Setting either constant to 1 removes it.
    """

    norm_ffn_after_sum = True

    def __init__(self, parts: Parts, *, residual_scale: float | str, init_gain: float | str) -> None:
        super().__init__(parts)
        self.residual_scale = (
            (2 * parts.geometry.n_layers) ** 0.25 if residual_scale == "auto" else float(residual_scale)
        )
        gain = (8 * parts.geometry.n_layers) ** -0.25 if init_gain == "auto" else float(init_gain)
        self.init_gains = dict.fromkeys(BRANCH_MAPS, gain)

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = self.norm_attn(self.residual_scale * x_BTD + self.attn(x_BTD, context))
        return self.norm_ffn(self.residual_scale * x_BTD + self.ffn(x_BTD, context))


@PLACEMENT.register("sandwich")
class Sandwich(NormedBranches):
    """x + N(f(N(x))). Ding et al. 2021 (CogView), arXiv:2105.13290; Peri-LN, arXiv:2502.02732; Gemma-2."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.norm_attn_out, self.norm_ffn_out = parts.norm("attn_out"), parts.norm("ffn_out")

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = x_BTD + self.norm_attn_out(self.attn(self.norm_attn(x_BTD), context))
        return x_BTD + self.norm_ffn_out(self.ffn(self.norm_ffn(x_BTD), context))


@PLACEMENT.register("output")
class OutputNorm(Block):
    """x + N(f(x)). OLMo Team 2025 (OLMo-2), arXiv:2501.00656; with initial gain 0 Swin-v2's, arXiv:2111.09883."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.norm_attn, self.norm_ffn = parts.norm("attn_out"), parts.norm("ffn_out")

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = x_BTD + self.norm_attn(self.attn(x_BTD, context))
        return x_BTD + self.norm_ffn(self.ffn(x_BTD, context))


@PLACEMENT.register("subln")
class SubLN(NormedBranches):
    """x + W N(g(N(x))), f = W g: pre-norm with a second norm inside each branch, before its output projection.

    Xavier init with a gain of sqrt(ln 2L) on value, output and both FFN matrices. Wang et al. 2022 (Magneto),
    arXiv:2210.06423 (decoder-only); matrices as in torchscale's decoder.py. In a gated FFN the gate is scaled like the
    other input matrix. GPT-2's 1/sqrt(2L) would undo the gain: after 400 steps, 2 layers had a loss of 2.02 nats with
    it and 1.73 as published (d_model 128, context 64, mean of 3 seeds).
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, inner_norms=True)
        self.init_gains = dict.fromkeys(BRANCH_MAPS, math.sqrt(math.log(2 * parts.geometry.n_layers)))

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = x_BTD + self.attn(self.norm_attn(x_BTD), context)
        return x_BTD + self.ffn(self.norm_ffn(x_BTD), context)


@PLACEMENT.register("mixln")
class MixLN(NormedBranches):
    """Post-norm in the first floor(post_fraction L) blocks, at least one; pre-norm in the others.

    Li et al. 2024, arXiv:2412.13795. The authors use a quarter: 3 of 12, 6 of 24 blocks. In their code every linear
    layer starts at N(0, 0.02^2), without GPT-2's 1/sqrt(2L); their embedding, which is untied, has std sqrt(2/5).
    """

    def __init__(self, parts: Parts, *, post_fraction: float) -> None:
        super().__init__(parts)
        self.post = parts.layer < max(1, math.floor(round(post_fraction * parts.geometry.n_layers, 6)))
        self.norm_ffn_after_sum = self.post

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        if self.post:
            x_BTD = self.norm_attn(x_BTD + self.attn(x_BTD, context))
            return self.norm_ffn(x_BTD + self.ffn(x_BTD, context))
        x_BTD = x_BTD + self.attn(self.norm_attn(x_BTD), context)
        return x_BTD + self.ffn(self.norm_ffn(x_BTD), context)


@PLACEMENT.register("lns")
class LayerNormScaling(NormedBranches):
    """x + f(N(x) / sqrt(l)), l the block from 1, the same in both branches. Sun et al. 2025, arXiv:2502.05795.

    In the authors' code (lmsdss/LayerNorm-Scaling) every linear layer starts at N(0, 0.02^2), without GPT-2's
    1/sqrt(2L).
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.input_scale = (parts.layer + 1) ** -0.5

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = x_BTD + self.attn(self.input_scale * self.norm_attn(x_BTD), context)
        return x_BTD + self.ffn(self.input_scale * self.norm_ffn(x_BTD), context)


@PLACEMENT.register("residual_scale")
class ResidualScale(NormedBranches):
    """x + branch_scale f(N(x)) with a constant, by default 1 / sqrt(2L). Unlike a factor on the init, it doesn't train.

    The 1 / sqrt(additions) form of De & Smith 2020, arXiv:2002.10444, with a norm in the branch. It prescribes GPT-2's
    init without that init's own 1 / sqrt(2L): the branches then start like those of `placement=pre`, and differ from
    them only in training.
    """

    def __init__(self, parts: Parts, *, branch_scale: float | str) -> None:
        super().__init__(parts)
        self.branch_scale = (2 * parts.geometry.n_layers) ** -0.5 if branch_scale == "auto" else float(branch_scale)

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = x_BTD + self.branch_scale * self.attn(self.norm_attn(x_BTD), context)
        return x_BTD + self.branch_scale * self.ffn(self.norm_ffn(x_BTD), context)


@PLACEMENT.register("layerscale")
class LayerScale(NormedBranches):
    """x + scale * f(N(x)), a learned vector per branch. Touvron et al. 2021 (CaiT), arXiv:2103.17239.

    It starts at 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond, as in the paper.
    """

    def __init__(self, parts: Parts, *, start: float | str) -> None:
        super().__init__(parts)
        published = 0.1 if parts.geometry.n_layers <= 18 else 1e-5 if parts.geometry.n_layers <= 24 else 1e-6
        first = torch.full((parts.geometry.d_model,), published if start == "auto" else float(start))
        self.scale_attn, self.scale_ffn = nn.Parameter(first), nn.Parameter(first.clone())

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = x_BTD + self.scale_attn * self.attn(self.norm_attn(x_BTD), context)
        return x_BTD + self.scale_ffn * self.ffn(self.norm_ffn(x_BTD), context)


@PLACEMENT.register("rezero")
class ReZero(Block):
    """x + scale f(x), one learned scalar per block for both branches, initially 0: every block starts as the identity.

    Bachlechner et al. 2020, arXiv:2003.04887, Eq. 1; shared as in the authors' rztx.py. With `norm`, x + scale f(N(x)).
    """

    def __init__(self, parts: Parts, *, norm: bool) -> None:
        super().__init__(parts)
        self.norm_attn = parts.norm("attn") if norm else nn.Identity()
        self.norm_ffn = parts.norm("ffn") if norm else nn.Identity()
        self.scale = nn.Parameter(torch.tensor(0.0))

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = x_BTD + self.scale * self.attn(self.norm_attn(x_BTD), context)
        return x_BTD + self.scale * self.ffn(self.norm_ffn(x_BTD), context)


@PLACEMENT.register("dual")
class ResiDual(NormedBranches):
    """Two streams: x <- N(x + f(x)) and r <- r + f(x), both from the embedding; the head sees x + N_final(r).

    Xie et al. 2023 (ResiDual), arXiv:2304.14802; branches read x alone, so x is what probes measure.
    """

    norm_ffn_after_sum = True

    def enter(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return x_BTD, x_BTD

    def residual(self, stream: tuple[Tensor, Tensor]) -> Tensor:
        return stream[0]

    def leave(self, stream: tuple[Tensor, Tensor], final_norm: nn.Module, context: Context) -> Tensor:
        post_BTD, pre_BTD = stream
        return post_BTD + final_norm(pre_BTD)

    def forward(self, x_BTD: tuple[Tensor, Tensor], context: Context) -> tuple[Tensor, Tensor]:
        post_BTD, pre_BTD = x_BTD
        branch_BTD = self.attn(post_BTD, context)
        post_BTD, pre_BTD = self.norm_attn(post_BTD + branch_BTD), pre_BTD + branch_BTD
        branch_BTD = self.ffn(post_BTD, context)
        return self.norm_ffn(post_BTD + branch_BTD), pre_BTD + branch_BTD


@PLACEMENT.register("ngpt")
class NormalizedSteps(Block):
    """h <- N(h + |a| (N(f(h)) - h)), N(x) = x / |x|, a learned vector a for each branch. Loshchilov et al. 2024 (nGPT).

    arXiv:2410.01131, section 2.2.2. As in the authors' code (NVIDIA/ngpt, model.py), the parameter is a times
    `scale` / `alpha`, so that it starts at `scale`, and N has no eps; here lengths below 1e-12 are replaced by 1e-12.
    """

    def __init__(self, parts: Parts, *, alpha: float, scale: float | str) -> None:
        super().__init__(parts)
        first = parts.geometry.d_model**-0.5 if scale == "auto" else float(scale)
        self.factor = alpha / first
        self.step_attn = nn.Parameter(torch.full((parts.geometry.d_model,), first))
        self.step_ffn = nn.Parameter(torch.full((parts.geometry.d_model,), first))

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = self.stepped(x_BTD, self.attn(x_BTD, context), self.step_attn)
        return self.stepped(x_BTD, self.ffn(x_BTD, context), self.step_ffn)

    def stepped(self, x_BTD: Tensor, branch_BTD: Tensor, step_D: Tensor) -> Tensor:
        """The stream after a step towards the branch's output on the unit sphere, in float32."""
        start_BTD, end_BTD = F.normalize(x_BTD.float(), dim=-1), F.normalize(branch_BTD.float(), dim=-1)
        return F.normalize(start_BTD + (self.factor * step_D).abs() * (end_BTD - start_BTD), dim=-1)


@PLACEMENT.register("siamese")
class SiameseNorm(NormedBranches):
    """Two streams: x is normed before each branch, y is not; f reads N(x + N(y)), and z = f(...) joins both.

    x <- N(x), z = f(N(x + N(y))), x <- x + z / sqrt(2 l), y <- y + z in block l from 1; the head sees
    N_final(N(x) + N(y)). Both streams start as the embedding. Li et al. 2026, arXiv:2602.08064, as in the authors' code
    (Qwen-Applications/SiameseNorm, deit-model-siamesenorm.py; its OLMo file has the same end). Probes measure y.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.norm_attn_x, self.norm_attn_y = parts.norm("attn_out"), parts.norm("attn_out")
        self.norm_ffn_x, self.norm_ffn_y = parts.norm("ffn_out"), parts.norm("ffn_out")
        last = parts.layer == parts.geometry.n_layers - 1
        self.norm_end_x = parts.norm("ffn_out") if last else None
        self.norm_end_y = parts.norm("ffn_out") if last else None
        self.share = (2 * (parts.layer + 1)) ** -0.5

    def enter(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return x_BTD, x_BTD

    def residual(self, stream: tuple[Tensor, Tensor]) -> Tensor:
        return stream[1]

    def leave(self, stream: tuple[Tensor, Tensor], final_norm: nn.Module, context: Context) -> Tensor:
        assert self.norm_end_x is not None and self.norm_end_y is not None
        return final_norm(self.norm_end_x(stream[0]) + self.norm_end_y(stream[1]))

    def forward(self, x_BTD: tuple[Tensor, Tensor], context: Context) -> tuple[Tensor, Tensor]:
        post_BTD, pre_BTD = x_BTD
        post_BTD = self.norm_attn_x(post_BTD)
        branch_BTD = self.attn(self.norm_attn(post_BTD + self.norm_attn_y(pre_BTD)), context)
        post_BTD, pre_BTD = self.norm_ffn_x(post_BTD + self.share * branch_BTD), pre_BTD + branch_BTD
        branch_BTD = self.ffn(self.norm_ffn(post_BTD + self.norm_ffn_y(pre_BTD)), context)
        return post_BTD + self.share * branch_BTD, pre_BTD + branch_BTD


@PLACEMENT.register("parallel")
class Parallel(Block):
    """x + A(N(x)) + F(N(x)), one norm for both (GPT-J; Chowdhery et al. 2022, PaLM, arXiv:2204.02311, section 2).

    With two norms, x + A(N1(x)) + F(N2(x)): Black et al. 2022 (GPT-NeoX), arXiv:2204.06745.
    """

    def __init__(self, parts: Parts, *, norms: int) -> None:
        super().__init__(parts)
        self.norm_attn = parts.norm("attn")
        self.norm_ffn = parts.norm("ffn") if norms == 2 else None

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        attn_in_BTD = self.norm_attn(x_BTD)
        ffn_in_BTD = attn_in_BTD if self.norm_ffn is None else self.norm_ffn(x_BTD)
        return x_BTD + self.attn(attn_in_BTD, context) + self.ffn(ffn_in_BTD, context)


class Connection(nn.Module):
    """The hyper-connection of one branch: what it reads from n streams, how they mix, and what each receives.

    Shape letters: n streams, m = n + 1 mixtures, the first of which the branch reads.

    Args:
        index: The index of the branch, from 0; at the start it reads stream index mod n.
        dynamic: Whether the weights depend on the streams too.
    """

    def __init__(self, d_model: int, streams: int, index: int, dynamic: bool) -> None:
        super().__init__()
        read_n1 = F.one_hot(torch.tensor([index % streams]), streams).float().T
        self.alpha_nm = nn.Parameter(torch.cat((read_n1, torch.eye(streams)), 1))
        self.beta_n = nn.Parameter(torch.ones(streams))
        self.roles = {"alpha_nm": VECTOR}
        self.norm = None
        if dynamic:
            self.norm = nn.LayerNorm(d_model)
            self.alpha_map_Dm = nn.Parameter(torch.empty(d_model, streams + 1))
            self.beta_map_D = nn.Parameter(torch.empty(d_model))
            self.roles |= dict.fromkeys(("alpha_map_Dm", "beta_map_D"), SMALL_MAP)
            self.stds = dict.fromkeys(("alpha_map_Dm", "beta_map_D"), 0.0)
            self.alpha_scale, self.beta_scale = nn.Parameter(torch.tensor(0.01)), nn.Parameter(torch.tensor(0.01))

    def forward(self, x_BTnD: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """The streams after the branch."""
        alpha_nm, beta_n = self.alpha_nm, self.beta_n
        if self.norm is not None:
            normed_BTnD = self.norm(x_BTnD)
            alpha_nm = alpha_nm + self.alpha_scale * torch.tanh(normed_BTnD @ self.alpha_map_Dm)
            beta_n = beta_n + self.beta_scale * torch.tanh(normed_BTnD @ self.beta_map_D)
        mixed_BTmD = alpha_nm.transpose(-1, -2) @ x_BTnD
        out_BTD = branch(mixed_BTmD[..., 0, :])
        return mixed_BTmD[..., 1:, :] + beta_n[..., None] * out_BTD[..., None, :]


class ManifoldConnection(nn.Module):
    """As `Connection`, with a doubly stochastic mixture of the streams, and what is read and received not negative.

    From the normed streams as one vector of n D channels: read sigmoid(.), received 2 sigmoid(.), mixed by `iterations`
    of Sinkhorn and Knopp on exp(.), each of a constant plus a factor, initially 0.01, times a projection, initially 0.

    Args:
        index: The index of the branch, from 0; at the start it reads mostly stream index mod n.
    """

    def __init__(self, d_model: int, streams: int, index: int, iterations: int) -> None:
        super().__init__()
        self.streams, self.iterations = streams, iterations
        read_n = torch.full((streams,), -3.0)
        read_n[index % streams] = 3.0
        received_n, mixed_nn = torch.zeros(streams), 6 * torch.eye(streams) - 3
        self.constant = nn.Parameter(torch.cat((read_n, received_n, mixed_nn.flatten())))
        self.map = nn.Parameter(torch.empty(streams * d_model, len(self.constant)))
        self.factors = nn.Parameter(torch.full((3,), 0.01))
        self.roles, self.stds = {"map": SMALL_MAP}, {"map": 0.0}

    def forward(self, x_BTnD: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """The streams after the branch."""
        n, flat = self.streams, x_BTnD.flatten(2).float()
        sizes = (n, n, n * n)
        projected = F.rms_norm(flat, flat.shape[-1:], None, 1e-6) @ self.map
        pieces = zip(projected.split(sizes, -1), self.constant.split(sizes), self.factors, strict=True)
        read, received, mixed = (factor * part + constant for part, constant, factor in pieces)
        mix_BTnn = doubly_stochastic(mixed.unflatten(-1, (n, n)), self.iterations)
        out_BTD = branch((torch.sigmoid(read)[..., None] * x_BTnD).sum(-2))
        return mix_BTnn @ x_BTnD.float() + 2 * torch.sigmoid(received)[..., None] * out_BTD[..., None, :]


def doubly_stochastic(logit_nn: Tensor, iterations: int) -> Tensor:
    """exp(logits), columns and rows divided by their sums in turn (Sinkhorn & Knopp 1967), (..., n, n)."""
    matrix_nn = torch.exp(logit_nn - logit_nn.amax((-2, -1), keepdim=True))
    for _ in range(iterations):
        matrix_nn = matrix_nn / matrix_nn.sum(-2, keepdim=True)
        matrix_nn = matrix_nn / matrix_nn.sum(-1, keepdim=True)
    return matrix_nn


class Streams(NormedBranches):
    """Abstract pre-norm block of several residual streams, all the embedding at first; the head reads their sum."""

    connect_attn: nn.Module
    connect_ffn: nn.Module

    def __init__(self, parts: Parts, streams: int) -> None:
        super().__init__(parts)
        self.streams = streams

    def enter(self, x_BTD: Tensor) -> Tensor:
        return x_BTD[:, :, None].expand(-1, -1, self.streams, -1)

    def residual(self, stream: Tensor) -> Tensor:
        return stream.sum(2)

    def leave(self, stream: Tensor, final_norm: nn.Module, context: Context) -> Tensor:
        return final_norm(stream.sum(2))

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTnD = self.connect_attn(x_BTD, lambda h: self.attn(self.norm_attn(h), context))
        return self.connect_ffn(x_BTnD, lambda h: self.ffn(self.norm_ffn(h), context))


@PLACEMENT.register("hyper")
class HyperConnections(Streams):
    """n streams: f reads a mixture of them, they mix, and each receives a share of f. Zhu et al., arXiv:2409.19606.

    H <- A_r' H + beta f(N(A_m' H)): Eq. 2 to 5, with dynamic weights as in Algorithm 2 of its appendix, tanh of a
    projection of the normed streams times 0.01. It starts as Eq. 14: as pre-norm, with n times its sum. As in the
    paper, the projections decay and the constants don't. The paper also scales the initial output projections "by a
    factor of sqrt(n)" for the sum of the streams. We don't: it doesn't say whether that multiplies or divides, and
    `hyper` would then differ from `pre` in its first values too.
    """

    def __init__(self, parts: Parts, *, streams: int, dynamic: bool) -> None:
        super().__init__(parts, streams)
        self.connect_attn = Connection(parts.geometry.d_model, streams, 2 * parts.layer, dynamic)
        self.connect_ffn = Connection(parts.geometry.d_model, streams, 2 * parts.layer + 1, dynamic)


@PLACEMENT.register("mhc")
class ManifoldHyperConnections(Streams):
    """Hyper-connections whose streams mix by doubly stochastic matrices. Xie et al. 2025 (mHC), arXiv:2512.24880.

    H <- H_res H + H_post f(N(H_pre H)), H_pre = sigmoid, H_post = 2 sigmoid, H_res = Sinkhorn-Knopp, all of projections
    of the normed streams: Eq. 7 to 9. The initial values are those that PaddleFleet (hyper_connection.py,
    `mhc_single_stream_init`) takes from appendix A.6 of the paper; its version 2, which we read, has the 0.01 alone.
    They are pre-norm, times n, and tell the streams apart: with constants that are alike for all streams and
    projections of 0, the streams would stay equal for ever. Decay and sum of the streams are those of `hyper`.
    """

    def __init__(self, parts: Parts, *, streams: int, iterations: int) -> None:
        super().__init__(parts, streams)
        self.connect_attn = ManifoldConnection(parts.geometry.d_model, streams, 2 * parts.layer, iterations)
        self.connect_ffn = ManifoldConnection(parts.geometry.d_model, streams, 2 * parts.layer + 1, iterations)


class DepthAttention(nn.Module):
    """sum_i a_i v_i over the sources v_i, a the softmax over i of w . N(v_i), N an RMSNorm with a gain.

    w starts at 0, so that all sources have the same weight. Shape letter: n sources.
    """

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.query, self.gain = nn.Parameter(torch.zeros(d_model)), nn.Parameter(torch.ones(d_model))

    def forward(self, sources: Sequence[Tensor]) -> Tensor:
        source_BTnD = torch.stack(tuple(sources), 2)
        key_BTnD = F.rms_norm(source_BTnD, self.gain.shape, self.gain, self.eps)
        weight_BTn1 = F.linear(key_BTnD, self.query[None]).softmax(2)
        return (weight_BTn1.transpose(2, 3) @ source_BTnD).squeeze(2)


@PLACEMENT.register("attnres")
class AttentionResiduals(NormedBranches):
    """f(N(h)), h the attention of a learned query over the embedding and the outputs of all branches before, not a sum.

    Kimi Team 2026 (Attention Residuals), arXiv:2603.15031, Eq. 2 to 6 and Fig. 2: the outputs of `block` branches in
    turn are summed to one source, `block=1` being Full AttnRes; the sum so far is a source too, and the head reads one
    more such mixture. The first branch reads the embedding, the only source, so the paper's query there would do
    nothing; a block has the queries of its FFN and of what follows it. With one source for all branches, the start is
    that of pre-norm except for the eps of its norms: h is half of the sum.
    """

    def __init__(self, parts: Parts, *, block: int, eps: float) -> None:
        super().__init__(parts)
        self.layer, self.block = parts.layer, block
        self.read_ffn, self.read_next = (
            DepthAttention(parts.geometry.d_model, eps),
            DepthAttention(parts.geometry.d_model, eps),
        )

    def enter(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        return x_BTD, x_BTD

    def residual(self, stream: tuple[Tensor, ...]) -> Tensor:
        return stream[0]

    def leave(self, stream: tuple[Tensor, ...], final_norm: nn.Module, context: Context) -> Tensor:
        return final_norm(stream[0])

    def forward(self, x_BTD: tuple[Tensor, ...], context: Context) -> tuple[Tensor, ...]:
        read_BTD, *sources = x_BTD
        sources = self.with_branch(sources, 2 * self.layer, self.attn(self.norm_attn(read_BTD), context))
        read_BTD = self.read_ffn(sources)
        sources = self.with_branch(sources, 2 * self.layer + 1, self.ffn(self.norm_ffn(read_BTD), context))
        return self.read_next(sources), *sources

    def with_branch(self, sources: list[Tensor], index: int, out_BTD: Tensor) -> list[Tensor]:
        """The sources after the branch of this index, from 0: its output is a new one, or joins the last."""
        out_BTD = out_BTD.to(sources[0].dtype)  # sums stay in the precision of the residual stream
        if index % self.block == 0:
            return [*sources, out_BTD]
        return [*sources[:-1], sources[-1] + out_BTD]


@PLACEMENT.register("x0")
class EmbeddingSkip(NormedBranches):
    """Pre-norm on residual x + skip x0, x0 the embedding, two learned scalars for each block. Karpathy 2026, nanochat.

    As in the authors' code of 2026-01-11 (karpathy/nanochat, commit aa530cd, gpt.py; dev/LOG.md), after
    KellerJordan/modded-nanogpt. There x0 is normed (`embed_norm=on`).
    """

    def __init__(self, parts: Parts, *, residual: float, skip: float) -> None:
        super().__init__(parts)
        self.residual_scale, self.skip_scale = nn.Parameter(torch.tensor(residual)), nn.Parameter(torch.tensor(skip))

    def enter(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return x_BTD, x_BTD

    def residual(self, stream: tuple[Tensor, Tensor]) -> Tensor:
        return stream[0]

    def leave(self, stream: tuple[Tensor, Tensor], final_norm: nn.Module, context: Context) -> Tensor:
        return final_norm(stream[0])

    def forward(self, x_BTD: tuple[Tensor, Tensor], context: Context) -> tuple[Tensor, Tensor]:
        stream_BTD, first_BTD = x_BTD
        stream_BTD = self.residual_scale * stream_BTD + self.skip_scale * first_BTD
        stream_BTD = stream_BTD + self.attn(self.norm_attn(stream_BTD), context)
        return stream_BTD + self.ffn(self.norm_ffn(stream_BTD), context), first_BTD
