"""The probe: an eager, no-grad pass of the uncompiled model over a fixed batch, with temporary hooks.

It has no side effects: parameters, gradients, buffers, random states and the next loss are bit-identical with and
without it. It evaluates STATISTICS; measures.py and docs/metrics.md define the names of the results.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nexus_ablate.axes.gate import Gate
from nexus_ablate.measure import activation_statistics, attention_statistics
from nexus_ablate.measure.activation_statistics import SITES, STATISTICS
from nexus_ablate.measure.measures import whole_of
from nexus_ablate.measure.weight_statistics import matrix_figures

Found = dict[str, Any]
"""Figures by name: a number, or a list with one number per head."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout, no gradients, no update of running statistics inside the `with`; then the earlier mode again."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


@contextmanager
def hooks() -> Iterator[list[Any]]:
    """A list for the handles of hooks, which are removed at the end."""
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


def probe(
    model: nn.Module,
    tokens_BT: Tensor,
    full: bool = False,
    kinds: Mapping[str, Collection[int]] | None = None,
    precision: Callable[[], AbstractContextManager] = contextlib.nullcontext,
) -> Found:
    """Take one probe: `act/block_000/resid/rms` and so on, for every block, site and statistic.

    Sites are the residual stream after the block (`resid`) and the output of each branch (`attn`, `ffn`).

    Args:
        model: The uncompiled model (hooks on a compiled one never fire).
        tokens_BT: The probe batch.
        full: Whether to evaluate the statistics of a full probe too.
        kinds: Token ids by kind (such as `newline`). A full probe reports which kind has the largest entries.
        precision: The context manager for forward passes, as in training. Statistics and attention maps are float32.
    """
    seen: dict[str, Tensor] = {}
    bondarenko = _Bondarenko()
    with hooks() as handles:
        for layer, block in enumerate(model.blocks):  # type: ignore[arg-type]
            take = partial(_take, seen, full, f"block_{layer:03d}")
            handles += _block_hooks(block, take, full, tokens_BT=tokens_BT, kinds=kinds or {})
        if full:
            handles += bondarenko.hooks(model)
        with evaluation_mode(model):
            with precision():
                logits_BTV = model(tokens_BT)
            _take(seen, full, "", "logits", logits_BTV)
            seen |= bondarenko.figures()
    return _numbers(seen)


def matrix_probe(model: nn.Module, update_ratios: Mapping[str, Tensor]) -> Found:
    """The weights' part of a full probe: `matrix_figures`, and the update ratios of the last step."""
    with torch.no_grad():
        return _numbers({**matrix_figures(model), **update_ratios})


