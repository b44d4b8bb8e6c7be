"""The norm axis. A norm is built for a width and a site; input and output are (..., width).

Names of sites inside a block begin with their branch, `attn` or `ffn`; the norm before the head is `final`. Gains start
at `gain_init`, which the model sets to 1 at sites that aren't in `norm_gain_sites`. Biases start at 0.

`fp32=off` computes in the precision of the matrix products. LayerNorm and RMSNorm then round every intermediate (see
kernels/low_precision.py). The other norms round each operation, but a compiled run may keep float32 in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nexus_ablate.config.options import Registry
from nexus_ablate.kernels.linear import autocasts
from nexus_ablate.kernels.low_precision import uncast
from nexus_ablate.kernels.normalization import layer_norm, rms_norm

NORM: Registry[nn.Module] = Registry("norm")


def statistics_dtype(x: Tensor, fp32: bool) -> torch.dtype:
    """float32, or the precision of the matrix products around the norm."""
    if fp32:
        return torch.float32
    return torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype


class _Affine(nn.Module):
    """Gain and optional bias over the width; the rest of a norm is its subclass's forward."""

    def __init__(self, width: int, bias: bool, gain_init: float, fp32: bool) -> None:
        super().__init__()
        self.fp32 = fp32
        self.gain = nn.Parameter(torch.full((width,), gain_init))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def lower(self, x: Tensor) -> Tensor:
        """The input in the precision in which statistics are taken."""
        return x.to(statistics_dtype(x, self.fp32))

    def affine(self, y: Tensor) -> Tensor:
        y = y * self.gain.to(y.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)


@NORM.register("layer")
class LayerNorm(_Affine):
    """(x - mean) / sqrt(var + eps), over the width, biased variance. Ba et al. 2016, arXiv:1607.06450, Eq. 4."""

    def __init__(self, width: int, bias: bool, site: str, *, eps: float, gain_init: float, fp32: bool) -> None:
        super().__init__(width, bias, gain_init, fp32)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = self.lower(x)
        return layer_norm(x, self.eps, self.gain.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class _ZeroCentred(nn.Module):
    """A norm whose gain is 1 + excess."""

    normalize: Callable[[Tensor, float, Tensor, Tensor | None], Tensor]

    def __init__(self, width: int, bias: bool, site: str, *, eps: float, gain_init: float, fp32: bool) -> None:
        super().__init__()
        self.eps, self.fp32 = eps, fp32
        self.excess = nn.Parameter(torch.full((width,), gain_init - 1))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(statistics_dtype(x, self.fp32))
        gain, bias = (1 + self.excess).to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        return self.normalize(x, self.eps, gain, bias)


@NORM.register("layer_zero")
class LayerNormZero(_ZeroCentred):
    """(1 + excess) (x - mean) / sqrt(var + eps), excess initially 0. Parmar et al. 2024 (Nemotron-4), arXiv:2402.16819.

    The same function as LayerNorm, but weight decay pulls the gain to 1 instead of 0. `gain_init` is 1 + excess.
    """

    normalize = staticmethod(layer_norm)


@NORM.register("layer_nonparam")
class LayerNormNonparametric(nn.Module):
    """(x - mean) / sqrt(var + eps), nothing learned. Groeneveld et al. 2024 (OLMo), arXiv:2402.00838, section 2.1."""

    def __init__(self, width: int, bias: bool, site: str, *, eps: float, fp32: bool) -> None:
        super().__init__()
        self.eps, self.fp32 = eps, fp32

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x.to(statistics_dtype(x, self.fp32)), self.eps)


@NORM.register("rms")
class RMSNorm(_Affine):
    """x / sqrt(mean(x^2) + eps), over the width. Zhang & Sennrich 2019, arXiv:1910.07467, Eq. 4; eps as in Llama."""

    def __init__(self, width: int, bias: bool, site: str, *, eps: float, gain_init: float, fp32: bool) -> None:
        super().__init__(width, bias, gain_init, fp32)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = self.lower(x)
        return rms_norm(x, self.eps, self.gain.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


@NORM.register("rms_nonparam")
class RMSNormNonparametric(nn.Module):
    """x / sqrt(mean(x^2) + eps), nothing learned: RMSNorm with a gain of 1. Zhang & Sennrich 2019, arXiv:1910.07467."""

    def __init__(self, width: int, bias: bool, site: str, *, eps: float, fp32: bool) -> None:
        super().__init__()
        self.eps, self.fp32 = eps, fp32

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(statistics_dtype(x, self.fp32))
        return rms_norm(x, self.eps, torch.ones(x.shape[-1], dtype=x.dtype, device=x.device))


@NORM.register("rms_zero")
class RMSNormZero(_ZeroCentred):
    """(1 + excess) x / sqrt(mean(x^2) + eps), excess initially 0. Gemma Team 2024, arXiv:2403.08295; modeling_gemma2.

    The same function as RMSNorm, but weight decay pulls the gain to 1 instead of 0. `gain_init` is 1 + excess.
    """

    normalize = staticmethod(rms_norm)


@NORM.register("rms_outside")
class RMSNormOutside(_Affine):
    """x / (sqrt(mean(x^2)) + eps): the form of the authors' code. Zhang & Sennrich 2019, rmsnorm_torch.py.

    Unlike eps inside the root, this removes the scale of small inputs too.
    """

    def __init__(self, width: int, bias: bool, site: str, *, eps: float, gain_init: float, fp32: bool) -> None:
        super().__init__(width, bias, gain_init, fp32)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = self.lower(x)
        with uncast(x):
            rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True) / math.sqrt(x.shape[-1])
            return self.affine(x / (rms + self.eps))


