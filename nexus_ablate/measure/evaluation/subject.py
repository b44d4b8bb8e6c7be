"""A trained model together with the text that it is held against."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nexus_ablate.config.options import Registry
from nexus_ablate.data import Batches, eval_windows
from nexus_ablate.measure.probe import evaluation_mode
from nexus_ablate.model import GPT

_BATCH_TOKENS = 8192
"""Tokens in a forward pass, where a sequence is not longer."""


class NotDefined(Exception):
    """The architecture or the data gives the question no meaning; the message says why."""


class Evaluation:
    """Abstract: what a finished run is put through. Its keys are those of `conf/evaluation/<name>.yaml`."""

    def __call__(self, subject: Subject) -> dict[str, Any]:
        """Plain numbers by name, which may be nested.

        Raises:
            NotDefined: The architecture or the data gives the question no meaning.
        """
        raise NotImplementedError


EVALUATION: Registry[Evaluation] = Registry("evaluation")


@dataclass(frozen=True)
class Subject:
    """What an evaluation needs.

    Attributes:
        model: With its trained weights.
        train: (N,) training tokens, for calibration.
        val: (N,) validation tokens.
        context: Tokens of a sequence in training.
        eval_tokens: Validation tokens that the run was validated on.
        period: Where sequences have to begin; see TokenizedData.
        precision: The context of forward passes, as in the run's own validation.
    """

    model: GPT
    train: np.ndarray
    val: np.ndarray
    context: int
    eval_tokens: int
    period: int = 1
    precision: Callable[[], AbstractContextManager] = contextlib.nullcontext

    def losses(self, windows: np.ndarray) -> Tensor:
        """Cross-entropy in nats of each target of (N, T + 1) windows: (N, T), float32, on the CPU."""
        batches = []
        with evaluation_mode(self.model):
            for rows in np.array_split(windows, -(-windows.size // _BATCH_TOKENS)):
                tokens = self.on_device(rows)
                with self.precision():
                    logits_BTV = self.model(tokens[:, :-1])
                nats = F.cross_entropy(logits_BTV.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
                batches.append(nats.view(tokens.shape[0], -1).cpu())
        return torch.cat(batches)

    def on_device(self, tokens: np.ndarray) -> Tensor:
        """Tokens as the model takes them."""
        return torch.from_numpy(np.ascontiguousarray(tokens)).to(next(self.model.parameters()).device)

    def windows(self, n_tokens: int) -> np.ndarray:
        """Windows of the training context over the whole validation text, no more than the run was validated on."""
        return eval_windows(self.val, self.context, min(n_tokens, self.eval_tokens), self.period)

    def calibration(self, sequences: int) -> np.ndarray:
        """(sequences, T) training tokens, the same at every call."""
        return Batches(self.train, 0, sequences, self.context, self.period).batch(0)[:, :-1]

    def require_free_text(self) -> None:
        """Refuse data whose sequences have a fixed length.

        Raises:
            NotDefined: It is made of such sequences.
        """
        if self.period > 1:
            raise NotDefined(f"this data is made of sequences of {self.period - 1} tokens; there is no longer text")
