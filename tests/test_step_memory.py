"""Chunked loss and activation checkpointing hold less memory, by the allocations that PyTorch's profiler records."""

from __future__ import annotations

import numpy as np
import pytest
from tensors import peak_bytes

from nexus_ablate.model import build_model
from nexus_ablate.training.step import Step

VOCABULARY = 512


def two_steps(config) -> Step:
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (config.train.batch_size, config.model.context + 1))
    step = Step(config, build_model(config, VOCABULARY).train(), 2, lambda number: rows)
    if step.chunked:
        step.chunk(2**16)
    step.take(0, rows)
    step.take(1, rows)
    return step


@pytest.mark.slow
def test_chunked_loss_and_activation_checkpointing_hold_less(tiny):
    sizes = "train.device=cpu", "train.batch_size=32", "model.n_layers=6"
    chunked = ("train.loss=chunked",)
    forms = ("train.loss=whole",), chunked, (*chunked, "train.activation_checkpointing=on")
    whole, less, least = (peak_bytes(lambda form=form: two_steps(tiny(*sizes, *form))) for form in forms)
    assert least < less < whole
