"""A study's file and study.yaml decode to one class; what is wrong in them is named with what works."""

from __future__ import annotations

import pytest
import yaml

from nexus_ablate.errors import ConfigError, UserError
from nexus_ablate.plain_data import load_yaml
from nexus_ablate.study.decoding import decode, decode_file, read_study
from nexus_ablate.study.definition import shipped_studies
from nexus_ablate.study.schema import encode

FILE = {"name": "mine", "question": "which?", "arms": ["norm=layer"]}
LAUNCHED = """
name: mine
question: which?
design: list
baseline: [train.steps=9]
arms:
- {name: norm=layer, overrides: [norm=layer]}
- {name: posted, overrides: [placement=post], also_changes: [a note], named: true}
- {name: "gate=headwise", overrides: [gate=headwise, d_ff_ratio=7/3],
   match: {kind: params, target: 100, got: 101, residual: 0.01, solved: [d_ff_ratio=7/3]}}
equal: [{overrides: [norm=rms], arm: baseline}]
refused: [{overrides: [n_kv_heads=3], reason: 3 heads}]
seeds: [0, 1, 2]
endpoints: [{name: val_loss, delta_min: 0.02, tokens: 0.05}, {name: attn/sink_rate}]
match: params
lr_grid: [0.001, 0.002]
tuning_seeds: [1001]
expects: [{arm: posted, endpoint: val_loss, expected: lower}]
requires: {attn/sink_rate: ">= 0.1"}
share: 0.25
stratum: deep
of: all
all_strata: [shallow, deep]
amendments: [{when: "2026-01-01", changes: ["seeds: [0] -> [0,1,2]"]}]
added: [{when: "2026-01-01", seeds: [1, 2]}]
source: abc
"""
"""A study.yaml, which a launch also ends with a checksum."""


def message(values):
    with pytest.raises(ConfigError) as caught:
        decode_file(values)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(shipped_studies()))
def test_a_study_that_is_encoded_and_decoded_is_the_same(name):
    values = load_yaml(shipped_studies()[name].read_text())
    study = decode_file(values | {"name": name})
    encoded = encode(study)
    assert decode(encoded) == study
    assert decode(load_yaml(yaml.safe_dump(encoded, sort_keys=False))) == study
    written = [endpoint if isinstance(endpoint, str) else endpoint["name"] for endpoint in values.get("endpoints", [])]
    assert [endpoint.name for endpoint in study.endpoints] == (written or ["val_loss"])
    assert decode(load_yaml(yaml.safe_dump(encoded))).endpoints == study.endpoints, "keys may be sorted"


def test_a_study_yaml_is_read_as_it_was_written(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/study.yaml").write_text(LAUNCHED)
    study = read_study(tmp_path / "mine")
    assert study is not None
    assert study.baseline == ["train.steps=9"]
    assert [(arm.name, arm.requested, arm.named) for arm in study.arms] == [
        ("norm=layer", ["norm=layer"], False),
        ("posted", ["placement=post"], True),
        ("gate=headwise", ["gate=headwise"], False),
    ]
    assert [(e.name, e.delta_min, e.tokens) for e in study.endpoints] == [
        ("val_loss", 0.02, 0.05),
        ("attn/sink_rate", "auto", 0.0),
    ]
    assert (study.share, study.stratum, study.all_strata) == (0.25, "deep", ["shallow", "deep"])
    assert study.added[0].seeds == [1, 2]
    (tmp_path / "mine/study.yaml").write_text(yaml.safe_dump(encode(study)))
    assert read_study(tmp_path / "mine") == study


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("share: 0.25", "share: 12", "share takes a share of the 5%"),
        ("of: all", "", "stratum, of and all_strata"),
        ("stratum: deep", "stratum: other", "stratum, of and all_strata"),
        ("share: 0.25", "share: 0.25\nlooks: [2, 3]", "seeds.weights takes 2"),
        ("share: 0.25", "share: 0.25\nlooks: [2, 4]\nlook_weights: [0.5, 0.5]", "the last look has all seeds"),
        ("seeds: [0, 1, 2]", "seeds: [0, 1, two]", "expected int, got str"),
        ("seeds: [0, 1, 2]", "", "seeds is missing"),
        ("tuning_seeds: [1001]", "tuning_seeds: [1]", "overlap"),
        ("expected: lower", "expected: smaller", "one of lower, higher"),
        ("attn/sink_rate}", "attn/sunk_rate}", "no measure of this name"),
        ("residual: 0.01", "residual: [x]", "match/residual"),
        ("name: posted, overrides", "name: ../x, overrides", "arms/1/name"),
        ("source: abc", "source: abc\nbudget: 9", "no key of this name: budget: 9"),
        ("source: abc", "source: [abc", "study.yaml is damaged"),
        (LAUNCHED, "[]", "not a mapping"),
        # forms that this version no longer reads
        ("share: 0.25", "tier: C", "no key of this name: tier: C"),
        ("share: 0.25", "delta_min_tokens: 0.05", "no key of this name: delta_min_tokens: 0.05"),
        ("share: 0.25", "endpoint: val_loss", "endpoint and endpoints say the same"),
        ("baseline: [train.steps=9]", "baseline: {arm: baseline, overrides: [x=1]}", "the baseline is a list"),
        ("name: posted, overrides", "name: posted, set", "a named arm has a name and overrides"),
        ("name: posted, overrides", "arm: posted, overrides", "no key of this name: arm"),
        ("design: list", "design: grid", "no factors, from which design=grid builds arms"),
    ],
)
def test_what_the_program_writes_is_checked_like_what_a_user_writes(tmp_path, before, after, problem):
    assert before in LAUNCHED
    (tmp_path / "study.yaml").write_text(LAUNCHED.replace(before, after))
    with pytest.raises(UserError) as caught:
        read_study(tmp_path)
    assert "study.yaml is damaged" in caught.value.problem
    assert problem in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


