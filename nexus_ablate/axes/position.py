"""The position axis. A scheme acts at three sites: on embeddings, on queries and keys, and on scores."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.axes.modules import Geometry, Linear, Table
from nexus_ablate.config.options import Registry
from nexus_ablate.config.roles import SMALL_MAP


class Position(nn.Module):
    """Abstract scheme: each site is the identity unless the option acts there. One instance serves all layers."""

    settles = True
    """Whether queries and keys are final after this scheme, so that a norm after rotation follows."""
    longest: int | None = None
    """Number of positions for which the scheme is defined; None: unlimited."""

    def turns_keys(self, layer: int) -> bool:
        """Whether the scheme changes keys by position, so that a key bias contributes differently to each score."""
        return False

    def without(self, geometry: Geometry) -> Position:
        """The scheme of the layers in `geometry.nope_layers`."""
        return NoPosition(geometry)

    def embed(self, x_BTD: Tensor) -> Tensor:
        """The embedding with positions 0 .. T - 1 applied."""
        return x_BTD

    def rotate(self, q_BHTd: Tensor, k_BHSd: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Queries and keys changed by the scheme, after their norm and before the scores."""
        return q_BHTd, k_BHSd

    def score_bias(self, T: int, layer: int) -> Tensor | None:
        """The bias on the scaled scores, the same for all queries, or None.

        (H,): a factor on the distance i - j; (H, T): by distance; (H, T, T).

        Only the causal part of (H, T, T) is used.
        """
        return None

    def query_bias(self, q_BHTd: Tensor, layer: int, scale: float) -> Tensor | None:
        """A bias that depends on the query and replaces `score_bias`: (B, H, T, T), or None.

        The queries are those before `rotate`; `scale` is the factor on the scores.
        """
        return None


POSITION: Registry[Position] = Registry("position")


@POSITION.register("none")
class NoPosition(Position):
    """Nothing; the causal mask alone breaks the symmetry. Haviv et al. 2022, arXiv:2203.16634."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()


@POSITION.register("learned")
class Learned(Position):
    """A learned vector for each of `context` positions, added to the embedding (GPT-2). Undefined beyond them."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.table = Table(geometry.context, geometry.d_model, role="position")
        self.longest = geometry.context

    def embed(self, x_BTD: Tensor) -> Tensor:
        T, context = x_BTD.shape[1], len(self.table.weight)
        if context < T:
            raise ValueError(f"position=learned is defined for {context} positions, not for {T}")
        return x_BTD + (self.table.weight if context == T else self.table.weight[:T])


@POSITION.register("sinusoidal")
class Sinusoidal(Position):
    """sin(p / base^(2i/D)) at channel 2i, its cosine at 2i + 1, added. Vaswani et al. 2017, arXiv:1706.03762, 3.5.

    The fairseq layout (sinusoidal_positional_embedding.py; XGLM) has all sines, then all cosines, the exponent
    i / (D/2 - 1), and starts at position 2, after that of padding.

    The RMS of the sinusoids is 0.7 under every init, so the option prescribes the paper's factor sqrt(d_model) on the
    embedding (section 3.4). After 400 steps, a model of 2 layers had a loss of 2.63 nats without the factor, 2.16 with
    it, and 2.25 without positions (d_model 128, context 64, mean of 5 seeds).
    """

    wave_TD: Tensor

    def __init__(self, geometry: Geometry, *, base: float, layout: str) -> None:
        super().__init__()
        self.base, self.d_model, self.fairseq = base, geometry.d_model, layout == "fairseq"
        self.register_buffer("wave_TD", self._wave(geometry.context), persistent=False)

    def _wave(self, T: int) -> Tensor:
        if self.fairseq:
            half = self.d_model // 2
            frequency = self.base ** (-torch.arange(half, dtype=torch.float32) / max(1, half - 1))
            angle = torch.arange(2, T + 2, dtype=torch.float32)[:, None] * frequency
            return F.pad(torch.cat((angle.sin(), angle.cos()), -1), (0, self.d_model % 2))
        angle = angles(T, frequencies(self.d_model, self.base))
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, : self.d_model]

    def embed(self, x_BTD: Tensor) -> Tensor:
        T = x_BTD.shape[1]
        wave_TD = self.wave_TD if len(self.wave_TD) >= T else self._wave(T).to(x_BTD.device)
        return x_BTD + wave_TD[:T].to(x_BTD.dtype)


