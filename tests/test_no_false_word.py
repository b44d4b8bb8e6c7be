"""From run directories through the command line: where a word would be false there is none; each with its control."""

from __future__ import annotations

import csv
import json
import math
import shutil
from pathlib import Path

import pytest
from written_runs import Writer

from nexus_ablate.cli import main
from nexus_ablate.runs.lookup import id_of

SEEDS = 8
NOISE = [0.01, -0.008, 0.002, -0.011, 0.006, 0.003, -0.004, 0.0]


def written(root, dead=(), budget=1.0):
    """A baseline and an arm that ends 0.1 lower; at `dead` seeds the baseline ends at a unigram model's loss."""
    writer = Writer(root / "runs", "mine")
    for seed in range(SEEDS):
        is_dead = seed in dead
        loss = 4.15 if is_dead else 2.0 + NOISE[seed]
        writer.run(seed=seed, loss=loss, summary={"val_bpb": loss / 0.7}, batch=budget)
        arm = 1.9 + NOISE[-seed]
        writer.run("norm=layer", seed=seed, loss=arm, summary={"val_bpb": arm / 0.7}, train_noise="x", batch=budget)
    writer.plan(("norm=layer",), seeds=list(range(SEEDS)), delta_min=0.01)
    return writer


def run_of(writer, arm, seed):
    return next((writer.root / writer.study / arm).glob(f"s{seed}-*"))


def answer(capsys, *arguments):
    """The arm's verdict as text, and all of the comparison."""
    assert main(["compare", *arguments, "--json", "-"]) == 0
    values = json.loads(capsys.readouterr().out)
    verdict = values["rows"][1]["verdict"]
    return verdict["prefix"] + ", ".join([verdict["word"], *verdict["qualifiers"]]), values


def as_it_is(writer):
    pass


def copy_of_a_seed(writer):
    """Seed 3 of the arm is a copy of its seed 2 under another name."""
    source, target = run_of(writer, "norm=layer", 2), run_of(writer, "norm=layer", 3)
    shutil.rmtree(target)
    shutil.copytree(source, target)
    config = target / "config.yaml"
    config.write_text(config.read_text().replace("seed: 2", "seed: 3"))
    environment = target / "env.json"
    environment.write_text(json.dumps(json.loads(environment.read_text()) | {"run_hash": id_of(target)}))


CASES = [
    ({}, as_it_is, (), "BETTER", "a plain study: the control of all others"),
    ({"dead": range(SEEDS)}, as_it_is, (), "NOT COMPARABLE", "a baseline that has learned nothing"),
    ({"dead": range(SEEDS)}, as_it_is, ("--allow", "learned"), "BETTER", "the same, waived"),
    ({"dead": range(5)}, as_it_is, (), "NOT COMPARABLE", "a baseline with five dead seeds of eight"),
    ({"dead": range(3)}, as_it_is, (), "INCONCLUSIVE", "with three: compared, and too noisy for a word"),
    ({"budget": 0.4}, as_it_is, (), "BETTER, early training", "5,120 tokens for 768 parameters in blocks"),
    ({}, copy_of_a_seed, (), "NOT COMPARABLE", "a copied seed"),
]


