"""Statistics of weights by block and role. No unit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nexus_ablate.axes.init import layer_of
from nexus_ablate.axes.modules import parameter_roles
from nexus_ablate.config.roles import is_matrix
from nexus_ablate.measure.activation_statistics import STATISTICS, statistic


def weight_rms(model: nn.Module) -> dict[str, float]:
    """RMS of the entries of all matrices of a block, of all blocks, and of all parameters of a role.

    Keys look like `weight_rms/block_000`, `weight_rms/global` and `weight_rms/role/query`.
    """
    named, roles = dict(model.named_parameters()), parameter_roles(model)
    norms = torch.stack(torch._foreach_norm([p.detach() for p in named.values()]))  # type: ignore[reportPrivateImportUsage]
    groups: dict[str, list[tuple[float, int]]] = {}
    for (name, parameter), norm in zip(named.items(), norms.tolist(), strict=True):
        member_of = [f"role/{roles[name]}"]
        if block := _block_of_matrix(name, parameter, roles[name]):
            member_of += [block, "global"]
        for group in member_of:
            groups.setdefault(group, []).append((norm, parameter.numel()))
    figures = {}
    for group, parts in groups.items():
        norm = math.hypot(*(part for part, _ in parts))
        figures[f"weight_rms/{group}"] = norm / math.sqrt(sum(count for _, count in parts))
    return figures


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
        if block := _block_of_matrix(name, parameter, roles[name]):
            short = f"{block}/{roles[name]}"
            seen[short] = seen.get(short, 0) + 1
            yield short if seen[short] == 1 else f"{short}_{seen[short]}", parameter


def _block_of_matrix(name: str, parameter: nn.Parameter, role: str) -> str:
    """`block_003` for a matrix of that block; '' for any other parameter."""
    layer = layer_of(name)
    return "" if layer is None or not is_matrix(name, parameter.ndim, role) else f"block_{layer:03d}"


@statistic("matrix")
def spectral_norm(weight: Tensor) -> Tensor:
    """Largest singular value, by the smaller Gram matrix in float32. Of stacked matrices (of experts) the largest.

    A decomposition of the matrix itself takes twice to ten times as long.
    """
    matrix = weight.detach().float()
    matrix = matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix
    gram = matrix @ matrix.mT
    gram = gram.cpu() if gram.device.type == "mps" else gram  # eigenvalues are not implemented there
    return torch.linalg.eigvalsh(gram).amax().clamp(min=0).sqrt().to(weight.device)
