"""Families of published decoders: translates the keys of a config.json and the names of its weights.

A family is one function and one table. The function reads a config.json and returns settings: keys of this project with
the values that differ from the baseline. The table maps names of this project's modules to published names: `{}` is the
block, `a|b` one name or the other, `*` the index of a head. Published keys and names are those of the `transformers`
library; every family is tested against its models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from nexus_ablate.pretrained.fields import Fields

if TYPE_CHECKING:
    from torch import Tensor

Settings = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The sizes needed to split fused weights."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


Take = Callable[["Tensor", Shape], "Tensor"]
Source = str | tuple[str, Take]


@dataclass(frozen=True)
class Family:
    """A family of published decoders.

    Attributes:
        settings: Returns the settings of a config.json; adds what can't be expressed to the fields' `refused`.
        modules: Published names by this project's names of modules or parameters.
        preset: The preset at the start of the overrides.
        unread: Suffixes of published names that aren't used.
    """

    settings: Callable[[Fields], Settings]
    modules: dict[str, Source]
    preset: str
    unread: tuple[str, ...] = field(default=())


# ------------------------------------------------------------------------------------------------------------ settings


def pattern(values: list[Any]) -> list[Any]:
    """The shortest list that gives the values when repeated."""
    sizes = range(1, len(values) + 1)
    return next(values[:n] for n in sizes if all(v == values[i % n] for i, v in enumerate(values)))


def listed(values: list[Any]) -> Any:
    """A single value if all layers have the same, else the pattern."""
    short = pattern(values)
    return short[0] if len(short) == 1 else short


def sizes(
    c: Fields,
    width: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    ffn: tuple[str, ...] = ("intermediate_size",),
    context: str = "max_position_embeddings",
    kv: str = "num_key_value_heads",
    context_default: Any = ...,
) -> Settings:
    """The sizes and the vocabulary; a missing FFN width means 4 d_model."""
    d_model, n_heads = c.whole(width), c.whole(heads)
    head_dim = c.whole("head_dim", default=max(1, d_model // n_heads))
    if d_model % n_heads and c("head_dim", default=None) is None:
        c.refuse(f"{heads}={n_heads} does not divide {width}={d_model}")
    n_kv = c.whole(kv, default=n_heads)
    if n_heads % n_kv:
        c.refuse(f"{kv}={n_kv} does not divide {heads}={n_heads}")
    c.only("is_encoder_decoder", False, why="there is no encoder here")
    c.only("add_cross_attention", False, why="there is no encoder here")
    c.only("quantization_config", None, why="the weights are quantized")
    return {
        "vocab_size": c.whole("vocab_size"),
        "model.d_model": d_model,
        "model.n_layers": c.whole(layers),
        "model.n_heads": n_heads,
        "model.head_dim": "auto" if head_dim * n_heads == d_model else head_dim,
        "n_kv_heads": "auto" if n_kv == n_heads else n_kv,
        "d_ff_ratio": ratio_of(c.whole(*ffn, default=4 * d_model), d_model),
        "model.d_ff_multiple": 1,
        "model.context": c.whole(context, default=context_default),
    }


def ratio_of(d_ff: int, d_model: int) -> str | int:
    """d_ff / d_model as the grammar writes it."""
    fraction = Fraction(d_ff, d_model)
    return str(fraction) if fraction.denominator > 1 else int(fraction)


def head_dim_of(s: Settings) -> int:
    auto = s["model.head_dim"] == "auto"
    return s["model.d_model"] // s["model.n_heads"] if auto else s["model.head_dim"]


_GELUS = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True, "gelu_fast": True}


def activation(c: Fields, *names: str, gated: bool, default: str) -> Settings:
    """The FFN of an activation function."""
    name = c(*names, default=default)
    if name in _GELUS:
        return {"ffn": "geglu", "ffn.tanh": _GELUS[name]} if gated else {"ffn": "gelu_tanh" if _GELUS[name] else "gelu"}
    plain = {"silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2"}
    with_gate = {"silu": "swiglu", "swish": "swiglu", "relu": "reglu", "relu2": "reglu2", "sigmoid": "glu"}
    ffn = (with_gate if gated else plain).get(name)
    if ffn is None:
        c.refuse(f"{names[0]}={name!r}: there is no FFN with this activation here")
    return {"ffn": ffn or "gelu"}


def biases(qkv: bool, out: bool, ffn: bool) -> Settings:
    """Biases of the linear layers: all, none, or by projection."""
    if qkv == out == ffn:
        return {"bias": qkv}
    return {key: "on" for key, on in (("qkv_bias", qkv), ("attn_out_bias", out), ("ffn_bias", ffn)) if on}


def windows(c: Fields, s: Settings, default: Callable[[int], bool] = lambda layer: True) -> Settings:
    """The window of each layer, by `layer_types`, or if that is missing, by a function of the layer (from 0)."""
    width = c("sliding_window", default=None)
    known = ("sliding_attention", "full_attention")
    types = c("layer_types", default=[known[0 if width and default(n) else 1] for n in range(s["model.n_layers"])])
    if len(types) != s["model.n_layers"] or not set(types) <= {*known}:
        c.refuse(f"layer_types={types!r}: {' or '.join(known)}, one per layer")
        return {}
    if "sliding_attention" not in types:
        return {}
    if not width:
        c.refuse("layer_types has sliding_attention, but sliding_window is missing")
        return {}
    pattern = listed([width if kind == "sliding_attention" else 0 for kind in types])
    return {"window": pattern}


def rope(c: Fields, s: Settings, fraction: float = 1.0, theta: float = 10000.0, pairing: str = "half") -> Settings:
    """RoPE with its scaling, from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
    by_type = c("rope_parameters", default=None)
    old_theta = c.number("rope_theta", "rotary_emb_base", default=theta)
    local = c("rope_local_base_freq", default=None)
    share = c.number("partial_rotary_factor", "rotary_pct", default=fraction)
    scaling = c("rope_scaling", default=None)
    original = c("original_max_position_embeddings", default=None)
    if by_type is None:
        by_type = {"rope_theta": old_theta, **(scaling or {})}
        if local is not None:
            by_type = {"full_attention": by_type, "sliding_attention": {"rope_theta": local}}
    kinds = {"full_attention", "sliding_attention"}
    if kinds & by_type.keys():
        types = c("layer_types", default=None)
        every = c("sliding_window_pattern", "_sliding_window_pattern", default=6)
        layers = range(s["model.n_layers"])
        types = types or ["full_attention" if (n + 1) % every == 0 else "sliding_attention" for n in layers]
        ropes = [dict(by_type.get(kind) or {}) for kind in types]
    else:
        ropes = [dict(by_type)]
    for one in ropes:
        one["rope_type"] = one.pop("type", None) or one.get("rope_type") or "default"
        one.setdefault("rope_theta", old_theta)
    share = float(ropes[0].get("partial_rotary_factor") or share)
    head_dim = head_dim_of(s)
    width = int(head_dim * share)
    common = {"position.fraction": width / head_dim, "position.pairing": pairing}
    if width % 2:
        c.refuse(f"partial_rotary_factor={share}: an odd number of rotated channels, {width}")
    kind, first = {one["rope_type"] for one in ropes}, ropes[0]
    bases = listed([float(one["rope_theta"]) for one in ropes])
    if kind == {"default"}:
        return {"position": "rope", "position.theta": bases, **common}
    if kind <= {"default", "linear"}:
        factors = listed([float(one.get("factor", 1.0)) for one in ropes])
        return {"position": "rope_interpolated", "position.theta": bases, "position.factor": factors, **common}
    if len(pattern(ropes)) > 1:
        c.refuse("rope_parameters: this scaling differs between layers, and only theta and linear factors may")
    original = first.get("original_max_position_embeddings") or original or s["model.context"]
    scaled = {"position.theta": float(first["rope_theta"]), **common, "position.original_context": original}
    if kind == {"llama3"}:
        names = ("factor", "low_freq_factor", "high_freq_factor")
        if missing := [name for name in names if name not in first]:
            c.refuse(f"rope_scaling: {', '.join(missing)} missing")
            return {}
        return {"position": "rope_llama3", **scaled} | {f"position.{name}": float(first[name]) for name in names}
    if kind == {"yarn"}:
        factor = float(first.get("factor") or s["model.context"] / original)
        return {
            "position": "rope_yarn",
            **scaled,
            "position.factor": factor,
            "position.beta_fast": float(first.get("beta_fast") or 32),
            "position.beta_slow": float(first.get("beta_slow") or 1),
            "position.truncate": bool(first.get("truncate", True)),
            "position.attention_factor": yarn_length(first, factor),
        }
    reasons = {
        "dynamic": "frequencies depend on the length of each text",
        "longrope": "frequencies depend on the length of each text, with a factor per channel",
    }
    name = first["rope_type"]
    c.refuse(f"rope_scaling rope_type={name!r}: {reasons.get(name, 'there is no such scaling here')}")
    return {}


