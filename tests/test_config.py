import dataclasses

import pytest
import yaml
from hydra_composition import composed_by_hydra

from nexus_ablate.config.compose import compose, compose_values, differences
from nexus_ablate.config.groups import GROUPS
from nexus_ablate.config.options import conf_dir
from nexus_ablate.config.overrides import check_overrides
from nexus_ablate.config.resolve import from_values
from nexus_ablate.config.run_config import CLOSED_GROUPS, RunConfig, keys_of
from nexus_ablate.errors import ConfigError


def test_the_baseline_is_the_one_of_the_contract():
    config = compose()
    names = {
        a: getattr(config, a).name
        for a in ("norm", "placement", "position", "attention", "normalizer", "qk_norm", "gate", "ffn")
    }
    assert names == {
        "norm": "rms",
        "placement": "pre",
        "position": "rope",
        "attention": "dot",
        "normalizer": "softmax",
        "qk_norm": "none",
        "gate": "none",
        "ffn": "swiglu",
    }
    assert (config.bias, config.weight_decay, config.schedule.decay, config.seed) == (False, 0.1, "matrices", 0)
    assert (config.model.name, config.data.name, config.tie_embeddings) == ("pico", "stdlib", True)
    assert (
        config.d_ff_ratio == config.final_norm == config.embed_scale == config.norm_bias == config.init.name == "auto"
    )
    resolved = config.resolved
    assert (resolved.norm_bias, resolved.final_norm, resolved.embed_scale, resolved.init.name) == (
        False,
        True,
        "off",
        "fan_in",
    )
    assert resolved.d_ff == 168  # 8/3 of 64, to the nearest multiple of 8


@pytest.mark.parametrize("group", CLOSED_GROUPS)
def test_every_yaml_of_a_closed_group_holds_exactly_the_keys_of_its_dataclass(group):
    for path in conf_dir().joinpath(group).glob("*.yaml"):
        assert set(yaml.safe_load(path.read_text())) == set(keys_of(CLOSED_GROUPS[group])), path.name


MIXED = [
    ["norm=dyt", "norm.alpha_attn=0.3", "placement=hybridnorm", "train.compile=off", "bias=on"],
    ["model=micro", "model.n_layers=2", "d_ff_ratio=8/3", "optim=muon", "optim.lr=1e-3", "z_loss=1e-4"],
    ["data=files", "data.files=[a.txt,'b c.txt']", "window=[4,0,4,0]", "evals=[streaming:kept:8]", "seed=3"],
    ["norm_gain_sites=[attn,ffn]", "position=rope_yarn", "norm.gain_init=0", "position.factor=2", "++seed=2"],
    ["model.n_heads=${model.n_layers}", "runs_dir=${oc.env:HOME}/runs"],
    ["optim.groups=[embedding:lr:0.1]", "experiment='ab'", "tracker.project=\\${x}", "preset=llama3", "model=micro"],
]
NEEDS_FILES = "data=files", "preset=nanogpt_shakespeare"
CHOICES = [f"{p.parent.name}={p.stem}" for p in sorted(conf_dir().glob("*/*.yaml")) if p.parent.name in GROUPS]
UNROTATED = ("attention=additive", "attention=luong_concat")
"""Scores that take no rotary positions."""
EACH = [[choice, "data.files=[a.txt]"] if choice in NEEDS_FILES else [choice] for choice in CHOICES]
EACH = [[*overrides, "position=alibi"] if overrides[0] in UNROTATED else overrides for overrides in EACH]


def values_of(overrides):
    return compose_values(check_overrides(overrides, sweeps=False))


def test_an_option_that_yaml_reads_as_a_boolean_is_the_option_of_that_name():
    assert compose(["probe=false"]) == compose(["probe=off"])


@pytest.mark.parametrize("overrides", MIXED, ids=",".join)
def test_a_configuration_is_what_hydra_composes(overrides):
    assert from_values(values_of(overrides)) == from_values(composed_by_hydra(overrides))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_each_option_model_and_preset_is_what_hydra_composes(part):
    assert len(EACH) > 140
    for overrides in EACH[part::8]:
        assert values_of(overrides).keys() == composed_by_hydra(overrides).keys()
        assert from_values(values_of(overrides)) == from_values(composed_by_hydra(overrides)), overrides


