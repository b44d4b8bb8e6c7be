"""The init axis, and the one place where parameters get their values: gain x standard deviation x z.

z is standard normal from a stream keyed by (seed, parameter name, shape). So two arms share z wherever name and shape
agree, whatever either adds or removes; an arm's options decide only the factors.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from nexus_ablate.axes.roles import EMBEDDINGS, VECTOR, Geometry, parameter_roles
from nexus_ablate.registry import Registry


class Init:
    """Abstract: the standard deviation of a matrix by its role and shape (d_out, d_in), before the placement's gain."""

    def std(self, role: str, shape: torch.Size) -> float:
        raise NotImplementedError


INITS: Registry[Init] = Registry("init")


@INITS.register("gpt2")
class GPT2Init(Init):
    """std everywhere, branch outputs divided by sqrt(2L), one addition to the stream each. GPT-2, section 2.3."""

    def __init__(self, geometry: Geometry, *, std: float) -> None:
        self._std, self._branch_scale = std, (2 * geometry.n_layers) ** -0.5

    def std(self, role: str, shape: torch.Size) -> float:
        return self._std * (self._branch_scale if role in ("attn_out", "ffn_out") else 1.0)


@INITS.register("xavier")
class XavierInit(Init):
    """sqrt(2 / (fan_in + fan_out)), Glorot & Bengio 2010, Eq. 16; tables 1 / sqrt(d_model): unit logits when tied."""

    def __init__(self, geometry: Geometry) -> None:
        self._table_std = geometry.d_model**-0.5

    def std(self, role: str, shape: torch.Size) -> float:
        return self._table_std if role in EMBEDDINGS else math.sqrt(2 / (shape[0] + shape[1]))


def stream(seed: int, *names: object) -> int:
    """A seed for the random stream of this name: 63 bits, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, (seed, *names))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def standard_normal(seed: int, name: str, shape: torch.Size) -> Tensor:
    """The z of a parameter, float32 on the CPU."""
    generator = torch.Generator().manual_seed(stream(seed, "init", name, tuple(shape)))
    return torch.randn(shape, generator=generator)


@torch.no_grad()
def initialise(model: nn.Module, seed: int, init: Init, gains: dict[str, float]) -> dict[str, str]:
    """Give every matrix of the model its values.

    Returns:
        The hash of each z by parameter name; arms are paired where these agree.
    """
    hashes = {}
    roles = parameter_roles(model)
    for name, parameter in model.named_parameters():
        if roles[name] == VECTOR:
            continue  # its module has set it
        z = standard_normal(seed, name, parameter.shape)
        hashes[name] = hashlib.blake2b(z.numpy().data, digest_size=8).hexdigest()
        parameter.copy_(z.mul_(init.std(roles[name], parameter.shape) * gains.get(roles[name], 1.0)))
    return hashes
