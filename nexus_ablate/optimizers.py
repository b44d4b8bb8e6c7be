"""Optimizers: options like those of the axes, each a class here and `conf/optim/<name>.yaml`.

All optimizers share the keys of the schedule (`Schedule` in config/run_config.py); each class takes its own keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from nexus_ablate.axes.roles import EMBEDDINGS, MATRICES, SMALL_MAP, parameter_roles
from nexus_ablate.config.options import Option, Registry
from nexus_ablate.kernels.adamw import AdamW as AdamWSteps

OPTIM: Registry[Optimizer] = Registry("optim")

DECAYED_ROLES = {"matrices": set(MATRICES), "matrices_embeddings": {*MATRICES, *EMBEDDINGS}}


@dataclass(frozen=True)
class Parameter:
    """A parameter as an optimizer sees it: its name, its role (see axes/roles.py) and its weight decay."""

    name: str
    tensor: nn.Parameter
    role: str
    weight_decay: float


class Optimizer:
    """One or more torch-like optimizers that share a model's parameters.

    Args:
        parameters: All trained parameters; each is in one group of one part.
        parts: Each with `param_groups`, `state` (tensors by parameter and name) and `step()`, as in torch.optim.
    """

    state_bytes = 0
    """Least state per element of a parameter."""
    scalars_on_cpu = False
    """Whether the parts keep scalar state on the CPU, as torch.optim does."""

    def __init__(self, parameters: list[Parameter], *parts: Any) -> None:
        self.parameters, self.parts = parameters, parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def skips_nonfinite(self) -> bool:
        """Whether the device obeys `skip_where`; if not, a step must be checked before it is taken."""
        return all(hasattr(part, "found_inf") for part in self.parts)

    def skip_where(self, found_inf: Tensor) -> None:
        """Skip steps at which this scalar on the device is 1."""
        for part in self.parts:
            part.found_inf = found_inf

    def set_learning_rate(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    def step(self) -> None:
        """One step of every parameter that has a gradient."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self.parameters:
            parameter.tensor.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The state for a checkpoint, by `parameter/name`. Empty before the first step."""
        return {
            f"{parameter.name}/{key}": value
            for parameter in self.parameters
            for part in self.parts
            for key, value in part.state.get(parameter.tensor, {}).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the state that `tensors` returned for an optimizer of the same kind."""
        states: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            parameter, _, key = name.rpartition("/")
            states.setdefault(parameter, {})[key] = value
        for part in self.parts:
            owned = {id(p) for group in part.param_groups for p in group["params"]}
            for parameter in self.parameters:
                if id(parameter.tensor) in owned and parameter.name in states:
                    device = parameter.tensor.device
                    part.state[parameter.tensor] = {
                        key: value if self.scalars_on_cpu and not value.ndim else value.to(device)
                        for key, value in states[parameter.name].items()
                    }


def groups_by_decay(parameters: list[Parameter]) -> Iterator[dict[str, Any]]:
    """Parameter groups for torch.optim, one per weight decay, the largest decay first."""
    for weight_decay in sorted({p.weight_decay for p in parameters}, reverse=True):
        members = [p.tensor for p in parameters if p.weight_decay == weight_decay]
        yield {"params": members, "weight_decay": weight_decay}


@OPTIM.register("adamw")
class AdamW(Optimizer):
    """AdamW: step lr m_hat / (sqrt(v_hat) + eps), with the decoupled decay lr weight_decay w.

    Loshchilov & Hutter 2017, arXiv:1711.05101, Alg. 2.
    """

    state_bytes = 8

    def __init__(
        self, parameters: list[Parameter], lr: float, fused: bool, *, beta1: float, beta2: float, eps: float
    ) -> None:
        super().__init__(parameters, AdamWSteps([*groups_by_decay(parameters)], lr, (beta1, beta2), eps, fused))


@OPTIM.register("muon")
class Muon(Optimizer):
    """Muon on the matrices of the blocks, AdamW on everything else.

    Newton-Schulz iterations in bfloat16 orthogonalize the momentum of a matrix, which is then scaled to the RMS of an
    AdamW update, 0.2 sqrt(max(rows, columns)), so that learning rate and weight decay carry over from AdamW. Jordan et
    al. 2024, https://kellerjordan.github.io/posts/muon/; the scale: Liu et al. 2025, arXiv:2502.16982, eq. 4.
    """

    state_bytes = 4

    def __init__(
        self,
        parameters: list[Parameter],
        lr: float,
        fused: bool,
        *,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        beta1: float,
        beta2: float,
        eps: float,
    ) -> None:
        from torch.optim import Muon as TorchMuon

        hidden = [p for p in parameters if is_hidden_matrix(p)]
        others = [p for p in parameters if not is_hidden_matrix(p)]
        matrices = TorchMuon(
            [*groups_by_decay(hidden)],
            lr,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        super().__init__(parameters, matrices, AdamWSteps([*groups_by_decay(others)], lr, (beta1, beta2), eps, fused))


def is_hidden_matrix(parameter: Parameter) -> bool:
    """Whether a parameter is a matrix between hidden vectors: not the embedding, the head or a `small_map`."""
    hidden = parameter.role in MATRICES and parameter.role not in ("head", SMALL_MAP)
    return hidden and parameter.tensor.ndim == 2


@OPTIM.register("adafactor")
class Adafactor(Optimizer):
    """Adafactor: second moments of a matrix as the product of row and column means, updates relative to the weights.

    The step is max(eps, RMS(weight)) min(lr, 1/sqrt(t)), the update's RMS at most `clip_threshold`. Shazeer & Stern
    2018, arXiv:1804.04235, Alg. 4 and 5, as torch.optim.Adafactor.
    """

    scalars_on_cpu = True

    def __init__(
        self,
        parameters: list[Parameter],
        lr: float,
        fused: bool,
        *,
        beta2_decay: float,
        eps: float,
        clip_threshold: float,
    ) -> None:
        from torch.optim import Adafactor as TorchAdafactor

        groups = [*groups_by_decay(parameters)]
        tiny = 1e-15  # squared, the paper's 1e-30; PyTorch's default of 1e-7 acts on gradients below 3e-4
        super().__init__(
            parameters, TorchAdafactor(groups, lr, beta2_decay=beta2_decay, eps=(tiny, eps), d=clip_threshold)
        )


def build_optimizer(model: nn.Module, option: Option, weight_decay: float, fused: bool = True) -> Optimizer:
    """The optimizer of a model.

    Args:
        option: The option of `optim`; its `decay` says which roles decay.
        weight_decay: The decay of those roles.
        fused: Whether AdamW uses the fused kernel or the written-out form.
    """
    decayed = set(decay_groups(model, option.keys["decay"])["decayed"])
    roles = parameter_roles(model)
    parameters = [
        Parameter(name, tensor, roles[name], weight_decay if name in decayed else 0.0)
        for name, tensor in model.named_parameters()
    ]
    return OPTIM.build(option, parameters, option.keys["lr"], fused)


def decay_groups(model: nn.Module, decay: str) -> dict[str, list[str]]:
    """Parameter names by whether they decay: `{"decayed": [...], "free": [...]}`. Each name is in one list only."""
    roles = parameter_roles(model)
    decayed = [n for n, role in roles.items() if decay == "all" or role in DECAYED_ROLES[decay]]
    return {"decayed": decayed, "free": [name for name in roles if name not in set(decayed)]}
