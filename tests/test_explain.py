"""What `explain` says is what is built."""

from __future__ import annotations

import json

import pytest
import torch
from equivalences import EQUIVALENT
from options import EVERY_OPTION
from rich.cells import cell_len

from nexus_ablate.axes.modules import parameter_roles
from nexus_ablate.cli import main
from nexus_ablate.config.options import AXES, option_files
from nexus_ablate.measure import counts
from nexus_ablate.measure.architecture import architecture
from nexus_ablate.measure.counts import flops_per_token
from nexus_ablate.model import build_model, countable_model
from nexus_ablate.optimizers import decay_groups

RICH = [
    "placement=subln",
    "norm=layer",
    "position=transformer_xl",
    "attention=additive",
    "normalizer=sink",
    "gate=headwise",
    "qk_norm=rms",
    "kv_bias=key_value",
    "sink_token=on",
    "bias=on",
    "tie_embeddings=off",
    "embed_scale=learned",
]


def explained(config):
    model = countable_model(config, 11)
    return architecture(config, model, decay_groups(model, config.schedule.decay))


EVERY = [[], RICH, *(option.split() for option in EVERY_OPTION)]


def test_components_roles_and_decay_groups_add_up_to_the_real_number_of_parameters(tiny):
    for overrides in EVERY:
        config = tiny(*overrides)
        facts = explained(config)
        real = sum(p.numel() for p in build_model(config, 11).parameters())
        decay = facts["decay"]
        assert facts["parameters"]["total"] == real, overrides
        assert sum(facts["parameters"]["by_component"].values()) == real, overrides
        assert sum(decay["decayed"].values()) + sum(decay["free"].values()) == real, overrides


def test_every_axis_with_parameters_is_a_component_of_its_own(tiny):
    result = set(explained(tiny(*RICH, "placement=rezero", "placement.norm=on"))["parameters"]["by_component"])
    axes = {"placement", "norm", "position", "normalizer", "gate", "qk_norm", "ffn", "attention", "scores"}
    assert result == axes | {"embedding", "sink", "embed_scale", "head"}


@pytest.mark.parametrize("overrides", [[], RICH, ["position=transformer_xl"], ["n_kv_heads=1"]], ids=",".join)
def test_flops_by_component_add_up_to_the_count_that_runs_log_and_none_is_negative(tiny, overrides):
    config = tiny(*overrides)
    flops = explained(config)["flops_per_token"]
    assert flops["training"] == flops_per_token(config, 11)
    assert sum(flops["forward"].values()) == pytest.approx(flops["training"] / 3)
    assert min(flops["forward"].values()) > 0


def test_flops_of_a_component_are_two_for_each_of_its_multiplications(tiny):
    forward = explained(tiny())["flops_per_token"]["forward"]
    layers, d, d_ff, context = 2, 16, 40, 8
    assert forward["attention"] == 2 * layers * 4 * d * d
    assert forward["ffn"] == 2 * layers * 3 * d * d_ff
    assert forward["scores"] == 2 * layers * 2 * context * d
    assert forward["head"] == 2 * d * 11


def initial_stds(config) -> dict[str, set[float]]:
    """The initial standard deviations of the tensors of each role."""
    stds: dict[str, set[float]] = {}
    for row in explained(config)["tensors"]:
        if row["std"] is not None:
            stds.setdefault(row["role"], set()).add(row["std"])
    return stds


@pytest.mark.parametrize(
    "overrides",
    [["init=gpt2"], ["placement=deepnorm"], ["placement=subln"], ["init=xavier"], ["param=ngpt", "init=gpt2"]],
)
def test_initial_values_are_those_of_the_built_model(tiny, overrides):
    config = tiny(*overrides, "model.d_model=128", "bias=on")
    model = build_model(config, 256)
    roles = parameter_roles(model)
    for role, stds in initial_stds(config).items():
        if role == "embedding":
            continue  # another vocabulary
        values = torch.cat([p.flatten() for name, p in model.named_parameters() if roles[name] == role])
        assert [*stds] == [pytest.approx(values.std().item(), rel=0.02)], role


