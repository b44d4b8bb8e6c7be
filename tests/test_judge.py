"""`nexus-ablate judge`: tables of other tools, from the file to a verdict, with the commands that are typed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from wandb_server import ServedRun, serving_alone

from nexus_ablate.cli import main
from nexus_ablate.comparison.foreign import Choice, source_of
from nexus_ablate.comparison.judge import judge
from nexus_ablate.track.account import REFUSAL

BASE = [3.28012, 3.28231, 3.27824, 3.28133, 3.27911, 3.28042]
LOWER = [loss - 0.05 for loss in BASE]
NEARLY = [3.23012, 3.23231, 3.22824, 3.23133, 3.22911, 3.23053]
"""0.05 lower but for one run."""


def rows_of(**arms):
    """Rows of arms, by name a list of losses or (first seed, losses)."""
    rows = []
    for arm, losses in arms.items():
        first, values = losses if isinstance(losses, tuple) else (0, losses)
        rows += [{"arm": arm, "seed": seed, "val_loss": value} for seed, value in enumerate(values, first)]
    return rows


def csv_of(rows, separator=","):
    heads = [*rows[0]]
    lines = [separator.join(heads)] + [separator.join(str(row[head]) for head in heads) for row in rows]
    return "\n".join(lines) + "\n"


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Types `nexus-ablate judge ...` in an empty folder: the table as JSON, or the three lines of an error."""
    monkeypatch.chdir(tmp_path)

    def type_words(*words):
        status = main(["judge", *words, "--json", "-"])
        printed = capsys.readouterr()
        if status == 0:
            return json.loads(printed.out)["tables"][0]
        assert status == 2, printed.err
        lines = printed.err.splitlines()
        assert [line.split(":")[0] for line in lines] == ["error", "  got", "  try"], lines
        return lines

    return type_words


def words_of(table):
    assert isinstance(table, dict), table
    return {row["arm"]: row["word"] for row in table["rows"] if not row["is_baseline"]}


def statuses(table):
    return {check["name"]: check["status"] for check in table["checks"]}


# --------------------------------------------------------------------------------- from a tool's export to a verdict


def by_norm(losses=None, **more):
    """The rows of a sweep over two norms."""
    rows = []
    for norm, values in (losses or {"layer": BASE, "rms": NEARLY}).items():
        rows += [{"norm": norm, "seed": seed, **more, "val/loss": value} for seed, value in enumerate(values)]
    return rows


def runs_export():
    """W&B's runs table."""
    rows = []
    for row in by_norm():
        name = f"{row['norm']}-{row['seed']}"
        rows.append({"Name": name, "State": "finished", "Created": "2026-11-20T10:00:00.000Z", "Runtime": 812, **row})
    return csv_of(rows)


def chart_export():
    """W&B's chart of a metric by run."""
    names = [(f"{row['norm']}-{row['seed']} - val/loss", row["val/loss"]) for row in by_norm()]
    heads = [f'"{name}","{name}__MIN","{name}__MAX"' for name, _ in names]
    lines = ['"Step",' + ",".join(heads)]
    for step, above in ((1000, 0.3), (2000, 0.1), (3000, 0.0)):
        lines.append(f'"{step}",' + ",".join(f'"{loss + above}","",""' for _, loss in names))
    return "\n".join(lines)


def log():
    """A row per run and step, with rows of training between those of validation."""
    rows = []
    for row in by_norm():
        for step, above in ((0, 7.0), (1000, 0.2), (2000, 0.0)):
            rows.append({**row, "step": step, "train/loss": 3.0, "val/loss": row["val/loss"] + above})
            rows.append({**row, "step": step + 500, "train/loss": 3.1, "val/loss": ""})
    return csv_of(rows)


def german():
    return csv_of(rows_of(baseline=BASE, rms=NEARLY), ";").replace(".", ",")


def results_json():
    """A list of objects inside an object, numbers inside objects."""
    runs = [{"run_info": {"norm": r["norm"], "seed": r["seed"], "eval": {"bpb": r["val/loss"] / 3}}} for r in by_norm()]
    return json.dumps({"runs": runs, "made": "2026-11-20"})


