"""The probe: an eager, no-grad pass of the uncompiled model over a fixed batch, with temporary hooks.

It has no side effects: parameters, gradients, buffers, random states and the next loss are bit-identical with and
without it. It evaluates STATISTICS; measures.py and docs/metrics.md define the names of the results.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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
            handles += _Block(f"block_{layer:03d}", block, seen, full, (tokens_BT, kinds or {})).hooks()
            handles += bondarenko.hooks(block) if full else []
        if full:
            handles += bondarenko.norm_hooks((model.final_norm, bondarenko.by_sequence))  # type: ignore[arg-type]
        with evaluation_mode(model):
            with precision():
                logits_BTV = model(tokens_BT)
            take(seen, "logits", logits_BTV, full, {})
            seen |= bondarenko.figures()
    return _numbers(seen)


def matrix_probe(model: nn.Module, update_ratios: Mapping[str, Tensor]) -> Found:
    """The weights' part of a full probe: `matrix_figures`, and the update ratios of the last step."""
    with torch.no_grad():
        return _numbers({**matrix_figures(model), **update_ratios})


class _Block:
    """The hooks on one block, which put statistics into `seen` and keep no tensors."""

    def __init__(
        self, name: str, block: Any, seen: dict[str, Tensor], full: bool, text: tuple[Tensor, Mapping[str, Any]]
    ) -> None:
        self.name, self.block, self.seen, self.full, self.text = name, block, seen, full, text
        self.entering: Tensor | None = None

    def hooks(self) -> list[Any]:
        """Hooks for the activations at each site, the attention map and gate scores."""
        handles = [
            self.block.attn.register_forward_hook(self._branch("attn")),
            self.block.ffn.register_forward_hook(self._branch("ffn")),
            self.block.register_forward_hook(self._leaving),
        ]
        if core := getattr(self.block.attn, "core", None):
            handles.append(core.register_forward_pre_hook(self._attention))
        if self.full:
            handles.append(self.block.register_forward_pre_hook(self._entering))
        gates = [m for m in self.block.attn.modules() if isinstance(m, Gate) and m.multiplies]
        return handles + [m.register_forward_hook(self._gate) for m in gates]

    def _take(self, site: str, tensor: Tensor, **inputs: Any) -> None:
        take(self.seen, site, tensor, self.full, inputs, self.name)

    def _entering(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.entering = self.block.residual(inputs[0])

    def _branch(self, site: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, inputs, output: self._take(site, output, stream_BTD=self.entering)

    def _leaving(self, module: nn.Module, inputs: Any, output: Any) -> None:
        tokens_BT, kinds = self.text
        sink, entering, self.entering = inputs[1].sink, self.entering, None
        text = {"tokens_BT": tokens_BT, "kinds": kinds, "sink": sink, "first": 0}
        self._take("resid", self.block.residual(output), stream_BTD=entering, **text)

    def _attention(self, core: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> None:
        q_BHTd, k_BHSd, v_BHSd, bias = (x if x is None else x.float() for x in inputs)
        assert q_BHTd is not None and k_BHSd is not None and v_BHSd is not None
        with torch.autocast(q_BHTd.device.type, enabled=False):
            self._attention_map(core, q_BHTd, k_BHSd, v_BHSd, bias)

    def _attention_map(self, core: Any, q_BHTd: Tensor, k_BHSd: Tensor, v_BHSd: Tensor, bias: Tensor | None) -> None:
        learned = core.prefix.learned
        for site, vectors, first in (("query", q_BHTd, 0), ("key", k_BHSd, learned), ("value", v_BHSd, learned)):
            self._take(site, vectors, first=first)
        score_BHTS, seen_TS = core.scores(q_BHTd, k_BHSd, bias), core.seen(q_BHTd.shape[2], q_BHTd.device)
        self._take("scores", score_BHTS, seen_TS=seen_TS, first=learned)
        share_BHTS = attention_statistics.shares(core.normalized(score_BHTS, seen_TS), bool(core.prefix.own))
        self._take("map", share_BHTS, first=core.prefix.own + learned)

    def _gate(self, module: Any, inputs: tuple[str, Tensor, Tensor], output: Tensor) -> None:
        if inputs[0] == module.site:
            self._take("gate", module.factor(inputs[2]))


def take(
    seen: dict[str, Tensor], site: str, tensor: Tensor, full: bool, inputs: Mapping[str, Any], block: str = ""
) -> None:
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

    def hooks(self, block: Any) -> list[Any]:
        def stream(module: nn.Module, inputs: Any, output: Any) -> None:
            self.by_sequence(module, inputs, block.residual(output))

        norms = [
            (getattr(block, "norm_attn", None), self.by_sequence),
            (getattr(block, "norm_ffn", None), self.by_sequence if block.norm_ffn_after_sum else self.by_token),
        ]
        return [
            block.register_forward_hook(stream),
            block.attn.register_forward_hook(self.by_sequence),
            block.ffn.register_forward_hook(self.by_token),
            *self.norm_hooks(*norms),
        ]

    def norm_hooks(self, *norms: tuple[nn.Module | None, Callable[..., None]]) -> list[Any]:
        """Hooks on the norms that exist; a missing norm is an identity module."""
        return [n.register_forward_hook(hook) for n, hook in norms if n is not None and not isinstance(n, nn.Identity)]

    def by_sequence(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._take(output.flatten(1))

    def by_token(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._take(output.flatten(0, -2))

    def _take(self, x_RN: Tensor) -> None:
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
    flat = torch.cat([value.detach().float().reshape(-1) for value in seen.values()]).tolist()
    flat = [float(f"{number:.7g}") for number in flat]  # float32 precision, so that rows stay short
    numbers, start = {}, 0
    for name, value in seen.items():
        numbers[name] = flat[start : start + len(value)] if value.ndim else flat[start]
        start += value.numel()
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
        figures[name] = max(numbers) if made == "largest" else math.fsum(numbers) / len(numbers)
    stream = over_blocks(probed, "act/resid/rms")
    return figures | {"act/resid/growth": stream[-1] / stream[0] if stream[0] else math.nan}


def over_blocks(probed: Found, name: str) -> list[Any]:
    """The values of `attn/entropy` in all blocks: `attn/block_000/entropy`, `attn/block_001/entropy` ..."""
    area, _, rest = name.partition("/")
    return [value for key, value in probed.items() if key.startswith(f"{area}/block_") and key.split("/", 2)[2] == rest]
