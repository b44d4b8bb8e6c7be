"""Counts that need no values: parameters and FLOPs."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from nexus_ablate.attention_core import AttentionCore
from nexus_ablate.axes.modules import parameter_roles
from nexus_ablate.config.roles import EMBEDDINGS
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.measure.probe import evaluation_mode
from nexus_ablate.model import countable_model

PEAK_FLOPS = {
    "GH200": (989e12, 67e12),
    "H200": (989e12, 67e12),
    "H200 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "H100 PCIE": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "A100": (312e12, 19.5e12),
    "A100 PCIE": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L40": (181e12, 90.5e12),
    "L4": (121e12, 30.3e12),
    "RTX 4090": (165e12, 82.6e12),
    "V100": (125e12, 15.7e12),
    "V100 PCIE": (112e12, 14e12),
}
"""FLOPs per second of dense matrix products, from the makers' data sheets: in bf16 and fp16 (V100: only fp16), and in
float32 without TF32.

A GPU has one of these names as a whole, besides words of `_SAME_GPU`: an RTX 4090 Laptop or 4090 D and a slice of a GPU
(MIG) are slower than what their names begin with."""
_SAME_GPU = re.compile(r"NVIDIA|TESLA|GEFORCE|SXM[2-5]|HBM\w+|\d+GB?")
"""Words in the names of GPUs that do not change these figures."""


def parameters(model: nn.Module) -> tuple[int, int]:
    """Number of parameters: all, and those outside tables (embedding, tied head, learned positions)."""
    roles = parameter_roles(model)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return sum(sizes.values()), sum(n for name, n in sizes.items() if roles[name] not in EMBEDDINGS)


def flops_per_token(config: RunConfig, vocab_size: int) -> float:
    """Training FLOPs of one token of a run: three times the forward matrix products.

    The backward pass multiplies each matrix twice. Attention counts all T x T scores, as in the plain path. Triangular
    systems are counted, norms and activations are not. Work that a micro-batch does once for all its sequences, such as
    FIRE's function of distances, is divided among its tokens.
    """
    return flops_of(countable_model(config, vocab_size), config)


def flops_of(model: nn.Module, config: RunConfig) -> float:
    """`flops_per_token` of a run's `countable_model`."""
    rows, context = config.train.batch_size, config.model.context
    return 3 * forward_flops(model, context, rows) / (rows * context)


class _Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products inside its `with`.

    PyTorch's own FlopCounterMode imports the compiler, which takes two seconds at every start.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler only to disable it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        elif func.overloadpacket is torch.ops.aten.linalg_solve_triangular:
            self.flops += args[0].shape[-1] * out.numel()  # by substitution
        return out


def forward_flops(model: nn.Module, context: int, rows: int) -> int:
    """FLOPs of a forward pass of `rows` sequences, by the plain path on the model's device.

    Passes with one and with two sequences give the FLOPs per sequence and those shared by all.
    """
    one, two = (_counted_flops(model, context, few) for few in (1, 2))
    return one + (rows - 1) * (two - one)


def _counted_flops(model: nn.Module, context: int, rows: int) -> int:
    cores = [module for module in model.modules() if isinstance(module, AttentionCore)]
    fused = [core.fused for core in cores]
    for core in cores:
        core.fused = False
    with evaluation_mode(model), _Products() as products:
        model(torch.zeros(rows, context, dtype=torch.long, device=next(model.parameters()).device))
    for core, was in zip(cores, fused, strict=True):
        core.fused = was
    return products.flops


def peak_flops(device_name: str, precision: str) -> float | None:
    """The device's peak in FLOPs per second at `train.precision`, or None if unknown."""
    words = re.split("[ -]", device_name.upper())
    peaks = PEAK_FLOPS.get(" ".join(word for word in words if not _SAME_GPU.fullmatch(word)))
    return peaks[precision == "fp32"] if peaks else None
