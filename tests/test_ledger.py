"""The claims ledger: published, listed, marked when code changes, and compared with other runs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import yaml
from msgspec import structs
from scipy.stats import ttest_1samp
from test_claims import NOISE, around
from written_runs import Writer

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.comparison.claim import NOT_SHOWN
from nexus_ablate.comparison.ledger_entry import LedgerEntry, LedgerStratum
from nexus_ablate.comparison.verdict import NOT_COMPARABLE
from nexus_ablate.planning import ledger
from nexus_ablate.provenance import source_hash, source_hashes
from nexus_ablate.report import ledger_page
from nexus_ablate.study.endpoint import Endpoint

ROOT = Path(__file__).resolve().parents[1]
EXPECTS = [{"arm": "norm=layer", "endpoint": "val_loss", "expected": "equivalent"}]
SMALL = tuple(n / 20 for n in NOISE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty ledger, which takes the small studies of these tests for the shipped ones."""
    path = tmp_path / "claims"
    path.mkdir()
    monkeypatch.setattr(ledger, "folder", lambda: path)
    monkeypatch.setattr(ledger, "departures", lambda request: [])
    return path


def runs_of_a_claim(
    root: Path, shift: float = 0.0, noise: tuple[float, ...] = SMALL, expected: str = "equivalent"
) -> Path:
    """Runs of the shipped study `rms_vs_layer`, as they would lie after it was trained."""
    writer = Writer(root, "rms_vs_layer")
    env = {"source": source_hashes()}
    for seed in range(5):
        writer.run(seed=seed, loss=around(2.0, noise)[seed], env=env)
        writer.run("norm=layer", seed=seed, loss=around(2.0 + shift, noise[::-1])[seed], env=env)
    margin = {"val_loss": {"delta_min": 0.02}}
    writer.plan(("norm=layer",), claim="c", expects=[EXPECTS[0] | {"expected": expected}], endpoints=margin)
    return root / "rms_vs_layer"


def published(folder: Path, runs: Path) -> dict:
    assert main(["claims", "--publish", str(runs)]) == 0
    return json.loads((folder / "rms_vs_layer.json").read_text())


def page_of(entry: dict | None = None) -> str:
    """The page of what is published, or of one entry as it is in its file."""
    entries = {entry["study"]: msgspec.convert(entry, LedgerEntry)} if entry else ledger.entries()
    return ledger_page.page(ledger.claims(), entries, ledger.designs())


