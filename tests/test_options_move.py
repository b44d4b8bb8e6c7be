"""Every part of every option trains: its parameters have gradients and move, and parts that are to differ come apart.

An option whose streams, heads, experts or layers stay alike for ever computes something else than it says.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from options import EVERY_OPTION, OPTIMIZERS
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.axes.placement import ManifoldConnection
from nexus_ablate.config.compose import compose
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.model import GPT, build_model
from nexus_ablate.optimizers import build_optimizer

LR = 3e-3
SIZES = (
    "model.n_layers=2",
    "model.d_model=16",
    "model.n_heads=4",
    "model.context=8",
    "weight_decay=0",
    f"optim.lr={LR}",
)
STEPS, VOCABULARY = 20, 11
STEPS_WITH_GRADIENT = 15
APART = 1e-4
"""The least distance of parts from their mean, relative to it."""
MOVED = LR / 30
"""The least distance that counts as a move: AdamW's eps keeps a gradient of rounding errors below it."""

NEEDS = {
    "placement=mixln": "init=gpt2 init.std=0.2",  # its 0.02 is for wide models: scores here would be 1e-6
    "position=t5": "position.buckets=8 position.max_distance=8",  # of its 32 buckets a context of 8 uses 8
    "position=fire": "position.threshold=7",  # at 512, the distances of this context are at most 0.13
}
"""Further overrides with which every part of an option has work to do in so small a model."""
STILL = {
    "placement=hyper": {
        r"blocks\.1\.connect_ffn\.beta_n": "the head reads the sum, so what each stream receives last counts alike",
    },
    "placement=mhc": {
        r"blocks\.0\.connect_attn\.(constant|map|factors)": "mixing the streams before they differ changes nothing",
    },
    "position=fire": {r"position\..*": "as published, ReLUs with a negative weight and bias see no distance"},
}
"""Parameters with parts that have no effect, by the nature of the option."""
SLOW = ("ffn=moe", "optim=lion", "optim=soap")
WITH_KEYS = (
    "value=residual value.learned=on",
    "qk_norm=rms qk_norm.gain=per_head",
    "qk_norm=layer qk_norm.gain=per_head qk_norm.bias=on",
    "placement=rezero placement.norm=on",
    "placement=parallel placement.norms=2",
    "placement=hyper placement.dynamic=off",
    "position=fire position.shared=on",
    "gate=elementwise gate.site=value",
    "kv_bias=key_value",
    "sink_token=on",
    "bias=on head_bias=on",
    "embed_scale=learned",
    "d_embed=8",
)
"""Keys that add parameters."""


@dataclass
class Training:
    """What the steps showed.

    Attributes:
        with_gradient: The number of steps at which a parameter had a gradient above rounding errors, by name.
        moved: The greatest distance of each element of a parameter from its first value.
        streams: The residual streams after the last block in the last step, (n, B, T, D).
    """

    model: GPT
    with_gradient: Counter[str]
    moved: dict[str, Tensor]
    streams: Tensor


def trained(config: RunConfig) -> Training:
    """Train on running sums of random tokens."""
    model = build_model(config, VOCABULARY).train()
    optimizer = build_optimizer(model, config.optim, config.weight_decay)
    optimizer.set_learning_rate(config.schedule.lr)
    named = dict(model.named_parameters())
    first = {name: parameter.detach().clone() for name, parameter in named.items()}
    moved = {name: torch.zeros_like(parameter) for name, parameter in first.items()}
    with_gradient: Counter[str] = Counter()
    outputs = []
    model.blocks[-1].register_forward_hook(lambda block, inputs, output: outputs.append(output))
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (8, 9), generator=generator).cumsum(1) % VOCABULARY
        optimizer.zero_grad()
        context = model.context(tokens[:, :-1])
        logits = model.logits(model.hidden(tokens[:, :-1], context), model.head_weight)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss + sum(context.losses.values())).backward()
        gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
        rounding = 1e-8 * nn.utils.get_total_norm(gradients.values())
        with_gradient.update(name for name, gradient in gradients.items() if gradient.norm() > rounding)
        optimizer.step()
        model.constrain()
        for name, parameter in named.items():
            moved[name] = torch.maximum(moved[name], (parameter.detach() - first[name]).abs())
    return Training(model, with_gradient, moved, streams_of(outputs[-1]).detach())


def streams_of(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The residual streams that a block returns, one after the other."""
    if isinstance(output, tuple):
        return torch.stack(output)
    return output.movedim(2, 0) if output.ndim == 4 else output[None]


def parts_of(training: Training) -> dict[str, Tensor]:
    """What is to differ: streams, the slices of each parameter, and parameters whose names differ in a number."""
    parts, numbered = {"streams": training.streams}, defaultdict(list)
    for name, parameter in training.model.named_parameters():
        numbered[re.sub(r"\d+", "*", name)].append(parameter.detach())
        if parameter.ndim:
            parts[name] = parameter.detach()
    for name, members in numbered.items():
        if len({member.shape for member in members}) == 1:
            parts[name] = torch.stack(members)
    return {name: part for name, part in parts.items() if len(part) > 1}


def spread(parts: Tensor) -> float:
    """The distance of the parts from their mean, relative to it."""
    mean = parts.mean(0)
    return ((parts - mean).square().mean() / mean.square().mean()).sqrt().item()


def faults(option: str, names: Iterable[str]) -> list[str]:
    """The names without those that are still by nature."""
    expected = STILL.get(option.partition(" ")[0], {})
    return [name for name in names if not any(re.fullmatch(pattern, name) for pattern in expected)]


def check(option: str) -> None:
    needs = NEEDS.get(option.partition(" ")[0], "")
    training = trained(compose([*SIZES, *option.split(), *needs.split()]))
    moved, counts = training.moved, training.with_gradient
    assert [name for name in moved if counts[name] < STEPS_WITH_GRADIENT] == [], "without a gradient"
    assert faults(option, (name for name in moved if moved[name].min() < MOVED)) == [], "with elements that never move"
    alike = [name for name, parts in parts_of(training).items() if not spread(parts) > APART]
    assert faults(option, alike) == [], "with parts that stay alike"


@pytest.mark.parametrize(
    "option",
    [
        pytest.param(option, marks=[pytest.mark.slow] if option in SLOW else [])
        for option in (*EVERY_OPTION, *WITH_KEYS, *(f"optim={name}" for name in OPTIMIZERS))
    ],
)
def test_every_parameter_of_an_option_has_gradients_and_moves_and_its_parts_come_apart(option):
    check(option)


def test_streams_whose_constants_start_alike_stay_alike_and_are_found(monkeypatch):
    build = ManifoldConnection.__init__

    def alike(module, *sizes):
        build(module, *sizes)
        nn.init.zeros_(module.constant)

    monkeypatch.setattr(ManifoldConnection, "__init__", alike)
    with pytest.raises(AssertionError, match="never move"):
        check("placement=mhc")
