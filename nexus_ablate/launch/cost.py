"""The cost of a run: parameters, FLOPs, steps, time. Writes nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass

from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.data import cached, vocabulary_size
from nexus_ablate.errors import ConfigError

MEASURED_SECONDS = 1.0
START_SECONDS = 2.0  # for start-up, checkpoints and the last evaluation of a small run
_LARGEST_MEASURED = 1e12  # FLOPs of one step: some seconds on a CPU


@dataclass(frozen=True)
class Cost:
    """Counts of one run; FLOPs are those of training a token."""

    params: int
    params_non_embedding: int
    flops_per_token: float
    steps: int
    tokens: int


_COUNTED: dict[str, Cost] = {}
_VOCABULARIES: dict[str, int] = {}


def cost_of(config: RunConfig) -> Cost:
    """The costs of a run, counted on the meta device, once in a process for all seeds."""
    from nexus_ablate.measure.counts import flops_of, parameters
    from nexus_ablate.model import countable_model

    key = repr((config.science() | {"seed": None}, config.data, config.train))
    if key not in _COUNTED:
        model = countable_model(config, vocabulary(config))
        everything, without_tables = parameters(model)
        flops = flops_of(model, config)
        per_step, steps = config.resolved.tokens_per_step, config.resolved.steps
        if steps is None:
            steps = -int(-config.train.flops // (flops * per_step))
        _COUNTED[key] = Cost(everything, without_tables, flops, steps, steps * per_step)
    return _COUNTED[key]


def text_tokens(config: RunConfig) -> int | None:
    """Training tokens of the text; None if there is no text, or it has not been tokenized on this machine yet."""
    try:
        data = cached(config.data, config.model.context)
    except ConfigError:
        return None  # `explain` and `plan` work without the data; a launch refuses
    return None if data is None else len(data.train)


def vocabulary(config: RunConfig) -> int:
    """The vocabulary size of the data, read once in a process."""
    key = repr(config.data)
    if key not in _VOCABULARIES:
        _VOCABULARIES[key] = vocabulary_size(config.data)
    return _VOCABULARIES[key]


def measured_speed(config: RunConfig, threads: int) -> float | None:
    """Training tokens per second on this machine now, from one second of steps on random tokens; None if too slow.

    Where one step takes a second, one is measured after one of warm-up; a step of more than 1e12 FLOPs on a CPU is not.
    """
    import numpy as np
    import torch

    from nexus_ablate.model import build_model
    from nexus_ablate.training.device import device_of
    from nexus_ablate.training.step import Step

    device = device_of(config.train)
    vocab_size = vocabulary(config)
    shape = config.train.batch_size * config.train.grad_accum, config.model.context + 1
    per_step = config.resolved.tokens_per_step
    if device.type == "cpu" and cost_of(config).flops_per_token * per_step > _LARGEST_MEASURED:
        return None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = np.random.default_rng(0).integers(vocab_size, size=shape)
        step = Step(config, build_model(config, vocab_size).to(device).train(), 1, lambda number: rows)
        step.checks_at_once = not step.optimizer.skips_nonfinite  # this only measures speed

        def take() -> None:
            step.take(0, rows)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        began = time.monotonic()
        take()
        start, steps = time.monotonic(), 0
        least = 1 if start - began > MEASURED_SECONDS else 2
        while steps < least or time.monotonic() - start < MEASURED_SECONDS:
            take()
            steps += 1
        return steps * per_step / (time.monotonic() - start)
    finally:
        torch.set_num_threads(before)


def seconds_of(config: RunConfig, cost: Cost, tokens_per_second: float) -> float:
    """Wall-clock seconds of a run: training, and validation at a third of the cost per token."""
    validations = cost.steps / config.validates_every(cost.steps) + 1
    return START_SECONDS + (cost.tokens + validations * config.train.eval_tokens / 3) / tokens_per_second
