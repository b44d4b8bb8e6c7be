"""A claim says no more than its runs: pairs, measurements, strata, machines and what was changed are counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from written_runs import Writer, unfixed

from nexus_ablate.cli import main
from nexus_ablate.planning.jobs import Runs
from nexus_ablate.planning.study_yaml import write_record
from nexus_ablate.study.definition import read_request, strata_of

QUIET = (0.004, -0.003, 0.001, -0.005, 0.003, 0.002, -0.001, 0.0045, -0.0035, 0.0005)
SINK, ONSET, PEAK = "attn/sink_rate", "onsets/attn/sink_rate/step", "act/resid/max_over_median"


def expects(expected, endpoint="val_loss"):
    return [{"arm": "norm=layer", "endpoint": endpoint, "expected": expected}]


def claimed(writer, capsys, *words, **plan):
    """The comparison of a study with a claim: its claim as printed, and all of it."""
    writer.plan(("norm=layer",), claim="it is so", **plan)
    assert main(["compare", str(writer.root / writer.study), *words, "--json", "-"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert main(["compare", str(writer.root / writer.study), *words]) == 0
    return capsys.readouterr().out, read


def study(root, arm=lambda seed: {}, base=lambda seed: {}, seeds=5, shift=0.1):
    """One arm against the baseline; `arm` and `base` give what is particular to a run."""
    writer = Writer(root, "mine")
    for seed in range(seeds):
        writer.run(seed=seed, **{"loss": 2.0 + QUIET[seed], **base(seed)})
        writer.run("norm=layer", seed=seed, **{"loss": 2.0 + shift + QUIET[-seed], **arm(seed)})
    return writer


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")


def test_runs_that_lack_the_measure_are_not_selected_away(tmp_path, capsys):
    onsets = lambda seed: {"summary": {ONSET: 100 + 10 * (seed % 2)} if seed < 3 else {}}  # noqa: E731
    writer = study(tmp_path, onsets, lambda seed: {"summary": {ONSET: 300 + 10 * (seed % 2)}}, seeds=8)
    plan = {"endpoints": {ONSET: {"delta_min": 10}}, "expects": expects("lower", ONSET), "seeds": list(range(8))}
    printed, _ = claimed(writer, capsys, **plan)
    assert "NOT SHOWN: it is so" in printed and "not measured at 5 seeds" in printed
    assert "TOO FEW SEEDS (5 not measured)" in printed


def test_two_pairs_of_a_secondary_endpoint_do_not_support_a_claim(tmp_path, capsys):
    writer = study(
        tmp_path,
        lambda seed: {"summary": {SINK: 0.1 + QUIET[seed]}},
        lambda seed: {"summary": {SINK: 0.5 + QUIET[-seed]} if seed < 2 else {}},
    )
    endpoints = {"val_loss": {"delta_min": 0.02}, SINK: {"delta_min": 0.02}}
    printed, _ = claimed(writer, capsys, endpoints=endpoints, expects=expects("lower", SINK))
    assert printed.startswith("NOT SHOWN")


def test_two_pairs_that_are_left_where_the_baseline_fails_show_nothing(tmp_path, capsys):
    writer = study(tmp_path, base=lambda seed: {"state": "diverged"} if seed > 1 else {}, seeds=10, shift=-0.1)
    plan = {"seeds": list(range(10)), "expects": expects("lower")}
    printed, _ = claimed(writer, capsys, endpoints={"val_loss": {"delta_min": 0.02}}, **plan)
    assert printed.startswith("NOT SHOWN")


def test_an_exploratory_study_has_an_exploratory_claim(tmp_path, capsys):
    added = [{"when": "2020-01-01", "seeds": [4]}]
    printed, read = claimed(study(tmp_path), capsys, expects=expects("higher"), added=added)
    assert printed.startswith("exploratory: SUPPORTED") and read["claim"]["exploratory"]


@pytest.mark.parametrize("key", ["claim", "expects", "requires", "endpoints"])
def test_a_claim_that_was_changed_after_the_first_run_is_called_amended(tmp_path, capsys, key):
    amendment = {"when": "2020-01-01T00:00:00+00:00", "changes": [f"{key}: 1 -> 2"]}
    printed, _ = claimed(study(tmp_path), capsys, expects=expects("higher"), amendments=[amendment])
    assert printed.startswith("amended: SUPPORTED")


@pytest.mark.parametrize("expected", ["trains", "fails"])
def test_an_arm_that_is_not_comparable_shows_nothing_about_failures(tmp_path, capsys, expected):
    writer = study(tmp_path, lambda seed: {"steps": 40})
    printed, _ = claimed(writer, capsys, expects=expects(expected))
    assert printed.startswith("NOT SHOWN") and "NOT COMPARABLE" in printed


def test_what_a_claim_requires_is_preliminary_below_five_measurements(tmp_path, capsys):
    writer = study(tmp_path, base=lambda seed: {"summary": {SINK: 0.5 + QUIET[seed]} if seed < 2 else {}})
    printed, _ = claimed(writer, capsys, expects=expects("higher"), requires={SINK: ">= 0.2"})
    assert printed.startswith("preliminary: SUPPORTED")


def test_without_a_declared_margin_equivalence_is_not_shown(tmp_path, capsys):
    writer = study(tmp_path, shift=0.0001)
    printed, _ = claimed(writer, capsys, endpoints={"val_loss": {}}, expects=expects("equivalent"))
    assert printed.startswith("NOT SHOWN") and "declares no delta_min for val_loss" in printed


def test_an_expected_failure_gives_a_secondary_endpoint_no_verdict(tmp_path, capsys):
    sinks: dict[str, Any] = {
        "arm": lambda s: {"summary": {SINK: 0.1 + QUIET[s]}},
        "base": lambda s: {"summary": {SINK: 0.5 + QUIET[-s]}},
    }
    endpoints = {"val_loss": {"delta_min": 0.02}, SINK: {"delta_min": 0.02}}
    printed, read = claimed(study(tmp_path, **sinks), capsys, endpoints=endpoints, expects=expects("trains", SINK))
    assert printed.startswith("SUPPORTED")
    assert [row["verdict"] for row in read["secondary"][0]["rows"]] == [None, None]


def test_a_stratum_whose_folder_is_gone_makes_the_claim_preliminary(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.yaml").write_text(
        yaml.safe_dump(
            {
                "question": "is it so?",
                "baseline": ["model.d_model=16", "model.n_heads=2", "model.context=8", "train.steps=400"],
                "arms": ["norm=layer"],
                "strata": {"shallow": "model.n_layers=2", "deep": "model.n_layers=4", "deeper": "model.n_layers=6"},
                "endpoints": {"val_loss": {"delta_min": 0.02}},
                "claim": "it is so",
                "expects": [{"arm": "norm=layer", "val_loss": "higher"}],
            }
        )
    )
    for request in strata_of(read_request(["deep.yaml"]))[:2]:
        write_record(Runs.of(request))
        unfixed(request.directory)
        writer = Writer(request.directory.parent, request.directory.name)
        for seed in range(5):
            writer.run(seed=seed, loss=2.0 + QUIET[seed])
            writer.run("norm=layer", seed=seed, loss=2.1 + QUIET[-seed])
    assert main(["compare", "runs/deep"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("preliminary: SUPPORTED") and "deeper" in printed


@pytest.mark.parametrize("first", ["tokens_per_second", "val_loss"])
def test_speed_is_not_compared_across_machines(tmp_path, capsys, first):
    def on(processor, speed):
        return lambda seed: {"summary": {"processor": processor, "tokens_per_second": speed + 1000 * QUIET[seed]}}

    margins = {"tokens_per_second": {"delta_min": 100}, "val_loss": {"delta_min": 0.02}}
    plan = {"endpoints": {first: margins.pop(first), **margins}, "expects": expects("higher", "tokens_per_second")}
    printed, _ = claimed(study(tmp_path / "unlike", on("fast", 6400), on("slow", 3200)), capsys, **plan)
    assert printed.startswith("NOT SHOWN") and "NOT COMPARABLE" in printed
    assert "FAIL machine: norm=layer: processor fast, not slow, which counts for tokens_per_second" in printed
    assert ("WORSE: norm=layer." in printed) == (first == "val_loss"), "losses compare all the same"
    assert main(["compare", str(tmp_path / "unlike"), "--allow", "machine"]) == 0
    assert capsys.readouterr().out.startswith("SUPPORTED")
    printed, _ = claimed(study(tmp_path / "alike", on("fast", 6400), on("fast", 3200)), capsys, **plan)
    assert printed.startswith("SUPPORTED")


def test_training_where_the_baseline_fails_is_tested_for_all_arms_at_once(tmp_path, capsys):
    writer, arms = Writer(tmp_path, "mine"), ["norm=layer", "norm=dyt", "bias=on", "ffn=gelu"]
    for seed in range(5):
        writer.run(seed=seed, state="diverged")
        for arm in arms:
            writer.run(arm, seed=seed, loss=2.0 + QUIET[seed], state="diverged" if not seed else "finished")
    writer.plan(*((arm,) for arm in arms))
    assert main(["compare", str(tmp_path / "mine")]) == 0
    assert "BETTER" not in capsys.readouterr().out  # p = 0.021 for each, against 0.05 / 4


def test_an_arm_that_trains_more_often_and_ends_worse_says_both(tmp_path, capsys):
    writer = study(tmp_path, base=lambda seed: {"state": "diverged"} if seed > 1 else {}, seeds=10)
    printed, _ = claimed(writer, capsys, seeds=list(range(10)), endpoints={"val_loss": {"delta_min": 0.02}})
    assert "BETTER (worse where both train)" in printed and "where both train, +0." in printed


def test_a_measure_without_a_better_side_is_never_better(tmp_path, capsys):
    sinks = lambda seed: {"summary": {SINK: 0.3 + QUIET[seed]}}  # noqa: E731
    writer = study(tmp_path, sinks, lambda seed: {**sinks(seed), "state": "diverged" if seed > 1 else "finished"}, 10)
    printed, _ = claimed(writer, capsys, seeds=list(range(10)), endpoints={SINK: {"delta_min": 0.02}})
    assert "BETTER" not in printed


def test_an_onset_is_known_no_better_than_the_spacing_of_its_measurements(tmp_path, capsys):
    writer = study(tmp_path, lambda s: {"summary": {ONSET: 110}}, lambda s: {"summary": {ONSET: 100}})
    _, read = claimed(writer, capsys, endpoints={ONSET: {"delta_min": 10}})
    assert read["rows"][1]["low"] < 6 and read["rows"][1]["high"] > 14


def test_one_run_that_diverged_is_too_few(tmp_path, capsys):
    writer = Writer(tmp_path, "mine")
    for seed in range(5):
        writer.run(seed=seed, loss=2.0 + QUIET[seed])
    writer.run("norm=layer", seed=0, state="diverged")
    printed, _ = claimed(writer, capsys)
    assert "INCOMPLETE: norm=layer" in printed


def test_standard_deviations_of_a_ratio_are_on_its_scale(tmp_path, capsys):
    peaks = lambda mean: lambda seed: {"summary": {PEAK: mean * (1 + 10 * QUIET[seed])}}  # noqa: E731
    _, read = claimed(study(tmp_path, peaks(500), peaks(1000)), capsys, endpoints={PEAK: {"delta_min": 0.05}})
    assert read["rows"][1]["delta_over_sd"] < -10