def yarn_length(rope: dict[str, Any], factor: float) -> float | str:
    """YaRN's factor on rotated q and k, or `auto` if it is the paper's."""
    if rope.get("attention_factor"):
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        log = 0.1 * math.log(max(1.0, factor))
        return (log * rope["mscale"] + 1) / (log * rope["mscale_all_dim"] + 1)
    return "auto"


def tied(c: Fields, default: bool) -> Settings:
    return {"tie_embeddings": c.flag("tie_word_embeddings", default=default)}


def gpt2(c: Fields) -> Settings:
    s = sizes(c, "n_embd", "n_layer", "n_head", ("n_inner",), "n_positions")
    c.only("scale_attn_weights", True, why="attn_scale=1 would express it, and is not tested")
    c.only("scale_attn_by_inverse_layer_idx", False, why="attn_scale is the same in all layers")
    return s | {
        "norm": "layer",
        "norm.eps": c.number("layer_norm_epsilon", default=1e-5),
        "position": "learned",
        **activation(c, "activation_function", gated=False, default="gelu_new"),
        "bias": True,
        **tied(c, True),
    }


def gpt_bigcode(c: Fields) -> Settings:
    s = gpt2(c)
    return s | {"n_kv_heads": 1 if c.flag("multi_query", default=True) else "auto"}