def test_a_placement_s_gain_is_in_the_initial_values_of_the_roles_that_it_scales(tiny):
    scaled, plain = (initial_stds(tiny(f"placement={name}", "init=xavier")) for name in ("deepnorm", "post"))
    assert {role for role in plain if scaled[role] != plain[role]} == {"value", "attn_out", "ffn_in", "ffn_out"}
    assert min(scaled["value"]) / min(plain["value"]) == pytest.approx((8 * 2) ** -0.25)


@pytest.mark.parametrize(
    ("overrides", "sites"),
    [
        ([], {"norm_attn": 16, "norm_ffn": 16, "final_norm": 16}),
        (["placement=post"], {"norm_attn": 16, "norm_ffn": 16}),
        (["norm=none"], {"norm_attn": 16, "norm_ffn": 16, "final_norm": 16}),
        (
            ["placement=post", "qk_norm=rms"],
            {k: 16 for k in ("norm_attn", "norm_ffn")} | {"attn.qk_norm.query": 8, "attn.qk_norm.key": 8},
        ),
        (
            ["placement=subln"],
            {"norm_attn": 16, "attn.inner_norm": 16, "norm_ffn": 16, "ffn.inner_norm": 40, "final_norm": 16},
        ),
    ],
    ids=str,
)
def test_norm_sites_are_named_with_their_width_and_blocks(tiny, overrides, sites):
    described = explained(tiny(*overrides))["norms"]
    assert {site["site"]: site["width"] for site in described} == sites
    assert all(site["blocks"] == ([] if site["site"] == "final_norm" else [0, 1]) for site in described)


def test_a_site_of_some_blocks_names_them(tiny):
    (site,) = (s for s in explained(tiny("placement=hybridnorm_star"))["norms"] if s["site"] == "norm_attn")
    assert site["blocks"] == [0]


def test_every_auto_shows_its_value_and_the_option_that_prescribes_it(tiny):
    described = {a["key"]: (a["means"], a["by"]) for a in explained(tiny("norm=dyt", "placement=deepnorm"))["auto"]}
    assert described["embed_scale"] == ("learned", "norm=dyt")
    assert described["norm_bias"] == (False, "norm=dyt")
    assert described["init"] == ("xavier", "placement=deepnorm")
    assert described["d_ff_ratio"] == (2.5, "ffn=swiglu")
    assert described["model.head_dim"] == (8, "d_model / n_heads")
    assert described["norm.alpha_attn"] == (None, "by width, Table 11")
    assert described["attn_scale"][0] == 8**-0.5
    assert all(by for _, by in described.values())
    assert "final_norm" not in {a["key"] for a in explained(tiny("final_norm=on"))["auto"]}


def test_equations_show_the_values_that_are_in_force(tiny):
    config = tiny("norm=layer", "norm_bias=off", "norm.eps=1e-3", "embed_scale=sqrt_d", "final_softcap=30")
    described = {part["of"]: part for part in explained(config)["equations"]}
    assert described["norm=layer"]["keys"]["eps"] == 1e-3
    assert described["norm=layer"]["keys"]["norm_bias"] is False
    assert described["embedding"]["lines"] == ["x = sqrt(d_model) E[token]"]
    assert described["head"]["lines"] == [
        "logits = E h, h the output of the last block, normed",
        "logits <- c tanh(logits / c)",
    ]
    assert {f"{axis}={getattr(config, axis).name}" for axis in set(AXES) - {"init"}} < described.keys()


def test_kernels_are_grouped_by_layer_with_a_reason(tiny):
    (fused,) = explained(tiny())["kernels"]
    assert (fused["kernel"], fused["layers"]) == ("fused", [0, 1])
    (plain,) = explained(tiny("attn_softcap=5"))["kernels"]
    assert plain["kernel"] == "plain"
    assert "soft-cap" in plain["reason"]
    assert [k["layers"] for k in explained(tiny("window=[4,0]"))["kernels"]] == [[0], [1]]


@pytest.mark.parametrize(
    ("overrides", "kernel"),
    [
        ([], "flash"),
        (["position=alibi"], "FlexAttention: bias by distance"),
        (["attn_softcap=5", "window=64"], "FlexAttention: block mask of the window, soft-cap"),
        (["normalizer=sink"], "FlexAttention: own key"),
        (["position=t5"], "a full T x T mask"),
        (["position=transformer_xl"], "a full T x T mask"),
        (["normalizer=sigmoid"], "plain"),
    ],
)
def test_the_kernel_of_a_gpu_is_named(tiny, overrides, kernel):
    (named,) = explained(tiny("model.context=128", "model.d_model=32", *overrides))["kernels"]
    assert kernel in named["gpu"]


