"""Presets, and other published decoders as plain overrides, against the models of the `transformers` library.

Each family has a table: our parameter, theirs, and where they store several in one, how to take ours out. `{}` is the
block. What is in neither table is an error, and so is a parameter of theirs that nothing reads unless `unread` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from torch import Tensor

from nexus_ablate.config.compose import compose
from nexus_ablate.errors import ConfigError
from nexus_ablate.model import build_model

VOCAB, T, D, H, KV, FF = 53, 24, 64, 4, 2, 96
SIZE = [f"model.d_model={D}", f"model.n_heads={H}", f"model.context={T}", "model.n_layers=3"]
GQA = [f"n_kv_heads={KV}"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
Source = str | tuple[str, Callable[[Tensor], Tensor]]


def third(n: int, transpose: bool = False) -> Callable[[Tensor], Tensor]:
    """Query, key or value out of one map that holds all queries, then all keys, then all values."""
    return lambda w: (w.mT if transpose and w.ndim == 2 else w).chunk(3)[n]


def third_of_each_head(n: int) -> Callable[[Tensor], Tensor]:
    """Query, key or value out of one map that holds the three of the first head, then of the second ..."""
    return lambda w: w.unflatten(0, (H, 3, -1))[:, n].flatten(0, 1)


def transposed(w: Tensor) -> Tensor:
    return w.mT


def with_bias(table: dict[str, Source]) -> dict[str, Source]:
    """The table with a line for the bias after each line for a weight, but for the embedding."""
    found: dict[str, Source] = {}
    for ours, source in table.items():
        name, take = source if isinstance(source, tuple) else (source, None)
        bias = name.removesuffix("weight") + "bias"
        found[ours] = source
        if ours.endswith(("weight", "gain")) and "embedding" not in ours and "table" not in ours and "head" not in ours:
            keeps = take is None or take is transposed
            found[ours.removesuffix("weight").removesuffix("gain") + "bias"] = bias if keeps else (bias, take)
    return found


def block(ours: str, theirs: str, names: dict[str, Source]) -> dict[str, Source]:
    """Lines of a block: prefixes put before the names."""
    return {
        f"{ours}{name}": f"{theirs}{source}" if isinstance(source, str) else (f"{theirs}{source[0]}", source[1])
        for name, source in names.items()
    }


LLAMA_ATTENTION = block("blocks.{}.attn.", "model.layers.{}.self_attn.", {
    "query.weight": "q_proj.weight", "key.weight": "k_proj.weight",
    "value.weight": "v_proj.weight", "out.weight": "o_proj.weight",
})  # fmt: skip
LLAMA_FFN = block("blocks.{}.ffn.", "model.layers.{}.mlp.", {
    "gate.weight": "gate_proj.weight", "up.weight": "up_proj.weight", "down.weight": "down_proj.weight",
})  # fmt: skip
LLAMA_ENDS = {"embedding.weight": "model.embed_tokens.weight", "final_norm.gain": "model.norm.weight"}
LLAMA_HEAD = {"head.weight": "lm_head.weight"}
LLAMA_NORMS = {
    "blocks.{}.norm_attn.gain": "model.layers.{}.input_layernorm.weight",
    "blocks.{}.norm_ffn.gain": "model.layers.{}.post_attention_layernorm.weight",
}
LLAMA = LLAMA_ENDS | LLAMA_NORMS | LLAMA_ATTENTION | LLAMA_FFN

GPT2 = with_bias({
    "embedding.weight": "transformer.wte.weight",
    "position.table.weight": "transformer.wpe.weight",
    "final_norm.gain": "transformer.ln_f.weight",
    **block("blocks.{}.", "transformer.h.{}.", {
        "norm_attn.gain": "ln_1.weight",
        "attn.query.weight": ("attn.c_attn.weight", third(0, transpose=True)),
        "attn.key.weight": ("attn.c_attn.weight", third(1, transpose=True)),
        "attn.value.weight": ("attn.c_attn.weight", third(2, transpose=True)),
        "attn.out.weight": ("attn.c_proj.weight", transposed),
        "norm_ffn.gain": "ln_2.weight",
        "ffn.up.weight": ("mlp.c_fc.weight", transposed),
        "ffn.down.weight": ("mlp.c_proj.weight", transposed),
    }),
})  # fmt: skip
del GPT2["blocks.{}.attn.key.bias"]  # softmax ignores it where keys are not turned: we leave it out, and logits agree

NEOX = with_bias({
    "embedding.weight": "gpt_neox.embed_in.weight",
    "final_norm.gain": "gpt_neox.final_layer_norm.weight",
    "head.weight": "lm_head.weight",
    **block("blocks.{}.", "gpt_neox.layers.{}.", {
        "norm_attn.gain": "input_layernorm.weight",
        "attn.query.weight": ("attention.query_key_value.weight", third_of_each_head(0)),
        "attn.key.weight": ("attention.query_key_value.weight", third_of_each_head(1)),
        "attn.value.weight": ("attention.query_key_value.weight", third_of_each_head(2)),
        "attn.out.weight": "attention.dense.weight",
        "norm_ffn.gain": "post_attention_layernorm.weight",
        "ffn.up.weight": "mlp.dense_h_to_4h.weight",
        "ffn.down.weight": "mlp.dense_4h_to_h.weight",
    }),
})  # fmt: skip

OLMO2 = LLAMA_ENDS | LLAMA_HEAD | LLAMA_ATTENTION | LLAMA_FFN | block("blocks.{}.", "model.layers.{}.", {
    "attn.qk_norm.query.gain": "self_attn.q_norm.weight",
    "attn.qk_norm.key.gain": "self_attn.k_norm.weight",
    "norm_attn.gain": "post_attention_layernorm.weight",
    "norm_ffn.gain": "post_feedforward_layernorm.weight",
})  # fmt: skip

GEMMA2 = {"embedding.weight": "model.embed_tokens.weight", "final_norm.excess": "model.norm.weight"}
GEMMA2 |= LLAMA_ATTENTION | LLAMA_FFN | block("blocks.{}.", "model.layers.{}.", {
    "norm_attn.excess": "input_layernorm.weight",
    "norm_attn_out.excess": "post_attention_layernorm.weight",
    "norm_ffn.excess": "pre_feedforward_layernorm.weight",
    "norm_ffn_out.excess": "post_feedforward_layernorm.weight",
})  # fmt: skip

GPTJ = {
    "embedding.weight": "transformer.wte.weight",
    "head.weight": "lm_head.weight",
    "final_norm.gain": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    **block("blocks.{}.", "transformer.h.{}.", {
        "norm_attn.gain": "ln_1.weight",
        "norm_attn.bias": "ln_1.bias",
        "attn.query.weight": "attn.q_proj.weight",
        "attn.key.weight": "attn.k_proj.weight",
        "attn.value.weight": "attn.v_proj.weight",
        "attn.out.weight": "attn.out_proj.weight",
        "ffn.up.weight": "mlp.fc_in.weight",
        "ffn.up.bias": "mlp.fc_in.bias",
        "ffn.down.weight": "mlp.fc_out.weight",
        "ffn.down.bias": "mlp.fc_out.bias",
    }),
}  # fmt: skip

MPT = {
    "embedding.weight": "transformer.wte.weight",
    "final_norm.gain": "transformer.norm_f.weight",
    **block("blocks.{}.", "transformer.blocks.{}.", {
        "norm_attn.gain": "norm_1.weight",
        "attn.query.weight": ("attn.Wqkv.weight", third(0)),
        "attn.key.weight": ("attn.Wqkv.weight", third(1)),
        "attn.value.weight": ("attn.Wqkv.weight", third(2)),
        "attn.out.weight": "attn.out_proj.weight",
        "norm_ffn.gain": "norm_2.weight",
        "ffn.up.weight": "ffn.up_proj.weight",
        "ffn.down.weight": "ffn.down_proj.weight",
    }),
}  # fmt: skip

OLMO = {"embedding.weight": "model.embed_tokens.weight"} | LLAMA_HEAD | LLAMA_ATTENTION | LLAMA_FFN
QWEN3 = LLAMA | LLAMA_HEAD | block("blocks.{}.attn.qk_norm.", "model.layers.{}.self_attn.", {
    "query.gain": "q_norm.weight", "key.gain": "k_norm.weight",
})  # fmt: skip


@dataclass
class Family:
    """A published decoder: our overrides, the library's model and its configuration, and the table between them."""

    overrides: list[str]
    model: str
    config: dict
    table: dict[str, Source]
    unread: set[str] = field(default_factory=set)


