"""Tables that leave a comparison, and tables that come in, keep what qualifies a verdict; nothing is dropped unsaid."""

from __future__ import annotations

import csv
import json
import shutil

import pytest
import yaml
from written_runs import Writer, unfixed, without_checksum

from nexus_ablate.cli import main
from nexus_ablate.planning import ledger
from nexus_ablate.planning.jobs import Runs
from nexus_ablate.planning.study_yaml import write_record
from nexus_ablate.provenance import source_hashes
from nexus_ablate.study.definition import read_request, strata_of

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


# ------------------------------------------------------------------------------------------------------- the ledger


@pytest.fixture
def claims(tmp_path, monkeypatch):
    """An empty ledger."""
    path = tmp_path / "claims"
    path.mkdir()
    monkeypatch.setattr(ledger, "folder", lambda: path)
    return path


def trained(name, *overrides, strata=99):
    """A shipped study as it would lie in runs/ after it was trained."""
    for request in strata_of(read_request([name, *overrides]))[:strata]:
        runs = Runs.of(request)
        write_record(runs)
        unfixed(request.directory)
        writer = Writer(request.directory.parent, request.directory.name)
        for number, arm in enumerate(runs.study.all_arms):
            for seed in range(8):
                where = {"folder": arm.name, "env": {"source": source_hashes()}}
                writer.run(*arm.overrides, seed=seed, loss=2.0 + QUIET[(seed + number) % 10] / 10, **where)


def test_a_study_as_it_is_defined_is_published(claims, capsys):
    trained("rms_vs_layer")
    assert main(["claims", "--publish", "runs/rms_vs_layer"]) == 0
    assert json.loads((claims / "rms_vs_layer.json").read_text())["outcome"] == "SUPPORTED"


@pytest.mark.parametrize("other", ["delta_min=1", "train.steps=200", "weight_decay=1"])
def test_a_study_in_another_setting_is_not_published_as_the_claim(claims, capsys, other):
    trained("rms_vs_layer", other)
    shown = refused(capsys, "claims", "--publish", "runs/rms_vs_layer")
    assert "this is not the study whose claim would be published" in shown
    assert not list(claims.iterdir())


def test_a_precision_that_another_machine_chose_is_no_other_study(claims, capsys, tmp_path):
    trained("rms_vs_layer")
    for record in tmp_path.glob("runs/rms_vs_layer@*/study.yaml"):
        values = yaml.safe_load(without_checksum(record.read_text()))
        values["baseline"].insert(-1, "train.precision=bf16")  # as on a GPU
        record.write_text(yaml.safe_dump(values, sort_keys=False))
    assert main(["claims", "--publish", "runs/rms_vs_layer"]) == 0


def test_a_study_that_lacks_a_stratum_is_not_published(claims, capsys, tmp_path):
    trained("final_norm", strata=1)
    trained("biases", strata=1)
    for name in ("final_norm", "biases"):
        (folder,) = (tmp_path / "runs").glob(f"{name}@*")
        refused(capsys, "claims", "--publish", str(folder))
    assert not list(claims.iterdir())


def test_a_replication_counts_the_published_differences_that_it_lacks(claims, capsys, monkeypatch):
    monkeypatch.setattr(ledger, "departures", lambda request: [])
    expects = [{"arm": "norm=dyt", "endpoint": "val_loss", "expected": "higher"}]
    plan = {"claim": "c", "expects": expects, "endpoints": {"val_loss": {"delta_min": 0.02}}}

    def run(folder, **of_dyt):
        writer = Writer(claims.parent / folder, "rms_vs_layer")
        for seed in range(5):
            for arm, loss, more in (((), 2.0, {}), (("norm=layer",), 2.0, {}), (("norm=dyt",), 2.3, of_dyt)):
                env = {"source": source_hashes()}
                writer.run(*arm, seed=seed, loss=loss + QUIET[(seed + len(arm)) % 10], env=env, **more)
        writer.plan(("norm=layer",), ("norm=dyt",), **plan)
        return str(claims.parent / folder / "rms_vs_layer")

    assert main(["claims", "--publish", run("first")]) == 0
    assert main(["claims", "--check", run("same")]) == 0
    assert "replicates 2 of 2 differences" in capsys.readouterr().out
    for folder, more, why in (
        ("other", {"evaluation": "another"}, "NOT COMPARABLE"),
        ("gone", {"state": "diverged"}, "fails to train"),
    ):
        assert main(["claims", "--check", run(folder, **more)]) == 0
        printed = capsys.readouterr().out
        assert "replicates 1 of 2 differences" in printed
        line = next(line for line in printed.splitlines() if line.startswith("not compared"))
        assert "norm=dyt" in line and why in line
    shutil.rmtree(claims.parent / "other/rms_vs_layer/norm=layer")  # nothing is left that could be compared
    assert main(["claims", "--check", str(claims.parent / "other/rms_vs_layer")]) == 0
    printed = capsys.readouterr().out
    assert "replicates 0 of 2 differences" in printed and "NOT COMPARABLE" in printed
    assert "norm=layer: fewer than two pairs: 5 runs without a result" in printed
