"""The signal inside a model before its first step: what an activation sees, and a branch beside the embedding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nexus_ablate.axes.ffn import MLP, ScaledSwiGLU
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.measure.activation_statistics import rms
from nexus_ablate.measure.counts import parameters
from nexus_ablate.measure.probe import evaluation_mode, hooks
from nexus_ablate.measure.regime import InitialSignal
from nexus_ablate.model import GPT, build_model, countable_model

LARGEST = 30_000_000
"""Parameters of the largest model that is built to see its signal, in a fraction of a second."""
LEVELS = 2048
"""Quantiles of the normal input of an activation."""


def initial_of(config: RunConfig, vocab_size: int) -> InitialSignal | None:
    """The signal of a configuration's model; None for a model that takes long to build, or starts from a checkpoint."""
    if "run" in config.resolved.init.keys or parameters(countable_model(config, vocab_size))[0] > LARGEST:
        return None
    return initial_signal(build_model(config, vocab_size))


@torch.no_grad()
def initial_signal(model: GPT) -> InitialSignal:
    """The signal in the first block of a model with initial values, for one sequence of different tokens."""
    block: Any = model.blocks[0]
    dropout: Any = model.dropout
    ffn, seen = block.ffn, dict[str, Tensor]()
    tokens = torch.arange(model.geometry.context, device=model.embedding.weight.device)[None]
    tokens %= len(model.embedding.weight)
    with hooks() as handles, evaluation_mode(model), statistics_of_the_batch(model):
        handles.append(dropout.register_forward_hook(lambda module, inputs, out: seen.update(embedding=out)))
        handles.append(block.register_forward_hook(lambda module, inputs, out: seen.update(stream=block.residual(out))))
        with activation_input(ffn, seen):
            model(tokens)
        whole = seen["stream"]
        handles.append(ffn.register_forward_hook(lambda module, inputs, out: torch.zeros_like(out)))
        model(tokens)
        seen["branch"] = whole - seen["stream"]  # after the norms and factors of the placement
    deviation = share = share_at_1 = None
    if isinstance(ffn, MLP):
        deviation, factor = float(seen["input"].std()), input_factor(ffn)
        share, share_at_1 = nonlinear_share(ffn, deviation), nonlinear_share(ffn, 1.0 / factor)
        deviation *= factor
    embedding_rms, branch_rms = float(rms(seen["embedding"])), float(rms(seen["branch"]))
    return InitialSignal(deviation, share, share_at_1, embedding_rms, branch_rms, block.norm_ffn_after_sum)


@contextmanager
def statistics_of_the_batch(model: nn.Module) -> Iterator[None]:
    """Inside the `with`, norms with running statistics take those of the batch, as in training, and keep their own."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    norms = [module for module in model.modules() if hasattr(module, "running_var")]
    for norm in norms:
        norm.train()
    try:
        yield
    finally:
        for norm in norms:
            norm.eval()
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


@contextmanager
def activation_input(ffn: nn.Module, seen: dict[str, Tensor]) -> Iterator[None]:
    """Inside the `with`, `seen["input"]` is the first input of the FFN's activation, after its convolution if any."""
    if not isinstance(ffn, MLP):
        yield
        return
    name = "product" if ffn.gated else "activation"
    method = getattr(ffn, name)

    def keep(first: Tensor, *rest: Tensor) -> Tensor:
        seen["input"] = first.float()
        return method(first, *rest)

    setattr(ffn, name, keep)
    try:
        yield
    finally:
        delattr(ffn, name)


def input_factor(ffn: MLP) -> float:
    """The factor that an FFN itself puts on its activation's input."""
    return ffn.factor * float(ffn.scale_gate.mean()) if isinstance(ffn, ScaledSwiGLU) else 1.0


@torch.no_grad()
def nonlinear_share(ffn: MLP, deviation: float) -> float:
    """The share of an activation's variance that no line through its input explains; the input is normal.

    Channels are independent, for an activation that normalizes over them.

    Args:
        deviation: Standard deviation of the input.
    """
    width, device = len(ffn.up.weight), ffn.up.weight.device
    levels = (torch.arange(LEVELS, device=device) + 0.5) / LEVELS
    input_N = deviation * torch.special.ndtri(levels)
    others = torch.Generator().manual_seed(0)  # a separate generator leaves the run's random state unchanged
    input_NF = deviation * torch.randn(LEVELS, width, generator=others).to(device)
    input_NF[:, 0] = input_N
    output_NF = ffn.product(input_NF, torch.ones_like(input_NF)) if ffn.gated else ffn.activation(input_NF)  # type: ignore[reportAttributeAccessIssue]
    correlation = torch.corrcoef(torch.stack((input_N, output_NF[:, 0])))[0, 1]
    return float(1 - correlation**2)
