"""Benchmark the options of an axis: the layer by itself and the block around it, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nexus_ablate.axes.context import Context
from nexus_ablate.axes.norm import NORM
from nexus_ablate.axes.roles import Site
from nexus_ablate.bench.timing import MOST_PROGRAMS, Clock, Spread, clock_of, in_turn, ratios, spread
from nexus_ablate.bench.traffic import Traffic, counted, device_rates, seconds_at_best
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import ConfigError
from nexus_ablate.model import build_model
from nexus_ablate.training.device import device_of, precision_context

PASSES = ("forward", "backward", "both")


@dataclass(frozen=True)
class OptionCost:
    """The cost of one option in one place.

    Attributes:
        place: `alone` (see `Bench.layer`) or `block`.
        mode: `eager` or `compiled`.
        seconds, ratio: By pass; the ratio is to the baseline option at the same place, mode and pass.
        flops, bytes_moved: Of both passes, as counted by `Traffic`; None for compiled code, which it can't inspect.
        peak_bytes: Most bytes held by forward and backward, without weights and input; None for compiled code.
        best_share: The time of the measured roofline divided by the time taken, both passes: 1 is the machine's limit.
            None for compiled code.
    """

    option: str
    place: str
    mode: str
    seconds: dict[str, Spread]
    ratio: dict[str, Spread]
    flops: int | None
    bytes_moved: int | None
    peak_bytes: int | None
    best_share: float | None


@dataclass(frozen=True)
class Bench:
    """The costs of all options, and the conditions of the measurement.

    Attributes:
        layer: The module that is measured `alone`: the smallest in which the option acts.
        time_share, flop_share: The share of the layer's sites in the block, by option, eager, both passes; None if the
            layer is the block.
    """

    axis: str
    baseline: str
    layer: str
    shape: dict[str, int]
    device: str
    threads: int
    precision: str
    product_rate: float
    copy_rate: float
    costs: list[OptionCost]
    time_share: dict[str, float | None]
    flop_share: dict[str, float | None]


class _Work:
    """Forward and backward of one module on a fixed input."""

    def __init__(self, call: Callable[..., Any], weights: list[nn.Parameter], x_BTD: Tensor, precision: str) -> None:
        self.call, self.x_BTD, self.precision = call, x_BTD, precision
        self.wanted = [x_BTD, *weights]
        outs = self.forward()
        self.grads = [torch.ones_like(out) for out in outs]

    def forward(self) -> list[Tensor]:
        with precision_context(self.precision, self.x_BTD.device.type):
            out = self.call(self.x_BTD)
        return list(out) if isinstance(out, tuple) else [out]

    def both(self) -> object:
        return torch.autograd.grad(self.forward(), self.wanted, self.grads, allow_unused=True)


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
    works: dict[tuple[str, str, str], _Work] = {}
    sites: dict[str, int] = {}
    for option, chosen in configs.items():
        block, layer, context = _parts(axis, chosen, size[:2], device)
        calls: dict[str, Callable[..., Any]] = {"block": lambda x, b=block, c=context: b(b.enter(x), c.for_one_block())}
        modules: dict[str, list[nn.Module]] = {"block": [block, context.positions[-1]]}
        if layer is not None:
            calls["alone"] = layer if axis == "norm" else lambda x, m=layer, c=context: m(x, c.for_one_block())
            modules["alone"] = [layer, context.positions[-1]] if layer is block.attn else [layer]
            sites[option] = sum(isinstance(m, type(layer)) for m in block.modules())
        for place, call in calls.items():
            weights = list({id(p): p for m in modules[place] for p in m.parameters()}.values())
            precision = chosen.train.precision
            works[option, place, "eager"] = _Work(call, weights, x_BTD, precision)
            if compiled:
                works[option, place, "compiled"] = _compiled(call, weights, x_BTD, precision)
    counts = {key: counted(work.both) for key, work in works.items() if key[2] == "eager"}
    taken = _timed(works, seconds, clock_of(device))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.train.precision, torch.float32)
    rates = device_rates(device, dtype, x_BTD.numel() * 4)
    costs = [_cost(key, taken, counts, baseline, rates) for key in works]
    shares = {option: _shares(option, taken, counts, sites) for option in configs}
    return Bench(
        axis=axis,
        baseline=baseline,
        layer={"norm": "one norm", "ffn": "the FFN", "placement": "none: a placement is the block"}.get(
            axis, "attention, with its four projections"
        ),
        shape={"batch": size[0], "context": size[1], "d_model": size[2], "n_heads": config.model.n_heads},
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        threads=torch.get_num_threads(),
        precision=config.train.precision,
        product_rate=rates[0],
        copy_rate=rates[1],
        costs=costs,
        time_share={option: share[0] for option, share in shares.items()},
        flop_share={option: share[1] for option, share in shares.items()},
    )


def _parts(axis: str, config: RunConfig, size: tuple[int, int], device: torch.device) -> tuple[Any, Any, Context]:
    """The last block, the module in which the option acts (None: the block), and what earlier blocks left for it."""
    model = build_model(config).to(device).train()
    block = model.blocks[-1]
    context = model.context(torch.zeros(size, dtype=torch.long, device=device))
    with torch.no_grad(), precision_context(config.train.precision, device.type):
        model.hidden(context.tokens_BT, context)
    if axis == "norm":
        norm = NORM.build(config.norm, config.model.d_model, config.resolved.norm_bias, Site("attn")).to(device)
        return block, norm, context
    layer = {"placement": None, "ffn": block.ffn}.get(axis, block.attn)  # type: ignore[reportArgumentType]
    return block, layer, context


def _compiled(call: Callable[..., Any], weights: list[nn.Parameter], x_BTD: Tensor, precision: str) -> _Work:
    try:
        with torch._dynamo.config.patch(recompile_limit=MOST_PROGRAMS):
            work = _Work(torch.compile(call, dynamic=False), weights, x_BTD, precision)
            work.both()
    except RuntimeError as error:
        raise ConfigError(
            "torch.compile does not work here", str(error).splitlines()[0], "leave out --compile"
        ) from error
    return work


def _timed(
    works: dict[tuple[str, str, str], _Work], seconds: float, clock: Clock
) -> dict[tuple[str, str, str], dict[str, list[float]]]:
    """Seconds per round: of forward, of both passes, and their difference, which is the backward pass."""
    jobs: dict[str, Callable[[], object]] = {}
    for key, work in works.items():
        jobs |= {"/".join((*key, "forward")): work.forward, "/".join((*key, "both")): work.both}
    for job in jobs.values():
        job()
    taken = in_turn(jobs, seconds, clock)
    times = {}
    for key in works:
        forward, both = taken["/".join((*key, "forward"))], taken["/".join((*key, "both"))]
        backward = [max(b - f, 1e-9) for f, b in zip(forward, both, strict=True)]
        times[key] = {"forward": forward, "backward": backward, "both": both}
    return times


def _cost(key: tuple[str, str, str], taken: Any, counts: dict[Any, Traffic], baseline: str, rates: Any) -> OptionCost:
    option, place, mode = key
    traffic = counts.get(key)
    base = taken[baseline, place, mode]
    return OptionCost(
        option=option,
        place=place,
        mode=mode,
        seconds={name: spread(taken[key][name]) for name in PASSES},
        ratio={name: ratios(taken[key][name], base[name]) for name in PASSES},
        flops=traffic and traffic.flops,
        bytes_moved=traffic and traffic.bytes_moved,
        peak_bytes=traffic and traffic.peak_bytes,
        best_share=traffic and seconds_at_best(traffic, *rates) / spread(taken[key]["both"]).median,
    )


def _shares(option: str, taken: Any, counts: Any, sites: dict[str, int]) -> tuple[float | None, float | None]:
    if option not in sites:
        return None, None
    layer, block = (option, "alone", "eager"), (option, "block", "eager")
    time = spread(taken[layer]["both"]).median / spread(taken[block]["both"]).median
    flops = counts[layer].flops / counts[block].flops if counts[block].flops else 0.0
    return sites[option] * time, sites[option] * flops


def verdicts(bench: Bench) -> list[str]:
    """Each option compared with the baseline in a sentence: they differ if both quartiles are on the same side of 1."""
    place = "alone" if any(cost.place == "alone" for cost in bench.costs) else "block"
    lines = []
    for cost in bench.costs:
        if cost.place != place or cost.option == bench.baseline:
            continue
        ratio = cost.ratio["both"]
        word = "slower than" if ratio.low > 1 else "faster than" if ratio.high < 1 else "no different from"
        lines.append(
            f"{cost.mode}, {bench.axis}={cost.option} is {word} {bench.axis}={bench.baseline} here: "
            f"{ratio.median:.2f} times its time ({ratio.low:.2f} to {ratio.high:.2f})"
        )
    return lines


def as_data(bench: Bench) -> dict[str, Any]:
    """Plain data for --json; seconds, bytes, FLOPs."""
    return dataclasses.asdict(bench) | {"verdicts": verdicts(bench)}
