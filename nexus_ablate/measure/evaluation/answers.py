"""What evaluations of recall, induction and copying share: their sequences, the right answers, and baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from nexus_ablate.data import TaskCorpus
from nexus_ablate.measure.evaluation.subject import NotDefined, Subject, n_batches
from nexus_ablate.measure.probe import evaluation_mode
from nexus_ablate.measure.repeats import frequent_tokens

Task = TypeVar("Task", bound=TaskCorpus)


@dataclass(frozen=True)
class Scores:
    """How well answers were predicted.

    Attributes:
        model: (A,) log-probability of the right token minus that of the most likely other one, in nats. Above 0 the
            answer is right.
        ngram: (A,) the same of an n-gram model.
        chance: (A,) the chance to be right by guessing.
    """

    model: np.ndarray
    ngram: np.ndarray
    chance: np.ndarray

    def __getitem__(self, chosen: np.ndarray) -> Scores:
        return Scores(self.model[chosen], self.ngram[chosen], self.chance[chosen])

    def figures(self) -> dict[str, float]:
        """Accuracy, mean margin in nats, number of answers, the accuracy of guessing, and the n-gram model's."""
        return {
            "accuracy": float((self.model > 0).mean()),
            "margin": float(self.model.mean()),
            "items": len(self.model),
            "chance": float(self.chance.mean()),
            "ngram_accuracy": float((self.ngram > 0).mean()),
            "ngram_margin": float(self.ngram.mean()),
        }

    def by(self, amount: np.ndarray) -> dict[str, dict[str, float]]:
        """The figures by a whole number of each answer, such as its distance: "1", "2-3", "4-7" ..."""
        results, low = {}, 1
        while low <= amount.max(initial=0):
            inside = (amount >= low) & (amount < 2 * low)
            if inside.any():
                results[f"{low}-{2 * low - 1}" if low > 1 else "1"] = self[inside].figures()
            low *= 2
        return results


def pooled(parts: Sequence[Scores]) -> Scores:
    """All answers together."""
    return Scores(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("model", "ngram", "chance")))


def task_of(subject: Subject, kind: type[Task], **keys: Any) -> tuple[Task, np.ndarray]:
    """A task for a model, and the token of each of its symbols.

    A model of that task gets its own task, with other `keys`. A model of text gets the task over its frequent tokens,
    with the token between two documents as symbol 0.

    Args:
        keys: Those that replace the task's; a model of text needs all of them but `symbols`, `sequences` and `score`.

    Raises:
        NotDefined: The model was trained on another task.
    """
    if isinstance(subject.data.corpus, kind):
        return replace(subject.data.corpus, **keys), np.arange(subject.data.vocab_size)
    if subject.data.period > 1:
        raise NotDefined(f"the model was trained on data={subject.data.name}, not on data={kind.name} or text")
    tokens, separator = frequent_tokens(subject.data.train), subject.data.tokenizer.separator[-1:]
    tokens = np.concatenate((separator, tokens[~np.isin(tokens, separator)])).astype(np.int64)
    return kind(symbols=len(tokens), sequences=2, score="answers", **keys), tokens


def score(subject: Subject, windows: np.ndarray, answers: np.ndarray, chance: float | np.ndarray) -> Scores:
    """The scores of the answers, beside those of the n-gram model.

    Args:
        windows: (N, T + 1) tokens.
        answers: (N, T) bool, the targets that are answers.
        chance: To be right by guessing, of all answers or (A,) of each.
    """
    parts = subject.ngram.log_probabilities(windows, answers)
    baseline = [_margins(torch.from_numpy(log_p_RV), torch.from_numpy(right_R)) for log_p_RV, right_R in parts]
    model = margins(subject, windows, answers)
    return Scores(model, torch.cat(baseline).numpy(), np.broadcast_to(chance, model.shape))


def margins(subject: Subject, windows: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """(A,) margins of the model, see `Scores`."""
    results = []
    n_parts = n_batches(windows)
    parts = zip(np.array_split(windows, n_parts), np.array_split(answers, n_parts), strict=True)
    with evaluation_mode(subject.model):
        for rows, chosen in parts:
            tokens, chosen = subject.on_device(rows), subject.on_device(chosen)
            with subject.precision():
                logits_BTV = subject.model(tokens[:, :-1])
            results.append(_margins(logits_BTV[chosen].float(), tokens[:, 1:][chosen]).cpu())
    return torch.cat(results).double().numpy()


def _margins(scores_AV: Tensor, right_A: Tensor) -> Tensor:
    right = scores_AV.gather(1, right_A[:, None])
    others = scores_AV.scatter(1, right_A[:, None], -torch.inf).amax(1)
    return right[:, 0] - others
