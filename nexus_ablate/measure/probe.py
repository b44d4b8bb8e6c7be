"""The probe: an eager, no-grad pass of the uncompiled model over a fixed batch, with hooks that live only in a `with`.

It leaves no trace: parameters, gradients, buffers, random states and the next loss are bit-identical with and without.
The names of what it finds are documented in docs/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nexus_ablate.axes.gate import Gate
from nexus_ablate.measure import attention_statistics, statistics
from nexus_ablate.measure.weight_statistics import matrix_figures

Found = dict[str, Any]
"""Figures by name: a number, or a list of one number a head."""

SINK_POSITIONS = (1, 2, 3, 4)
"""The k of the sink rates that a full probe reports."""


def due(step: int, every: int) -> bool:
    """Whether a probe falls on this step: powers of two, and every `every` steps."""
    return step > 0 and (step & (step - 1) == 0 or step % every == 0)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout, no gradients, no update of running statistics; the mode that was there comes back."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


@contextmanager
def hooks() -> Iterator[list[Any]]:
    """A list for the handles of hooks; what is in it is removed at the end."""
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


def probe(
    model: nn.Module, tokens_BT: Tensor, full: bool = False, kinds: Mapping[str, Collection[int]] | None = None
) -> Found:
    """One probe: `act/block_000/resid/rms` and so on for every block, site and statistic.

    Sites are the residual stream after the block (`resid`) and the output of each branch (`attn`, `ffn`).

    Args:
        model: The uncompiled model (hooks on a compiled one never fire).
        tokens_BT: The probe batch.
        full: The whole panel.
        kinds: Kinds of tokens by name (`newline`: its ids), for a full probe to say which carry the largest entries.
    """
    seen: dict[str, Tensor] = {}
    bondarenko = _Bondarenko()
    with hooks() as handles:
        for layer, block in enumerate(model.blocks):  # type: ignore[arg-type]
            look = _Block(f"block_{layer:03d}", block, seen)
            handles += look.hooks(full)
            if full:
                handles += look.full_hooks(tokens_BT, kinds or {})
                handles += bondarenko.hooks(block)
        if full:
            handles += bondarenko.norm_hooks((model.final_norm, bondarenko.by_sequence))  # type: ignore[arg-type]
        with evaluation_mode(model):
            logits_BTV = model(tokens_BT)
            seen["logits/log_sum_exp"] = statistics.log_sum_exp(logits_BTV)
            seen["logits/max_abs"] = statistics.max_abs(logits_BTV)
            seen |= bondarenko.figures()
    return _numbers(seen)


def matrix_probe(model: nn.Module, update_ratios: Mapping[str, Tensor]) -> Found:
    """What a full probe adds of the weights (see `matrix_figures`), and the last step's updates over weights."""
    with torch.no_grad():
        return _numbers({**matrix_figures(model), **update_ratios})


