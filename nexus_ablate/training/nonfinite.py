"""Where a number stopped being finite: asked once, after a loss that was not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nexus_ablate.measure.probe import hooks


def first_nonfinite(model: nn.Module, forward: Callable[[], object]) -> str:
    """The first parameter that is not finite; else the first module whose output is not; else ''.

    Args:
        model: The uncompiled model: hooks on a compiled one never fire.
        forward: Computes the loss with it once more.
    """
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"the parameter {name}"
    found: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and isinstance(output, Tensor) and not torch.isfinite(output).all():
                found.append(f"the output of {name}")

        return hook

    with hooks() as handles, torch.no_grad():
        handles += [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
        forward()
    return found[0] if found else ""
