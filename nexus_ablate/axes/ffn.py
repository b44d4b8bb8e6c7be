"""The FFN axis. The width d_ff is computed once, in config/resolve.py; no class here rounds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.axes.context import Context
from nexus_ablate.axes.conv import Conv, no_conv
from nexus_ablate.axes.modules import Geometry, Linear
from nexus_ablate.config.options import Registry
from nexus_ablate.kernels.grouped import grouped_linear
from nexus_ablate.kernels.linear import shared


@dataclass(frozen=True)
class FFNParts:
    """What an FFN is made from.

    Attributes:
        geometry: With the index of the block, `geometry.layer`.
        bias: Whether its linear layers have a bias.
        inner_norm: Comes before the output projection; the identity except in Sub-LN.
        conv: Makes a convolution of the conv axis from a site and a width.
    """

    geometry: Geometry
    bias: bool
    dropout: float
    inner_norm: nn.Module
    conv: Callable[[str, int], Conv] = no_conv


class FeedForward(nn.Module):
    """Abstract: (B, T, D) to (B, T, D), each token by itself."""

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        raise NotImplementedError


class MLP(FeedForward):
    """Abstract: down(inner_norm(activation(up(x)))), a hidden layer of width d_ff. An option defines `activation`."""

    gated = False
    """Whether the hidden layer also has a second projection of the input, `gate`."""

    def __init__(self, parts: FFNParts) -> None:
        super().__init__()
        geometry, bias = parts.geometry, parts.bias
        if self.gated:
            self.gate = Linear(geometry.d_model, geometry.d_ff, bias, role="ffn_in")
        self.up = Linear(geometry.d_model, geometry.d_ff, bias, role="ffn_in")
        self.inner_norm = parts.inner_norm
        self.down = Linear(geometry.d_ff, geometry.d_model, bias, role="ffn_out")
        self.dropout = nn.Dropout(parts.dropout)
        self.conv_in, self.conv_up = parts.conv("ffn_in", geometry.d_model), parts.conv("ffn_hidden", geometry.d_ff)
        self.conv_gate = parts.conv("ffn_hidden", geometry.d_ff) if self.gated else None

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_BTD = self.conv_in(x_BTD) if self.conv_in.acts else x_BTD
        return self.dropout(self.down(self.inner_norm(self.hidden(x_BTD))))

    def hidden(self, x_BTD: Tensor) -> Tensor:
        """The hidden layer, (B, T, d_ff)."""
        return self.activation(self._convolved(self.up(x_BTD), self.conv_up))

    def _convolved(self, projected: Tensor, conv: Conv | None) -> Tensor:
        return conv(projected) if conv is not None and conv.acts else projected

    def activation(self, up: Tensor) -> Tensor:
        raise NotImplementedError


class GatedMLP(MLP):
    """Abstract: down(inner_norm(product(gate(x), up(x)))). An option defines `product`."""

    gated = True

    def hidden(self, x_BTD: Tensor) -> Tensor:
        for_gate, for_up = shared(x_BTD, 2)
        gate, up = self.gate(for_gate), self.up(for_up)
        return self.product(self._convolved(gate, self.conv_gate), self._convolved(up, self.conv_up))

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        raise NotImplementedError


FFN: Registry[FeedForward] = Registry("ffn")


@FFN.register("relu")
class Relu(MLP):
    """max(0, up(x)). Vaswani et al. 2017, arXiv:1706.03762, Eq. 2."""

    def activation(self, up: Tensor) -> Tensor:
        return F.relu(up)


@FFN.register("relu2")
class SquaredRelu(MLP):
    """max(0, up(x))^2. So et al. 2021 (Primer), arXiv:2109.08668."""

    def activation(self, up: Tensor) -> Tensor:
        return F.relu(up).square()


@FFN.register("gelu")
class Gelu(MLP):
    """GELU(up(x)), the exact erf form. Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2."""

    def activation(self, up: Tensor) -> Tensor:
        return F.gelu(up)


@FFN.register("gelu_tanh")
class GeluTanh(MLP):
    """GELU(up(x)), the tanh form. Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2."""

    def activation(self, up: Tensor) -> Tensor:
        return F.gelu(up, approximate="tanh")


@FFN.register("silu")
class Silu(MLP):
    """up(x) sigmoid(up(x)). Ramachandran et al. 2017, arXiv:1710.05941, beta 1."""

    def activation(self, up: Tensor) -> Tensor:
        return F.silu(up)


@FFN.register("xielu")
class XIELU(MLP):
    """a_p z^2 + beta z for z = up(x) > 0, else a_n (exp(z) - 1 - z) + beta z. Huang & Schlag 2024, arXiv:2411.13010.

    a_p > 0 and a_n > beta are learned for each layer: softplus of a parameter, for a_n plus beta. As in the authors'
    code, the exponent is at most -1e-6.
    """

    def __init__(self, parts: FFNParts, *, alpha_p: float, alpha_n: float, beta: float) -> None:
        super().__init__(parts)
        self.beta = beta
        self.raw_alpha_p = nn.Parameter(torch.tensor(alpha_p).expm1().log())
        self.raw_alpha_n = nn.Parameter(torch.tensor(alpha_n - beta).expm1().log())

    def activation(self, up: Tensor) -> Tensor:
        alpha_p, alpha_n = F.softplus(self.raw_alpha_p), self.beta + F.softplus(self.raw_alpha_n)
        below = (torch.expm1(up.clamp(max=-1e-6)) - up) * alpha_n
        return (torch.where(up > 0, alpha_p * up.square(), below) + self.beta * up).to(up.dtype)


@FFN.register("polynorm")
class PolyNorm(MLP):
    """w_1 N(z^3) + w_2 N(z^2) + w_3 N(z) + b, z = up(x), N an RMSNorm without gain. Zhuo et al. 2024, arXiv:2411.03884.

    w starts at 1/3 and b at 0, both for each layer, as in the authors' code (BryceZhuo/PolyCom); in float32 here.
    """

    def __init__(self, parts: FFNParts, *, eps: float) -> None:
        super().__init__(parts)
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.full((3,), 1 / 3)), nn.Parameter(torch.zeros(1))

    def activation(self, up: Tensor) -> Tensor:
        z = up.float()
        normed = (F.rms_norm(power, power.shape[-1:], None, self.eps) for power in (z**3, z**2, z))
        terms = [weight * power for weight, power in zip(self.weight, normed, strict=True)]
        return (terms[0] + terms[1] + terms[2] + self.bias).to(up.dtype)


@FFN.register("bilinear")
class Bilinear(GatedMLP):
    """gate(x) * up(x). Shazeer 2020, arXiv:2002.05202, Eq. 6."""

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate * up


@FFN.register("glu")
class GLU(GatedMLP):
    """sigmoid(gate(x)) * up(x). Shazeer 2020, arXiv:2002.05202, Eq. 6."""

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.sigmoid(gate) * up


@FFN.register("reglu")
class ReGLU(GatedMLP):
    """max(0, gate(x)) * up(x). Shazeer 2020, arXiv:2002.05202, Eq. 6."""

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.relu(gate) * up


@FFN.register("geglu")
class GEGLU(GatedMLP):
    """GELU(gate(x)) * up(x). Shazeer 2020, arXiv:2002.05202, Eq. 6."""

    def __init__(self, parts: FFNParts, *, tanh: bool) -> None:
        super().__init__(parts)
        self.approximate = "tanh" if tanh else "none"

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate=self.approximate) * up


@FFN.register("swiglu")
class SwiGLU(GatedMLP):
    """SiLU(gate(x)) * up(x). Shazeer 2020, arXiv:2002.05202, Eq. 6."""

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


@FFN.register("ngpt")
class ScaledSwiGLU(GatedMLP):
    """SiLU(sqrt(D) s_g gate(x)) * sqrt(D) s_u up(x), a learned factor for each hidden channel, initially `start`.

    Loshchilov et al. 2024 (nGPT), arXiv:2410.01131, Eq. 20 and 21, as in the authors' code (NVIDIA/ngpt, model.py).
    """

    def __init__(self, parts: FFNParts, *, start: float) -> None:
        super().__init__(parts)
        self.factor = parts.geometry.d_model**0.5
        self.scale_gate = nn.Parameter(torch.full((parts.geometry.d_ff,), start))
        self.scale_up = nn.Parameter(torch.full((parts.geometry.d_ff,), start))

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        scaled_gate = (gate * (self.factor * self.scale_gate)).to(gate.dtype)
        return F.silu(scaled_gate) * (up * (self.factor * self.scale_up)).to(up.dtype)


@FFN.register("reglu2")
class SquaredReGLU(GatedMLP):
    """max(0, gate(x))^2 * up(x). Ma et al. 2025 (BitNet b1.58 2B4T), arXiv:2504.12285."""

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.relu(gate).square() * up


@FFN.register("swiglu_clamped")
class ClampedSwiGLU(GatedMLP):
    """g sigmoid(alpha g) * (u + up_shift), g = min(gate(x), limit), u = up(x) within +-limit.

    OpenAI 2025 (gpt-oss), arXiv:2508.10925, as in the authors' code (openai/gpt-oss, torch/model.py), where it is the
    FFN of each expert.
    """

    def __init__(self, parts: FFNParts, *, alpha: float, limit: float, up_shift: float) -> None:
        super().__init__(parts)
        self.alpha, self.limit, self.up_shift = alpha, limit, up_shift

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * F.sigmoid(self.alpha * gate) * (up + self.up_shift)


@FFN.register("moe")
class MixtureOfExperts(FeedForward):
    """sum over the `active` most probable experts of p_e F_e(x), p = softmax(router(x)), F_e a SwiGLU of width d_ff.

    The p of the chosen experts are divided by their sum. Jiang et al. 2024 (Mixtral), arXiv:2401.04088, section 2.1. No
    token is dropped, so no output depends on other tokens. The balance loss is `balance` E sum_e f_e P_e, f_e the
    experts' shares of the tokens (they sum to `active`) and P_e the mean p_e. Fedus et al. 2021 (Switch),
    arXiv:2101.03961, Eq. 4 to 6, here for each layer, summed over the layers.
    """

    def __init__(self, parts: FFNParts, *, experts: int, active: int, balance: float) -> None:
        super().__init__()
        geometry = parts.geometry
        self.experts, self.active, self.balance = experts, active, balance
        self.router = Linear(geometry.d_model, experts, bias=False, role="gate")
        wide, narrow = (experts, geometry.d_ff, geometry.d_model), (experts, geometry.d_model, geometry.d_ff)
        self.gate, self.up = nn.Parameter(torch.empty(wide)), nn.Parameter(torch.empty(wide))
        self.inner_norm = parts.inner_norm
        self.down = nn.Parameter(torch.empty(narrow))
        self.roles = {"gate": "ffn_in", "up": "ffn_in", "down": "ffn_out"}
        self.dropout = nn.Dropout(parts.dropout)

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        p_NE = torch.softmax(self.router(x_ND).float(), -1)
        chosen_p_Na, expert_Na = p_NE.topk(self.active, -1)
        share_Na = chosen_p_Na / chosen_p_Na.sum(-1, keepdim=True)
        order = expert_Na.flatten().argsort(stable=True)
        tokens_E = torch.zeros_like(p_NE[0]).scatter_add_(
            0, expert_Na.flatten(), torch.ones_like(chosen_p_Na.flatten())
        )
        ends_E = tokens_E.cumsum(0).to(torch.int32)
        row_of = order // self.active
        rows = x_ND[row_of]
        hidden = F.silu(grouped_linear(rows, self.gate, ends_E)) * grouped_linear(rows, self.up, ends_E)
        out = grouped_linear(self.inner_norm(hidden), self.down, ends_E)
        weighted = out * share_Na.flatten()[order, None].to(out.dtype)
        y_ND = torch.zeros_like(x_ND, dtype=out.dtype).index_add(0, row_of, weighted)
        self._contribute(p_NE, tokens_E / len(x_ND), context)
        return self.dropout(y_ND.view(x_BTD.shape))

    def _contribute(self, p_NE: Tensor, tokens_E: Tensor, context: Context) -> None:
        """The balance loss, the mean entropy of the router in nats, and the largest share of the tokens over the mean.

        Args:
            tokens_E: The share of the tokens that each expert takes; they sum to `active`.
        """
        if self.balance:
            context.add_loss("balance_loss", self.balance * self.experts * (tokens_E * p_NE.mean(0)).sum())
        context.add_figure("router_entropy", torch.special.entr(p_NE).sum(-1).mean())
        context.add_figure("largest_load", tokens_E.max() * self.experts / self.active)
