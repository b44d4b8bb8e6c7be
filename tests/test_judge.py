"""`nexus-ablate judge`: runs of other tools get the verdicts of `compare`, and what they cannot prove is UNKNOWN."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from wandb_server import ServedRun, serving_alone
from written_runs import Writer

from nexus_ablate.cli import main
from nexus_ablate.comparison import elsewhere, terms
from nexus_ablate.comparison.cell import judge_cell
from nexus_ablate.comparison.judging import judge_losses
from nexus_ablate.comparison.terms import Terms
from nexus_ablate.study.endpoint import Endpoint
from nexus_ablate.track.project_runs import REFUSAL

BASE = [2.0012, 2.0231, 1.9824, 2.0133, 1.9911]
LOWER = [1.9017, 1.9242, 1.8809, 1.9141, 1.8902]


def table(path, **arms):
    """A CSV with a row per run, seeds from 0; `arms` are losses by name, or (first seed, losses)."""
    rows = ["arm,seed,val_loss"]
    for arm, losses in arms.items():
        first, values = losses if isinstance(losses, tuple) else (0, losses)
        rows += [f"{arm},{seed},{value}" for seed, value in enumerate(values, first)]
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def judged(capsys, *arguments):
    """The verdicts by arm, and the JSON."""
    assert main(["judge", *arguments, "--json", "-"]) == 0
    values = json.loads(capsys.readouterr().out)
    return words_of(values), values


def words_of(values):
    return {row["arm"]: row["verdict"]["prefix"] + row["verdict"]["word"] for row in values.get("rows", [])[1:]}


def refused(capsys, *arguments):
    """The three lines."""
    assert main(["judge", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "  got", "  try"], lines
    return lines


def statuses(values):
    return {check["name"]: check["status"] for check in values["checks"]}


# ----------------------------------------------------------------------------------------------- as our own runs


def test_a_csv_exported_from_our_own_study_gets_the_same_words(tmp_path, capsys):
    rng = np.random.default_rng(0)
    seeds = 2 + 0.02 * rng.normal(size=5)
    writer = Writer(tmp_path / "runs")
    writer.arm(losses=list(seeds + 0.004 * rng.normal(size=5)))
    writer.arm("norm=layer", losses=list(seeds - 0.05 + 0.004 * rng.normal(size=5)))
    writer.arm("norm=t5", losses=list(seeds + 0.05 + 0.004 * rng.normal(size=5)))
    writer.arm("bias=on", losses=list(seeds + 0.0005 * rng.normal(size=5)))
    writer.arm("qk_norm=rms", losses=list(seeds + 0.03 * rng.normal(size=5)))
    for seed in range(5):
        writer.run("gate=headwise", seed=seed, state="diverged" if seed < 4 else "finished")
    exported = tmp_path / "runs.csv"
    assert main(["compare", str(tmp_path / "runs/study"), "--json", "-", "--runs", str(exported)]) == 0
    compared = json.loads(capsys.readouterr().out)
    words, values = judged(capsys, str(exported))
    assert words == words_of(compared) and set(words.values()) >= {"BETTER", "WORSE", "INCONCLUSIVE", "TOO FEW SEEDS"}
    for mine, our in zip(values["rows"], compared["rows"], strict=True):
        for name in ("delta", "low", "high", "p", "mean", "sd"):
            number = our.get(name)
            assert mine.get(name) == (number if number is None else pytest.approx(number, rel=1e-9)), name
    assert values["delta_min"] == pytest.approx(compared["delta_min"])


def test_a_study_s_strata_become_a_column_and_come_back(tmp_path, capsys):
    for depth, shift in (("2", 0.0), ("4", 0.3)):
        writer = Writer(tmp_path / "runs", study=f"depth@{depth}")
        writer.arm(losses=[loss - shift for loss in BASE])
        writer.arm("norm=layer", losses=[loss - shift for loss in LOWER])
        writer.plan(("norm=layer",), stratum=depth, of="depth", all_strata=["2", "4"], share=0.5)
    exported = tmp_path / "runs.csv"
    assert main(["compare", str(tmp_path / "runs/depth"), "--json", "-", "--runs", str(exported)]) == 0
    compared = json.loads(capsys.readouterr().out)
    _, values = judged(capsys, str(exported))
    assert list(values["strata"]) == list(compared["strata"]) == ["2", "4"]
    for stratum in ("2", "4"):
        mine, our = (v["strata"][stratum]["rows"][1] for v in (values, compared))
        assert (mine["verdict"], mine["delta"]) == (our["verdict"], our["delta"])
    assert values["across"] == compared["across"]


# ------------------------------------------------------------------------------------------- what cannot be proved


CHECKED = {"seeds", "units", "repeats"}


def test_what_a_table_cannot_prove_is_unknown_and_never_a_pass(tmp_path, capsys):
    _, values = judged(capsys, table(tmp_path / "a.csv", baseline=BASE, new=LOWER))
    result = statuses(values)
    assert {name for name, status in result.items() if status == "PASS"} == CHECKED
    assert {name for name, status in result.items() if status == "UNKNOWN"} == set(result) - CHECKED


def test_the_columns_that_a_table_has_are_checked(tmp_path, capsys):
    rows = [
        {"arm": arm, "seed": seed, "val_loss": loss, "rate": 0.01, "tokens": tokens, "seconds": 60}
        for arm, losses, tokens in (("baseline", BASE, 1e6), ("new", LOWER, 1.2e6))
        for seed, loss in enumerate(losses)
    ]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows))
    words, values = judged(capsys, str(path))
    assert words == {"new": "NOT COMPARABLE"} and statuses(values)["tokens"] == "FAIL"
    assert statuses(values)["learning_rate"] == "WARN" and statuses(values)["seconds"] == "PASS"
    words, values = judged(capsys, str(path), "--allow", "tokens")
    assert words == {"new": "BETTER"} and statuses(values)["tokens"] == "WAIVED"


MORE, MIXED = ["3e6"] * 5, ["1e6", "1e6", "1e6", "1000", "1e6"]
UNLIKE_TOKENS = [
    ("seed", MORE, "new +200.0%"),
    ("none", MORE, "new +200.0%"),
    ("seed", MIXED, "new -99.9% at seed 3"),
    ("none", MIXED, "new -99.9%"),
    ("none", ["5e5", "1.5e6", "1e6", "5e5", "1.5e6"], "new -50.0%"),
]


@pytest.mark.parametrize(("seed", "tokens", "reason"), UNLIKE_TOKENS)
def test_unlike_tokens_are_not_comparable_whether_seeds_are_shared_or_not(seed, tokens, reason, tmp_path, capsys):
    rows = [f"baseline,{number},{loss},1e6" for number, loss in enumerate(BASE)]
    rows += [f"new,{number},{loss},{tokens[number]}" for number, loss in enumerate(LOWER)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["arm,seed,val_loss,tokens", *rows]))
    words, values = judged(capsys, str(path), "--columns", f"seed={seed}")
    (condition,) = [check for check in values["checks"] if check["name"] == "tokens"]
    assert words == {"new": "NOT COMPARABLE"} and condition["status"] == "FAIL" and reason in condition["text"]


def test_seconds_in_mixed_units_are_reported(tmp_path, capsys):
    rows = [f"{arm},{seed},{2 + seed / 100},60" for arm in ("baseline", "new") for seed in range(5)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["arm,seed,val_loss,seconds", *rows[:-1], f"{rows[-1]}000"]))
    _, values = judged(capsys, str(path))
    assert statuses(values)["seconds"] == statuses(values)["units"] == "WARN"


def test_a_report_names_what_is_unknown_in_every_form(tmp_path, capsys):
    path = table(tmp_path / "a.csv", baseline=BASE, new=(7, LOWER))
    assert main(["judge", path, "--html", str(tmp_path / "a.html"), "--md", str(tmp_path / "a.md")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "not proved by the source: evaluation, batches, init" in shown
    assert "unpaired, since the arms share no seeds: each is judged by Welch's t-test" in shown
    for name in ("a.html", "a.md"):
        text = (tmp_path / name).read_text()
        assert "UNKNOWN" in text and "Welch" in text and "BETTER" in text


# ---------------------------------------------------------------------------------------------------- unpaired runs


def test_without_shared_seeds_welch_s_test_with_simultaneous_intervals_decides(tmp_path, capsys):
    from scipy import stats

    words, values = judged(capsys, table(tmp_path / "a.csv", baseline=BASE, new=(10, LOWER), same=(20, BASE[::-1])))
    assert words["new"] == "BETTER" and words["same"] == "INCONCLUSIVE"
    row = values["rows"][1]
    welch = stats.ttest_ind(LOWER, BASE, equal_var=False)
    assert row["delta"] / row["se"] == pytest.approx(welch.statistic)
    df = max(welch.df - 1, 4)
    assert row["p"] == pytest.approx(2 * stats.t.sf(abs(welch.statistic), df))
    assert row["high"] - row["delta"] == pytest.approx(stats.t.ppf((1 + 0.96**0.5) / 2, df) * row["se"])


def test_unlike_numbers_of_runs_take_the_degrees_of_freedom_of_the_smaller():
    effect = judge_cell(np.array(LOWER[:4]), np.array([*BASE, *BASE[:3]]), 0.05, are_paired=False)
    assert (effect.n, effect.df) == (4, 3)


def test_runs_without_seeds_are_judged_unpaired(tmp_path, capsys):
    path = tmp_path / "a.csv"
    path.write_text(
        "arm,val_loss\n" + "".join(f"{a},{v}\n" for a, vs in (("baseline", BASE), ("x", LOWER)) for v in vs)
    )
    words, values = judged(capsys, str(path), "--columns", "seed=none")
    assert words == {"x": "BETTER"} and statuses(values)["seeds"] == "WARN"


@pytest.mark.parametrize(
    ("head", "fix"),
    [
        ("method,lr,seed,test_loss", "--columns arm=COLUMN,val_loss=COLUMN"),
        ("arm,seed,perplexity", "--columns val_loss=COLUMN"),
        ("arm,run,val_loss", "--columns seed=none"),
        ("arm\tseed\tval_loss", "columns that are separated by commas, or by tabs in a file named .tsv"),
    ],
)
def test_a_column_is_suggested_only_where_its_name_is_near(head, fix, tmp_path, capsys):
    path = tmp_path / "a.csv"
    separator = "\t" if "\t" in head else ","
    path.write_text(f"{head}\n{separator.join('1' for _ in head.split(separator))}\n")
    assert refused(capsys, str(path))[2] == f"  try: {fix}"


def test_a_suggested_baseline_is_quoted_as_it_must_be_typed(tmp_path, capsys):
    path = table(tmp_path / "a.csv", **{"base line": BASE, "Adam's": LOWER})
    for typed, name in (("", "base line"), ("base lin", "base line"), ("adams", "Adam's")):
        words = ["--baseline", typed] if typed else []
        fix = refused(capsys, path, *words)[2].removeprefix("  try: ")
        assert shlex.split(fix) == ["--baseline", name]
        assert main(["judge", path, *shlex.split(fix)]) == 0


def test_one_shared_seed_is_not_a_pairing(tmp_path, capsys):
    _, values = judged(capsys, table(tmp_path / "a.csv", baseline=BASE, new=(4, LOWER)))
    assert "unpaired" in " ".join(values["basis"])


@pytest.mark.parametrize("seed", [0, 30])
def test_an_arm_of_one_run_is_never_better(seed, tmp_path, capsys):
    path = table(tmp_path / "a.csv", baseline=BASE, new=(seed, [1.0]), other=(seed and 40, LOWER))
    words, _ = judged(capsys, path)
    assert words == {"new": "TOO FEW SEEDS", "other": "BETTER"}


UNROUNDED = (lambda runs: (runs, 0.0, ""), "WORSE")


@pytest.mark.parametrize(("grid", "word"), [(elsewhere.on_one_grid, "INCONCLUSIVE"), UNROUNDED])
def test_rounded_losses_are_no_less_noisy_than_rounding_made_them(grid, word, tmp_path, capsys, monkeypatch):
    """Eight arms that end one last digit higher at each of five seeds; unless they are rounded, no noise."""
    monkeypatch.setattr(elsewhere, "on_one_grid", grid)
    arms = {f"arm{number}": [3.29] * 5 for number in range(8)}
    words, _ = judged(capsys, table(tmp_path / "a.csv", baseline=[3.28] * 5, **arms))
    assert set(words.values()) == {word}


@pytest.mark.parametrize(("grid", "word"), [(elsewhere.on_one_grid, "INCONCLUSIVE"), (UNROUNDED[0], "BETTER")])
def test_an_arm_does_not_win_by_more_decimals(grid, word, tmp_path, capsys, monkeypatch):
    """Both arms around 3.2762, the baseline with two decimals and the other with five."""
    monkeypatch.setattr(elsewhere, "on_one_grid", grid)
    near = [3.27584, 3.27655, 3.27613, 3.27581, 3.27662, 3.27629, 3.27604, 3.27648]
    words, values = judged(capsys, table(tmp_path / "a.csv", baseline=[round(v, 2) for v in near], new=near[::-1]))
    assert words == {"new": word}
    rounding = "all values are rounded to 0.01, as those of baseline are"
    assert (rounding in values["basis"]) == (word == "INCONCLUSIVE")


def test_two_runs_that_end_in_zeros_do_not_round_all_others(tmp_path, capsys):
    fine = [round(loss + 0.00012, 5) for loss in BASE]
    _, values = judged(
        capsys, table(tmp_path / "a.csv", baseline=fine, short=[3.3, 3.4], new=[loss + 0.00034 for loss in LOWER])
    )
    assert not any("rounded" in line for line in values["basis"])


def test_whole_numbers_are_known_to_half_of_one(tmp_path, capsys):
    scores = [85.0, 84.0, 86.0, 85.0, 84.0]
    path = table(tmp_path / "a.csv", baseline=scores, new=scores)
    (tmp_path / "a.csv").write_text((tmp_path / "a.csv").read_text().replace("val_loss", "score"))
    for margin, word in ((0.5, "INCONCLUSIVE"), (1.5, "EQUIVALENT")):
        words, _ = judged(capsys, path, "--endpoint", "score", "--better", "higher", "--delta-min", str(margin))
        assert words == {"new": word}


NOISE = {"equal": {}, "baseline 3x": {0: 3.0}, "one arm 3x": {1: 3.0}, "one arm 5x": {1: 5.0}, "half 5x": None}


def false_claims(k, noise, tables):
    """The share of unpaired A/A tables of 5 runs per arm with any BETTER or WORSE."""
    rng = np.random.default_rng(k)
    scale = np.ones((k + 1, 1))
    for row, factor in (dict.fromkeys(range(1, (k + 1) // 2 + 1), 5.0) if noise is None else noise).items():
        scale[row] = factor
    plan = Terms(endpoint=Endpoint("val_loss", delta_min=1e-9), is_listed=True, is_paired=False)
    losses = 100 + scale * rng.normal(size=(tables, k + 1, 5))
    words = ({one.verdict.word for one in judge_losses(each, plan).results[1:] if one.verdict} for each in losses)
    return sum(bool(each & {"BETTER", "WORSE"}) for each in words) / tables


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("noise", NOISE)
def test_unpaired_tables_without_effect_claim_at_most_5_percent(noise, k, capsys):
    share = false_claims(k, NOISE[noise], 4000)
    with capsys.disabled():
        print(f"\nunpaired A/A, 5 runs, {k} arms, {noise} noise: {share:.1%} false claims")
    assert share <= 0.04 + 2 * (0.04 * 0.96 / 4000) ** 0.5


def test_without_the_correction_for_several_arms_eight_claim_three_times_as_often(monkeypatch):
    assert false_claims(8, {}, 150) <= 0.06
    monkeypatch.setattr(terms, "sidak", lambda level, k: level)
    assert false_claims(8, {}, 150) >= 0.12


# ----------------------------------------------------------------------------------------------- rates and failures


def rated(tmp_path, *rows):
    path = tmp_path / "rates.csv"
    path.write_text("\n".join(["arm,seed,val_loss,rate", *rows]) + "\n")
    return str(path)


def test_each_arm_is_judged_at_the_rate_that_other_seeds_chose(tmp_path, capsys):
    rows = []
    for arm, best, shift in (("baseline", 0.01, 0), ("new", 0.02, -0.1)):
        for rate in (0.005, 0.01, 0.02, 0.04):
            away = abs(np.log2(rate / best))
            rows.append(f"{arm},1001,{2.2 + 0.05 * away},{rate}")
            rows += [f"{arm},{s},{v + shift + 0.05 * away},{rate}" for s, v in enumerate(BASE)]
    words, values = judged(capsys, rated(tmp_path, *rows), "--tuning-seeds", "1001")
    assert words == {"new": "BETTER"} and values["rows"][1]["delta"] == pytest.approx(-0.1)
    assert statuses(values)["learning_rate"] == "WARN" and values["tuning_runs"] == 8
    assert "an arm has several learning rates" in refused(capsys, rated(tmp_path, *rows))[0]


def test_failures_count_and_never_vanish(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for thirds in (0, 1 / 3):  # in a table of unrounded numbers equal losses are equal runs
        path = table(tmp_path / "a.csv", baseline=[loss + thirds for loss in BASE], new=["failed"] * 5)
        words, values = judged(capsys, path)
        assert words == {"new": "DIVERGED"} and values["rows"][1]["failed"]
        assert "as its source says" in values["rows"][1]["verdict"]["sentence"]
        assert main(["judge", path]) == 0
        assert "\nnew fails to train at 5 of 5 seeds (as its source says), the baseline at 0" in capsys.readouterr().out


@pytest.mark.parametrize(("shift", "word"), [(-0.1, "BETTER"), (0.0, "EQUIVALENT")])
def test_an_arm_that_fails_more_often_gets_no_good_word_for_the_runs_that_trained(shift, word, tmp_path, capsys):
    base = [2.0012, 2.0007, 1.9991, 2.0003, 2.0016, 1.9994, 2.0008, 1.9999]
    new = [loss + shift for loss in base]
    words, _ = judged(capsys, table(tmp_path / "a.csv", baseline=base, new=new), "--delta-min", "0.01")
    assert words == {"new": word}, "control: all trained"
    new[1] = new[4] = new[6] = "failed"
    words, values = judged(capsys, table(tmp_path / "b.csv", baseline=base, new=new), "--delta-min", "0.01")
    assert words == {"new": "INCONCLUSIVE"}
    assert "fails to train at 3 of 8 seeds" in values["rows"][1]["verdict"]["sentence"]


def test_a_run_that_failed_is_one_where_the_endpoint_is_a_cost(tmp_path, capsys):
    path = Path(table(tmp_path / "a.csv", baseline=[loss * 100 for loss in BASE], new=[*[180] * 4, "failed"]))
    path.write_text(path.read_text().replace("val_loss", "seconds"))
    _, values = judged(capsys, str(path), "--endpoint", "seconds")
    assert values["rows"][1]["failed"]


def test_tokens_of_a_run_that_failed_are_no_unlike_tokens(tmp_path, capsys):
    rows = [f"{arm},{seed},{loss},1000" for arm in ("baseline", "new") for seed, loss in enumerate(BASE)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["arm,seed,val_loss,tokens", *rows[:-1], "new,4,failed,10"]) + "\n")
    words, _ = judged(capsys, str(path))
    assert words == {"new": "TOO FEW SEEDS"}
    path.write_text(path.read_text().replace("failed", "3.0"))
    words, _ = judged(capsys, str(path))
    assert words == {"new": "NOT COMPARABLE"}, "control: of a run that trained they are"


def test_arms_that_are_not_comparable_share_the_five_percent(tmp_path, capsys):
    path = tmp_path / "a.csv"
    rows = ["arm,seed,val_loss,caution"]
    for arm in ("baseline", "new", "odd", "other"):
        why = "NOT COMPARABLE: fairness fails on tokens" if arm in ("odd", "other") else ""
        rows += [f"{arm},{seed},{loss},{why}" for seed, loss in enumerate(BASE)]
    path.write_text("\n".join(rows) + "\n")
    _, values = judged(capsys, str(path))
    assert values["comparisons"] == 3


def test_another_endpoint_needs_its_direction(tmp_path, capsys):
    path = table(tmp_path / "a.csv", baseline=BASE, new=LOWER)
    (tmp_path / "a.csv").write_text((tmp_path / "a.csv").read_text().replace("val_loss", "accuracy"))
    assert "--better lower" in refused(capsys, path, "--endpoint", "accuracy")[2]
    words, values = judged(capsys, path, "--endpoint", "accuracy", "--better", "higher")
    assert words == {"new": "WORSE"}
    assert values["secondary"] == [], "the table has no other measure, and its numbers are no val_loss"


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_a_seed_with_equal_values_is_on_neither_side(better, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # wide enough for every column
    base = [0.80, 0.81, 0.80, 0.82, 0.81, 0.80, 0.81, 0.82]
    path = table(tmp_path / "a.csv", baseline=base, new=[0.84, 0.85, 0.84, 0.82, 0.85, 0.84, 0.81, 0.86])
    (tmp_path / "a.csv").write_text((tmp_path / "a.csv").read_text().replace("val_loss", "score"))
    for baseline in ("baseline", "new"):
        assert main(["judge", path, "--endpoint", "score", "--better", better, "--baseline", baseline]) == 0
        shown = capsys.readouterr().out
        is_better = (baseline == "baseline") == (better == "higher")
        assert "at 6 of 8 seeds" in shown and f" {6 if is_better else 0}/8 " in shown


# ------------------------------------------------------------------------------------------------------ other files


RECORDS = [
    {"arm": arm, "seed": seed, "val_loss": value}
    for arm, values in (("baseline", BASE), ("new", LOWER))
    for seed, value in enumerate(values)
]
LINES = [f"{row['arm']},{row['seed']},{row['val_loss']}" for row in RECORDS]
PLAIN = "\n".join(["arm,seed,val_loss", *LINES])
NOTES = [json.dumps(row | {"note": "two\u2028parts"}, ensure_ascii=False) for row in RECORDS]
READABLE = [
    ("a.csv", PLAIN, "as this page shows it"),
    ("a.tsv", PLAIN.replace(",", "\t"), "tabs"),
    ("A.TSV", PLAIN.replace(",", "\t"), "a suffix in capitals"),
    ("a.csv", f"\ufeff{PLAIN}", "a byte order mark"),
    ("a.csv", PLAIN.replace(",", ", "), "blanks after commas"),
    ("a.csv", PLAIN.replace("\n", "\n\n"), "empty lines"),
    ("a.csv", PLAIN.replace(",", ";"), "semicolons"),
    ("a.csv", PLAIN.replace(",", ";").replace(".", ","), "decimal commas"),
    ("a.json", json.dumps(RECORDS), "objects"),
    ("a.json", f"\ufeff{json.dumps(RECORDS)}", "objects after a byte order mark"),
    ("a.json", json.dumps({k: {str(i): r[k] for i, r in enumerate(RECORDS)} for k in RECORDS[0]}), "pandas' default"),
    ("a.jsonl", "\n".join(map(json.dumps, RECORDS)), "an object per line"),
    ("a.jsonl", "\n".join(NOTES), "a line separator in a text"),
    ("a.jsonl", "\n".join(json.dumps(row | {"accuracy": math.nan}) for row in RECORDS), "NaN in another column"),
]


@pytest.mark.parametrize(("name", "text", "reason"), READABLE, ids=[row[-1] for row in READABLE])
def test_a_table_is_read_as_common_tools_write_it(name, text, reason, tmp_path, capsys):
    (tmp_path / name).write_text(text, encoding="utf-8")
    words, values = judged(capsys, str(tmp_path / name))
    assert words == {"new": "BETTER"} and values["rows"][1]["values"] == list(LOWER)


@pytest.mark.parametrize("kind", [float, lambda value: Decimal(str(value))])
def test_parquet_holds_numbers_or_decimals(kind, tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    rows = [row | {"val_loss": kind(row["val_loss"])} for row in RECORDS]
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert judged(capsys, str(tmp_path / "a.parquet"))[0] == {"new": "BETTER"}


UNLIKELY = [
    ({"new": [value / 0.6931 for value in BASE]}, "units", "bits per token beside nats"),
    ({"new": [value * 1000 for value in BASE]}, "units", "thousandths"),
    ({"new": [2.01234, 2.01234, 1.98, 2.01, 1.99]}, "repeats", "two seeds with one loss of six digits"),
    ({"new": LOWER}, "", "plain"),
    ({"new": [2.01, 2.01, 1.98, 2.01, 1.99]}, "", "rounded losses that are equal by chance"),
]


@pytest.mark.parametrize(("arms", "name", "reason"), UNLIKELY, ids=[row[-1] for row in UNLIKELY])
def test_what_looks_like_another_unit_or_a_copied_run_is_reported(arms, name, reason, tmp_path, capsys):
    _, values = judged(capsys, table(tmp_path / "a.csv", baseline=BASE, **arms))
    told = [check for check, status in statuses(values).items() if check in ("units", "repeats") and status == "WARN"]
    assert told == [name] * bool(name)


@pytest.mark.parametrize("value", ["3_05", "9" * 400, "1e400", "nan", "0x10"])
@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_what_is_no_number_is_refused_in_three_lines(value, suffix, tmp_path, capsys):
    path = tmp_path / f"a.{suffix}"
    rows = [{"arm": arm, "seed": seed, "val_loss": "3.5"} for arm in ("baseline", "new") for seed in range(5)]
    rows[7]["val_loss"] = value
    if suffix == "json":
        number = value.isdecimal() or value == "1e400"
        path.write_text(json.dumps(rows).replace(f'"{value}"', value) if number else json.dumps(rows))
    else:
        path.write_text("arm,seed,val_loss\n" + "".join(",".join(map(str, row.values())) + "\n" for row in rows))
    assert "val_loss is not a finite number" in refused(capsys, str(path))[0]


EQUAL = [
    (BASE, "0.01", "EQUIVALENT", "five equal pairs"),
    (BASE[:2], "0.01", "TOO FEW SEEDS", "two equal pairs"),
    (BASE, "0.00001", "INCONCLUSIVE", "rounded more coarsely than the margin"),
]


@pytest.mark.parametrize(("values", "margin", "word", "reason"), EQUAL, ids=[row[-1] for row in EQUAL])
def test_equal_rounded_pairs_are_equivalent(values, margin, word, reason, tmp_path, capsys):
    rounded = [round(value, 3) for value in values]
    words, _ = judged(capsys, table(tmp_path / "a.csv", baseline=rounded, new=rounded), "--delta-min", margin)
    assert words == {"new": word}


def test_parquet_without_its_package_names_the_package(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    lines = refused(capsys, str(tmp_path / "a.parquet"))
    assert "pyarrow" in lines[0] and lines[2] == "  try: pip install pyarrow"


ROW = "baseline,{},2.{}\n"
GOOD = "arm,seed,val_loss\n" + "".join(f"baseline,{s},2.0{s}\nnew,{s},1.9{s}\n" for s in range(5))
UNFAIR = "arm,seed,val_loss,caution\nbaseline,0,2.0,NOT COMPARABLE: tokens\nnew,0,1.9,NOT COMPARABLE: tokens\n"


@pytest.mark.parametrize(
    ("text", "flags", "problem", "fix"),
    [
        (GOOD.replace("val_loss", "val loss"), [], "no column val_loss", "--columns 'val_loss=val loss'"),
        (GOOD.replace("seed", "rng"), [], "no column seed", "--columns seed="),
        ("arm,seed,val_loss\nbaseline,0,2.0\nnew,0,1.9\n", [], "with one run", "two seeds per arm"),
        (GOOD.replace("1.93", "1.93 nats"), [], "line 9: val_loss is not a finite number", "without unit"),
        (GOOD.replace("1.93", "nan"), [], "line 9: val_loss is not a finite number", "`failed`"),
        (GOOD.replace("1.93", "inf"), [], "line 9: val_loss is not a finite number", "`failed`"),
        (GOOD.replace("1.93", ""), [], "line 9: val_loss is not a finite number", "`failed`"),
        (GOOD + "new,3,1.93\n", [], "two rows are of one arm and one seed", "one row per run"),
        (GOOD.replace("baseline", "adamw"), [], "is called baseline", "--baseline adamw"),
        (GOOD, ["--baseline", "nex"], "no arm of this name", "--baseline new"),
        (GOOD.replace("new", "baseline").replace("baseline,", "baseline,1", 5), [], "two rows", "one row"),
        (GOOD.replace("new,", ",", 1), [], "line 3: arm is empty", "name the arm"),
        (GOOD.replace("new,3", "new,a"), [], "line 9: seed is not a whole number", "--columns seed=none"),
        ("arm,seed,val_loss\n", [], "the table has no rows", "one row per run"),
        ("", [], "the table has no rows", "one row per run"),
        ("\n\n" + GOOD.replace("1.93", "nan"), [], "line 11: val_loss is not a finite number", "`failed`"),
        ("arm,seed,seed\na,1,2\n", [], "is not a table", "one row per run"),
        (UNFAIR, [], "may be compared", "what the caution names"),
        (GOOD + "new,9\n", [], "line 12: val_loss is not a finite number", "`failed`"),
        (GOOD + "new,9,1.9,7\n", [], "is not a table", "one row per run"),
        (GOOD, ["--columns", "arms=x"], "--columns names what judge does not read", "--columns arm=x"),
        (GOOD, ["--columns", "arm"], "--columns takes NAME=COLUMN", "--columns arm="),
        (GOOD, ["--endpoint", "val_los"], "no column val_los", "--endpoint val_loss"),
        (GOOD.replace("val_loss", "attn/sink_rate"), [], "no column val_loss", "--endpoint attn/sink_rate"),
        (GOOD.replace("val_loss", "loss"), [], "no column val_loss", "--columns val_loss=loss"),
        (GOOD, ["--better", "higher"], "val_loss is better lower", "leave --better out"),
        (GOOD, ["--tuning-seeds", "1001"], "no row has a seed of --tuning-seeds", "--tuning-seeds 4"),
        (GOOD, ["--tuning-seeds", "4"], "a run that chose a learning rate has none", "a rate in every row"),
        (GOOD, ["--tuning-seeds", "x"], "--tuning-seeds takes whole numbers", "--tuning-seeds 1001"),
        (GOOD, ["--filters", '{"config.text": "s3://bucket/x"}'], "--filters is for W&B", "wandb:ENTITY/PROJECT"),
        (GOOD, ["--allow", "token"], "no fairness condition of this name", "tokens"),
        (GOOD, ["--delta-min", "0"], "--delta-min takes a number above 0", "--delta-min 0.01"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_judged_is_three_lines(text, flags, problem, fix, tmp_path, capsys):
    path = tmp_path / "a.csv"
    path.write_text(text)
    lines = refused(capsys, str(path), *flags)
    assert problem in lines[0] and fix in lines[2], lines


@pytest.mark.parametrize(
    ("column", "first", "second", "problem"),
    [
        ("unit", "nats", "bits", "the endpoint is in mixed units"),
        ("unit", "nats", "", "the endpoint is in mixed units"),
        ("unit", "bits", "bits", "val_loss is in nats per token"),
        ("tokens", "1M", "1M", "tokens is not a number above 0"),
        ("rate", "0", "0", "rate is not a number above 0"),
    ],
)
def test_units_that_are_mixed_are_three_lines(column, first, second, problem, tmp_path, capsys):
    rows = [f"{a},{s},{2 + s / 100},{second if s == 3 else first}" for a in ("baseline", "new") for s in range(5)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join([f"arm,seed,val_loss,{column}", *rows]))
    assert problem in refused(capsys, str(path))[0]


def test_a_source_that_is_no_table_is_three_lines(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.json").write_text('{"baseline": [1, 2], "new": [1]}')
    (tmp_path / "n.json").write_text('[{"arm": "baseline", "seed": 0}, 1]')
    (tmp_path / "b.csv").write_bytes(b"arm,seed,val_loss\n\xff\xfe,1,2\n")
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    assert "a table of this kind" in refused(capsys, str(tmp_path / "a.txt"))[0]
    for name in ("a.json", "n.json", "b.csv", "a.parquet"):
        assert "is not a table" in refused(capsys, str(tmp_path / name))[0], name
    assert "no file of this name" in refused(capsys, str(tmp_path / "c.csv"))[0]
    assert f"nexus-ablate compare {tmp_path}" in refused(capsys, str(tmp_path))[2]
    assert "one source" in refused(capsys, "a.csv", "b.csv")[0]
    assert "judge needs" in refused(capsys)[0]


# -------------------------------------------------------------------------------------------------------------- W&B


@pytest.fixture
def wandb_server(tmp_path, monkeypatch):
    """Sixty finished runs of two groups in one project, and two that are not finished."""
    with serving_alone(tmp_path, monkeypatch) as server:
        rng = np.random.default_rng(0)
        for group in ("norms", "other"):
            for arm, shift in (("baseline", 0.0), ("rms", -0.5), ("t5", 0.0)):
                for seed in range(10):
                    config = {"arm": arm, "seed": seed, "train": {"lr": 0.01}}
                    fields = {"config": json.dumps({k: {"value": v} for k, v in config.items()}), "groupName": group}
                    summary = {"val_loss": 3 + shift + 0.05 * float(rng.normal()), "eval/loss": 1.0, "tokens": 1e6}
                    run = ServedRun(fields, [], summary, complete=True, exitcode=0)
                    server.runs[f"{group}-{arm}-{seed}"] = run
        server.runs["alive"] = ServedRun({"groupName": "norms"}, [], {}, complete=False)
        server.runs["lacking"] = ServedRun({"groupName": "norms", "config": "{}"}, [], {}, complete=True, exitcode=0)
        yield server


def test_the_runs_of_a_project_on_wandb_are_judged(wandb_server, capsys):
    words, values = judged(capsys, "wandb:me/nexus-ablate", "--filters", '{"group": "norms"}')
    assert words == {"rms": "BETTER", "t5": "INCONCLUSIVE"}
    assert wandb_server.filters[-1] == {"group": "norms"} and not wandb_server.unknown
    assert [len(row["seeds"]) for row in values["rows"]] == [10, 10, 10]
    reasons = {out["path"]: out["reason"] for out in values["excluded"]}
    assert reasons["me/nexus-ablate/alive"].startswith("running")
    assert "has no config.arm" in reasons["me/nexus-ablate/lacking"]
    assert statuses(values)["excluded"] == "WARN" and statuses(values)["tokens"] == "PASS"
    assert "two rows are of one arm" in refused(capsys, "wandb:me/nexus-ablate")[0]


def test_a_run_that_diverged_counts_on_wandb_as_here(wandb_server, capsys):
    for seed in range(10):
        config = json.dumps({"arm": {"value": "rms"}, "seed": {"value": seed}})
        run = ServedRun({"groupName": "norms", "config": config}, [], {"status": "diverged"}, complete=True, exitcode=1)
        wandb_server.runs[f"norms-rms-{seed}"] = run
    words, values = judged(capsys, "wandb:me/nexus-ablate", "--filters", '{"group": "norms"}')
    assert words["rms"] == "DIVERGED" and len(values["rows"][1]["seeds"]) == 10


def test_columns_of_a_project_on_wandb_are_mapped(wandb_server, capsys):
    columns = "arm=config.arm,stratum=group,rate=config.train.lr,loss=summary.val_loss"
    own = ("--endpoint", "loss", "--better", "lower")
    _, values = judged(capsys, "wandb:me/nexus-ablate", *own, "--columns", columns)
    assert set(values["strata"]) == {"norms", "other"}
    assert values["strata"]["other"]["rows"][1]["lr"] == 0.01


@pytest.mark.parametrize(
    ("message", "refused"),
    [("HTTP 401: no", True), ("response 403", True), ("cannot reach 127.0.0.1:40123", False), ("port 54031", False)],
)
def test_a_port_that_has_the_digits_of_a_refusal_is_none(message, refused):
    assert bool(REFUSAL.search(message)) == refused


@pytest.mark.slow
def test_a_project_on_wandb_that_cannot_be_judged_is_three_lines(wandb_server, capsys, monkeypatch):
    assert "no such project, or your key" in refused(capsys, "wandb:me/nowhere")[0]
    assert "entity and project" in refused(capsys, "wandb:nexus-ablate")[0]
    lines = refused(capsys, "wandb:me/nexus-ablate", "--columns", "val_loss=summary.nope")
    assert "no finished run to judge" in lines[0] and "has no summary.nope" in lines[1]
    assert "config.lr" in refused(capsys, "wandb:me/nexus-ablate", "--columns", "rate=lr")[2]
    assert "JSON object" in refused(capsys, "wandb:me/nexus-ablate", "--filters", "{")[0]
    wandb_server.behaviour = "unauthorized"
    assert "or your key may not read it" in refused(capsys, "wandb:me/nexus-ablate")[0]
    wandb_server.behaviour = "error"
    assert refused(capsys, "wandb:me/nexus-ablate")[0] == "error: W&B failed"
    monkeypatch.delenv("WANDB_API_KEY")
    assert "no key" in refused(capsys, "wandb:me/nexus-ablate")[0]


def test_the_page_s_table_gets_the_answer_that_the_page_states(tmp_path, capsys):
    """Two records of a speedrun that both pass its rule at one step count, by their public per-run losses."""
    page = (Path(__file__).parent.parent / "docs/judging_other_runs.md").read_text()
    (rows,) = re.findall(r"^```csv\n(.*?)^```$", page, re.M | re.S)
    (tmp_path / "records.csv").write_text(rows)
    command = next(line for line in page.splitlines() if "judge records.csv" in line).split()[2:]
    words, values = judged(capsys, str(tmp_path / command[0]), *command[1:])
    answer = page.partition("<!-- answer -->\n> ")[2].partition("\n")[0]
    assert values["answer"] == answer and words == {"Muon-NSR": "EQUIVALENT"}
    for name, statistic in (("Skylight-001", 0.0045), ("Muon-NSR", 0.0057)):
        losses = [float(row.split(",")[1]) for row in rows.splitlines() if row.startswith(name)]
        assert (3.28 - np.mean(losses)) * len(losses) ** 0.5 == pytest.approx(statistic, abs=5e-5)


# ---------------------------------------------------------------------------------------------------- steps to a loss

AUX = """3.27930 3.27891 3.27847|3.28004 3.27961 3.27924|3.27972 3.27934 3.27890|3.27911 3.27866 3.27831
3.27991 3.27952 3.27912|3.27715 3.27679 3.27637|3.28010 3.27971 3.27932|3.27908 3.27867 3.27826
3.27883 3.27842 3.27799|3.28055 3.28014 3.27972|3.27934 3.27892 3.27850|3.27929 3.27891 3.27850
3.28025 3.27988 3.27946|3.27985 3.27946 3.27908|3.27824 3.27783 3.27741|3.28042 3.28001 3.27961
3.27797 3.27760 3.27720|3.27887 3.27848 3.27806|3.27877 3.27839 3.27795|3.27830 3.27788 3.27751"""
"""Losses of 20 seeds at steps 2745, 2750 and 2755: KellerJordan/modded-nanogpt, pull request #321."""


