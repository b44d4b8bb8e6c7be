"""Families of published decoders: what their configurations and names mean where that isn't what they usually mean.

Most of a decoder follows from its configuration and the shapes of its tensors in one way for all families
(expression.py, names.py). A family adds the preset that it is compared with, constants of its code, keys of its own,
and names that mean something else. Nothing here is assumed to be right: every import is proved (proof.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nexus_ablate.errors import ConfigError
from nexus_ablate.pretrained.layouts import CONV1D, EXPERTS, Layout, swapped

Settings = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """What is particular to a family.

    Attributes:
        preset: The preset at the start of the overrides. Settings that nothing else determines are as in it.
        fixed: Settings that are constants of the family's code.
        read: Returns settings from the library's configuration.
        names: Names of tensors that the family uses otherwise, as in `names.NAMES`.
        layouts: Layouts that the family uses otherwise, as in `names.FUSED`.
        unused: Parts of names of tensors that change nothing.
    """

    preset: str = "llama"
    fixed: Settings = field(default_factory=dict)
    read: Callable[[Any], Settings] = lambda c: {}
    names: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


def refuse(config: Any, key: str, reason: str) -> ConfigError:
    """The error for a part of a configuration that no axis can express."""
    fix = "`nexus-ablate list` shows the options that exist"
    return ConfigError(f"this {config.model_type} cannot be expressed", f"{key}: {reason}", fix)


def first(config: Any, *names: str, default: Any = None) -> Any:
    """The value of the first attribute that exists and isn't None."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def by_layer(values: list[Any]) -> Any:
    """A single value if all layers have the same, else the shortest list that gives the values when repeated."""
    length = 1
    while any(value != values[layer % length] for layer, value in enumerate(values)):
        length += 1
    return values[:length] if length > 1 else values[0]


def positions_in(layers: list[Any]) -> Settings:
    """The layers without positions, from one truth value per layer."""
    without = [layer for layer, has_positions in enumerate(layers) if not has_positions]
    period = without[0] + 1 if without else 1
    is_periodic = period > 1 and without == list(range(period - 1, len(layers), period))
    return {"nope_every": period if is_periodic else without or "off"}


def positions_in_windows(c: Any) -> Settings:
    """Positions only in layers with a window."""
    return positions_in([kind == "sliding_attention" for kind in c.layer_types])


def exaone4(c: Any) -> Settings:
    return positions_in_windows(c) if c.sliding_window else {"nope_every": "off"}


def falcon(c: Any) -> Settings:
    head_dim = c.hidden_size // c.num_attention_heads
    return {"position": "alibi", "position.slope_factor": head_dim**-0.5} if c.alibi else {}


def gpt_neo(c: Any) -> Settings:
    return {"window": by_layer([c.window_size * (kind == "local") for kind in c.attention_layers])}


def gpt_oss(c: Any) -> Settings:
    if c.num_local_experts > 1:
        raise refuse(
            c, f"num_local_experts={c.num_local_experts}", "only ffn=moe would hold it, and a mapping is missing"
        )
    return {"ffn.alpha": getattr(c, "swiglu_alpha", 1.702), "ffn.limit": getattr(c, "swiglu_limit", 7.0)}


def gpt2(c: Any) -> Settings:
    return {} if c.scale_attn_weights else {"attn_scale": 1.0}


def gptj(c: Any) -> Settings:
    return {"position.fraction": c.rotary_dim * c.n_head / c.n_embd}


def granite(c: Any) -> Settings:
    residual = {"placement": "residual_scale", "placement.branch_scale": c.residual_multiplier}
    return {
        **(residual if c.residual_multiplier != 1 else {"placement": "pre"}),
        "embed_scale": c.embedding_multiplier,
        "logit_scale": 1 / c.logits_scaling,
        "attn_scale": c.attention_multiplier,
    }


def granite_swa(c: Any) -> Settings:
    return granite(c) | {"position.theta": by_layer([float(theta) for theta in c.layer_rope_theta])}


def hunyuan(c: Any) -> Settings:
    alpha = c.rope_parameters.get("alpha")
    return {"position": "rope_interpolated", "position.method": "ntk", "position.factor": alpha} if alpha else {}


def hyperclovax(c: Any) -> Settings:
    return granite(c) | ({"placement": "sandwich"} if c.use_post_norm and c.residual_multiplier == 1 else {})


def mpt(c: Any) -> Settings:
    attention = c.attn_config
    return {
        "d_ff_ratio": c.expansion_ratio,
        "position.bias_max": attention.alibi_bias_max,
        "clip_qkv": attention.clip_qkv or "off",
        "attn_scale": attention.softmax_scale or "auto",
    }


def opt(c: Any) -> Settings:
    return {"placement": "pre" if c.do_layer_norm_before else "post"}


def scaled(c: Any) -> Settings:
    return {"embed_scale": "sqrt_d" if c.scale_embedding else "off"}


def smollm3(c: Any) -> Settings:
    return positions_in(c.no_rope_layers)