def gpt_neox(c: Fields) -> Settings:
    s = sizes(c)
    parallel = c.flag("use_parallel_residual", default=True)
    attention = c.flag("attention_bias", default=True)
    return s | {
        "norm": "layer",
        "norm.eps": c.number("layer_norm_eps", default=1e-5),
        **({"placement": "parallel", "placement.norms": 2} if parallel else {}),
        **rope(c, s, fraction=0.25),
        **activation(c, "hidden_act", gated=False, default="gelu"),
        **biases(attention, attention, True),
        **tied(c, False),
    }


def gptj(c: Fields) -> Settings:
    s = sizes(c, "n_embd", "n_layer", "n_head", ("n_inner",), "n_positions")
    share = c.whole("rotary_dim", default=64) / head_dim_of(s)
    return s | {
        "norm": "layer",
        "norm.eps": c.number("layer_norm_epsilon", default=1e-5),
        "placement": "parallel",
        "placement.norms": 1,
        "position": "rope",
        "position.fraction": share,
        "position.pairing": "interleaved",
        **activation(c, "activation_function", gated=False, default="gelu_new"),
        **biases(False, False, True),
        "head_bias": True,
        **tied(c, False),
    }


def llama(c: Fields) -> Settings:
    s = sizes(c)
    attention, mlp = c.flag("attention_bias", default=False), c.flag("mlp_bias", default=False)
    return s | {
        "norm.eps": c.number("rms_norm_eps", default=1e-6),
        **rope(c, s),
        **activation(c, "hidden_act", gated=True, default="silu"),
        **biases(attention, attention, mlp),
        **tied(c, False),
    }


def llama_3_or_before(c: Fields) -> Settings:
    s = llama(c)
    return s | ({"preset": "llama3"} if "position.low_freq_factor" in s else {})


def mistral(c: Fields) -> Settings:
    s = llama(c)
    return s | windows(c, s)


def qwen2(c: Fields) -> Settings:
    s = llama(c) | biases(True, False, False)
    return s | sliding_if_used(c, s)


def qwen3(c: Fields) -> Settings:
    s = llama(c) | {"qk_norm": "rms"}
    return s | sliding_if_used(c, s)


def sliding_if_used(c: Fields, s: Settings) -> Settings:
    """Windows with `use_sliding_window`, from layer `max_window_layers` unless `layer_types` is given."""
    used, first = c.flag("use_sliding_window", default=False), c.whole("max_window_layers", default=28)
    windowed = windows(c, s, lambda layer: used and layer >= first)
    return windowed if used else {}


def smollm3(c: Fields) -> Settings:
    s = llama(c) | tied(c, True)
    every = c("no_rope_layer_interval", default=4)
    flags = [int((n + 1) % every != 0) for n in range(s["model.n_layers"])]
    layers = c("no_rope_layers", default=flags)
    if all(layers):
        nope: Settings = {}
    elif len(pattern(layers)) > 1 and pattern(layers) == [1] * (len(pattern(layers)) - 1) + [0]:
        nope = {"nope_every": len(pattern(layers))}
    else:
        nope = {}
        c.refuse(f"no_rope_layers={layers}: layers without positions are every n-th here, with nope_every=n")
    return s | nope | sliding_if_used(c, s)


def gemma(c: Fields) -> Settings:
    s = llama(c) | tied(c, True)
    c.only("use_bidirectional_attention", None, False, why="attention is causal here")
    c("hidden_act", "hidden_activation", default=None)
    return s | {
        "norm": "rms_zero",
        "ffn": "geglu",
        **activation(c, "hidden_activation", gated=True, default="gelu_pytorch_tanh"),
        "embed_scale": "sqrt_d",
    }


def gemma2(c: Fields) -> Settings:
    s = gemma(c)
    scale = c.number("query_pre_attn_scalar", default=256) ** -0.5
    caps = {
        "attn_softcap": c("attn_logit_softcapping", default="off"),
        "final_softcap": c("final_logit_softcapping", default="off"),
    }
    return s | {
        "placement": "sandwich",
        "attn_scale": "auto" if math.isclose(scale, head_dim_of(s) ** -0.5, rel_tol=1e-12) else scale,
        **caps,
        **windows(c, s, lambda layer: layer % 2 == 0),
    }


