"""Generated tasks with known answers: recall, induction and copying."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.data import Batches, CopyCorpus, InductionCorpus, RecallCorpus, fingerprint_of, prepare
from nexus_ablate.data.tasks import BLANK
from nexus_ablate.model import build_model
from nexus_ablate.runs import read_run
from nexus_ablate.training.session import train
from nexus_ablate.training.step import Step

COMMON = {"symbols": 32, "length": 32, "sequences": 64, "score": "answers"}
RECALL = RecallCorpus(pairs=4, power=0.01, filler="blank", **COMMON)
NOISY = replace(RECALL, filler="random")
INDUCTION = InductionCorpus(least=4, most=12, **COMMON)
COPY = CopyCorpus(least=2, most=12, **COMMON)
TASKS = {"recall": RECALL, "recall with random filler": NOISY, "induction": INDUCTION, "copy": COPY}
SMALL = ["model.d_model=16", "model.n_layers=1", "model.n_heads=2", "model.context=32", "data.length=32"]
RUN = [*SMALL, "data.symbols=32", "train.steps=3", "train.eval_tokens=512", "tracker=files", "train.device=cpu"]
KEYS = {"recall": ["data.pairs=4"], "induction": ["data.most=12"], "copy": ["data.most=12"]}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_reader_of_the_sequence_knows_every_answer_and_nothing_else_is_scored(task):
    windows = task.draw("test", 200)
    answers = task.answers(windows)
    assert windows.shape == (200, 33)
    assert ((windows >= 0) & (windows < 32)).all()
    assert answers.any(1).all()
    for row, scored in zip(windows.tolist(), answers, strict=True):
        for place in np.flatnonzero(scored):
            before = row[: place + 1]
            if task is COPY:
                expected = row[place - row.index(BLANK)]
            else:  # the token after the last occurrence of the one before
                last = max(i for i, token in enumerate(before[:-1]) if token == before[-1])
                expected = before[last + 1]
            assert row[place + 1] == expected


def zoology(vocab_size, num_examples, input_seq_len, power_a, num_kv_pairs, random):
    """Inputs of the authors' generator, without filler: HazyResearch/zoology, zoology/data/multiquery_ar.py."""
    context_size = num_kv_pairs * 2
    key_choices, value_choices = np.arange(1, vocab_size // 2), np.arange(vocab_size // 2, vocab_size)
    space = (input_seq_len - context_size) // 2
    p = power_a * np.arange(1, space + 1) ** (power_a - 1)
    p = p / p.sum()
    keys, values, gaps = (np.empty((num_examples, num_kv_pairs), dtype=np.int64) for _ in range(3))
    for i in range(num_examples):
        keys[i] = random.choice(key_choices, replace=False, size=num_kv_pairs)
        values[i] = random.choice(value_choices, replace=False, size=num_kv_pairs)
        gaps[i] = random.choice(np.arange(space), replace=False, p=p, size=num_kv_pairs)
    pairs = np.stack((keys, values), 2).reshape(num_examples, -1)
    queries = np.zeros((num_examples, input_seq_len - context_size + 1), dtype=np.int64)
    np.put_along_axis(queries, gaps * 2, values=keys, axis=1)
    return np.concatenate((pairs, queries), 1)[:, :-1]


def test_a_long_recall_with_a_large_power_has_far_queries():
    """Gaps are drawn with weights whose sum does not fit into 64 bits unless they are scaled."""
    corpus = replace(RECALL, power=4.0, length=1024)
    x = corpus.draw("test", 200)
    _, places = corpus.answers(x).nonzero()
    assert places.mean() > 0.7 * 1024


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_recall_is_distributed_as_in_zoology(power):
    """How often each symbol comes in the pairs, and where each pair is asked for; values are 16 to 31."""
    n = 4000
    theirs = zoology(32, n, 32, power, 4, np.random.RandomState(0))
    x = replace(RECALL, power=power).draw("test", n)
    answers = RECALL.answers(x)
    assert (answers.sum(1) == 4).all() and (x[:, 1:][answers] >= 16).all()
    ours = np.where(np.roll(answers, 1, 1), BLANK, x[:, :-1])  # without the values after queries
    for place in range(8):
        counts = [np.bincount(rows[:, place], minlength=32) for rows in (ours, theirs)]
        assert np.abs(counts[0] - counts[1]).max() < 6 * np.sqrt(2 * n / 15)
    for key in range(0, 8, 2):
        asked = [(rows[:, 8:] == rows[:, key, None]).argmax(1) for rows in (ours, theirs)]
        shares = [np.bincount(places, minlength=24) / n for places in asked]
        np.testing.assert_allclose(*shares, atol=5 * np.sqrt(0.5 / n))


def test_uses_draw_other_sequences():
    assert not np.array_equal(RECALL.draw("val", 3), RECALL.draw("train", 3))


@pytest.mark.parametrize("name", KEYS)
def test_a_batch_is_whole_sequences_and_a_function_of_seed_and_step(name, tmp_path):
    option = compose([f"data={name}", *SMALL, "data.symbols=32", *KEYS[name]]).data
    data = prepare(option, tmp_path, context=32)
    batch = Batches(data.train, 3, 8, 32, data.period).batch(5)
    again = Batches(data.train, 3, 8, 32, data.period).batch(5)
    assert np.array_equal(batch, again)
    whole = {tuple(row) for row in data.corpus.draw("train", data.corpus.sequences).tolist()}
    assert all(tuple(row) in whole for row in batch.tolist())
    assert data.vocab_size == 32
    assert data.answers is not None


@pytest.mark.parametrize("name", KEYS)
def test_the_loss_counts_the_answers_alone_and_score_all_every_target(name, tmp_path):
    losses = {}
    for score in ("answers", "all"):
        config = compose([f"data={name}", *RUN, *KEYS[name], f"data.score={score}"])
        data = prepare(config.data, tmp_path, context=32)
        rows = Batches(data.train, 0, 4, 32, data.period).batch(0)
        model = build_model(config, data.vocab_size)
        step = Step(config, model, 3, lambda number, rows=rows: rows, answers=data.answers)
        losses[score] = float(step.loss(rows)[0].detach())
        logits = model(step._on_device(rows[:, :-1])).log_softmax(-1).detach().numpy()
        nats = -np.take_along_axis(logits, rows[:, 1:, None], 2)[..., 0]
        counted = data.corpus.answers(rows) if score == "answers" else np.ones_like(nats, dtype=bool)
        assert losses[score] == pytest.approx(nats[counted].mean(), rel=1e-5)
        by_window = [row[chosen].mean() for row, chosen in zip(nats, counted, strict=True)]
        np.testing.assert_allclose(step.window_losses(rows).numpy(), by_window, rtol=1e-5)
    assert losses["answers"] != losses["all"]


@pytest.mark.parametrize("name", KEYS)
def test_runs_of_another_loss_are_other_runs(name):
    plain, every = (compose([f"data={name}", *RUN, *KEYS[name], f"data.score={score}"]) for score in ("answers", "all"))
    assert fingerprint_of(plain.data, 32) != fingerprint_of(every.data, 32)


def test_a_run_reports_the_unigram_loss_of_the_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = train(compose(["data=recall", *RUN, *KEYS["recall"]]), quiet=True)
    summary = read_run(outcome.path).summary
    assert summary["unigram_bpb"] * np.log(2) * 1.0 == pytest.approx(
        np.log(16) / 1.0, rel=0.02
    )  # 16 values, 1 byte each
    assert summary["val_bpb"] == pytest.approx(summary["val_loss"] / np.log(2), rel=1e-6)


REFUSED = [
    (["data=recall", "model.context=64"], "data.length=64"),
    (["data=recall", "data.pairs=40"], "data.pairs=32"),
    (["data=recall", "data.symbols=16"], "data.symbols=18"),
    (["data=recall", "train.loss=chunked"], "train.loss=auto"),
    (["data=induction", "data.most=65", "data.symbols=80"], "data.most=64"),
    (["data=induction", "data.least=20", "data.most=10"], "data.least=10"),
    (["data=copy", "data.most=65"], "data.most=64"),
    (["data=copy", "evals=[recall]"], "evals=[copy]"),
    (["data=recall", "evals=[minimal_pairs]"], "evals=[recall]"),
    (["evals=[minimal_pairs:file:nowhere.jsonl]"], "minimal_pairs"),
]


@pytest.mark.parametrize(
    ("overrides", "fix"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_cannot_be_is_refused_in_three_lines_before_a_folder_is_made(
    overrides, fix, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main([*overrides, "train.steps=1", "tracker=files"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 3 and fix in error.splitlines()[2]
    assert not any(tmp_path.iterdir())


def test_every_loss_of_answers_is_the_mean_over_all_answers_however_many_a_sequence_has(tmp_path, monkeypatch):
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path / "cache"))
    overrides = ["data=copy", "data.least=2", "data.most=16", "data.sequences=200", f"runs_dir={tmp_path}", *RUN]
    out = train(compose([*overrides, "evals=[extrapolation,quantization]"]), quiet=True)
    summary, lines = out.summary, (out.path / "evaluation.jsonl").read_text().splitlines()
    windows = [json.loads(line) for line in lines]
    assert summary["extrapolation"]["non_overlapping"]["1"] == pytest.approx(summary["val_loss"], rel=1e-6)
    assert summary["quantization"]["loss"] == pytest.approx(summary["val_loss"], rel=1e-6)
    counts = [row["tokens"] for row in windows]
    assert len(set(counts)) > 1 and max(counts) <= 16
    assert np.average([row["loss"] for row in windows], weights=counts) == pytest.approx(summary["val_loss"], rel=1e-9)
