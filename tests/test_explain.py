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


def test_decay_groups_add_up_to_the_real_number_of_parameters(tiny):
    for overrides in EVERY:
        config = tiny(*overrides)
        facts = explained(config)
        real = sum(p.numel() for p in build_model(config, 11).parameters())
        decay = facts["decay"]
        assert facts["parameters"]["total"] == real, overrides
        assert sum(decay["decayed"].values()) + sum(decay["free"].values()) == real, overrides


def test_flops_are_two_for_each_multiplication(tiny):
    layers, d, d_ff, context = 2, 16, 40, 8
    attention, ffn, scores = 4 * d * d, 3 * d * d_ff, 2 * context * d
    forward = 2 * (layers * (attention + ffn + scores) + d * 11)
    assert explained(tiny())["flops_per_token"] == flops_per_token(tiny(), 11) == 3 * forward


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
    other, d_model = facts["parameters"]["without_embeddings"], facts["size"]["d_model"]
    assert facts["parameters"]["total"] - other == 1000 * d_model
    assert facts["arm"] == "model=micro,vocab_size=1000"


def test_flops_counted_with_few_sequences_are_those_of_all_of_them(tiny):
    for overrides in EVERY[::2]:
        model = countable_model(tiny(*overrides), 11)
        assert counts.forward_flops(model, 8, 3) == counts._counted_flops(model, 8, 3), overrides


def test_a_large_model_is_counted_without_memory_as_a_small_one_is_with_it(tiny, monkeypatch):
    small = countable_model(tiny(*RICH), 11)
    monkeypatch.setattr("nexus_ablate.model._FEW_PRODUCTS", 0)
    large = countable_model(tiny(*RICH), 11)
    assert (next(small.parameters()).device.type, next(large.parameters()).device.type) == ("cpu", "meta")
    assert counts.forward_flops(small, 8, 4) == counts.forward_flops(large, 8, 4)


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