def sweep_lines():
    return "\n\n".join(json.dumps({**row, "placement": "pre"}) for row in by_norm())


def placements():
    rows = [{"norm": norm, "placement": place, "seed": seed, "eval/loss": loss - 0.05 * (norm == "rms")}
            for norm in ("layer", "rms") for place in ("pre", "post") for seed, loss in enumerate(BASE)]  # fmt: skip
    return csv_of(rows, "\t")


def page():
    lines = ["# Log", "", "| change | seed | val_bpb |", "|---|---:|---:|"]
    lines += [f"| **{row['norm']}** | {row['seed']} | {row['val/loss'] / 4:.6f} |" for row in by_norm()]
    return "\n".join([*lines, "", "It helps."])


def sweep_of_a_diary():
    """One run per value, in a table of nanochat's log."""
    values = ("**0.96** | **0.7971** | **-0.0007**", "0.94 | 0.7972 | -0.0006", "0.98 | 0.8011 | +0.0033 💀")
    lines = ["| x0_beta1 | val/bpb | Δ vs baseline |", "|---|---|---|", *(f"| {value} |" for value in values)]
    return "\n".join(lines)


def accuracies():
    rows = [
        {"optimizer": "muon" if loss < 3.25 else "adamw", "accuracy": round(loss / 10, 5)} for loss in BASE + NEARLY
    ]
    return csv_of(rows)


EXPORTS = [
    ("runs.csv", runs_export, {"rms": "BETTER"}, "paired"),
    ("chart.csv", chart_export, {"rms": "BETTER"}, "paired"),
    ("log.csv", log, {"rms": "BETTER"}, "paired"),
    ("german.csv", german, {"rms": "BETTER"}, "paired"),
    ("results.json", results_json, {"rms": "BETTER"}, "paired"),
    ("sweep.jsonl", sweep_lines, {"rms": "BETTER"}, "paired"),
    ("both.tsv", placements, {"layer,post": "EQUIVALENT", "rms,pre": "BETTER", "rms,post": "BETTER"}, "paired"),
    ("LOG.md", page, {"rms": "BETTER"}, "paired"),
    ("beta1.md", sweep_of_a_diary, {"0.94": "TOO FEW SEEDS", "0.98": "TOO FEW SEEDS"}, "unpaired"),
    ("accuracies.csv", accuracies, {"muon": "WORSE"}, "unpaired"),
]


@pytest.mark.parametrize(("name", "export", "words", "test"), EXPORTS, ids=[row[0] for row in EXPORTS])
def test_an_export_is_judged_as_it_is_or_by_the_one_command_that_the_error_names(name, export, words, test, typed):
    Path(name).write_text(export())
    table = typed(name)
    if isinstance(table, list):
        command = shlex.split(table[2].partition("try: ")[2])
        assert command[:3] == ["nexus-ablate", "judge", name]
        table = typed(*command[2:])
    assert words_of(table) == words
    assert statuses(table)["seeds"] == ("PASS" if test == "paired" else "WARN")
    assert "repeats" not in statuses(table)


# --------------------------------------------------------------------------------------------- which runs are results


def test_rows_of_runs_that_have_not_finished_are_listed_and_are_no_results(typed):
    rows = [{**row, "State": "finished"} for row in rows_of(baseline=BASE, rms=LOWER, layer=LOWER)]
    for row in rows:
        row["State"] = "running" if row["arm"] == "layer" else row["State"]
    rows[0]["State"] = "crashed"
    rows[6]["val_loss"] = ""
    Path("runs.csv").write_text(csv_of(rows))
    table = typed("runs.csv")
    assert words_of(table) == {"rms": "BETTER", "layer": "INCOMPLETE"}
    reasons = {out["path"]: out["reason"] for out in table["left_out"]}
    assert reasons["runs.csv, line 2"] == "crashed" and reasons["runs.csv, line 14"] == "running"
    assert reasons["runs.csv"] == "seed 0 has no val_loss"
    assert table["cells"] == 2 and len(reasons) == 8  # the twin of the crashed run too
    assert statuses(table)["excluded"] == "WARN"


