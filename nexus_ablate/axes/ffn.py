"""The FFN axis. The width d_ff is computed once, in config.py; no class here rounds it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.axes.roles import Geometry, Linear
from nexus_ablate.config.options import Registry
from nexus_ablate.kernels.linear import shared


class FeedForward(nn.Module):
    """Abstract: down(inner_norm(hidden(x))), (B, T, D) to (B, T, D). An option defines `hidden`, of width d_ff.

    `inner_norm` comes from the placement: the identity except in Sub-LN.
    """

    gated = False
    """Whether the hidden layer is a product with a second projection of the input, `gate`."""

    def __init__(self, geometry: Geometry, bias: bool, dropout: float, inner_norm: nn.Module) -> None:
        super().__init__()
        if self.gated:
            self.gate = Linear(geometry.d_model, geometry.d_ff, bias, role="ffn_in")
        self.up = Linear(geometry.d_model, geometry.d_ff, bias, role="ffn_in")
        self.inner_norm = inner_norm
        self.down = Linear(geometry.d_ff, geometry.d_model, bias, role="ffn_out")
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.dropout(self.down(self.inner_norm(self.hidden(x_BTD))))

    def hidden(self, x_BTD: Tensor) -> Tensor:
        raise NotImplementedError

    def gate_and_up(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Both projections of the input of a gated FFN."""
        for_gate, for_up = shared(x_BTD, 2)
        return self.gate(for_gate), self.up(for_up)


FFN: Registry[FeedForward] = Registry("ffn")


@FFN.register("relu")
class Relu(FeedForward):
    """max(0, up(x)). Vaswani et al. 2017, arXiv:1706.03762, Eq. 2."""

    def hidden(self, x_BTD: Tensor) -> Tensor:
        return F.relu(self.up(x_BTD))


@FFN.register("relu2")
class SquaredRelu(FeedForward):
    """max(0, up(x))^2. So et al. 2021 (Primer), arXiv:2109.08668."""

    def hidden(self, x_BTD: Tensor) -> Tensor:
        return F.relu(self.up(x_BTD)).square()


@FFN.register("gelu")
class Gelu(FeedForward):
    """GELU(up(x)), the exact erf form. Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2."""

    def hidden(self, x_BTD: Tensor) -> Tensor:
        return F.gelu(self.up(x_BTD))


@FFN.register("gelu_tanh")
class GeluTanh(FeedForward):
    """GELU(up(x)), the tanh form. Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2."""

    def hidden(self, x_BTD: Tensor) -> Tensor:
        return F.gelu(self.up(x_BTD), approximate="tanh")


@FFN.register("silu")
class Silu(FeedForward):
    """up(x) sigmoid(up(x)). Ramachandran et al. 2017, arXiv:1710.05941, beta 1."""

    def hidden(self, x_BTD: Tensor) -> Tensor:
        return F.silu(self.up(x_BTD))


@FFN.register("bilinear")
class Bilinear(FeedForward):
    """gate(x) * up(x). Shazeer 2020, arXiv:2002.05202, Eq. 6."""

    gated = True

    def hidden(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x_BTD)
        return gate * up


@FFN.register("glu")
class GLU(FeedForward):
    """sigmoid(gate(x)) * up(x). Shazeer 2020, arXiv:2002.05202, Eq. 6."""

    gated = True

    def hidden(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x_BTD)
        return F.sigmoid(gate) * up


@FFN.register("reglu")
class ReGLU(FeedForward):
    """max(0, gate(x)) * up(x). Shazeer 2020, arXiv:2002.05202, Eq. 6."""

    gated = True

    def hidden(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x_BTD)
        return F.relu(gate) * up


@FFN.register("geglu")
class GEGLU(FeedForward):
    """GELU(gate(x)) * up(x). Shazeer 2020, arXiv:2002.05202, Eq. 6."""

    gated = True

    def __init__(self, geometry: Geometry, bias: bool, dropout: float, inner_norm: nn.Module, *, tanh: bool) -> None:
        super().__init__(geometry, bias, dropout, inner_norm)
        self.approximate = "tanh" if tanh else "none"

    def hidden(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x_BTD)
        return F.gelu(gate, approximate=self.approximate) * up


@FFN.register("swiglu")
class SwiGLU(FeedForward):
    """SiLU(gate(x)) * up(x). Shazeer 2020, arXiv:2002.05202, Eq. 6."""

    gated = True

    def hidden(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x_BTD)
        return F.silu(gate) * up


@FFN.register("reglu2")
class SquaredReGLU(FeedForward):
    """max(0, gate(x))^2 * up(x). Ma et al. 2025 (BitNet b1.58 2B4T), arXiv:2504.12285."""

    gated = True

    def hidden(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x_BTD)
        return F.relu(gate).square() * up


@FFN.register("swiglu_clamped")
class ClampedSwiGLU(FeedForward):
    """g sigmoid(alpha g) * (u + up_shift), g = min(gate(x), limit), u = up(x) within +-limit.

    OpenAI 2025 (gpt-oss), arXiv:2508.10925, as in the authors' code (openai/gpt-oss, torch/model.py), where it is the
    FFN of each expert.
    """

    gated = True

    def __init__(
        self,
        geometry: Geometry,
        bias: bool,
        dropout: float,
        inner_norm: nn.Module,
        *,
        alpha: float,
        limit: float,
        up_shift: float,
    ) -> None:
        super().__init__(geometry, bias, dropout, inner_norm)
        self.alpha, self.limit, self.up_shift = alpha, limit, up_shift

    def hidden(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x_BTD)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * F.sigmoid(self.alpha * gate) * (up + self.up_shift)
