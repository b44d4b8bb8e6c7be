"""Chunked loss and activation checkpointing hold less memory, by the allocations that PyTorch's profiler records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile

from nexus_ablate.model import build_model
from nexus_ablate.training.step import Step

VOCABULARY = 512


def peak_bytes(config) -> int:
    """Most bytes that two training steps hold at a time."""
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (config.train.batch_size, config.model.context + 1))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = Step(config, build_model(config, VOCABULARY).train(), 2, lambda number: rows)
        if step.chunked:
            step.chunk(2**16)
        step.take(0, rows)
        step.take(1, rows)
    recorded: Any = profiler.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return int(np.cumsum([event.nbytes() for event in events]).max())


@pytest.mark.slow
def test_chunked_loss_and_activation_checkpointing_hold_less(tiny):
    sizes = "train.device=cpu", "train.batch_size=32", "model.n_layers=6"
    chunked = ("train.loss=chunked",)
    forms = ("train.loss=whole",), chunked, (*chunked, "train.activation_checkpointing=on")
    whole, less, least = (peak_bytes(tiny(*sizes, *form)) for form in forms)
    assert least < less < whole
