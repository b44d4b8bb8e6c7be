"""Optimizers: options like those of the axes, each a class here and `conf/optim/<name>.yaml`.

All optimizers share the keys of the schedule (`Schedule` in config/run_config.py); each class takes its own keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nexus_ablate.axes.init import layer_of
from nexus_ablate.axes.modules import parameter_roles
from nexus_ablate.axes.param import Standard
from nexus_ablate.config.grammar import factors_by_role, show
from nexus_ablate.config.options import Option, Registry
from nexus_ablate.config.roles import DECAYED, SMALL_MAP, is_matrix
from nexus_ablate.errors import ConfigError
from nexus_ablate.kernels.adamw import AdamW as AdamWSteps
from nexus_ablate.kernels.normuon import NorMuonSteps

OPTIM: Registry[Optimizer] = Registry("optim")


@dataclass(frozen=True)
class Parameter:
    """A parameter as an optimizer sees it.

    Attributes:
        role: See config/roles.py.
        weight_decay: What the optimizer multiplies by the parameter's learning rate.
        lr_factor: On the learning rate: the parametrization's times that of `optim.groups`.
        eps_factor: The parametrization's, on AdamW's eps.
    """

    name: str
    tensor: nn.Parameter
    role: str
    weight_decay: float
    lr_factor: float = 1.0
    eps_factor: float = 1.0


class Optimizer:
    """One or more torch-like optimizers that share a model's parameters.

    Args:
        parameters: All trained parameters; each is in one group of one part.
        parts: Each with `param_groups`, `state` (tensors by parameter and name) and `step()`, as in torch.optim.
    """

    step_on_cpu = False
    """Whether the parts count their steps on the CPU, as torch.optim does."""

    def __init__(self, parameters: list[Parameter], *parts: Any) -> None:
        self.parameters, self.parts = parameters, parts
        self.found_inf: Tensor | None = None

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
        self.found_inf = found_inf
        for part in self.parts:
            part.found_inf = found_inf

    def set_learning_rate(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)

    def decay_cautiously(self) -> None:
        """Take the weight decay out of the parts' steps; from now on `step` decays a weight that moves towards 0 alone.

        w <- w - lr (u + weight_decay [u w >= 0] w), u the part's step over the learning rate. Chen et al. 2025,
        arXiv:2510.12402.
        """
        for group in self.param_groups:
            group["cautious_decay"], group["weight_decay"] = group["weight_decay"], 0.0

    @torch.no_grad()
    def step(self) -> None:
        """One step of every parameter that has a gradient."""
        cautious = [group for group in self.param_groups if group.get("cautious_decay")]
        before = [[(p, p.clone()) for p in group["params"] if p.grad is not None] for group in cautious]
        for part in self.parts:
            part.step()
        for group, weights in zip(cautious, before, strict=True):
            for weight, start in weights:
                towards_0 = (start - weight) * start >= 0
                if self.found_inf is not None:
                    towards_0 = towards_0 & (self.found_inf == 0)
                weight.sub_(torch.where(towards_0, start, 0.0), alpha=group["lr"] * group["cautious_decay"])

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
                        key: value if self.step_on_cpu and key == "step" else value.to(device)
                        for key, value in states[parameter.name].items()
                    }


def groups_by_decay(parameters: list[Parameter], eps: float | None = None) -> Iterator[dict[str, Any]]:
    """Parameter groups for torch.optim, one per weight decay and factors, the largest decay first.

    Args:
        eps: AdamW's, which each group has times its factor.
    """
    alike: dict[tuple[float, float, float], list[nn.Parameter]] = {}
    for p in parameters:
        alike.setdefault((p.weight_decay, p.lr_factor, p.eps_factor), []).append(p.tensor)
    for (weight_decay, lr_factor, eps_factor), members in sorted(alike.items(), key=lambda item: item[0], reverse=True):
        group = {"params": members, "weight_decay": weight_decay, "lr_factor": lr_factor}
        yield group if eps is None else group | {"eps": eps * eps_factor}


@OPTIM.register("adamw")
class AdamW(Optimizer):
    """AdamW: step lr m_hat / (sqrt(v_hat) + eps), with the decoupled decay lr weight_decay w.

    Loshchilov & Hutter 2017, arXiv:1711.05101, Alg. 2.
    """

    def __init__(
        self, parameters: list[Parameter], lr: float, fused: bool, *, beta1: float, beta2: float, eps: float
    ) -> None:
        super().__init__(parameters, AdamWSteps([*groups_by_decay(parameters, eps)], lr, (beta1, beta2), eps, fused))


@OPTIM.register("muon")
class Muon(Optimizer):
    """Muon on the matrices of the blocks, AdamW on everything else.

    Newton-Schulz iterations in bfloat16 orthogonalize the momentum of a matrix, which is then scaled to the RMS of an
    AdamW update, 0.2 sqrt(max(rows, columns)), so that learning rate and weight decay carry over from AdamW. Jordan et
    al. 2024, https://kellerjordan.github.io/posts/muon/; the scale: Liu et al. 2025, arXiv:2502.16982, eq. 4.
    """

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
        super().__init__(
            parameters, matrices, AdamWSteps([*groups_by_decay(others, eps)], lr, (beta1, beta2), eps, fused)
        )


@OPTIM.register("normuon")
class NorMuon(Optimizer):
    """NorMuon on the matrices of the blocks, AdamW on everything else: kernels/normuon.py. Li et al., arXiv:2510.05491.

    The size of an update is that of the paper's Algorithm 1, 0.2 RMS, so that learning rate and weight decay carry over
    from AdamW. Nesterov's momentum and row_beta are those of the authors' code (zichongli5/NorMuon, normuon.py).
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
        row_beta: float,
        beta1: float,
        beta2: float,
        eps: float,
    ) -> None:
        hidden = [p for p in parameters if is_hidden_matrix(p)]
        others = [p for p in parameters if not is_hidden_matrix(p)]
        matrices = NorMuonSteps([*groups_by_decay(hidden)], lr, momentum, nesterov, ns_steps, row_beta)
        rest = AdamWSteps([*groups_by_decay(others, eps)], lr, (beta1, beta2), eps, fused)
        super().__init__(parameters, matrices, rest)


