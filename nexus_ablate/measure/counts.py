"""Counts that need no values: parameters and FLOPs, on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from nexus_ablate.attention import AttentionCore
from nexus_ablate.axes.roles import EMBEDDINGS, parameter_roles
from nexus_ablate.config import RunConfig
from nexus_ablate.model import meta_model

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
    model, context = meta_model(config, vocab_size), config.model.context
    return 3 * sum(flops_by_module(model, context).values()) / context


def flops_by_module(model: nn.Module, tokens: int) -> dict[str, int]:
    """Forward FLOPs of one sequence, each counted once, for the innermost module at work; its full name.

    The model is on the meta device, and takes the plain path from here on.
    """
    from torch.utils.flop_counter import FlopCounterMode

    spent: Counter[str] = Counter()
    at_work: list[list[int]] = []  # FLOPs before each module that has begun, and those of the modules it called
    counter = FlopCounterMode(display=False)

    def begin(module: nn.Module, inputs: object) -> None:
        at_work.append([counter.get_total_flops(), 0])

    def end(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            before, called = at_work.pop()
            flops = counter.get_total_flops() - before
            spent[name] += flops - called
            if at_work:
                at_work[-1][1] += flops

        return hook

    handles = []
    for name, module in model.named_modules():
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end(name))]
        if isinstance(module, AttentionCore):
            module.fused = False
    with torch.no_grad(), counter:
        model.eval()(torch.zeros(1, tokens, dtype=torch.long, device="meta"))
    for handle in handles:
        handle.remove()
    return dict(spent)


def peak_flops(device_name: str) -> float | None:
    """The device's bf16 peak where it is known, else None."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)
