"""What a mixer reads: choices that act through the mixer alone are refused beside one that doesn't read them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from tensors import TOKENS

from nexus_ablate.axes.mixer import MIXER
from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose, differences
from nexus_ablate.config.plugins import VARIABLE, add_plugins
from nexus_ablate.config.rules import READ_BY_MIXERS
from nexus_ablate.errors import ConfigError
from nexus_ablate.measure.evaluation import NotDefined, Subject
from nexus_ablate.measure.evaluation.intervention import Intervention
from nexus_ablate.measure.evaluation.streaming import Streaming
from nexus_ablate.model import build_model
from nexus_ablate.training.session import train

AVERAGE = '''
import torch
from nexus_ablate.axes.mixer import MIXER, Mixer
from nexus_ablate.axes.modules import Linear

@MIXER.register("average")
class Average(Mixer):
    """The mean of all earlier tokens, projected."""

    def __init__(self, parts):
        super().__init__()
        self.out = Linear(parts.geometry.d_model, parts.geometry.d_model, False, role="attn_out")

    def forward(self, x, context):
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.out(x.cumsum(1) / count)
'''
YAML = "# The mean of all earlier tokens: an example, published nowhere.\nname: average\n"
SET = {
    "qk_norm": "qk_norm=rms",
    "normalizer": "normalizer=sigmoid",
    "gate": "gate=headwise",
    "attention": "attention=luong_dot",
    "window": "window=4",
    "n_kv_heads": "n_kv_heads=1",
    "position": "position=alibi",
    "value": "value=residual",
    "kv_bias": "kv_bias=key",
    "attn_softcap": "attn_softcap=5",
    "attn_scale": "attn_scale=1",
    "clip_qkv": "clip_qkv=1",
    "qkv_bias": "qkv_bias=on",
    "attn_out_bias": "attn_out_bias=on",
    "model.head_dim": "model.head_dim=4",
    "conv.attn_in": "conv=canon conv.qkv=off",
    "conv.qkv": "conv=canon conv.attn_in=off",
}
"""A setting of each key that acts through mixers alone."""


@pytest.fixture
def average(tmp_path, monkeypatch):
    """A plugin's mixer that reads nothing; a function changes its YAML. Nothing of it is left behind."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(MIXER, "_classes", dict(MIXER._classes))

    def make(yaml: str = YAML) -> None:
        (tmp_path / "mine" / "mixer").mkdir(parents=True)
        (tmp_path / "mine" / "average.py").write_text(AVERAGE)
        (tmp_path / "mine" / "mixer" / "average.yaml").write_text(yaml)
        add_plugins([tmp_path / "mine"])

    yield make
    for name in [name for name in sys.modules if name.startswith("nexus_ablate_plugin_")]:
        del sys.modules[name]


