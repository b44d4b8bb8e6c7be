"""Counts that need no values: parameters and FLOPs, on the meta device."""

from __future__ import annotations

import torch
from torch import nn

from nexus_ablate.axes.roles import EMBEDDINGS, parameter_roles
from nexus_ablate.config import RunConfig
from nexus_ablate.model import AttentionCore, meta_model

PEAK_FLOPS = {  # dense bf16 matrix products a second, from the makers' data sheets
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "V100": 125e12,
}


def parameters(model: nn.Module) -> tuple[int, int]:
    """All parameters, and those that are not in tables (embedding, tied head, learned positions)."""
    roles = parameter_roles(model)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return sum(sizes.values()), sum(n for name, n in sizes.items() if roles[name] not in EMBEDDINGS)


def flops_per_token(config: RunConfig, vocab_size: int) -> float:
    """Training FLOPs of one token at the training context: three times the forward matrix products.

    The backward pass multiplies each matrix twice. Attention is counted as the plain path does it, all T x T scores;
    norms and activations are not counted.
    """
    from torch.utils.flop_counter import FlopCounterMode

    model = meta_model(config, vocab_size).eval()
    for module in model.modules():
        if isinstance(module, AttentionCore):
            module.fused = False
    tokens_BT = torch.zeros(1, config.model.context, dtype=torch.long, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens_BT)
    return 3 * counter.get_total_flops() / config.model.context


def peak_flops(device_name: str) -> float | None:
    """The device's bf16 peak where it is known, else None."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)
