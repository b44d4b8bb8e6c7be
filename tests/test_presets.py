"""Published decoders, read from their own configuration, against the models of the `transformers` library."""

from __future__ import annotations

import functools

import pytest
import torch
from published import DECODERS, VOCAB, library_model, tokens

from nexus_ablate.config.compose import compose
from nexus_ablate.config.options import AXES, conf_dir
from nexus_ablate.errors import ConfigError
from nexus_ablate.model import GPT
from nexus_ablate.pretrained.expression import Expression, express
from nexus_ablate.pretrained.families import FAMILIES


@functools.cache
def published(name: str) -> tuple[torch.nn.Module, Expression, torch.Tensor]:
    """The library's model, what it is in our keys, and its logits."""
    model = library_model(name)
    with torch.no_grad():
        return model, express(model.config, model.state_dict()), model(tokens()).logits


def logits(name: str, *departures: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The package's logits and the library's, on the same tokens and weights."""
    _, expression, expected = published(name)
    actual = GPT(compose(expression.overrides), VOCAB)
    state = expression.state(actual)
    actual = GPT(compose([*expression.overrides, *departures]), VOCAB) if departures else actual
    actual.eval().load_state_dict(state, strict=not departures)
    with torch.no_grad():
        return actual(tokens()), expected


@pytest.mark.parametrize("name", DECODERS)
def test_a_published_decoder_gives_the_logits_of_another_librarys_model(name):
    actual, expected = logits(name)
    assert 0.1 < expected.std() < 2
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "departure"),
    [
        ("gpt2", "ffn=gelu"),
        ("llama", "position.pairing=interleaved"),
        ("llama3", "position.factor=1"),
        ("llama with linear scaling", "position.factor=1"),
        ("olmo2", "position.theta=10000"),
        ("gemma2", "attn_softcap=off"),
        ("gemma2", "final_softcap=off"),
        ("gemma2", "window=[0,7]"),
        ("gemma2", "embed_scale=off"),
        ("gemma2", "ffn.tanh=off"),
        ("gemma2", "attn_scale=auto"),
        ("gemma3", "position.theta=10000"),
        ("gemma3 4b", "position.factor=8"),
        ("gpt_neox", "position.fraction=0.5"),
        ("gpt_neox", "placement=pre"),
        ("gpt_oss", "position.attention_factor=1"),
        ("gpt_oss", "position.truncate=on"),
        ("gpt_oss", "ffn.limit=7"),
        ("gpt_oss", "ffn.up_shift=0"),
        ("gpt_oss", "normalizer=softmax"),
        ("granite", "placement.branch_scale=1"),
        ("granite", "embed_scale=off"),
        ("granite", "logit_scale=off"),
        ("mistral", "window=6"),
        ("smollm3", "nope_every=3"),
        ("cohere", "logit_scale=off"),
        ("cohere2", "nope_every=off"),
        ("gptj", "position.pairing=half"),
        ("gptj", "head_bias=off"),
        ("mpt", "position=none"),
        ("mpt", "clip_qkv=off"),
        ("falcon rw", "position.slope_factor=1"),
        ("bloom", "embed_norm=off"),
        ("phi with qk-norm", "qk_norm.after_rotation=on"),
        ("xglm", "position.layout=paper"),
    ],
)
def test_the_comparison_sees_a_departure_in_one_key(name, departure):
    actual, expected = logits(name, departure)
    assert (actual - expected).abs().max() > 1e-4


def test_every_preset_of_a_published_decoder_is_the_start_of_a_family():
    presets = {family.preset for family in FAMILIES.values()} | {"llama3"}
    assert presets == {*PRESETS} - {*RECIPES}


@pytest.mark.parametrize("name", ["bloom", "cohere", "gpt_oss", "granite", "llama3", "olmo2", "qwen3", "stablelm"])
def test_what_a_preset_leaves_to_say_are_sizes_and_released_constants(name):
    """The override line names no option: its preset has them all."""
    _, expression, _ = published(name)
    assert expression.overrides[0] == f"preset={name}"
    assert not [text for text in expression.overrides[1:] if text.partition("=")[0] in AXES]


RECIPES = ("nanogpt_shakespeare", "ngpt")
"""Presets that set training too: a whole recipe, and a method without warm-up and weight decay."""
PRESETS = sorted({path.stem for path in conf_dir().joinpath("preset").glob("*.yaml")} - {"none"})


@pytest.mark.parametrize("preset", ["gpt2", "gemma3", "gpt_oss", "cohere2"])
@pytest.mark.parametrize("change", ["norm=dyt", "placement=post", "position=alibi", "position=rope_llama3", "ffn=relu"])
def test_any_part_of_a_preset_can_be_exchanged(preset, change):
    """The keys that the preset sets for its own option do not stay behind."""
    axis, name = change.split("=")
    option = getattr(compose([f"preset={preset}", change]), axis)
    assert option == getattr(compose([change]), axis)
    assert option.name == name


def test_a_key_that_the_user_sets_for_the_exchanged_option_stays():
    assert compose(["preset=olmo2", "position=irope", "position.theta=7"]).position.keys["theta"] == 7
    assert compose(["preset=olmo2"]).position.keys["theta"] == 500000
    assert (
        compose(["preset=nanogpt_shakespeare", "model=small"]).model.context == compose(["model=small"]).model.context
    )
    with pytest.raises(ConfigError, match="alibi"):
        compose(["preset=olmo2", "position=alibi", "position.theta=7"])


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset not in RECIPES])
def test_a_preset_sets_the_architecture_and_neither_size_nor_training(preset):
    chosen, base = compose([f"preset={preset}"]), compose([])
    for group in ("model", "optim", "train", "data", "init"):
        assert getattr(chosen, group) == getattr(base, group)
    assert (chosen.seed, chosen.weight_decay, chosen.z_loss) == (base.seed, base.weight_decay, base.z_loss)