def logs(path, **arms):
    """A CSV with a row per run and step; arms are lists of runs, each the losses by step."""
    rows = ["arm,seed,step,val_loss"]
    for arm, runs in arms.items():
        rows += [f"{arm},{seed},{step},{loss}" for seed, run in enumerate(runs) for step, loss in run.items()]
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def falling(steps, step=100):
    """A log whose loss falls by 0.01 each `step` steps and reaches 3.28 after some."""
    return {at: round(3.28 + (steps - at) / step / 100, 6) for at in range(0, 4001, step)}


def test_the_rule_of_modded_nanogpt_is_computed_as_its_pull_request_321_has_it(tmp_path, capsys):
    runs = [dict(zip((2745, 2750, 2755), run.split(), strict=True)) for run in re.split(r"[|\n]", AUX)]
    assert len(runs) == 20
    slower = [{step + 200: loss for step, loss in run.items()} for run in runs]
    path = logs(tmp_path / "logs.csv", baseline=slower, aux=runs)
    assert main(["judge", path, "--target", "3.28"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    rule = "(3.28 - mean) sqrt(20) is 0.0051 at step 2750, the first of 0.004 or more; 0.0033 at step 2745"
    assert f"modded-nanogpt's rule, aux: {rule}" in shown
    assert "modded-nanogpt's rule, baseline: (3.28 - mean) sqrt(20) is 0.0051 at step 2950" in shown
    assert "exploratory: logs that begin at or below the target" in shown  # most runs are, at step 2745


def test_steps_to_a_loss_are_judged_by_their_differences_with_an_interval(tmp_path, capsys):
    base = [3000.0, 3040.0, 2980.0, 3010.0, 2990.0]
    saved = [510.0, 495.0, 505.0, 490.0, 500.0]
    arm = [falling(steps - less) for steps, less in zip(base, saved, strict=True)]
    path = logs(tmp_path / "logs.csv", baseline=[falling(steps) for steps in base], muon=arm)
    words, values = judged(capsys, path, "--target", "3.28")
    row = values["rows"][1]
    assert words == {"muon": "BETTER"} and values["endpoint"] == "steps to 3.28" and values["unit"] == "steps"
    assert row["delta"] == pytest.approx(-500) and row["values"] == pytest.approx(np.subtract(base, saved))
    assert row["low"] < -500 < row["high"] < 0 and row["high"] - row["low"] < 30
    assert main(["judge", path, "--target", "3.28", "--html", str(tmp_path / "a.html")]) == 0
    sentence = "muon: ends 500 steps earlier ("
    assert sentence in " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "a.html").read_text()
    assert "muon ends 500 steps earlier (" in page and "modded-nanogpt&#39;s rule, muon: " in page


@pytest.mark.parametrize(
    ("change", "options", "problem", "got", "fix"),
    [
        ({}, "--target 2.5", "a run does not reach the loss 2.5", "seed 1: 3.184 at the lowest", "--target 3.184"),
        ({1000: "low"}, "--target 3.28", "val_loss is not a finite number", "low", "a number without unit"),
        ({}, "--target 3.28 --columns step=iter", "the source has no column iter", "arm, seed", "--columns step="),
        ({}, "--target 3.28 --endpoint accuracy", "--target is for a loss", "accuracy", "--better lower"),
        ({}, "--target nan", "--target takes a number above 0", "nan", "--target 3.28"),
        ({"0.0": 4.0}, "--target 3.28", "two rows are of one run and one step", "step 0", "one row per run and step"),
        ({-1: 4.0}, "--target 3.28", "step is not a training step", "-1", "a number from 0 in every row"),
    ],
)
def test_a_log_that_has_no_steps_to_the_loss_is_refused(tmp_path, capsys, change, options, problem, got, fix):
    path = logs(tmp_path / "logs.csv", baseline=[falling(3000), falling(3040)], muon=[falling(2500) | change] * 2)
    lines = refused(capsys, path, *options.split())
    assert problem in lines[0] and got in lines[1] and fix in lines[2]


def test_a_target_that_the_message_names_is_reached(tmp_path, capsys):
    path = logs(tmp_path / "logs.csv", baseline=[falling(3000)] * 2, muon=[falling(2500)] * 2)
    fix = refused(capsys, path, "--target", "2.5")[2].partition("try: ")[2].split()
    assert main(["judge", path, *fix]) == 0


def test_a_log_that_begins_below_the_loss_keeps_its_caution(tmp_path, capsys):
    base = [falling(3000 + 13 * seed) for seed in range(5)]
    path = logs(tmp_path / "logs.csv", baseline=base, unfair=[falling(-200)] * 5, late=[falling(-100)] * 5)
    cautions = {"unfair": "NOT COMPARABLE: tokens", "late": "seeds added", "arm": "caution"}
    rows = [f"{row},{cautions.get(row.partition(',')[0], '')}" for row in Path(path).read_text().splitlines()]
    Path(path).write_text("\n".join(rows))
    words, values = judged(capsys, path, "--target", "3.28")
    assert list(words) == ["late"], "what was not comparable is left out"
    assert {out["reason"] for out in values["excluded"]} == {
        "NOT COMPARABLE: tokens; logs that begin at or below the target"
    }
    assert values["exploratory"] == ["seeds added; logs that begin at or below the target"]


def test_a_run_that_failed_to_train_counts_as_a_failure(tmp_path, capsys):
    muon = [falling(2500 + 10 * seed) for seed in range(6)]
    muon[3] = {0: 4.0, 100: "failed"}
    path = logs(tmp_path / "logs.csv", baseline=[falling(3000 + 13 * seed) for seed in range(6)], muon=muon)
    _, values = judged(capsys, path, "--target", "3.28")
    assert list(values["rows"][1]["failed"]) == ["3"]
    assert values["rows"][1]["verdict"]["qualifiers"] == ["1 of 6 failed"]


# ------------------------------------------------------------------------------------------------- the first line

EIGHT = [0.012, -0.008, 0.003, -0.011, 0.007, 0.001, -0.006, 0.002]


def shifted(by, turn=0, spread=1.0):
    """Eight losses `by` above the baseline's mean, whose noise is turned by some seeds."""
    return [round(2.0 + by + spread * noise, 4) for noise in EIGHT[turn:] + EIGHT[:turn]]


@pytest.mark.parametrize(
    ("arms", "first", "advice"),
    [
        (
            {"muon": shifted(-0.1, 1)},
            r"muon ends 0\.1000 nats per token lower \(0\.0\d+ to 0\.1\d+\), at 8 of 8 seeds\.",
            r"\Z",
        ),
        (
            {"muon": shifted(-0.1, 1), "dyt": shifted(0.2, 2), "gelu": shifted(0.001, 3)},
            r"muon ends 0\.1000 nats per token lower \(.* to .*\), at 8 of 8 seeds\. "
            r"BETTER: muon\. WORSE: dyt\. EQUIVALENT: gelu\.",
            r"\Z",
        ),
        (
            {f"arm{i}": shifted(0.012 if i else 0.001, i + 1, 2) for i in range(6)},
            r"No arm is shown to differ from baseline; the furthest, arm\d, ends 0\.0120 nats per token higher "
            r"\(-0\.0\d+ to \+0\.0\d+\), at \d of 8 seeds\. EQUIVALENT: arm0\. INCONCLUSIVE: arm1 · .* · arm5\.",
            r"; 23 more seeds show that it is equivalent; 45 decide whether it is worse arm2",
        ),
        (
            {"muon": shifted(0.0005, 1, 60)},
            r"INCONCLUSIVE: muon ends 0\.0005 nats per token higher \(-[01]\.\d+ to \+[01]\.\d+\), at \d of 8 seeds\.",
            "more than 200 seeds would be needed to decide an effect of this size",
        ),
        (
            {"muon": shifted(-0.1, 1)[:3]},
            r"TOO FEW SEEDS: muon ends 0\.\d+ nats per token lower \(-.* to .*\), at 3 of 3 seeds\.",
            "5 pairs that trained are the fewest for a word",
        ),
    ],
    ids=["one", "three", "six", "noisy", "screening"],
)
def test_the_first_line_is_a_sentence_and_advice_names_the_word_of_each_number(
    arms, first, advice, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "table.csv", baseline=shifted(0), **arms)
    assert main(["judge", "table.csv", "--delta-min", "0.03"]) == 0
    printed = capsys.readouterr().out
    text = " ".join(printed.split())
    assert re.search(rf"table\.csv {first}", text), printed
    assert re.search(advice, text), printed
    assert max(map(len, printed.splitlines())) <= 80
