"""From directories of runs to words, as a reader of `compare` sees them: a run is used or listed with the reason."""

from __future__ import annotations

import json
import math
import shlex
import shutil

import numpy as np
import pytest
from written_runs import Writer

from nexus_ablate.cli import main
from nexus_ablate.comparison.statistics import sidak
from nexus_ablate.track import comparison_run

BASE = [2.00, 2.02, 1.98, 2.01, 1.99]
WORSE = [2.11, 2.12, 2.09, 2.11, 2.08]
BLOCKS = {"windows": 32, "blocks": 16}


@pytest.fixture
def writer(tmp_path):
    return Writer(tmp_path / "runs")


@pytest.fixture
def study(writer):
    """A planned study of a baseline and a worse arm, five seeds each."""
    writer.arm(losses=BASE, **BLOCKS)
    writer.arm("norm=layer", losses=WORSE, train_noise="x", **BLOCKS)
    writer.plan(("norm=layer",), endpoints=[{"name": "val_loss", "delta_min": 0.01}])
    return writer


@pytest.fixture
def said(capsys):
    """What `compare --json -` says of a folder."""

    def compare(folder, *flags):
        capsys.readouterr()
        status = main(["compare", str(folder), "--json", "-", *flags])
        out, err = capsys.readouterr()
        assert status == 0, err
        return json.loads(out)

    return compare


def table(said, number=0):
    return said["tables"][number]


def row(said, arm, number=0, endpoint="val_loss"):
    return next(r for r in table(said, number)["rows"] if r["arm"] == arm and r["endpoint"] == endpoint)


def check(said, name):
    return next(c for c in table(said)["checks"] if c["name"] == name)


def left_out(said):
    return {out["path"].split("/")[-1].split("-")[0]: out["reason"] for out in table(said)["left_out"]}


# ------------------------------------------------------------------------------------------------------ sanity matrix


@pytest.mark.parametrize(
    ("losses", "noise", "word", "reason"),
    [
        ([*BASE[:4], BASE[4] * (1 + 2**-52)], "", "EQUIVALENT", "one loss differs in its last bit"),
        ([6.0] * 5, "x", "WORSE", "a crippled arm that ended above its start keeps its loss"),
    ],
)
def test_losses_have_their_word(writer, said, losses, noise, word, reason):
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=losses, train_noise=noise)
    writer.plan(("norm=layer",), endpoints=[{"name": "val_loss", "delta_min": 0.02}])
    assert row(said(writer.root / "study"), "norm=layer")["word"] == word, reason


def test_the_arm_as_baseline_negates_the_difference_and_is_exploratory(study, said):
    folder = study.root / "study"
    forth = row(said(folder), "norm=layer")
    back = row(said(folder, "--baseline", "norm=layer"), "baseline")
    assert back["delta"] == pytest.approx(-forth["delta"]) and back["low"] == pytest.approx(-forth["high"])
    assert back["verdict"] == "BETTER (exploratory)" and forth["verdict"] == "WORSE"


def test_order_and_further_files_change_nothing(study, said):
    folder = study.root / "study"
    before = said(folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "norm=layer" / "plot.png").write_bytes(b"")
    for path in folder.glob("*/s0-*"):
        shutil.move(path, path.with_name("away"))
        shutil.move(path.with_name("away"), path)
    assert said(folder) == before


def test_a_cosmetic_arm_is_identical_at_the_seeds_that_both_have(writer, said):
    writer.arm(losses=BASE[:2])
    writer.arm(losses=BASE, folder="renamed")
    cosmetic = row(said(writer.root / "study"), "renamed")
    assert cosmetic["word"] == "IDENTICAL" and "at 2 seeds" in cosmetic["sentence"]


def test_a_speed_differs_where_every_loss_is_the_same_and_depends_on_no_text(writer, said):
    writer.arm(losses=BASE)
    for seed, loss in enumerate(BASE):
        writer.run(seed=seed, loss=loss, folder="faster", summary={"tokens_per_second": 6400.0 + seed})
    writer.plan(endpoints=["tokens_per_second"], arms={"faster": []})
    result = said(writer.root / "study")
    assert row(result, "faster", endpoint="tokens_per_second")["word"] == "BETTER"
    assert "text" not in [check["name"] for check in table(result)["checks"]]