@pytest.mark.parametrize("preset", ["none", "null"])
def test_a_preset_may_be_none(preset):
    assert compose([f"preset={preset}"]) == compose([])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("norm.theta=1", "norm.eps"),
        ("position.eps=1", "position.theta"),
        ("norm.alpha_attn=1", "try: norm=dyt"),
        ("+norm=rms", "already exists"),
        ("++x=1", "no key of this name"),
        ("~norm", "nothing can be removed"),
        ("train.steps=-1", "int [0, 1e9]"),
        ("bias=offf", "try: bias=off"),
        ("seed=1.5", "int"),
        ("norm=null", "no option of this name"),
        ("norm={a:1}", "no option of this name"),
        ("optim.lr=nan", "float"),
        ("experiment=../elsewhere", "folder"),
        ("hydra.verbose=true", "of Hydra's keys, a multirun takes hydra/launcher"),
        ("hydra.run.dir=x", "try: runs_dir=x"),
        ("hydra/luncher=basic", "hydra/launcher=joblib"),
        ("+hydra/launcher=joblib", "hydra/launcher=joblib"),
        ("norm._target_=os.system", "_target_"),
        ("norm={_target_:os.system}", "_target_"),
        ("train={tokens:3", "cannot be read"),
        ("just words=1", "cannot be read"),
        ("norm=rms,rmss", "try: norm=rms"),
        ("train.steps=5,abc", "int [0, 1e9]"),
    ],
)
def test_an_override_that_cannot_be_meant_is_refused_in_three_lines(override, said):
    with pytest.raises(ConfigError) as refused:
        compose([override])
    text = str(refused.value)
    assert said in text
    assert len(text.splitlines()) <= 3


def test_sweeps_are_checked_value_by_value():
    check_overrides(["norm=layer,rms", "seed=range(0,3)", "train.steps=choice(5,6)"], sweeps=True)
    with pytest.raises(ConfigError, match=r"int \[0"):
        check_overrides(["seed=range(-1,3)"], sweeps=True)


@pytest.mark.parametrize("swept", ["norm=layer,rms", "seed=range(0,3)", "norm=glob(*)"])
def test_several_values_where_one_run_is_meant_are_refused_with_the_multirun_command(swept):
    with pytest.raises(ConfigError, match="a run takes one value per key") as refused:
        compose(["train.steps=5", swept])
    assert f"got: {swept}\n" in str(refused.value) and "nexus-ablate -m" in str(refused.value)


def test_auto_means_what_the_chosen_options_prescribe_and_says_so():
    deep = compose(["placement=deepnorm"]).resolved
    assert (deep.init.name, deep.final_norm) == ("xavier", False)
    assert any("also changes init to xavier" in note for note in deep.notes)
    assert compose(["norm=layer"]).resolved.norm_bias is True
    assert compose(["norm=dyt"]).resolved.embed_scale == "learned"
    assert compose(["ffn=gelu"]).resolved.d_ff == 256
    assert compose(["norm=dyt", "embed_scale=off"]).resolved.notes


def test_the_realised_ffn_ratio_is_kept():
    assert compose().resolved.d_ff_ratio == 168 / 64


def test_tokens_give_the_steps():
    config = compose(["train.tokens=100000"])
    assert config.resolved.steps == 49  # of 16 x 128 tokens
    assert compose(["train.flops=1e12"]).resolved.steps is None  # known only with the model


def test_naming_what_auto_means_is_the_same_run_under_the_same_name():
    base, named = compose(), compose(["d_ff_ratio=8/3", "norm_bias=off", "final_norm=on", "init=fan_in"])
    assert base.science() == named.science()
    assert differences(named) == {}