NORMED_OUTPUTS = {
    "blocks.{}.norm_attn": "post_attention_layernorm",
    "blocks.{}.norm_ffn": "post_feedforward_layernorm",
}
SANDWICH = {
    "blocks.{}.norm_attn_out": "post_attention_layernorm",
    "blocks.{}.norm_ffn_out": "post_feedforward_layernorm",
}
EXPERT_NAMES = {
    "blocks.{}.ffn.gate.weight": "mlp.experts.gate_up_proj",
    "blocks.{}.ffn.gate.bias": "mlp.experts.gate_up_proj_bias",
    "blocks.{}.ffn.up.weight": "mlp.experts.gate_up_proj",
    "blocks.{}.ffn.up.bias": "mlp.experts.gate_up_proj_bias",
    "blocks.{}.ffn.down.weight": "mlp.experts.down_proj",
    "blocks.{}.ffn.down.bias": "mlp.experts.down_proj_bias",
}
INTERLEAVED = {"position.pairing": "interleaved"}
PER_HEAD = {"qk_norm": "layer", "qk_norm.gain": "per_head"}

FAMILIES: dict[str, Family] = {
    "apertus": Family(fixed={"qk_norm": "rms"}, unused=("act_fn.beta", "act_fn.eps")),
    "apertus1p5_text": Family(fixed={"qk_norm": "rms"}, unused=("act_fn.beta", "act_fn.eps")),
    "biogpt": Family("opt", {"norm.eps": 1e-5}, scaled),
    "bitnet": Family(fixed={"placement": "subln"}),
    "bloom": Family("bloom"),
    "codegen": Family("gptj", read=gptj),
    "cohere": Family("cohere", PER_HEAD),
    "cohere2": Family("cohere2", read=positions_in_windows),
    "cwm": Family("llama3"),
    "ernie4_5": Family(fixed=INTERLEAVED),
    "exaone4": Family("olmo2", {"qk_norm": "rms"}, exaone4, NORMED_OUTPUTS),
    "falcon": Family("falcon", read=falcon),
    "gemma": Family("gemma"),
    "gemma2": Family("gemma2", names=SANDWICH),
    "gemma3_text": Family("gemma3", names=SANDWICH),
    "glm": Family(fixed=INTERLEAVED),
    "glm4": Family(fixed=INTERLEAVED | {"placement": "sandwich"}),
    "gpt-sw3": Family("gpt2", read=gpt2, layouts=CONV1D),
    "gpt2": Family("gpt2", read=gpt2, layouts=CONV1D),
    "gpt_bigcode": Family("starcoder", read=gpt2),
    "gpt_neo": Family("gpt2", {"attn_scale": 1.0}, gpt_neo),
    "gpt_neox": Family("pythia"),
    "gpt_neox_japanese": Family("pythia", {"placement": "pre"}),
    "gpt_oss": Family("gpt_oss", {"ffn": "swiglu_clamped"}, gpt_oss, EXPERT_NAMES, EXPERTS, ("mlp.router",)),
    "gptj": Family("gptj", read=gptj),
    "granite": Family("granite", read=granite),
    "granite_swa": Family("granite", {"normalizer": "sink"}, granite_swa),
    "helium": Family(fixed=INTERLEAVED),
    "hunyuan_v1_dense": Family(fixed={"qk_norm": "rms", "qk_norm.after_rotation": True}, read=hunyuan),
    "hyperclovax": Family("granite", read=hyperclovax),
    "jais2": Family(fixed={"norm": "layer"}),
    "ministral": Family("mistral"),
    "ministral3": Family("mistral"),
    "mistral": Family("mistral"),
    "mpt": Family("mpt", read=mpt),
    "nanochat": Family(
        fixed={"embed_norm": True, "qk_norm": "rms", "qk_norm.gain": "off", "qk_norm.after_rotation": True},
        layouts={"self_attn.q_proj": swapped, "self_attn.k_proj": swapped},
    ),
    "nemotron": Family("nemotron"),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2", names=NORMED_OUTPUTS),
    "olmo3": Family("olmo3", names=NORMED_OUTPUTS),
    "openai-gpt": Family("gpt2", {"placement": "post", "ffn": "gelu_tanh"}, layouts=CONV1D),
    "opt": Family("opt", read=opt),
    "persimmon": Family("pythia", {"placement": "pre", "qk_norm": "layer", "qk_norm.bias": True}),
    "phi": Family("phi", {"qk_norm": "layer", "qk_norm.bias": True}),
    "phi3": Family("phi3"),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "smollm3": Family("smollm3", read=smollm3),
    "stablelm": Family("stablelm", PER_HEAD),
    "starcoder2": Family("starcoder2"),
    "vaultgemma": Family("gemma2", {"placement": "pre"}),
    "xglm": Family("xglm", read=scaled),
}  # fmt: skip
"""Families by the `model_type` of a config.json. Others are read as Llama is, by the rules alone."""
