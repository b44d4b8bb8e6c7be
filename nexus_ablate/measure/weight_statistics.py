"""Statistics of weights by block and role. No unit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nexus_ablate.axes.modules import parameter_roles
from nexus_ablate.config.roles import MATRICES
from nexus_ablate.measure.activation_statistics import STATISTICS, statistic

LANCZOS_STEPS = 24
ROUNDING = 1e-5
"""Of a product of float32 matrices, relative to its size."""


def weight_rms(model: nn.Module) -> dict[str, float]:
    """RMS of the entries of all matrices of a block, of all blocks, and of all parameters of a role.

    Keys look like `weight_rms/block_000`, `weight_rms/global` and `weight_rms/role/query`.
    """
    named, roles = dict(model.named_parameters()), parameter_roles(model)
    norms = torch.stack(torch._foreach_norm([p.detach() for p in named.values()]))  # type: ignore[reportPrivateImportUsage]
    groups: dict[str, list[tuple[float, int]]] = {}
    for (name, parameter), norm in zip(named.items(), norms.tolist(), strict=True):
        groups.setdefault(f"role/{roles[name]}", []).append((norm, parameter.numel()))
        if name.startswith("blocks.") and is_matrix(parameter, roles[name]):
            for group in (f"block_{int(name.split('.')[1]):03d}", "global"):
                groups.setdefault(group, []).append((norm, parameter.numel()))
    return {
        f"weight_rms/{group}": math.hypot(*(norm for norm, _ in of)) / math.sqrt(sum(count for _, count in of))
        for group, of in groups.items()
    }


def is_matrix(parameter: nn.Parameter, role: str) -> bool:
    """Whether it is one or several matrices, and no gain with a row per head, learned key or table."""
    return parameter.ndim > 1 and role in MATRICES


def matrix_figures(model: nn.Module) -> dict[str, Tensor]:
    """The statistics of each matrix of the blocks of the uncompiled model."""
    return {
        f"weight/{name}/{figure.name}": figure.function(weight)
        for name, weight in block_matrices(model)
        for figure in STATISTICS
        if "matrix" in figure.sites
    }


def block_matrices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every matrix of the blocks with its name by block and role: `block_000/query`; repeated roles get a number."""
    roles = parameter_roles(model)
    seen: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.") and is_matrix(parameter, roles[name]):
            short = f"block_{int(name.split('.')[1]):03d}/{roles[name]}"
            seen[short] = seen.get(short, 0) + 1
            yield short if seen[short] == 1 else f"{short}_{seen[short]}", parameter


@statistic("matrix")
def spectral_norm(weight: Tensor, steps: int = LANCZOS_STEPS) -> Tensor:
    """Largest singular value, by Lanczos on the smaller Gram matrix from a fixed start: a random matrix 768 wide comes
    out at most 1% too small, one with a larger first singular value exact.

    The exact decomposition takes seconds for a model on a GPU. Golub & Kahan 1965. Of stacked matrices, as those of
    experts, the largest.
    """
    if weight.ndim > 2:
        return torch.stack([spectral_norm(matrix, steps) for matrix in weight]).amax()
    matrix = weight.detach().float()
    matrix = matrix.T if matrix.shape[0] < matrix.shape[1] else matrix
    width = matrix.shape[1]
    start = torch.Generator().manual_seed(0)  # a separate generator leaves the run's random state unchanged
    vector = torch.randn(width, generator=start).to(matrix.device)
    basis = [vector / vector.norm()]
    largest = 0.0
    while len(basis) < min(steps, width):
        image = matrix.T @ (matrix @ basis[-1])
        seen, largest = torch.stack(basis), max(largest, float(image.norm()))
        for _ in range(2):  # twice, since rounding would bring the first directions back
            image = image - seen.T @ (seen @ image)
        if float(image.norm()) <= ROUNDING * largest:  # a low rank: what is left has no direction of its own
            break
        basis.append(image / image.norm())
    seen = torch.stack(basis)
    projected = seen @ (matrix.T @ (matrix @ seen.T))
    return torch.linalg.eigvalsh(projected.cpu())[-1].clamp(min=0).sqrt().to(matrix.device)