SEEDS = "seeds: [0, 1, 2, 3, 4]"


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"steps": 100}, "baseline: [train.steps=100]"),
        ({"lr": 0.001}, "lr_grid: [0.001]"),
        ({"lr": [0.001, 0.002]}, "lr_grid: [0.001, 0.002]"),
        ({"vary": {"norm": ["layer"]}}, "factors: {norm: [layer]}"),
        ({"seeds": "0-4"}, SEEDS),
        ({"seeds": "0..2"}, "seeds: [0, 1, 2]"),
        ({"seeds": 3}, "seeds: [0, 1, 2]"),
        ({"seeds": "five"}, SEEDS),
        ({"seeds": [0, "a"]}, SEEDS),
        ({"seed": 3}, "seeds: [3]"),
        ({"desing": "grid"}, "design: grid"),
        ({"match": "param"}, "match: params"),
        ({"norm": "rms", "n_layers": 3}, "baseline: [norm=rms, model.n_layers=3]"),
        ({"steps": 9, "lr": 1, "desing": "grid"}, "baseline: [train.steps=9], lr_grid: [1], design: grid"),
        ({"requires": {"attn/sink_rate": "big"}}, "requires: {attn/sink_rate: '>= 0.1'}"),
        ({"endpoints": ["val_los"]}, "val_loss"),
        (
            {"expects": [{"arm": "norm=layer", "val_loss": "same"}]},
            "expects: [{arm: norm=layer, val_loss: equivalent}]",
        ),
        ({"share": 0.5}, "leave share out"),
        ({"amendments": [], "of": "x"}, "leave of and amendments out"),
        ({"question": ""}, "question: is it better?"),
        ({"arms": ["norm"]}, "norm=layer, or [norm=rms, bias=on]"),
        ({"arms": None, "vary": {"norm": ["rms"]}}, "factors: {norm: [rms]}"),
        ({"arms": None, "factors": {"norm": "rms"}}, "factors: {norm: [layer, rms]}"),
        ({"arms": ["norm=layer seed=3"]}, "seeds=0,1,2"),
        ({"baseline": ["rerun=on"]}, "leave rerun out"),
        ({"baseline": ["train.device=cpu"]}, "pass it on the command line of a launch"),
        ({"arms": {"rms": "norm=rms", "flat": "norm"}}, "norm=layer, or [norm=rms, bias=on]"),
        ({"baseline": {"norm": "rms"}}, "norm=layer, or [norm=rms, bias=on]"),
        ({"question": None}, "question: is it better?"),
        ({"factor": {"norm": ["rms"]}}, "factors: {norm: [rms]}"),
        ({"arms": [{"name": "a/b", "overrides": "norm=rms"}]}, "arms: [norm=layer, bias=on]"),
        ({"arms": [{"name": "baseline", "overrides": "norm=rms"}]}, "another name, such as control"),
        (
            {"expects": [{"arm": "norm=layer", "stratum": "deep"}]},
            "{arm: norm=layer, stratum: deep, val_loss: lower}",
        ),
        (
            {"expects": [{"arm": "norm=layer", "val_loss": "lower"}, {"arm": "norm=layer", "val_loss": "higher"}]},
            "one of them, or a stratum for each",
        ),
        ({"endpoints": [{"name": "val_loss", "delta_min": "0% tokens"}]}, "delta_min: 2% tokens"),
        (
            {"depends_on": {"depth": ["deep", "flat"]}},
            "strata: {shallow: model.n_layers=4, deep: model.n_layers=24}",
        ),
        (
            {"strata": {"deep": "model.n_layers=3", "flat": "model.n_layers=1"}, "depends_on": {"x": ["deep", "deep"]}},
            "x: [deep,flat]",
        ),
    ],
)
def test_the_message_names_a_value_that_works(values, fix):
    text = message(FILE | values)
    assert text.splitlines()[-1] == f"  try: {fix}"


def test_arms_may_be_a_mapping_of_their_names():
    mapping = {"a": "norm=layer", "b": ["bias=on", "placement=post"]}
    listed = [{"name": name, "overrides": overrides} for name, overrides in mapping.items()]
    study = decode_file(FILE | {"arms": mapping})
    assert study == decode_file(FILE | {"arms": listed}) and [arm.name for arm in study.arms] == ["a", "b"]


def test_keys_that_a_launch_writes_are_never_suggested():
    text = message(FILE | {"shared": 1, "stratums": 2, "addd": 3, "sorce": 4, "equals": 5, "rungg": 6})
    suggested = text.splitlines()[-1]
    for name in ("share", "added", "source", "equal", "all_strata", "refused", "amendments"):
        assert f"{name}:" not in suggested
        assert f"{name}," not in suggested


def test_all_wrong_keys_of_a_file_are_named_at_once():
    got = message(FILE | {"stesp": 1, "zzz": [2], "match_": 3}).splitlines()[1]
    assert got == "  got: stesp: 1, zzz: [2], match_: 3"
