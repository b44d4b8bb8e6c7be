"""Remove massive activations or attention sinks, and measure the effect on the other phenomenon and on the loss.

Sun et al. 2024, arXiv:2402.17762, section 3, set massive activations to zero and to their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nexus_ablate.attention_core import AttentionCore, substituted
from nexus_ablate.measure.activation_statistics import MASSIVE_RATIO
from nexus_ablate.measure.evaluation.subject import EVALUATION, Evaluation, NotDefined, Subject
from nexus_ablate.measure.probe import evaluation_mode, hooks, model_figures, probe

TARGETS = 8192
SEEN = ("attn/first_token_mass", "attn/sink_rate", "act/resid/max_over_median", "act/resid/kurtosis_token")


@EVALUATION.register("intervention")
class Intervention(Evaluation):
    """Loss, sinks and outliers before and under each intervention; docs/metrics.md has the names of the measures.

    `massive_*`: entries of the residual stream after each block of at least `threshold` times the median magnitude of
    their sequence are set to zero, or to the mean of such entries in that block and channel over training sequences.
    The threshold is 1000. If no entry reaches it (`massive` is false), it is what one entry in a thousand reaches.
    `sink_*`: the attention of queries 1 .. T - 1 to token 0 is set to zero, to its mean over training sequences (by
    block, head and query), or to zero with the rest of the row scaled up to the same sum (`renormalized`). The sink
    measures of a `sink_*` row are those of the attention maps before the change.
    """

    def __init__(self, *, calibration: int) -> None:
        self.calibration = calibration

    def __call__(self, subject: Subject) -> dict[str, Any]:
        subject.require_attention()
        model, windows = subject.model, subject.windows(TARGETS)
        tokens_BT = subject.on_device(subject.calibration(self.calibration))
        threshold = massive_threshold(model, tokens_BT)
        means, count = massive_means(model, tokens_BT, threshold)
        sinks = sink_means(model, tokens_BT)
        changes = {
            "before": nullcontext(),
            "massive_zero": massive_set(model, threshold, None),
            "massive_mean": massive_set(model, threshold, means),
            "sink_zero": sink_set(model, lambda block, weight: torch.zeros_like(weight)),
            "sink_mean": sink_set(model, lambda block, weight: sinks[block]),
            "sink_renormalized": sink_set(model, None),
        }
        results: dict[str, Any] = {"threshold": threshold, "massive": threshold == MASSIVE_RATIO}
        results["entries_per_sequence"] = count
        for name, change in changes.items():
            with change:
                figures = model_figures(probe(model, subject.on_device(windows[:, :-1])))
                loss = subject.loss(windows)
            results[name] = {"loss": loss} | {seen: figures[seen] for seen in SEEN}
            if name != "before":
                results[name]["gap"] = loss - results["before"]["loss"]
        return results


# --------------------------------------------------------------------------------------------- massive activations


def massive_threshold(model: nn.Module, tokens_BT: Tensor) -> float:
    """MASSIVE_RATIO, or if no entry reaches it, the largest 99.9% quantile of the ratios over the blocks."""
    largest = upper = 0.0

    def look(block: int, x_BTD: Tensor) -> None:
        nonlocal largest, upper
        ratios = _ratios(x_BTD).flatten()
        largest = max(largest, float(ratios.max()))
        upper = max(upper, float(ratios.kthvalue(math.ceil(0.999 * len(ratios))).values))

    with watching(model, look):
        model(tokens_BT)
    return MASSIVE_RATIO if largest >= MASSIVE_RATIO else upper


def massive_means(model: nn.Module, tokens_BT: Tensor, threshold: float) -> tuple[list[Tensor], float]:
    """Mean of the massive entries by block and channel (nan if there is none), and their number per sequence."""
    means, count = [], 0

    def look(block: int, x_BTD: Tensor) -> None:
        nonlocal count
        massive = _ratios(x_BTD) >= threshold
        means.append((x_BTD * massive).sum((0, 1)) / massive.sum((0, 1)))
        count += int(massive.sum())

    with watching(model, look):
        model(tokens_BT)
    return means, count / len(tokens_BT)


@contextmanager
def massive_set(model: nn.Module, threshold: float, means: list[Tensor] | None) -> Iterator[None]:
    """Inside the `with`, massive entries are zero, or the mean of their channel if `means` has one."""

    def change(block: int, x_BTD: Tensor) -> None:
        massive = _ratios(x_BTD) >= threshold
        if means is None:
            x_BTD.masked_fill_(massive, 0)
        else:
            value = means[block].to(x_BTD.dtype).expand_as(x_BTD)
            x_BTD.copy_(torch.where(massive & ~value.isnan(), value, x_BTD))

    with watching(model, change):
        yield


@contextmanager
def watching(model: nn.Module, look: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside the `with`, call `look(block, x)` after each block; x is the residual stream, which `look` may change."""

    def seen(number: int, block: Any, inputs: Any, output: Any) -> None:
        x_BTD = block.residual(output)
        if x_BTD is not output:
            raise NotDefined("the residual stream of this placement is the sum of several, which cannot be set")
        look(number, x_BTD)

    with hooks() as handles, evaluation_mode(model):
        for number, block in enumerate(model.blocks):  # type: ignore[arg-type]
            handles.append(block.register_forward_hook(partial(seen, number)))
        yield


def _ratios(x_BTD: Tensor) -> Tensor:
    magnitude_BTD = x_BTD.float().abs()
    return magnitude_BTD / magnitude_BTD.flatten(1).median(1).values[:, None, None]


# -------------------------------------------------------------------------------------------------- attention sinks


def sink_means(model: nn.Module, tokens_BT: Tensor) -> list[Tensor]:
    """The attention of queries 1 .. T - 1 to token 0, mean over sequences: (H, T - 1) per block."""
    means = []

    def keep(block: int, weight_BHQ: Tensor) -> Tensor:
        means.append(weight_BHQ.mean(0))
        return weight_BHQ

    with sink_set(model, keep), evaluation_mode(model):
        model(tokens_BT)
    return means


@contextmanager
def sink_set(model: nn.Module, change: Callable[[int, Tensor], Tensor] | None) -> Iterator[None]:
    """Inside the `with`, attention to token 0 is replaced by `change(block, weight_BHQ)`.

    Without `change` it is zero, and the rest of each row is scaled up to the same sum.
    """

    def changed(core: AttentionCore, q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, bias: Tensor | None) -> Tensor:
        weight_BHTS = core.weights(q_BHTd, k_BGSd, bias)
        sink = weight_BHTS[:, :, 1:, core.prefix.learned]  # a view
        if change is None:
            total = weight_BHTS.sum(-1, keepdim=True)
            sink.zero_()
            weight_BHTS *= total / weight_BHTS.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        else:
            sink.copy_(change(core.layer, sink))
        return core.mixed(weight_BHTS, v_BGSd)

    with substituted(model, changed):
        yield
