import hashlib

import numpy as np
import pytest

from nexus_ablate.config.compose import compose
from nexus_ablate.data import BackCopyCorpus, Batches, eval_windows, fingerprint_of, prepare
from nexus_ablate.data.backcopy import BEGIN
from nexus_ablate.errors import ConfigError
from nexus_ablate.runs import read_run
from nexus_ablate.training.session import train

KEYS = {"symbols": 8, "triggers": 2, "length": 16, "sequences": 64, "chain": 0}


def corpus(**changes):
    return BackCopyCorpus(**(KEYS | changes))


def option(*overrides):
    small = [f"data.{key}={value}" for key, value in KEYS.items()]
    return compose(["data=bigram_backcopy", *small, "model.context=16", *overrides]).data


def test_after_a_trigger_the_token_before_it_comes_again():
    x = corpus(sequences=200).draw("train", 200)
    trigger = x[:, 1:-1] < 2
    assert 0.1 < trigger.mean() < 0.9
    assert (x[:, 2:][trigger] == x[:, :-2][trigger]).all()
    assert (x[:, 2:][~trigger] != x[:, :-2][~trigger]).any()
    assert (x[:, 0] >= 2).all()  # a copy needs a token before the trigger


def test_the_answers_are_the_copies(tmp_path):
    data = prepare(option("data.sequences=200"), tmp_path, context=16)
    windows = eval_windows(data.val["val"], 16, 160, data.period)
    answers = data.corpus.answers(windows)
    assert 0.1 < answers.mean() < 0.9 and data.answers is None  # the loss counts every target
    rows, places = np.nonzero(answers)
    assert (windows[rows, places + 1] == windows[rows, places - 1]).all()


def test_elsewhere_tokens_follow_the_transition_matrix():
    made = corpus(sequences=20000)
    x, weights = made.draw("train", 20000), made.transitions()
    before, after = x[:, 1:-1].ravel(), x[:, 2:].ravel()
    for token in range(2, 8):
        seen = np.bincount(after[before == token], minlength=8) / (before == token).sum()
        np.testing.assert_allclose(seen, weights[token] / weights[token].sum(), atol=0.015)


def test_tokens_are_numbered_by_their_frequency_under_the_chain_alone():
    weights = corpus(symbols=64, triggers=3).transitions()
    chain, frequency = weights / weights.sum(1, keepdims=True), np.full(64, 1 / 64)
    for _ in range(200):
        frequency = frequency @ chain
    assert (np.diff(frequency) < 1e-5).all()
    assert frequency[:3].sum() > 0.2


PINNED = ([12, 0, 12, 25, 2, 25, 0, 25, 24, 2, 24, 3], "21b9d02c20678adf")


def test_the_default_sequences_are_the_same_on_every_machine_for_good():
    option = compose(["data=bigram_backcopy", "model.context=64"]).data
    keys = {key: value for key, value in option.keys.items() if key != "tokenizer"}
    drawn = BackCopyCorpus(**keys).draw("train", 256)
    assert drawn[0, :12].tolist() == PINNED[0]
    assert hashlib.sha256(drawn.astype("<u2").tobytes()).hexdigest()[:16] == PINNED[1]


def test_training_and_validation_and_other_chains_differ():
    train_set, val_set = corpus().draw("train", 4), corpus().draw("val", 4)
    assert not np.array_equal(train_set, val_set)
    assert not np.array_equal(corpus(chain=1).draw("train", 4), train_set)
    assert not np.array_equal(corpus(chain=1).transitions(), corpus().transitions())


@pytest.mark.parametrize("key", sorted(KEYS))
def test_its_identity_comes_from_its_keys(key):
    changed = {"symbols": 9, "triggers": 3, "length": 17, "sequences": 65, "chain": 1}[key]
    same, other = fingerprint_of(option(), 16), fingerprint_of(option(f"data.{key}={changed}"), 16)
    assert fingerprint_of(option(), 8) == same != other


def test_every_window_of_training_and_validation_begins_with_the_begin_token(tmp_path):
    data = prepare(option(), cache_dir=tmp_path, context=16)
    assert data.period == 17
    begin = data.tokenizer.encode(BEGIN)[0]
    windows = [
        Batches(data.train, 0, 32, 16, data.period).batch(5),
        eval_windows(data.val["val"], 16, 1000, data.period),
        Batches(data.train, 0, 32, 9, data.period).batch(5),  # a shorter context reads the beginnings
    ]
    for rows in windows:
        assert (rows[:, 0] == begin).all()
        assert (rows[:, 1:] != begin).all()
    assert len(windows[1]) == 4  # a sixteenth of 64
    assert data.vocab_size <= 9


def test_a_context_longer_than_the_sequences_and_triggers_alone_are_refused():
    with pytest.raises(ConfigError) as caught:
        fingerprint_of(option(), 17)
    assert caught.value.fix.startswith("data.length=17")
    with pytest.raises(ConfigError, match="must be fewer than"):
        fingerprint_of(option("data.triggers=8"), 16)


def test_a_run_on_it_has_no_longer_text_to_be_evaluated_on(tiny_run):
    small = [f"data.{key}={value}" for key, value in KEYS.items()]
    overrides = [o for o in tiny_run("train.steps=2", "evals=[extrapolation,streaming]") if not o.startswith("data")]
    out = train(compose([*overrides, "data=bigram_backcopy", *small]), quiet=True)
    summary = read_run(out.path).summary
    assert summary["extrapolation"]["non_overlapping"]["1"] == pytest.approx(summary["val_loss"], rel=1e-6)
    assert "sequences of 16 tokens" in summary["extrapolation"]["not_defined"]["2"]
    assert "sequences of 16 tokens" in summary["streaming"]["not_defined"]