def test_an_arm_that_is_only_read_otherwise_is_not_identical_on_what_is_read(writer, said):
    endpoint = "extrapolation/non_overlapping/4"
    for seed, loss in enumerate(BASE):
        for folder, at_four_times in (("baseline", loss), ("wide", loss), ("window", loss - 0.5 + 0.001 * seed)):
            read = {"extrapolation": {"non_overlapping": {"4": at_four_times}}}
            changes = {"baseline": (), "wide": ("window=8",), "window": ("window=4",)}[folder]
            writer.run(*changes, seed=seed, loss=loss, folder=folder, summary=read)
    writer.plan(endpoints=["val_loss", endpoint], arms={"window": ["window=4"], "wide": ["window=8"]})
    result = said(writer.root / "study")
    assert row(result, "window")["word"] == row(result, "wide", endpoint=endpoint)["word"] == "IDENTICAL"
    assert row(result, "window", endpoint=endpoint)["word"] == "BETTER"


def test_a_folder_is_compared_from_within_and_several_studies_are_not_one_table(study, said, monkeypatch, capsys):
    Writer(study.root, "other").arm(losses=WORSE)
    monkeypatch.chdir(study.root / "study")
    assert row(said("."), "norm=layer") == row(said("norm=layer"), "norm=layer") == row(said(".."[:1]), "norm=layer")
    assert main(["compare", ".."]) == 2
    assert "several folders of runs" in (error := capsys.readouterr().err)
    assert main(shlex.split(error.splitlines()[-1].partition("try: ")[2])[1:3]) == 0


@pytest.mark.parametrize("planned", [True, False])
def test_an_arm_that_was_put_aside_is_not_taken_for_the_study(study, said, planned):
    aside = Writer(study.root / "study", "bad")
    for seed, loss in enumerate(WORSE):
        aside.run("norm=none", seed=seed, loss=loss)
    if not planned:
        (study.root / "study/study.yaml").unlink()
    result = said(study.root / "study")
    assert table(result)["name"] == "study" and row(result, "norm=layer")["word"] == "WORSE"


def test_hidden_folders_are_no_runs_to_compare(study, said):
    shutil.copytree(study.root / "study", study.root / ".study-old")
    assert table(said(study.root))["name"] == "study"


# --------------------------------------------------------------------------------------------------------- the level


def test_planned_arms_endpoints_and_settings_share_five_percent(writer, said):
    for setting in ("a", "b"):
        each = Writer(writer.root, f"study@{setting}")
        each.arm(losses=BASE)
        each.arm("norm=layer", losses=WORSE)
        settings = {"a": "data=stdlib", "b": "data=recall"}
        each.plan(
            ("norm=layer",), ("bias=on",), settings=settings, refused={"norm=batch": "it cannot"}, setting=setting
        )
    result = said(writer.root / "study")
    assert [t["setting"] for t in result["tables"]] == ["a", "b"]
    for number in (0, 1):
        assert table(result, number)["cells"] == 3 * 1 * 2
        assert row(result, "norm=layer", number)["level"] == pytest.approx(sidak(0.05, 6))
        assert row(result, "bias=on", number)["word"] == "INCOMPLETE"
    one = said(writer.root / "study@a")
    assert row(one, "norm=layer")["level"] == pytest.approx(sidak(0.05, 6)), "one setting alone is as strict"
    assert one["missing"] == {}, "the other setting has runs"


def test_settings_are_as_strict_where_an_arm_equals_another_in_one_of_them(writer, said):
    settings = {"a": "data=stdlib", "b": "data=recall"}
    both = [("norm=layer",), ("bias=on",)]
    for setting, arms, equal in (("a", both, {}), ("b", both[:1], {"bias=on": "baseline"})):
        each = Writer(writer.root, f"study@{setting}")
        each.arm(losses=BASE)
        for arm in arms:
            each.arm(*arm, losses=WORSE)
        each.plan(*arms, settings=settings, setting=setting, equal=equal)
    assert [t["cells"] for t in said(writer.root / "study")["tables"]] == [4, 4]


def test_several_studies_share_it_too(writer, said, tmp_path):
    for name in ("one", "two"):
        each = Writer(tmp_path, name)
        each.arm(losses=BASE)
        each.arm("norm=layer", losses=WORSE)
        each.plan(("norm=layer",))
    result = said(tmp_path / "one", str(tmp_path / "two"))
    assert [t["level"] for t in result["tables"]] == [pytest.approx(sidak(0.05, 2))] * 2


