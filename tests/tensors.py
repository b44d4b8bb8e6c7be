"""Tensors that are the same in every run, a loss on some of them, and options with keys of a test's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from nexus_ablate.config.options import Option, default_option

TOKENS = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(0))
"""Two sequences for a model of 11 tokens and a context of 8."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def randomise(module: nn.Module, scale: float = 1.0) -> nn.Module:
    """The module with random numbers in all its parameters, each from a seed of its own."""
    for seed, parameter in enumerate(module.parameters()):
        parameter.copy_(scale * draw(*parameter.shape, seed=seed))
    return module


def next_token_loss(model: nn.Module) -> Tensor:
    """The loss of predicting TOKENS."""
    return nn.functional.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())


def option_with(axis: str, name: str, **keys: Any) -> Option:
    """An option with some of its keys set."""
    option = default_option(axis, name)
    option.keys |= keys
    return option


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes of tensors that `work` holds at a time, by the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = work()
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    del kept
    return int(np.cumsum([event.nbytes() for event in events]).max())
