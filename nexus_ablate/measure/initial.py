"""The signal inside a model before its first step: what an activation sees, and a branch beside the embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nexus_ablate.axes.ffn import MLP
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.measure.counts import parameters
from nexus_ablate.measure.probe import evaluation_mode
from nexus_ablate.measure.regime import InitialSignal
from nexus_ablate.model import GPT, build_model, countable_model

LARGEST = 30_000_000
"""Parameters of the largest model that is built to see its signal, in a fraction of a second."""


def initial_of(config: RunConfig, vocab_size: int) -> InitialSignal | None:
    """The signal of a configuration's model; None for a model that takes long to build, or starts from a checkpoint."""
    if "run" in config.resolved.init.keys or parameters(countable_model(config, vocab_size))[0] > LARGEST:
        return None
    return initial_signal(build_model(config, vocab_size))


@torch.no_grad()
def initial_signal(model: GPT) -> InitialSignal:
    """The signal in the first block of a model with initial values, for one sequence of different tokens."""
    ffn = model.blocks[0].ffn
    watched: dict[str, nn.Module] = {"embedding": model.dropout, "branch": ffn}  # type: ignore[reportAssignmentType]
    if isinstance(ffn, MLP):
        watched["input"] = ffn.gate if ffn.gated else ffn.up
    seen: dict[str, Tensor] = {}
    handles = [module.register_forward_hook(_keep(seen, name)) for name, module in watched.items()]
    vocab_size, device = len(model.embedding.weight), model.embedding.weight.device
    try:
        with evaluation_mode(model):
            model(torch.arange(model.geometry.context, device=device)[None] % vocab_size)
    finally:
        for handle in handles:
            handle.remove()
    deviation = share = share_at_1 = None
    if isinstance(ffn, MLP):
        deviation = float(seen["input"].std())
        share, share_at_1 = nonlinear_share(ffn, deviation), nonlinear_share(ffn, 1.0)
    return InitialSignal(deviation, share, share_at_1, _rms(seen["embedding"]), _rms(seen["branch"]))


def nonlinear_share(ffn: MLP, deviation: float) -> float:
    """The share of an activation's variance that no line through its input explains; the input is normal.

    Args:
        deviation: Standard deviation of the input.
    """
    width, device = len(ffn.up.weight), ffn.up.weight.device
    levels = (torch.arange(512, device=device) + 0.5) / 512
    input_N = deviation * torch.special.ndtri(levels)
    input_NF = input_N[:, None].expand(-1, width)
    output_NF = ffn.product(input_NF, torch.ones_like(input_NF)) if ffn.gated else ffn.activation(input_NF)  # type: ignore[reportAttributeAccessIssue]
    correlation = torch.corrcoef(torch.stack((input_N, output_NF[:, 0])))[0, 1]
    return float(1 - correlation**2)


def _keep(seen: dict[str, Tensor], name: str):
    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        seen[name] = output.float()

    return hook


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())
