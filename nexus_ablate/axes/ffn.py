"""The FFN axis. The width d_ff is computed once, in config/resolve.py; no class here rounds it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.axes.context import Context
from nexus_ablate.axes.roles import Geometry, Linear
from nexus_ablate.config.options import Registry
from nexus_ablate.kernels.linear import shared


@dataclass(frozen=True)
class FFNParts:
    """What an FFN is made from.

    Attributes:
        geometry: With the index of the block, `geometry.layer`.
        bias: Whether its linear layers have a bias.
        inner_norm: Comes before the output projection; the identity except in Sub-LN.
    """

    geometry: Geometry
    bias: bool
    dropout: float
    inner_norm: nn.Module


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

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        return self.dropout(self.down(self.inner_norm(self.hidden(x_BTD))))

    def hidden(self, x_BTD: Tensor) -> Tensor:
        """The hidden layer, (B, T, d_ff)."""
        return self.activation(self.up(x_BTD))

    def activation(self, up: Tensor) -> Tensor:
        raise NotImplementedError


class GatedMLP(MLP):
    """Abstract: down(inner_norm(product(gate(x), up(x)))). An option defines `product`."""

    gated = True

    def hidden(self, x_BTD: Tensor) -> Tensor:
        for_gate, for_up = shared(x_BTD, 2)
        return self.product(self.gate(for_gate), self.up(for_up))

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