def test_an_entry_has_the_outcome_the_numbers_and_what_made_them(tmp_path, folder, capsys):
    entry = published(folder, runs_of_a_claim(tmp_path))
    assert entry["outcome"] == "SUPPORTED"
    assert entry["command"] == "nexus-ablate claims rms_vs_layer"
    assert entry["source"] == source_hash()
    assert entry["made"]["validation_text"] == "validation"
    assert entry["strata"][""]["runs"]["norm=layer"]["3"]["val_loss"] == pytest.approx(around(2.0, SMALL[::-1])[3])
    assert main(["claims"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "rms_vs_layer weaker SUPPORTED" in shown
        and "sinks_one_layer different not trained yet" in shown
        and "older code" not in shown
    )


def test_the_hours_of_an_entry_do_not_count_that_a_run_had_to_wait(tmp_path, folder):
    hours = published(folder, runs_of_a_claim(tmp_path))["hours"]
    path = tmp_path / "rms_vs_layer/norm=layer"
    summary = next(path.glob("s3-*/summary.json"))
    figures = json.loads(summary.read_text())
    summary.write_text(json.dumps(figures | {"seconds": figures["seconds"] + 3600}))
    assert hours > 0 and published(folder, tmp_path / "rms_vs_layer")["hours"] == hours


def test_every_run_of_a_tuned_study_counts_once(tmp_path, folder):
    writer, grid, tuning_seeds = Writer(tmp_path, "rms_vs_layer"), (0.001, 0.003, 0.006, 0.012), (1001, 1002)
    for arm, best, beside in (((), 0.003, (0.00212, 0.00424)), (("norm=layer",), 0.006, (0.00424, 0.00849))):
        for lr in {*grid, *beside}:
            rate = () if lr == 0.003 else (f"optim.lr={lr}",)
            seeds = [*tuning_seeds] * (lr in grid) + [*range(5)] * (lr in (best, *beside))
            for seed in seeds:
                writer.run(*arm, *rate, seed=seed, loss=2 + math.log(lr / best) ** 2, env={"source": source_hashes()})
    plan = {"lr_grid": [*grid], "tuning_seeds": [*tuning_seeds], "claim": "c", "expects": EXPECTS}
    writer.plan(("norm=layer",), endpoints={"val_loss": {"delta_min": 0.02}}, **plan)
    entry = published(folder, tmp_path / "rms_vs_layer")
    assert entry["runs"] == len(writer.paths) == 2 * (8 + 15)
    seconds = [json.loads((path / "summary.json").read_text())["seconds"] for path in writer.paths]
    assert entry["hours"] * 3600 == pytest.approx(sum(seconds))

    page = page_of(entry)
    assert "- best learning rates: baseline 0.003, norm=layer 0.006" in page

    (path,) = (tmp_path / "rms_vs_layer").glob("norm=layer,optim.lr=0.001/s1001-*")  # it breaks off early
    file = path / "status.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"state": "diverged", "reason": "loss"}))
    (path / "summary.json").unlink()
    assert published(folder, tmp_path / "rms_vs_layer")["hours"] == entry["hours"]


def test_a_claim_that_was_changed_after_the_first_run_says_so(tmp_path, folder):
    runs = runs_of_a_claim(tmp_path)
    published(folder, runs)
    assert "- amended" not in page_of() and ", amended" not in page_of()
    record = runs / "study.yaml"
    change = {"when": "2020-01-02T00:00:00+00:00", "changes": ["claim: b -> c"]}
    record.write_text(yaml.safe_dump(yaml.safe_load(record.read_text()) | {"amendments": [change]}))
    published(folder, runs)
    page = page_of()
    assert "- amended 2020-01-02T00:00:00+00:00: claim: b -> c" in page and "| **SUPPORTED, amended** |" in page
    row = ledger_page.decided(ledger.claims(), ledger.entries()).splitlines()[-1]
    assert "[SUPPORTED, amended]" in row and re.search(
        r"\(norm=layer ends [\d.]+ nats per token (lower|higher)\) \|$", row
    )


def test_a_correction_over_the_ledger_counts_every_test_and_drops_what_it_cannot_hold():
    def entry(outcome, *tests):
        return SimpleNamespace(outcome=outcome, expectations=[SimpleNamespace(p=p, outcome=word) for p, word in tests])

    strong, weak = entry("SUPPORTED", (1e-6, "SUPPORTED")), entry("CONTRADICTED", (0.04, "CONTRADICTED"))
    counted = entry("SUPPORTED", (None, "SUPPORTED"))  # by failures alone
    both = {"strong": True, "weak": True}
    assert ledger_page.survives_correction({"strong": strong, "weak": weak, "counted": counted}) == both
    undecided = entry("NOT SHOWN", (0.5, "NOT SHOWN"), (0.2, "NOT SHOWN"))
    survives = ledger_page.survives_correction({"strong": strong, "weak": weak, "undecided": undecided})
    assert survives == {"strong": True, "weak": False}, "two more tests, and 0.04 is no longer below 5% / 3"
    half = entry("SUPPORTED", (1e-6, "SUPPORTED"), (0.04, "SUPPORTED"))
    assert ledger_page.survives_correction({"half": half, "undecided": undecided}) == {"half": False}, (
        "all that decided must stand"
    )


def test_a_published_claim_has_its_fidelity_and_the_p_of_each_test(tmp_path, folder):
    entry = published(folder, runs_of_a_claim(tmp_path))
    assert entry["settings"] == {"": "SUPPORTED"} and 0 < entry["expectations"][0]["p"] < 0.05
    page = page_of()
    assert (
        "Fidelity: weaker, models of at most 0.2 million parameters; nothing is read as 0.015 nats." in page
        and "| weaker | [`rms" in page
    )
    assert "Of the 1 outcome that tests of differences decided, 1 survive Holm" in page
    (again,) = ledger.entries().values()
    assert ledger_page.sharing_a_baseline({"b": again, "a": again}) == [["a", "b"]]


@pytest.mark.parametrize(
    ("expected", "shift", "outcome"),
    [
        ("equivalent", 0.0, "SUPPORTED"),
        ("equivalent", 0.1, "CONTRADICTED"),
        ("higher", 0.05, "SUPPORTED"),
        ("higher", 0.0, "CONTRADICTED"),  # it lies inside the margin
    ],
)
def test_the_published_p_is_that_of_the_test_that_decided(tmp_path, folder, expected, shift, outcome):
    runs = runs_of_a_claim(tmp_path, shift, expected=expected)
    (found,) = published(folder, runs)["expectations"]
    differences = np.array(around(2.0 + shift, SMALL[::-1])) - np.array(around(2.0, SMALL))
    if expected == "higher" and shift:
        p = ttest_1samp(differences, 0).pvalue
    elif shift:
        p = ttest_1samp(differences, 0.02, alternative="greater").pvalue
    else:
        sides = ((-0.02, "greater"), (0.02, "less"))
        p = max(ttest_1samp(differences, margin, alternative=side).pvalue for margin, side in sides)
    assert found["outcome"] == outcome and found["p"] == pytest.approx(p)


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("stated: It is as good", "restates a claim, and doesn't say how near it is to the stated one"),
        ("fidelity: {nearer: it is}", "fidelity takes same, weaker or different with the reason"),
        ("depends_on: {depth: [n_layers-2, n_layers-9]}", "the study has no stratum of this name"),
    ],
)
def test_a_claim_without_its_fidelity_or_about_a_stratum_that_is_none_is_refused(
    tmp_path, capsys, monkeypatch, line, refused
):
    monkeypatch.chdir(tmp_path)  # the checkout's runs/ may have a study of this name
    text = (
        "question: is it?\nclaim: it is\nbaseline: model=femto\nstrata: {model.n_layers: [2, 4]}\narms: [norm=layer]\n"
    )
    study = tmp_path / "mine.yaml"
    study.write_text(f"{text}stated: It is\nfidelity: {{same: it is}}\n")
    assert main(["plan", str(study)]) == 0
    study.write_text(f"{text}{line}\n")
    capsys.readouterr()
    assert main(["plan", str(study)]) == errors.CONFIG
    shown = capsys.readouterr().err
    assert refused in shown and "  try: " in shown


