"""The calibration panel: its table, the studies that train it, and how agreement is counted."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import yaml
from written_runs import Writer

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.comparison import calibration
from nexus_ablate.comparison.calibration import Share, fewest_right
from nexus_ablate.config.compose import compose, differences
from nexus_ablate.errors import ConfigError
from nexus_ablate.planning.design import expand
from nexus_ablate.planning.jobs import Runs
from nexus_ablate.report import panel_page
from nexus_ablate.study import panel as panels
from nexus_ablate.study.arm_overrides import key_of, merged
from nexus_ablate.study.definition import read_request, strata_of

ROOT = Path(__file__).resolve().parents[1]
PANEL = panels.read_panel()
FEMTO = PANEL.sizes["femto"].overrides
RATES, SEEDS = (0.003, 0.006), (0, 1, 2)
NOISE = (-0.001, 0.0, 0.001)


# ------------------------------------------------------------------------------------------------------------- table


def test_the_panel_has_enough_changes_of_both_kinds_and_new_ones_among_them():
    scored = [change for change in PANEL.changes.values() if change.is_scored]
    directional = [change for change in scored if not change.is_null]
    assert len(directional) >= 12 and len(scored) - len(directional) >= 5
    assert sum(not change.seen_before for change in directional) >= 6
    assert {change.expected for change in directional} == {"lower", "higher"}
    per_piece = 4 * max(change.margin for change in PANEL.changes.values())
    effects = [change.effect for change in PANEL.changes.values() if change.effect is not None]
    assert max(map(abs, effects)) < per_piece, "docs/panel.md says that a margin is larger than each of them"


@pytest.mark.parametrize("name", PANEL.changes)
def test_a_change_is_accepted_and_changes_what_it_names(name, capsys):
    change = PANEL.changes[name]
    assert main(["explain", *FEMTO, *change.baseline, *change.arm, "--json"]) == errors.OK
    assert json.loads(capsys.readouterr().out)["parameters"]["total"] > 0
    former = differences(compose([*FEMTO, *change.baseline]))
    changed = differences(compose([*FEMTO, *change.baseline, *change.arm]))
    for override in change.arm:
        key = key_of(override)
        assert changed.get(key) != former.get(key), f"{override} is the baseline's"


@pytest.mark.parametrize("name", PANEL.changes)
def test_a_change_that_does_not_take_the_rate_of_its_stratum_is_not_scored(name):
    change = PANEL.changes[name]
    arm = compose(merged(["optim.lr=0.048"], change.baseline, change.arm))
    assert (change.at == "default") == (arm.schedule.lr != 0.048)
    assert change.at != "default" or not change.is_scored


def test_each_study_trains_every_change_of_one_baseline_at_every_size_and_rate():
    trained = []
    for name in PANEL.studies():
        study = read_request([name]).study
        strata = strata_of(read_request([name]))
        assert len(strata) == sum(len(size.rates) for size in PANEL.sizes.values()) and study.seeds == PANEL.seeds
        assert [text for text in strata[-1].study.baseline if key_of(text) == "optim.lr"] == ["optim.lr=0.024"]
        for arm in study.arms:
            change = PANEL.changes[arm.name]
            assert (study.baseline, study.match, arm.overrides) == (change.baseline, change.match, change.arm)
        trained += [arm.name for arm in study.arms]
    assert sorted(trained) == sorted(PANEL.changes)


def test_arms_of_one_configuration_in_two_studies_are_published_with_the_same_losses():
    arms: dict[str, set[tuple[str, str]]] = {}
    for name in PANEL.studies():
        request = next(each for each in strata_of(read_request([name])) if each.study.stratum == "pico-0.006")
        for job in Runs(*expand(request.study), request).claims:
            arms.setdefault(job.path.name, set()).add((name, job.arm))
    losses: dict[tuple[str, str], dict] = {}
    for run in calibration.recorded().runs:
        losses.setdefault((run.study, run.arm), {})[run.size, run.rate, run.seed] = run.loss
    twins = [sorted(same) for same in arms.values() if len(same) > 1]
    assert len(twins) == 3 * len(PANEL.seeds), "docs/panel.md names three"
    for one, other in twins:
        assert losses[one] == losses[other]
    assert losses["panel_default", "baseline"] != losses["panel_final_softcap_30", "baseline"], "control"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"kind": "norms"}, "the change gelu of the calibration panel is not valid.*'norms'"),
        ({"wins": True}, "gelu.*unknown field `wins`"),
        ({"contested": None}, "gelu.*`bool`.*`null`"),
        ({"source": {"title": "A"}}, "gelu.*missing required field"),
        ({"arm": ["gelu"]}, "gelu.*\\$.arm"),
        ({"margin": 0.02}, "gelu.*`lower` and `higher` have none"),
        ({"expected": "equivalent"}, "gelu.*`equivalent` has a margin above 0"),
        ({"expected": "equivalent", "margin": 0.02}, "effect 0.043 lies outside the margin 0.02"),
        ({"expected": "lower"}, "the published effect 0.043 is not lower"),
    ],
)
def test_an_entry_that_is_not_valid_is_refused_by_name(edit, said):
    values = msgspec.to_builtins(PANEL)
    values["changes"] = {"gelu": values["changes"]["gelu"] | edit}
    with pytest.raises(ConfigError) as refused:
        panels.read_panel(yaml.safe_dump(values))
    lines = refused.value.lines()
    assert len(lines) == 3 and re.search(said, " ".join(lines)), lines


# ------------------------------------------------------------------------------------------------- planted outcomes

DIRECTIONAL = [name for name, change in PANEL.changes.items() if change.is_scored and not change.is_null]
WRONG, REVERSED = DIRECTIONAL[8:10], DIRECTIONAL[10:12]
FAILS = DIRECTIONAL[0]
"""Expected to be higher: an arm that fails to train at every rate agrees."""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Runs of a panel of 12 directional and 3 null changes at one size; returns their folder.

    Of the directional ones 8 agree, 2 have the other sign within the noise, 2 beyond it. Of the null ones the first
    lies inside its margin, the second across it, the third outside.
    """
    null = ["geglu", "layer_norm", "output_softcap"]
    changes = {name: PANEL.changes[name] for name in [*DIRECTIONAL[:12], *null]}
    small = msgspec.structs.replace(
        PANEL, sizes={"femto": panels.PanelSize(overrides=FEMTO, rates=[*RATES])}, changes=changes
    )
    (tmp_path / "panel.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(small), sort_keys=False))
    monkeypatch.setattr(panels, "conf_yaml", lambda name: yaml.safe_load((tmp_path / f"{name}.yaml").read_text()))
    monkeypatch.setattr(calibration, "conf_dir", lambda: tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    effects = {name: 0.05 if changes[name].expected == "higher" else -0.05 for name in DIRECTIONAL[:12]}
    effects |= {name: -0.01 * np.sign(effects[name]) for name in WRONG}
    effects |= {name: -effects[name] for name in REVERSED}
    effects |= {"geglu": 0.001, "layer_norm": 0.019, "output_softcap": 0.05}
    for rate in RATES:
        for study in small.studies():
            writer = Writer(tmp_path / "runs", f"{study}@femto-{rate:g}", steps=40)
            own = [name for name in changes if changes[name].study == study]
            for name in ["baseline", *own]:
                for seed in SEEDS:
                    noise = NOISE[seed] * (30 if name in WRONG else 3 if name == "layer_norm" else 1)
                    best = rate == (RATES[0] if name in null else RATES[1])  # each is read at its own
                    loss = 2.0 + effects.get(name, 0.0) + noise + (0 if best else 0.2)
                    state = "diverged" if name == FAILS else "finished"
                    writer.run(f"optim.lr={rate}", seed=seed, loss=loss, folder=name, state=state)
    return tmp_path / "runs"


def shown(capsys, *words: str) -> str:
    capsys.readouterr()
    assert main(["claims", "--panel", *words]) == errors.OK
    return capsys.readouterr().out


def test_planted_outcomes_give_the_accuracy_computed_by_hand(planted, capsys):
    out = shown(capsys, f"runs_dir={planted}")
    rows = {line.split("  ")[0]: " ".join(line.split()) for line in out.splitlines()}
    assert "8 of 12, 67% (35% to 90%) 1 of 3, 33% (1% to 91%) 9 of 15, 60% (32% to 84%)" in rows["femto"]
    assert "0 of 12" in rows['always "no difference" (femto)'] and "3 of 3" in rows['always "no difference" (femto)']
    newer = [name for name in DIRECTIONAL[:12] if (PANEL.changes[name].expected == "lower") == (
        PANEL.changes[name].newer == "arm")]  # fmt: skip
    assert f"{len(newer)} of 12" in rows['always "the newer one wins" (femto)']
    fresh = [name for name in DIRECTIONAL[:12] if not PANEL.changes[name].seen_before]
    right = set(fresh) - {*WRONG, *REVERSED}
    assert f"{len(right)} of {len(fresh)}" in rows["femto, not seen before"]
    reversals = re.escape(f"There are 2 reversals ({', '.join(REVERSED)}).")
    counts = rf"8 of the 10 whose own interval excludes 0 \(\d+ of them seen before\); the others [^.]+\. {reversals}"
    words = " ".join(out.split())
    assert re.search(counts, words)
    assert re.search(r"right for \d+; the two differ on \d+, of which small models have \d+ right: no evidence", words)
    assert "right (arm fails to train)" in rows[FAILS]
    for name, word in {
        "geglu": "right +0.001",
        "layer_norm": "not decided +0.019",
        "output_softcap": "wrong +0.050",
    }.items():
        assert word in rows[name]
    assert "To train what is missing" not in out


def test_twelve_changes_seldom_tell_four_fifths_from_a_coin_and_the_page_says_so(planted, capsys):
    sentence = "from 10 right on (83%); a true accuracy of 80% reaches that in 56% of such panels"
    assert sentence in " ".join(shown(capsys, f"runs_dir={planted}").split())
    assert Share(9, 12).interval == pytest.approx((0.428, 0.945), abs=1e-3)  # Clopper-Pearson, from tables
    assert Share(10, 12).interval[0] > 0.5
    assert "reaches that in 80% of such panels" in panel_page.power(20), "control: twenty can"
    assert fewest_right(3) == 4 and "cannot tell" in panel_page.power(3)


def test_a_change_without_all_its_runs_has_no_outcome(planted, capsys):
    status = next(planted.glob("panel_default@femto-0.003/post_norm/s1-*/status.json"))
    status.write_text(json.dumps(json.loads(status.read_text()) | {"state": "failed"}))
    for run in planted.glob("panel_ffn_gelu@femto-0.006/*"):  # as after the launch of its study
        shutil.rmtree(run)
    out = shown(capsys, f"runs_dir={planted}")
    assert "6 of 10" in out and re.search(r"nexus-ablate study panel_default +\d+ runs", out)


def test_rates_beyond_those_beside_the_best_one_are_not_needed(capsys, tmp_path, monkeypatch):
    def pruned(beside: int) -> str:
        losses: dict = {}
        for run in record.runs:
            losses.setdefault((run.study, run.arm, run.size), {}).setdefault(run.rate, []).append(run.loss)
        kept = []
        for run in record.runs:
            means = {rate: np.mean(seeds) for rate, seeds in losses[run.study, run.arm, run.size].items()}
            rates = sorted(means)
            best = rates.index(min(means, key=means.get))
            if PANEL.changes.get(run.arm) and PANEL.changes[run.arm].at == "default":
                kept += [run] if run.rate == rates[2] else []
            elif run.rate in rates[best - beside : best + 2] or run.rate == rates[-1]:  # qk_norm is read there
                kept.append(run)
        assert len(kept) < len(record.runs)
        record_of_kept = msgspec.structs.replace(record, runs=kept)
        (tmp_path / "panel_runs.json").write_bytes(msgspec.json.encode(record_of_kept))
        return shown(capsys, f"runs_dir={tmp_path / 'nothing'}")

    record = calibration.recorded()
    record = msgspec.structs.replace(record, runs=[run for run in record.runs if run.size == "femto"])
    monkeypatch.setattr(calibration, "conf_dir", lambda: tmp_path)
    (tmp_path / "panel_runs.json").write_bytes(msgspec.json.encode(record))
    of_all = shown(capsys, f"runs_dir={tmp_path / 'nothing'}")
    before, _, after = of_all.partition("Trained: 468 of 468 runs at femto")
    partly = pruned(beside=1)
    assert before in partly and after.partition(".")[2] in partly, "docs/panel.md says: the same rate for every arm"
    assert "16 of 18" in of_all and "16 of 18" not in pruned(beside=0), "control: the next lower rate might be better"


def test_what_is_not_trained_yet_is_said_and_no_agreement_is_stated_where_none_has_ended(planted, capsys):
    for name in DIRECTIONAL[:12]:
        if name == DIRECTIONAL[2]:
            partly = " ".join(shown(capsys, f"runs_dir={planted}").split())
            assert "femto (2 of 12 are not trained yet): 6 of 10 directional changes" in partly
        for arm in planted.glob(f"*/{name}"):
            shutil.rmtree(arm)
    out = shown(capsys, f"runs_dir={planted}")
    assert "1 of 3, 33%" in out and "have the published sign" not in out


def test_what_is_reversed_without_being_scored_and_what_three_seeds_cannot_decide_is_named(capsys, tmp_path):
    words = " ".join(shown(capsys, f"runs_dir={tmp_path / 'nothing'}").split())
    published = calibration.outcomes(PANEL, calibration.recorded().runs)
    found = [outcome for outcome in published if outcome.size == "femto"]
    unscored = [outcome for outcome in found if not outcome.change.is_scored]
    reversed_ = [outcome.name for outcome in unscored if outcome.agreement == "reversed"]
    assert reversed_ and f"that are not scored these are reversed: {', '.join(reversed_)}." in words
    wide = []
    for outcome in found:
        if outcome.change.is_null and outcome.high - outcome.low > 2 * outcome.change.margin:
            wide.append(outcome.name)
    assert wide and f"their intervals are wide: {', '.join(wide)}." in words
    counted = [outcome for outcome in found if outcome.change.is_scored or outcome.change.contested]
    directional = [outcome for outcome in counted if not outcome.change.is_null]
    right = sum(outcome.agreement == "right" for outcome in directional)
    assert f"contested ones counted too {right} of {len(directional)}" in words


def test_unscored_changes_that_are_not_trained_are_named(planted, capsys, tmp_path, monkeypatch):
    assert "contested" not in shown(capsys, f"runs_dir={planted}"), "this panel has no such change"
    monkeypatch.undo()
    record = calibration.recorded()
    kept = [run for run in record.runs if run.size == "femto" and run.arm != "mixln"]
    (tmp_path / "panel_runs.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(record, runs=kept)))
    monkeypatch.setattr(calibration, "conf_dir", lambda: tmp_path)
    words = " ".join(shown(capsys, f"runs_dir={tmp_path / 'nothing'}").split())
    assert "femto: of the changes that are not scored these are not trained yet: mixln." in words
    assert "femto, contested ones counted too" in words


@pytest.mark.parametrize("source", [{"model.py": "other"}, None])
def test_runs_by_two_versions_of_the_code_are_refused(planted, capsys, source):
    for env in planted.glob("panel_default@femto-0.006/post_norm/*/env.json"):
        env.write_text(json.dumps(json.loads(env.read_text()) | {"source": source}))
    assert main(["claims", "--panel", f"runs_dir={planted}"]) == errors.CONFIG
    assert "several versions of the code" in capsys.readouterr().err


def test_published_runs_show_the_same_where_there_are_no_others(planted, capsys, tmp_path, monkeypatch):
    out = shown(capsys, f"runs_dir={planted}")
    assert main(["claims", "--panel", "--publish", str(planted)]) == errors.OK
    again = shown(capsys, f"runs_dir={tmp_path / 'nothing'}")
    assert again == out.replace(f"From the runs in {planted}.", "From the published runs, commit abc.")
    (tmp_path / "panel_runs.json").write_text("{}")
    assert main(["claims", "--panel"]) == errors.CONFIG
    assert "panel_runs.json has no runs of the panel" in capsys.readouterr().err


def test_publishing_adds_the_runs_of_another_rate_and_refuses_those_of_other_code(planted, capsys, tmp_path):
    out, others = shown(capsys, f"runs_dir={planted}"), tmp_path / "others"
    others.mkdir()
    for folder in planted.glob("*@femto-0.006"):
        folder.rename(others / folder.name)
    for folder in (planted, others):
        ended = sum(1 for _ in folder.glob("*/*/s*"))
        assert main(["claims", "--panel", "--publish", str(folder)]) == errors.OK
        partly = shown(capsys, f"runs_dir={folder}")
        assert f"Trained: {ended} of " in partly and "8 of 12" not in partly
    assert "8 of 12" in shown(capsys, f"runs_dir={tmp_path / 'nothing'}")
    assert "Trained:" not in out
    for env in others.glob("*/*/*/env.json"):
        env.write_text(json.dumps(json.loads(env.read_text()) | {"source": {"model.py": "other"}}))
    assert main(["claims", "--panel", "--publish", str(others)]) == errors.CONFIG
    assert "the published runs of the panel are by other code" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["gelu"], ["--retry", "failed"], ["--check", "gates"]])
def test_the_panel_takes_nothing_but_a_folder(words, capsys):
    assert main(["claims", "--panel", *words]) == errors.CONFIG
    assert "--panel takes runs_dir= alone" in capsys.readouterr().err


def test_the_figure_has_each_scored_change_directed_by_what_is_published(planted):
    panel = panels.read_panel()
    found = calibration.outcomes(panel, runs := calibration.read_runs(panel, planted).runs)
    (axes,) = panel_page.figure(found).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    sides = {}
    for line in axes.lines:
        if line.get_marker() in ("o", "<", ">"):  # an arrow is a difference beyond the edge
            x, y = np.asarray(line.get_xydata())[0]
            sides[names[round(y)].partition(",")[0]] = x
    assert {name for name in DIRECTIONAL[:12] if sides[name] < 0} == {*WRONG, *REVERSED}
    page = panel_page.page(panel, runs)
    assert "8 of 12, 67% (35% to 90%)" in page and "right +0.001" in page and "panel.png" in page


def test_the_page_is_that_of_the_panel():
    assert (ROOT / "docs/panel.md").read_text() == panel_page.page(PANEL, calibration.recorded().runs), (
        "python scripts/docs.py"
    )
    for agreement in panel_page.agreements(PANEL, calibration.outcomes(PANEL, calibration.recorded().runs)):
        assert agreement in (ROOT / "README.md").read_text(), "python scripts/docs.py"
