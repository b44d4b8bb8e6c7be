"""The regime is stated before anything is spent, and a knob that can't matter is named."""

from __future__ import annotations

import json
import math

import pytest
from written_runs import Writer

from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.launch import cost
from nexus_ablate.measure.counts import parameters
from nexus_ablate.measure.regime import has_learned, regime_of
from nexus_ablate.model import countable_model

SIZE = ("model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.context=8")
SMALL = (*SIZE, "train.batch_size=4", "optim.lr=3e-3")


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A text of 3,600 training tokens, tokenized."""
    from nexus_ablate.data import prepare

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "book.txt").write_text("abcdefghi\n" * 400)
    data = ("data=files", "data.files=[book.txt]")
    prepare(compose([*SMALL, *data]).data, context=8)
    return data


def explained(capsys, *overrides):
    assert main(["explain", *SMALL, *overrides, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    return facts["regime"], facts["parameters"]["without_embeddings"]


def test_explain_states_the_regime(text, capsys):
    regime, params = explained(capsys, *text, "train.steps=1000", "optim.lr=0.01", "weight_decay=0.1")
    assert regime["tokens_per_parameter"] == pytest.approx(1000 * 32 / params)
    assert regime["epochs"] == pytest.approx(1000 * 32 / 3600) and regime["decay_timescale_steps"] == pytest.approx(
        1000
    )
    assert regime["warnings"] == ["the run reads the text 8.89 times; above 4 it measures memorization too"]
    assert main(["explain", *SMALL, "train.steps=100", "weight_decay=0.1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "weight decay: barely active" in shown
    assert (
        "warning weight decay is barely active (time scale 3,333 steps, run 100); it matters from 667 steps on" in shown
    )


def test_an_early_budget_is_named_with_the_steps_that_end_it():
    config = compose(["model=femto", "train.steps=239"])
    size = parameters(countable_model(config))[1]
    (warning,) = regime_of(config, size, 239, None).warnings()
    assert warning.endswith("is early training, where orders may reverse; try train.steps=250")
    assert regime_of(config, size, 250, None).warnings() == []


def test_a_text_that_is_too_short_for_the_default_budget_is_refused_before_anything_is_made(text, capsys, tmp_path):
    assert main([*SMALL, *text, "tracker=files"]) == 2
    shown = capsys.readouterr().err
    assert "the run would read its text" in shown and "try: train.steps=450, or data=tinystories" in shown
    assert not (tmp_path / "runs").exists()
    assert main(["plan", "mine", *SMALL, *text, "vary.norm=layer"]) == 0
    assert "FAIL the run would read its text" in " ".join(capsys.readouterr().out.split())
    assert main(["study", "mine", *SMALL, *text, "vary.norm=layer", "seeds=0,1"]) == 2
    assert "the run would read its text" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "mine").exists()
    assert main([*SMALL, *text, "tracker=files", "train.steps=460", "train.eval_tokens=64", "probe=off"]) == 0


def test_a_budget_in_tokens_is_refused_as_such_over_the_steps_of_a_preset(text, capsys):
    budget = ("preset=nanogpt_shakespeare", "train.tokens=360000")
    assert main([*budget, *SMALL, *text, "tracker=files"]) == 2
    shown = capsys.readouterr().err
    assert "the run would read its text 100 times" in shown and "got: train.tokens=360000 is" in shown


def test_what_is_not_known_is_not_stated(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path))
    regime, _ = explained(capsys, "data=files", "data.files=[nowhere.txt]", "weight_decay=0", "train.steps=10")
    assert regime["epochs"] is None and regime["decay_timescale_steps"] is None
    assert "epochs unknown" in regime["summary"] and "no weight decay" in regime["summary"]


@pytest.mark.parametrize(("steps", "warned"), [(660, True), (670, False)])
def test_a_fifth_of_the_timescale_is_the_border(steps, warned):
    config = compose([*SMALL, "optim.lr=0.003", "weight_decay=0.1", f"train.steps={steps}"])
    assert (
        any("weight decay is barely active" in line for line in regime_of(config, 1000, steps, None).warnings())
        == warned
    )


def test_the_header_of_a_run_states_the_regime(tmp_path, monkeypatch, capsys, text):
    assert main([*SMALL, *text, "train.steps=2", "train.eval_tokens=64", "tracker=files", "probe=off"]) == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert "tokens per parameter, 0.0178 epochs; weight decay: barely active" in shown
    assert "warning weight decay is barely active (time scale 3,333 steps, run 2)" in shown


def planned(capsys, *words):
    assert main(["plan", "mine", *SMALL, *words, "seeds=0,1"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_plan_states_the_regime_and_warns_where_weight_decay_cannot_matter(text, capsys, monkeypatch):
    monkeypatch.setattr(cost, "measured_speed", lambda config, threads: None)
    shown = planned(capsys, *text, "vary.norm=layer", "train.steps=100")
    assert "tokens per parameter, 0.889 epochs" in shown
    assert "WARN weight decay is barely active (time scale" in shown
    shown = planned(capsys, *text, "vary.norm=layer", "weight_decay=1", "train.steps=100")
    assert "weight decay: active" in shown and "barely active" not in shown


def test_plan_judges_the_budget_of_each_setting_and_says_once_what_is_refused_in_all(text, capsys, monkeypatch):
    monkeypatch.setattr(cost, "measured_speed", lambda config, threads: None)
    settings = ["settings.short=train.tokens=3200", "settings.long=train.tokens=320000"]
    shown = planned(capsys, *text, "vary.norm=layer,t5", "norm_bias=on", *settings)
    long = shown.index("long: train.tokens=320000")
    assert shown.index("regime", long) < shown.index("FAIL the run would read its text 88.9 times", long)
    assert "FAIL" not in shown[:long] and shown.count("refused norm=t5") == 1


def compared(capsys, tmp_path, *arms, **summary):
    writer = Writer(tmp_path)
    for overrides in ((), *arms):
        for seed in range(2):
            writer.run(*overrides, seed=seed, loss=2.0 + seed / 100, summary={"params": 6400, **summary})
    writer.plan(*arms, seeds=[0, 1])
    page = tmp_path / "a.html"
    assert main(["compare", str(tmp_path / "study"), "--html", str(page)]) == 0
    return " ".join(capsys.readouterr().out.split()), page.read_text()


def test_compare_states_the_budget_that_its_words_rest_on(tmp_path, capsys):
    shown, page = compared(capsys, tmp_path, ("norm=layer",), train_tokens=1280)
    line = "16.7 tokens per parameter, 10 passes over 1.28k tokens of text"
    assert line in shown and line in page


def test_a_run_records_the_tokens_of_its_text(text, capsys, tmp_path):
    quiet = ("train.eval_tokens=64", "tracker=files", "probe=off", "runs_dir=runs", "experiment=mine")
    for norm in ("rms", "layer"):
        assert main([*SMALL, *text, "train.steps=180", *quiet, f"norm={norm}"]) == 0
    capsys.readouterr()
    assert main(["compare", "runs/mine"]) == 0
    assert "1.6 passes over 3.6k tokens of text" in " ".join(capsys.readouterr().out.split())


LEARNED = [
    ([2.0, 2.1, 2.2], True, "all far below"),
    ([3.09, 3.08, 3.07], True, "just below 0.9 of 3.437"),
    ([3.10, 3.10, 3.10], False, "just above"),
    ([3.30, 3.64, 3.44, 3.50, 3.41], False, "at a unigram model's loss, as after 60 steps"),
    ([1.5, 1.5, 3.4, 3.4, 3.4], False, "the mean is below, most runs are not"),
    ([2.9, 2.9, 2.9, 2.9, 9.0], False, "most are below, the mean is not"),
    ([2.0, 2.0, 2.0, 2.0, 2.0, math.nan, math.nan, math.inf], True, "three of eight runs are dead"),
    ([math.nan, math.inf], False, "none trained"),
]


@pytest.mark.parametrize(("losses", "learned", "reason"), LEARNED, ids=[row[-1] for row in LEARNED])
def test_runs_have_learned_when_mean_and_half_of_them_end_below_nine_tenths_of_the_unigram_entropy(
    losses, learned, reason
):
    assert has_learned(losses, 3.437) is learned
