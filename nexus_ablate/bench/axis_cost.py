"""Benchmark the options of an axis: the layer in which they act, and the block around it, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nexus_ablate.axes.modules import Site
from nexus_ablate.axes.norm import NORM
from nexus_ablate.bench.timing import MOST_PROGRAMS, Clock, Spread, clock_of, in_turn, ratios, spread
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import ConfigError
from nexus_ablate.model import build_model
from nexus_ablate.training.device import device_of, precision_context

LAYERS = {"norm": "one norm", "ffn": "the FFN"}
"""What is measured `alone`, by axis; for all other axes but placement it is attention with its four projections."""


@dataclass(frozen=True)
class OptionCost:
    """The cost of one option in one place.

    Attributes:
        place: `alone` (see LAYERS) or `block`.
        mode: `eager` or `compiled`.
        forward, backward, both: Seconds per pass.
        ratio: Time of both passes over that of the baseline option at the same place and mode.
        kept_bytes: Bytes that the forward pass keeps for the backward pass, without weights and input.
    """

    option: str
    place: str
    mode: str
    forward: Spread
    backward: Spread
    both: Spread
    ratio: Spread
    kept_bytes: int


@dataclass(frozen=True)
class Bench:
    """The costs of all options, and the conditions of the measurement.

    Attributes:
        conditions: Shape, precision and machine in a few words.
        sites: How many layers of the measured kind the block has, by option; empty if the layer is the block.
    """

    axis: str
    baseline: str
    conditions: str
    costs: list[OptionCost]
    sites: dict[str, int]


@dataclass(frozen=True)
class Candidate:
    """Forward and backward of one module on a fixed input."""

    option: str
    place: str
    mode: str
    call: Callable[[Tensor], Any]
    weights: list[nn.Parameter]
    x_BTD: Tensor
    precision: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.option, self.place, self.mode

    def forward(self) -> list[Tensor]:
        with precision_context(self.precision, self.x_BTD.device.type):
            out = self.call(self.x_BTD)
        return list(out) if isinstance(out, tuple) else [out]

    def both(self) -> object:
        outs = self.forward()
        ones = [torch.ones_like(out) for out in outs]
        return torch.autograd.grad(outs, [self.x_BTD, *self.weights], ones, allow_unused=True)


def bench_axis(axis: str, configs: dict[str, RunConfig], baseline: str, seconds: float, compiled: bool) -> Bench:
    """Measure every option of an axis.

    Args:
        configs: The configuration of each option; the last block of its model is measured.
        baseline: The option in `configs` that the ratios compare with.
        seconds: Approximate total time, without building and compiling.
        compiled: Whether to measure torch.compile too.

    Raises:
        ConfigError: torch.compile does not work on this machine.
    """
    config = configs[baseline]
    device = device_of(config.train)
    if config.train.threads != "auto":
        torch.set_num_threads(config.train.threads)
    size = config.train.batch_size, config.model.context, config.model.d_model
    x_BTD = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    candidates: list[Candidate] = []
    sites: dict[str, int] = {}
    for option, chosen in configs.items():
        made, number = _candidates(axis, option, chosen, x_BTD)
        if number is not None:
            sites[option] = number
        for candidate in made:
            candidates.append(candidate)
            if compiled:
                candidates.append(_compiled(candidate))
    costs = _timed(candidates, baseline, seconds, clock_of(device))
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    conditions = (
        f"{size[0]} x {size[1]} tokens, d_model {size[2]}, {config.train.precision}, {machine}, "
        f"CPU threads: {torch.get_num_threads()}"
    )
    return Bench(axis, baseline, conditions, costs, sites)


def _candidates(axis: str, option: str, config: RunConfig, x_BTD: Tensor) -> tuple[list[Candidate], int | None]:
    """The last block, and the smallest module in which the axis's option acts, unless that is the block.

    Also returns how many modules of that kind the block has.
    """
    model = build_model(config).to(x_BTD.device).train()
    block: Any = model.blocks[-1]
    tokens_BT = torch.zeros(x_BTD.shape[:2], dtype=torch.long, device=x_BTD.device)
    context = model.context(tokens_BT)
    with torch.no_grad(), precision_context(config.train.precision, x_BTD.device.type):
        model.hidden(tokens_BT, context)  # what the earlier blocks leave for the last one
    position = context.positions[-1]

    def candidate(place: str, call: Callable[[Tensor], Any], *modules: nn.Module) -> Candidate:
        weights = list(nn.ModuleList(modules).parameters())
        return Candidate(option, place, "eager", call, weights, x_BTD, config.train.precision)

    whole = candidate("block", lambda x: block(block.enter(x), context.for_one_block()), block, position)
    if axis == "placement":
        return [whole], None
    if axis == "norm":
        layer: Any = NORM.build(config.norm, config.model.d_model, config.resolved.norm_bias, Site("attn"))
        alone = candidate("alone", layer.to(x_BTD.device), layer)
    elif axis == "ffn":
        layer = block.ffn
        alone = candidate("alone", lambda x: layer(x, context.for_one_block()), layer)
    else:
        layer = block.attn
        alone = candidate("alone", lambda x: layer(x, context.for_one_block()), layer, position)
    same = [name for name, module in block.named_modules() if isinstance(module, type(layer))]
    return [whole, alone], sum("qk_norm" not in name for name in same)  # those are other norms


def _compiled(candidate: Candidate) -> Candidate:
    compiled = replace(candidate, mode="compiled", call=torch.compile(candidate.call, dynamic=False))
    try:
        with torch._dynamo.config.patch(recompile_limit=MOST_PROGRAMS):
            compiled.both()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError("torch.compile does not work here", reason, "train.compile=off") from error
    return compiled


def _timed(candidates: list[Candidate], baseline: str, seconds: float, clock: Clock) -> list[OptionCost]:
    """Time forward and both passes of all candidates in turn; the backward pass is their difference."""
    works: dict[tuple[str, str, str, str], Callable[[], object]] = {}
    for candidate in candidates:
        works[(*candidate.key, "forward")] = candidate.forward
        works[(*candidate.key, "both")] = candidate.both
    for work in works.values():
        work()
    taken = in_turn(works, seconds, clock)
    costs = []
    for candidate in candidates:
        forward, both = taken[(*candidate.key, "forward")], taken[(*candidate.key, "both")]
        backward = [max(whole - part, 1e-9) for part, whole in zip(forward, both, strict=True)]
        ratio = ratios(both, taken[baseline, candidate.place, candidate.mode, "both"])
        kept = kept_bytes(candidate.forward, [candidate.x_BTD, *candidate.weights])
        costs.append(OptionCost(*candidate.key, spread(forward), spread(backward), spread(both), ratio, kept))
    return costs


def kept_bytes(forward: Callable[[], object], without: Iterable[Tensor]) -> int:
    """Bytes of the tensors that autograd keeps after a forward pass, without some, such as weights."""
    own = {tensor.untyped_storage()._cdata for tensor in without}
    kept: dict[int, Tensor] = {}  # each storage counts once, and is held so that its address is not reused

    def keep(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage()._cdata
        if address not in own:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = forward()
    del outputs
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
