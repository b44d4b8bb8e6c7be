"""Benchmark the options of an axis: the layer in which they act, and the block around it, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nexus_ablate.axes.context import Context
from nexus_ablate.axes.modules import Site
from nexus_ablate.axes.norm import NORM
from nexus_ablate.bench.timing import MOST_PROGRAMS, Clock, Spread, clock_of, in_turn, ratios, spread
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import ConfigError
from nexus_ablate.model import GPT, build_model
from nexus_ablate.planning.cost import kept_bytes
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

    def share_of_block(self, cost: OptionCost) -> float | None:
        """The share of the block's time that all its layers of the measured kind take; None for the block itself."""
        if cost.place == "block":
            return None
        for other in self.costs:
            if (other.option, other.place, other.mode) == (cost.option, "block", cost.mode):
                return self.sites[cost.option] * cost.both.median / other.both.median
        return None


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
        model = build_model(chosen).to(device).train()
        block: Any = model.blocks[-1]
        context = _context(model, chosen, x_BTD)
        position = context.positions[-1]
        calls: dict[str, Callable[[Tensor], Any]] = {
            "block": lambda x, b=block, c=context: b(b.enter(x), c.for_one_block())
        }
        modules = {"block": [block, position]}
        layer = _layer(axis, chosen, block)
        if axis == "norm":
            calls["alone"] = layer.to(device)
        elif layer is not None:
            calls["alone"] = lambda x, m=layer, c=context: m(x, c.for_one_block())
        if layer is not None:
            modules["alone"] = [layer, position] if layer is block.attn else [layer]
            same = [name for name, module in block.named_modules() if isinstance(module, type(layer))]
            sites[option] = sum("qk_norm" not in name for name in same)  # those are other norms
        for place, call in calls.items():
            weights = list(nn.ModuleList(modules[place]).parameters())
            candidate = Candidate(option, place, "eager", call, weights, x_BTD, chosen.train.precision)
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


def _context(model: GPT, config: RunConfig, x_BTD: Tensor) -> Context:
    """What the earlier blocks leave for the last one, for tokens of the shape of the input."""
    tokens_BT = torch.zeros(x_BTD.shape[:2], dtype=torch.long, device=x_BTD.device)
    context = model.context(tokens_BT)
    with torch.no_grad(), precision_context(config.train.precision, x_BTD.device.type):
        model.hidden(tokens_BT, context)
    return context


def _layer(axis: str, config: RunConfig, block: Any) -> Any:
    """The smallest module in which the axis's option acts; None if it is the block."""
    if axis == "placement":
        return None
    if axis == "norm":
        return NORM.build(config.norm, config.model.d_model, config.resolved.norm_bias, Site("attn"))
    return block.ffn if axis == "ffn" else block.attn


def _compiled(candidate: Candidate) -> Candidate:
    compiled = replace(candidate, mode="compiled", call=torch.compile(candidate.call, dynamic=False))
    try:
        with torch._dynamo.config.patch(recompile_limit=MOST_PROGRAMS):
            compiled.both()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError("torch.compile does not work here", reason, "leave out --compile") from error
    return compiled


def _timed(candidates: list[Candidate], baseline: str, seconds: float, clock: Clock) -> list[OptionCost]:
    """Time forward and both passes of all candidates in turn; the backward pass is their difference."""
    works: dict[tuple[str, str, str, str], Callable[[], object]] = {}
    for candidate in candidates:
        key = candidate.option, candidate.place, candidate.mode
        works[(*key, "forward")] = candidate.forward
        works[(*key, "both")] = candidate.both
    for work in works.values():
        work()
    taken = in_turn(works, seconds, clock)
    costs = []
    for candidate in candidates:
        key = candidate.option, candidate.place, candidate.mode
        forward, both = taken[(*key, "forward")], taken[(*key, "both")]
        backward = [max(whole - part, 1e-9) for part, whole in zip(forward, both, strict=True)]
        ratio = ratios(both, taken[baseline, candidate.place, candidate.mode, "both"])
        kept = kept_bytes(candidate.forward, [candidate.x_BTD, *candidate.weights])
        costs.append(OptionCost(*key, spread(forward), spread(backward), spread(both), ratio, kept))
    return costs