class _Block:
    """What a probe looks at in one block: hooks that put statistics into `seen` and let the tensors go."""

    def __init__(self, name: str, block: Any, seen: dict[str, Tensor]) -> None:
        self.name, self.block, self.seen = name, block, seen

    def hooks(self, full: bool) -> list[Any]:
        """Activations at each site, the attention map, gate scores."""

        def activations(site: str, figures: Mapping[str, Callable[[Tensor], Tensor]], x_BTD: Tensor) -> None:
            for statistic, value in figures.items():
                self.seen[f"act/{self.name}/{site}/{statistic}"] = value(x_BTD)

        def branch(site: str) -> Callable[[nn.Module, Any, Tensor], None]:
            return lambda module, inputs, output: activations(site, statistics.ACTIVATION, output)

        def stream(module: nn.Module, inputs: Any, output: Any) -> None:
            wanted = statistics.ACTIVATION | statistics.STREAM | (statistics.STREAM_FULL if full else {})
            activations("resid", wanted, self.block.residual(output))

        def attention(core: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> None:
            self._attention(core, inputs, SINK_POSITIONS if full else SINK_POSITIONS[:1])

        def gate(module: Any, inputs: tuple[str, Tensor, Tensor], output: Tensor) -> None:
            if inputs[0] == module.site:
                score = module.factor(inputs[2])
                self.seen[f"gate/{self.name}/mean"] = score.float().mean()
                self.seen[f"gate/{self.name}/closed"] = statistics.closed_share(score)

        handles = [
            self.block.attn.register_forward_hook(branch("attn")),
            self.block.ffn.register_forward_hook(branch("ffn")),
            self.block.register_forward_hook(stream),
            self.block.attn.core.register_forward_pre_hook(attention),
        ]
        gates = [m for m in self.block.attn.modules() if isinstance(m, Gate) and m.multiplies]
        return handles + [m.register_forward_hook(gate) for m in gates]

    def _attention(self, core: Any, inputs: Any, positions: tuple[int, ...]) -> None:
        q_BHTd, k_BHSd, _, bias = inputs
        score_BHTS = core.scores(q_BHTd, k_BHSd, bias)
        T = score_BHTS.shape[2]
        seen_TS = core.seen(T, score_BHTS.device)
        share_BHTS = attention_statistics.shares(core.normalized(score_BHTS, seen_TS), bool(core.prefix.own))
        statistics = {
            "first_token_mass": attention_statistics.first_token_mass(share_BHTS),
            "entropy": attention_statistics.entropy(share_BHTS),
            "max_logit": attention_statistics.max_logit(score_BHTS, seen_TS),
        }
        for k in positions[:T]:
            statistics["sink_rate" if k == 1 else f"sink_rate_{k}"] = attention_statistics.sink_rate(share_BHTS, k)
        if share_BHTS.shape[-1] > T:
            statistics["front_mass"] = attention_statistics.front_mass(share_BHTS)
        self.seen |= {f"attn/{self.name}/{name}": value for name, value in statistics.items()}

    def full_hooks(self, tokens_BT: Tensor, kinds: Mapping[str, Collection[int]]) -> list[Any]:
        """How the block changes the residual stream, and the position of its largest entry."""
        before: dict[str, Tensor] = {}

        def entering(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            before["stream"] = self.block.residual(inputs[0])

        def branch(site: str) -> Callable[[nn.Module, Any, Tensor], None]:
            def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
                ratio = statistics.branch_ratio(output, before["stream"])
                self.seen[f"act/{self.name}/{site}/branch_ratio"] = ratio

            return hook

        def leaving(module: nn.Module, inputs: Any, output: Any) -> None:
            x_BTD = self.block.residual(output)
            self.seen[f"act/{self.name}/resid/cosine"] = statistics.cosine(x_BTD, before.pop("stream"))
            for figure, value in largest_entry(x_BTD, tokens_BT, kinds).items():
                self.seen[f"act/{self.name}/resid/top_{figure}"] = value

        return [
            self.block.register_forward_pre_hook(entering),
            self.block.attn.register_forward_hook(branch("attn")),
            self.block.ffn.register_forward_hook(branch("ffn")),
            self.block.register_forward_hook(leaving),
        ]


def largest_entry(x_BTD: Tensor, tokens_BT: Tensor, kinds: Mapping[str, Collection[int]]) -> dict[str, Tensor]:
    """Where the largest entry of each sequence's stream stands: channel, position, and on which kind of token.

    `channel` and `position` are the commonest, `*_agreement` the share of sequences that have it; `on_first` and
    `on_<kind>` are shares of sequences, each counted once, under the first kind that fits.

    Args:
        x_BTD: The stream; with a sink token in front it is one longer than the tokens and that token is the first.
        tokens_BT: What was read.
        kinds: Token ids by kind.
    """
    position_B, channel_B = statistics.top_entry(x_BTD)
    figures = {}
    for name, index_B in (("channel", channel_B), ("position", position_B)):
        figures[name], figures[f"{name}_agreement"] = statistics.most_common(index_B)
    front = x_BTD.shape[1] - tokens_BT.shape[1]
    token_B = tokens_BT.gather(1, (position_B - front).clamp(min=0)[:, None])[:, 0]
    left_B = position_B > 0
    figures["on_first"] = (~left_B).float().mean()
    for kind, ids in kinds.items():
        fits_B = left_B & torch.isin(token_B, torch.tensor(sorted(ids), device=token_B.device))
        figures[f"on_{kind}"] = fits_B.float().mean()
        left_B = left_B & ~fits_B
    return figures


class _Bondarenko:
    """The outlier figures of Bondarenko et al. 2023 (arXiv:2306.12929) over the tensors that their OPT script hooks.

    Output of the final norm, each block, each FFN, each FFN norm, each attention and each attention norm: 5L + 1
    tensors, fewer where the placement has fewer norms. A row is a sequence; of an FFN and its norm a token, as the
    reshape in the authors' model makes it. An FFN norm that follows an addition to the residual stream, as in
    post-norm, comes after the end of that reshape there, so its rows are sequences.
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
        """Hooks on the norms that there are; one that was left out is an identity."""
        return [n.register_forward_hook(hook) for n, hook in norms if n is not None and not isinstance(n, nn.Identity)]

    def by_sequence(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._take(output.flatten(1))

    def by_token(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._take(output.flatten(0, -2))

    def _take(self, x_RN: Tensor) -> None:
        self.kurtoses.append(statistics.bondarenko_kurtosis(x_RN))
        self.norms.append(statistics.bondarenko_inf_norm(x_RN))

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
    """Tensors of at most one axis as numbers and lists, with one transfer from the device."""
    flat = torch.cat([value.detach().float().reshape(-1) for value in seen.values()]).tolist()
    flat = [float(f"{number:.7g}") for number in flat]  # what a float32 holds, so that rows stay short
    numbers, start = {}, 0
    for name, value in seen.items():
        numbers[name] = flat[start : start + len(value)] if value.ndim else flat[start]
        start += value.numel()
    return numbers


# --------------------------------------------------------------------------------------------- figures of the model


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


MODEL_FIGURES: dict[str, Callable[[list[float]], float]] = {
    **{f"act/resid/{statistic}": max for statistic in statistics.ACTIVATION | statistics.STREAM},
    **{f"attn/{statistic}": _mean for statistic in ("first_token_mass", "sink_rate", "entropy", "front_mass")},
    "attn/max_logit": max,
    "gate/mean": _mean,
    "gate/closed": _mean,
}
"""What a probe says of the whole model: the largest over blocks and heads, or the mean."""


def model_figures(probed: Found) -> dict[str, float]:
    """The figures of the whole model, for metrics.jsonl: `act/resid/kurtosis_token`, `attn/sink_rate` ...

    `act/resid/growth` is the RMS of the last block's stream over the first's.
    """
    figures = {name: value for name, value in probed.items() if name.startswith("logits/")}
    figures |= {name: value for name, value in probed.items() if name.startswith("act/bondarenko")}
    for name, over in MODEL_FIGURES.items():
        numbers = [n for value in over_blocks(probed, name) for n in (value if isinstance(value, list) else [value])]
        if numbers:
            figures[name] = over(numbers)
    stream = over_blocks(probed, "act/resid/rms")
    return figures | {"act/resid/growth": stream[-1] / stream[0] if stream[0] else math.nan}


def over_blocks(probed: Found, name: str) -> list[Any]:
    """The values of `attn/entropy` at `attn/block_000/entropy`, `attn/block_001/entropy` ..."""
    area, _, rest = name.partition("/")
    return [value for key, value in probed.items() if key.startswith(f"{area}/block_") and key.split("/", 2)[2] == rest]
