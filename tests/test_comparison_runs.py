"""From directories to rows: every run is used or excluded with a reason, pairs are pairs, unfair arms are flagged."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from written_runs import TINY, Writer, config_of

from nexus_ablate.cli import main
from nexus_ablate.comparison import judging
from nexus_ablate.comparison.curves import Curves, read_curves
from nexus_ablate.comparison.failures import failure
from nexus_ablate.comparison.fairness import FAIL, PASS, WAIVED, WARN
from nexus_ablate.comparison.load import Trained
from nexus_ablate.comparison.verdict import AT_CHANCE
from nexus_ablate.comparison.within_stratum import compare_stratum as compare
from nexus_ablate.errors import ConfigError, UserError
from nexus_ablate.report.sentences import together_text
from nexus_ablate.runs import RunRecord, read_jsonl
from nexus_ablate.study.endpoint import Endpoint

BASE = [2.00, 2.02, 1.98, 2.01, 1.99]
HIGHER = [2.11, 2.12, 2.09, 2.11, 2.08]


@pytest.fixture
def writer(tmp_path):
    return Writer(tmp_path / "runs")


@pytest.fixture
def study(writer):
    """A baseline and a worse arm, five seeds each."""
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=HIGHER)
    return writer


def check(comparison, name):
    return next(c for c in comparison.checks if c.name == name)


def row(comparison, arm):
    return next(r for r in comparison.rows if r.arm == arm)


def trained(losses):
    """A run that finished with these training losses."""
    record = RunRecord(Path(), "", "", 0, 1, "finished", {}, None, None, None, None)
    empty = np.array([])
    return Trained(record, Curves(empty, empty, empty, empty, losses, empty), {}, {})


def numbers(comparison):
    """Every number of every row."""
    return {r.arm: r.record() for r in comparison.rows}


# --------------------------------------------------------------------------------------------------- the verdicts


def test_an_arm_that_is_worse_at_every_seed_is_worse(study):
    result = row(compare(study.root), "norm=layer")
    assert result.verdict is not None and result.verdict.word == "WORSE"
    assert result.effect is not None and result.effect.delta == pytest.approx(0.102) and result.wins == 0


def test_the_same_run_twice_is_identical_and_its_difference_exactly_zero(study):
    study.arm(losses=BASE, folder="renamed")
    result = row(compare(study.root), "renamed")
    assert result.verdict is not None and result.verdict.word == "IDENTICAL"
    assert result.differences == [0.0] * 5


def test_a_loss_that_differs_in_the_last_bit_is_not_identical(study):
    study.arm(losses=[*BASE[:4], BASE[4] * (1 + 2**-52)], folder="renamed")
    result = row(compare(study.root), "renamed")
    assert result.verdict is not None and result.verdict.word != "IDENTICAL"


def test_every_arm_shares_what_may_be_claimed_falsely_also_an_identical_one(study):
    before = row(compare(study.root), "norm=layer").effect
    study.arm(losses=BASE, folder="renamed")
    after = row(compare(study.root), "norm=layer").effect
    assert before.level == pytest.approx(0.04) and after.level == pytest.approx(1 - 0.96**0.5)
    assert after.low < before.low and after.delta == before.delta


@pytest.mark.parametrize(("lost", "word"), [(3, "INCONCLUSIVE"), (7, "UNSTABLE"), (8, "DIVERGED")])
def test_a_run_that_diverged_is_a_result_and_never_dropped(writer, lost, word):
    """Three of eight against none are p = 0.07: no word about failures, and no BETTER of those that survived."""
    losses = [2.0, 2.01, 2.02, 1.99, 2.0, 2.01, 1.98, 2.02]
    writer.arm(losses=losses)
    for seed in range(8):
        state = "diverged" if seed < lost else "finished"
        steps = 100 if seed < lost else None
        writer.run("norm=none", seed=seed, loss=losses[seed] - 0.5, state=state, steps=steps, train_noise="x")
    result = row(compare(writer.root), "norm=none")
    assert result.verdict is not None and result.verdict.word == word
    assert len(result.failed) == lost
    if lost == 3:
        assert result.effect.high < 0, "the control: the seeds that survived alone would say BETTER"


def test_a_run_that_ends_above_its_start_has_exploded_though_it_finished(study):
    study.arm("norm=none", losses=[2.0, 2.0, 2.0, 2.0, 9.0])
    assert row(compare(study.root), "norm=none").failed == {4: "exploded"}


def test_stalling_counts_only_where_the_baseline_learns(writer):
    writer.arm(losses=BASE)
    writer.arm("norm=none", losses=[5.0] * 5, train_noise="x", summary={"val_bpb": 5.99})
    result = row(compare(writer.root), "norm=none")
    assert set(result.failed.values()) == {"stalled"} and str(result.verdict) == "DIVERGED"


def test_at_a_budget_at_which_nobody_learns_nobody_has_stalled_and_no_word_is_given(writer):
    writer.arm(losses=[5.0] * 5, summary={"val_bpb": 5.99})
    writer.arm("norm=none", losses=[4.9, 4.91, 4.89, 4.9, 4.9], train_noise="x", summary={"val_bpb": 5.99})
    result = row(compare(writer.root), "norm=none")
    assert result.failed == {} and str(result.verdict) == "NOT COMPARABLE"
    assert "--allow learned" in result.verdict.sentence
    waived = row(compare(writer.root, allow=["learned"]), "norm=none")
    assert waived.verdict.word == "BETTER", "the control"


@pytest.mark.parametrize(("dead", "word"), [(3, "BETTER"), (5, "NOT COMPARABLE")])
def test_a_baseline_of_which_most_seeds_are_dead_gives_no_word(writer, dead, word):
    alive = {"val_bpb": 2.0 / 0.7}
    for seed in range(8):
        is_dead = seed < dead
        writer.run(seed=seed, loss=4.1 if is_dead else 2 + seed / 100, summary={"val_bpb": 5.9} if is_dead else alive)
        writer.run("norm=layer", seed=seed, loss=1.5 + seed / 90 + is_dead * 2.1, train_noise="x", summary=alive)
    result = row(compare(writer.root), "norm=layer")
    assert result.verdict.word == word and not result.failed


def test_one_failure_in_twenty_is_counted_and_the_survivors_alone_are_no_better(writer):
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.01, 20)
    writer.arm(losses=list(2 + noise))
    writer.arm("norm=layer", losses=list(1.8 + noise[:19] + rng.normal(0, 0.002, 19)), train_noise="x")
    writer.run("norm=layer", seed=19, state="diverged", steps=50)
    result = row(compare(writer.root), "norm=layer")
    assert str(result.verdict) == "INCONCLUSIVE (1 of 20 failed)" and result.failed == {19: "non-finite"}
    assert result.verdict is not None and "Barnard" in result.verdict.sentence
    assert "failures counted as unlearned runs would change it" in result.verdict.sentence


def test_an_arm_that_trains_where_the_baseline_diverges_everywhere_is_better_for_that_reason(writer):
    for seed in range(5):
        writer.run(seed=seed, state="diverged", steps=50)
    writer.arm("norm=layer", losses=HIGHER)
    result = row(compare(writer.root), "norm=layer")
    assert str(result.verdict) == "BETTER"
    assert result.verdict is not None and "the baseline at 5 of 5" in result.verdict.sentence


def test_where_neither_trains_nothing_is_decided_and_no_run_is_missing(writer):
    for arm in ((), ("norm=layer",)):
        for seed in range(5):
            writer.run(*arm, seed=seed, state="diverged", steps=50, train_noise=str(arm))
    result = row(compare(writer.root), "norm=layer")
    assert (
        result.verdict is not None
        and result.verdict.word == "INCONCLUSIVE"
        and "the baseline at 5 of 5" in result.verdict.sentence
    )


@pytest.mark.parametrize(("declared", "word"), [({"delta_min": 0.1}, "EQUIVALENT"), ({}, "INCONCLUSIVE")])
def test_only_a_declared_margin_makes_an_arm_equivalent(writer, declared, word):
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=[BASE[0] + 0.002, *(x - 0.001 for x in BASE[1:])], train_noise="x")
    writer.plan(("norm=layer",), **declared)
    assert row(compare(writer.root), "norm=layer").verdict.word == word


@pytest.mark.parametrize(("params", "told"), [(1060, True), (1040, False)])
def test_beyond_five_percent_the_ratios_of_parameters_and_flops_stand_with_the_verdict(writer, params, told):
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=HIGHER, summary={"params": params})
    note = f"{params / 1000:.3g} times the baseline's parameters, 1 times its FLOPs per token"
    assert (note in row(compare(writer.root), "norm=layer").notes) is told


def test_every_arm_is_its_own_paired_t_test_at_its_share_of_four_percent(writer):
    rng = np.random.default_rng(3)
    base = 2 + rng.normal(0, 0.2, 8)
    writer.arm(losses=list(base))
    arms = {arm: 2 + rng.normal(0, 0.01, 8) for arm in ("norm=layer", "norm=dyt", "norm=scale", "bias=on")}
    for arm, losses in arms.items():
        writer.arm(arm, losses=list(losses), train_noise=arm)
    comparison = compare(writer.root)
    for arm, losses in arms.items():
        expected = stats.ttest_rel(losses, base)
        interval = expected.confidence_interval(0.96 ** (1 / 4))
        effect = row(comparison, arm).effect
        assert (effect.low, effect.high) == pytest.approx((interval.low, interval.high), rel=1e-6)
        assert effect.p == pytest.approx(expected.pvalue, rel=1e-6) and effect.df == 7


def test_a_slow_arm_is_worse_and_has_not_stalled(writer):
    """A tenth of the learning rate is no divergence, though it has not yet passed a unigram model."""
    writer.arm(losses=BASE)
    writer.arm("optim.lr=0.0003", losses=[x + 1 for x in BASE], summary={"val_bpb": 6.1})
    result = row(compare(writer.root), "optim.lr=0.0003")
    assert result.verdict is not None and result.verdict.word == "WORSE"


def test_a_long_excursion_is_an_explosion_and_a_noisy_loss_is_not():
    rng = np.random.default_rng(0)
    noisy = rng.normal(2, 0.5, 400)
    run = trained(noisy)
    assert failure(run.record, run.curves) == ""
    noisy[100:140] += 2
    assert failure(run.record, run.curves) == "exploded"


def test_one_seed_is_never_better_or_worse(writer):
    writer.run(loss=2.0)
    writer.run("norm=layer", loss=9e-1)
    result = row(compare(writer.root), "norm=layer")
    assert result.verdict is not None and str(result.verdict) == "TOO FEW SEEDS"


def test_an_interaction_is_reported_where_an_arm_makes_two_changes_of_others(study):
    study.arm("bias=on", losses=[x + 0.01 for x in BASE])
    study.arm("norm=layer", "bias=on", losses=[x + 0.5 for x in BASE])
    (pair,) = compare(study.root).together
    said = together_text(pair, Endpoint("val_loss"))
    assert said.endswith("beyond the sum of the two (negative: lower)")
    ratio = together_text(pair, Endpoint("act/resid/kurtosis_token"))
    assert re.search(r": x\S+ \[x\S+, x\S+\] beyond the product of the two \(below x1: lower\)$", ratio)
    assert {pair.one, pair.other} == {"norm=layer", "bias=on"}
    assert pair.interval.mean == pytest.approx(0.5 - 0.01 - 0.102)


def test_at_equal_tokens_the_difference_is_that_of_the_end_and_slower_arms_lose_at_equal_seconds(study):
    for path in study.paths[5:]:
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().split("\n")[:-1]]
        slow = [json.dumps(r | {"seconds": 2 * r["seconds"]}) + "\n" for r in rows]
        (path / "metrics.jsonl").write_text("".join(slow))
    result = row(compare(study.root), "norm=layer")
    assert result.at_tokens is not None and result.at_seconds is not None and result.effect is not None
    assert result.at_tokens.mean == pytest.approx(result.effect.delta)
    assert result.at_seconds.mean > result.at_tokens.mean
    assert result.token_ratio is not None and result.token_ratio.mean > 1


def test_an_arm_too_slow_for_a_second_validation_has_no_difference_at_equal_seconds(study):
    for path in study.paths[5:]:
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().split("\n")[:-1]]
        slow = [json.dumps(r | {"seconds": 1000 * r["seconds"]}) + "\n" for r in rows]
        (path / "metrics.jsonl").write_text("".join(slow))
    assert row(compare(study.root), "norm=layer").at_seconds is None


def test_the_levels_of_arms_that_several_looks_decided_are_all_named(tmp_path, capsys):
    writer, noise = Writer(tmp_path), np.random.default_rng(0).normal(0, 0.01, (2, 10))
    for seed in range(10):
        writer.run(seed=seed, loss=2.0)
        writer.run("norm=layer", seed=seed, loss=2.5 + noise[0, seed])
        writer.run("norm=dyt", seed=seed, loss=2.001 + noise[1, seed])
    writer.plan(("norm=layer",), ("norm=dyt",), seeds=[*range(10)], looks=[5, 10], look_weights=[0.3, 0.7])
    assert main(["compare", str(tmp_path / "study")]) == 0
    assert re.search(r"\n[\d.]+% and [\d.]+% intervals: over 2 comparisons", capsys.readouterr().out)


# ----------------------------------------------------------------------------------------------- what is left out


def test_every_directory_in_scope_is_in_the_table_or_in_the_list(study):
    study.run("norm=layer", seed=7, loss=2.0)  # no partner
    study.run("norm=layer", seed=0, loss=2.0, rerun="-r2")  # duplicate
    for state in ("failed", "preempted", "running", "created"):
        study.run("norm=scale", seed=["failed", "preempted", "running", "created"].index(state), state=state, steps=10)
    arm = study.root / "study" / "norm=layer"
    for name, damage in (
        ("s20-00000000", {"status.json": "{"}),
        ("s21-00000000", {"status.json": None}),
        ("s22-00000000", {"summary.json": "[1]"}),
        ("s23-00000000", {"summary.json": None}),
        ("s24-00000000", {"metrics.jsonl": '{"step": 1, "tokens": 1}\nnonsense\n{"step": 2}\n'}),
        ("s25-00000000", {"config.yaml": "a: [", "env.json": "x"}),
        ("s26-00000000", {"init.json": "\x00\xff"}),
        ("foreign", {"status.json": None, "notes.txt": "mine"}),
        ("s27-00000000", {"status.json": '{"state": "finished", "host": 3}'}),
    ):
        shutil.copytree(study.paths[5], arm / name)
        for file, text in damage.items():
            if text is None:
                os.remove(arm / name / file)
            else:
                (arm / name / file).write_text(text)
    (study.root / "study" / "empty" / "s0-12345678").mkdir(parents=True)
    comparison = compare(study.root)
    in_table = {run.record.path for arm in comparison.arms for run in arm.runs.values() if run.seed in range(5)}
    reasons = {out.path: out.reason for out in comparison.excluded}
    on_disk = {p for p in study.root.glob("study/*/*") if p.is_dir()}
    assert on_disk == in_table | reasons.keys()
    assert not in_table & reasons.keys() and len(in_table) == 10
    assert all(reasons.values())
    said = {path.name: reason for path, reason in reasons.items()}
    assert "not a run" in said["foreign"] and "not a run" in said["s21-00000000"]
    assert "summary.json" in said["s22-00000000"] and "metrics.jsonl" in said["s24-00000000"]
    assert check(comparison, "excluded").status == WARN


def test_a_hole_in_a_log_is_not_read_over(study):
    """The fast reader parses few rows; a damaged one that it never looks at must still be noticed."""
    path = study.paths[5] / "metrics.jsonl"
    lines = path.read_text().split("\n")
    lines[3] = lines[3][:20]
    path.write_text("\n".join(lines))
    assert "metrics.jsonl" in compare(study.root).excluded[0].reason


def test_of_a_run_and_its_repetition_the_first_stands_and_not_the_better(study):
    before = numbers(compare(study.root))
    study.run("norm=layer", seed=1, loss=0.5, rerun="-r2")
    comparison = compare(study.root)
    assert numbers(comparison) == before
    assert "with other losses" in comparison.excluded[0].reason


def test_unfinished_runs_are_marked_and_their_results_so_far_are_compared(study):
    study.run("norm=layer", seed=5, state="running", steps=100)
    study.run(seed=5, state="running", steps=100)
    comparison = compare(study.root)
    verdict = row(comparison, "norm=layer").verdict
    assert verdict is not None and str(verdict) == "WORSE (incomplete)"
    assert any("lost at step 100 of 400" in out.reason for out in comparison.excluded)


def test_arms_of_the_study_that_have_not_begun_are_rows(study):
    study.plan(("norm=layer",), ("norm=scale",))
    result = row(compare(study.root), "norm=scale")
    assert result.verdict is not None and result.verdict.word == "INCOMPLETE" and result.waiting == 5


def test_without_any_result_the_states_are_reported(writer):
    writer.run(state="failed", steps=3)
    with pytest.raises(ConfigError, match="no run here has a result"):
        compare(writer.root)
    with pytest.raises(UserError, match="does not exist"):
        compare(writer.root / "nowhere")


def test_a_damaged_study_yaml_is_an_error_that_names_it(study):
    (study.root / "study" / "study.yaml").write_text("arms: 3")
    with pytest.raises(UserError, match=r"study\.yaml is damaged"):
        compare(study.root)


# ----------------------------------------------------------------------------------------------------- baselines


def test_the_baseline_can_be_chosen_and_the_difference_changes_sign(study):
    there, back = compare(study.root), compare(study.root, baseline="norm=layer")
    a, b = there.rows[1].effect, back.rows[1].effect
    assert a is not None and b is not None and a.delta == -b.delta
    assert back.rows[1].arm == "norm=rms"  # named by how it differs from this baseline


def test_an_unknown_baseline_is_refused_with_the_nearest(study):
    with pytest.raises(ConfigError) as error:
        compare(study.root, baseline="norm=layr")
    assert "norm=layer" in error.value.fix


def test_without_an_arm_called_baseline_the_plainest_is_it(writer):
    writer.arm("train.eval_every=7", losses=BASE, folder="train.eval_every=7")
    writer.arm("train.eval_every=7", "norm=layer", losses=HIGHER, folder="norm=layer,train.eval_every=7")
    comparison = compare(writer.root)
    assert comparison.baseline == "train.eval_every=7"
    assert comparison.rows[1].arm == "norm=layer"


def test_an_arm_whose_name_was_cut_is_known_by_its_configuration(writer):
    cut = "model.context=8,model.d_model=16,+"
    writer.arm("norm=layer", losses=HIGHER, folder=f"{cut}000001")
    writer.arm(losses=BASE, folder=f"{cut}000002")
    comparison = compare(writer.root)
    assert [r.arm for r in comparison.rows] == ["baseline", "norm=layer"]
    assert comparison.arms[0].name == f"{cut}000002"


def test_two_arms_none_of_which_is_plainer_need_a_name(writer):
    writer.arm("norm=scale", losses=BASE)
    writer.arm("norm=layer", losses=HIGHER)
    with pytest.raises(ConfigError, match="several arms could be the baseline"):
        compare(writer.root)
    assert len(compare(writer.root, baseline="norm=scale").rows) == 2


def test_runs_of_several_studies_are_compared_once_the_baseline_is_named(study):
    other = Writer(study.root, "other")
    other.arm("norm=scale", losses=HIGHER, folder="baseline")
    with pytest.raises(ConfigError):
        compare(study.root)
    comparison = compare([study.root / "study", study.root / "other"], baseline="study/baseline")
    assert {r.arm for r in comparison.rows} == {"baseline (study)", "baseline (other)", "norm=layer"}


def test_arms_of_one_name_in_several_studies_are_counted_each(study):
    directories = [study.root / "study"]
    for name, decay in (("second", "weight_decay=0.2"), ("third", "weight_decay=0.3")):
        other = Writer(study.root, name)
        other.arm(decay, losses=[loss + 0.001 for loss in BASE], folder="baseline")
        other.arm("norm=layer", decay, losses=HIGHER, folder="norm=layer")
        directories.append(study.root / name)
    comparison = compare(directories, baseline="study/baseline")
    assert comparison.comparisons == len(comparison.rows) - 1 == 5


# ------------------------------------------------------------------------------------------------------ fairness


def flagged(comparison, name):
    checked = check(comparison, name)
    return checked.status, row(comparison, "norm=layer").verdict.word


def test_a_fair_study_passes(study):
    study.plan(("norm=layer",))
    statuses = {c.name: c.status for c in compare(study.root).checks}
    assert statuses.pop("learning_rate") == WARN  # nothing was tuned
    assert statuses.pop("text") == WARN  # eight blocks of text
    assert set(statuses.values()) == {PASS}


@pytest.mark.parametrize(
    ("condition", "options"),
    [
        ("evaluation", {"evaluation": "other"}),
        ("batches", {"stream": 99}),
        ("init", {"stream": 99}),
        ("schedule", {"steps": 300}),
        ("tokens", {"steps": 300}),
    ],
)
def test_unfair_arms_are_not_comparable_until_it_is_waived(writer, condition, options):
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=HIGHER, **options)
    assert flagged(compare(writer.root), condition) == (FAIL, "NOT COMPARABLE")
    names = [check.name for check in compare(writer.root).checks if check.status == FAIL]
    waived = compare(writer.root, allow=names)
    assert flagged(waived, condition)[0] == WAIVED
    assert flagged(waived, condition)[1] in ("WORSE", "UNSTABLE")


def test_a_baseline_that_did_not_end_its_schedule_makes_every_arm_incomparable(writer):
    writer.arm(losses=BASE, steps=300)
    writer.arm("norm=layer", losses=HIGHER, steps=300)
    assert flagged(compare(writer.root), "schedule") == (FAIL, "NOT COMPARABLE")


def test_a_waiver_of_something_unknown_is_refused(study):
    with pytest.raises(ConfigError) as error:
        compare(study.root, allow=["param"])
    assert "params" in error.value.fix


@pytest.mark.parametrize(
    ("match", "params", "status", "word"),
    [
        ("none", 1250, WARN, "WORSE"),
        ("none", 1005, PASS, "WORSE"),
        ("params", 1030, WARN, "WORSE"),
        ("params", 1250, FAIL, "NOT COMPARABLE"),
        ("flops", 1250, WARN, "WORSE"),
    ],
)
def test_more_parameters_fail_only_against_a_declared_match(writer, match, params, status, word):
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=HIGHER, summary={"params": params})
    writer.plan(("norm=layer",), match=match)
    assert flagged(compare(writer.root), "params") == (status, word)


@pytest.mark.parametrize(
    ("solved", "said"),
    [(["d_ff_ratio=5/2"], "matched params by d_ff_ratio=5/2, -1.75% left"), ([], "matched params without a change, ")],
)
def test_a_sentence_says_how_an_arm_was_matched_and_what_is_left(writer, capsys, solved, said):
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=HIGHER)
    matched = {"kind": "params", "target": 1000.0, "got": 982.5, "residual": -0.0175, "solved": solved}
    arm = {"name": "norm=layer", "overrides": ["norm=layer"], "match": matched}
    writer.plan(arms=[arm], match="params")
    assert main(["compare", str(writer.root)]) == 0
    assert said in capsys.readouterr().out


def test_runs_of_different_length_are_pairs_as_far_as_both_went(writer):
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=HIGHER, steps=300)
    assert check(compare(writer.root), "batches").status == PASS
    other = Writer(writer.root.parent / "other")
    other.arm(losses=BASE)
    other.arm("norm=layer", losses=HIGHER, steps=300, stream=7)
    assert "before step 300" in check(compare(other.root), "batches").text


def test_other_shapes_have_other_initial_values_and_are_no_mismatch(writer):
    """Hashes are of numbers drawn by (seed, name, shape): one that agrees proves the seed."""
    writer.arm(losses=BASE)
    paths = writer.arm("norm=layer", losses=HIGHER, shape="wider")
    for path in paths:
        init = json.loads((path / "init.json").read_text())
        shared = json.loads((writer.paths[paths.index(path)] / "init.json").read_text())
        (path / "init.json").write_text(json.dumps(init | {"embedding.weight": shared["embedding.weight"]}))
    checked = check(compare(writer.root), "init")
    assert checked.status == PASS


def test_another_width_shares_no_initial_value_and_is_reported(writer):
    writer.arm(losses=BASE)
    writer.arm("model.d_model=32", losses=HIGHER, shape="wider")
    assert check(compare(writer.root), "init").status == WARN


def test_another_environment_is_reported(writer):
    libraries = {"torch": "2", "numpy": "3", "tokenizers": "4", "datasets": "5", "safetensors": "6"}
    writer.arm(losses=BASE, env={"packages": libraries})
    other = {name: f"{version}.1" for name, version in libraries.items()}
    changed = {"packages": other, "python": "3.1", "git_dirty": True, "runs_per_device": 2, "git_commit": "def"}
    writer.arm("norm=layer", losses=HIGHER, env=changed)
    checked = check(compare(writer.root), "code")
    assert checked.status == WARN and "same code (commit abc, def)" in checked.text and "uncommitted" in checked.text
    for difference in ("python 3 and 3.1", *(f"{n} {v} and {v}.1" for n, v in libraries.items())):
        assert difference in checked.text
    assert "runs on a device 1 and 2" in checked.text


def test_another_processor_model_is_reported_and_an_unrecorded_one_is_no_difference(writer):
    writer.arm(losses=BASE, summary={"processor": "some GPU"})
    writer.arm("norm=layer", losses=HIGHER)
    assert "processor" not in check(compare(writer.root), "code").text
    writer.arm("norm=dyt", losses=HIGHER, summary={"processor": "another GPU"})
    assert "processor another GPU and some GPU" in check(compare(writer.root), "code").text


def test_arms_with_other_compiled_programs_are_reported(writer):
    compiled = {"compiled": True, "programs": 2, "graph_breaks": 0}
    writer.arm(losses=BASE, summary=compiled)
    writer.arm("norm=layer", losses=HIGHER, summary=compiled)
    assert "program" not in check(compare(writer.root), "code").text
    writer.arm("norm=dyt", losses=HIGHER, summary=compiled | {"programs": 8, "graph_breaks": 1})
    writer.arm("norm=none", losses=HIGHER, summary={"compiled": False, "programs": 0, "graph_breaks": 0})
    checked = check(compare(writer.root), "code")
    assert (
        checked.status == WARN
        and "compiled programs 0 and 2 and 8" in checked.text
        and "graph breaks 0 and 1" in checked.text
    )


def test_a_baseline_that_diverged_is_reported_and_its_pairs_are_lost(writer):
    writer.arm(losses=BASE[:4])
    writer.run(seed=4, state="diverged", steps=50)
    writer.arm("norm=layer", losses=HIGHER)
    comparison = compare(writer.root)
    effect = row(comparison, "norm=layer").effect
    assert check(comparison, "baseline").status == WARN and effect is not None and effect.n == 4


# ------------------------------------------------------------------------------------------------ learning rates

RATES = (0.001, 0.003, 0.009)
BESIDE = 0.02
"""What the neighbours of the best rate lose: a parabola whose lowest point is the best rate."""


def beside(rate, step):
    return float(f"{rate * 2 ** (step / 2):.3g}") if step else rate


def at_rate(lr):
    return () if lr == 0.003 else (f"optim.lr={lr}",)


def tuned(writer, *arm, rates=RATES, best=0.003, seeds=(1001, 1002), **options):
    """Tuning runs of an arm over some rates with a best one."""
    for lr in rates:
        loss = 2 + abs(rates.index(lr) - rates.index(best)) / 10
        for seed in seeds:
            writer.run(*arm, *at_rate(lr), seed=seed, loss=loss, **options)


def around(writer, *arm, best=0.003, losses=BASE, steps=(-1, 0, 1), lowest=0.0, **options):
    """Runs of the claim at the best rate and beside it; `lowest`: the step of the lowest point of the losses."""
    for step in steps:
        further = BESIDE * (step - lowest) ** 2
        writer.arm(*arm, *at_rate(beside(best, step)), losses=[loss + further for loss in losses], **options)


def planned(writer, *arms, rates=RATES, **values):
    writer.plan(*arms or (("norm=layer",),), lr_grid=list(rates), tuning_seeds=[1001, 1002], **values)


def test_tuning_runs_choose_the_rate_and_stay_out_of_the_table(writer):
    for arm, losses in (((), BASE), (("norm=layer",), HIGHER)):
        tuned(writer, *arm)
        around(writer, *arm, losses=losses, train_noise=str(arm))
    planned(writer)
    comparison = compare(writer.root)
    assert [r.arm for r in comparison.rows] == ["baseline", "norm=layer"]
    assert comparison.tuning_runs == 12 and comparison.rows[0].seeds == [0, 1, 2, 3, 4]
    assert [r.best_lr for r in comparison.rows] == [0.003, 0.003]
    assert check(comparison, "learning_rate").status == PASS
    assert comparison.rows[0].values == pytest.approx(BASE)


@pytest.mark.parametrize(
    ("lowest", "steps", "best"),
    [(0.0, (-1, 0, 1), 0.009), (0.4, (-1, 0, 1), 0.01), (-0.4, (-1, 0, 1), 0.0078), (1.3, (-1, 0, 1, 2), 0.014)],
)
def test_each_arm_is_judged_at_the_lowest_point_of_its_losses_around_its_best_rate(writer, lowest, steps, best):
    """What its tuning runs mistook by a factor of sqrt(2) neither favours it nor counts against it."""
    tuned(writer)
    around(writer)
    tuned(writer, "norm=layer", rates=(*RATES, 0.027), best=0.009)
    losses = [loss - 0.1 for loss in BASE]
    around(writer, "norm=layer", best=0.009, losses=losses, steps=steps, lowest=lowest, train_noise="x")
    planned(writer)
    comparison = compare(writer.root, allow=["learning_rate"])  # the arm has a rate more
    result = row(comparison, "norm=layer")
    assert result.effect is not None and result.effect.delta == pytest.approx(-0.1)
    assert result.best_lr == best
    assert str(result.verdict) == "BETTER" and result.values == pytest.approx(losses)
    assert f"at its own best learning rate ({best:g} against 0.003)" in result.verdict.sentence
    assert comparison.tuning_runs + 15 + 5 * len(steps) == len(writer.paths)


def test_a_rate_that_lacks_runs_beside_it_gives_no_word(writer):
    for arm in ((), ("norm=layer",)):
        tuned(writer, *arm)
        around(writer, *arm, steps=(-1, 0, 1) if not arm else (-1, 0))
    planned(writer)
    assert row(compare(writer.root), "norm=layer").word == "INCOMPLETE"


def test_the_outermost_rate_is_not_judged_before_the_next_one_was_tried(writer):
    for arm in ((), ("norm=layer",)):
        tuned(writer, *arm)
        around(writer, *arm, lowest=1.4 if arm else 0)
    planned(writer)
    assert row(compare(writer.root), "norm=layer").word == "INCOMPLETE"
    around(writer, "norm=layer", steps=(2,), state="running")
    comparison = compare(writer.root)
    assert [r.arm for r in comparison.rows] == ["baseline", "norm=layer"], "the next rate is no arm of its own"
    assert len(comparison.excluded) == 5


def test_a_rate_at_which_a_run_failed_to_train_is_neither_chosen_nor_a_neighbour(writer):
    for arm in ((), ("norm=layer",)):
        tuned(writer, *arm, rates=(*RATES, 0.027), best=0.009)
        around(writer, *arm, best=0.003 if not arm else 0.009, lowest=0.3, train_noise=str(arm))
    for path in (
        next(writer.root.glob("*/optim.lr=0.009/s1001-*/metrics.jsonl")),
        next(writer.root.glob("*/norm=layer,optim.lr=0.0127/s3-*/metrics.jsonl")),
    ):
        rows = read_jsonl(path)
        for line in rows[len(rows) // 3 : len(rows) // 2]:
            line["train/loss"] += 5
        path.write_text("".join(json.dumps(line) + "\n" for line in rows))
    planned(writer, rates=(*RATES, 0.027))
    comparison = compare(writer.root)
    assert [r.best_lr for r in comparison.rows] == [0.0033, 0.009]
    assert row(comparison, "norm=layer").values == pytest.approx([loss + 0.09 * BESIDE for loss in BASE])
    checked = check(comparison, "learning_rate")
    assert checked.status == PASS
    assert checked.text.endswith("a run failed to train: baseline at 0.009, norm=layer at 0.0127")


def test_an_arm_that_fails_to_train_at_every_rate_fails_at_the_study_s(writer):
    tuned(writer)
    around(writer)
    tuned(writer, "norm=layer", state="diverged")
    writer.arm("norm=layer", losses=BASE, state="diverged", train_noise="x")
    planned(writer)
    assert row(compare(writer.root), "norm=layer").word == "DIVERGED"


@pytest.mark.parametrize("condition", ["edge", "trials"])
def test_a_best_rate_at_the_edge_of_the_grid_and_unequal_trials_fail(writer, condition):
    for arm in ((), ("norm=layer",)):
        rates = RATES[1:] if condition == "trials" and arm else RATES
        best = 0.009 if condition == "edge" else 0.003
        tuned(writer, *arm, rates=rates, best=best)
        around(writer, *arm, best=best, train_noise=str(arm))
    planned(writer)
    comparison = compare(writer.root)
    assert flagged(comparison, "learning_rate") == (FAIL, "NOT COMPARABLE")
    advised = "lr_grid=0.001,0.003,0.009,0.018,0.036" in check(comparison, "learning_rate").text
    assert advised == (condition == "edge")


def test_tuning_on_the_seeds_of_the_claim_fails(writer):
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=HIGHER)
    writer.plan(("norm=layer",), lr_grid=[0.003], tuning_seeds=[0])
    with pytest.raises(UserError, match="tuning_seeds and seeds overlap"):
        compare(writer.root)


def test_before_the_baseline_has_runs_at_its_best_rate_there_is_no_verdict_and_the_message_says_why(writer):
    for arm in ((), ("norm=layer",)):
        tuned(writer, *arm, rates=(*RATES, 0.027), best=0.009)
    writer.arm(losses=BASE)
    planned(writer)
    with pytest.raises(ConfigError, match="at its best learning rate"):
        compare(writer.root)


def test_a_failed_run_that_the_best_rate_waits_for_is_tried_again_when_asked_to(writer):
    """Over the other seeds the outermost rate is best, so one more is needed, which waits for the failed run."""
    tuned(writer)
    around(writer, lowest=1.4)
    failed = next(writer.root.glob("study/baseline/s4-*"))
    status = json.loads((failed / "status.json").read_text())
    (failed / "status.json").write_text(json.dumps(status | {"state": "failed", "reason": "out of memory"}))
    planned(writer)
    with pytest.raises(ConfigError, match=r"nexus-ablate study .*study --retry failed"):
        compare(writer.root)


def test_a_share_at_an_arm_s_own_rate_is_a_share(writer):
    """A parabola through 0.8, 1 and 1 goes above 1."""
    for arm in ((), ("norm=layer",)):
        tuned(writer, *arm)
        for step, share in ((-1, 0.8), (0, 1.0), (1, 1.0)):
            summary = {"recall": {"accuracy": share, "items": 200, "chance": 0.1, "margin": 1.0}}
            around(writer, *arm, steps=(step,), lowest=0.4, summary=summary, train_noise=str(arm))
    planned(writer, endpoint="recall/accuracy")
    assert [r.mean for r in compare(writer.root).rows] == [1.0, 1.0]


# ------------------------------------------------------------------------------------------------------------ looks


def looking(writer, effect, seeds):
    """A study with looks at 5, 6 and 8 seeds: an arm with an effect, a null arm; `seeds` of each are there."""
    rng = np.random.default_rng(1)
    noise = rng.normal(0, 0.02, 8)
    null, other = noise + rng.normal(0, 0.01, 8), noise + effect + rng.normal(0, 0.01, 8)
    for arm, losses in (((), noise), (("norm=layer",), other), (("norm=dyt",), null)):
        count = seeds.get("".join(arm), 8)
        writer.arm(*arm, losses=list(2 + losses[:count]), train_noise=str(arm))
    writer.plan(("norm=layer",), ("norm=dyt",), seeds=list(range(8)), looks=[5, 6, 8], look_weights=[0.2, 0.3, 0.5],
                delta_min=0.001)  # fmt: skip
    return compare(writer.root)


def test_a_look_decides_the_arm_with_an_effect_and_asks_for_more_of_the_other(writer):
    comparison = looking(writer, 0.5, {"": 5, "norm=layer": 5, "norm=dyt": 5})
    assert (comparison.look, comparison.undecided) == (1, ["norm=dyt"])
    worse, null = row(comparison, "norm=layer"), row(comparison, "norm=dyt")
    assert worse.verdict is not None and worse.verdict.word == "WORSE" and worse.look == 1
    assert null.verdict is not None and null.verdict.word == "INCONCLUSIVE"
    assert worse.effect is not None and worse.effect.level == pytest.approx(1 - (1 - 0.04 * 0.2) ** 0.5)


def test_an_arm_keeps_the_verdict_of_the_look_that_decided_it(writer):
    first = row(looking(writer, 0.5, {"": 5, "norm=layer": 5, "norm=dyt": 5}), "norm=layer")
    later = Writer(writer.root.parent / "later")
    comparison = looking(later, 0.5, {"": 8, "norm=layer": 5, "norm=dyt": 8})
    assert row(comparison, "norm=layer").effect == first.effect and row(comparison, "norm=layer").seeds == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert comparison.look == 3 and comparison.undecided == [] and row(comparison, "norm=dyt").look == 3
    assert row(comparison, "norm=layer").waiting == 0


def test_a_look_whose_runs_are_not_all_there_is_not_judged(writer):
    """Else every run that ends would be a look of its own."""
    comparison = looking(writer, 0.5, {"": 6, "norm=layer": 5, "norm=dyt": 5})
    assert (comparison.look, comparison.undecided) == (1, ["norm=dyt"])
    assert row(comparison, "norm=dyt").seeds == [0, 1, 2, 3, 4]


def test_only_the_seeds_of_a_look_say_whether_both_arms_are_at_chance(writer, monkeypatch):
    def later_seeds_are(_, figures):
        return AT_CHANCE if figures("val_loss").shape[1] > 5 else ""

    monkeypatch.setattr(judging, "saturation", later_seeds_are)
    comparison = looking(writer, 0.5, {"": 6, "norm=layer": 6, "norm=dyt": 5})
    assert comparison.look == 1 and row(comparison, "norm=layer").word == "WORSE"


def test_seeds_that_were_added_after_a_look_make_the_verdict_exploratory(study):
    study.plan(("norm=layer",), added=[{"when": "2026-01-01", "seeds": [3, 4]}])
    comparison = compare(study.root)
    assert str(row(comparison, "norm=layer").verdict) == "exploratory: WORSE"


def test_an_inconclusive_row_names_the_command_that_would_decide_it(writer, monkeypatch):
    monkeypatch.chdir(writer.root.parent)
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=[2.02, 1.99, 2.02, 2.0, 2.03], train_noise="x")
    writer.plan(("norm=layer",), delta_min=0.0001)
    result = row(compare(writer.root), "norm=layer")
    assert result.verdict is not None and result.seeds_to_decide is not None
    assert f"nexus-ablate study study --add-seeds {result.seeds_to_decide - 5}" in result.verdict.sentence


def test_an_arm_that_came_out_as_the_baseline_is_a_row_and_identical_and_counts_as_no_arm(writer):
    writer.arm(losses=BASE)
    writer.arm("norm=layer", losses=HIGHER)
    writer.plan(("norm=layer",))
    without = compare(writer.root)
    writer.plan(("norm=layer",), equal=[{"overrides": ["norm=rms", "placement=pre"], "arm": "baseline"}])
    comparison = compare(writer.root)
    copy = row(comparison, "norm=rms placement=pre")
    assert str(copy.verdict) == "IDENTICAL" and copy.differences == [0.0] * 5
    assert row(comparison, "norm=layer").effect == row(without, "norm=layer").effect
    assert comparison.comparisons == without.comparisons and comparison.checks == without.checks


# -------------------------------------------------------------------------------------------------- invariances


def test_names_order_and_further_files_change_no_number(study, tmp_path):
    before = numbers(compare(study.root))
    for path in study.paths:
        (path / "further.txt").write_text("x")
    (study.root / "study" / "notes").mkdir()
    shuffled = [study.paths[i] for i in (7, 3, 9, 0, 1, 2, 8, 4, 5, 6)]
    assert numbers(compare(shuffled)) == before
    shutil.copytree(study.root, tmp_path / "elsewhere" / "runs")
    assert numbers(compare(tmp_path / "elsewhere" / "runs")) == before


def test_one_more_arm_changes_no_mean(study):
    before = compare(study.root)
    study.arm("norm=scale", losses=[x + 0.3 for x in HIGHER], train_noise="x")
    after = compare(study.root)
    for old, new in zip(before.rows, after.rows, strict=False):
        assert (old.arm, old.mean, old.differences) == (new.arm, new.mean, new.differences)


# ------------------------------------------------------------------------------------------------- reading, fast


def test_the_fast_reader_reads_what_the_strict_one_does(study):
    path = study.paths[0] / "metrics.jsonl"
    rows, curves = read_jsonl(path), read_curves(path)
    assert curves.val.tolist() == [r["val/loss"] for r in rows if "val/loss" in r]
    assert curves.train.tolist() == [r["train/loss"] for r in rows if "train/loss" in r]
    assert curves.flops.tolist() == [r["flops"] for r in rows if "val/loss" in r]


def test_a_cut_off_last_line_is_left_out_and_a_null_is_not_a_number(study):
    path = study.paths[0] / "metrics.jsonl"
    before = read_curves(path)
    row = '{"step": 402, "tokens": 1, "flops": 1, "seconds": 1, "train/loss": null, "nonfinite": ["train/loss"]}\n'
    path.write_text(path.read_text() + row + '{"step": 404, "tok')
    after = read_curves(path)
    assert len(after.train) == len(before.train) + 1 and after.train[-1] != after.train[-1]
    assert after.val.tolist() == before.val.tolist()


def test_spikes_are_those_that_the_runs_counted(writer):
    writer.arm(losses=BASE, summary={"spike_score/train/loss": 0.001})
    writer.arm("norm=layer", losses=HIGHER, summary={"spike_score/train/loss": 0.004})
    writer.arm("norm=scale", losses=HIGHER, train_noise="x")
    base, spiky, uncounted = compare(writer.root).rows
    assert (base.spike_score, spiky.spike_score, uncounted.spike_score) == (0.001, 0.004, None)
    assert spiky.spiky and not uncounted.spiky


@pytest.mark.slow
def test_many_runs_are_compared_in_seconds_with_little_memory_and_without_torch(tmp_path):
    """A tenth of the figure to hold: 1,000 runs of 2,000 rows under 15 s and 1 GB."""
    writer = Writer(tmp_path / "runs")
    for arm in range(10):
        for seed in range(10):
            arm_of = (f"optim.lr={0.001 + arm / 1e5:.5f}",) if arm else ()
            writer.run(*arm_of, seed=seed, loss=2 + seed / 100, windows=512)
    filler = {f"grad_norm/block_{b:03d}/{part}": 0.12345678 for b in range(8) for part in ("attn", "ffn", "norm")}
    for path in writer.paths:
        rows = (path / "metrics.jsonl").read_text().rstrip().split("\n")
        more = [r[:-1] + ", " + json.dumps(filler)[1:] for r in rows for _ in range(10)]
        (path / "metrics.jsonl").write_text("\n".join(more) + "\n")
    code = (
        "import re, sys, time\nfrom nexus_ablate.cli import main\n"
        f"main(['compare', {str(writer.root)!r}, '--html', {str(tmp_path / 'out.html')!r}])\n"
        "assert 'torch' not in sys.modules\n"
        # not ru_maxrss: it begins with the size of the process that started this one
        "peak = re.search('VmHWM:\\\\s+(\\\\d+)', open('/proc/self/status').read()).group(1)\n"
        "print('used', time.process_time(), peak)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, kilobytes = map(float, done.stdout.rsplit("used ", 1)[1].split())
    assert seconds < 5  # of the processor, which others may keep busy; starting up is a good part of it
    assert kilobytes < 500_000


def test_the_written_runs_look_like_trained_ones(tiny_run):
    """The fixture of these tests is held against a run that was trained."""
    from nexus_ablate import compose, train
    from nexus_ablate.comparison.load import _read

    trained = _read(train(compose(tiny_run()), quiet=True).path)
    assert isinstance(trained, Trained)
    assert trained.init and trained.config_hash and len(trained.curves.val) == 3 and len(trained.curves.train) == 20
    config, _ = config_of(())
    assert trained.config.keys() == config.keys() and TINY
    comparison = compare(trained.record.path)
    assert comparison.rows[0].mean == trained.figures["val_loss"]
