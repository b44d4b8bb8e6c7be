"""What a study asks, how it becomes arms, and how arms are made equal."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.config.options import conf_dir
from nexus_ablate.errors import ConfigError, UserError
from nexus_ablate.launch.arm_configs import arm_key, composed, resolve
from nexus_ablate.launch.cost import cost_of, seconds_of
from nexus_ablate.study.arm_overrides import merged
from nexus_ablate.study.definition import read_study, settings_of, shipped_studies
from nexus_ablate.study.record import load, save
from nexus_ablate.study.study import encode, from_values

SMALL = ["model.n_layers=2", "model.d_model=64", "model.n_heads=2", "model.context=16"]


def resolved(*words):
    """The study and the configurations that words describe."""
    return resolve(read_study(["x", *words])[0], [])


# ---------------------------------------------------------------------------------------------------- what is asked


def test_the_command_line_alone_makes_a_study():
    study, launch = read_study("mine vary.norm=layer,rms vary.bias=on,off seeds=0-2 train.steps=9 runs_dir=r".split())
    assert study.vary == {"norm": ["layer", "rms"], "bias": ["on", "off"]}
    assert (study.name, study.seeds, study.baseline) == ("mine", [0, 1, 2], ["train.steps=9"])
    assert launch == ["runs_dir=r"]


@pytest.mark.parametrize(
    "typed",
    [["arms.rms=norm=rms", "arms.both=norm=rms bias=on"], ["arms={rms: norm=rms, both: norm=rms bias=on}"]],
)
def test_arms_are_named_on_the_command_line_one_by_one_or_together(typed):
    study, _ = read_study(["mine", *typed])
    assert study.arms == {"rms": ["norm=rms"], "both": ["norm=rms", "bias=on"]}


def test_a_file_is_changed_by_what_stands_beside_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("question: which?\nbaseline: [train.steps=9]\nvary: {norm: [layer, rms]}\nseeds: 0-4\n")
    study, _ = read_study([str(path), "train.tokens=100", "name=other", "seeds=5-9"])
    assert (study.name, study.question, study.seeds) == ("other", "which?", [5, 6, 7, 8, 9])
    assert study.baseline == ["train.tokens=100"], "one budget replaces the other"


def test_how_runs_are_carried_out_is_no_part_of_a_study():
    launch = ["runs_dir=x", "tracker=files", "train.device=cpu", "train.threads=2", "train.keep=3"]
    assert read_study(["norms", *launch]) == (read_study(["norms"])[0], launch)


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


MISTAKES = (
    ("nroms", "try: norms"),
    ("mine vary.norm=layer seed=1", "seeds=0,1,2"),
    ("mine vary.norm=layer desing=grid", "try: design=grid"),
    ("mine vary.norm=layer design=gird", "try: design=one_at_a_time"),
    ("mine vary.norm=layer seeds=0,0", "seeds takes seeds, each once"),
    ("mine vary.norm=layer seeds=3", "try: seeds=0-2"),
    ("mine vary.norm=layer seeds=0-4,14-10", "seeds takes seeds, each once"),
    ("mine vary.norm=layer endpoints=val_loss,@x", "endpoints cannot be read"),
    ("mine vary.norm=layer lr_grid=0.1,[", "lr_grid cannot be read"),
    ("mine vary.norm=layer seeds=0-99999999999", "seeds takes seeds, each once"),
    ("vary.norm=layer,rms", "try: nexus-ablate plan mine vary.norm=layer,rms"),
    ("mine vary.norm=layer match=param", "try: match=params"),
    ("mine vary.norm=layer match=seconds", "match takes none | params | flops | tokens"),
    ("mine vary.norm=layer lr_grid=1e-3", "lr_grid takes auto, or three or more rising rates"),
    ("mine vary.norm=layer lr_grid=auto worth=on", "worth cannot be read beside lr_grid"),
    ("mine vary.norm=layer rerun=on", "try: leave rerun out"),
    ("mine vary.norm=layr", "try: vary.norm=layer"),
    ("mine vary.norm=layer vary.nrom=rms", "try: "),
    ("mine norm=layer,none", "try: nexus-ablate plan mine vary.norm=layer,none"),
    (
        "mine norm=layer,rms bias=on,off model=femto",
        "nexus-ablate plan mine vary.norm=layer,rms vary.bias=on,off model=",
    ),
    ("mine vary.bias=on,off norm=layer,rms", "try: nexus-ablate plan mine vary.bias=on,off vary.norm=layer,rms"),
    ("mine vary=norm vary.norm=layer", "try: leave vary=... out"),
    ("mine vary={} vary.norm=layer", "try: leave vary=... out"),
    ("mine vary.norm=layer vary={}", "got: vary.norm=layer"),
    ("mine arms.rms=norm=t5 arms={}", "try: leave arms=... out"),
    ("mine vary.norm=", "got: vary={norm: []}"),
    ("mine vary.norm=", "try: 'vary={norm: [layer, rms]}'"),
    ("mine vary.norm=rms", "no arm other than its baseline"),
    ("mine vary.norm=layer settings.one=bias=on", "settings are two or more"),
    ("mine vary.norm=layer train.stpes=3", "try: train.steps"),
    ("nosuch.yaml", "there is no such file"),
)


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_a_mistake_is_three_lines_with_a_fix(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words.split()]) == errors.CONFIG
    lines = capsys.readouterr().err
    assert said in lines and len(lines.splitlines()) == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("one match=params", "one name=one-2 match=params"),
        ("one seeds=0-4 model=nano", "one name=one-2 seeds=0-4 model=nano"),
        ("one norm=layer,rms", "one-2 vary.norm=layer,rms"),
    ],
)
def test_a_change_of_a_launched_study_is_answered_with_the_same_change_under_another_name(
    words, fix, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("runs/one").mkdir(parents=True)
    save(resolved("name=one", "vary.bias=on", "model=femto")[0], Path("runs/one"))
    for verb in ("plan", "study"):
        assert main([verb, *words.split()]) == errors.CONFIG
        assert capsys.readouterr().err.splitlines()[2] == f"  try: nexus-ablate {verb} {fix}"
    assert main(["plan", *fix.split()]) == 0


@pytest.mark.parametrize(
    ("line", "got", "fix"),
    [
        ("baseline: {model: femto}", "{model: femto}", "[model=femto]"),
        ("arms: {qk_norm: rms}", "rms", "[qk_norm=rms]"),
        ("arms: {a: {qk_norm: rms, bias: on}}", "{qk_norm: rms, bias: true}", "[qk_norm=rms, bias=on]"),
        ("question: QK-norm: does it help?", "question: QK-norm: does it help?", "question: 'QK-norm: does it help?'"),
        ("strata: {a: data=stdlib}", "strata: {a: data=stdlib}", "settings: {shallow: model.n_layers=2, deep:"),
        ("seeds: 5", "seeds: 5", "seeds: 0-4"),
        ("norm: layer", "norm: layer", "baseline: [norm=layer]"),
        ("foo: 3", "foo: 3", "one of name, question"),
        ("desing: grid", "desing: grid", "design: grid"),
        ("baseline: [hydra/launcher=joblib]", "hydra/launcher=joblib", "nexus-ablate -m "),
    ],
)
def test_a_mistake_in_a_study_s_file_is_answered_with_what_was_meant(line, got, fix, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(f"{line}\n")
    assert main(["plan", str(tmp_path / "mine.yaml")]) == errors.CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == f"  got: {got}" and lines[2].startswith(f"  try: {fix}")


@pytest.mark.parametrize("typed", ["1e-2", "0.01", "1.e-02"])
def test_a_margin_is_a_number_in_any_form(typed):
    study, _ = read_study(["mine", "vary.norm=layer", f"endpoints=[{{name: val_loss, delta_min: {typed}}}]"])
    assert study.endpoints[0].delta_min == 0.01


@pytest.mark.parametrize("typed", ["seeds=0", "seeds=[0]", "seeds=0-0"])
def test_one_seed_is_typed_in_any_form(typed):
    assert read_study(["mine", "vary.norm=layer", typed])[0].seeds == [0]


@pytest.mark.parametrize(("mistake", "fix"), [("norm=rmss", "norm=rms"), ("optim.lr=fast", "optim.lr=auto")])
def test_a_typing_error_in_an_arm_stops_the_study_before_it_has_a_folder(tmp_path, capsys, monkeypatch, mistake, fix):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(f"question: which?\narms: {{a: norm=layer, b: {mistake}}}\n")
    assert main(["study", "mine.yaml"]) == errors.CONFIG
    assert f"try: {fix}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_file_named_like_a_shipped_study_is_refused_as_its_name_would_mean_that_one(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ffn.yaml").write_text("question: q?\nbaseline: [model=femto]\narms: {relu: ffn=relu}\nseeds: 0-4\n")
    assert main(["plan", "ffn.yaml"]) == errors.CONFIG
    fix = shlex.split(capsys.readouterr().err.splitlines()[2].removeprefix("  try: "))
    assert fix == ["nexus-ablate", "plan", "ffn.yaml", "name=my_ffn"]
    assert main(["plan", *fix[2:]]) == 0
    assert main(["plan", str(conf_dir() / "studies/ffn.yaml")]) == 0, "control: the shipped file itself"


@pytest.mark.parametrize("name", sorted(shipped_studies()))
def test_a_study_that_is_saved_and_loaded_is_the_same(name, tmp_path):
    study, _ = read_study([name])
    folder = tmp_path / name
    folder.mkdir()
    save(study, folder)
    assert load(folder) == study
    assert from_values(encode(study)) == study


@pytest.mark.parametrize("text", ["", "a: [", "{}", "name: x", "arms: 3"])
def test_a_damaged_record_is_named(tmp_path, text):
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(UserError):
        load(tmp_path)


def test_a_damaged_record_does_not_keep_a_shipped_study_from_being_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("first_look", "norms"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "study.yaml").write_text("a: [")
    assert main(["study", "--new", "my_study.yaml"]) == 0
    assert main(["plan", "norms", "name=norms_femto", "model=femto"]) == 0
    assert main(["plan", "norms", "name=norms-2", "seeds=8-15"]) != 0, "control: the study as it was launched"


def test_the_file_that_new_writes_explains_each_key_and_is_the_study(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["mine", "vary.norm=layer,none", "seeds=0-5", "model=femto", "match=params"]
    assert main(["study", *words, "--new", "mine.yaml"]) == 0
    assert read_study(["mine.yaml"])[0] == read_study(words)[0]
    lines = (tmp_path / "mine.yaml").read_text().splitlines()
    assert "# match: none | params | flops | tokens" in lines and "# worth: on  # on | off" in lines
    assert main(["study", "--new", "first.yaml"]) == main(["plan", "first.yaml"]) == 0
    assert main(["study", *words, "--new", "mine.yaml"]) == errors.CONFIG
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert main(["study", *words, "--new", "-"]) == 0
    assert capsys.readouterr().out.splitlines() == lines


# ------------------------------------------------------------------------------------------------------------- arms


def test_each_design_makes_its_arms():
    two = ["vary.norm=rms,layer", "vary.bias=off,on"]
    assert [*resolved(*two)[0].arms] == ["norm=layer", "bias=on"]
    assert [*resolved(*two, "design=grid")[0].arms] == ["bias=on", "norm=layer", "bias=on,norm=layer"]


def test_an_arm_that_is_the_baseline_under_another_name_is_recognised():
    study, configs = resolved("vary.norm=rms,t5", "vary.norm_bias=off,auto,on")
    assert study.equal == dict.fromkeys(("norm=rms", "norm_bias=off", "norm_bias=auto"), "baseline")
    assert [*study.arms] == ["norm=t5", "norm_bias=on"]
    assert len({arm_key(config) for config in configs.values()}) == 3


def test_a_refused_arm_is_listed_with_its_reason_and_stops_no_other():
    arms = {"t5": "norm=t5 norm_bias=on", "layer": "norm=layer"}
    study, _ = resolve(from_values({"name": "x", "arms": arms}), [])
    assert [*study.arms] == ["layer"]
    assert "has no bias" in study.refused["t5"]
    assert study.cells == 2, "both share the error rate"


def test_arms_are_named_by_their_difference_from_the_study_s_baseline():
    study, configs = resolved("norm=layer", "norm.eps=1e-3", "vary.norm=rms,layer", *SMALL)
    assert [*study.arms] == ["norm=rms"]
    assert configs["norm=rms"].norm.keys["eps"] == 1e-6, "the eps of layer is not that of rms"
    assert study.equal == {"norm=layer": "baseline"}


@pytest.mark.parametrize("vary", ["vary.optim.lr=1e-3,3e-3", "vary.optim.lr=2e-3,4e-3"])
def test_arms_that_differ_in_the_rate_alone_are_refused_where_each_arm_s_rate_is_tuned(vary):
    with pytest.raises(ConfigError, match="differ in the learning rate alone, which lr_grid tunes for each"):
        resolved(vary, "optim.lr=3e-3", "lr_grid=1e-3,3e-3,9e-3", *SMALL)


def test_a_study_that_is_resolved_again_is_the_same():
    first, _ = resolved("vary.gate=elementwise", "vary.norm=rms", "vary.n_kv_heads=3", "match=params", *SMALL)
    again, _ = resolve(first, [])
    assert again == first


def test_what_auto_means_at_the_baseline_is_every_arm_s_budget_in_each_setting():
    study, _ = read_study(["x", "vary.norm=layer", "settings.s=model=femto", "settings.p=model=pico"])
    tokens = {}
    for setting in settings_of(study):
        fixed, configs = resolve(setting, [])
        (budget,) = [text for text in fixed.baseline if text.startswith("train.tokens=")]
        tokens[setting.setting] = int(budget.partition("=")[2])
        model = configs["baseline"].model
        assert tokens[setting.setting] == 20 * 12 * model.n_layers * model.d_model**2
    assert tokens["p"] > tokens["s"]


@pytest.mark.parametrize(
    ("budget", "unit"), [("train.steps=100", "train.steps"), ("train.tokens=204800", "train.tokens")]
)
def test_worth_trains_the_baseline_at_half_and_twice_its_tokens(budget, unit):
    study, configs = resolved("vary.norm=layer", "worth=on", budget, *SMALL)
    tokens = {name: cost_of(config).tokens for name, config in configs.items()}
    assert tokens["baseline-0.5x"] * 2 == tokens["baseline"] == tokens["baseline-2x"] / 2
    assert getattr(configs["baseline-2x"].train, unit.partition(".")[2]) != "auto"
    assert [*study.arms] == ["norm=layer"], "they are no arms"


# --------------------------------------------------------------------------------------------------------- matching


@pytest.mark.parametrize("kind", ["params", "flops"])
def test_a_gate_is_paid_for_with_the_ffn_s_width_as_nearly_as_possible(kind):
    words = ["vary.gate=elementwise", *SMALL, "model.d_ff_multiple=1"]
    amount = "params" if kind == "params" else "flops_per_token"
    _, freely = resolved(*words)
    study, configs = resolved(*words, f"match={kind}")
    base = getattr(cost_of(configs["baseline"]), amount)
    (name,) = study.arms
    residual = getattr(cost_of(configs[name]), amount) / base - 1
    assert abs(residual) < 0.01 < getattr(cost_of(freely["gate=elementwise"]), amount) / base - 1
    gate, width = study.arms[name]
    assert width.startswith("d_ff_ratio=")
    for beside in (-1, 1):
        other = composed(study, [gate, f"d_ff_ratio={configs[name].resolved.d_ff + beside}/64"], [])
        assert abs(getattr(cost_of(other), amount) / base - 1) >= abs(residual)


MATCHED = (
    ("params", {"narrow": "d_ff_ratio=1"}, SMALL, "", "the nearest is"),
    ("params", {"deep": "d_ff_ratio=4"}, ["model.n_layers=24", *SMALL[1:]], "model.n_layers=", ""),
    ("tokens", {"small": "train.batch_size=8"}, ["train.steps=50", *SMALL], "train.steps=100", ""),
)


@pytest.mark.parametrize(("kind", "arms", "baseline", "solved", "refused"), MATCHED)
def test_an_arm_is_matched_by_depth_or_budget_or_refused_with_its_residual(kind, arms, baseline, solved, refused):
    values = {"name": "x", "match": kind, "baseline": baseline, "arms": arms | {"layer": "norm=layer"}}
    study, _ = resolve(from_values(values), [])
    (name,) = arms
    if refused:
        assert refused in study.refused[name] and [*study.arms] == ["layer"]
    else:
        assert study.arms[name][-1].startswith(solved)


def test_counts_agree_with_a_run_s(tiny):
    config = tiny("train.steps=10", "train.batch_size=4", "train.eval_every=5", "train.eval_tokens=30")
    cost = cost_of(config)
    assert (cost.steps, cost.tokens) == (10, 10 * 4 * 8)
    assert seconds_of(config, cost, tokens_per_second=10.0) == pytest.approx(2 + 32 + 3)
    by_flops = cost_of(tiny(f"train.flops={10 * cost.flops_per_token * config.resolved.tokens_per_step}"))
    assert by_flops.steps * 16 * 8 >= 10 * 4 * 8
    assert (cost_of(tiny("train.steps=0")).steps, cost_of(tiny("train.steps=0")).tokens) == (0, 0)


def test_a_study_in_a_folder_of_ones_own_is_found_by_that_folder(tmp_path):
    folder = tmp_path / "there" / "mine"
    folder.mkdir(parents=True)
    save(resolved("vary.norm=layer", *SMALL)[0], folder)
    study, launch = read_study([str(folder)])
    assert study.name == "mine" and launch == [f"runs_dir={Path(tmp_path / 'there')}"]
