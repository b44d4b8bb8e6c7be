"""The subject of an evaluation: a trained model and its text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nexus_ablate.config.options import Registry
from nexus_ablate.data import Batches, TokenizedData, eval_windows
from nexus_ablate.measure.evaluation.ngram import NGram
from nexus_ablate.measure.probe import evaluation_mode
from nexus_ablate.model import GPT

_BATCH_TOKENS = 8192
"""Most tokens per forward pass, unless a single sequence is longer."""


class NotDefined(Exception):
    """The evaluation isn't defined for this architecture or data. The message has the reason."""


class Evaluation:
    """Abstract: an evaluation of a finished run. Its keys are those of `conf/evaluation/<name>.yaml`."""

    def __call__(self, subject: Subject) -> dict[str, Any]:
        """Plain numbers by name, which may be nested.

        Raises:
            NotDefined: The evaluation isn't defined for this architecture or data.
        """
        raise NotImplementedError


EVALUATION: Registry[Evaluation] = Registry("evaluation")


def n_batches(windows: np.ndarray) -> int:
    """In how many forward passes windows are read."""
    return min(len(windows), -(-windows.size // _BATCH_TOKENS))


@dataclass(frozen=True)
class Subject:
    """The input of an evaluation.

    Attributes:
        model: The model with its trained weights.
        data: What the run was trained on.
        context: Tokens per sequence in training.
        eval_tokens: Number of validation tokens that the run used.
        precision: The context manager for forward passes, as in the run's own validation.
    """

    model: GPT
    data: TokenizedData
    context: int
    eval_tokens: int
    precision: Callable[[], AbstractContextManager] = contextlib.nullcontext

    @property
    def val(self) -> np.ndarray:
        """(N,) validation tokens."""
        return self.data.val["val"]

    @cached_property
    def ngram(self) -> NGram:
        """The n-gram model of the training tokens, which the model is compared with."""
        return NGram(self.data.train, self.model.geometry.vocab_size)

    def loss(self, windows: np.ndarray) -> float:
        """Mean cross-entropy in nats of the targets of (N, T + 1) windows that the run's loss counts."""
        return self.mean(self.losses(windows), windows)

    def mean(self, losses_NT: Tensor, windows: np.ndarray) -> float:
        """The mean of the `losses` of windows over the targets that the run's loss counts."""
        return float(losses_NT.double()[self.counted(windows)].mean())

    def counted(self, windows: np.ndarray) -> Tensor:
        """Which targets of (N, T + 1) windows the run's loss counts: (N, T) bool, on the CPU."""
        if self.data.answers is None:
            return torch.ones(len(windows), windows.shape[1] - 1, dtype=torch.bool)
        return torch.from_numpy(self.data.answers(windows))

    def losses(self, windows: np.ndarray) -> Tensor:
        """Cross-entropy in nats of each target of (N, T + 1) windows: (N, T), float32, on the CPU."""
        batches = []
        with evaluation_mode(self.model):
            for rows in np.array_split(windows, n_batches(windows)):
                tokens = self.on_device(rows)
                with self.precision():
                    logits_BTV = self.model(tokens[:, :-1])
                nats = F.cross_entropy(logits_BTV.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
                batches.append(nats.view(tokens.shape[0], -1).cpu())
        return torch.cat(batches)

    def on_device(self, tokens: np.ndarray) -> Tensor:
        """Tokens as a tensor on the model's device."""
        return torch.from_numpy(np.ascontiguousarray(tokens)).to(next(self.model.parameters()).device)

    def windows(self, n_tokens: int) -> np.ndarray:
        """Windows of the training context over the whole validation text, at most as many as the run validated on."""
        return eval_windows(self.val, self.context, min(n_tokens, self.eval_tokens), self.data.period)

    def calibration(self, sequences: int) -> np.ndarray:
        """(sequences, T) training tokens, the same at every call."""
        return Batches(self.data.train, 0, sequences, self.context, self.data.period).batch(0)[:, :-1]

    def require_attention(self) -> None:
        """Refuse a model with a mixer that has no attention maps.

        Raises:
            NotDefined: A layer has such a mixer.
        """
        for layer, block in enumerate(self.model.blocks):
            if getattr(block.attn, "core", None) is None:
                raise NotDefined(f"the mixer of layer {layer} has no attention maps, no keys and no values")

    def require_free_text(self) -> None:
        """Refuse data whose sequences have a fixed length.

        Raises:
            NotDefined: The data consists of such sequences.
        """
        if self.data.period > 1:
            length = self.data.period - 1
            raise NotDefined(f"this data consists of sequences of {length} tokens; there is no longer text")

    def require_text(self, length: int) -> None:
        """Refuse a validation text without a window of so many inputs.

        Raises:
            NotDefined: The text is shorter.
        """
        if len(self.val) < length + 1:
            raise NotDefined(f"the validation text has {len(self.val)} tokens, but {length + 1} are needed")
