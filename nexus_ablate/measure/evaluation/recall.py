"""Multi-query associative recall: the value of a key that was seen before (Arora et al. 2023, arXiv:2312.04927)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nexus_ablate.data import RecallCorpus
from nexus_ablate.measure.evaluation.answers import Scores, score, task_of
from nexus_ablate.measure.evaluation.subject import EVALUATION, Evaluation, NotDefined, Subject

GUESSED = 4096
"""Sequences that the best guess is counted over."""


@EVALUATION.register("recall")
class Recall(Evaluation):
    """Accuracy and margin of the right value, by distance and by number of pairs.

    The figures over all queries are those of fresh sequences of the run's own task; a model of text gets sequences of
    its frequent tokens, with the first of `pairs`. `distance` counts tokens from the key to its query; these sequences
    ask for keys at all places equally often. Chance is the best guess without reading the query: of the pairs not yet
    asked for, the one that is asked for most often at this place.
    """

    def __init__(self, *, sequences: int, pairs: list[int]) -> None:
        self.sequences, self.pairs = sequences, pairs

    def __call__(self, subject: Subject) -> dict[str, Any]:
        """
        Raises:
            NotDefined: The model was trained on another task, or its context is too short.
        """
        keys: dict[str, Any] = {"length": subject.context}
        if subject.data.period == 1:
            keys |= {"pairs": self.pairs[0], "power": 1.0, "filler": "random"}
        task, tokens = task_of(subject, RecallCorpus, **keys)
        if mistake := task.mistake():
            raise NotDefined(f"{mistake.problem}: {mistake.got}")

        def asked(task: RecallCorpus) -> tuple[Scores, np.ndarray]:
            """The scores of some sequences, and the tokens between each answered query and its key."""
            x = task.draw(f"evaluation {task.pairs} {task.power}", self.sequences)
            source = task.sources(x)
            answers = source >= 0
            distance = (np.arange(task.length) - 2 * source)[answers]
            return score(subject, tokens[x], answers, best_guess(task, source)[answers]), distance

        everywhere, distance = asked(replace(task, power=1.0))
        by_pairs, undefined = {}, {}
        for pairs in self.pairs:
            other = replace(task, pairs=pairs)
            if mistake := other.mistake():
                undefined[str(pairs)] = f"{mistake.problem}: {mistake.got}"
            else:
                by_pairs[str(pairs)] = asked(other)[0].figures()
        results: dict[str, Any] = asked(task)[0].figures()
        return results | {"distance": everywhere.by(distance), "pairs": by_pairs, "not_defined": undefined}


def best_guess(task: RecallCorpus, source: np.ndarray) -> np.ndarray:
    """(N, T): the chance of the likeliest pair to be asked for at each place, given the pairs asked for before it.

    Args:
        source: (N, T) of the sequences, see `RecallCorpus.sources`.
    """
    seen = task.sources(task.draw("evaluation chance", GUESSED))
    asked_PT = np.stack([(seen == pair).sum(0) for pair in range(task.pairs)])
    here_or_later_PT = asked_PT[:, ::-1].cumsum(1)[:, ::-1]
    hazard_PT = asked_PT / np.maximum(here_or_later_PT, 1)
    largest, total = np.zeros(source.shape), np.full(source.shape, 1e-9)
    for pair, hazard_T in enumerate(hazard_PT):
        asked_NT = source == pair
        before_NT = asked_NT.cumsum(1) > asked_NT
        weight_NT = np.where(before_NT, 0.0, hazard_T)
        largest, total = np.maximum(largest, weight_NT), total + weight_NT
    return largest / total