def test_a_setting_without_runs_is_named_and_the_others_are_compared(writer, said):
    settings = {"a": "data=stdlib", "b": "data=recall"}
    each = Writer(writer.root, "study@a")
    each.arm(losses=BASE)
    each.arm("norm=layer", losses=WORSE)
    each.plan(("norm=layer",), settings=settings, setting="a")
    Writer(writer.root, "study@b").plan(("norm=layer",), settings=settings, setting="b")
    assert said(writer.root / "study")["missing"] == {"study@b": "no run has started"}


def test_settings_of_one_name_in_two_studies_are_told_apart(writer, said, capsys, monkeypatch):
    published = []
    monkeypatch.setattr(comparison_run, "publish", lambda *sent: published.append(sent) or "")
    names = ["one@a", "one@b", "two@a", "two@b"]
    for name in names:
        each = Writer(writer.root, name)
        if name.endswith("a"):
            each.arm(losses=BASE)
            each.arm("norm=layer", losses=WORSE)
        each.plan(("norm=layer",), settings={"a": "data=stdlib", "b": "data=recall"}, setting=name[-1])
    folders = [str(writer.root / study) for study in ("one", "two")]
    assert [*said(*folders)["missing"]] == ["one@b", "two@b"]
    assert main(["compare", *folders, "--wandb", "mine"]) == 0
    (_, _, answer, tables, _) = published[0]
    assert [*tables] == ["one@a", "two@a"] and "two@a: Worse" in answer
    assert "arm         one@a" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ failures to train


def failing(writer, arm_lost, base_lost, seeds=8, shift=0.0):
    """Runs of which the first diverge; the others differ by `shift`."""
    losses = 2 + np.random.default_rng(0).normal(0, 0.01, seeds)
    for overrides, lost, by in (((), base_lost, 0.0), (("norm=dyt",), arm_lost, shift)):
        for seed, loss in enumerate(losses):
            state = {"state": "diverged", "steps": 100} if seed < lost else {}
            noise = 0.001 * (-1) ** seed if overrides else 0.0
            writer.run(*overrides, seed=seed, loss=loss + by + noise, train_noise=str(bool(overrides)), **state)
    writer.plan(("norm=dyt",), seeds=[*range(seeds)], endpoints=[{"name": "val_loss", "delta_min": 0.05}])


@pytest.mark.parametrize(
    ("arm", "base", "shift", "verdict"),
    [
        (8, 0, 0.0, "DIVERGED"),
        (2, 0, -0.5, "INCONCLUSIVE (2 of 8 failed)"),
        (2, 0, +0.5, "WORSE (2 of 8 failed)"),
        (2, 0, 0.0, "INCONCLUSIVE (2 of 8 failed)"),
        (0, 2, -0.5, "BETTER (2 of 8 of the baseline failed)"),
        (0, 2, +0.5, "INCONCLUSIVE (2 of 8 of the baseline failed)"),
        (0, 0, 0.0, "EQUIVALENT"),
        (8, 8, 0.0, "NOT COMPARABLE"),
    ],
)
def test_the_side_with_more_missing_runs_gets_no_word_in_its_favour(writer, said, arm, base, shift, verdict):
    failing(writer, arm, base, shift=shift)
    assert row(said(writer.root / "study"), "norm=dyt")["verdict"] == verdict


def test_a_baseline_that_has_learned_nothing_gives_no_word_but_identical(writer, said):
    writer.arm(losses=[5.0] * 5, summary={"val_bpb": 5.99})
    writer.arm("norm=none", losses=[4.9, 4.91, 4.89, 4.9, 4.9], train_noise="x", summary={"val_bpb": 5.99})
    writer.arm("bias=on", losses=[5.0] * 5, summary={"val_bpb": 5.99})
    result = said(writer.root / "study")
    assert [row(result, arm)["word"] for arm in ("norm=none", "bias=on")] == ["NOT COMPARABLE", "IDENTICAL"]
    waived = said(writer.root / "study", "--allow", "learned")
    assert row(waived, "norm=none")["word"] == "BETTER" and check(waived, "learned")["status"] == "WAIVED"


# ------------------------------------------------------------------------------------------------------ left out


