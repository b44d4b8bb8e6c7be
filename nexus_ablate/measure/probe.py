"""The probe: an eager, no-grad pass of the uncompiled model over a fixed batch, with hooks that live only in a `with`.

It leaves no trace: parameters, gradients, buffers, random states and the next loss are bit-identical with and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nexus_ablate.measure.statistics import ACTIVATION, activation_summary

SITES = ("resid", "attn", "ffn")
"""Where a probe looks in each block: the residual stream after it, and the output of each branch."""


def due(step: int, every: int) -> bool:
    """Whether a probe falls on this step: powers of two, and every `every` steps."""
    return step > 0 and (step & (step - 1) == 0 or step % every == 0)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout, no gradients, no update of running statistics; the mode that was there comes back."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def probe(model: nn.Module, tokens_BT: Tensor) -> dict[str, float]:
    """One probe: `act/block_000/resid/rms` and so on for every block, site and statistic.

    Args:
        model: The uncompiled model (hooks on a compiled one never fire).
        tokens_BT: The probe batch.
    """
    found: dict[str, Tensor] = {}

    def look(name: str):
        def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
            found[name] = activation_summary(output)

        return hook

    handles = []
    try:
        for layer, block in enumerate(model.blocks):  # type: ignore[arg-type]
            for site, module in zip(SITES, (block, block.attn, block.ffn), strict=True):
                handles.append(module.register_forward_hook(look(f"act/block_{layer:03d}/{site}")))
        with evaluation_mode(model):
            model(tokens_BT)
    finally:
        for handle in handles:
            handle.remove()
    values = torch.stack(list(found.values())).tolist()
    return {
        f"{name}/{statistic}": value
        for name, row in zip(found, values, strict=True)
        for statistic, value in zip(ACTIVATION, row, strict=True)
    }


def outlier_figures(probed: dict[str, float]) -> dict[str, float]:
    """The largest value over the blocks of each statistic of the residual stream: `act/resid/kurtosis_token` ..."""
    return {
        f"act/resid/{statistic}": max(v for k, v in probed.items() if k.endswith(f"/resid/{statistic}"))
        for statistic in ACTIVATION
    }


def weight_rms(model: nn.Module) -> dict[str, float]:
    """RMS of all matrix entries of each block: `weight_rms/block_000`."""
    found = {}
    for layer, block in enumerate(model.blocks):  # type: ignore[arg-type]
        matrices = [p.detach() for p in block.parameters() if p.ndim > 1]
        norms = torch.stack(torch._foreach_norm(matrices))  # type: ignore[reportPrivateImportUsage]
        square = norms.square().sum() / sum(p.numel() for p in matrices)
        found[f"weight_rms/block_{layer:03d}"] = square.sqrt()
    values = torch.stack(list(found.values())).tolist()
    return dict(zip(found, values, strict=True))