def test_a_log_is_read_at_its_last_step_or_at_the_one_that_is_named(typed):
    rows = [
        {**row, "step": step, "val_loss": row["val_loss"] + above}
        for row in rows_of(baseline=BASE, rms=LOWER)
        for step, above in ((1000, 0.4 if row["arm"] == "rms" else 0.2), (2000, 0.0))
    ]
    Path("log.csv").write_text(csv_of(rows))
    assert words_of(typed("log.csv")) == {"rms": "BETTER"}
    assert words_of(typed("log.csv", "--at", "1000")) == {"rms": "WORSE"}
    Path("log.csv").write_text(csv_of(rows[:-1]))
    table = typed("log.csv")
    assert words_of(table) == {"rms": "NOT COMPARABLE"} and statuses(table)["tokens"] == "FAIL"
    table = typed("log.csv", "--at", "2000")
    assert words_of(table) == {"rms": "BETTER"}
    assert "seed 5 has no val_loss at step 2000" in [out["reason"] for out in table["left_out"]]


def test_failures_count_and_never_vanish(typed):
    Path("a.csv").write_text(csv_of(rows_of(baseline=BASE, bad=["failed"] * 6, some=[*LOWER[:5], "nan"])))
    table = typed("a.csv", "--details")
    assert words_of(table) == {"bad": "DIVERGED", "some": "INCONCLUSIVE"}
    assert "1 of 6 failed" in table["rows"][2]["verdict"]
    Path("a.csv").write_text(csv_of(rows_of(baseline=["nan"] * 6, rms=LOWER)))
    table = typed("a.csv")
    assert words_of(table) == {"rms": "TOO FEW SEEDS"}
    assert "6 of 6 of the baseline failed" in table["rows"][1]["verdict"]


# ------------------------------------------------------------------------------------------------- nothing is silent

UNLIKE = {"tokens": ["1e9"] * 6 + ["1.1e9"] * 6, "steps": ["100"] * 11 + ["50"]}


@pytest.mark.parametrize(("column", "numbers"), UNLIKE.items())
def test_unlike_tokens_or_steps_are_not_comparable_unless_allowed(column, numbers, typed):
    rows = [{**row, column: number} for row, number in zip(rows_of(baseline=BASE, rms=LOWER), numbers, strict=True)]
    Path("a.csv").write_text(csv_of(rows))
    assert words_of(typed("a.csv")) == {"rms": "NOT COMPARABLE"}
    table = typed("a.csv", "--allow", "tokens")
    assert words_of(table) == {"rms": "BETTER"} and statuses(table)["tokens"] == "WAIVED"


def test_a_table_says_what_it_does_not_prove_and_for_which_text_its_words_hold(typed, capsys):
    Path("a.csv").write_text(csv_of(rows_of(baseline=BASE, rms=NEARLY)))
    table = typed("a.csv")
    assert statuses(table) == {"source": "WARN", "seeds": "PASS"}
    assert table["rows"][1]["verdict"] == "BETTER (for this evaluation text only)"
    assert main(["judge", "a.csv"]) == 0
    assert "for this evaluation text only" in " ".join(capsys.readouterr().out.split())


def test_an_arm_whose_runs_all_end_at_one_does_not_round_the_others(typed):
    arms = {"baseline": [0.62 + n / 999 for n in range(6)], "gate": [0.71 + n / 998 for n in range(6)]}
    Path("a.csv").write_text(csv_of(rows_of(**arms, solved=[1.0] * 6)))
    table = typed("a.csv", "--endpoint", "recall/accuracy", "--columns", "recall/accuracy=val_loss")
    assert words_of(table)["gate"] == "BETTER" and "rounded" not in table["checks"][0]["text"]


def test_runs_that_end_at_the_same_long_number_are_reported(typed):
    Path("a.csv").write_text(csv_of(rows_of(baseline=BASE, rms=[*LOWER[:5], LOWER[0]])))
    assert statuses(typed("a.csv"))["repeats"] == "WARN"
    Path("a.csv").write_text(csv_of(rows_of(baseline=BASE, rms=[3.23, 3.23, 3.22, 3.23, 3.22, 3.24])))
    table = typed("a.csv")
    assert "repeats" not in statuses(table) and "values are rounded to 0.01;" in table["checks"][0]["text"]