def test_every_directory_in_scope_is_in_the_table_or_in_the_list(study, said):
    running = study.run("norm=layer", seed=5, state="running", steps=40)
    study.run("norm=layer", seed=6)
    study.run("bias=on", seed=0)
    damaged = study.run("norm=layer", seed=3, rerun="-r2")
    (damaged / "metrics.jsonl").write_text("nonsense\n")
    (study.root / "study/norm=layer/s9-00000000").mkdir()
    again = study.run("norm=layer", seed=0, rerun="-r2")
    result = said(study.root / "study")
    reasons = {out["path"].split("study/")[-1]: out["reason"] for out in table(result)["left_out"]}
    expected = {
        f"norm=layer/{running.name}": "lost at step 40",
        "norm=layer/s6": "seed 6 is not one of the study's",
        "bias=on/s0": "not an arm of the study",
        f"norm=layer/{damaged.name}": "damaged: metrics.jsonl",
        "norm=layer/s9-00000000": "not a run: no status.json",
        f"norm=layer/{again.name}": "a second run of this arm and seed",
    }
    assert len(reasons) == len(expected)
    for start, reason in expected.items():
        found = [text for path, text in reasons.items() if path.startswith(start)]
        assert any(reason in text for text in found), (start, found)
    assert row(result, "norm=layer")["n"] == 5


@pytest.mark.parametrize("launched", [True, False], ids=["of the launch", "begun last"])
def test_of_two_codes_one_is_judged_and_the_other_is_named(study, said, launched):
    from written_runs import SOURCE

    from nexus_ablate.provenance import source_hash

    other = {"source": {**SOURCE, "model.py": "9z"}}
    for seed in range(5):
        study.run("norm=layer", seed=seed, loss=1.5, env=other, started="2021-01-01T00:00:00+00:00", train_noise="y")
    if launched:
        study.plan(("norm=layer",), source=source_hash(SOURCE))
    result = said(study.root / "study")
    assert row(result, "norm=layer")["word"] == ("WORSE" if launched else "NOT COMPARABLE")
    assert all("model.py" in reason for reason in left_out(result).values()) and len(left_out(result)) >= 1


def test_runs_of_another_configuration_than_the_launched_one_are_left_out(study, said):
    study.plan(("norm=layer",), configs={"norm=layer": "0123456789abcdef"})
    result = said(study.root / "study")
    assert set(left_out(result).values()) == {"its configuration, defaults included, is not that of the arm"}
    assert row(result, "norm=layer")["word"] == "INCOMPLETE"


def test_a_seed_without_a_run_of_the_baseline_is_listed(writer, said):
    writer.arm(losses=BASE[:4])
    writer.arm("norm=layer", losses=WORSE)
    assert left_out(said(writer.root / "study")) == {"s4": "the baseline has no result at seed 4"}


# --------------------------------------------------------------------------------------------------------- fairness


@pytest.mark.parametrize(
    ("condition", "options"),
    [
        ("evaluation", {"evaluation": "other"}),
        ("batches", {"stream": 7}),
        ("tokens", {"batch": 1.5}),
        ("code", {"env": {"source": {"axes/norm.py": "other", "model.py": "1b", "optimizers.py": "1c"}}}),
    ],
)
def test_an_unfair_arm_is_not_comparable_until_it_is_waived(writer, said, condition, options):
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=WORSE, **options)
    writer.arm("bias=on", losses=WORSE, train_noise="y")
    result = said(writer.root / "study")
    assert row(result, "norm=layer")["word"] == "NOT COMPARABLE"
    assert condition in row(result, "norm=layer")["sentence"]
    assert row(result, "bias=on")["word"] == "WORSE", "another arm is not concerned"
    broken = [c["name"] for c in table(result)["checks"] if c["status"] == "FAIL"]
    assert row(said(writer.root / "study", "--allow", ",".join(broken)), "norm=layer")["word"] == "WORSE"


@pytest.mark.parametrize(("match", "word"), [("params", "NOT COMPARABLE"), ("none", "WORSE")])
def test_more_parameters_break_a_declared_match_alone(writer, said, match, word):
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=WORSE, summary={"params": 1200})
    writer.plan(("norm=layer",), match=match)
    assert row(said(writer.root / "study"), "norm=layer")["word"] == word


def test_an_unknown_condition_is_refused_with_the_nearest(study, capsys):
    assert main(["compare", str(study.root / "study"), "--allow", "learnd"]) == 2
    assert "try: learned" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- own rates, worth, qualifiers