def test_notes_are_those_of_the_run(tiny):
    config = tiny("placement=deepnorm")
    assert explained(config)["notes"] == config.resolved.notes != []


def test_an_equivalence_is_reported_for_both_options(tiny):
    rms, t5 = (
        {(e["option"], e["same_as"]) for e in explained(tiny(option))["equivalent"]}
        for option in ("norm=rms", "norm=t5")
    )
    assert ("norm=rms", "norm=t5") in rms
    assert ("norm=t5", "norm=rms") in t5


def test_every_pair_of_options_that_the_tests_prove_equal_is_reported():
    described = {
        frozenset((f"{axis}={option.name}", other))
        for axis in AXES
        for option in option_files(axis).values()
        for other in option.equals
    }
    pairs = [(e.first[0], e.second[0]) for e in EQUIVALENT if len(e.first) == len(e.second) == 1]
    assert {frozenset(pair) for pair in pairs if not any("." in side for side in pair)} <= described


@pytest.mark.parametrize("axis", AXES)
def test_what_an_option_equals_exists_and_its_equation_is_plain_ascii(axis, tiny):
    for option in option_files(axis).values():
        assert option.equation or option.name == "auto", option.name
        assert all(isinstance(line, str) and line.isascii() for line in option.equation), option.name
        for other in option.equals:
            unrotated = ["position=alibi"] if axis == "attention" else []  # additive scores take no rotary positions
            tiny(f"{axis}={option.name}", other, *unrotated)


@pytest.mark.parametrize(
    "overrides",
    [
        ["norm=layer", "placement=post"],
        ["placement=deepnorm", "norm=dyt"],
        ["preset=nanogpt_shakespeare", "data.files=[x]"],
        RICH,
    ],
    ids=",".join,
)
def test_it_is_readable_in_80_columns_and_needs_no_data(capsys, monkeypatch, tmp_path, overrides):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", *overrides]) == 0
    screen = capsys.readouterr().out
    assert len(screen.splitlines()) <= 50
    assert max(map(cell_len, screen.splitlines())) <= 80
    assert "vocabulary 256" in " ".join(screen.split())
    for title in ("equations", "parameters", "FLOPs", "regime"):
        assert title in screen
    assert not list(tmp_path.iterdir())


def test_json_is_one_object_with_the_vocabulary_that_was_asked_for(capsys):
    assert main(["explain", "model=micro", "vocab_size=1000", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["vocab_size"] == 1000
    assert facts["parameters"]["by_component"]["embedding"] == 1000 * facts["size"]["d_model"]
    assert facts["arm"] == "model=micro,vocab_size=1000"


def test_flops_counted_with_few_sequences_are_those_of_all_of_them(tiny):
    for overrides in EVERY[::2]:
        model = countable_model(tiny(*overrides), 11)
        assert counts.flops_by_module(model, 8, 3) == counts._forward_flops(model, 8, 3), overrides


def test_a_large_model_is_counted_without_memory_as_a_small_one_is_with_it(tiny, monkeypatch):
    small = countable_model(tiny(*RICH), 11)
    monkeypatch.setattr("nexus_ablate.model._FEW_PRODUCTS", 0)
    large = countable_model(tiny(*RICH), 11)
    assert (next(small.parameters()).device.type, next(large.parameters()).device.type) == ("cpu", "meta")
    assert counts.flops_by_module(small, 8, 4) == counts.flops_by_module(large, 8, 4)


def test_the_vocabulary_is_that_of_the_data(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("words and words " * 1000)
    counted = {}
    for tokenizer in ("bytes", "bpe"):
        words = [
            "model=nano",
            "data=files",
            "data.files=[book.txt]",
            f"data.tokenizer={tokenizer}",
            "data.bpe_vocab=4096",
        ]
        assert main(["explain", *words, "--json"]) == 0
        counted[tokenizer] = json.loads(capsys.readouterr().out)
    assert (counted["bytes"]["vocab_size"], counted["bpe"]["vocab_size"]) == (256, 4096)
    assert counted["bpe"]["parameters"]["total"] > counted["bytes"]["parameters"]["total"]