def llama_like(**changes) -> dict:
    """The library's configuration of a decoder of Llama's shape."""
    sizes = {"vocab_size": VOCAB, "hidden_size": D, "intermediate_size": FF, "num_hidden_layers": 3}
    heads = {"num_attention_heads": H, "num_key_value_heads": KV, "max_position_embeddings": T}
    end = {"rms_norm_eps": 1e-6, "rope_parameters": ROPE, "tie_word_embeddings": False, "pad_token_id": None}
    return sizes | heads | end | changes


GATED = [f"d_ff_ratio={FF}/{D}"]
LLAMA_PARTS = ["norm=rms", "placement=pre", "position=rope", "ffn=swiglu", "bias=off", *GATED, *GQA]
FAMILIES = {
    "gpt2": Family(
        ["preset=gpt2"],
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_positions": T, "n_embd": D, "n_layer": 3, "n_head": H},
        GPT2,
        unread={"lm_head.weight"},
    ),
    "llama": Family(["preset=llama", *GATED, *GQA], "LlamaForCausalLM", llama_like(), LLAMA | LLAMA_HEAD),
    "olmo2": Family(
        ["preset=olmo2", *GATED, *GQA],
        "Olmo2ForCausalLM",
        llama_like(rope_parameters=ROPE | {"rope_theta": 500000.0}),
        OLMO2,
    ),
    "gemma2": Family(
        ["preset=gemma2", *GQA, "window=[7,0]", "model.head_dim=10", f"attn_scale={12**-0.5}"],
        "Gemma2ForCausalLM",
        llama_like(
            intermediate_size=4 * D,
            head_dim=10,
            query_pre_attn_scalar=12,
            sliding_window=7,
            tie_word_embeddings=True,
        ),
        GEMMA2,
        unread={"lm_head.weight"},
    ),
    "pythia": Family(
        ["preset=pythia"],
        "GPTNeoXForCausalLM",
        {
            "vocab_size": VOCAB,
            "hidden_size": D,
            "intermediate_size": 4 * D,
            "num_hidden_layers": 3,
            "num_attention_heads": H,
            "max_position_embeddings": T,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.25},
        },
        NEOX,
    ),
    "qwen3": Family(
        [*LLAMA_PARTS, "qk_norm=rms", "tie_embeddings=off", "model.head_dim=10"],
        "Qwen3ForCausalLM",
        llama_like(head_dim=10),
        QWEN3,
    ),
    "mistral": Family(
        [*LLAMA_PARTS, "tie_embeddings=off", "window=5"],
        "MistralForCausalLM",
        llama_like(sliding_window=5),
        LLAMA | LLAMA_HEAD,
    ),
    "smollm3": Family(
        [*LLAMA_PARTS, "position=irope", "position.every=2", "tie_embeddings=on"],
        "SmolLM3ForCausalLM",
        llama_like(no_rope_layer_interval=2, tie_word_embeddings=True),
        LLAMA,
        unread={"lm_head.weight"},
    ),
    "olmo": Family(
        [*LLAMA_PARTS, "norm=layer_nonparam", "tie_embeddings=off"],
        "OlmoForCausalLM",
        {k: v for k, v in llama_like().items() if k != "rms_norm_eps"},
        OLMO,
    ),
    "gptj": Family(
        ["norm=layer", "placement=parallel", "position=rope", "position.fraction=0.5", "position.pairing=interleaved",
         "ffn=gelu_tanh", "ffn_bias=on", "tie_embeddings=off"],
        "GPTJForCausalLM",
        {"vocab_size": VOCAB, "n_positions": T, "n_embd": D, "n_layer": 3, "n_head": H, "rotary_dim": D // H // 2},
        GPTJ,
        unread={"lm_head.bias"},  # we have no bias on the head: it is set to 0
    ),
    "mpt": Family(
        ["norm=layer", "norm_bias=off", "placement=pre", "position=alibi", "ffn=gelu"],
        "MptForCausalLM",
        {"vocab_size": VOCAB, "max_seq_len": T, "d_model": D, "n_layers": 3, "n_heads": H},
        MPT,
        unread={"lm_head.weight"},
    ),
}  # fmt: skip