def gemma3(c: Fields) -> Settings:
    every = c("sliding_window_pattern", "_sliding_window_pattern", default=6)
    s = gemma2(c) | {"qk_norm": "rms", "qk_norm.zero_centred": True}
    s.pop("window", None)
    return s | windows(c, s, lambda layer: (layer + 1) % every != 0)


def olmo(c: Fields) -> Settings:
    s = llama(c)
    s.pop("norm.eps")
    return s | {"norm": "layer_nonparam", "clip_qkv": c("clip_qkv", default="off")}


def olmo2(c: Fields) -> Settings:
    return llama(c) | {"norm.eps": c.number("rms_norm_eps", default=1e-5), "placement": "output", "qk_norm": "rms_full"}


def olmo3(c: Fields) -> Settings:
    s = olmo2(c)
    return s | windows(c, s, lambda layer: (layer + 1) % 4 != 0)


def granite(c: Fields) -> Settings:
    s = llama(c)
    residual = c.number("residual_multiplier", default=1.0)
    scale = c.number("attention_multiplier", default=1.0)
    return s | {
        **({} if residual == 1 else {"placement": "residual_scale", "placement.branch_scale": residual}),
        "attn_scale": "auto" if math.isclose(scale, head_dim_of(s) ** -0.5, rel_tol=1e-12) else scale,
        "embed_scale": number_or_off(c.number("embedding_multiplier", default=1.0)),
        "logit_scale": number_or_off(1 / c.number("logits_scaling", default=1.0)),
    }


def number_or_off(value: float) -> float | str:
    return "off" if value == 1 else value


def phi(c: Fields) -> Settings:
    s = sizes(c)
    normed = c.flag("qk_layernorm", default=False)
    return s | {
        "norm": "layer",
        "norm.eps": c.number("layer_norm_eps", default=1e-5),
        "placement": "parallel",
        "placement.norms": 1,
        **rope(c, s, fraction=0.5),
        **({"qk_norm": "layer", "qk_norm.bias": True} if normed else {}),
        **activation(c, "hidden_act", gated=False, default="gelu_new"),
        "bias": True,
        "head_bias": True,
        **tied(c, False),
    }


def phi3(c: Fields) -> Settings:
    s = llama(c) | {"norm.eps": c.number("rms_norm_eps", default=1e-5)}
    return s | windows(c, s)


def bloom(c: Fields) -> Settings:
    c.only("apply_residual_connection_post_layernorm", False, why="the residual path is not normed here")
    return sizes(c, "hidden_size", "n_layer", "n_head", ("n_inner",), "seq_length", context_default=2048) | {
        "norm": "layer",
        "norm.eps": c.number("layer_norm_epsilon", default=1e-5),
        "position": "alibi",
        "embed_norm": True,
        "ffn": "gelu_tanh",
        "bias": True,
        **tied(c, True),
    }


def opt(c: Fields) -> Settings:
    s = sizes(c, ffn=("ffn_dim",))
    before = c.flag("do_layer_norm_before", default=True)
    c.only("layer_norm_elementwise_affine", True, why="norm=layer_nonparam would express it, and is not tested")
    c.only("_remove_final_layer_norm", False, why="final_norm=off would express it, and is not tested")
    return s | {
        "norm": "layer",
        "placement": "pre" if before else "post",
        "position": "learned",
        "d_embed": c.whole("word_embed_proj_dim", default=s["model.d_model"]),
        **activation(c, "activation_function", gated=False, default="relu"),
        "bias": c.flag("enable_bias", default=True),
        **tied(c, True),
    }


def xglm(c: Fields) -> Settings:
    s = sizes(c, "d_model", "num_layers", "attention_heads", ("ffn_dim",))
    return s | {
        "norm": "layer",
        "position": "sinusoidal",
        "position.layout": "fairseq",
        "embed_scale": "sqrt_d" if c.flag("scale_embedding", default=True) else "off",
        **activation(c, "activation_function", gated=False, default="gelu"),
        "bias": True,
        **tied(c, True),
    }


