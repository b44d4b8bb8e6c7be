"""The init axis. All parameters get their initial values here: gain x standard deviation x z.

z is standard normal from a random stream keyed by (seed, parameter name, shape). So two arms share z wherever name and
shape agree, even if one has other parameters besides. An arm's options only determine the factors and the cutoff of z.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nexus_ablate.axes.modules import Geometry, own_stds, parameter_roles
from nexus_ablate.axes.param import Parametrization
from nexus_ablate.config.options import Registry
from nexus_ablate.config.roles import EMBEDDINGS, SMALL_MAP, VECTOR
from nexus_ablate.errors import ConfigError


@dataclass(frozen=True)
class Weight:
    """What an initial standard deviation may depend on.

    Attributes:
        shape: (d_out, d_in) of a matrix, or of each of a stack of matrices; (rows, width) of a table.
        layer: The index of its block, from 0; None outside the blocks.
        own: The standard deviation that its module prescribes under every init, if it does.
    """

    role: str
    shape: torch.Size
    layer: int | None
    own: float | None = None


class Init:
    """Abstract: the standard deviation of a weight, before the placement's gain."""

    cutoff: float | None = None
    """The cutoff of the normal distribution in standard deviations, if there is one."""

    def std(self, weight: Weight) -> float:
        raise NotImplementedError


INIT: Registry[Init] = Registry("init")
BRANCH_OUTPUTS = ("attn_out", "ffn_out")


@INIT.register("gpt2")
class GPT2Init(Init):
    """std everywhere; branch outputs std / sqrt(2L), since 2L branches add to the residual stream. GPT-2, section 2.3.

    Without `branch_scale` it is OLMo-2's init (arXiv:2501.00656), except for that one's cutoff at 3 std.
    """

    def __init__(self, geometry: Geometry, *, std: float, branch_scale: bool) -> None:
        self._std, self._output_scale = std, (2 * geometry.n_layers) ** -0.5 if branch_scale else 1.0

    def std(self, weight: Weight) -> float:
        return self._std * (self._output_scale if weight.role in BRANCH_OUTPUTS else 1.0)


@INIT.register("small")
class SmallInit(Init):
    """sqrt(2 / (5 d_model)) everywhere: Xavier's std for a 4 d FFN. Nguyen & Salazar 2019, arXiv:1910.05895.

    The authors' code uses 1 / sqrt(d_model) for tables, and Xavier's std for FFNs of other widths. One std for all,
    with `branch_scale` (outputs divided by sqrt(2L)) and `embed_scale=sqrt_d`, is the recipe of Takase et al. 2023
    (Spike No More), arXiv:2312.16903, according to other papers; we haven't checked that paper's text.
    """

    def __init__(self, geometry: Geometry, *, branch_scale: bool) -> None:
        self._std = math.sqrt(2 / (5 * geometry.d_model))
        self._output_scale = (2 * geometry.n_layers) ** -0.5 if branch_scale else 1.0

    def std(self, weight: Weight) -> float:
        return self._std * (self._output_scale if weight.role in BRANCH_OUTPUTS else 1.0)


@INIT.register("xavier")
class XavierInit(Init):
    """sqrt(2 / (fan_in + fan_out)), Glorot & Bengio 2010, Eq. 16; tables 1 / sqrt(d_model): unit logits when tied."""

    def __init__(self, geometry: Geometry) -> None:
        self._table_std = geometry.d_model**-0.5

    def std(self, weight: Weight) -> float:
        return self._table_std if weight.role in EMBEDDINGS else math.sqrt(2 / (weight.shape[0] + weight.shape[1]))


@INIT.register("megatron")
class MegatronInit(Init):
    """1 / sqrt(2.5 d_model), branch outputs divided by sqrt(2L), an untied head 1 / sqrt(d_model), cutoff at 3 std.

    OLMo's `full_megatron` with HybridNorm's std (arXiv:2503.04598; authors' 1.2B configuration: init_std 0.013975 at
    d_model 2048), after Shoeybi et al. 2019, arXiv:1909.08053.
    """

    cutoff = 3.0

    def __init__(self, geometry: Geometry) -> None:
        self._std, self._head_std = (2.5 * geometry.d_model) ** -0.5, geometry.d_model**-0.5
        self._output_scale = (2 * geometry.n_layers) ** -0.5

    def std(self, weight: Weight) -> float:
        if weight.role == "head":
            return self._head_std
        return self._std * (self._output_scale if weight.role in BRANCH_OUTPUTS else 1.0)


