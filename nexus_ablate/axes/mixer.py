"""The mixer axis: the branch of a block that mixes tokens. Attention is one of its options.

The classes are in `nexus_ablate/mixers.py`, above the core of attention, on which most of them are built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from nexus_ablate.axes.context import Context
from nexus_ablate.axes.conv import Conv, no_conv
from nexus_ablate.axes.modules import Geometry
from nexus_ablate.config.grammar import show
from nexus_ablate.config.options import Option, Registry, at_layer, option_files
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import ConfigError


@dataclass(frozen=True)
class MixerParts:
    """What a mixer is made from.

    Attributes:
        geometry: With the index of the block, `geometry.layer`.
        rotates: Whether the position scheme of the layer changes keys by position.
        inner_norm: Comes before the output projection; the identity except in Sub-LN.
        score_factor: The parametrization's factor on scores, if it has one.
        norm: Makes a norm of the norm axis from a site and a width.
        conv: Makes a convolution of the conv axis from a site and a width.
    """

    config: RunConfig
    geometry: Geometry
    rotates: bool
    inner_norm: nn.Module
    score_factor: float | None
    norm: Callable[[str, int], nn.Module]
    conv: Callable[[str, int], Conv] = no_conv


class Mixer(nn.Module):
    """Abstract: (B, T, D) to (B, T, D), where no token sees a later one.

    A mixer made of queries, keys and values has its `AttentionCore` in `core`, where probes and evaluations find it.
    Its YAML then reads `attention`, or `all`.
    """

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        raise NotImplementedError


MIXER: Registry[Mixer] = Registry("mixer")


def mixer_at(layer: int, option: Option, parts: MixerParts) -> Mixer:
    """The mixer of a layer.

    Raises:
        ConfigError: It has an `AttentionCore` and its YAML doesn't say that it reads `attention`, or the reverse.
    """
    mixer, file = MIXER.build_at(layer, option, parts), option_files("mixer")[at_layer("mixer", option, layer).name]
    reads_attention = not {"all", "attention"}.isdisjoint(file.reads)
    if reads_attention != (getattr(mixer, "core", None) is not None):
        problem = f"{file.override} has an AttentionCore in `core` if and only if it reads `attention`"
        raise ConfigError(problem, f"reads: {show(file.reads)}", "reads: all in its YAML, or no core in its class")
    return mixer
