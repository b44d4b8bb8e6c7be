"""The position axis. A scheme acts at one of three sites: on embeddings, on queries and keys, or on scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nexus_ablate.axes.roles import Geometry, Table
from nexus_ablate.registry import Registry


class Position(nn.Module):
    """Abstract scheme: each site is the identity unless the option acts there. One instance serves all layers."""

    rotates = False
    """Whether `rotate` does anything: then a key bias is not the same for all keys."""

    def embed(self, x_BTD: Tensor) -> Tensor:
        """The embedding with positions 0 .. T - 1 put in."""
        return x_BTD

    def rotate(self, q_BHTd: Tensor, k_BHSd: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Queries and keys with their positions put in."""
        return q_BHTd, k_BHSd

    def score_bias(self, T: int, layer: int) -> Tensor | None:
        """What is added to the scaled scores, broadcastable to (B, H, T, T), or None."""
        return None


POSITIONS: Registry[Position] = Registry("position")


@POSITIONS.register("none")
class NoPosition(Position):
    """Nothing; the causal mask alone breaks the symmetry. Haviv et al. 2022, arXiv:2203.16634."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()


@POSITIONS.register("learned")
class Learned(Position):
    """A learned vector for each of `context` positions, added to the embedding (GPT-2). Not defined beyond them."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.table = Table(geometry.context, geometry.d_model, role="position")

    def embed(self, x_BTD: Tensor) -> Tensor:
        T, context = x_BTD.shape[1], len(self.table.weight)
        if context < T:
            raise ValueError(f"position=learned is defined for {context} positions, not for {T}")
        return x_BTD + self.table.weight[:T]


@POSITIONS.register("sinusoidal")
class Sinusoidal(Position):
    """sin(p / base^(2i/D)) at channel 2i, its cosine at 2i + 1, added. Vaswani et al. 2017, arXiv:1706.03762, 3.5."""

    wave_TD: Tensor

    def __init__(self, geometry: Geometry, *, base: float) -> None:
        super().__init__()
        self.base, self.d_model = base, geometry.d_model
        self.register_buffer("wave_TD", self._wave(geometry.context), persistent=False)

    def _wave(self, T: int) -> Tensor:
        even = torch.arange(0, self.d_model, 2, dtype=torch.float32)
        angle = torch.arange(T, dtype=torch.float32)[:, None] * self.base ** (-even / self.d_model)
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, : self.d_model]

    def embed(self, x_BTD: Tensor) -> Tensor:
        T = x_BTD.shape[1]
        wave_TD = self.wave_TD if len(self.wave_TD) >= T else self._wave(T).to(x_BTD.device)
        return x_BTD + wave_TD[:T].to(x_BTD.dtype)


@POSITIONS.register("rope")
class Rope(Position):
    """Channel pairs of q and k turned by p * theta^(-2i/width), in float32. Su et al. 2021, arXiv:2104.09864, Eq. 15.

    Of each head the first `fraction` of the channels is rotated (width, an even number).
    """

    rotates = True
    angle_Tw: Tensor
    cos_Td: Tensor
    sin_Td: Tensor

    def __init__(self, geometry: Geometry, *, theta: float, fraction: float, pairing: str, form: str) -> None:
        super().__init__()
        self.theta, self.pairing, self.form = theta, pairing, form
        self.width = 2 * max(1, round(geometry.head_dim * fraction / 2))
        self.register_buffer("angle_Tw", self._angles(geometry.context), persistent=False)
        self.register_buffer("cos_Td", self._spread(self.angle_Tw.cos()), persistent=False)
        self.register_buffer("sin_Td", self._spread(self.angle_Tw.sin()), persistent=False)

    def _angles(self, T: int) -> Tensor:
        even = torch.arange(0, self.width, 2, dtype=torch.float32)
        return torch.arange(T, dtype=torch.float32)[:, None] * self.theta ** (-even / self.width)

    def _spread(self, half_Tw: Tensor) -> Tensor:
        """One value per channel from one value per pair."""
        return half_Tw.repeat(1, 2) if self.pairing == "half" else half_Tw.repeat_interleave(2, 1)

    def rotate(self, q_BHTd: Tensor, k_BHSd: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        T = q_BHTd.shape[2]
        if len(self.angle_Tw) >= T:
            angle_Tw, cos_Td, sin_Td = self.angle_Tw[:T], self.cos_Td[:T], self.sin_Td[:T]
        else:
            angle_Tw = self._angles(T).to(q_BHTd.device)
            cos_Td, sin_Td = self._spread(angle_Tw.cos()), self._spread(angle_Tw.sin())
        if self.form == "complex":
            turn = torch.polar(torch.ones_like(angle_Tw), angle_Tw)
            return self._turn_complex(q_BHTd, turn), self._turn_complex(k_BHSd, turn)
        return self._turn(q_BHTd, cos_Td, sin_Td), self._turn(k_BHSd, cos_Td, sin_Td)

    def _turn(self, x: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
        turned = x[..., : self.width]
        if self.pairing == "half":
            first, second = turned.chunk(2, -1)
            other = torch.cat((-second, first), -1)
        else:
            other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
        return self._with_rest((turned * cos_Td + other * sin_Td).to(x.dtype), x)

    def _turn_complex(self, x: Tensor, turn_Tw: Tensor) -> Tensor:
        turned = x[..., : self.width].float()
        half = self.pairing == "half"
        pairs = torch.stack(turned.chunk(2, -1), -1) if half else turned.unflatten(-1, (-1, 2))
        pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn_Tw)
        turned = torch.cat((pairs[..., 0], pairs[..., 1]), -1) if half else pairs.flatten(-2)
        return self._with_rest(turned.to(x.dtype), x)

    def _with_rest(self, turned: Tensor, x: Tensor) -> Tensor:
        return turned if self.width == x.shape[-1] else torch.cat((turned, x[..., self.width :]), -1)


@POSITIONS.register("alibi")
class Alibi(Position):
    """-m_h (i - j) added to the scaled scores, in float32. Press et al. 2021, arXiv:2108.12409, section 3.

    The distance form: the authors' code adds +m_h j, which equals it only under a plain softmax.
    """

    slope_H: Tensor
    bias_HTT: Tensor

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.register_buffer("slope_H", torch.tensor(slopes(geometry.n_heads)), persistent=False)
        self.register_buffer("bias_HTT", self._bias(geometry.context), persistent=False)

    def _bias(self, T: int) -> Tensor:
        step = torch.arange(T, device=self.slope_H.device, dtype=torch.float32)
        return -self.slope_H[:, None, None] * (step[:, None] - step[None, :])

    def score_bias(self, T: int, layer: int) -> Tensor | None:
        return self.bias_HTT[:, :T, :T] if self.bias_HTT.shape[1] >= T else self._bias(T)


def slopes(n_heads: int) -> list[float]:
    """ALiBi's slope of each head: 2^(-8h/H) for a power of two, else filled up from the next power's odd ones."""
    power = 2 ** math.floor(math.log2(n_heads))
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return first + [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power, 2)][: n_heads - power]
