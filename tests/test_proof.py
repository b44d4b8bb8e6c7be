"""The proof that an imported model is the published one, and what it must refuse: every protection has its control."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nexus_ablate.attention_core import spread, substituted
from nexus_ablate.errors import ConfigError
from nexus_ablate.pretrained import proof, shrink
from nexus_ablate.pretrained.expression import express
from nexus_ablate.pretrained.families import FAMILIES, Family
from nexus_ablate.pretrained.library import built, outline, parse_config
from nexus_ablate.pretrained.proof import counterpart, draw, structure

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


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "qwen3", "granite"])
def test_scores_are_spread_and_gains_and_biases_have_left_their_start(kind):
    small, length = shrink.shrunk(config_of(kind))
    tokens = torch.randint(0, shrink.VOCAB, (2, length))
    deviations = []

    def attend(core, q, k, v, bias):
        deviations.append(float(core.score(q, spread(k, q.shape[1])).std() * core.scale))
        return core.mixed(core.weights(q, k, bias), v)

    with proof.in_double(), torch.no_grad():
        library = built(small, dtype=torch.float64)
        expression = express(small, library.state_dict())
        model = counterpart(expression, length)
        draw(library, expression, model)
        with substituted(model, attend):
            model(tokens)
    assert len(deviations) == small.num_hidden_layers and all(2 < deviation < 4.5 for deviation in deviations)
    for name, parameter in model.state_dict().items():
        if parameter.ndim == 1:
            assert float((parameter - parameter.round()).abs().mean()) > 0.05, name


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "olmo3", "cwm", "gpt_neo", "llama"])
def test_a_shrunk_model_keeps_layers_and_rules_and_looks_beyond_its_windows(kind):
    config = parse_config({"model_type": kind})
    small, length = shrink.shrunk(config)
    assert small.num_hidden_layers == config.num_hidden_layers and small.hidden_size < 150 >= small.vocab_size
    assert getattr(small, "layer_types", None) == getattr(config, "layer_types", None)
    lengths = [value for key, value in shrink.walked(small.to_dict()) if key in shrink.LENGTHS and value]
    assert length >= 1.4 * max(lengths, default=0) and min(lengths, default=3) >= 3


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


@pytest.mark.parametrize("kind", ["arcee", "seed_oss"])
def test_a_type_without_a_family_is_accepted_if_the_proof_accepts_it(kind):
    assert kind not in FAMILIES and structure(config_of(kind)).difference < 1e-9


def test_a_wrong_line_in_the_table_of_families_is_refused(monkeypatch):
    monkeypatch.setitem(FAMILIES, "helium", Family())
    assert structure(config_of("helium")).part == "block 0 or the embedding"


def test_without_transformers_the_verb_says_what_to_install_before_torch_is_imported(tmp_path):
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from nexus_ablate.cli import main\n"
        "status = main(['import', 'anything'])\n"
        "sys.exit(status if 'torch' not in sys.modules else 99)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.splitlines()[2].endswith("try: pip install 'nexus-ablate[import]'") and not run.stdout
