"""Runs are held against what they claim: a run that contradicts itself, its arm or its pair is never silently used."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml
from written_runs import SOURCE, Writer, write_json

from nexus_ablate.cli import main
from nexus_ablate.comparison.fairness import FAIL, PASS, WAIVED, WARN
from nexus_ablate.comparison.within_stratum import compare_stratum as compare
from nexus_ablate.errors import ConfigError
from nexus_ablate.provenance import source_hash

BASE = [2.00, 2.02, 1.98, 2.01, 1.99]
HIGHER = [2.11, 2.12, 2.09, 2.11, 2.08]


@pytest.fixture
def writer(tmp_path):
    return Writer(tmp_path / "runs")


@pytest.fixture
def study(writer):
    """A baseline and a worse arm, five seeds each, the runs of the arm last."""
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=HIGHER)
    return writer


def check(comparison, name):
    return next(c for c in comparison.checks if c.name == name)


def row(comparison, arm):
    return next(r for r in comparison.rows if r.arm == arm)


def word(comparison, arm="norm=layer"):
    verdict = row(comparison, arm).verdict
    return verdict and verdict.word


def rewrite(file, **changes):
    """Change keys of a JSON or YAML file; None removes one."""
    load, dump = (yaml.safe_load, yaml.safe_dump) if file.suffix == ".yaml" else (json.loads, json.dumps)
    values = load(file.read_text()) | changes
    file.write_text(dump({key: value for key, value in values.items() if value is not None}))


def excluded(comparison):
    return {out.path: out.reason for out in comparison.excluded}


# --------------------------------------------------------------------------------------- one run against itself


def test_a_directory_whose_seed_is_not_its_config_s_is_excluded(study):
    path = study.paths[5]
    moved = path.rename(path.with_name("s7" + path.name[2:]))
    comparison = compare(study.root)
    assert "the directory says seed 7, config.yaml says 0" in excluded(comparison)[moved]
    assert row(comparison, "norm=layer").values[0] is None


def test_a_run_whose_config_names_no_seed_is_excluded(study):
    rewrite(study.paths[5] / "config.yaml", seed=None)
    assert "config.yaml says None" in excluded(compare(study.root))[study.paths[5]]


@pytest.mark.parametrize(("name", "value"), [("val_loss", 1.5), ("tokens", 12801), ("steps", 401), ("val_loss", None)])
def test_a_summary_that_was_edited_is_excluded(study, name, value):
    rewrite(study.paths[5] / "summary.json", **{name: value})
    comparison = compare(study.root)
    assert f"contradicts itself: summary.json says {name} {value}" in excluded(comparison)[study.paths[5]]
    assert row(comparison, "norm=layer").values[0] is None


@pytest.mark.parametrize("empty", [True, False])
def test_a_finished_run_without_metrics_is_excluded(study, empty):
    log = study.paths[5] / "metrics.jsonl"
    log.write_text("") if empty else log.unlink()
    comparison = compare(study.root)
    assert "finished without a row in metrics.jsonl" in excluded(comparison)[study.paths[5]]
    assert row(comparison, "norm=layer").values[0] is None


def test_where_every_run_contradicts_itself_there_is_nothing_to_compare(study):
    for path in study.paths:
        rewrite(path / "summary.json", batch_hash="another")
    with pytest.raises(ConfigError, match="no run here has a result") as refused:
        compare(study.root)
    assert "10 inconsistent" in refused.value.got


# ----------------------------------------------------------------------------------------- one run against its arm


def copy_as(path, seed):
    """A run directory that says in its name, its config.yaml and its env.json that it has another seed."""
    copied = path.with_name(f"s{seed}-{seed:08d}")
    shutil.copytree(path, copied)
    rewrite(copied / "config.yaml", seed=seed)
    rewrite(copied / "env.json", run_hash=f"{seed:08d}")
    return copied


@pytest.mark.parametrize(("original", "broken"), [(5, ["norm=layer"]), (0, ["norm=layer", "norm=scale"])])
def test_a_copied_seed_directory_makes_its_arm_incomparable(study, original, broken):
    study.arm("norm=scale", losses=HIGHER, train_noise="x")
    copied = copy_as(study.paths[original], 9)
    comparison = compare(study.root)
    checked = check(comparison, "seeds")
    assert checked.status == FAIL and checked.arms == broken
    assert "the same initial values at seeds 0 and 9" in checked.text
    assert study.paths[original].name in checked.text and copied.name in checked.text
    assert [word(comparison, arm) for arm in broken] == ["NOT COMPARABLE"] * len(broken)


def test_seeds_with_the_same_batches_are_no_two_seeds(study):
    one, two = (json.loads((path / "summary.json").read_text()) for path in study.paths[5:7])
    for name in ("summary.json", "metrics.jsonl"):
        file = study.paths[6] / name
        file.write_text(file.read_text().replace(two["batch_hash"], one["batch_hash"]))
    assert one["batch_hash"] != two["batch_hash"]
    checked = check(compare(study.root), "seeds")
    assert checked.status == FAIL and "the same batches at seeds 0 and 1" in checked.text


# ------------------------------------------------------------------------------------------ one run against its pair


def edit_initial(path, **changes):
    """Change the z or the shape of a parameter, or write the former form, a hash alone."""
    file = path / "init.json"
    values = json.loads(file.read_text())
    write_json(file, values | {name.replace("_", "."): value for name, value in changes.items()})


def test_parameters_of_one_shape_that_began_unlike_are_no_pair(study):
    """Shapes are known, so that another shape is no longer presumed."""
    edit_initial(study.paths[6], embedding_weight={"z": "0" * 16, "shape": [16, 16]})
    comparison = compare(study.root)
    checked = check(comparison, "init")
    assert checked.status == FAIL and "other initial values of embedding.weight (seed 1)" in checked.text
    assert word(comparison) == "NOT COMPARABLE"


def test_a_parameter_of_another_shape_is_no_mismatch(study):
    edit_initial(study.paths[6], embedding_weight={"z": "0" * 16, "shape": [16, 32]})
    checked = check(compare(study.root), "init")
    assert checked.status == PASS


def test_initial_values_of_older_runs_are_read_without_shapes(study):
    for path in study.paths:
        former = {name: value["z"] for name, value in json.loads((path / "init.json").read_text()).items()}
        write_json(path / "init.json", former)
    assert check(compare(study.root), "init").status == PASS
    write_json(study.paths[5] / "init.json", dict.fromkeys(former, "0" * 16))
    assert check(compare(study.root), "init").status == FAIL
    write_json(study.paths[5] / "init.json", {"embedding.weight": 3})
    assert "init.json is damaged" in excluded(compare(study.root))[study.paths[5]]
    (study.paths[5] / "init.json").unlink()
    assert "init.json is missing" in excluded(compare(study.root))[study.paths[5]]


@pytest.mark.parametrize(("condition", "match"), [("tokens", "none"), ("flops", "flops")])
def test_a_budget_is_held_for_each_seed_and_not_on_average(writer, condition, match):
    writer.arm(losses=BASE[:2])
    for seed, batch in enumerate((1.5, 0.5)):
        writer.run("norm=layer", seed=seed, loss=HIGHER[seed], batch=batch)
    writer.plan(("norm=layer",), match=match, seeds=[0, 1])
    comparison = compare(writer.root)
    checked = check(comparison, condition)
    assert (checked.status, checked.arms) == (FAIL, ["norm=layer"])
    assert "norm=layer +50.0% at seed 0" in checked.text
    assert word(comparison) == "NOT COMPARABLE"


@pytest.mark.parametrize(
    ("condition", "overrides"), [("schedule", ()), ("tokens", ("train.steps=300",)), ("flops", ("train.steps=300",))]
)
def test_one_short_arm_among_complete_ones_is_not_comparable(study, condition, overrides):
    """It stopped at 300 of 400 steps, or was asked for 300."""
    arm = ",".join(("norm=scale", *overrides))
    study.arm("norm=scale", *overrides, losses=HIGHER, steps=300, train_noise="x", folder=arm)
    if condition == "flops":
        study.plan(("norm=layer",), ("norm=scale", *overrides), match="flops")
    comparison = compare(study.root)
    checked = check(comparison, condition)
    assert checked.status == FAIL and len(checked.arms) == 1 and checked.arms[0].startswith("norm=scale")
    assert word(comparison) == "WORSE"
    assert word(comparison, checked.arms[0]) == "NOT COMPARABLE"


# ----------------------------------------------------------------------------------------------------------- code

EDITED = SOURCE | {"optimizers.py": "2c"}
BEFORE_HASHES = {"source": None, "config_hash": None, "plugins": None}


def code(comparison):
    checked = check(comparison, "code")
    return checked.status, checked.text


def test_arms_by_other_code_are_not_comparable_and_the_files_are_named(writer, capsys):
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=HIGHER, env={"source": EDITED})
    writer.arm("norm=scale", losses=HIGHER, train_noise="x")
    comparison = compare(writer.root)
    assert code(comparison) == (FAIL, "optimizers.py differs between the baseline and norm=layer")
    assert word(comparison) == "NOT COMPARABLE" and word(comparison, "norm=scale") == "WORSE"
    waived = compare(writer.root, allow=["code"])
    assert code(waived)[0] == WAIVED and word(waived) == "WORSE"
    assert main(["compare", str(writer.root)]) == 0
    assert "optimizers.py differs" in " ".join(capsys.readouterr().out.split())


def test_a_file_that_only_one_code_has_is_a_difference(writer):
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=HIGHER, env={"source": SOURCE | {"kernels/normalization.py": "9"}})
    assert "kernels/normalization.py differs" in code(compare(writer.root))[1]


@pytest.mark.parametrize("folder", ["norm=layer,optim.lr=0.009", "norm=layer,optim.lr=0.00424"])
def test_an_arm_of_which_a_run_at_another_rate_is_by_other_code_is_not_comparable(writer, folder):
    for arm in ((), ("norm=layer",)):
        for lr, seeds in ((0.001, 2), (0.003, 7), (0.009, 2), (0.00212, 5), (0.00424, 5)):
            rate = () if lr == 0.003 else (f"optim.lr={lr}",)
            edited = ",".join((*arm, *rate)) == folder
            for seed in (1001, 1002, *range(5))[:seeds] if lr in (0.001, 0.003, 0.009) else range(5):
                env = {"env": {"source": EDITED}} if edited else {}
                writer.run(*arm, *rate, seed=seed, loss=2 + abs(lr - 0.003), train_noise=str(arm), **env)
    writer.plan(("norm=layer",), lr_grid=[0.001, 0.003, 0.009], tuning_seeds=[1001, 1002])
    comparison = compare(writer.root)
    assert check(comparison, "code").arms == ["norm=layer"]


def plugin(sha256):
    return {"plugins": {"mine": {"directory": "/somewhere", "sha256": sha256}}}


def test_a_plugin_that_only_the_arm_uses_is_no_difference_and_two_states_of_one_are(writer):
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=HIGHER, env=plugin("1"))
    assert code(compare(writer.root))[0] == PASS
    writer.arm("norm=scale", losses=HIGHER, env=plugin("2"), train_noise="x")
    comparison = compare(writer.root)
    assert code(comparison)[0] == FAIL and "plugin mine differs" in code(comparison)[1]
    assert check(comparison, "code").arms == ["norm=layer", "norm=scale"]


def test_code_that_was_not_recorded_never_passes(writer):
    writer.arm(losses=BASE, env=BEFORE_HASHES)
    writer.arm("norm=layer", losses=HIGHER, env=BEFORE_HASHES)
    status, text = code(compare(writer.root))
    assert (status, text) == (WARN, "source hashes not recorded; all by version 1 at commit abc")
    writer.arm("norm=scale", losses=HIGHER, env=BEFORE_HASHES | {"version": "2"}, train_noise="x")
    status, text = code(compare(writer.root))
    assert status == FAIL and "version 1 at commit abc" in text and "version 2 at commit abc" in text
    writer.arm("norm=t5", losses=HIGHER, train_noise="y")
    assert "norm=t5" in check(compare(writer.root), "code").arms


# -------------------------------------------------------------------------------------------- a study trained again

AGAIN = {"env": {"source": EDITED}, "started": "2020-01-02T00:00:00+00:00"}
NEW = [x + 1 for x in BASE]


def test_a_study_trained_again_is_compared_by_its_new_runs_alone(study):
    study.arm(losses=NEW, **AGAIN)
    study.arm("norm=layer", losses=NEW, train_noise="x", **AGAIN)
    comparison = compare(study.root)
    assert comparison.rows[0].values == NEW
    assert code(comparison)[0] == PASS
    assert {path: reason.split(" than ")[0] for path, reason in excluded(comparison).items()} == {
        path: "older run by other code" for path in study.paths[:10]
    }
    assert "optimizers.py differs" in excluded(comparison)[study.paths[0]]
    assert all(check.status != FAIL for check in comparison.checks)


def test_while_a_study_is_trained_again_no_arm_is_a_mixture(study):
    study.arm("norm=scale", losses=HIGHER, train_noise="y")
    study.plan(("norm=layer",), ("norm=scale",), source=source_hash(EDITED))
    study.arm(losses=NEW, **AGAIN)
    study.run("norm=layer", seed=0, loss=3.5, train_noise="x", **AGAIN)
    comparison = compare(study.root)
    assert comparison.rows[0].values == NEW
    result = row(comparison, "norm=layer")
    assert result.values == [3.5, None, None, None, None] and result.waiting == 4
    assert check(comparison, "code").arms == ["norm=scale"], "which has only former runs"
    assert word(comparison, "norm=scale") == "NOT COMPARABLE"


def test_fewer_new_runs_are_enough_where_the_study_needs_no_more(study):
    study.plan(("norm=layer",), seeds=[0, 1], source=source_hash(EDITED))
    study.arm(losses=NEW[:2], **AGAIN)
    study.arm("norm=layer", losses=NEW[:2], train_noise="x", **AGAIN)
    comparison = compare(study.root)
    assert comparison.rows[0].values == NEW[:2] and comparison.rows[0].seeds == [0, 1]
    assert code(comparison)[0] == PASS


def test_newer_runs_that_no_launch_of_the_study_made_are_left_out_with_the_reason(study):
    study.plan(("norm=layer",), source=source_hash(SOURCE))
    before = compare(study.root)
    study.run("norm=layer", seed=0, loss=3.0, **AGAIN)
    study.run("norm=layer", seed=7, loss=3.0, **AGAIN)
    comparison = compare(study.root)
    assert [r.values for r in comparison.rows] == [r.values for r in before.rows]
    reasons = [excluded(comparison)[path] for path in study.paths[-2:]]
    assert all(reason.startswith("newer run by other code than ") for reason in reasons)
    assert all(reason.endswith("optimizers.py differs") for reason in reasons)


def test_without_a_study_an_arm_is_its_newest_code_s(writer):
    writer.arm(losses=BASE)
    writer.run(seed=4, loss=3.0, **AGAIN)
    writer.arm("norm=layer", losses=HIGHER)
    comparison = compare(writer.root)
    assert comparison.rows[0].seeds == [4] and comparison.rows[0].values == [3.0]
    assert code(comparison)[0] == FAIL and word(comparison) == "NOT COMPARABLE"