SPELLINGS = [
    (["norm_gain_sites=[ffn,attn,ffn]", "norm.gain_init=0.5"], ["norm_gain_sites=[attn,ffn]", "norm.gain_init=0.5"]),
    (["nope_every=[3]"], ["nope_every=4"]),
    (["nope_every=[3,1]"], ["nope_every=2"]),
    (["nope_every=[2,1]"], ["nope_every=[1,2]"]),
    (["window=[8,0,8,0]"], ["window=[8,0]"]),
    (["window=[8]"], ["window=8"]),
    (["window=[0,0]"], []),
    (["position.theta=[10000,10000]"], []),
    (["position=rope_yarn", "position.factor=[1,8,1,8]"], ["position=rope_yarn", "position.factor=[1,8]"]),
    (["embed_scale=8"], ["embed_scale=sqrt_d"]),
    (["embed_scale=1"], ["embed_scale=off"]),
    (["logit_scale=1", "vocab_size=256"], []),
    (["qkv_bias=on", "attn_out_bias=on", "ffn_bias=on"], ["bias=on"]),
    (["bias=on", "qkv_bias=off", "attn_out_bias=off", "ffn_bias=off"], []),
    (["optim.cooldown=0.3", "data.bpe_vocab=300"], []),
    (["weight_decay=0", "optim.decay=all"], ["weight_decay=0"]),
]


@pytest.mark.parametrize(("spelled", "plain"), SPELLINGS, ids=lambda overrides: " ".join(overrides))
def test_two_spellings_of_one_computation_are_one_run_under_one_name(spelled, plain):
    one, other = compose(spelled), compose(plain)
    assert one.nested() == other.nested() and one.science() == other.science()
    assert differences(one) == differences(other)


def test_biases_are_the_same_however_they_are_switched_on():
    assert compose(["bias=on", "ffn_bias=off"]).science() == compose(["qkv_bias=on", "attn_out_bias=on"]).science()


@pytest.mark.parametrize("spelled", ["nope_every=[0]", "window=[8,0,8]", "embed_scale=4", "logit_scale=2"])
def test_what_is_computed_otherwise_keeps_its_value(spelled):
    key, _, value = spelled.partition("=")
    assert compose([spelled]).science() != compose().science()
    assert differences(compose([spelled])) == {key: value.strip("[]").replace(",", "+")}


def test_an_arm_is_named_by_its_differences_and_never_by_its_seed():
    config = compose(["norm=layer", "placement=post", "d_ff_ratio=4", "seed=3", "norm.eps=1e-6", "model=mini"])
    assert differences(config) == {
        "model": "mini",
        "norm": "layer",
        "norm.eps": "1e-06",
        "placement": "post",
        "d_ff_ratio": "4",
    }
    assert differences(compose(["norm=rms", "seed=2", "tracker=files", "train.threads=1", "probe=off"])) == {}


def test_a_preset_names_itself_and_then_what_departs_from_it():
    config = compose(["preset=nanogpt_shakespeare", "data.files=[x/a.txt]", "norm=rms"])
    assert differences(config) == {"preset": "nanogpt_shakespeare", "norm": "rms", "data.files": "a.txt"}
    assert config.model.context == 64


def test_what_cannot_change_the_result_is_not_in_the_identity():
    base = compose().science()
    same = ["runs_dir=x", "experiment=y", "tracker=files", "train.device=cpu", "train.threads=1", "train.compile=off"]
    same += ["train.log_every=3", "train.checkpoint_every=7", "probe=off", "rerun=on"]
    assert compose(same).science() == base
    for override in (
        "seed=1",
        "norm.eps=1e-5",
        "train.precision=bf16",
        "optim.lr=1e-3",
        "train.steps=5",
        "bias=on",
        "model.n_layers=5",
    ):
        assert compose([override]).science() != base, override


def test_the_written_configuration_reads_back_as_the_same_run():
    config = compose(
        ["norm=dyt", "placement=hybrid", "d_ff_ratio=8/3", "data=files", "data.files=[a.txt]", "optim.clip=off"]
    )
    again = from_values(yaml.safe_load(yaml.safe_dump(config.nested())))
    assert again == config


def test_every_key_says_what_it_means():
    for cls in (*CLOSED_GROUPS.values(), RunConfig):
        for item in dataclasses.fields(cls):
            if "constraint" in item.metadata:
                assert len(item.metadata["meaning"]) > 3, item.name


def test_an_incomplete_configuration_is_refused():
    values = compose().nested()
    del values["norm"]
    with pytest.raises(ConfigError, match="incomplete"):
        from_values(values)