ROUNDED = [
    ({"baseline": [3.28] * 5, "rms": [3.28] * 5}, ["--delta-min", "0.05"], "EQUIVALENT"),
    ({"baseline": [2.31] * 5, "rms": [2.31] * 5}, [], "INCONCLUSIVE"),
    ({"baseline": [3.281, 3.279, 3.282, 3.278, 3.281], "rms": [3.28] * 5}, ["--delta-min", "0.001"], "INCONCLUSIVE"),
]


@pytest.mark.parametrize(("arms", "flags", "word"), ROUNDED)
def test_rounded_losses_are_no_less_noisy_than_rounding_made_them(arms, flags, word, typed):
    Path("a.csv").write_text(csv_of(rows_of(**arms)))
    assert words_of(typed("a.csv", *flags)) == {"rms": word}


GOOD = csv_of(rows_of(baseline=BASE, rms=LOWER))
CELLS = "arm,seed,val_loss,note\n" + "".join(
    f'{"x" if i % 2 else "baseline"},{i // 2},{"y" if i == 6 else 3.2 + i / 100},"two\nlines"\n' for i in range(12)
)
DIGEST = {"record_type": "experiment", "issue": 4802, "title": "Partial key offset", "wall_clock_speedup": "1.07–1.20x"}
LINES = [json.dumps({"arm": arm, "seed": seed, "val_loss": 3.2}) for seed in range(6) for arm in ("baseline", "x")]
REFUSED = [
    ("negative.csv", re.sub(r",3\.", ",-3.", GOOD), "val_loss cannot have this sign", "--better higher"),
    ("zero.csv", GOOD.replace("3.28012", "0.0"), "line 2: val_loss cannot have this sign", "failed"),
    ("perplexity.csv", re.sub(r",3\.", ",26.", GOOD), "val_loss cannot have this sign or size", "--better lower"),
    ("twice.csv", GOOD + "rms,5,3.2\n", "two rows are of one run", "one row per run"),
    ("cells.csv", CELLS, "cells.csv, line 14: val_loss is not a finite number", "without unit"),
    ("blank.jsonl", "\n\n".join(LINES).replace("3.2}", '"x"}', 6)[1:], "blank.jsonl is not a table", ""),
    ("value.jsonl", "\n\n".join([*LINES[:5], LINES[5].replace("3.2", '"x"')]), "line 11: val_loss", "without unit"),
    ("broken.jsonl", "\n".join([*LINES[:7], LINES[7][:-3], *LINES[8:]]), "broken.jsonl is not a table", ""),
    ("wide.csv", "arm,seed,val_loss\nbaseline,0,3,28\n", "wide.csv is not a table", "one row per run"),
    ("heads.csv", "arm,seed,seed,val_loss\na,0,0,3.2\n", "heads.csv is not a table", "one row per run"),
    ("empty.csv", "arm,seed,val_loss\n", "no rows", "one row per run"),
    ("seed.csv", GOOD.replace("rms,0,", "rms,first,"), "line 8: the seed is not a whole number", "seed=none"),
    ("underscore.csv", GOOD.replace("3.28012", "3_28"), "line 2: val_loss is not a finite number", ""),
    ("noarm.csv", GOOD.replace("rms,0,", ",0,"), "line 8: the arm is empty", "name the arm"),
    ("words.csv", "arm,seed\nbaseline,x\n", "no column of results", "one row per run"),
    ("digest.jsonl", json.dumps(DIGEST), "no column of results", "one row per run"),
    ("runs.xlsx", "", "runs.xlsx is not a table", ".csv"),
    ("lists.json", "[[1, 2], [3, 4]]", "lists.json is not a table", "one row per run"),
]