def falcon(c: Fields) -> Settings:
    new = c.flag("new_decoder_architecture", default=False)
    multi_query = c.flag("multi_query", default=True)
    s = sizes(
        c, "hidden_size", "num_hidden_layers", "num_attention_heads", ("ffn_hidden_size",), kv="num_kv_heads",
        context_default=2048,
    )  # fmt: skip
    if not new:
        s["n_kv_heads"] = 1 if multi_query and s["model.n_heads"] > 1 else "auto"
    parallel = c.flag("parallel_attn", default=True)
    norms = c.whole("num_ln_in_parallel_attn", default=2 if new else 1)
    alibi = c.flag("alibi", default=False)
    position = {"position": "alibi", "position.slope_factor": head_dim_of(s) ** -0.5}
    c("rope_parameters", "rope_theta", default=None)  # written with ALiBi too
    return s | {
        "norm": "layer",
        "norm.eps": c.number("layer_norm_epsilon", default=1e-5),
        **({"placement": "parallel", "placement.norms": norms} if parallel else {}),
        **(position if alibi else rope(c, s)),
        **activation(c, "activation", gated=False, default="gelu"),
        "bias": c.flag("bias", default=False),
        **tied(c, True),
    }


def stablelm(c: Fields) -> Settings:
    s = sizes(c)
    parallel, normed = c.flag("use_parallel_residual", default=False), c.flag("qk_layernorm", default=False)
    return s | {
        "norm": "layer",
        "norm.eps": c.number("layer_norm_eps", default=1e-5),
        **({"placement": "parallel", "placement.norms": 1} if parallel else {}),
        **rope(c, s, fraction=0.25),
        **({"qk_norm": "layer", "qk_norm.gain": "per_head"} if normed else {}),
        **activation(c, "hidden_act", gated=True, default="silu"),
        **biases(c.flag("use_qkv_bias", default=False), False, False),
        **tied(c, False),
    }


def cohere(c: Fields) -> Settings:
    s = sizes(c)
    attention = c.flag("attention_bias", default=False)
    return s | {
        "norm": "layer",
        "norm.eps": c.number("layer_norm_eps", default=1e-5),
        "norm_bias": "off",
        "placement": "parallel",
        "placement.norms": 1,
        **rope(c, s, pairing="interleaved"),
        **({"qk_norm": "layer", "qk_norm.gain": "per_head"} if c.flag("use_qk_norm", default=False) else {}),
        **activation(c, "hidden_act", gated=True, default="silu"),
        **biases(attention, attention, False),
        "logit_scale": number_or_off(c.number("logit_scale", default=0.0625)),
        **tied(c, True),
    }


def cohere2(c: Fields) -> Settings:
    every = c("sliding_window_pattern", "_sliding_window_pattern", default=4)
    s = cohere(c)
    windowed = windows(c, s, lambda layer: (layer + 1) % every != 0)
    widths = windowed.get("window", 0)
    if not isinstance(widths, list):  # only layers with a window have RoPE
        return s | windowed | ({} if widths else {"position": "none"})
    short = pattern(widths)
    if short[-1] or not all(short[:-1]):
        c.refuse("layer_types: layers without a window have no positions, which is only possible for every n-th layer")
    return s | windowed | {"nope_every": len(short)}


def mpt(c: Fields) -> Settings:
    attention = c.within("attn_config")
    s = sizes(c, "d_model", "n_layers", "n_heads", ("no such key",), "max_seq_len")
    s["d_ff_ratio"] = c.whole("expansion_ratio", default=4)
    attention.only("attn_type", "multihead_attention", why="its keys are shared in another layout")
    attention.only("prefix_lm", False, why="attention is causal here")
    attention.only("qk_ln", False, why="qk_norm=layer is within a head here, and this is over all heads")
    attention.only("attn_uses_sequence_id", False, why="there is one text per sequence here")
    attention("attn_impl", default=None)
    c.only("logit_scale", None, why="the library ignores it, the original does not")
    c.only("no_bias", True, why="the library has no biases either")
    c.only("norm_type", "low_precision_layernorm", "layernorm", why="another norm")
    learned = c.flag("learned_pos_emb", default=True)
    alibi = attention.flag("alibi", default=True)
    if not alibi:
        c.refuse(f"attn_config.alibi=False with learned_pos_emb={learned}: the library has ALiBi alone")
    own = {
        "position.bias_max": attention.number("alibi_bias_max", default=8),
        "clip_qkv": attention("clip_qkv", default="off"),
        "attn_scale": attention("softmax_scale", default="auto"),
    }
    attention.finish()
    return s | {
        "norm": "layer",
        "norm.eps": c.number("layer_norm_epsilon", default=1e-5),
        "norm_bias": "off",
        "position": "alibi",
        **own,
        "ffn": "gelu",
        **tied(c, True),
    }


def starcoder2(c: Fields) -> Settings:
    s = sizes(c)
    return s | {
        "norm": "layer",
        "norm.eps": c.number("norm_epsilon", default=1e-5),
        **rope(c, s),
        **activation(c, "hidden_act", gated=False, default="gelu_pytorch_tanh"),
        "bias": c.flag("use_bias", default=True),
        **windows(c, s),
        **tied(c, True),
    }


