"""What a study asks, how it becomes arms, and how arms are made equal."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.comparison.fairness import MISMATCH_FAIL, MISMATCH_WARN
from nexus_ablate.config.compose import compose, differences
from nexus_ablate.config.options import conf_dir
from nexus_ablate.errors import ConfigError, UserError
from nexus_ablate.measure.measures import find
from nexus_ablate.plain_data import load_yaml
from nexus_ablate.planning import cost
from nexus_ablate.planning.cost import cost_of, seconds_of
from nexus_ablate.planning.design import arm_key, compose_arm, expand
from nexus_ablate.planning.jobs import Runs
from nexus_ablate.planning.study_yaml import write_record
from nexus_ablate.runs import arm_name, find_runs, read_run
from nexus_ablate.study.arm_overrides import merged
from nexus_ablate.study.decoding import decode_file, read_study
from nexus_ablate.study.definition import read_request, shipped_studies, strata_of

CLAIMS = """rms_vs_layer dyt_vs_rms norm_speedup placement depth final_norm biases qk_norm softmax_stability
weight_decay ffn aspect positions sinks_one_layer gates""".split()
MEASURED = {
    "positions": ("extrapolation/sliding_gap/2", "extrapolation/non_overlapping/8", "attn/score_at/64-127"),
    "sinks_one_layer": (
        *("attn/sink_rate", "act/resid/massive_count", "act/resid/top_on_first", "act/resid/first_norm_ratio"),
        *("quantization/schemes/static_tensor/gap", "intervention/sink_zero/gap", "intervention/massive_zero/gap"),
    ),
    "gates": ("attn/sink_rate", "act/resid/massive_count", "quantization/schemes/int4_group/gap", "gate/closed"),
    "weight_decay": ("weight_rms/global", "update_ratio/query", "train_loss", "generalization_gap"),
    "biases": ("act/resid/mean_over_rms", "attn/max_logit"),
    "depth": ("grad_norm/first_over_last",),
    "final_norm": ("logits/max_abs", "logits/log_sum_exp"),
    "softmax_stability": ("logits/max_abs", "logits/log_sum_exp", "attn/max_logit"),
    "qk_norm": ("attn/max_logit",),
}
"""What the claim behind a study is about, besides losses and failures."""
SMALL = ["model.n_layers=2", "model.d_model=64", "model.n_heads=2", "model.context=16"]


def arms(*arguments):
    study, _ = expand(read_request(["mine", *arguments]).study)
    return [arm.name for arm in study.arms]


def refused(*arguments):
    with pytest.raises(ConfigError) as caught:
        expand(read_request(list(arguments)).study)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------- what is asked


def test_the_command_line_alone_makes_a_study():
    request = read_request("mine vary.norm=layer,rms vary.bias=on,off seeds=0,1 train.steps=9 runs_dir=r".split())
    assert request.study.factors == {"norm": ["layer", "rms"], "bias": ["on", "off"]}
    assert request.study.seeds == [0, 1]
    assert request.study.baseline == ["train.steps=9"]
    assert request.launch == ["runs_dir=r"]
    assert request.directory == Path("r/mine")


def test_a_file_of_ones_own_is_changed_by_what_stands_beside_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "question: which?\nbaseline: [train.steps=9]\nfactors: {norm: [layer, rms]}\nlr_grid: [1e-3, 2e-3]\n"
    )
    definition = read_request([f"{path}", "train.tokens=100", "name=other", "lr_grid=1e-3,4e-3"]).study
    assert (definition.name, definition.question, definition.lr_grid) == ("other", "which?", [1e-3, 4e-3])
    assert definition.baseline == ["train.tokens=100"], "one budget replaces the other"
    assert definition.tuning_seeds == [1001, 1002]


def test_how_runs_are_carried_out_is_no_part_of_a_study():
    launch = ["runs_dir=x", "tracker=files", "train.device=cpu", "train.threads=2", "train.keep=3"]
    assert read_request(["norms", *launch]).launch == launch
    assert read_request(["norms", *launch]).study == read_request(["norms"]).study


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((["norm=layer", "norm.eps=1e-3"], ["norm=rms"]), ["norm=rms"]),
        ((["norm=layer", "norm.eps=1e-3"], ["norm=layer"]), ["norm.eps=1e-3", "norm=layer"]),
        ((["norm.eps=1e-3"], ["norm=layer"]), ["norm=layer"]),
        ((["norm.eps=1e-3", "norm=layer"],), ["norm.eps=1e-3", "norm=layer"]),
        ((["train.tokens=9", "seed=1"], ["train.steps=3"]), ["seed=1", "train.steps=3"]),
        ((["model.n_layers=2"], ["model=micro"]), ["model.n_layers=2", "model=micro"]),
    ],
)
def test_another_option_removes_the_keys_of_the_one_before_and_none_typed_with_it(layers, expected):
    assert merged(*layers) == expected


@pytest.mark.slow
def test_the_key_of_an_option_may_stand_before_it_in_a_multirun(tiny_run, tmp_path):
    assert main(["-m", "norm.eps=1e-5,1e-2", *tiny_run("train.steps=2"), "norm=layer"]) == 0
    runs = [read_run(path).config for path in find_runs([tmp_path / "runs"])]
    assert sorted(config["norm"]["eps"] for config in runs if config) == [1e-5, 1e-2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("nroms", "try: norms"),
        ("mine vary.norm=layer seed=1", "seeds=0,1,2"),
        ("mine vary.norm=layer desing=grid", "try: design=grid"),
        ("mine vary.norm=layer design=gird", "try: design=grid"),
        ("mine vary.norm=layer design=list", "design=grid"),
        ("mine vary.norm=layer seeds=0,0", "duplicates"),
        ("mine vary.norm=layer seeds=", "seeds takes a list of seeds"),
        ("mine vary.norm=layer seeds=a", "seeds takes"),
        ("mine vary.norm=layer match=param", "try: match=params"),
        ("mine vary.norm=layer lr_grid=1e-3 tuning_seeds=0,9", "overlap"),
        ("mine vary.norm=layer tuning_seeds=1001,1002", "require each other"),
        ("mine vary.norm=layer lr_grid=1e-3,2e-3 tuning_seeds=9", "try: tuning_seeds=9,10"),
        ("mine vary.norm=layer design=leave_one_out", "two values"),
        ("mine vary.norm=layer delta_min=small", "try: delta_min=0.02"),
        ("mine vary.norm=layer delta_min=-1", "got: delta_min=-1\n"),
        ("norms endpoints=val_bpb delta_min=0.3", "delta_min and endpoints say the same"),
        ("mine vary.norm=layer strata.optim.betas=[1,2],[3,4]", "try: strata: {shallow: model.n_layers=4, deep: "),
        ("mine vary.windw=[1,2],[3,4]", "try: vary.window=[1,2],[3,4]"),
        ("mine vary.foo=[1,2],[3,4]", "got: vary.foo=[1,2],[3,4]\n"),
        ("mine vary.norm=layer rerun=on", "try: leave rerun out"),
        ("mine vary.seed=0,1", "try: seeds=0,1,2"),
        ("mine vary.norm=layr", "try: norm=layer"),
        ("mine vary.norm=layr,layer", "try: norm=layer"),
        ("mine vary.norm=layer vary.nrom=rms", "try: vary.norm=rms"),
        ("mine vary.norm=layer vary.norm=none", "vary.norm is given twice"),
        ("mine norm=layer,none", "try: nexus-ablate study mine vary.norm=layer,none"),
        ("experiment=mine vary.norm=layer", "try: mine"),
        ("a:b vary.norm=layer", "try: a_b"),
        ("mine vary.norm=rms", "no arm other than its baseline"),
        ("mine vary.norm=layer train.stpes=3", "try: train.steps"),
        ("../x vary.norm=layer", "folder"),
        ("norms vary.norm=layer", "factors or arms"),
        ("nosuch.yaml", "cannot be read"),
    ],
)
def test_a_mistake_is_named_with_its_fix(arguments, said):
    assert said in refused(*arguments.split())


# ------------------------------------------------------------------------------------------------------------- arms


def test_each_design_makes_its_arms():
    two = ["vary.norm=rms,layer", "vary.bias=off,on"]
    assert arms(*two) == ["norm=layer", "bias=on"]
    assert arms(*two, "design=grid") == ["bias=on", "norm=layer", "bias=on,norm=layer"]
    assert arms(*two, "design=pairwise_interactions") == ["norm=layer", "bias=on", "bias=on,norm=layer"]
    whole, _ = expand(read_request(["x", "vary.norm=layer,rms", "vary.bias=on,off", "design=leave_one_out"]).study)
    assert whole.baseline == ["norm=layer", "bias=on", "train.tokens=3932160"]
    assert [arm.name for arm in whole.arms] == ["norm=rms", "bias=off"]


def test_an_arm_that_is_the_baseline_under_another_name_is_recognised():
    study, configs = expand(read_request(["x", "vary.norm=rms,t5", "vary.norm_bias=off,auto,on"]).study)
    assert [(copy.overrides, copy.arm) for copy in study.equal] == [
        (["norm=rms"], "baseline"),
        (["norm_bias=off"], "baseline"),
        (["norm_bias=auto"], "baseline"),
    ]
    assert [arm.name for arm in study.arms] == ["norm=t5", "norm_bias=on"]
    assert len({arm_key(config) for config in configs.values()}) == 3


def test_a_refused_arm_is_listed_with_its_reason_and_stops_no_other():
    study, _ = expand(decode_file({"name": "x", "question": "?", "arms": ["norm=t5 norm_bias=on", "norm=layer"]}))
    assert [arm.name for arm in study.arms] == ["norm=layer"]
    assert "has no bias" in study.refused[0].reason


@pytest.mark.parametrize(("mistake", "fix"), [("norm=rmss", "norm=rms"), ("optim.lr=fast", "optim.lr=auto")])
def test_a_typing_error_in_an_arm_stops_the_study_before_it_has_a_folder(tmp_path, capsys, monkeypatch, mistake, fix):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(f"question: which?\narms: [norm=layer, {mistake}]\n")
    assert main(["study", "mine.yaml"]) == errors.CONFIG
    assert capsys.readouterr().err.splitlines()[1:] == [f"  got: {mistake}", f"  try: {fix}"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_key_twice_in_a_file_is_a_mistake_and_not_a_choice_of_the_last(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("question: which?\narms: [norm=layer]\narms: [norm=none]\n")
    assert main(["plan", "mine.yaml"]) == errors.CONFIG
    assert "mine.yaml, line 3: this study cannot be read\n  got: arms twice" in capsys.readouterr().err


@pytest.mark.parametrize("arms", ["3", "norm=layer", "[norm=layer]"])
def test_arms_beside_factors_are_refused_in_whatever_form_they_are(arms, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(f"question: which?\nfactors: {{norm: [layer]}}\narms: {arms}\n")
    assert main(["plan", "mine.yaml"]) == errors.CONFIG
    assert capsys.readouterr().err.splitlines()[1] == "  got: factors {norm: [layer]} beside 1 arm"


@pytest.mark.parametrize(
    "line",
    [
        "delta_min: 1e-2",
        "endpoints: {val_loss: {delta_min: 1E-2}}",
        "{delta_min: 1.0e-2, lr_grid: [5e-1, 2e-1]}",
        "{delta_min: 0.01, seeds: {looks: [3, 5], weights: [5e-1, 0.5]}}",
    ],
)
def test_numbers_with_exponents_are_numbers_everywhere_in_a_file(line):
    definition = decode_file({"name": "mine", "question": "?", "arms": ["norm=layer"]} | load_yaml(line))
    assert definition.primary.delta_min == 0.01
    assert definition.lr_grid == ([0.5, 0.2] if "lr_grid" in line else [])
    assert definition.look_weights == ([0.5, 0.5] if "looks" in line else [])


def test_a_stratum_can_have_a_number_or_a_word_of_yaml_as_its_name():
    values = load_yaml("arms: [norm=layer]\nstrata: {4: model.n_layers=4, 24: model.n_layers=24, on: bias=on}")
    assert [*decode_file({"name": "mine", "question": "?"} | values).strata] == ["4", "24", "on"]


def test_arms_are_named_by_their_difference_from_the_study_s_baseline():
    study, configs = expand(read_request(["x", "norm=layer", "norm.eps=1e-3", "vary.norm=rms,layer", *SMALL]).study)
    assert [arm.name for arm in study.arms] == ["norm=rms"]
    assert configs["norm=rms"].norm.keys["eps"] == 1e-6, "the eps of layer is not that of rms"
    assert [copy.overrides for copy in study.equal] == [["norm=layer"]]
    base = compose(["norm=layer", "train.steps=7"])
    assert differences(compose(["train.steps=7"]), base) == {"norm": "rms"}
    assert arm_name(differences(base, base)) == "baseline"
    assert differences(base)["train.steps"] == "7"


@pytest.mark.parametrize(
    "factor", ["vary.optim.lr=1e-3,3e-3", "vary.optim.lr=2e-3,4e-3"], ids=["beside the baseline", "two arms"]
)
def test_arms_that_differ_in_the_rate_alone_are_refused_where_each_arm_s_rate_is_tuned(factor, capsys):
    words = ["plan", "mine", factor, "optim.lr=3e-3", "lr_grid=1e-3,3e-3,9e-3", *SMALL]
    assert main(words) == 2
    assert "differ in the learning rate alone, which lr_grid tunes for each" in capsys.readouterr().err


def test_what_an_option_changes_besides_is_kept():
    study, _ = expand(read_request(["x", "vary.placement=deepnorm"]).study)
    assert study.arms[0].also_changes == ["placement=deepnorm also changes init to xavier"]


# --------------------------------------------------------------------------------------------------------- matching


@pytest.mark.parametrize("kind", ["params", "flops"])
def test_a_gate_is_paid_for_with_the_ffn_s_width(kind):
    command = ["x", "vary.gate=elementwise", *SMALL, "model.d_ff_multiple=1"]
    _, freely = expand(read_request(command).study)
    free = cost_of(freely["gate=elementwise"])
    study, configs = expand(read_request([*command, f"match={kind}"]).study)
    base, arm = cost_of(configs["baseline"]), study.arms[0]
    amount = "params" if kind == "params" else "flops_per_token"
    residual = getattr(cost_of(configs[arm.name]), amount) / getattr(base, amount) - 1
    match = arm.match
    assert match is not None
    assert residual == pytest.approx(match.residual)
    assert abs(residual) < MISMATCH_WARN < getattr(free, amount) / getattr(base, amount) - 1
    assert match.solved == [arm.overrides[-1]]
    assert arm.name.startswith("d_ff_ratio=")


def test_no_nearer_width_exists():
    study, configs = expand(read_request(["x", "vary.gate=elementwise", "match=params", *SMALL]).study)
    arm, config = study.arms[0], configs[study.arms[0].name]
    width, target = config.resolved.d_ff, cost_of(configs["baseline"]).params
    around = [
        cost_of(compose_arm(study, [*arm.requested, f"d_ff_ratio={w}/64"], [])).params for w in (width - 8, width + 8)
    ]
    assert all(abs(cost_of(config).params - target) <= abs(other - target) for other in around)


def test_a_match_that_cannot_be_met_is_refused_with_its_residual():
    said = refused("x", "vary.d_ff_ratio=1,3", "match=params", *SMALL)
    assert "no arm" in said
    assert "parameters" in said
    one = decode_file(
        {"name": "x", "question": "?", "match": "params", "baseline": SMALL, "arms": ["d_ff_ratio=1", "norm=layer"]}
    )
    study, _ = expand(one)
    assert [arm.name for arm in study.arms] == ["norm=layer"]
    assert "the nearest is" in study.refused[0].reason and "leave d_ff_ratio to be solved" in study.refused[0].reason
    assert "model.d_ff_multiple=1" in refused("x", "vary.ffn=moe", "match=params", "model=femto")


def test_depth_is_solved_where_the_arm_sets_the_width():
    definition = decode_file(
        {
            "name": "x",
            "question": "?",
            "match": "params",
            "baseline": ["model.n_layers=24", "model.d_model=64", "model.n_heads=2"],
            "arms": ["d_ff_ratio=4"],
        }
    )
    study, configs = expand(definition)
    arm, layers = study.arms[0], configs[study.arms[0].name].model.n_layers
    match = arm.match
    assert match is not None
    assert match.solved == [f"model.n_layers={layers}"]
    assert layers < 24
    assert abs(match.residual) <= MISMATCH_FAIL


def test_equal_tokens_are_given_to_another_batch_size():
    command = ["x", "vary.train.batch_size=16,8", "train.steps=50", "match=tokens", *SMALL]
    study, _ = expand(read_request(command).study)
    assert study.arms[0].overrides == ["train.batch_size=8", "train.steps=100"]


@pytest.mark.slow
@pytest.mark.long
def test_equal_seconds_are_measured_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "MEASURED_SECONDS", 1.0)
    request = read_request(
        ["x", "vary.model.n_layers=1", "match=seconds", "train.steps=50", f"runs_dir={tmp_path}", *SMALL]
    )
    runs = Runs.of(request)
    (arm,) = runs.study.arms
    assert (runs.configs[arm.name].resolved.steps or 0) > 50, "half the depth is faster"
    write_record(runs)
    again, _ = expand(request.study, read_study(request.directory))
    assert again.arms[0].match == arm.match


# ------------------------------------------------------------------------------------------------- what stays fixed


def test_a_launched_study_is_fixed_until_it_is_amended(tmp_path):
    command = ["x", "vary.norm=layer", f"runs_dir={tmp_path}", *SMALL]
    first = read_request(command)
    write_record(Runs.of(first))
    written = (first.directory / "study.yaml").read_bytes()
    write_record(Runs.of(first))
    assert (first.directory / "study.yaml").read_bytes() == written
    changed = Runs.of(read_request([*command, "seeds=0,1", "vary.bias=on"]))
    with pytest.raises(ConfigError) as caught:
        write_record(changed)
    assert "seeds: [0,1,2,3,4,5,6,7] -> [0,1]" in str(caught.value)
    assert "arm bias=on added" in str(caught.value)
    assert (first.directory / "study.yaml").read_bytes() == written
    write_record(changed, amend=True)
    record = read_study(first.directory)
    assert record is not None
    assert [len(entry.changes) for entry in record.amendments] == [3], "question, seeds, arm"
    assert record.seeds == [0, 1]


def test_a_launched_study_is_found_again_by_its_name_alone(tmp_path):
    varied = ["vary.gate=elementwise", "vary.norm=rms", "vary.n_kv_heads=3", "match=params"]
    request = read_request(["x", *varied, f"runs_dir={tmp_path}", *SMALL])
    first = Runs.of(request)
    write_record(first)
    again = Runs.of(read_request(["x", f"runs_dir={tmp_path}"]))
    arms, same = first.study.all_arms, again.study.all_arms
    assert [(arm.name, arm.overrides) for arm in same] == [(arm.name, arm.overrides) for arm in arms]
    write_record(again)
    with pytest.raises(ConfigError, match="no study of this name"):
        read_request(["x"])


def test_the_record_has_the_agreed_form(tmp_path):
    request = read_request(["x", "vary.placement=deepnorm", "vary.norm=rms", f"runs_dir={tmp_path}", *SMALL])
    write_record(Runs.of(request))
    written = yaml.safe_load((request.directory / "study.yaml").read_text())
    assert list(written) == [
        *("name", "question", "baseline", "design", "factors", "arms", "seeds"),
        *("endpoints", "match", "share", "pinned", "configs", "equal", "checksum"),
    ]
    assert written["baseline"] == [*SMALL, "train.tokens=1966080"]  # 20 per parameter, at one layer fewer
    assert written["factors"] == {"placement": ["deepnorm"], "norm": ["rms"]}
    also = "placement=deepnorm also changes init to xavier"
    assert written["arms"] == [
        {"name": "placement=deepnorm", "overrides": ["placement=deepnorm"], "also_changes": [also]}
    ]
    assert written["equal"] == [{"overrides": ["norm=rms"], "arm": "baseline"}]
    assert written["seeds"] == list(range(8))
    assert written["endpoints"] == [{"name": "val_loss"}]


@pytest.mark.parametrize("text", ["", "a: [", "{}", "name: x", "arms: 3"])
def test_a_damaged_record_is_named(tmp_path, text):
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(UserError, match="damaged"):
        read_study(tmp_path)
    with pytest.raises(UserError, match=r"damaged|cannot be read|is not a study"):
        read_request([tmp_path.name, f"runs_dir={tmp_path.parent}"])


EDITS = (
    ("share: 1.0", "share: 0.2"), ("seeds:\n- 0\n- 1\n", "seeds:\n- 0\n"), ("name: val_loss", "name: train_loss"),
    ("What does", "Why does"), ("- name: val_loss\n", "- name: val_loss\n  delta_min: 0.5\n"),
)  # fmt: skip


@pytest.mark.parametrize("verb", ["compare", "study", "plan", "status"])
@pytest.mark.parametrize(("before", "after"), EDITS)
def test_an_edited_record_is_noticed_by_every_verb_that_reads_it(
    before, after, verb, instant, tmp_path, monkeypatch, capsys
):
    """As a control, without its checksum it is taken for what was launched."""
    monkeypatch.chdir(tmp_path)
    assert main(["study", "x", "vary.norm=layer", "seeds=0,1", *SMALL]) == 0
    record = tmp_path / "runs" / "x" / "study.yaml"
    text = record.read_text()
    assert before in text
    record.write_text(text.replace(before, after, 1))
    command = [verb, *(["runs/x"] if verb in ("compare", "status") else ["x"])]
    capsys.readouterr()
    assert main(command) == (0 if verb == "status" else 2)
    assert "it was changed after a launch wrote it" in " ".join("".join(capsys.readouterr()).split())
    record.write_text("".join(line for line in record.read_text().splitlines(True) if "checksum" not in line))
    main(command)
    assert "it was changed after" not in " ".join("".join(capsys.readouterr()).split())


# ------------------------------------------------------------------------------------------------------------- strata

TWO = {"short": "train.steps=10", "long": ["train.steps=20", "norm=rms"]}


@pytest.mark.parametrize(
    ("strata", "words", "expected"),
    [
        (TWO, [], {"short": ["train.steps=10"], "long": ["train.steps=20", "norm=rms"]}),
        ({"model.n_layers": [1, 2]}, [], {"n_layers-1": ["model.n_layers=1"], "n_layers-2": ["model.n_layers=2"]}),
        ({"as_it_is": [], "bias": "bias=on"}, [], {"as_it_is": [], "bias": ["bias=on"]}),
        ({}, ["strata.norm=rms,layer"], {"norm-rms": ["norm=rms"], "norm-layer": ["norm=layer"]}),
        ({}, ["strata.d_ff_ratio=8/3,4"], {"d_ff_ratio-8over3": ["d_ff_ratio=8/3"], "d_ff_ratio-4": ["d_ff_ratio=4"]}),
        (TWO, ["strata.model=femto,pico"], {"model-femto": ["model=femto"], "model-pico": ["model=pico"]}),
        (TWO, ["norm=rms"], {"short": ["norm=rms", "train.steps=10"], "long": ["train.steps=20", "norm=rms"]}),
    ],
)
def test_each_stratum_is_a_study_whose_baseline_has_its_overrides(strata, words, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        yaml.safe_dump({"question": "q", "arms": ["bias=off"], "strata": strata}, sort_keys=False)
    )
    studies = [request.study for request in strata_of(read_request(["mine.yaml", *words]))]
    assert {study.name: study.baseline for study in studies} == {f"mine@{name}": own for name, own in expected.items()}
    assert all(study.share == 0.5 and study.all_strata == [*expected] for study in studies)


@pytest.mark.parametrize(
    ("strata", "words", "problem"),
    [
        (TWO, ["train.steps=10"], "stratum long of study mine sets this itself"),
        (TWO, ["train.tokens=1000"], "stratum short of study mine sets this itself"),
        (TWO, ["norm=layer", "norm.eps=1e-3"], "stratum long of study mine sets this itself"),
        ({}, ["strata.model=femto"], "strata are two or more"),
        ({}, ["strata.model="], "strata are two or more"),
        ({}, ["strata.norm=rms,layer", "strata.norm=none"], "strata.norm is given twice"),
        ({}, ["strata.seed=0,1"], "seed cannot be part of stratum seed-0"),
        ({}, ["strata.norm=rms,lyer"], "norm has no option of this name"),
        ({"a b": "norm=rms", "c": "norm=none"}, [], "strata takes a mapping of names"),
        ({"a": "norm", "c": "norm=none"}, [], "stratum a is a list of overrides"),
        ({}, ["rungs=2,3"], "there is no key of this name"),
    ],
)
def test_strata_that_would_not_be_what_was_typed_are_refused(strata, words, problem, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        yaml.safe_dump({"question": "q", "arms": ["bias=on"], "strata": strata}, sort_keys=False)
    )
    assert main(["study", "mine.yaml", *words]) == errors.CONFIG
    said = capsys.readouterr().err
    assert problem in said and len(said.splitlines()) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]
    if "sets this itself" in said:
        fix = said.splitlines()[2].partition("try: nexus-ablate study ")[2]
        assert main(["plan", *shlex.split(fix)]) == 0


def test_sizes_are_trained_for_twenty_tokens_per_parameter_each():
    words = ["gqa", "strata.model=femto,pico", "train.batch_size=4"]
    tokens = {}
    for request in strata_of(read_request(words)):
        config = expand(request.study)[1]["baseline"]
        model, resolved = config.model, config.resolved
        parameters = 12 * model.n_layers * model.d_model**2
        tokens[model.name] = (resolved.steps or 0) * resolved.tokens_per_step
        assert tokens[model.name] == pytest.approx(20 * parameters, rel=0.01)
    assert tokens["pico"] == pytest.approx(4 * tokens["femto"], rel=0.01)


# ---------------------------------------------------------------------------------------------------- what is shipped


def test_every_claim_is_a_study_with_question_and_cost():
    assert set(CLAIMS) <= set(shipped_studies())
    for path in shipped_studies().values():
        head = [line for line in path.read_text().splitlines() if line.startswith("#")]
        assert head[0].endswith(("?", "."))
        assert read_request([path.stem]).study.cost.endswith((" on two CPU cores", "(estimated, not measured)"))


def test_every_shipped_study_that_expects_an_equivalent_arm_declares_its_margin():
    declared = set()
    for name in shipped_studies():
        study = read_request([name]).study
        margins = {endpoint.name: endpoint.delta_min for endpoint in study.endpoints}
        for expectation in study.expects:
            if expectation.expected == "equivalent":
                assert margins[expectation.endpoint] != "auto", f"{name}: {expectation.endpoint}"
                declared.add(name)
    assert len(declared) >= 7


@pytest.mark.parametrize("name", sorted(shipped_studies().keys() - {"first_look"}))
def test_every_arm_of_every_shipped_study_composes_and_its_runs_are_as_many_as_it_says(name):
    fewest = most = 0
    for request in strata_of(read_request([name])):
        study, _ = expand(request.study)
        rates, tuning_seeds = len(study.lr_grid), len(study.tuning_seeds)
        tuning, per_seed = rates * tuning_seeds, 3 if rates else 1
        fewest += len(study.all_arms) * (len(study.first_seeds) * per_seed + tuning)
        most += len(study.all_arms) * (len(study.seeds) * per_seed + tuning)
        assert not study.refused
        assert not study.equal
        assert len(study.seeds) >= 5
    runs = f"{fewest} runs" if fewest == most else f"{fewest} to {most} runs"
    assert read_request([name]).study.cost.startswith(f"{runs}, ")


@pytest.mark.parametrize("name", MEASURED)
def test_a_shipped_study_measures_what_its_claim_is_about(name):
    config = expand(strata_of(read_request([name]))[0].study)[1]["baseline"]
    levels = {"off": (), "standard": ("standard",), "full": ("standard", "full")}[config.probe.name]
    measured = {"step", "summary", *levels, *config.evals}
    assert not [measure for measure in MEASURED[name] if not measured & set(find(measure).where)]


def test_counts_agree_with_a_run_s(tiny):
    config = tiny("train.steps=10", "train.batch_size=4", "train.eval_every=5", "train.eval_tokens=30")
    cost = cost_of(config)
    assert (cost.steps, cost.tokens) == (10, 10 * 4 * 8)
    assert seconds_of(config, cost, tokens_per_second=10.0) == pytest.approx(2 + 32 + 3)
    larger = cost_of(tiny("train.batch_size=8"))
    assert larger.memory_bytes > cost.memory_bytes
    by_flops = cost_of(tiny(f"train.flops={10 * cost.flops_per_token * config.resolved.tokens_per_step}"))
    assert by_flops.steps * 16 * 8 >= 10 * 4 * 8
    assert (cost_of(tiny("train.steps=0")).steps, cost_of(tiny("train.steps=0")).tokens) == (0, 0)


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("vary.lr=1e-3,3e-3", "vary.optim.lr=1e-3,3e-3"),
        ("vary.norms=dyt,layer", "vary.norm=dyt,layer"),
        ("strata.n_layers=2,4", "strata.model.n_layers=2,4"),
    ],
)
def test_the_suggested_key_of_several_values_keeps_them_all(typed, fix, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["plan", "mine", "seeds=0", "model=femto", *(["vary.norm=layer"] if "strata" in typed else [])]
    assert main([*words, typed]) == errors.CONFIG
    assert capsys.readouterr().err.splitlines()[2] == f"  try: {fix}"
    assert main([*words, fix]) == 0


@pytest.mark.slow
def test_a_file_named_like_a_shipped_study_is_refused_as_its_name_would_mean_that_one(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ffn.yaml").write_text("question: q?\nbaseline: model=femto\narms: [ffn=relu]\nseeds: [0]\n")
    assert main(["plan", "ffn.yaml"]) == errors.CONFIG
    fix = shlex.split(capsys.readouterr().err.splitlines()[2].removeprefix("  try: "))
    assert fix == ["nexus-ablate", "study", "ffn.yaml", "name=my_ffn"]
    assert main(["plan", *fix[2:]]) == 0
    assert main(["plan", str(conf_dir() / "studies/ffn.yaml")]) == 0, "control: the shipped file itself"


@pytest.mark.parametrize(
    ("there", "words", "problem"),
    [
        ("mine@shallow", ["vary.norm=layer"], "study mine was launched in strata, and has none now"),
        ("mine", ["vary.norm=layer", "strata.bias=on,off"], "study mine was launched without strata, and has some now"),
        ("other", ["vary.norm=layer"], ""),
        ("other@shallow", ["vary.norm=layer", "strata.bias=on,off"], ""),
    ],
)
def test_a_study_never_stands_beside_strata_of_its_name(there, words, problem, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / there).mkdir(parents=True)
    (tmp_path / "runs" / there / "study.yaml").write_text("seeds: [0]\narms: []\n")
    words = ["plan", "mine", *words, "seeds=0", "model=femto"]
    status = main(words)
    said = capsys.readouterr().err
    assert (status, problem in said) == (errors.CONFIG if problem else 0, True)
    fix = said.splitlines()[2].removeprefix("  try: ") if problem else ""
    assert not problem or main([*words, fix]) == 0
