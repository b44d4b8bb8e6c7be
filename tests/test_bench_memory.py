"""The counted memory of a training step against what the allocator of a real one gave out."""

from typing import Any

import numpy as np
import pytest
import torch

from nexus_ablate.bench import memory
from nexus_ablate.bench.memory import counted_memory, step_memory
from nexus_ablate.bench.traffic import Traffic, counted
from nexus_ablate.config.compose import compose
from nexus_ablate.model import build_model
from nexus_ablate.training.step import Step

VOCABULARY = 512


def allocated(config):
    """Bytes that PyTorch's allocator has given out after two real steps, and at most during them."""
    from torch.profiler import ProfilerActivity, profile

    rows = np.random.default_rng(0).integers(0, VOCABULARY, (config.train.batch_size, config.model.context + 1))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = build_model(config, VOCABULARY).train()
        step = Step(config, model, 2, lambda number: rows)
        step.take(0, rows)
        step.take(1, rows)
    recorded: Any = profiler.profiler
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    live = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    return live[-1], live.max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["train.precision=bf16"],
        ["preset=gpt2", "train.loss=whole"],
        ["train.loss=chunked", "train.precision=bf16"],
        ["train.activation_checkpointing=on"],
    ],
)
def test_counted_bytes_are_those_that_the_allocator_of_a_real_step_gives_out(tiny, overrides):
    config = tiny("train.device=cpu", "train.batch_size=8", "model.context=64", "model.d_model=64", *overrides)
    between, peak = allocated(config)
    result = step_memory(config, VOCABULARY)
    assert result.between == pytest.approx(between, rel=0.01)
    assert result.peak == pytest.approx(peak, rel=0.01)


@pytest.mark.slow
def test_a_step_without_values_holds_weights_moments_and_gradients(tiny):
    config = tiny("train.device=cpu", "train.precision=bf16")
    params = sum(p.nbytes for p in build_model(config, VOCABULARY).parameters())
    result = step_memory(config, VOCABULARY)
    assert 3 * params <= result.between <= 3 * params + 4096  # besides them the counters of steps and constants
    assert result.peak >= result.between + params


@pytest.mark.slow
def test_chunked_loss_and_activation_checkpointing_hold_less(tiny, monkeypatch):
    monkeypatch.setattr(memory, "GPU_LOGIT_BYTES", 2**16)  # eight chunks
    chunked = ["train.loss=chunked"]
    forms = ["train.loss=whole"], chunked, [*chunked, "train.activation_checkpointing=on"]
    sizes = "train.device=cpu", "train.batch_size=32", "model.n_layers=6"
    whole, less, least = (step_memory(tiny(*sizes, *form), VOCABULARY).peak for form in forms)
    assert least < less < whole


@pytest.mark.slow
def test_the_chunked_loss_of_gpt_2_moves_about_what_whole_logits_do_and_holds_less():
    """At 16 x 1024 tokens and nanoGPT's vocabulary; 1.48 times as much with chunks of an eighth of the size."""
    shape = "preset=gpt2", "model=base", "train.batch_size=16", "train.precision=bf16", "train.device=cpu"
    whole, chunked = (step_memory(compose([*shape, f"train.loss={form}"]), 50304) for form in ("whole", "chunked"))
    assert whole.moved and chunked.moved and chunked.moved < 1.1 * whole.moved
    assert chunked.peak < 0.6 * whole.peak


def test_memory_is_counted_from_what_is_made_empty_and_not_from_what_is_changed_in_place():
    before = torch.zeros(1000)
    assert counted(lambda: before.add_(1)).peak_bytes == 0
    with Traffic() as traffic:
        weights = torch.empty(1000)
    assert traffic.live_bytes() == 4000
    assert traffic.bytes_moved == 0
    del weights
    assert traffic.live_bytes() == 0


def test_a_step_without_values_takes_no_memory_of_its_own():
    def make():
        table = torch.empty(2**40)  # 4 TiB
        return lambda: table + 1

    result = counted_memory(make)
    assert (result.between, result.peak) == (2**42, 2**43)