@pytest.mark.parametrize(("runs", "spoil", "flags", "verdict", "reason"), CASES, ids=[row[-1] for row in CASES])
def test_no_word_where_none_is_due(runs, spoil, flags, verdict, reason, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spoil(written(tmp_path, **runs))
    assert answer(capsys, "runs/mine", *flags)[0] == verdict


def test_strata_are_in_the_order_of_the_file_and_change_says_from_which_to_which(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shifts = {"zebra": 0.1, "middle": 0.2, "ant": 0.4}
    for stratum, shift in shifts.items():
        writer = Writer(tmp_path / "runs", f"mine@{stratum}")
        writer.arm(losses=[2 + noise for noise in NOISE])
        writer.arm("norm=layer", losses=[2 + shift + noise for noise in NOISE[::-1]], train_noise="x")
        names = {"stratum": stratum, "of": "mine", "all_strata": [*shifts], "share": 1 / 3}
        writer.plan(("norm=layer",), seeds=list(range(SEEDS)), **names)
    assert main(["compare", "runs/mine", "--json", "-"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert list(values["strata"]) == [*shifts]
    (row,) = values["across"]
    assert row["change"].startswith("+0.3") and (row["sign"], row["order"]) == ("the same", "rises")
    assert main(["compare", "runs/mine"]) == 0
    assert "change: from zebra to ant" in capsys.readouterr().out
    shutil.rmtree("runs/mine@ant/norm=layer")
    assert main(["compare", "runs/mine", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["across"]
    assert row["change"].endswith("from zebra to middle")


def test_where_failures_to_train_decide_no_difference_of_the_seeds_that_trained_is_shown(tmp_path, capsys, monkeypatch):
    """Those seeds flatter the arm; a lead over strata names it all the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    lost = {"small": 6, "large": 8}
    for stratum in lost:
        writer = Writer(tmp_path / "runs", f"mine@{stratum}")
        writer.arm(losses=[2 + noise for noise in NOISE])
        for seed in range(SEEDS):
            ending = {"state": "diverged", "steps": 100} if seed < lost[stratum] else {}
            writer.run("norm=none", seed=seed, loss=1.9 + NOISE[-seed], train_noise="x", **ending)
        names = {"stratum": stratum, "of": "mine", "all_strata": [*lost], "share": 0.5}
        writer.plan(("norm=none",), seeds=list(range(SEEDS)), **names)
    assert main(["compare", "runs/mine", "--details"]) == 0
    printed = capsys.readouterr().out
    assert "norm=none fails to train at 6 of 8 seeds" in printed and "-0.1" not in printed
    for line in printed.splitlines():
        assert line.count("(") == line.count(")"), line
    assert main(["compare", "runs/mine", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["across"]
    assert (row["small"], row["large"], row["change"], row["sign"]) == ("UNSTABLE", "DIVERGED", "–", "–")
    assert main(["compare", "runs/mine", "--html", "page.html"]) == 0
    words = Path("page.html").read_text(encoding="utf-8").replace("<wbr>", "")
    assert "norm=none: UNSTABLE in small, DIVERGED in large." in words
    for stratum in lost:
        names = {"stratum": stratum, "of": "mine", "all_strata": [*lost], "share": 0.5, "claim": "c"}
        expects = [{"arm": "norm=none", "endpoint": "val_loss", "expected": "equivalent"}]
        writer = Writer(tmp_path / "runs", f"mine@{stratum}")
        writer.plan(("norm=none",), seeds=list(range(SEEDS)), delta_min=0.1, expects=expects, **names)
    assert main(["compare", "runs/mine"]) == 0
    assert "norm=none UNSTABLE, fails to train at 6 of 8 seeds, so shows nothing in val_loss" in capsys.readouterr().out


def test_json_has_delta_min_as_it_was_declared_and_the_csv_has_it_on_the_scale_of_differences(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    written(tmp_path).plan(
        ("norm=layer",), endpoint="act/resid/kurtosis_token", delta_min=0.1, seeds=list(range(SEEDS))
    )
    assert main(["compare", "runs/mine", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["delta_min"] == 0.1
    assert main(["compare", "runs/mine", "--csv", "-"]) == 0
    rows = [*csv.DictReader(capsys.readouterr().out.splitlines())]
    assert float(rows[1]["margin"]) == pytest.approx(math.log(1.1)), "a ratio of 1.1"


def test_one_grid_answers_a_question_across_two_settings(tmp_path, capsys, monkeypatch):
    """The recipe of docs/studies.md: three times the rate with QK-norm against once without."""
    monkeypatch.chdir(tmp_path)
    words = ["vary.qk_norm=none,rms", "vary.optim.lr=3e-3,9e-3", "design=grid", "qk_norm=none", "optim.lr=3e-3"]
    assert main(["plan", "qk_rate", *words, "model=femto"]) == 0
    assert "optim.lr=0.009,qk_norm=rms" in capsys.readouterr().out
    writer = Writer(tmp_path / "runs", "qk_rate")
    arms = {(): 2.0, ("optim.lr=0.009",): 2.3, ("qk_norm=rms",): 2.01, ("optim.lr=0.009", "qk_norm=rms"): 1.9}
    for number, (arm, loss) in enumerate(arms.items()):
        writer.arm(*arm, losses=[loss + noise for noise in NOISE[number:] + NOISE[:number]], train_noise=str(arm))
    writer.plan(*[arm for arm in arms if arm], seeds=list(range(SEEDS)))
    both = "optim.lr=0.009,qk_norm=rms"
    assert main(["compare", "runs/qk_rate", "--json", "-"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert {row["arm"]: row["word"] for row in values["rows"]}[both] == "BETTER" and values["together"]
    assert main(["compare", "runs/qk_rate", "--arm", both, "--baseline", "optim.lr=0.009"]) == 0
    assert "0.4000 nats per token lower" in " ".join(capsys.readouterr().out.split())
