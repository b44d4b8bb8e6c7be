"""Tables that leave a comparison, and tables that come in, keep what qualifies a verdict; nothing is dropped unsaid."""

from __future__ import annotations

import csv
import json

import pytest
from written_runs import Writer

from nexus_ablate.cli import main
from nexus_ablate.study.definition import read_request

QUIET = (0.004, -0.003, 0.001, -0.005, 0.003, 0.002, -0.001, 0.0045, -0.0035, 0.0005)
PEAK = "act/resid/max_over_median"


@pytest.fixture(autouse=True)
def wide(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")


def refused(capsys, *words):
    assert main(list(words)) == 2
    return capsys.readouterr().err


def judged(capsys, name, rows, *words):
    with open(name, "w", newline="") as file:
        writer = csv.DictWriter(
            file, ["arm", "seed", *dict.fromkeys(k for row in rows for k in row if k not in ("arm", "seed"))]
        )
        writer.writeheader()
        writer.writerows(rows)
    status = main(["judge", name, *words])
    return status, "".join(capsys.readouterr())


def rows(arm, mean, **more):
    return [{"arm": arm, "seed": seed, "val_loss": mean + QUIET[seed], **more} for seed in range(5)]


# ----------------------------------------------------------------------------------------------------------- judge


def test_two_rows_of_one_arm_and_seed_are_refused_whatever_their_rates(capsys):
    table = [*rows("baseline", 2.0), *rows("x", 2.5), *rows("x", 1.9, rate=0.1)]
    status, printed = judged(capsys, "runs.csv", table)
    assert status == 2 and "two rows are of one arm and one seed" in printed


def test_rows_at_other_rates_than_the_best_are_listed(capsys):
    table = []
    for arm, mean in (("baseline", 2.0), ("x", 1.9)):
        for rate, worse in ((0.1, 0.0), (0.2, 0.3)):
            table += rows(arm, mean + worse, rate=rate)
            table.append({"arm": arm, "seed": 1001, "val_loss": mean + worse, "rate": rate})
    status, printed = judged(capsys, "runs.csv", table, "--tuning-seeds", "1001")
    assert status == 0 and printed.count("5 runs at other learning rates than its best") == 2


def test_a_value_without_a_logarithm_is_refused_by_its_line(capsys):
    table = [{"arm": arm, "seed": s, PEAK: s * 0.1} for arm in ("baseline", "x") for s in range(5)]
    status, printed = judged(capsys, "runs.csv", table, "--endpoint", PEAK)
    assert status == 2 and f"runs.csv, line 2: {PEAK} is compared by ratios" in printed


def test_wins_are_of_the_better_side(capsys):
    table = [
        {"arm": a, "seed": s, "acc": m + QUIET[s if a == "x" else -s]}
        for a, m in (("baseline", 0.5), ("x", 0.6))
        for s in range(5)
    ]
    _, printed = judged(capsys, "runs.csv", table, "--endpoint", "acc", "--better", "higher", "--json", "-")
    row = json.loads(printed)["rows"][1]
    assert row["verdict"]["word"] == "BETTER" and row["wins"] == 5
    _, printed = judged(capsys, "runs.csv", table, "--endpoint", "acc", "--better", "higher", "--csv", "-")
    assert next(row for row in csv.DictReader(printed.splitlines()) if row["arm"] == "x")["wins"] == "5"
    _, printed = judged(capsys, "runs.csv", table, "--endpoint", "acc", "--better", "higher")
    assert next(line for line in printed.splitlines() if line.startswith("x  ")).count("5/5") == 2  # seeds and wins


# -------------------------------------------------------------------------------------------------- compare --runs


def study(name="mine", other=(), shift=-0.1):
    writer = Writer(read_request([name, "vary.norm=layer"]).runs_dir, name)
    for seed in range(5):
        writer.run(seed=seed, loss=2.0 + QUIET[seed])
        writer.run("norm=layer", seed=seed, loss=2.0 + shift + QUIET[-seed], evaluation="another")
        writer.run("norm=dyt", seed=seed, loss=2.0 + shift + QUIET[-seed])
    writer.plan(("norm=layer",), ("norm=dyt",), **dict(other))
    return writer


def test_an_arm_that_was_not_comparable_stays_so_in_a_table_of_runs(capsys):
    study()
    assert main(["compare", "runs/mine", "--runs", "runs.csv"]) == 0
    assert "NOT COMPARABLE: norm=layer" in capsys.readouterr().out
    assert main(["judge", "runs.csv"]) == 0
    printed = capsys.readouterr().out
    assert "BETTER: norm=dyt." in printed and "fairness fails on evaluation" in printed
    assert main(["compare", "runs/mine", "--runs", "runs.csv"]) == 0  # replaces its own report


@pytest.mark.parametrize(
    "late",
    [
        {"added": [{"when": "2020-01-01", "seeds": [4]}]},
        {"looks": [5, 10], "look_weights": [0.5, 0.5], "seeds": [*range(10)]},
    ],
)
def test_what_was_chosen_late_stays_exploratory_in_a_table_of_runs(capsys, late):
    study(other=late)
    assert main(["compare", "runs/mine", "--runs", "runs.csv"]) == 0
    capsys.readouterr()
    assert main(["judge", "runs.csv"]) == 0
    assert "exploratory: BETTER: norm=dyt" in capsys.readouterr().out


def test_words_that_rest_on_what_rows_lack_are_exploratory_in_a_table_of_runs(capsys):
    writer = Writer(read_request(["mine", "vary.norm=layer"]).runs_dir, "mine")
    for seed in range(5):  # what the text adds is as large as the difference
        writer.run(seed=seed, loss=2.0 + QUIET[seed], windows=32, blocks=16)
        writer.run("norm=dyt", seed=seed, loss=1.98 + QUIET[-seed], windows=32, blocks=16, text=(0.2, -0.2))
    writer.plan(("norm=dyt",), ("norm=layer",), ("norm=none",))
    assert main(["compare", "runs/mine", "--runs", "runs.csv"]) == 0
    assert "INCONCLUSIVE: norm=dyt" in capsys.readouterr().out
    assert main(["judge", "runs.csv"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "exploratory: BETTER: norm=dyt" in printed
    assert "3 comparisons share the 5%; rows don't have the error over text" in printed


def test_a_failure_to_train_is_written_where_the_endpoint_is_a_cost(capsys):
    writer = Writer(read_request(["mine", "vary.norm=layer"]).runs_dir, "mine")
    for seed in range(5):
        writer.run(seed=seed, summary={"seconds": 4 + QUIET[seed]})
        state = "finished" if seed else "diverged"
        writer.run("norm=layer", seed=seed, state=state, summary={"seconds": 5 + QUIET[-seed]})
    writer.plan(("norm=layer",), endpoints=[{"name": "seconds"}])
    assert main(["compare", "runs/mine", "--runs", "runs.csv"]) == 0
    assert "(1 of 5 failed)" in capsys.readouterr().out
    with open("runs.csv", encoding="utf-8", newline="") as file:
        assert next(row["seconds"] for row in csv.DictReader(file) if row["arm"] == "norm=layer") == "failed"


def test_two_arms_that_were_picked_stay_exploratory_in_a_table_of_runs(capsys):
    study()
    assert main(["compare", "runs/mine", "--arm", "norm=dyt", "--baseline", "baseline", "--runs", "runs.csv"]) == 0
    capsys.readouterr()
    assert main(["judge", "runs.csv"]) == 0
    printed = capsys.readouterr().out
    assert "exploratory: BETTER: norm=dyt" in printed and "3 comparisons share the 5%" in printed


def test_latex_of_strata_names_each_and_the_claim(capsys):
    for stratum, shift in (("shallow", -0.1), ("deep", 0.1)):
        plan = {"stratum": stratum, "of": "s", "claim": "it is so", "share": 0.5}
        study(
            f"s@{stratum}",
            {**plan, "expects": [{"arm": "norm=dyt", "endpoint": "val_loss", "expected": "lower"}]},
            shift,
        )
    for _ in range(2):  # the second replaces its own report
        assert main(["compare", "runs/s", "--latex", "s.tex"]) == 0
    capsys.readouterr()
    assert main(["compare", "runs/s", "--latex", "-"]) == 0
    printed = capsys.readouterr().out
    shallow, deep = printed.index("{l}{shallow} \\\\"), printed.index("{l}{deep} \\\\")
    tables = [printed.index("\\toprule"), printed.rindex("\\toprule")]
    assert sorted((shallow, deep, *tables))[::2] == tables
    assert printed.startswith("% CONTRADICTED IN 1 OF 2 SETTINGS, supported in 1: it is so\n")
