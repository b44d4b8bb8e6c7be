"""Take one phenomenon away and see what becomes of the other, and of the loss: massive activations, attention sinks.

Sun et al. 2024, arXiv:2402.17762, section 3, set massive activations to zero and to their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nexus_ablate.attention import AttentionCore, substituted
from nexus_ablate.measure.evaluation.subject import EVALUATION, Evaluation, Subject
from nexus_ablate.measure.probe import evaluation_mode, hooks, model_figures, probe
from nexus_ablate.measure.statistics import MASSIVE_RATIO

TARGETS = 8192
SEEN = ("attn/first_token_mass", "attn/sink_rate", "act/resid/max_over_median", "act/resid/kurtosis_token")


@EVALUATION.register("intervention")
class Intervention(Evaluation):
    """Loss, sinks and outliers before and under each intervention; see docs/metrics.md for the figures' names.

    `massive_*`: entries of the residual stream after each block of at least `threshold` times the median magnitude of
    their sequence are set to zero, or to the mean of such entries in that block and channel over training sequences.
    The threshold is 1000, or what one entry in a thousand reaches where nothing reaches that (`massive` says which).
    `sink_*`: the attention that queries 1 .. T - 1 pay to token 0 is set to zero, to its mean over training sequences
    (by block, head and query), or to zero with the rest of the row scaled up to the same sum (`renormalized`). The
    sink figures of a `sink_*` row are those of the maps before they are changed.
    """

    def __init__(self, *, calibration: int) -> None:
        self.calibration = calibration

    def __call__(self, subject: Subject) -> dict[str, Any]:
        model = subject.model
        windows = subject.windows(TARGETS)
        tokens_BT = subject.on_device(subject.calibration(self.calibration))
        threshold = massive_threshold(model, tokens_BT)
        means, count = massive_means(model, tokens_BT, threshold)
        sinks = sink_means(model, tokens_BT)
        results = {
            "before": _seen(subject, windows),
            "massive_zero": _seen(subject, windows, lambda: massive_set(model, threshold, None)),
            "massive_mean": _seen(subject, windows, lambda: massive_set(model, threshold, means)),
            "sink_zero": _seen(
                subject, windows, lambda: sink_set(model, lambda block, weight: torch.zeros_like(weight))
            ),
            "sink_mean": _seen(subject, windows, lambda: sink_set(model, lambda block, weight: sinks[block])),
            "sink_renormalized": _seen(subject, windows, lambda: sink_set(model, None)),
        }
        for name, result in results.items():
            if name != "before":
                result["gap"] = result["loss"] - results["before"]["loss"]
        return {"threshold": threshold, "massive": threshold == MASSIVE_RATIO, "entries_per_sequence": count} | results


def _seen(subject: Subject, windows: np.ndarray, change: Callable[[], Any] | None = None) -> dict[str, float]:
    with change() if change else hooks():
        figures = model_figures(probe(subject.model, subject.on_device(windows[:, :-1])))
        return {"loss": float(subject.losses(windows).double().mean())} | {name: figures[name] for name in SEEN}


# --------------------------------------------------------------------------------------------- massive activations


def massive_threshold(model: nn.Module, tokens_BT: Tensor) -> float:
    """MASSIVE_RATIO; where no entry reaches it, what one in a thousand reaches in the block where that is most."""
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
    """Mean of the massive entries by block and channel (nan where there is none), and how many a sequence has."""
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
    """While it is entered, massive entries are zero, or the mean of their channel where calibration found one."""

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
    """Show `look` the residual stream after each block, with the block's number; it may change it in place."""

    def hook(number: int, block: Any) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, inputs, output: look(number, block.residual(output))

    with hooks() as handles, evaluation_mode(model):
        handles += [b.register_forward_hook(hook(i, b)) for i, b in enumerate(model.blocks)]  # type: ignore[arg-type]
        yield


def _ratios(x_BTD: Tensor) -> Tensor:
    magnitude_BTD = x_BTD.float().abs()
    return magnitude_BTD / magnitude_BTD.flatten(1).median(1).values[:, None, None]


# -------------------------------------------------------------------------------------------------- attention sinks


def sink_means(model: nn.Module, tokens_BT: Tensor) -> list[Tensor]:
    """The attention that queries 1 .. T - 1 pay to token 0, mean over sequences: (H, T - 1) for each block."""
    means = []

    def keep(block: int, weight_BHQ: Tensor) -> Tensor:
        means.append(weight_BHQ.mean(0))
        return weight_BHQ

    with sink_set(model, keep), evaluation_mode(model):
        model(tokens_BT)
    return means


@contextmanager
def sink_set(model: nn.Module, change: Callable[[int, Tensor], Tensor] | None) -> Iterator[None]:
    """While it is entered, attention to token 0 is what `change(block, weight_BHQ)` makes of it.

    Without `change` it is zero and the rest of each row is scaled up to the row's sum.
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
