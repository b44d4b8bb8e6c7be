"""The memory of a training step, counted on tensors without values, which needs neither a GPU nor that memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nexus_ablate.bench.traffic import Traffic
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.kernels.loss import GPU_LOGIT_BYTES
from nexus_ablate.model import GPT
from nexus_ablate.training.step import Step


@dataclass(frozen=True)
class StepMemory:
    """Bytes of tensors, without the allocator's fragmentation.

    Attributes:
        between: Bytes between two steps: weights, buffers and optimizer state.
        peak: Most bytes at any time in a step: the same plus gradients, activations and temporaries.
        moved: Bytes read and written by the operations of a step; not counted on a GPU.
    """

    between: int
    peak: int
    moved: int | None = None


def counted_memory(make: Callable[[], Callable[[], object]]) -> StepMemory:
    """The memory of a step.

    Args:
        make: Builds model and optimizer, and returns the step. It runs twice: the first creates the optimizer state.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), Traffic() as traffic:
        step = make()
        step()
        before = traffic.bytes_moved
        step()
        return StepMemory(traffic.live_bytes(), traffic.peak_bytes, traffic.bytes_moved - before)


def allocated_memory(make: Callable[[], Callable[[], object]]) -> StepMemory:
    """The memory of a step on a GPU, by PyTorch's allocator."""
    gc.collect()  # frees earlier measurements
    before = torch.cuda.memory_allocated()
    step = make()
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return StepMemory(torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before)


def step_of(config: RunConfig, vocab_size: int, device: str) -> Callable[[], object]:
    """The training step of a run, from tokens to new weights, for a model without initial values.

    Without values, the kernels are those of a CPU; its attention keeps the same tensors as a GPU's fused attention.
    Logits are chunked as on a GPU.
    """
    rows = np.zeros((config.train.batch_size * config.train.grad_accum, config.model.context + 1), np.int64)
    with torch.device(device):
        model = GPT(config, vocab_size).train()
    step = Step(config, model, 2, lambda number: rows)
    step.checks_at_once = False  # there is no value to check
    if step.chunked:
        step.chunk(GPU_LOGIT_BYTES)
    if step.compiled:
        step.compile(rows)
    return lambda: step.take(0, rows)


def step_memory(config: RunConfig, vocab_size: int) -> StepMemory:
    """The counted memory of a run's uncompiled step on a GPU."""
    return counted_memory(lambda: step_of(config, vocab_size, "cpu"))
