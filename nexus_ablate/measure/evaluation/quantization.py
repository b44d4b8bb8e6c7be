"""Simulated 8-bit and 4-bit quantization of weights and activations, which shows the cost of outliers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.axes.modules import HeadLinear
from nexus_ablate.measure.evaluation.subject import EVALUATION, Evaluation, NotDefined, Subject
from nexus_ablate.measure.probe import evaluation_mode, hooks

TARGETS = 16384
MOMENTUM = 0.9

Ranges = Mapping[nn.Module, tuple[float, float]]


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme with rounding to the nearest level.

    Attributes:
        bits: Bits of weights and, unless `weights_only`, of the inputs of linear layers.
        scale_of: What shares a scale: the whole `tensor`; each `channel`, that is, an output channel of a weight or a
            token of an input; or each `group` of consecutive input channels of a `channel`.
        static: Whether the range of inputs comes from calibration; otherwise from their largest magnitude, by
            `scale_of`.
    """

    bits: int
    scale_of: str
    static: bool = False
    weights_only: bool = False


SCALES = ("tensor", "channel", "group")
SCHEMES = {
    **{f"dynamic_{scale}": Scheme(8, scale) for scale in SCALES},
    **{f"static_{scale}": Scheme(8, scale, static=True) for scale in ("tensor", "channel")},
    **{f"int4_{scale}": Scheme(4, scale) for scale in SCALES},
    **{f"int4_weights_{scale}": Scheme(4, scale, weights_only=True) for scale in SCALES},
}
BY_BLOCK = "dynamic_tensor"


@EVALUATION.register("quantization")
class Quantization(Evaluation):
    """Loss in nats per token before quantization, and for each scheme after it, with the `gap` (after - before).

    Weight and input of every linear layer in the blocks are rounded to the nearest level. Embedding, head, norms,
    attention products and the per-head matrices of a score or a gate stay in float. Weights: symmetric, with steps of
    absmax / 127, or absmax / 7 for 4 bits. Dynamic activations: symmetric, by the absmax of each call. Static
    activations (8 bits): asymmetric over 256 levels, from the running minimum and maximum (momentum 0.9) over
    `calibration` training sequences, as in Bondarenko et al. 2023, arXiv:2306.12929, section 5. Activations under
    `int4_weights_*` stay in float, as in the round-to-nearest baseline of Frantar et al. 2022 (GPTQ), arXiv:2210.17323.
    `gap_by_block` rounds one block alone (dynamic_tensor); `worst_block` has the largest of these gaps. Not defined for
    a mixture of experts, most of whose weights are in no linear layer.
    """

    def __init__(self, *, group: int, calibration: int) -> None:
        self.group, self.calibration = group, calibration

    def __call__(self, subject: Subject) -> dict[str, Any]:
        if any(weight.ndim > 2 for weight in subject.model.blocks.parameters()):
            raise NotDefined(
                "stacked weights, such as those of experts, are in no linear layer and would stay in float"
            )
        windows = subject.windows(TARGETS)
        model = subject.model
        ranges = calibrate(subject, self.calibration)

        def loss(scheme: Scheme, maps: list[nn.Linear]) -> float:
            with quantized(maps, scheme, ranges, self.group):
                return subject.loss(windows)

        before = subject.loss(windows)
        after = {name: loss(scheme, linear_maps(model.blocks)) for name, scheme in SCHEMES.items()}
        gaps = [loss(SCHEMES[BY_BLOCK], linear_maps(block)) - before for block in model.blocks]
        return {
            "loss": before,
            "schemes": {name: {"loss": value, "gap": value - before} for name, value in after.items()},
            "gap_by_block": gaps,
            "worst_block": max(range(len(gaps)), key=gaps.__getitem__),
        }


def linear_maps(part: nn.Module) -> list[nn.Linear]:
    """The linear layers that are called as modules: all except those of a HeadLinear."""
    by_head = {id(m) for heads in part.modules() if isinstance(heads, HeadLinear) for m in heads.modules()}
    return [m for m in part.modules() if isinstance(m, nn.Linear) and id(m) not in by_head]


def calibrate(subject: Subject, sequences: int) -> Ranges:
    """Running minimum and maximum of the input of every linear layer, one sequence at a time."""
    ranges: dict[nn.Module, tuple[float, float]] = {}

    def watch(module: nn.Module, inputs: tuple[Tensor]) -> None:
        low, high = (float(x) for x in inputs[0].aminmax())
        if module in ranges:
            old_low, old_high = ranges[module]
            low = MOMENTUM * old_low + (1 - MOMENTUM) * low
            high = MOMENTUM * old_high + (1 - MOMENTUM) * high
        ranges[module] = low, high

    with hooks() as handles, evaluation_mode(subject.model):
        handles += [m.register_forward_pre_hook(watch) for m in linear_maps(subject.model.blocks)]
        for tokens_T in subject.calibration(sequences):
            with subject.precision():
                subject.model(subject.on_device(tokens_T[None]))
    return ranges


@contextmanager
def quantized(maps: list[nn.Linear], scheme: Scheme, ranges: Ranges, group: int) -> Iterator[None]:
    """Inside the `with`, the layers use rounded weights and inputs; afterwards their weights are restored."""
    weights = [m.weight.data for m in maps]

    def round_input(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        if scheme.static:
            return (round_asymmetric(inputs[0], *ranges[module]),)
        return (round_symmetric(inputs[0], scheme.bits, scheme.scale_of, group),)

    with hooks() as handles:
        try:
            for m in maps:
                m.weight.data = round_symmetric(m.weight.data, scheme.bits, scheme.scale_of, group)
                if not scheme.weights_only:
                    handles.append(m.register_forward_pre_hook(round_input))
            yield
        finally:
            for m, weight in zip(maps, weights, strict=True):
                m.weight.data = weight


def round_symmetric(x: Tensor, bits: int, scale_of: str, group: int) -> Tensor:
    """x rounded to multiples of its largest magnitude / (2^(bits - 1) - 1).

    Args:
        scale_of: Whether the largest magnitude is that of x (`tensor`), of each row along its last axis (`channel`),
            or of each `group` entries of a row (`group`; the last group of a row may be shorter).
    """
    width, levels = x.shape[-1], 2 ** (bits - 1) - 1
    if scale_of == "group":
        x = F.pad(x, (0, -width % group)).unflatten(-1, (-1, group))
    magnitude = x.abs().amax() if scale_of == "tensor" else x.abs().amax(-1, keepdim=True)
    step = (magnitude.float() / levels).clamp(min=torch.finfo(torch.float32).tiny)
    rounded = ((x.float() / step).round().clamp(-levels - 1, levels) * step).to(x.dtype)
    # A slice that is not contiguous would make a product on the CPU a hundred times as slow.
    return rounded.flatten(-2)[..., :width].contiguous() if scale_of == "group" else rounded


def round_asymmetric(x: Tensor, low: float, high: float) -> Tensor:
    """x rounded to 256 levels from low to high, clipped outside. The range is widened to include 0 as a level."""
    low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / 255 or 1.0
    zero = round(-low / step)
    return (((x.float() / step).round() + zero).clamp(0, 255).sub(zero) * step).to(x.dtype)