def test_there_is_a_setting_here_for_every_key_that_acts_through_mixers_alone_and_the_page_names_it():
    page = Path(__file__).resolve().parents[1].joinpath("docs", "adding_an_option.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"act through mixers alone: `([^`]*)`", page)
    assert SET.keys() == READ_BY_MIXERS.keys() == set(listed.split())


@pytest.mark.parametrize("key", SET)
def test_a_choice_that_the_mixer_does_not_read_is_refused_in_three_lines(average, tiny, key):
    average()
    tiny(*SET[key].split())
    with pytest.raises(ConfigError, match=f"mixer=average does not read {key}") as refused:
        tiny("mixer=average", *SET[key].split())
    assert len(str(refused.value).splitlines()) == 3
    tiny("mixer=average", *SET[key].split(), refused.value.fix)


@pytest.mark.parametrize("key", SET)
def test_a_choice_that_the_mixer_of_one_layer_reads_is_accepted(average, tiny, key):
    average()
    tiny("mixer=average", "mixer.layers=[2]", "model.n_layers=3", *SET[key].split())


def test_an_option_in_layers_whose_mixers_do_not_read_it_is_refused(average, tiny):
    average()
    tiny("mixer=average", "mixer.layers=[0]", "gate=headwise", "gate.layers=[1]")
    with pytest.raises(ConfigError, match="does not read gate"):
        tiny("mixer=average", "mixer.layers=[0]", "gate=headwise", "gate.layers=[0]")


def test_what_another_option_prescribes_is_refused_with_that_option(average, tiny):
    average()
    with pytest.raises(ConfigError, match=r"does not read qk_norm.*\n.*placement=hybridnorm\n.*another placement"):
        tiny("mixer=average", "placement=hybridnorm")


def test_the_default_position_beside_a_mixer_that_does_not_read_it_is_no_position_and_says_so(average, tiny):
    average()
    config = tiny("mixer=average")
    assert config.position.name == "none" and "so it is position=none" in " ".join(config.resolved.notes)
    assert config.science() == tiny("mixer=average", "position=none").science()
    assert differences(config)["position"] == "none"


def test_explain_refuses_it_too_and_leaves_out_the_axes_that_are_not_read(average, capsys):
    average()
    assert main(["explain", "mixer=average", "gate=headwise"]) == 2
    assert [line.split(":")[0].strip() for line in capsys.readouterr().err.splitlines()] == ["error", "got", "try"]
    assert main(["explain", "mixer=average"]) == 0
    shown = capsys.readouterr().out
    assert "mixer=average" in shown and "attention=dot" not in shown and "normalizer=softmax" not in shown


@pytest.mark.parametrize("name", ["streaming", "intervention"])
@pytest.mark.parametrize("layers", ["all", "[0]"])
def test_an_evaluation_of_attention_is_not_defined_before_training(average, tiny, name, layers):
    average()
    with pytest.raises(ConfigError, match=rf"evals=\[{name}\] is not defined for mixer=average"):
        tiny("mixer=average", f"mixer.layers={layers}", f"evals=[{name}]")


@pytest.mark.parametrize("evaluation", [Streaming(kept=1, texts=1, length=2), Intervention(calibration=1)])
def test_an_evaluation_of_attention_is_not_defined_for_a_finished_run(average, tiny, evaluation):
    average()
    subject = Subject(build_model(tiny("mixer=average"), 11), None, 8, 64)  # type: ignore[arg-type]
    with pytest.raises(NotDefined, match="no attention maps"):
        evaluation(subject)


@pytest.mark.parametrize(("layers", "says"), [("all", "are not defined"), ("[0]", r"of the layers \[1\] alone")])
def test_explain_says_which_layers_have_attention_maps(average, tiny, layers, says):
    average()
    (note,) = [n for n in tiny("mixer=average", f"mixer.layers={layers}").resolved.notes if "attention maps" in n]
    assert re.search(says, note)
    assert not [n for n in tiny().resolved.notes if "attention maps" in n]


@pytest.mark.parametrize(
    ("reads", "says"),
    [("[gtae]", "reads a key that does not act through mixers"), ("[attention]", "if and only if")],
)
def test_a_wrong_declaration_is_refused(average, tiny, reads, says):
    average(f"{YAML}reads: {reads}\n")
    with pytest.raises(ConfigError, match=says):
        build_model(tiny("mixer=average"), 11)


def test_a_layer_has_the_mixer_that_the_list_says(average, tiny):
    average()
    model = build_model(tiny("mixer=average", "mixer.layers=[1]", "model.n_layers=3"), 11)
    assert [type(block.attn).__name__ for block in model.blocks] == ["Attention", "Average", "Attention"]
    assert torch.isfinite(model(TOKENS)).all()


def test_the_order_of_a_list_of_layers_is_no_other_run(tiny):
    first, second = (tiny("ffn=gelu", "model.n_layers=3", f"ffn.layers={layers}") for layers in ("[0,2]", "[2,0]"))
    assert first.science() == second.science() != tiny("ffn=gelu", "model.n_layers=3").science()


def test_a_value_residual_begins_in_the_first_of_its_layers(tiny):
    """Layer 1 leaves its values, and layer 2 alone adds them."""
    model = build_model(tiny("value=residual", "value.learned=on", "value.layers=[1,2]", "model.n_layers=3"), 11)
    learned = [name for name, _ in model.named_parameters() if name.endswith("values.factors")]
    assert learned == ["blocks.2.attn.values.factors"] and torch.isfinite(model(TOKENS)).all()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("ffn=gelu ffn.layers=[0]", r"ffn=swiglu, have d_ff 64 too, not their published 40"),
        ("ffn=moe ffn.layers=[0]", r"ffn=swiglu, have d_ff 24 too, not their published 40"),
        ("ffn=gelu", ""),
        ("ffn=geglu ffn.layers=[0]", ""),
        ("ffn=gelu ffn.layers=[0] d_ff_ratio=4", ""),
    ],
)
def test_layers_that_get_the_ffn_width_of_the_others_say_so(tiny, overrides, says):
    notes = [note for note in tiny(*overrides.split()).resolved.notes if "d_ff" in note and "ffn.layers" in note]
    assert len(notes) == bool(says) and re.search(says, " ".join(notes))


def test_a_mixture_of_experts_may_be_beside_convolutions_of_attention(tiny_run):
    off = ("conv=canon", "conv.ffn_in=off", "conv.ffn_hidden=off")
    assert train(compose(tiny_run("ffn=moe", *off, "train.steps=2")), quiet=True)


def test_layers_of_a_mixture_of_experts_are_between_dense_ones(tiny):
    config = tiny("ffn=moe", "ffn.layers=[1]", "model.n_layers=3", "train.activation_checkpointing=on")
    model = build_model(config, 11)
    assert [type(block.ffn).__name__ for block in model.blocks] == ["SwiGLU", "MixtureOfExperts", "SwiGLU"]
    context = model.context(TOKENS)
    model.hidden(TOKENS, context)
    assert len(context.figures["router_entropy"]) == 1
