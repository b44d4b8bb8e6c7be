"""Copying: repeat a random string after a separator, up to and beyond the trained length (arXiv:2402.01032)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nexus_ablate.data import BackCopyCorpus, CopyCorpus
from nexus_ablate.measure.evaluation.answers import pooled, score, task_of
from nexus_ablate.measure.evaluation.subject import EVALUATION, Evaluation, NotDefined, Subject

TARGETS = 8192


@EVALUATION.register("copy")
class Copy(Evaluation):
    """Accuracy and margin of the copied tokens, each after the right ones before it, by the string's length.

    A token and its copy are the string's length plus one apart. `whole` is the share of strings without an error. The
    figures over all answers are those of lengths that fit twice into the training context and, of a model of
    data=copy, are at most its longest string. Chance is a guess among the string's tokens. A model of text copies its
    frequent tokens, and the token between two documents is the separator. A model of data=bigram_backcopy is asked for
    the tokens after triggers of its validation sequences, which a trigram model knows too; chance is one symbol of all.
    """

    def __init__(self, *, sequences: int, lengths: list[int]) -> None:
        self.sequences, self.lengths = sequences, lengths

    def __call__(self, subject: Subject) -> dict[str, Any]:
        """
        Raises:
            NotDefined: The model was trained on another task, or on shorter strings than all `lengths`.
        """
        corpus = subject.data.corpus
        if isinstance(corpus, BackCopyCorpus):
            windows = subject.windows(TARGETS)
            chance = 1 / (subject.model.geometry.vocab_size - 1)
            return score(subject, windows, corpus.answers(windows), chance).figures()
        own, tokens = task_of(subject, CopyCorpus, least=1, most=1, length=2)
        longest = subject.context // 2
        if isinstance(corpus, CopyCorpus):
            longest = min(longest, corpus.most)
        table = subject.model.position.longest
        results, undefined, trained = {}, {}, []
        for length in self.lengths:
            task = replace(own, least=length, most=length, length=2 * length)
            if table is not None and task.length > table:
                undefined[str(length)] = f"the position scheme has {table} positions, but {task.length} are needed"
                continue
            x = task.draw(f"evaluation {length}", self.sequences)
            chance = (1 + (length - 1) / (task.symbols - 1)) / length
            scores = score(subject, tokens[x], task.answers(x), chance)
            right = (scores.model > 0).reshape(self.sequences, length)
            results[str(length)] = scores.figures() | {"whole": float(right.all(1).mean())}
            if length <= longest:
                trained.append(scores)
        if not trained:
            raise NotDefined(
                f"none of the lengths is at most {longest}, the longest string that the model was trained for"
            )
        return pooled(trained).figures() | {"length": results, "not_defined": undefined}