def is_hidden_matrix(parameter: Parameter) -> bool:
    """Whether a parameter is a matrix between hidden vectors: not the embedding, the head or a `small_map`."""
    name, ndim, role = parameter.name, parameter.tensor.ndim, parameter.role
    return ndim == 2 and is_matrix(name, ndim, role) and role not in ("head", SMALL_MAP)


@OPTIM.register("adafactor")
class Adafactor(Optimizer):
    """Adafactor: second moments of a matrix as the product of row and column means, updates relative to the weights.

    The step is max(eps, RMS(weight)) min(lr, 1/sqrt(t)), the update's RMS at most `clip_threshold`. Shazeer & Stern
    2018, arXiv:1804.04235, Alg. 4 and 5, as torch.optim.Adafactor.
    """

    step_on_cpu = True

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


@OPTIM.register("lion")
class Lion(Optimizer):
    """Lion: step lr sign(beta1 m + (1 - beta1) g), then m <- beta2 m + (1 - beta2) g, with decoupled decay.

    Chen et al. 2023, arXiv:2302.06675, Alg. 2, as in the library pytorch_optimizer.
    """

    def __init__(self, parameters: list[Parameter], lr: float, fused: bool, *, beta1: float, beta2: float) -> None:
        from pytorch_optimizer import Lion as LionSteps  # type: ignore[reportMissingImports]

        super().__init__(parameters, LionSteps([*groups_by_decay(parameters)], lr, (beta1, beta2)))