class Rotation(nn.Module):
    """Channel pairs of q and k rotated by p times a frequency each, in float32.

    Args:
        frequency_w: Radians per position of each pair, (w,), float32. The first 2 w channels of each head are rotated.
        pairing: Which channels are a pair: `half` (i, i + width / 2), `interleaved` (2i, 2i + 1).
        length: A factor on the rotated channels.
    """

    frequency_w: Tensor
    angle_Tw: Tensor
    cos_THd: Tensor
    sin_THd: Tensor

    def __init__(
        self, geometry: Geometry, frequency_w: Tensor, pairing: str, form: str = "real", length: float = 1.0
    ) -> None:
        super().__init__()
        self.pairing, self.form, self.length = pairing, form, length
        self.width, self.n_heads = 2 * len(frequency_w), geometry.n_heads
        self.register_buffer("frequency_w", frequency_w, persistent=False)
        self.register_buffer("angle_Tw", angles(geometry.context, frequency_w), persistent=False)
        cos_THd, sin_THd = self._factors(self.angle_Tw)
        self.register_buffer("cos_THd", cos_THd, persistent=False)
        self.register_buffer("sin_THd", sin_THd, persistent=False)

    def _factors(self, angle_Tw: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of a channel and of its partner, repeated for each head: eager products are faster on rows as
        long as those of the projections."""
        cos_Tw, sin_Tw = angle_Tw.cos(), angle_Tw.sin()
        if self.length != 1:
            cos_Tw, sin_Tw = self.length * cos_Tw, self.length * sin_Tw
        signed = (torch.cat if self.pairing == "half" else _alternate)((-sin_Tw, sin_Tw), -1)
        spread = (torch.cat if self.pairing == "half" else _alternate)((cos_Tw, cos_Tw), -1)
        return tuple(x[:, None].expand(-1, self.n_heads, -1).contiguous() for x in (spread, signed))  # type: ignore[return-value]

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor) -> tuple[Tensor, Tensor]:
        T = q_BHTd.shape[2]
        known = len(self.angle_Tw) >= T
        angle_Tw = self.angle_Tw[:T] if known else angles(T, self.frequency_w)
        if self.form == "complex":
            turn = torch.polar(torch.ones_like(angle_Tw), angle_Tw)
            return self._turn_complex(q_BHTd, turn), self._turn_complex(k_BHSd, turn)
        cos_THd, sin_THd = (self.cos_THd[:T], self.sin_THd[:T]) if known else self._factors(angle_Tw)
        return self._turn(q_BHTd, cos_THd, sin_THd), self._turn(k_BHSd, cos_THd, sin_THd)

    def _turn(self, x_BHTd: Tensor, cos_THd: Tensor, sin_THd: Tensor) -> Tensor:
        x_BTHd = x_BHTd.transpose(1, 2)  # contiguous, as it comes from the projection
        rotated, heads = x_BTHd[..., : self.width], x_BTHd.shape[2]
        if self.pairing == "half":
            partner = rotated.roll(self.width // 2, -1)
        else:
            partner = rotated.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        rotated = (rotated * cos_THd[:, :heads] + partner * sin_THd[:, :heads]).to(x_BTHd.dtype)
        return self._with_rest(rotated, x_BTHd).transpose(1, 2)

    def _turn_complex(self, x: Tensor, turn_Tw: Tensor) -> Tensor:
        rotated = x[..., : self.width].float()
        half = self.pairing == "half"
        pairs = torch.stack(rotated.chunk(2, -1), -1) if half else rotated.unflatten(-1, (-1, 2))
        pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn_Tw)
        rotated = torch.cat((pairs[..., 0], pairs[..., 1]), -1) if half else pairs.flatten(-2)
        return self._with_rest(rotated.to(x.dtype), x)

    def _with_rest(self, rotated: Tensor, x: Tensor) -> Tensor:
        return rotated if self.width == x.shape[-1] else torch.cat((rotated, x[..., self.width :]), -1)


def _alternate(pair: tuple[Tensor, Tensor], axis: int) -> Tensor:
    """The entries of two tensors, alternating along an axis."""
    return torch.stack(pair, axis).flatten(axis - 1)


class RotaryPosition(Position):
    """Abstract: queries and keys rotated by the rotations of a subclass, which layers use in turn."""

    def __init__(self, rotations: list[Rotation]) -> None:
        super().__init__()
        self.rotations = nn.ModuleList(rotations)

    def turns_keys(self, layer: int) -> bool:
        return True

    def rotate(self, q_BHTd: Tensor, k_BHSd: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self.rotations[layer % len(self.rotations)](q_BHTd, k_BHSd)


def by_layer(*values: float | list[float]) -> Iterator[tuple[float, ...]]:
    """The values of each layer in turn, until they repeat: an item of each list, and every single value."""
    lists = [value if isinstance(value, list) else [value] for value in values]
    for layer in range(math.lcm(*map(len, lists))):
        yield tuple(items[layer % len(items)] for items in lists)


def rotated_frequencies(geometry: Geometry, theta: float, fraction: float) -> Tensor:
    """theta^(-2i/width) of each rotated pair; width is `fraction` of the head width, an even number."""
    return frequencies(2 * max(1, round(geometry.head_dim * fraction / 2)), theta)


@POSITION.register("rope")
class Rope(RotaryPosition):
    """Channel pairs of q and k rotated by p * theta^(-2i/width), in float32. Su et al. 2021, arXiv:2104.09864, Eq. 15.

    The first `fraction` of each head's channels is rotated (width, an even number). Layers use a list of thetas in turn
    (Gemma 3: 10000 with a window, 1000000 without).
    """

    def __init__(
        self, geometry: Geometry, *, theta: float | list[float], fraction: float, pairing: str, form: str
    ) -> None:
        super().__init__(
            [
                Rotation(geometry, rotated_frequencies(geometry, base, fraction), pairing, form)
                for (base,) in by_layer(theta)
            ]
        )


@POSITION.register("rope_interpolated")
class InterpolatedRope(RotaryPosition):
    """RoPE stretched over a longer context: frequencies divided by `factor` (linear), or a larger theta (ntk).

    linear: position interpolation, Chen et al. 2023, arXiv:2306.15595, Eq. 4. ntk: theta factor^(width / (width - 2)),
    which divides the lowest frequency by `factor` and keeps the highest; by bloc97, in the form of Peng et al. 2023
    (YaRN), arXiv:2309.00071, Eq. 16. Layers use lists of thetas and factors in turn.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float | list[float],
        fraction: float,
        pairing: str,
        method: str,
        factor: float | list[float],
    ) -> None:
        rotations = []
        for base, divisor in by_layer(theta, factor):
            if method == "ntk":
                width = 2 * len(rotated_frequencies(geometry, base, fraction))
                base, divisor = base * divisor ** (width / max(1, width - 2)), 1.0
            rotations.append(Rotation(geometry, rotated_frequencies(geometry, base, fraction) / divisor, pairing))
        super().__init__(rotations)