def nemotron(c: Fields) -> Settings:
    s = sizes(c)
    attention, mlp = c.flag("attention_bias", default=False), c.flag("mlp_bias", default=False)
    return s | {
        "norm": "layer_zero",
        "norm.eps": c.number("norm_eps", default=1e-5),
        **rope(c, s, fraction=0.5),
        **activation(c, "hidden_act", gated=False, default="relu2"),
        **biases(attention, attention, mlp),
        **tied(c, False),
    }


def gpt_oss(c: Fields) -> Settings:
    s = sizes(c)
    experts = c.whole("num_local_experts", default=128)
    c("num_experts_per_tok", "experts_per_token", default=4)
    c.only("hidden_act", "silu", why="the sigmoid is part of ffn=swiglu_clamped")
    if experts > 1:
        c.refuse(f"num_local_experts={experts}: there is no mixture of experts here; with one expert it is dense")
    c.flag("output_router_logits", default=False)
    attention = c.flag("attention_bias", default=True)
    return s | {
        "norm.eps": c.number("rms_norm_eps", default=1e-5),
        **rope(c, s, theta=150000.0),
        "normalizer": "sink",
        "ffn": "swiglu_clamped",
        "ffn.alpha": c.number("swiglu_alpha", default=1.702),
        "ffn.limit": c.number("swiglu_limit", default=7.0),
        **biases(attention, attention, True),
        **windows(c, s, lambda layer: layer % 2 == 0),
        **tied(c, False),
    }


# ------------------------------------------------------------------------------------------------------------- weights


def third(n: int) -> Take:
    """Query, key or value from one matrix with all queries, then all keys, then all values."""

    def take(w: Tensor, shape: Shape) -> Tensor:
        sizes = [h * shape.head_dim for h in (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads)]
        return w.split(sizes)[n]

    return take


def third_transposed(n: int) -> Take:
    """As `third`, for a matrix stored as (d_in, d_out)."""
    return lambda w, shape: third(n)(w.mT if w.ndim == 2 else w, shape)


def third_of_each_head(n: int) -> Take:
    """Query, key or value from one matrix with all three for the first head, then for the second ..."""
    return lambda w, shape: w.unflatten(0, (shape.n_heads, 3, -1))[:, n].flatten(0, 1)


def of_each_group(n: int) -> Take:
    """Query, key or value from one matrix with queries, key and value of each key head in turn."""

    def take(w: Tensor, shape: Shape) -> Tensor:
        groups = w.unflatten(0, (shape.n_kv_heads, -1, shape.head_dim))
        return (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])[n].flatten(0, 2)

    return take


def half(n: int) -> Take:
    """The first or second half of a matrix, such as the gate and the other projection."""
    return lambda w, shape: w.chunk(2)[n]


def transposed(w: Tensor, shape: Shape) -> Tensor:
    return w.mT if w.ndim == 2 else w


def expert(n: int | None) -> Take:
    """A matrix of the only expert, stored as (1, d_in, d_out); with n, every second row from n."""

    def take(w: Tensor, shape: Shape) -> Tensor:
        w = w[0].mT if w.ndim == 3 else w[0]
        return w if n is None else w[n::2]

    return take


def after_two(w: Tensor, shape: Shape) -> Tensor:
    """The matrix without the first two rows, which fairseq's position tables don't use."""
    return w[2:]


def modules(prefix: str, block: str, head: str, ends: dict[str, Source], names: dict[str, Source]) -> dict[str, Source]:
    """A family's table.

    Args:
        prefix: Prefix of all published names except the head's.
        block: Published name of the list of blocks.
        head: Published name of the head.
        ends: Names outside the blocks.
        names: Names in a block.
    """

    def prefixed(prefix: str, source: Source) -> Source:
        return f"{prefix}{source}" if isinstance(source, str) else (f"{prefix}{source[0]}", source[1])

    table = {name: prefixed(f"{prefix}.", source) for name, source in ends.items()}
    table |= {"head": head}
    return table | {f"blocks.{{}}.{o}": prefixed(f"{prefix}.{block}.{{}}.", s) for o, s in names.items()}


QKVO: dict[str, Source] = {
    "attn.query": "self_attn.q_proj",
    "attn.key": "self_attn.k_proj",
    "attn.value": "self_attn.v_proj",
    "attn.out": "self_attn.o_proj",
}
GATED: dict[str, Source] = {"ffn.gate": "mlp.gate_proj", "ffn.up": "mlp.up_proj", "ffn.down": "mlp.down_proj"}
PLAIN: dict[str, Source] = {"ffn.up": "mlp.up_proj", "ffn.down": "mlp.down_proj"}
QK_NORM: dict[str, Source] = {"attn.qk_norm.query": "self_attn.q_norm", "attn.qk_norm.key": "self_attn.k_norm"}
PRE: dict[str, Source] = {"norm_attn": "input_layernorm", "norm_ffn": "post_attention_layernorm"}
OUTPUT: dict[str, Source] = {"norm_attn": "post_attention_layernorm", "norm_ffn": "post_feedforward_layernorm"}
SANDWICH: dict[str, Source] = {
    "norm_attn": "input_layernorm",
    "norm_attn_out": "post_attention_layernorm",
    "norm_ffn": "pre_feedforward_layernorm",
    "norm_ffn_out": "post_feedforward_layernorm",
}
ENDS: dict[str, Source] = {"embedding": "embed_tokens", "final_norm": "norm"}