@pytest.mark.slow
def test_the_baseline_of_a_tuned_study_is_trained_again_at_its_own_rate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    stratum = LedgerStratum([], {}, {"baseline": {"0": {"val_loss": 1.5}}}, {"baseline": 0.006})
    changes = {"study": "aspect", "claim": ledger.claims()["aspect"].claim, "strata": {"": stratum}}
    entry = structs.replace(ledger.entries()["qk_norm"], **changes)
    monkeypatch.setattr(ledger, "entries", lambda: {"aspect": entry})
    assert main(["claims", "--check", "aspect"]) == 0
    assert "DIFFERS  baseline s0 val_loss" in capsys.readouterr().out
    (config,) = tmp_path.rglob("config.yaml")
    assert "lr: 0.006" in config.read_text()


def test_the_page_defines_the_measures_beside_the_loss():
    page = page_of()
    sections = dict(section.split("\n", 1) for section in page.split("\n## ")[1:])
    definition = "- `attn/max_logit`: largest magnitude of a scaled score with its position bias, before the cap"
    assert definition in sections["softmax_stability"]
    assert "- `val_loss`:" not in page


def test_code_that_changed_since_marks_the_entry_and_undoing_the_change_unmarks_it(
    tmp_path, folder, capsys, checkout, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    published(folder, runs_of_a_claim(tmp_path))
    line = 'NORM: Registry[nn.Module] = Registry("norm")\n'
    edited = f"{line}CHANGED = 1\n"
    for before, after, marked in ((line, edited, True), (edited, line, False)):
        checkout.edit("nexus_ablate/axes/norm.py", before, after)
        capsys.readouterr()
        assert main(["claims"]) == 0
        assert ("older code: commit" in " ".join(capsys.readouterr().out.split())) is marked


@pytest.mark.parametrize(("shift", "agree"), [(0.0, 1), (0.05, 0)])
def test_other_runs_replicate_if_their_difference_is_the_published_one(tmp_path, folder, capsys, shift, agree):
    published(folder, runs_of_a_claim(tmp_path))
    assert main(["claims", "--check", str(runs_of_a_claim(tmp_path / "again", shift))]) == 0
    shown = capsys.readouterr().out
    assert f"replicates {agree} of 1 differences" in shown
    assert ("agrees" in shown) is bool(agree) and ("DIFFERS" in shown) is not bool(agree)


def test_a_replication_says_what_else_was_different(tmp_path, folder, capsys):
    entry = published(folder, runs_of_a_claim(tmp_path))
    assert main(["claims", "--check", str(tmp_path / "rms_vs_layer")]) == 0
    assert "a replication with" not in capsys.readouterr().out, "the same text, setting and code"
    made = entry["made"] | {"validation_text": "another", "torch": "1.0", "processor": "abacus"}
    changed = {"made": made, "regime": "n_layers 96", "source": "former"}
    (folder / "rms_vs_layer.json").write_text(json.dumps(entry | changed))
    assert main(["claims", "--check", str(tmp_path / "rms_vs_layer")]) == 0
    shown = capsys.readouterr().out
    lines = ("setting: n_layers 2, ", "validation text", "code: commit .+; published: ", "torch: 2; published: 1.0")
    assert all(re.search(rf"a replication with (another|other) {line}", shown) for line in lines), shown
    assert "; published: n_layers 96" in shown and re.search("with another processor: .+; published: abacus", shown)


def test_runs_without_a_study_are_named_by_their_folder(tmp_path, folder, capsys):
    writer = Writer(tmp_path, "mine")
    for seed in range(2):
        writer.run(seed=seed)
        writer.run("norm=layer", seed=seed, loss=2.1)
    assert main(["claims", "--check", str(tmp_path / "mine")]) == errors.CONFIG
    assert f"got: {tmp_path / 'mine'}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_baseline_run_trained_again_is_compared_with_the_published_one_of_its_stratum(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    entries = ledger.entries()
    runs = entries["qk_norm"].strata["narrow"].runs["baseline"]
    assert main(["claims", "--check", "qk_norm"]) == 0
    shown = capsys.readouterr().out
    assert len([line for line in shown.splitlines() if line.startswith(("equal", "DIFFERS"))]) == 2
    (line,) = [line for line in shown.splitlines() if "baseline s0 val_loss" in line]
    value, former = (float(number) for number in re.findall(r"\d+\.\d+", line))
    assert former == runs["0"]["val_loss"]
    if entries["qk_norm"].source == source_hash():
        assert value == pytest.approx(former, rel=0.03)  # another processor rounds in another way
    differs, cause = (
        any(line.startswith(word) for line in shown.splitlines()) for word in ("DIFFERS", "published with")
    )
    assert differs is cause
    (config,) = tmp_path.rglob("config.yaml")
    assert "  threads: 1\n" in config.read_text()  # as published: two threads add up in another order
    # control: a published number that the run does not end with
    runs["0"]["val_loss"] += 1e-9
    monkeypatch.setattr(ledger, "entries", lambda: entries)
    assert main(["claims", "--check", "qk_norm"]) == 0
    assert "DIFFERS  baseline s0 val_loss" in capsys.readouterr().out


@pytest.mark.slow
def test_a_claim_is_trained_and_judged_by_one_command(tmp_path, tiny_run, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["claims", "gates", *tiny_run("model.n_layers=1"), "seeds=0,1", "--workers", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "preliminary: " in shown and "a sigmoid gate lowers sinks" in shown and "gate=norm" in shown


def test_of_a_study_that_has_changed_since_no_run_is_trained_again(tmp_path, folder, capsys):
    entry = published(folder, runs_of_a_claim(tmp_path)) | {"claim": "RMSNorm is better"}
    (folder / "rms_vs_layer.json").write_text(json.dumps(entry))
    assert main(["claims", "--check", "rms_vs_layer"]) == errors.CONFIG
    said = "this study has changed since it was published\n  got: rms_vs_layer\n  try: nexus-ablate claims rms_vs_layer"
    assert said in capsys.readouterr().err


def test_a_claim_that_is_not_shown_says_what_would_decide_it(tmp_path, folder):
    noisy = runs_of_a_claim(tmp_path, 0.015, NOISE)
    assert published(folder, noisy)["outcome"] == "NOT SHOWN"
    page = page_of()
    assert re.search(r"to decide it at differences of this size: about \d+ seeds, [\d.]+ core hours", page)


UNKNOWN = "how many seeds would decide this cannot be estimated"


@pytest.mark.parametrize(
    ("verdict", "expected", "said"),
    [
        ("NOT COMPARABLE", "equivalent", "more seeds would not decide this, but a fair design might"),
        ("UNSTABLE", "equivalent", UNKNOWN),
        ("INCONCLUSIVE", "fails", UNKNOWN),
        (
            "INCONCLUSIVE",
            "equivalent",
            "to decide this, more than 1000 seeds, more validation text, or a design with larger differences",
        ),
    ],
)
def test_a_claim_that_no_number_of_seeds_is_known_to_decide_says_so(tmp_path, folder, verdict, expected, said):
    entry = published(folder, runs_of_a_claim(tmp_path, 0.015, NOISE))
    (one,), (_, row) = entry["expectations"], entry["strata"][""]["rows"]
    one |= {"seeds": None, "expected": expected}
    row |= {"verdict": verdict} if verdict == "INCONCLUSIVE" else {"verdict": verdict, "delta": None}
    page = page_of(entry)
    assert [line for line in page.splitlines() if " decide " in line][1:] == [f"- {said}: norm=layer"]


def test_the_readme_has_the_published_outcomes():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert ledger_page.decided(ledger.claims(), ledger.entries()) in readme, "python scripts/docs.py"
    stated = {claim.stated for claim in ledger.claims().values()}
    assert f"{len(ledger.claims())} studies of {len(stated)} claims" in readme
    row = next(line for line in readme.splitlines() if "](docs/claims.md#rms_vs_layer) (" in line)
    said, tested, outcome = row.strip("| ").split(" | ")
    assert said == "RMSNorm loses no quality against LayerNorm." and tested.startswith("At 20 tokens per parameter")
    assert outcome.startswith("[SUPPORTED IN 1 OF 3 SETTINGS, not shown in 2 (unequal in 1)]")
    assert "(pico: " in outcome, "the difference is of the setting that has the outcome"


def incomplete(runs):
    next(runs.glob("norm=layer/s4-*/status.json")).unlink()


def test_a_claim_whose_pairs_were_lost_to_failed_runs_is_not_shown(tmp_path, folder):
    runs = runs_of_a_claim(tmp_path, shift=1.0)
    for status in (runs / "baseline").glob("s[34]-*/status.json"):
        status.write_text(json.dumps(json.loads(status.read_text()) | {"state": "diverged"}))
        for name in ("summary.json", "evaluation.jsonl"):
            (status.parent / name).unlink()
    assert published(folder, runs)["outcome"] == "NOT SHOWN"


def with_added_seeds(runs):
    record = yaml.safe_load((runs / "study.yaml").read_text())
    (runs / "study.yaml").write_text(yaml.safe_dump(record | {"added": [{"when": "2020-01-01", "seeds": [4]}]}))


def without_a_claim(runs):
    record = yaml.safe_load((runs / "study.yaml").read_text())
    (runs / "study.yaml").write_text(yaml.safe_dump({k: v for k, v in record.items() if k not in ("claim", "expects")}))


@pytest.mark.parametrize(
    ("spoil", "reasons"),
    [
        (incomplete, ("too few runs",)),
        (with_added_seeds, ("an exploratory result is not published", "had been looked at (4)")),
        (without_a_claim, ("only a shipped study with a claim",)),
    ],
)
def test_what_does_not_stand_is_not_published(tmp_path, folder, capsys, spoil, reasons):
    runs = runs_of_a_claim(tmp_path, shift=1.0)
    spoil(runs)
    assert main(["claims", "--publish", str(runs)]) == errors.CONFIG
    problem = capsys.readouterr().err
    assert all(reason in problem for reason in reasons), problem
    assert not list(folder.iterdir())


def test_the_page_and_its_figure_are_made_of_the_entries(tmp_path, folder):
    published(folder, runs_of_a_claim(tmp_path))
    page = page_of()
    assert "**SUPPORTED**" in page and "| `gates` |" in page
    assert re.search(r"- 5 seeds, 10 runs, [\d.]+ core hours: `nexus-ablate claims rms_vs_layer`", page)
    assert "- WARN learning_rate: one learning rate for all (0.003)" in page, "what a comparison warns of"
    for margin in (0.02, 0.0):  # 0: the study declares none
        (entry,) = ledger.entries().values()
        entry.strata[""].margins["val_loss"] = margin
        (axes,) = ledger_page.figure(entry).axes
        assert [label.get_text() for label in axes.get_yticklabels()] == ["norm=layer (expected:\u00a0equivalent)"]


def test_the_picture_of_a_claim_shows_each_expected_difference_in_its_own_unit():
    for name, entry in ledger.entries().items():
        figure = ledger_page.figure(entry)
        drawn = [text.get_text() for axes in figure.axes for text in axes.texts] if figure else []
        expected = [each for each in entry.expectations if each.expected not in ledger_page.OF_TRAINING]
        assert len(drawn) == len(expected), name
        words = {each.outcome.lower() for each in expected}
        assert set(drawn) - words <= {"not comparable", "unstable"}, "why there is no interval"
    figure = ledger_page.figure(ledger.entries()["softmax_stability"])
    units = {axes.get_title(loc="left"): axes.get_xlabel() for axes in figure.axes}
    assert units["val_loss"] == "difference, nats per token" and len(units) == 4
    assert "not shown" in [text.get_text() for text in figure.axes[-1].texts], "what the outcome rests on"
    entry = ledger.entries()["placement"]
    row = entry.row(entry.expectations[0])
    row.delta, row.verdict = None, NOT_COMPARABLE
    assert ledger_page.figure(entry).axes[0].texts[0].get_text() == "not comparable"


def test_names_of_arms_leave_a_third_of_each_picture_to_the_intervals():
    for name, entry in ledger.entries().items():
        figure = ledger_page.figure(entry)
        if figure is not None:
            figure.draw_without_rendering()
            assert min(axes.get_position().width for axes in figure.axes) > 1 / 3, name


def test_the_page_has_every_measured_difference_how_many_parts_hold_and_whether_training_was_early():
    page = page_of()
    sections = {text.partition("\n")[0]: text for text in page.split("\n## ")[1:]}
    for name, entry in ledger.entries().items():
        held = sum(expected.outcome == "SUPPORTED" for expected in entry.expectations)
        (line,) = [line for line in page.splitlines() if line.startswith("|") and f"[`{name}`]" in line]
        assert f"| {held} of {len(entry.expectations)} |" in line
        rows = [row for stratum in entry.strata.values() for row in stratum.rows]
        assert ("early training" in line) is any("early training" in row.verdict for row in rows)
        for row in rows:
            if row.delta is not None:
                assert Endpoint(row.endpoint).signed(row.delta) in sections[name], (name, row)


def test_the_page_has_each_study_s_design_and_a_picture_where_a_difference_was_expected():
    page = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
    sections = {text.partition("\n")[0]: text for text in page.split("\n## ")[1:]}
    drawn = {name for name, entry in ledger.entries().items() if ledger_page.figure(entry) is not None}
    assert {name for name, text in sections.items() if "![" in text} == drawn
    assert "final_norm" in drawn and "depth" not in drawn, "whether a run trains is no interval"
    assert "Design: Heads of 16 and one of 128" in page_of()


def test_more_seeds_of_a_tuned_study_are_not_tuned_again(tmp_path, folder):
    entry = published(folder, runs_of_a_claim(tmp_path, 0.015, NOISE)) | {"runs": 30, "hours": 3.0}  # 20 of them tuned
    entry["expectations"][0]["seeds"] = 10
    page = page_of(entry)
    assert "about 10 seeds, 4.0 core hours" in page


def test_the_published_page_is_that_of_the_published_numbers():
    page = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
    begins, _, former = page.partition("\n## The first edition\n")
    assert begins == page_of(), "python scripts/docs.py"
    said = {row.split(" | ")[0].strip("| `") for row in former.splitlines() if row.startswith("| `")}
    assert len(said) == 29


def test_no_published_outcome_rests_on_a_preliminary_or_exploratory_verdict():
    for name, entry in ledger.entries().items():
        for expected in entry.expectations:
            verdict, decided = entry.row(expected).verdict, expected.outcome != NOT_SHOWN
            assert not (decided and verdict.startswith(("preliminary", "exploratory"))), name