@POSITION.register("rope_llama3")
class Llama3Rope(RotaryPosition):
    """RoPE with low frequencies divided by `factor`: those with fewer than `low_freq_factor` turns in the context.

    Frequencies with more than `high_freq_factor` turns are kept; in between, the share of the undivided frequency grows
    linearly with the turns. Llama Team 2024 (Llama 3.1), arXiv:2407.21783, as in the release's model file.
    `original_context` is the training context before the scaling.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float | list[float],
        fraction: float,
        pairing: str,
        factor: float | list[float],
        low_freq_factor: float,
        high_freq_factor: float,
        original_context: int | str,
    ) -> None:
        rotations = []
        for base, divisor in by_layer(theta, factor):
            frequency = rotated_frequencies(geometry, base, fraction)
            turns = context_of(geometry, original_context) * frequency / (2 * math.pi)
            kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
            rotations.append(Rotation(geometry, (1 - kept) * frequency / divisor + kept * frequency, pairing))
        super().__init__(rotations)


@POSITION.register("rope_yarn")
class YarnRope(RotaryPosition):
    """RoPE with frequencies divided by `factor` for pairs with few turns, unchanged for many, interpolated in between.

    The share of the undivided frequency falls linearly with the index of the pair, from the pair with `beta_fast` turns
    in the original context to the one with `beta_slow` (rounded outwards with `truncate`). Rotated channels of q and k
    are multiplied by `attention_factor`, by default 0.1 ln(factor) + 1, so scores by its square; in layers that scale
    nothing by 1. Peng et al. 2023,
    arXiv:2309.00071, sections 3.2 to 3.4, as in the authors' code (jquesnelle/yarn) in `transformers`.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        theta: float | list[float],
        fraction: float,
        pairing: str,
        factor: float | list[float],
        beta_fast: float,
        beta_slow: float,
        original_context: int | str,
        attention_factor: float | str,
        truncate: bool,
    ) -> None:
        context, rotations = context_of(geometry, original_context), []
        for base, divisor in by_layer(theta, factor):
            frequency = rotated_frequencies(geometry, base, fraction)
            pairs = len(frequency)
            first, last = (
                pairs * math.log(context / (turns * 2 * math.pi)) / math.log(base) for turns in (beta_fast, beta_slow)
            )
            first, last = (math.floor(first), math.ceil(last)) if truncate else (first, last)
            first = max(first, 0)
            last = max(min(last, 2 * pairs - 1), first + 0.001)
            divided = ((torch.arange(pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
            length = (
                float(attention_factor) if attention_factor != "auto" and divisor != 1 else 0.1 * math.log(divisor) + 1
            )
            mixed = divided * frequency / divisor + (1 - divided) * frequency
            rotations.append(Rotation(geometry, mixed, pairing, length=length))
        super().__init__(rotations)


def context_of(geometry: Geometry, original_context: int | str) -> int:
    return geometry.context if original_context == "auto" else int(original_context)


@POSITION.register("alibi")
class Alibi(Position):
    """-m_h (i - j) added to the scaled scores, in float32. Press et al. 2021, arXiv:2108.12409, section 3.

    The distance form: the authors' code adds +m_h j, which equals it only under a plain softmax. MPT has other
    exponents (`bias_max`); Falcon scales the sum of product and bias, so its slopes have the factor 1/sqrt(head_dim).
    """

    slope_H: Tensor

    def __init__(self, geometry: Geometry, *, slope_factor: float, bias_max: float) -> None:
        super().__init__()
        slope_H = slope_factor * torch.tensor(slopes(geometry.n_heads, bias_max))
        self.register_buffer("slope_H", slope_H, persistent=False)

    def score_bias(self, T: int, layer: int) -> Tensor | None:
        return -self.slope_H


def slopes(n_heads: int, bias_max: float = 8.0) -> list[float]:
    """ALiBi's slope of each head: 2^(-bias_max h/H) for H a power of two; otherwise those of the largest smaller power,
    then every other one of the next power."""
    power = 2 ** math.floor(math.log2(n_heads))
    first = [2 ** (-bias_max * h / power) for h in range(1, power + 1)]
    return first + [2 ** (-bias_max * h / (2 * power)) for h in range(1, 2 * power, 2)][: n_heads - power]


@POSITION.register("irope")
class InterleavedRope(RotaryPosition):
    """RoPE, and in layers without positions (`nope_every`, here every 4th) longer queries far into the text.

    In those layers q at position p is multiplied by 1 + temperature ln(1 + floor((p + 1) / floor_scale)), which is 1 in
    short sequences. Meta 2025, Llama 4, as in the release's configuration and the model file of `transformers`. Llama
    4's layers with RoPE also see only chunks of 8192 tokens. This option leaves that to `window`. Frequencies are not
    scaled here: another RoPE with `nope_every` is the same in short sequences.
    """

    def __init__(self, geometry: Geometry, *, theta: float, pairing: str, temperature: float, floor_scale: int) -> None:
        super().__init__([Rotation(geometry, rotated_frequencies(geometry, theta, 1.0), pairing)])
        self.temperature, self.floor_scale = temperature, floor_scale

    def without(self, geometry: Geometry) -> Position:
        return SharperQueries(self.temperature, self.floor_scale)


class SharperQueries(Position):
    """No positions, but longer queries far into the text; see InterleavedRope."""

    def __init__(self, temperature: float, floor_scale: int) -> None:
        super().__init__()
        self.temperature, self.floor_scale = temperature, floor_scale

    def rotate(self, q_BHTd: Tensor, k_BHSd: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        count_T = torch.arange(1, q_BHTd.shape[2] + 1, device=q_BHTd.device)
        sharper_T = 1 + self.temperature * torch.log1p((count_T // self.floor_scale).float())
        return (q_BHTd * sharper_T[:, None]).to(q_BHTd.dtype), k_BHSd


@POSITION.register("t5")
class T5Bias(Position):
    """A learned bias for each head and bucket of distances i - j, added to the scaled scores. One table for all layers.

    The first half of the buckets has one distance each, the sizes of the others grow geometrically up to
    `max_distance`, and the last has all larger distances. Raffel et al. 2020, arXiv:1910.10683, section 2.1, in the
    causal form of the authors' code (all buckets for the past). T5 itself doesn't scale its scores; here the bias is
    added after scaling, so that it doesn't depend on the head width.
    """

    def __init__(self, geometry: Geometry, *, buckets: int, max_distance: int) -> None:
        super().__init__()
        self.buckets, self.max_distance = buckets, max_distance
        self.table = Table(buckets, geometry.n_heads, role="position")

    def bucket(self, T: int) -> Tensor:
        """The bucket of each distance 0 .. T - 1."""
        exact = self.buckets // 2
        distance = torch.arange(T, device=self.table.weight.device)
        octave = (distance.clamp(min=exact) / exact).log() / math.log(self.max_distance / exact)
        far = exact + (octave * (self.buckets - exact)).long()
        return torch.where(distance < exact, distance, far.clamp(max=self.buckets - 1))

    def score_bias(self, T: int, layer: int) -> Tensor | None:
        return self.table(self.bucket(T)).T


@POSITION.register("kerple")
class Kerple(Position):
    """-r1 ln(1 + r2 (i - j)), or -r1 (i - j)^r2 with r2 < 2, added to the scaled scores; r1, r2 > 0 for each head.

    Chi et al. 2022, arXiv:2205.09921, as in the authors' code (chijames/KERPLE, megatron/mpu/layers.py): learned, one
    set for all layers. The authors draw r1 and r2 uniformly and clamp them at 0.01. Here r1 starts evenly spread over
    their range, (0, 2) or for the power (0, 1), and r2 in the middle of its range. The parameters are ln r1 and ln r2,
    or for the power the logit of r2 / 2.
    """

    def __init__(self, geometry: Geometry, *, form: str) -> None:
        super().__init__()
        self.logarithmic = form == "log"
        H = geometry.n_heads
        even_H = (torch.arange(H) + 0.5) / H
        self.log_r1_H = nn.Parameter((even_H * (2 if self.logarithmic else 1)).log())
        self.raw_r2_H = nn.Parameter(torch.full((H,), math.log(0.5) if self.logarithmic else 0.0))

    def score_bias(self, T: int, layer: int) -> Tensor | None:
        distance_T = torch.arange(T, device=self.log_r1_H.device, dtype=torch.float32)
        raw_r2_H1 = self.raw_r2_H[:, None]
        if self.logarithmic:
            kernel_HT = torch.log1p(raw_r2_H1.exp() * distance_T)
        else:
            kernel_HT = distance_T ** (2 * raw_r2_H1.sigmoid())
        return -self.log_r1_H.exp()[:, None] * kernel_HT


@POSITION.register("fire")
class Fire(Position):
    """f(psi(i - j) / psi(max(L, i))) added to the scaled scores, psi(x) = ln(|c| x + 1), f a small MLP for all heads.

    Li et al. 2023, arXiv:2310.04418. As in the paper's listing, c and a factor on L are learned, f has one hidden ReLU
    layer, and 1e-6 is added to the divisor. Each layer has its own f, c and L, or all layers share one (`shared`, the
    paper's FIRE-S). The hidden biases start evenly spread over [-1, 1]; the listing draws them from it. f has no output
    bias, since that would add the same number to all scores of a query.
    """

    def __init__(self, geometry: Geometry, *, width: int, c: float, threshold: float, shared: bool) -> None:
        super().__init__()
        self.functions = nn.ModuleList(
            nn.Identity()
            if layer in geometry.nope_layers and not shared
            else FireFunction(geometry.n_heads, width, c, threshold)
            for layer in range(1 if shared else geometry.n_layers)
        )

    def score_bias(self, T: int, layer: int) -> Tensor | None:
        return self.functions[layer % len(self.functions)](T)


class FireFunction(nn.Module):
    """FIRE's bias of T positions, (H, T, T)."""

    def __init__(self, n_heads: int, width: int, c: float, threshold: float) -> None:
        super().__init__()
        self.hidden = Linear(1, width, bias=True, role=SMALL_MAP)
        self.out = Linear(width, n_heads, bias=False, role=SMALL_MAP)
        with torch.no_grad():
            self.hidden.bias.copy_(torch.linspace(-1, 1, width))
        self.threshold = threshold
        self.c = nn.Parameter(torch.tensor(c))
        self.threshold_factor = nn.Parameter(torch.tensor(1.0))

    def forward(self, T: int) -> Tensor:
        place_T = torch.arange(T, device=self.c.device, dtype=torch.float32)
        distance_TT = (place_T[:, None] - place_T).clamp(min=0)
        length_T = torch.maximum(place_T, (self.threshold_factor * self.threshold).abs())
        share_TT = self._psi(distance_TT) / (self._psi(length_T)[:, None] + 1e-6)
        return self.out(F.relu(self.hidden(share_TT[..., None]))).permute(2, 0, 1)

    def _psi(self, x: Tensor) -> Tensor:
        return torch.log1p(self.c.abs() * x)


@POSITION.register("transformer_xl")
class TransformerXL(Position):
    """((q + u).k + (q + v).(W r)) times the scale of the scores; r is the sinusoid of i - j, sines before cosines.

    Dai et al. 2019, arXiv:1901.02860, section 3.3, without the segment memory. u and v have a vector per head, shared
    by all layers as in the authors' code; each layer has its own W, without bias. u and v start like position tables
    (the authors: standard deviation 0.02), W like the key projection.
    """

    wave_TD: Tensor

    def __init__(self, geometry: Geometry, *, base: float) -> None:
        super().__init__()
        self.base, self.n_heads, self.d_model = base, geometry.n_heads, geometry.d_model
        self.register_buffer("wave_TD", self._wave(geometry.context), persistent=False)
        self.u = Table(geometry.n_heads, geometry.head_dim, role="position")
        self.v = Table(geometry.n_heads, geometry.head_dim, role="position")
        width = geometry.n_heads * geometry.head_dim
        self.key = nn.ModuleList(
            nn.Identity() if layer in geometry.nope_layers else Linear(geometry.d_model, width, bias=False, role="key")
            for layer in range(geometry.n_layers)
        )

    def _wave(self, T: int) -> Tensor:
        angle = angles(T, frequencies(self.d_model, self.base))
        return torch.cat((angle.sin(), angle.cos()), -1)[:, : self.d_model]

    def rotate(self, q_BHTd: Tensor, k_BHSd: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return q_BHTd + self.u.weight[:, None].to(q_BHTd.dtype), k_BHSd

    def query_bias(self, q_BHTd: Tensor, layer: int, scale: float) -> Tensor | None:
        B, H, T, _ = q_BHTd.shape
        wave_TD = self.wave_TD if len(self.wave_TD) >= T else self._wave(T).to(q_BHTd.device)
        far_first_HTd = self.key[layer](wave_TD[:T].flip(0)).unflatten(-1, (self.n_heads, -1)).transpose(0, 1)
        q_BHTd = q_BHTd + self.v.weight[:, None].to(q_BHTd.dtype)
        score_BHTT = q_BHTd @ far_first_HTd.transpose(-1, -2) * scale
        # Column m of row i has distance T - 1 - m and belongs in column m - (T - 1 - i). Append a column, then read the
        # rows as if they had T columns: each row moves by one place more than the previous one. Entries above the
        # diagonal are meaningless; the causal mask removes them.
        return F.pad(score_BHTT, (1, 0)).view(B, H, T + 1, T)[:, :, 1:]


def square(bias: Tensor, T: int) -> Tensor:
    """A score bias of any of its forms as (..., H, T, T); one of a distance is 0 above the diagonal."""
    if bias.ndim == 1:
        bias = bias[:, None] * torch.arange(T, device=bias.device, dtype=torch.float32)
    return F.pad(bias.flip(1), (0, T - 1)).unfold(1, T, 1).flip(1) if bias.ndim == 2 else bias


def frequencies(width: int, base: float) -> Tensor:
    """base^(-2i / width) of each pair of channels, (ceil(width / 2),), float32."""
    return base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)


def angles(T: int, frequency_w: Tensor) -> Tensor:
    """p times each frequency at row p, (T, w), float32."""
    return torch.arange(T, dtype=torch.float32, device=frequency_w.device)[:, None] * frequency_w
