"""The gate axis: a tensor inside attention is multiplied by an activation of a projection of attention's input.

The controls are here too: a gate that adds, and a norm or a nonlinearity on the head outputs instead of a gate.

Sites: `query`, `key` and `value` after their projection and norm and before rotation, `sdpa` the head outputs, `output`
after the output projection. The gate's input is the input of the query projection.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.axes.modules import Geometry, HeadLinear, Linear
from nexus_ablate.config.options import Registry

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "ns_sigmoid": lambda logit: 0.5 + 0.5 * torch.sigmoid(logit),
    "silu": F.silu,
    "identity": lambda logit: logit,
}


class Gate(nn.Module):
    """Abstract: y times `factor(x)` at the gate's site. y is (B, T, heads, width), or (B, T, D) at `output`."""

    site = "none"
    multiplies = True
    """Whether y is multiplied by `factor`, so that a probe reports gate scores."""

    def forward(self, site: str, y: Tensor, x_BTD: Tensor) -> Tensor:
        return self.gated(y, x_BTD) if site == self.site else y

    def gated(self, y: Tensor, x_BTD: Tensor) -> Tensor:
        """y after the gate, at the gate's site."""
        return y * self.factor(x_BTD)

    def factor(self, x_BTD: Tensor) -> Tensor:
        """The factor on y, broadcastable to y."""
        raise NotImplementedError


GATE: Registry[Gate] = Registry("gate")


@GATE.register("none")
class NoGate(Gate):
    """No site, nothing gated."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()


def shape_at(site: str, geometry: Geometry) -> tuple[int, ...]:
    """The shape of one token's tensor at a site."""
    if site == "output":
        return (geometry.d_model,)
    return (geometry.n_kv_heads if site in ("key", "value") else geometry.n_heads, geometry.head_dim)


class _Activated(Gate):
    """Abstract: activation(x W + b), or activation(c) with a learned c that doesn't depend on the input.

    Qiu et al. 2025, arXiv:2505.06708. The authors' code (qiuzh20/gated_attention, modeling_qwen3.py) has `sdpa`
    elementwise and headwise, without a bias, as here; the other sites and `head_shared` follow the paper's text. At q
    and k the gate comes after the norm, since a norm would undo a factor for a whole head. b and c start at `bias`;
    `off` means no b, and c starts at 0.
    """

    def __init__(
        self,
        geometry: Geometry,
        shape: tuple[int, ...],
        site: str,
        activation: str,
        bias: float | str,
        sees_input: bool = True,
    ) -> None:
        super().__init__()
        self.site, self.shape, self.activation = site, shape, ACTIVATIONS[activation]
        size, start = math.prod(shape), torch.full((math.prod(shape),), 0.0 if bias == "off" else float(bias))
        self.map = Linear(geometry.d_model, size, bias != "off", role="gate") if sees_input else None
        self.constant = None if sees_input else nn.Parameter(start)
        if self.map is not None and bias != "off":
            self.map.bias = nn.Parameter(start)

    def factor(self, x_BTD: Tensor) -> Tensor:
        logit = self.constant if self.map is None else self.map(x_BTD)
        return self.activation(logit.unflatten(-1, self.shape))  # type: ignore[union-attr]


@GATE.register("elementwise")
class Elementwise(_Activated):
    """One factor for each channel of each head. Qiu et al. 2025, arXiv:2505.06708."""

    def __init__(self, geometry: Geometry, *, site: str, activation: str, bias: float | str, input: bool) -> None:
        super().__init__(geometry, shape_at(site, geometry), site, activation, bias, input)


@GATE.register("headwise")
class Headwise(_Activated):
    """One factor for each head. Qiu et al. 2025, arXiv:2505.06708."""

    def __init__(self, geometry: Geometry, *, site: str, activation: str, bias: float | str, input: bool) -> None:
        super().__init__(geometry, (shape_at(site, geometry)[0], 1), site, activation, bias, input)