@pytest.mark.parametrize(("name", "text", "problem", "fix"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_is_no_table_of_results_is_refused_where_it_stands(name, text, problem, fix, typed):
    Path(name).write_text(text)
    lines = typed(name)
    assert problem in lines[0] and fix in lines[2]
    if lines[2].startswith("  try: nexus-ablate"):
        assert isinstance(typed(*shlex.split(lines[2].partition(", if it is")[0])[3:]), dict)


FLAGS = [
    (["--baseline", "rsm"], "does not have every column and arm", "--baseline rms"),
    (["--endpoint", "val_lss"], "does not have every column", "judge good.csv"),
    (["--columns", "seed=sed"], "does not have every column", "judge good.csv"),
    (["--allow", "text"], "no fairness condition", "one of seeds, source"),
    (["--columns", "arm"], "--columns takes NAME=COLUMN", "--columns seed=rng_seed"),
    (["--columns", "loss=val_loss", "--endpoint", "my_score"], "does not have every column", "judge good.csv"),
]


@pytest.mark.parametrize(("flags", "problem", "fix"), FLAGS)
def test_a_flag_that_the_table_does_not_have_is_answered_with_one_that_it_has(flags, problem, fix, typed):
    Path("good.csv").write_text(GOOD)
    lines = typed("good.csv", *flags)
    assert problem in lines[0] and fix in lines[2]
    if lines[2].startswith("  try: nexus-ablate"):
        assert words_of(typed(*shlex.split(lines[2])[3:])) != {}


def test_a_value_without_the_logarithm_that_its_measure_needs_is_refused(typed):
    name = "act/resid/kurtosis_token"
    Path("a.csv").write_text(csv_of(rows_of(baseline=BASE, rms=[*LOWER[:5], 0.0])).replace("val_loss", name))
    assert f"line 13: {name} cannot have this sign" in typed("a.csv", "--endpoint", name)[0]


# ------------------------------------------------------------------------------------------ which test, how often


def table_of(rng, runs, shift, is_paired, seeds=None):
    """The word about one arm, of runs whose seeds share most of their noise."""
    shared = rng.normal(0, 0.02, runs)
    rows = []
    for arm, move in (("baseline", 0.0), ("new", shift)):
        losses = 3.28 + move + shared * is_paired + rng.normal(0, 0.002 if is_paired else 0.02, runs)
        rows += [{"arm": arm, "val_loss": loss, "seed": seed} for seed, loss in enumerate(losses)]
    columns = {} if is_paired else {"seed": "none"}
    source = source_of("a.csv", {f"line {line}": row for line, row in enumerate(rows, 2)})
    return judge(source, Choice(columns=columns)).tables[0].rows[1].word


@pytest.mark.parametrize("is_paired", [True, False])
def test_tables_without_an_effect_rarely_claim_one_and_clear_effects_are_found_at_five_runs(is_paired):
    rng = np.random.default_rng(0)
    words = [table_of(rng, 5, 0.0, is_paired) for _ in range(200)]
    assert sum(word in ("BETTER", "WORSE") for word in words) <= 16  # 5%, and two standard errors
    clear = 0.01 if is_paired else 0.08
    words = [table_of(rng, 5, -clear, is_paired) for _ in range(50)]
    assert words.count("BETTER") >= 45


TESTS = [
    ((0, LOWER), "PASS", 6, "all six seeds shared"),
    ((1, LOWER), "PASS", 5, "five shared"),
    ((2, LOWER), "WARN", 6, "four shared"),
    ((100, LOWER), "WARN", 6, "none shared"),
]


@pytest.mark.parametrize(("new", "status", "n", "reason"), TESTS, ids=[row[-1] for row in TESTS])
def test_seeds_alone_choose_between_the_paired_test_and_welch_s(new, status, n, reason, typed):
    Path("a.csv").write_text(csv_of(rows_of(baseline=BASE, new=new)))
    table = typed("a.csv")
    assert statuses(table)["seeds"] == status and table["rows"][1]["n"] == n
    assert words_of(table) == {"new": "BETTER"}


def test_the_page_of_an_unpaired_test_has_its_intervals(typed):
    Path("a.csv").write_text(csv_of(rows_of(baseline=BASE, new=(2, LOWER))))
    typed("a.csv", "--html", "a.html")
    assert "BETTER" in Path("a.html").read_text()


def test_fewer_than_five_runs_give_an_interval_and_no_word(typed):
    Path("a.csv").write_text(csv_of(rows_of(baseline=BASE, few=LOWER[:4], one=LOWER[:1])))
    table = typed("a.csv")
    assert words_of(table) == {"few": "TOO FEW SEEDS", "one": "TOO FEW SEEDS"}
    assert table["rows"][1]["low"] is not None and table["rows"][2]["low"] is None


# ---------------------------------------------------------------------------------------------------- projects on W&B


@pytest.fixture
def wandb_server(tmp_path, monkeypatch):
    """A project with ten runs of each of three arms, and one that has not finished."""
    with serving_alone(tmp_path, monkeypatch) as server:
        rng = np.random.default_rng(0)
        for arm, shift in (("baseline", 0.0), ("rms", -0.5), ("t5", 0.0)):
            for seed in range(10):
                config = {"arm": {"value": arm}, "seed": {"value": seed}, "train": {"value": {"lr": 0.01}}}
                summary = {"val_loss": 3 + shift + 0.05 * float(rng.normal()), "eval/loss": 1.0 + seed / 7}
                run = ServedRun({"config": json.dumps(config)}, [], summary, complete=True, exitcode=0)
                server.runs[f"{arm}-{seed}"] = run
        server.runs["alive"] = ServedRun({"config": "{}"}, [], {}, complete=False)
        yield server


@pytest.mark.parametrize("place", ["wandb:me/nexus-ablate", "https://wandb.ai/me/nexus-ablate/workspace?nw=x"])
def test_the_runs_of_a_project_on_wandb_are_judged(place, wandb_server, typed):
    table = typed(place)
    assert words_of(table) == {"rms": "BETTER", "t5": "INCONCLUSIVE"}
    assert [out["reason"] for out in table["left_out"]] == ["running"] and not wandb_server.unknown


def test_a_run_that_diverged_counts_on_wandb_as_here(wandb_server, typed):
    for seed in range(10):
        config = json.dumps({"arm": {"value": "rms"}, "seed": {"value": seed}})
        run = ServedRun({"config": config}, [], {"status": "diverged"}, complete=True, exitcode=1)
        wandb_server.runs[f"rms-{seed}"] = run
    assert words_of(typed("wandb:me/nexus-ablate"))["rms"] == "DIVERGED"


@pytest.mark.slow
def test_a_project_on_wandb_that_cannot_be_judged_is_three_lines(wandb_server, typed, monkeypatch):
    assert "no such project, or your key" in typed("wandb:me/nowhere")[0]
    assert "entity and project" in typed("wandb:nexus-ablate")[0]
    wandb_server.behaviour = "error"
    assert typed("wandb:me/nexus-ablate")[0] == "error: W&B failed"
    monkeypatch.delenv("WANDB_API_KEY")
    assert "no key" in typed("wandb:me/nexus-ablate")[0]


@pytest.mark.parametrize(
    ("message", "refused"),
    [("HTTP 401: no", True), ("response 403", True), ("cannot reach 127.0.0.1:40123", False), ("port 54031", False)],
)
def test_a_port_that_has_the_digits_of_a_refusal_is_none(message, refused):
    assert bool(REFUSAL.search(message)) == refused


# ------------------------------------------------------------------------------------------------------------ its page

PAGE = (Path(__file__).parent.parent / "docs/judging_other_runs.md").read_text()
WORKED = re.findall(r"^```csv (\S+)\n(.*?)^```\n\n    nexus-ablate judge (.*?)\n\n> (.*?)$", PAGE, re.M | re.S)


@pytest.mark.parametrize(("name", "rows", "words", "answer"), WORKED, ids=[row[0] for row in WORKED])
def test_each_table_of_the_page_gets_the_answer_that_the_page_states(name, rows, words, answer, typed):
    Path(name).write_text(rows)
    assert typed(*shlex.split(words))["answer"] == answer
    assert len(WORKED) == 3