def fused(module: str, take: Callable[[int], Take]) -> dict[str, Source]:
    """Queries, keys and values from one matrix."""
    return {f"attn.{name}": (module, take(n)) for n, name in enumerate(("query", "key", "value"))}


def llama_modules(*names: dict[str, Source]) -> dict[str, Source]:
    """The table of a decoder with Llama's names."""
    return modules("model", "layers", "lm_head", ENDS, {k: v for part in names for k, v in part.items()})


LLAMA = llama_modules(QKVO, PRE, GATED)
GPT2 = modules(
    "transformer", "h", "lm_head",
    {"embedding": "wte", "position.table": "wpe", "final_norm": "ln_f"},
    {**fused("attn.c_attn", third_transposed), "attn.out": ("attn.c_proj", transposed), "norm_attn": "ln_1",
     "norm_ffn": "ln_2", "ffn.up": ("mlp.c_fc", transposed), "ffn.down": ("mlp.c_proj", transposed)},
)  # fmt: skip
BIGCODE = modules(
    "transformer", "h", "lm_head",
    {"embedding": "wte", "position.table": "wpe", "final_norm": "ln_f"},
    {**fused("attn.c_attn", third), "attn.out": "attn.c_proj", "norm_attn": "ln_1", "norm_ffn": "ln_2",
     "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"},
)  # fmt: skip
NEOX = modules(
    "gpt_neox", "layers", "lm_head|embed_out",
    {"embedding": "embed_in", "final_norm": "final_layer_norm"},
    {**fused("attention.query_key_value", third_of_each_head), "attn.out": "attention.dense", **PRE,
     "ffn.up": "mlp.dense_h_to_4h", "ffn.down": "mlp.dense_4h_to_h"},
)  # fmt: skip
GPTJ = modules(
    "transformer", "h", "lm_head",
    {"embedding": "wte", "final_norm": "ln_f"},
    {"attn.query": "attn.q_proj", "attn.key": "attn.k_proj", "attn.value": "attn.v_proj", "attn.out": "attn.out_proj",
     "norm_attn": "ln_1", "ffn.up": "mlp.fc_in", "ffn.down": "mlp.fc_out"},
)  # fmt: skip
PHI = modules(
    "model", "layers", "lm_head",
    {"embedding": "embed_tokens", "final_norm": "final_layernorm"},
    {**QKVO, "attn.out": "self_attn.dense", "attn.qk_norm.query": "self_attn.q_layernorm",
     "attn.qk_norm.key": "self_attn.k_layernorm", "norm_attn": "input_layernorm", "ffn.up": "mlp.fc1",
     "ffn.down": "mlp.fc2"},
)  # fmt: skip
BLOOM = modules(
    "transformer", "h", "lm_head",
    {"embedding": "word_embeddings", "embed_norm": "word_embeddings_layernorm", "final_norm": "ln_f"},
    {**fused("self_attention.query_key_value", third_of_each_head), "attn.out": "self_attention.dense", **PRE,
     "ffn.up": "mlp.dense_h_to_4h", "ffn.down": "mlp.dense_4h_to_h"},
)  # fmt: skip
FALCON = modules(
    "transformer", "h", "lm_head",
    {"embedding": "word_embeddings", "final_norm": "ln_f"},
    {**fused("self_attention.query_key_value", of_each_group), "attn.out": "self_attention.dense", **PRE,
     "norm_attn": "input_layernorm|ln_attn", "norm_ffn": "post_attention_layernorm|ln_mlp",
     "ffn.up": "mlp.dense_h_to_4h", "ffn.down": "mlp.dense_4h_to_h"},
)  # fmt: skip
OPT = modules(
    "model.decoder", "layers", "lm_head",
    {"embedding": "embed_tokens", "position.table": ("embed_positions", after_two), "project_in": "project_in",
     "project_out": "project_out", "final_norm": "final_layer_norm"},
    {**QKVO, "attn.out": "self_attn.out_proj", "norm_attn": "self_attn_layer_norm", "norm_ffn": "final_layer_norm",
     "ffn.up": "fc1", "ffn.down": "fc2"},
)  # fmt: skip
XGLM = modules(
    "model", "layers", "lm_head",
    {"embedding": "embed_tokens", "final_norm": "layer_norm"},
    {**QKVO, "attn.out": "self_attn.out_proj", "norm_attn": "self_attn_layer_norm", "norm_ffn": "final_layer_norm",
     "ffn.up": "fc1", "ffn.down": "fc2"},
)  # fmt: skip
STABLELM = llama_modules(QKVO, PRE, GATED, {
    "attn.qk_norm.query": "self_attn.q_layernorm.norms.*", "attn.qk_norm.key": "self_attn.k_layernorm.norms.*",
})  # fmt: skip
MPT = modules(
    "transformer", "blocks", "lm_head",
    {"embedding": "wte", "final_norm": "norm_f"},
    {**fused("attn.Wqkv", third), "attn.out": "attn.out_proj", "norm_attn": "norm_1", "norm_ffn": "norm_2",
     "ffn.up": "ffn.up_proj", "ffn.down": "ffn.down_proj"},
)  # fmt: skip
GPT_OSS = llama_modules(QKVO, PRE, {
    "attn.core.normalizer.logit_H": "self_attn.sinks",
    "ffn.gate.weight": ("mlp.experts.gate_up_proj", expert(0)),
    "ffn.gate.bias": ("mlp.experts.gate_up_proj_bias", expert(0)),
    "ffn.up.weight": ("mlp.experts.gate_up_proj", expert(1)),
    "ffn.up.bias": ("mlp.experts.gate_up_proj_bias", expert(1)),
    "ffn.down.weight": ("mlp.experts.down_proj", expert(None)),
    "ffn.down.bias": ("mlp.experts.down_proj_bias", expert(None)),
})  # fmt: skip
PHI3 = llama_modules(PRE, fused("self_attn.qkv_proj", third), {
    "attn.out": "self_attn.o_proj", "ffn.gate": ("mlp.gate_up_proj", half(0)), "ffn.up": ("mlp.gate_up_proj", half(1)),
    "ffn.down": "mlp.down_proj",
})  # fmt: skip