@GATE.register("head_shared")
class HeadShared(_Activated):
    """One factor for each channel of a head, the same in all heads. Qiu et al. 2025, arXiv:2505.06708."""

    def __init__(self, geometry: Geometry, *, site: str, activation: str, bias: float | str, input: bool) -> None:
        super().__init__(geometry, (1, geometry.head_dim), site, activation, bias, input)


@GATE.register("additive")
class Additive(_Activated):
    """y + activation(x W): an elementwise gate that adds. Qiu et al. 2025, arXiv:2505.06708, section 2.2.

    The control for multiplication: the input enters through a nonlinearity, but can't close anything. The authors use
    SiLU, which is unbounded, for additive gates.
    """

    multiplies = False

    def __init__(self, geometry: Geometry, *, site: str, activation: str, bias: float | str) -> None:
        super().__init__(geometry, shape_at(site, geometry), site, activation, bias)

    def gated(self, y: Tensor, x_BTD: Tensor) -> Tensor:
        return y + self.factor(x_BTD)


@GATE.register("norm")
class HeadNorm(Gate):
    """RMSNorm of each head's output, in float32, with a gain for each channel of each head; nothing is gated.

    Qiu et al. 2025, arXiv:2505.06708: their control for a nonlinearity between values and output projection ("SDPA
    GroupNorm"), with almost no parameters.
    """

    site = "sdpa"
    multiplies = False

    def __init__(self, geometry: Geometry, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(geometry.n_heads * geometry.head_dim))

    def gated(self, y: Tensor, x_BTD: Tensor) -> Tensor:
        y_BTHd = y.float()
        inverse_rms = torch.rsqrt(y_BTHd.square().mean(-1, keepdim=True) + self.eps)
        return y_BTHd * inverse_rms * self.gain.view(y.shape[-2:])


@GATE.register("silu")
class HeadSilu(Gate):
    """SiLU of the head outputs, without parameters and without a gate. Qiu et al. 2025, arXiv:2505.06708."""

    site = "sdpa"
    multiplies = False

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()

    def gated(self, y: Tensor, x_BTD: Tensor) -> Tensor:
        return F.silu(y)


@GATE.register("bondarenko")
class Bondarenko(Gate):
    """sigmoid(G_h(x_h)) on the output of head h, x_h its slice of the input. Bondarenko et al. 2023, arXiv:2306.12929.

    G_h is linear, or an MLP with one hidden ReLU layer, or (`all_heads`) linear in the whole input. It always has
    biases, also with bias=off. The last bias starts at logit(start); in the authors' code
    (Qualcomm-AI-research/outlier-free-transformers, opt_attention.py) only that of the linear form does. Slices are
    d_model / n_heads wide, rounded down, even if head_dim differs.
    """

    site = "sdpa"

    def __init__(self, geometry: Geometry, *, start: float, form: str, hidden: int | str) -> None:
        super().__init__()
        self.n_heads, self.slice = geometry.n_heads, geometry.d_model // geometry.n_heads
        self.whole = form == "all_heads"
        widths = [geometry.d_model if self.whole else self.slice, 1]
        if form == "mlp":
            widths.insert(1, max(1, geometry.head_dim // 4) if hidden == "auto" else int(hidden))
        maps = [HeadLinear(geometry.n_heads, *ends, bias=True, role="gate") for ends in itertools.pairwise(widths)]
        for last in maps[-1].maps:
            nn.init.constant_(last.bias, math.log(start / (1 - start)))  # type: ignore[reportArgumentType]
        self.maps = nn.ModuleList(maps)

    def factor(self, x_BTD: Tensor) -> Tensor:
        if self.whole:
            y_BHTw = x_BTD[:, None]
        else:
            y_BHTw = x_BTD[..., : self.n_heads * self.slice].unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        for layer, heads in enumerate(self.maps):
            y_BHTw = heads(F.relu(y_BHTw) if layer else y_BHTw)
        return torch.sigmoid(y_BHTw).transpose(1, 2)