@INIT.register("mitchell")
class MitchellInit(Init):
    """1 / sqrt(fan_in); outputs of block l (from 0) 1 / sqrt(2 fan_in (l + 1)); tables 1 / sqrt(d_model); cutoff at 3.

    OLMo-1's init. Groeneveld et al. 2024, arXiv:2402.00838; `InitFnType.mitchell` in the authors' code.
    """

    cutoff = 3.0

    def __init__(self, geometry: Geometry) -> None:
        self._table_std = geometry.d_model**-0.5

    def std(self, weight: Weight) -> float:
        if weight.role in EMBEDDINGS:
            return self._table_std
        additions = 2 * (weight.layer + 1) if weight.role in BRANCH_OUTPUTS and weight.layer is not None else 1
        return (weight.shape[1] * additions) ** -0.5


@INIT.register("fan_in")
class FanInInit(Init):
    """1 / sqrt(fan_in), branch outputs divided by sqrt(2L); tables 1 / sqrt(d_model): unit logits when tied.

    A constant std is right for one width: with 0.02 and a width of 64, the input of an activation has an RMS of 0.16.
    """

    def __init__(self, geometry: Geometry, *, branch_scale: bool) -> None:
        self._table_std = geometry.d_model**-0.5
        self._output_scale = (2 * geometry.n_layers) ** -0.5 if branch_scale else 1.0

    def std(self, weight: Weight) -> float:
        if weight.role in EMBEDDINGS:
            return self._table_std
        return weight.shape[1] ** -0.5 * (self._output_scale if weight.role in BRANCH_OUTPUTS else 1.0)


@INIT.register("checkpoint")
class CheckpointInit(Init):
    """The final weights of another run (training/start.py); nothing is drawn.

    Seeds then differ only in data order and dropout.
    """

    def __init__(self, geometry: Geometry, *, run: str) -> None:
        self._run = run

    def std(self, weight: Weight) -> float:
        fix = "nexus-ablate init=checkpoint init.run=RUN, or nexus_ablate.train(config)"
        raise ConfigError("init=checkpoint draws no initial values; a run loads them when it starts", self._run, fix)


def truncated(z: Tensor, cutoff: float) -> Tensor:
    """z transformed to the normal distribution truncated at +-cutoff, quantile by quantile, like `trunc_normal_`."""
    tail = torch.special.ndtr(torch.tensor(-cutoff, dtype=torch.float64))
    return torch.special.ndtri(tail + (1 - 2 * tail) * torch.special.ndtr(z.double())).to(z.dtype)


def layer_of(name: str) -> int | None:
    """The block of a parameter, by its name: `blocks.3.attn.out.weight` is in block 3."""
    top, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if top == "blocks" else None


def stream(seed: int, *names: object) -> int:
    """A seed for the random stream of this name: 63 bits, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *names))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def standard_normal(seed: int, name: str, shape: torch.Size) -> Tensor:
    """The z of a parameter, float32 on the CPU."""
    generator = torch.Generator().manual_seed(stream(seed, "init", name, tuple(shape)))
    return torch.randn(shape, generator=generator)


def first_std(weight: Weight, init: Init, gains: dict[str, float], param: Parametrization) -> float:
    """The initial standard deviation of a weight: the init's, times the factors of placement and parametrization.

    A parametrization that constrains the weight sets it instead, whatever was drawn.
    """
    if (constrained := param.constrained_std(weight.role, weight.shape)) is not None:
        return constrained
    if weight.own is not None:
        return weight.own
    if weight.role == SMALL_MAP:
        return weight.shape[1] ** -0.5
    std = init.std(weight) * gains.get(weight.role, 1.0)
    return std * param.factors(weight.role, weight.layer is not None).init


def drawn_weights(model: nn.Module) -> dict[str, Weight]:
    """The parameters whose initial values are drawn, by name. Modules set the others, the vectors without a `stds`."""
    roles, stds = parameter_roles(model), own_stds(model)
    return {
        name: Weight(roles[name], parameter.shape[-2:], layer_of(name), stds.get(name))
        for name, parameter in model.named_parameters()
        if roles[name] != VECTOR or name in stds
    }


@torch.no_grad()
def initialise(
    model: nn.Module, seed: int, init: Init, gains: dict[str, float], param: Parametrization
) -> dict[str, str]:
    """Set the initial values of every matrix of the model.

    Returns:
        The hash of each z by parameter name. Equal hashes: two arms share these values.
    """
    hashes = {}
    weights = drawn_weights(model)
    for name, parameter in model.named_parameters():
        if name not in weights:
            continue  # set by its module
        z = standard_normal(seed, name, parameter.shape)
        hashes[name] = hashlib.blake2b(z.numpy().data, digest_size=8).hexdigest()
        shaped = z if init.cutoff is None else truncated(z, init.cutoff)
        parameter.copy_(shaped * first_std(weights[name], init, gains, param))
    return hashes
