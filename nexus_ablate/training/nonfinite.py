"""Finds where a number stopped being finite; called once, after a non-finite loss or gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nexus_ablate.measure.probe import hooks


def first_nonfinite(model: nn.Module, forward: Callable[[], object]) -> str:
    """Name the first non-finite parameter, or else the first module with a non-finite output, or else ''.

    Args:
        model: The uncompiled model: hooks on a compiled one never fire.
        forward: Repeats the forward pass on this model.
    """
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"the parameter {name}"
    first: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not first and isinstance(output, Tensor) and not torch.isfinite(output).all():
                first.append(f"the output of {name}")

        return hook

    with hooks() as handles, torch.no_grad():
        handles += [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
        forward()
    return first[0] if first else ""