def _block_hooks(block: Any, take: Callable[..., None], full: bool, **text: Any) -> list[Any]:
    """Hooks on one block that take the statistics of its sites, its attention map and its gates, and keep no tensors.

    Args:
        take: `_take` of this block.
        text: `tokens_BT` and `kinds`, see `statistic`.
    """
    entering: Tensor | None = None  # the residual stream, while a full probe is in the block

    def enter(module: nn.Module, inputs: Any) -> None:
        nonlocal entering
        entering = block.residual(inputs[0])

    def branch(site: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        take(site, output, stream_BTD=entering)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal entering
        take("resid", block.residual(output), stream_BTD=entering, sink=inputs[1].sink, first=0, **text)
        entering = None

    def attention(core: Any, inputs: Any) -> None:
        *projected, bias = inputs
        q_BHTd, k_BHSd, v_BHSd = (x.float() for x in projected)
        bias = None if bias is None else bias.float()
        learned, own = core.prefix.learned, core.prefix.own
        with torch.autocast(q_BHTd.device.type, enabled=False):
            take("query", q_BHTd, first=0)
            take("key", k_BHSd, first=learned)
            take("value", v_BHSd, first=learned)
            score_BHTS, seen_TS = core.scores(q_BHTd, k_BHSd, bias), core.seen(q_BHTd.shape[2], q_BHTd.device)
            take("scores", score_BHTS, seen_TS=seen_TS, first=learned)
            share_BHTS = attention_statistics.shares(core.normalized(score_BHTS, seen_TS), bool(own))
            take("map", share_BHTS, first=own + learned)

    def gate(module: Any, inputs: Any, output: Tensor) -> None:
        if inputs[0] == module.site:
            take("gate", module.factor(inputs[2]))

    handles = [
        block.attn.register_forward_hook(partial(branch, "attn")),
        block.ffn.register_forward_hook(partial(branch, "ffn")),
        block.register_forward_hook(leave),
    ]
    if full:
        handles.append(block.register_forward_pre_hook(enter))
    if core := getattr(block.attn, "core", None):
        handles.append(core.register_forward_pre_hook(attention))
    gates = [m for m in block.attn.modules() if isinstance(m, Gate) and m.multiplies]
    return handles + [m.register_forward_hook(gate) for m in gates]


def _take(seen: dict[str, Tensor], full: bool, block: str, site: str, tensor: Tensor, **inputs: Any) -> None:
    """Put every statistic of a site into `seen`, under its name.

    Args:
        inputs: The further inputs of statistics; see `statistic`.
    """
    for statistic in STATISTICS:
        if site not in statistic.sites or (statistic.full and not full):
            continue
        value = statistic.function(tensor, **{name: inputs[name] for name in statistic.needs})
        name = f"{SITES[site].format(block=block)}/{statistic.name}"
        if isinstance(value, dict):
            seen |= {f"{name}{figure}": number for figure, number in value.items()}
        elif value is not None:
            seen[name] = value


class _Bondarenko:
    """The outlier figures of Bondarenko et al. 2023 (arXiv:2306.12929), over the same tensors as in their OPT script.

    These are the outputs of the final norm and of each block, FFN, FFN norm, attention and attention norm: 5L + 1
    tensors, or fewer if the placement has fewer norms. A row is a sequence, but for an FFN and its norm a token, since
    the authors' model reshapes there. An FFN norm that follows an addition to the residual stream, as in post-norm,
    comes after that reshape has ended, so its rows are sequences.
    """

    def __init__(self) -> None:
        self.kurtoses: list[Tensor] = []
        self.norms: list[Tensor] = []

    def hooks(self, model: Any) -> list[Any]:
        sequences, tokens = partial(torch.flatten, start_dim=1), partial(torch.flatten, end_dim=-2)
        watched: list[tuple[Any, Callable[[Any], Tensor]]] = [(model.final_norm, sequences)]
        for block in model.blocks:
            watched += [
                (block, lambda stream, block=block: sequences(block.residual(stream))),
                (block.attn, sequences),
                (block.ffn, tokens),
                (getattr(block, "norm_attn", None), sequences),
                (getattr(block, "norm_ffn", None), sequences if block.norm_ffn_after_sum else tokens),
            ]
        there = [(module, rows) for module, rows in watched if not isinstance(module, nn.Identity | None)]
        return [module.register_forward_hook(partial(self._take, rows)) for module, rows in there]

    def _take(self, rows: Callable[[Any], Tensor], module: nn.Module, inputs: Any, output: Any) -> None:
        x_RN = rows(output)
        self.kurtoses.append(activation_statistics.bondarenko_kurtosis(x_RN))
        self.norms.append(activation_statistics.bondarenko_inf_norm(x_RN))

    def figures(self) -> dict[str, Tensor]:
        if not self.norms:
            return {}
        kurtoses = torch.stack(self.kurtoses)
        return {
            "act/bondarenko_kurtosis": kurtoses.mean(),
            "act/bondarenko_kurtosis_max": kurtoses.max(),
            "act/bondarenko_inf_norm": torch.stack(self.norms).max(),
        }


def _numbers(seen: Mapping[str, Tensor]) -> Found:
    """Scalars and vectors as numbers and lists, with one transfer from the device."""
    flat = torch.cat([value.detach().float().reshape(-1) for value in seen.values()])
    parts = flat.cpu().split([value.numel() for value in seen.values()])
    numbers = {}
    for (name, value), part in zip(seen.items(), parts, strict=True):
        rounded = [float(f"{number:.7g}") for number in part.tolist()]  # float32 precision, so that rows stay short
        numbers[name] = rounded if value.ndim else rounded[0]
    return numbers


# --------------------------------------------------------------------------------------------- figures of the model


def model_figures(probed: Found) -> dict[str, float]:
    """The figures of the whole model, for metrics.jsonl: `act/resid/kurtosis_token`, `attn/sink_rate` ...

    The table of measures says how each is made of those of blocks and heads. `act/resid/growth` is the RMS of the
    residual stream after the last block over that after the first.
    """
    figures = {name: value for name, value in probed.items() if "/block_" not in name}
    parts: dict[tuple[str, str], list[float]] = {}
    for name, value in probed.items():
        if whole := whole_of(name):
            parts.setdefault(whole, []).extend(value if isinstance(value, list) else [value])
    for (name, made), numbers in parts.items():
        largest = math.nan if any(map(math.isnan, numbers)) else max(numbers)
        figures[name] = largest if made == "largest" else math.fsum(numbers) / len(numbers)
    stream = over_blocks(probed, "act/resid/rms")
    return figures | {"act/resid/growth": stream[-1] / stream[0] if stream[0] else math.nan}


def over_blocks(probed: Found, name: str) -> list[Any]:
    """The values of `attn/entropy` in all blocks: `attn/block_000/entropy`, `attn/block_001/entropy` ..."""
    area, _, rest = name.partition("/")
    return [value for key, value in probed.items() if key.startswith(f"{area}/block_") and key.split("/", 2)[2] == rest]