def at_rates(writer, *overrides, best, depth, noise, arm=None):
    """Runs at seven rates whose losses lie on a parabola around `best`, with the seeds' part common to all rates."""
    for step in range(7):
        rate = float(f"{3e-3 * 2 ** ((step - 3) / 2):.3g}")
        lost = 0.2 * math.log2(rate / best) ** 2
        for seed, loss in enumerate(BASE):
            name = arm or "baseline"
            env = {"arm": name}
            changes = [*overrides, f"optim.lr={rate}"]
            folder = f"{name},optim.lr={rate:g}"
            writer.run(*changes, seed=seed, loss=loss + lost - depth, env=env, folder=folder, train_noise=noise)


def test_with_a_grid_each_arm_is_judged_at_the_lowest_point_of_its_losses(writer, said):
    at_rates(writer, best=2.6e-3, depth=0.0, noise="a")
    at_rates(writer, "norm=layer", best=4.1e-3, depth=0.1, noise="b", arm="layer")
    writer.plan(arms={"layer": "norm=layer"}, lr_grid="auto")
    result = row(said(writer.root / "study"), "layer")
    assert result["delta"] == pytest.approx(-0.1, abs=2e-4) and result["word"] == "BETTER"
    assert result["best_lr"] == pytest.approx(4.1e-3, rel=0.01)


def test_a_best_rate_at_the_edge_is_not_comparable_and_names_a_grid_that_goes_on(writer, said):
    at_rates(writer, best=3e-3, depth=0.0, noise="a")
    at_rates(writer, "norm=layer", best=2e-2, depth=0.1, noise="b", arm="layer")
    writer.plan(arms={"layer": "norm=layer"}, lr_grid="auto")
    result = said(writer.root / "study")
    assert row(result, "layer")["word"] == "NOT COMPARABLE"
    assert "lr_grid=0.00106,0.0015,0.00212,0.003,0.00424,0.006,0.00849,0.012" in check(result, "learning_rate")["text"]
    allowed = said(writer.root / "study", "--allow", "learning_rate")
    edge = 0.2 * math.log2(2e-2 / 8.49e-3) ** 2
    assert row(allowed, "layer")["delta"] == pytest.approx(edge - 0.1, abs=2e-3), "at the lowest of its rates"
    assert "or that of its lowest loss" in table(allowed)["basis"]


def test_before_every_rate_has_runs_there_is_no_word(writer, said):
    at_rates(writer, best=3e-3, depth=0.0, noise="a")
    for seed, loss in enumerate(BASE):
        writer.run("norm=layer", seed=seed, loss=loss, env={"arm": "layer"}, folder="layer")
    writer.plan(arms={"layer": "norm=layer"}, lr_grid="auto")
    assert row(said(writer.root / "study"), "layer")["word"] == "INCOMPLETE"


def worth_study(writer, arm_loss, half=2.3, twice=1.8, **plan):
    noise = np.array(BASE) - 2.0
    for name, loss in (("baseline", 2.0), ("baseline-0.5x", half), ("baseline-2x", twice), ("norm=layer", arm_loss)):
        changes = ("norm=layer",) if name == "norm=layer" else ()
        batch = {"baseline-0.5x": 0.5, "baseline-2x": 2.0}.get(name, 1.0)
        for seed, by in enumerate(noise):
            extra = 0.001 * (-1) ** seed if changes else 0.0
            writer.run(*changes, seed=seed, loss=loss + by + extra, folder=name, train_noise=name, batch=batch)
    writer.plan(("norm=layer",), worth=True, **plan)


@pytest.mark.parametrize(
    ("loss", "worth", "text"),
    [
        (1.9, 2**0.5, "1.41x"),
        (2.0, 1.0, "1.00x"),
        (2.15, 2**-0.5, "0.71x"),
        (1.7, "above", "above 2x"),
        (2.5, 0.0, "below 0.5x"),
    ],
)
def test_worth_is_the_multiple_of_compute_at_which_the_baseline_would_end_there(
    writer, said, capsys, loss, worth, text
):
    worth_study(writer, loss)
    result = row(said(writer.root / "study"), "norm=layer")
    assert result["worth"] == (worth if isinstance(worth, str) else pytest.approx(worth, abs=0.01))
    main(["compare", str(writer.root / "study")])
    assert text in capsys.readouterr().out
    assert row(said(writer.root / "study", "--baseline", "norm=layer"), "baseline")["worth"] is None


