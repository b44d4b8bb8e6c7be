"""Whether a model in training predicts a repeated segment of random tokens: the onset of induction, at every probe.

Olsson et al. 2022, arXiv:2209.11895. The evaluation `induction` measures the same with more sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from nexus_ablate.data import Corpus, InductionCorpus
from nexus_ablate.measure.probe import evaluation_mode

SEQUENCES, LONGEST, SHORTEST = 16, 16, 4
"""Number of sequences; tokens of a segment at most and at least."""
_COUNTED = 2**20
_RARE = 10_000


def frequent_tokens(train: np.ndarray) -> np.ndarray:
    """The tokens that are at least one in 10,000 of the first million."""
    counts = np.bincount(train[:_COUNTED])
    return np.flatnonzero(counts * _RARE >= counts.sum())


def repeated_segments(train: np.ndarray, context: int, corpus: Corpus) -> np.ndarray | None:
    """(N, 2S) frequent training tokens, S distinct ones twice; None where two segments of 4 tokens don't fit.

    Args:
        train: Training tokens.
        context: Tokens per sequence in training.
        corpus: Where they come from; the segments of data=induction are no longer than its own.
    """
    tokens = frequent_tokens(train)
    longest = corpus.most if isinstance(corpus, InductionCorpus) else LONGEST
    length = min(longest, LONGEST, (context + 1) // 2, len(tokens))
    if length < SHORTEST:
        return None
    task = InductionCorpus(
        symbols=len(tokens), least=length, most=length, length=2 * length - 1, sequences=2, score="answers"
    )
    return tokens[task.draw("probe", SEQUENCES)].astype(np.int64)


def repeat_figures(
    model: nn.Module,
    tokens_NT: Tensor,
    precision: Callable[[], AbstractContextManager] = contextlib.nullcontext,
) -> dict[str, float]:
    """Accuracy on the second occurrence, and the loss of the first minus that of the second, in nats per token.

    Args:
        tokens_NT: `repeated_segments` on the model's device.
        precision: The context manager for forward passes, as in training.
    """
    with evaluation_mode(model), precision():
        logits_NTV = model(tokens_NT[:, :-1]).float()
    targets = tokens_NT[:, 1:]
    length = tokens_NT.shape[1] // 2
    losses = F.cross_entropy(logits_NTV.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    right = logits_NTV[:, length:].argmax(-1) == targets[:, length:]
    gain = losses[:, : length - 1].mean() - losses[:, length:].mean()
    return {"repeats/accuracy": float(right.float().mean()), "repeats/gain": float(gain)}