FAMILIES: dict[str, Family] = {
    "bloom": Family(bloom, BLOOM, "bloom"),
    "cohere": Family(cohere, llama_modules(QKVO, QK_NORM, PRE, GATED), "cohere"),
    "cohere2": Family(cohere2, llama_modules(QKVO, PRE, GATED), "cohere2"),
    "falcon": Family(falcon, FALCON, "falcon"),
    "gemma": Family(gemma, LLAMA, "gemma"),
    "gemma2": Family(gemma2, llama_modules(QKVO, SANDWICH, GATED), "gemma2"),
    "gemma3_text": Family(gemma3, llama_modules(QKVO, QK_NORM, SANDWICH, GATED), "gemma3"),
    "gpt2": Family(gpt2, GPT2, "gpt2", unread=(".attn.bias", ".attn.masked_bias")),
    "gpt_bigcode": Family(gpt_bigcode, BIGCODE, "starcoder", unread=(".attn.bias", ".attn.masked_bias")),
    "gpt_neox": Family(
        gpt_neox, NEOX, "pythia", unread=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
    ),
    "gpt_oss": Family(gpt_oss, GPT_OSS, "gpt_oss", unread=(".mlp.router.weight", ".mlp.router.bias")),
    "gptj": Family(gptj, GPTJ, "gptj", unread=(".attn.bias", ".attn.masked_bias", ".attn.embed_positions")),
    "granite": Family(granite, LLAMA, "granite"),
    "llama": Family(llama_3_or_before, LLAMA, "llama", unread=(".rotary_emb.inv_freq",)),
    "mistral": Family(mistral, LLAMA, "mistral"),
    "mpt": Family(mpt, MPT, "mpt"),
    "nemotron": Family(nemotron, llama_modules(QKVO, PRE, PLAIN), "nemotron"),
    "olmo": Family(olmo, LLAMA, "olmo"),
    "olmo2": Family(olmo2, llama_modules(QKVO, QK_NORM, OUTPUT, GATED), "olmo2"),
    "olmo3": Family(olmo3, llama_modules(QKVO, QK_NORM, OUTPUT, GATED), "olmo3"),
    "opt": Family(opt, OPT, "opt"),
    "phi": Family(phi, PHI, "phi"),
    "phi3": Family(phi3, PHI3, "phi3"),
    "qwen2": Family(qwen2, LLAMA, "qwen2"),
    "qwen3": Family(qwen3, llama_modules(QKVO, QK_NORM, PRE, GATED), "qwen3"),
    "smollm3": Family(smollm3, LLAMA, "smollm3"),
    "stablelm": Family(stablelm, STABLELM, "stablelm"),
    "starcoder2": Family(
        starcoder2, llama_modules(QKVO, PRE, {"ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"}), "starcoder2"
    ),
    "xglm": Family(xglm, XGLM, "xglm", unread=(".embed_positions.weights",)),
}
"""Families by the `model_type` of a config.json."""