def test_the_runs_of_worth_are_no_arms_and_share_no_level(writer, said):
    worth_study(writer, 1.9)
    result = said(writer.root / "study")
    assert [r["arm"] for r in table(result)["rows"]] == ["baseline", "norm=layer"]
    assert row(result, "norm=layer")["level"] == pytest.approx(0.05)


@pytest.mark.parametrize(("has_runs", "word"), [(True, "EQUIVALENT"), (False, "INCONCLUSIVE")])
def test_a_margin_in_compute_is_what_so_much_training_is_worth(writer, said, has_runs, word):
    worth_study(writer, 2.0005, endpoints=[{"name": "val_loss", "delta_min": "5% compute"}])
    if not has_runs:
        shutil.rmtree(next((writer.root / "study/baseline-2x").glob("s4-*")))
    result = said(writer.root / "study")
    assert row(result, "norm=layer")["word"] == word
    if has_runs:
        assert table(result)["delta_min"] == pytest.approx(0.2 * math.log2(1.05))
    arm = row(said(writer.root / "study/norm=layer"), "norm=layer")
    assert (arm["word"], arm["worth"]) == (word, row(result, "norm=layer")["worth"]), "one arm alone has the same"


def test_there_is_no_margin_in_compute_before_every_planned_seed_has_its_runs(writer, said):
    worth_study(writer, 2.0005, endpoints=[{"name": "val_loss", "delta_min": "5% compute"}], seeds=[*range(8)])
    result = row(said(writer.root / "study"), "norm=layer")
    assert result["word"] == "INCONCLUSIVE" and result["worth"] is None


def test_worth_per_flop_is_not_known_beyond_the_budgets_nor_worth_where_nothing_was_learned(writer, said):
    worth_study(writer, 1.7)
    assert row(said(writer.root / "study"), "norm=layer")["worth_per_flop"] is None
    for path in (writer.root / "study").glob("*/*/summary.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"unigram_bpb": 2.0}))
    unlearned = row(said(writer.root / "study"), "norm=layer")
    assert (unlearned["word"], unlearned["worth"], unlearned["delta"]) == ("NOT COMPARABLE", None, None)


def test_seeds_that_were_added_make_every_word_exploratory(study, said):
    study.plan(("norm=layer",), added_seeds=[3, 4])
    result = said(study.root / "study")
    assert row(result, "norm=layer")["verdict"] == "WORSE (exploratory)" and check(result, "plan")["status"] == "WARN"


def test_the_default_margin_is_a_five_hundredth_of_the_baseline_s_loss(writer, said):
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=[loss + 0.001 * (-1) ** i for i, loss in enumerate(BASE)], train_noise="x")
    result = said(writer.root / "study")
    assert table(result)["delta_min"] == pytest.approx(0.004) and row(result, "norm=layer")["word"] == "EQUIVALENT"


# ------------------------------------------------------------------------------------------- what there is to compare


@pytest.mark.parametrize(
    ("flags", "problem", "fix"),
    [
        ([], "several arms could be the baseline", "--baseline bias=on"),
        (["--baseline", "norm=lyer"], "there is no arm of this name", "norm=layer"),
    ],
)
def test_a_baseline_that_is_not_clear_is_asked_for(writer, capsys, flags, problem, fix):
    writer.arm("bias=on", losses=BASE)
    writer.arm("norm=layer", losses=WORSE)
    assert main(["compare", str(writer.root / "study"), *flags]) == 2
    err = capsys.readouterr().err
    assert problem in err and f"try: {fix}" in err


def test_a_study_without_any_result_says_what_its_runs_do(writer, capsys):
    writer.run(state="running", steps=40)
    writer.plan(("norm=layer",))
    assert main(["compare", str(writer.root / "study")]) == 2
    assert "1 lost" in capsys.readouterr().err


def test_a_study_yaml_of_an_earlier_version_is_refused_by_the_key_that_left(study, capsys):
    study.plan(("norm=layer",), looks=[8, 12])
    assert main(["compare", str(study.root / "study")]) == 2
    err = capsys.readouterr().err
    assert "a study has no key of this name" in err and "got: looks: [8, 12]" in err and "try: seeds: 0-7" in err