def library_model(family: Family) -> torch.nn.Module:
    """The library's model with random values in every parameter, gains and biases too."""
    model_class = getattr(transformers, family.model)
    model = model_class(model_class.config_class(**family.config, attn_implementation="eager")).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.1, generator=generator)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            if name == "lm_head.bias":
                parameter.zero_()
    return model


def translate(family: Family, theirs: dict[str, Tensor], n_layers: int) -> dict[str, Tensor]:
    """Our state from theirs by the family's table."""
    found, read = {}, set()
    for ours, source in family.table.items():
        name, take = source if isinstance(source, tuple) else (source, None)
        for layer in range(n_layers) if "{}" in ours else [0]:
            tensor = theirs[name.format(layer)]
            found[ours.format(layer)] = tensor if take is None else take(tensor)
            read.add(name.format(layer))
    assert theirs.keys() - read == family.unread
    return found


def logits(name: str, *departures: str) -> tuple[Tensor, Tensor]:
    """Ours and theirs on the same tokens and weights."""
    family = FAMILIES[name]
    theirs = library_model(family)
    ours = build_model(compose([*SIZE, *family.overrides, *departures]), VOCAB).eval()
    ours.load_state_dict(translate(family, theirs.state_dict(), len(ours.blocks)))
    tokens = torch.randint(0, VOCAB, (2, T), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return ours(tokens), theirs(tokens).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_decoder_gives_the_logits_of_another_librarys_model(name):
    ours, theirs = logits(name)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "departure"),
    [
        ("gpt2", "ffn=gelu"),
        ("llama", "position.pairing=interleaved"),
        ("olmo2", "position.theta=10000"),
        ("gemma2", "attn_softcap=off"),
        ("gemma2", "final_softcap=off"),
        ("gemma2", "window=[0,7]"),
        ("gemma2", "embed_scale=off"),
        ("gemma2", "ffn.tanh=off"),
        ("gemma2", "attn_scale=auto"),
        ("pythia", "position.fraction=0.5"),
        ("pythia", "placement=pre"),
        ("mistral", "window=6"),
        ("smollm3", "position.every=3"),
        ("gptj", "position.pairing=half"),
        ("mpt", "position=none"),
    ],
)
def test_the_comparison_sees_a_departure_in_one_key(name, departure):
    ours, theirs = logits(name, departure)
    assert (ours - theirs).abs().max() > 1e-4


PRESETS = ["gpt2", "llama", "olmo2", "gemma2", "pythia"]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("change", ["norm=dyt", "placement=post", "position=alibi", "position=irope", "ffn=relu"])
def test_any_part_of_a_preset_can_be_exchanged(preset, change):
    """The keys that the preset sets for its own option do not stay behind."""
    axis, name = change.split("=")
    option = getattr(compose([f"preset={preset}", change]), axis)
    assert option == getattr(compose([change]), axis)
    assert option.name == name


def test_a_key_that_the_user_sets_for_the_exchanged_option_stays():
    assert compose(["preset=olmo2", "position=irope", "position.theta=7"]).position.keys["theta"] == 7
    assert compose(["preset=olmo2"]).position.keys["theta"] == 500000
    with pytest.raises(ConfigError, match="alibi"):
        compose(["preset=olmo2", "position=alibi", "position.theta=7"])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_the_architecture_and_neither_size_nor_training(preset):
    ours, base = compose([f"preset={preset}"]), compose([])
    for group in ("model", "optim", "train", "data", "init"):
        assert getattr(ours, group) == getattr(base, group)
    assert (ours.seed, ours.weight_decay, ours.z_loss) == (base.seed, base.weight_decay, base.z_loss)
