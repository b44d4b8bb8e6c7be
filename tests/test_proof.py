"""The proof that an imported model is the published one, and what it must refuse: every protection has its control."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nexus_ablate.errors import ConfigError
from nexus_ablate.pretrained import proof
from nexus_ablate.pretrained.expression import express
from nexus_ablate.pretrained.families import FAMILIES, Family
from nexus_ablate.pretrained.library import built, outline, parse_config
from nexus_ablate.pretrained.proof import counterpart, structure

PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())
"""config.json files as they are on the hub, with legacy, missing, nested and inert keys, at tiny sizes."""
FAST = {"gpt2", "gemma3 scaling alone", "multi head", "olmo3 yarn"}


def slow_but(names: set[str], every) -> list:
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in every]


def tokens_of(config) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))


def difference(config) -> float:
    """The largest difference of a logit at the configuration's own sizes, in float32."""
    library = built(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in library.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        expression = express(config, library.state_dict())
        model = counterpart(expression, 24)
        model.load_state_dict(expression.state(model))
        expected = library(input_ids=tokens_of(config), use_cache=False).logits
        return float((model(tokens_of(config)) - expected).abs().max())


@pytest.mark.parametrize("name", slow_but(FAST, PUBLISHED))
def test_a_published_config_is_exact_whatever_keys_it_has_or_lacks(name):
    config = parse_config(PUBLISHED[name])
    assert structure(config).difference < 1e-9
    if config.hidden_size < 100:
        assert difference(config) < 1e-4


def config_of(kind: str, **values):
    return parse_config({"model_type": kind, "num_hidden_layers": 4} | values)


DEPARTURES = [
    ("llama", "position.theta=9999"),
    ("llama", "norm.eps=2e-6"),
    ("gemma2", "attn_softcap=49"),
    ("gpt2", "ffn=gelu"),
    ("mistral", "window=9"),
]


@pytest.mark.parametrize(("kind", "departure"), DEPARTURES)
def test_the_proof_sees_a_departure_in_one_key(kind, departure):
    found = structure(config_of(kind), [departure])
    assert found.difference > 1e-6 and found.part == "block 0 or the embedding"
    with pytest.raises(ConfigError, match="not the same") as refused:
        found.check("not the same")
    assert "first in block 0" in refused.value.got


def test_the_proof_names_the_first_block_that_differs():
    types = ["full_attention"] * 3 + ["sliding_attention"]
    found = structure(config_of("qwen3", layer_types=types, sliding_window=64, use_sliding_window=True), ["window=off"])
    assert found.part == "block 3"
    assert structure(config_of("gemma2"), ["final_softcap=29"]).part == "the final norm or the head"


def test_float32_inside_a_model_would_hide_what_the_proof_looks_for(monkeypatch):
    import contextlib

    assert structure(config_of("llama")).difference < 1e-13
    monkeypatch.setattr(proof, "in_double", contextlib.nullcontext)
    assert structure(config_of("llama")).difference > 1e-9


MISSING = {
    "mixtral": "a mixture of experts (ffn=moe would do",
    "mamba": "layers with a recurrent state",
    "deepseek_v3": "only a mapping is missing), keys and values from a narrow projection (latent attention)",
    "bart": "an encoder",
    "diffllama": "differential attention",
    "roberta": "an embedding of something other than tokens and positions, a head with layers of its own",
    "gemma4_text": "an embedding for each layer, learned factors on branches, queries or channels",
    "modernbert-decoder": "a head with layers of its own",
}


@pytest.mark.parametrize("kind", MISSING)
def test_an_unknown_type_is_refused_with_the_part_that_no_option_has(kind):
    config = parse_config({"model_type": kind})
    with pytest.raises(ConfigError) as refused:
        express(config, outline(config))
    assert MISSING[kind] in refused.value.got


def test_a_model_that_transformers_cannot_run_is_refused():
    with pytest.raises(ConfigError, match="cannot run a model"):
        structure(config_of("phi", hidden_size=65, num_attention_heads=4, intermediate_size=64))


def test_a_rotation_of_too_few_channels_is_refused_with_a_share_that_is_proved():
    def rotating(share):
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
        return config_of("phi", hidden_size=64, num_attention_heads=4, intermediate_size=64, rope_parameters=rope)

    with pytest.raises(ConfigError, match=r"at least 4 of them\n.*=0.02, head_dim=16\n.*partial_rotary_factor=0.25"):
        structure(rotating(0.02))
    assert structure(rotating(0.25)).difference < 1e-9


@pytest.mark.parametrize("kind", ["arcee", "seed_oss"])
def test_a_type_without_a_family_is_accepted_if_the_proof_accepts_it(kind):
    assert kind not in FAMILIES and structure(config_of(kind)).difference < 1e-9


def test_a_wrong_line_in_the_table_of_families_is_refused(monkeypatch):
    monkeypatch.setitem(FAMILIES, "helium", Family())
    assert structure(config_of("helium")).part == "block 0 or the embedding"
