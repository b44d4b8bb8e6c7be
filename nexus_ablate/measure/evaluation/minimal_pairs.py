"""Minimal pairs: whether the better of two sentences has the larger probability (BLiMP, arXiv:1912.00582)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nexus_ablate.config.evaluations import SHIPPED
from nexus_ablate.config.options import conf_dir
from nexus_ablate.errors import ConfigError
from nexus_ablate.measure.evaluation.answers import Scores
from nexus_ablate.measure.evaluation.ngram import NGram
from nexus_ablate.measure.evaluation.subject import EVALUATION, Evaluation, NotDefined, Subject

_NAMES = (("good", "bad"), ("sentence_good", "sentence_bad"))
_SENTENCES = 128  # at a time
_FORM = '{"good": "The cats sleep.", "bad": "The cats sleeps."} on every line'


@EVALUATION.register("minimal_pairs")
class MinimalPairs(Evaluation):
    """Accuracy and margin over pairs of a good and a bad sentence, from a JSONL file.

    The margin is the log-probability of the whole good sentence minus that of the bad one. Each is read after the token
    between two documents. `tokens_read` has the figures by the number of tokens that the two share at their start.
    Pairs that are longer than the position scheme's table are left out and counted. Chance is one half.

    Raises:
        ConfigError: The file doesn't hold such pairs.
    """

    def __init__(self, *, file: str) -> None:
        self.pairs = read_pairs(
            conf_dir() / "evaluation/minimal_pairs.jsonl" if file == SHIPPED else Path(file).expanduser()
        )

    def __call__(self, subject: Subject) -> dict[str, Any]:
        """
        Raises:
            NotDefined: The model doesn't read text, or all pairs are too long.
        """
        if subject.data.period > 1:
            raise NotDefined(f"the model was trained on data={subject.data.name}; it doesn't read text")
        tokenizer = subject.data.tokenizer
        try:
            before = tokenizer.separator[-1:] if len(tokenizer.separator) else tokenizer.encode(" ")
            pairs = [[np.concatenate((before, tokenizer.encode(text))) for text in pair] for pair in self.pairs]
        except ConfigError as error:
            raise NotDefined(f"{error.problem}: {error.got}") from error
        table = subject.model.position.longest
        fitting = [pair for pair in pairs if table is None or max(map(len, pair)) <= table + 1]
        if not fitting:
            raise NotDefined(f"every pair is longer than the {table} positions of the position scheme")
        goods, bads = zip(*fitting, strict=True)
        baseline = _ngram_log_probabilities(subject.ngram, goods) - _ngram_log_probabilities(subject.ngram, bads)
        model, shared = [], []
        for good, bad in fitting:
            model.append(_log_probability(subject, good) - _log_probability(subject, bad))
            common = min(len(good), len(bad))
            differ = np.flatnonzero(good[:common] != bad[:common])
            shared.append(differ[0] if len(differ) else common)
        scores = Scores(np.array(model), baseline, np.full(len(model), 0.5))
        by = scores.by(np.array(shared))
        return scores.figures() | {"left_out": len(pairs) - len(fitting), "tokens_read": by}


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """The (good, bad) sentences of a JSONL file; BLiMP's own names of the two are understood as well.

    Raises:
        ConfigError: The file can't be read, or a line holds no such pair.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "minimal_pairs cannot read its file", f"{path}: {error}", f"a text file with {_FORM}"
        ) from error
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        pair = _pair(values) if isinstance(values, dict) else None
        if pair is None:
            raise ConfigError(
                "minimal_pairs needs two different sentences per line", f"{path}:{number}: {line[:80]}", _FORM
            )
        pairs.append(pair)
    if not pairs:
        raise ConfigError("minimal_pairs has no pair", f"{path} is empty", _FORM)
    return pairs


def _pair(values: dict[str, Any]) -> tuple[str, str] | None:
    for names in _NAMES:
        good, bad = (values.get(name) for name in names)
        if isinstance(good, str) and isinstance(bad, str) and good and bad and good != bad:
            return good, bad
    return None


def _log_probability(subject: Subject, tokens: np.ndarray) -> float:
    """Of all tokens after the first, in nats."""
    return -float(subject.losses(tokens[None].astype(np.int64)).double().sum())


def _ngram_log_probabilities(ngram: NGram, sentences: Sequence[np.ndarray]) -> np.ndarray:
    """The same of an n-gram model for each sentence, whose first token comes twice."""
    sums = []
    for start in range(0, len(sentences), _SENTENCES):
        part = sentences[start : start + _SENTENCES]
        windows = np.zeros((len(part), 1 + max(map(len, part))), dtype=np.int64)
        chosen = np.zeros((len(part), windows.shape[1] - 1), dtype=bool)
        for row, tokens in enumerate(part):
            windows[row, 0] = tokens[0]
            windows[row, 1 : 1 + len(tokens)] = tokens
            chosen[row, 1 : len(tokens)] = True
        rows = ngram.log_probabilities(windows, chosen)
        log_p_A = np.concatenate([log_p_RV[np.arange(len(token_R)), token_R] for log_p_RV, token_R in rows])
        sums.append(np.bincount(np.nonzero(chosen)[0], log_p_A, minlength=len(part)))
    return np.concatenate(sums)