@NORM.register("t5")
class T5Norm(nn.Module):
    """gain x / sqrt(mean(x^2) + eps), mean in float32, product in the input's precision, no bias.

    Raffel et al. 2019, arXiv:1910.10683, section 2.1; precision as in HF modeling_t5.
    """

    def __init__(self, width: int, bias: bool, site: str, *, eps: float, gain_init: float) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.full((width,), gain_init))

    def forward(self, x: Tensor) -> Tensor:
        inverse_rms = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (x * inverse_rms).to(x.dtype) * self.gain.to(x.dtype)


@NORM.register("batch")
class BatchNorm(_Affine):
    """(x - mean) / sqrt(var + eps) per channel over batch and time. Ioffe & Szegedy 2015, arXiv:1502.03167, Alg. 1.

    In training the statistics at position t contain later positions and other sequences: the model sees its targets,
    and the training loss is not the loss of a language model. In evaluation running statistics are used and nothing
    leaks. Gradient accumulation makes the batch of the statistics smaller.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, width: int, bias: bool, site: str, *, eps: float, momentum: float, gain_init: float, fp32: bool
    ) -> None:
        super().__init__(width, bias, gain_init, fp32)
        self.eps, self.momentum = eps, momentum
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.lower(x).flatten(0, -2)
        with uncast(rows):
            if self.training:
                var, mean = torch.var_mean(rows, 0, correction=0)
                with torch.no_grad():
                    unbiased = var * (len(rows) / max(1, len(rows) - 1))
                    self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
                    self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)
            else:
                var, mean = self.running_var.to(rows), self.running_mean.to(rows)
            return self.affine((rows - mean) * torch.rsqrt(var + self.eps)).view(x.shape)


@NORM.register("scale")
class ScaleNorm(nn.Module):
    """g x / max(||x||, eps), one scalar g, initially sqrt(width). Nguyen & Salazar 2019, arXiv:1910.05895, Eq. 5."""

    def __init__(self, width: int, bias: bool, site: str, *, eps: float, gain_init: float, fp32: bool) -> None:
        super().__init__()
        self.eps, self.fp32 = eps, fp32
        self.gain = nn.Parameter(torch.tensor(gain_init * math.sqrt(width)))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(statistics_dtype(x, self.fp32))
        with uncast(x):
            y = x * (self.gain.to(x.dtype) / x.norm(dim=-1, keepdim=True).clamp(min=self.eps))
        return y if self.bias is None else y + self.bias.to(y.dtype)


DYT_ALPHA = {1024: (1.0, 1.0), 2048: (1.0, 0.5), 4096: (0.8, 0.2), 5120: (0.6, 0.15), 8192: (0.2, 0.05)}
"""Initial alpha of DyT before attention and elsewhere, by width: Table 11 of the paper, and for 5120 that of LLaMA 13B
in Table 10. The nearest width is used."""


@NORM.register("dyt")
class DynamicTanh(_Affine):
    """gain * tanh(alpha x) + bias, one scalar alpha per site. Zhu et al. 2025, arXiv:2503.10622, Eq. 1.

    The equation has a bias; the authors' language model (jiachenzhu/DyT, other_tasks/LLaMA) has none, so `norm_bias`
    is off unless set.
    """

    def __init__(
        self,
        width: int,
        bias: bool,
        site: str,
        *,
        alpha_attn: float | str,
        alpha_other: float | str,
        gain_init: float,
        fp32: bool,
    ) -> None:
        super().__init__(width, bias, gain_init, fp32)
        nearest = min(DYT_ALPHA, key=lambda known: abs(math.log(known / width)))
        requested, published = alpha_other, DYT_ALPHA[nearest][1]
        if site.startswith("attn"):
            requested, published = alpha_attn, DYT_ALPHA[nearest][0]
        self.alpha = nn.Parameter(torch.tensor(published if requested == "auto" else float(requested)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lower(x)
        with uncast(x):
            return self.affine(torch.tanh(self.alpha.to(x.dtype) * x))


@NORM.register("derf")
class DynamicErf(_Affine):
    """gain * erf(alpha x + shift) + bias, scalars alpha and shift per site. Chen et al. 2025, arXiv:2512.10938.

    Starts as in the authors' GPT-2 (language model/model_derf.patch), which scales the sum of token and position
    embeddings; here, as in DyT's Llama, `embed_scale` acts on the token embedding alone.
    """

    def __init__(
        self, width: int, bias: bool, site: str, *, alpha: float, shift: float, gain_init: float, fp32: bool
    ) -> None:
        super().__init__(width, bias, gain_init, fp32)
        self.alpha, self.shift = nn.Parameter(torch.tensor(alpha)), nn.Parameter(torch.tensor(shift))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lower(x)
        with uncast(x):
            return self.affine(torch.erf(self.alpha.to(x.dtype) * x + self.shift.to(x.dtype)))


@NORM.register("none")
class NoNorm(nn.Module):
    """The identity."""

    def __init__(self, width: int, bias: bool, site: str) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x
