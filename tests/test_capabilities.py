"""Evaluations that count right answers, of models whose abilities are known by construction."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.config.evaluations import evaluation_of
from nexus_ablate.config.options import option_files
from nexus_ablate.data import RecallCorpus, prepare
from nexus_ablate.errors import ConfigError
from nexus_ablate.measure.evaluation import EVALUATION, NotDefined, Subject
from nexus_ablate.measure.evaluation.minimal_pairs import read_pairs
from nexus_ablate.measure.evaluation.ngram import NGram
from nexus_ablate.measure.evaluation.recall import best_guess
from nexus_ablate.measure.repeats import repeat_figures, repeated_segments
from nexus_ablate.runs import read_run
from nexus_ablate.training.session import train

LENGTH = ["data.length=64", "model.context=64", "data.sequences=512"]
DATA = {
    "recall": ["data=recall", "data.symbols=64", "data.pairs=8", *LENGTH],
    "induction": ["data=induction", "data.symbols=64", "data.least=4", "data.most=32", *LENGTH],
    "copy": ["data=copy", "data.symbols=64", "data.least=4", "data.most=32", *LENGTH],
}


class Known(nn.Module):
    """A model that does what its name says, without training.

    `lookup` predicts the token after the last occurrence of the current one among the last `window` tokens, `copier`
    the token after the separator that the string has there, `guess` a random one.
    """

    def __init__(self, way, vocab_size, window=10**6, longest=None):
        super().__init__()
        self.way, self.window = way, window
        self.geometry = SimpleNamespace(vocab_size=vocab_size)
        self.position = SimpleNamespace(longest=longest)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, tokens_BT):
        B, T = tokens_BT.shape
        generator = torch.Generator().manual_seed(int(tokens_BT.sum()))
        logits = torch.rand(B, T, self.geometry.vocab_size, generator=generator)
        for row, line in enumerate(tokens_BT.tolist()):
            for place in range(T):
                earlier = [i for i in range(max(0, place - self.window + 1), place) if line[i] == line[place]]
                if self.way == "lookup" and earlier:
                    logits[row, place, line[earlier[-1] + 1]] = 2.0
                if self.way == "copier" and 0 in line[: place + 1] and place - line.index(0) < T:
                    logits[row, place, line[place - line.index(0)]] = 2.0
        return logits


@pytest.fixture(scope="module")
def data_of(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    made = {}

    def make(name):
        if name not in made:
            overrides = DATA.get(name, ["data=files", f"data.files=[{cache / 'text.txt'}]", "model.context=64"])
            if name not in DATA:
                cache.joinpath("text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 400)
            made[name] = prepare(compose(overrides).data, cache, context=64)
        return made[name]

    return make


def subject(data, way, **keys):
    return Subject(Known(way, data.vocab_size, **keys), data, 64, 512)


def evaluation(text):
    return EVALUATION.build(evaluation_of(text))


ABLE = {
    "recall:sequences:8": ("recall", "lookup"),
    "induction:sequences:8": ("induction", "lookup"),
    "copy:sequences:8:lengths:4+16": ("copy", "copier"),
}


@pytest.mark.parametrize(("text", "able"), ABLE.items(), ids=ABLE)
def test_a_model_that_can_is_right_and_one_that_guesses_is_at_chance(data_of, text, able):
    data = data_of(able[0])
    result, guess = evaluation(text)(subject(data, able[1])), evaluation(text)(subject(data, "guess"))
    assert result["accuracy"] == 1 and result["margin"] > 0.9
    assert 0 < result["chance"] < 0.5
    noise = 4 * np.sqrt(1 / 64 / guess["items"])
    assert guess["accuracy"] < 1 / 64 + noise and guess["margin"] < 0
    assert result["ngram_accuracy"] == guess["ngram_accuracy"] < result["chance"]
    assert evaluation(text)(subject(data, able[1])) == result


def test_recall_of_a_window_falls_once_the_distance_exceeds_it(data_of):
    seen = evaluation("recall:sequences:32")(subject(data_of("recall"), "lookup", window=32))["distance"]
    assert all(seen[distance]["accuracy"] == 1 for distance in ("4-7", "8-15", "16-31"))
    assert seen["32-63"]["accuracy"] < 0.2
    assert sum(result["items"] for result in seen.values()) == 32 * 8
    assert all(1 / 8 < result["chance"] < 0.6 for result in seen.values())


def test_other_numbers_of_pairs_fit_or_say_why_not(data_of):
    result = evaluation("recall:sequences:8:pairs:4+8+32")(subject(data_of("recall"), "lookup"))
    assert 1 / 4 < result["pairs"]["8"]["chance"] < result["pairs"]["4"]["chance"] < 0.7
    assert "4 * 32 > 64" in result["not_defined"]["32"]


def test_a_string_beyond_the_position_table_is_not_defined_and_one_beyond_the_trained_length_stands_apart(data_of):
    result = evaluation("copy:sequences:4:lengths:8+40+64")(subject(data_of("copy"), "copier", longest=100))
    assert result["length"].keys() == {"8", "40"} and "100 positions" in result["not_defined"]["64"]
    assert result["items"] == 4 * 8 and result["length"]["40"]["whole"] == 1


@pytest.mark.parametrize(
    "text", ["recall:sequences:8", "induction:sequences:8:distances:8", "copy:sequences:8:lengths:8"]
)
def test_a_model_of_text_is_asked_with_its_frequent_tokens(data_of, text):
    data = data_of("text")
    asked = subject(data, "lookup")
    result = evaluation(text)(asked)
    assert result["accuracy"] > (0.9 if "induction" in text else 0.5)
    assert result["chance"] < 0.6


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_chance_in_recall_is_reached_by_excluding_the_pairs_that_were_asked_for(power):
    """Every place is asked once, so the last of four answers is known; counted over 20,000 sequences."""
    task = RecallCorpus(symbols=32, pairs=4, length=16, power=power, filler="blank", sequences=64, score="answers")
    source = task.sources(task.draw("test", 20_000))
    orders, best = source[:, 8:16:2], []
    for place in range(4):
        counts = {}
        for order in orders.tolist():
            following = counts.setdefault(frozenset(order[:place]), [0] * 4)
            following[order[place]] += 1
        best.append(sum(map(max, counts.values())) / len(orders))
    chance = best_guess(task, source)[:, 8:16:2].mean(0)
    np.testing.assert_allclose(chance, best, atol=0.02)
    assert chance[-1] == pytest.approx(1)


def test_a_model_of_one_task_is_not_asked_about_another(data_of):
    with pytest.raises(NotDefined, match="trained on data=induction, not on data=recall or text"):
        evaluation("recall")(subject(data_of("induction"), "lookup"))
    with pytest.raises(NotDefined, match="doesn't read text"):
        evaluation("minimal_pairs")(subject(data_of("copy"), "lookup"))


def test_an_ngram_model_knows_text_and_its_probabilities_sum_to_1_and_are_held_for_some_tokens_at_a_time(
    data_of, monkeypatch
):
    monkeypatch.setattr("nexus_ablate.measure.evaluation.ngram._ROWS", 16)
    data = data_of("text")
    windows = data.val["val"][:66][None].astype(np.int64)
    chosen = np.arange(65)[None] > 0
    parts = [*NGram(data.train, data.vocab_size).log_probabilities(windows, chosen)]
    assert [log_p.shape for log_p, _ in parts] == [(16, data.vocab_size)] * 4
    log_p, right = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    np.testing.assert_allclose(np.exp(log_p).sum(1), 1)
    assert right.tolist() == windows[0, 2:].tolist() and (log_p.argmax(1) == right).mean() > 0.8


def test_minimal_pairs_prefer_the_more_probable_sentence(data_of, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        '{"good": "the quick brown fox", "bad": "the quick brown xof"}\n\n'
        '{"sentence_good": "over the lazy dog.", "sentence_bad": "over the lazy gdo.", "UID": "x"}\n'
    )
    result = evaluation(f"minimal_pairs:file:{path}")(subject(data_of("text"), "guess"))
    assert result["items"] == 2 and result["chance"] == 0.5 and result["left_out"] == 0
    assert result["ngram_accuracy"] == 1 and result["ngram_margin"] > 1
    assert set(result["tokens_read"]) == {"8-15", "16-31"}


def test_minimal_pairs_longer_than_the_position_table_are_counted(data_of):
    result = evaluation("minimal_pairs")(subject(data_of("text"), "guess", longest=22))
    assert 0 < result["left_out"] < 36 and result["items"] + result["left_out"] == 36
    with pytest.raises(NotDefined, match="longer than the 3 positions"):
        evaluation("minimal_pairs")(subject(data_of("text"), "guess", longest=3))


BAD_PAIRS = [
    ('{"good": "a", "bad": "a"}', "two different sentences"),
    ('{"good": "a"}', "two different sentences"),
    ("a,b", "two different sentences"),
    ("", "no pair"),
]


@pytest.mark.parametrize(("text", "problem"), BAD_PAIRS)
def test_a_file_without_pairs_is_refused(tmp_path, text, problem):
    path = tmp_path / "pairs.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_pairs(path)


def test_repeated_tokens_are_measured_at_probes_and_leave_an_onset(data_of):
    data = data_of("text")
    tokens = repeated_segments(data.train, 64, data.corpus)
    assert tokens is not None and tokens.shape == (16, 32)
    assert (tokens[:, :16] == tokens[:, 16:]).all() and set(tokens.ravel()) <= set(data.train.tolist())
    able = repeat_figures(Known("lookup", data.vocab_size), torch.from_numpy(tokens))
    assert able["repeats/accuracy"] == 1 and able["repeats/gain"] > 0.5
    assert repeat_figures(Known("guess", data.vocab_size), torch.from_numpy(tokens))["repeats/accuracy"] < 0.1
    assert repeated_segments(data.train, 6, data.corpus) is None
    short = replace(data_of("induction").corpus, most=6)
    assert repeated_segments(data.train, 64, short).shape == (16, 12), (
        "a model isn't asked for longer ones than its own"
    )


SMALL = ["model.d_model=16", "model.n_layers=1", "model.n_heads=2", "train.steps=4", "train.eval_tokens=512"]


def test_a_run_has_the_figures_and_evaluate_adds_them_later(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = [*DATA["recall"], *SMALL, "tracker=files", "train.device=cpu"]
    path = train(compose(run), quiet=True).path
    summary = read_run(path).summary
    assert summary["repeats/accuracy"] < 0.5 and "repeats/accuracy" not in summary["onsets"]
    assert main(["evaluate", str(path), "--evals", "recall,copy"]) == 0
    shown = capsys.readouterr().out
    assert "accuracy" in shown and "not defined: the model was trained on data=recall" in shown
    assert read_run(path).summary["recall"]["items"] == 128 * 8
    assert set(option_files("evaluation")) >= {"recall", "copy", "induction", "minimal_pairs"}


def test_a_tokenizer_without_a_space_has_no_minimal_pairs_and_loses_no_other_evaluation(tiny_run, tmp_path):
    (tmp_path / "dna.txt").write_text("acgt" * 600, encoding="utf-8")
    wanted = ["data.tokenizer=char", "evals=[quantization,minimal_pairs]"]
    out = train(compose(tiny_run(f"data.files=[{tmp_path / 'dna.txt'}]", *wanted)), quiet=True)
    summary = read_run(out.path).summary
    assert "not_defined" in summary["minimal_pairs"] and "loss" in summary["quantization"]
