"""Induction: predict a repeated segment of random tokens (Olsson et al. 2022, arXiv:2209.11895)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nexus_ablate.data import InductionCorpus
from nexus_ablate.measure.evaluation.answers import Scores, pooled, score, task_of
from nexus_ablate.measure.evaluation.subject import EVALUATION, Evaluation, NotDefined, Subject


@EVALUATION.register("induction")
class Induction(Evaluation):
    """Accuracy and margin on the second occurrence of a segment of distinct random tokens, by distance.

    The distance is the segment's length. `loss_first` and `loss_second` are the mean losses of the two occurrences,
    without their first tokens, which can't be known; `gain` is the first minus the second. Chance is one over the
    segment's length: a guess among the tokens seen. The figures over all answers are those of the distances that fit
    twice into the training context and, of a model of data=induction, are among its segments' lengths.
    """

    def __init__(self, *, sequences: int, distances: list[int]) -> None:
        self.sequences, self.distances = sequences, distances

    def __call__(self, subject: Subject) -> dict[str, Any]:
        """
        Raises:
            NotDefined: The model was trained on another task, or no distance is among those it was trained on.
        """
        results, undefined = {}, {}
        trained: list[tuple[Scores, float, float]] = []
        own, tokens = task_of(subject, InductionCorpus, least=2, most=2, length=3)
        for distance in self.distances:
            task = replace(own, least=distance, most=distance, length=2 * distance - 1)
            mistake = task.mistake()
            if mistake or task.length > subject.context:
                got = mistake.got if mistake else f"{2 * distance} > {subject.context + 1}"
                undefined[str(distance)] = f"a segment of {distance} distinct tokens doesn't fit in twice: {got}"
                continue
            x = task.draw(f"evaluation {distance}", self.sequences)
            answers = task.answers(x)
            scores = score(subject, tokens[x], answers, 1 / distance)
            losses = subject.losses(tokens[x]).double()
            first = float(losses[:, : distance - 1].mean())
            second = float(losses[torch.from_numpy(answers)].mean())
            results[str(distance)] = scores.figures() | _losses(first, second)
            if _is_trained(subject, distance):
                trained.append((scores, first, second))
        if not trained:
            reason = "; ".join(undefined.values()) or "the model was trained on segments of other lengths"
            raise NotDefined(reason)
        scores, first, second = zip(*trained, strict=True)
        losses = _losses(sum(first) / len(first), sum(second) / len(second))
        return pooled(scores).figures() | losses | {"distance": results, "not_defined": undefined}


def _is_trained(subject: Subject, distance: int) -> bool:
    corpus = subject.data.corpus
    return not isinstance(corpus, InductionCorpus) or corpus.least <= distance <= corpus.most


def _losses(first: float, second: float) -> dict[str, float]:
    return {"loss_first": first, "loss_second": second, "gain": first - second}