@OPTIM.register("soap")
class SOAP(Optimizer):
    """SOAP: Adam in the eigenbasis of Shampoo's preconditioners, which is renewed every few steps.

    Vyas et al. 2024, arXiv:2409.11321, Alg. 3, as in the library pytorch_optimizer and the authors' code: the first
    step only begins the preconditioners, and a new basis is one power iteration and a QR decomposition from the last.
    """

    def __init__(
        self,
        parameters: list[Parameter],
        lr: float,
        fused: bool,
        *,
        beta1: float,
        beta2: float,
        eps: float,
        precondition_frequency: int,
        max_precondition_dim: int,
    ) -> None:
        from pytorch_optimizer import SOAP as SOAPSteps  # type: ignore[reportMissingImports]

        steps = SOAPSteps(
            [*groups_by_decay(parameters)],
            lr,
            (beta1, beta2),
            eps=eps,
            precondition_frequency=precondition_frequency,
            max_precondition_dim=max_precondition_dim,
        )
        super().__init__(parameters, steps)

    def tensors(self) -> dict[str, Tensor]:
        """As of every optimizer; the matrices of each side of a parameter are `GG.SIDE` and `Q.SIDE`."""
        results: dict[str, Tensor] = {}
        for group in self.param_groups:
            for parameter in self.parameters_in(group):
                state = self.parts[0].state.get(parameter.tensor)
                if not state:
                    continue
                results[f"{parameter.name}/step"] = torch.tensor(group["step"])
                results[f"{parameter.name}/exp_avg"] = state["exp_avg"]
                results[f"{parameter.name}/exp_avg_sq"] = state["exp_avg_sq"]
                for kind in ("GG", "Q"):
                    for side, matrix in enumerate(state[kind]):
                        if len(matrix):  # a side that is not rotated has an empty list
                            results[f"{parameter.name}/{kind}.{side}"] = matrix
        return results

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for group in self.param_groups:
            for parameter in self.parameters_in(group):
                tensor, prefix = parameter.tensor, f"{parameter.name}/"
                if f"{prefix}step" not in tensors:
                    continue
                group["step"] = int(tensors[f"{prefix}step"])
                state = {"precondition_frequency": group["precondition_frequency"], "shampoo_beta": group["betas"][1]}
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[moment] = tensors[prefix + moment].to(tensor.device)
                for kind in ("GG", "Q"):
                    matrices = [tensors.get(f"{prefix}{kind}.{side}") for side in range(tensor.ndim)]
                    state[kind] = [[] if matrix is None else matrix.to(tensor.device) for matrix in matrices]
                self.parts[0].state[tensor] = state

    def parameters_in(self, group: dict[str, Any]) -> list[Parameter]:
        """The parameters of one group."""
        members = {id(tensor) for tensor in group["params"]}
        return [parameter for parameter in self.parameters if id(parameter.tensor) in members]


def build_optimizer(model: nn.Module, option: Option, weight_decay: float, fused: bool = True) -> Optimizer:
    """The optimizer of a model.

    Args:
        option: The option of `optim`; its `decay` says which roles decay.
        weight_decay: The decay of those roles.
        fused: Whether AdamW uses the fused kernel or the written-out form.
    """
    optimizer = OPTIM.build(option, parameters_of(model, option, weight_decay), option.keys["lr"], fused)
    if option.keys["cautious_decay"]:
        optimizer.decay_cautiously()
    return optimizer


def parameters_of(model: nn.Module, option: Option, weight_decay: float) -> list[Parameter]:
    """The parameters of a model with their roles, weight decay and factors.

    `coupled` weight decay is times the learning rate, as in torch.optim.AdamW. `independent` decay is times the
    schedule alone, so that it doesn't change with the peak learning rate (Wortsman et al. 2023, arXiv:2309.14322,
    section 3.2).

    Raises:
        ConfigError: `optim.groups` names a role that no parameter of the model has.
    """
    by_role = factors_by_role(option.keys["groups"])
    decayed = set(decay_groups(model, option.keys["decay"], option.keys["groups"])["decayed"])
    roles, parameters = parameter_roles(model), []
    if absent := sorted(by_role.keys() - set(roles.values())):
        problem = f"no parameter of this model has the role {absent[0]}"
        got, fix = f"optim.groups={show(option.keys['groups'])}", f"one of {', '.join(sorted(set(roles.values())))}"
        raise ConfigError(problem, got, fix)
    param = getattr(model, "param", None) or Standard()
    for name, tensor in model.named_parameters():
        factors, own = param.factors(roles[name], layer_of(name) is not None), by_role.get(roles[name], {})
        lr_factor = factors.lr * own.get("lr", 1.0)
        decay = weight_decay * own.get("weight_decay", 1.0) if name in decayed else 0.0
        if option.keys["decay_mode"] == "independent":
            decay /= option.keys["lr"] * lr_factor
        else:
            decay *= factors.decay
        parameters.append(Parameter(name, tensor, roles[name], decay, lr_factor, factors.eps))
    return parameters


def decay_groups(model: nn.Module, decay: str, groups: Iterable[str] = ()) -> dict[str, list[str]]:
    """Parameter names by whether they decay: `{"decayed": [...], "free": [...]}`. Each name is in one list only.

    Args:
        decay, groups: `optim.decay` and `optim.groups`; a role whose factor on weight decay is 0 is free.
    """
    roles = parameter_roles(model)
    free = {role for role, factors in factors_by_role(groups).items() if factors.get("weight_decay") == 0}
    decayed = [n for n, role in roles.items() if role not in free and (decay == "all" or role in DECAYED[decay])]
    return {"decayed": decayed, "free": [name for name in roles if name not in set(decayed)]}
