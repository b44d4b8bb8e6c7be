"""Loss on longer text than in training, at 1, 2, 4 and 8 times the context, measured in two ways."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from nexus_ablate.data import eval_places, eval_windows
from nexus_ablate.measure.evaluation.subject import EVALUATION, Evaluation, NotDefined, Subject

SLIDING_TARGETS = 8192


@EVALUATION.register("extrapolation")
class Extrapolation(Evaluation):
    """Loss in nats per token by factor of the training context.

    `non_overlapping` cuts the validation text into windows of that length, which begin where windows of the run's own
    validation do. At factor 1 it is the validation loss, and at any length the targets near a window's start have
    little context. `sliding` predicts the same targets at every length, each with between L - T/2 and L tokens before
    it (L the length, T the training context). The two can rank architectures differently: Press et al. 2021,
    arXiv:2108.12409, section 4 and appendix B. `*_gap` is the loss minus that at factor 1. `by_position` is the
    non-overlapping loss by the number of tokens before the target. Factors that can't be evaluated are under
    `not_defined`, with the reason.
    """

    def __init__(self, *, factors: list[int]) -> None:
        self.factors = factors

    def __call__(self, subject: Subject) -> dict[str, Any]:
        results: dict[str, Any] = {"non_overlapping": {}, "sliding": {}, "by_position": {}, "not_defined": {}}
        targets = _sliding_targets(subject, max(self.factors))
        for factor in self.factors:
            length, name = factor * subject.context, str(factor)
            try:
                if factor > 1:
                    subject.require_free_text()
                require_length(subject, length)
            except NotDefined as reason:
                results["not_defined"][name] = str(reason)
                continue
            windows = eval_windows(subject.val, subject.context, subject.eval_tokens, subject.data.period, factor)
            losses = subject.losses(windows)
            results["non_overlapping"][name] = subject.mean(losses, windows)
            results["by_position"][name] = by_position(losses, subject.counted(windows))
            if len(targets):
                stride = len(targets[0])
                windows = np.stack([subject.val[row[-1] - length : row[-1] + 1].astype(np.int64) for row in targets])
                results["sliding"][name] = float(subject.losses(windows)[:, -stride:].double().mean())
        for way in ("non_overlapping", "sliding"):
            losses = results[way]
            results[f"{way}_gap"] = {f: losses[f] - losses["1"] for f in losses if f != "1" in losses}
        return results


def require_length(subject: Subject, length: int) -> None:
    """Refuse a length that is too long for the position scheme or the text.

    Raises:
        NotDefined: It is too long; the message has the reason.
    """
    longest = subject.model.position.longest
    if longest is not None and length > longest:
        raise NotDefined(f"the position scheme has a table of {longest} positions, but {length} are needed")
    subject.require_text(length)


def by_position(losses_NT: Tensor, counted_NT: Tensor) -> dict[str, float]:
    """Mean loss by the number of tokens that the model has read: "1", "2", "3-4", "5-8" ..., nats per token.

    Only over the targets that count; positions without one are left out.
    """
    means, start, end, longest = {}, 1, 1, losses_NT.shape[1]
    while start <= longest:
        end = min(end, longest)
        here = slice(start - 1, end)
        losses = losses_NT[:, here].double()[counted_NT[:, here]]
        if len(losses):
            means[str(start) if start == end else f"{start}-{end}"] = float(losses.mean())
        start, end = end + 1, 2 * end
    return means


def _sliding_targets(subject: Subject, longest: int) -> np.ndarray:
    """Indices of the targets, (windows, T/2), spread over the text, each with a longest window before it.

    There are none if the text is too short.
    """
    stride, first = max(1, subject.context // 2), longest * subject.context
    if subject.data.period > 1 or len(subject.val) - first < stride:
        return np.zeros((0, stride), dtype=np.int64)
    wanted = min(SLIDING_TARGETS, subject.eval_tokens)
    starts, _ = eval_places(len(subject.val) - first + 1, stride, wanted)
    return first + starts[:, None] + np.arange(stride)
