"""A published configuration as overrides, by one set of rules for all families, and its weights as a state dict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any

from nexus_ablate.config.compose import compose, compose_values
from nexus_ablate.config.grammar import show
from nexus_ablate.config.options import AXES, default_option, option_files
from nexus_ablate.config.run_config import ModelConfig, RunConfig, keys_of
from nexus_ablate.errors import ConfigError
from nexus_ablate.pretrained.families import FAMILIES, Family, Settings, by_layer, refuse
from nexus_ablate.pretrained.missing import missing_parts
from nexus_ablate.pretrained.names import Shape, Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from nexus_ablate.model import GPT


@dataclass(frozen=True)
class Expression:
    """A published decoder in the words of this project.

    Attributes:
        overrides: The overrides for its architecture and sizes.
        keys: The keys that determine it: axes, and other keys.
        context: The number of its positions.
        shape: The sizes of its attention.
        source: Where its tensors are.
    """

    overrides: list[str]
    keys: list[str]
    context: int
    shape: Shape
    source: Tensors

    def state(self, model: GPT) -> dict[str, Tensor]:
        """The state dict of a model, from the published tensors and in the precision of its parameters.

        A bias that the family doesn't have is 0 and a gain is 1; the proof says whether that is right.

        Raises:
            ConfigError: A weight is missing or has another shape.
        """
        import torch

        state = {}
        for name, parameter in model.state_dict().items():
            tensor, leaf = self.source.tensor(name, self.shape), name.rpartition(".")[2]
            if tensor is None and leaf in NEUTRAL:
                tensor = torch.full_like(parameter, NEUTRAL[leaf])
            if tensor is None:
                raise ConfigError("the published model lacks a tensor", f"{name} here", "report it as a bug")
            if name == "position.table.weight":  # fairseq's tables begin with two rows that are never used
                first = len(tensor) - self.context
                tensor = tensor[first : first + len(parameter)]
            if tensor.shape != parameter.shape:
                got = f"{name}: {tuple(tensor.shape)} published, {tuple(parameter.shape)} here"
                raise ConfigError("a tensor has another shape than its configuration says", got, "report it as a bug")
            state[name] = tensor.to(parameter.dtype)
        return state


BIASED = ("layer", "layer_zero")
"""Norms with a bias by default."""
NEUTRAL = {"bias": 0.0, "gain": 1.0, "excess": 0.0}


def express(config: Any, published: Mapping[str, Tensor]) -> Expression:
    """The overrides that express a published decoder.

    Args:
        config: The library's configuration.
        published: Its tensors by their names.

    Raises:
        ConfigError: It can't be expressed; the message says which part of it.
    """
    family = FAMILIES.get(config.model_type, Family())
    source = Tensors(published, getattr(config, "num_hidden_layers", 1), family.names, family.layouts)
    missing = missing_parts(config, source, family.unused)
    if missing:
        raise refuse(config.model_type, "missing here", missing)
    shape = shape_of(config, source)
    settings = sizes(config, source, shape) | parts(config, source)
    settings |= positions(config, shape) | windows(config) | family.fixed | family.read(config)
    if settings.get("qk_norm.gain") != "off" and not source.has("blocks.{}.attn.qk_norm.query.gain"):
        settings["qk_norm"] = "none"
    preset = "llama3" if family.preset == "llama" and "position.low_freq_factor" in settings else family.preset
    norm = settings.get("norm", preset_values(preset)["norm"]["name"])
    if norm in BIASED:
        settings["norm_bias"] = "auto" if source.has("blocks.{}.norm_attn.bias") else "off"
    scale = settings.get("attn_scale")
    if isinstance(scale, float) and math.isclose(scale, shape.head_dim**-0.5):
        settings["attn_scale"] = "auto"
    keys = [key for key in settings if key != "model.context"]
    return Expression(overrides_of(settings, preset), keys, settings["model.context"], shape, source)


def check_architecture(config: RunConfig, expression: Expression) -> None:
    """Check that a run has the architecture of the published weights that it starts from.

    Raises:
        ConfigError: It has another one.
    """
    expected = compose(expression.overrides)
    for key in (*AXES, *expression.keys):
        group, _, name = key.rpartition(".")
        if group not in ("", "model") or key in ("init", "param"):
            continue
        wanted, found = (getattr(c.model if group else c, name) for c in (expected, config))
        if wanted != found:
            got = f"{key}={found}, of the weights {wanted}"
            raise ConfigError(
                "the weights to start from are of another architecture", got, "the line that `import` prints"
            )


def first(config: Any, *names: str, default: Any = None) -> Any:
    """The value of the first attribute that exists and isn't None."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def shape_of(config: Any, source: Tensors) -> Shape:
    """The sizes of attention, from the shapes of its tensors."""
    d_model, n_heads = config.hidden_size, config.num_attention_heads
    weights = (source.find(f"blocks.0.attn.{name}.weight")[0] for name in ("out", "query", "key"))
    (out, query, key) = weights
    head_dim = source.published[out].numel() // d_model // n_heads
    rows = source.published[key].numel() // d_model
    n_kv = (rows // head_dim - n_heads) // 2 if query == key else rows // head_dim
    return Shape(n_heads, n_kv, head_dim)


def sizes(config: Any, source: Tensors, shape: Shape) -> Settings:
    """Sizes and the vocabulary."""
    rows, d_embed = source.published[source.find("embedding.weight")[0]].shape
    d_model, full = config.hidden_size, shape.head_dim * shape.n_heads == config.hidden_size
    d_ff = Fraction(source.published[source.find("blocks.0.ffn.down.weight")[0]].numel(), d_model**2)
    return {
        "vocab_size": rows,
        "d_embed": "auto" if d_embed == d_model else d_embed,
        "model.d_model": d_model,
        "model.n_layers": config.num_hidden_layers,
        "model.n_heads": shape.n_heads,
        "model.head_dim": "auto" if full else shape.head_dim,
        "n_kv_heads": "auto" if shape.n_kv_heads == shape.n_heads else shape.n_kv_heads,
        "d_ff_ratio": int(d_ff) if d_ff.denominator == 1 else str(d_ff),
        "model.d_ff_multiple": 1,
        "model.context": first(config, "max_position_embeddings", "max_seq_len", "seq_length", default=2048),
    }


def parts(config: Any, source: Tensors) -> Settings:
    """Norms, biases, the FFN and the head."""
    qkv, out, ffn = (source.has(f"blocks.{{}}.{name}.bias") for name in ("attn.query", "attn.out", "ffn.up"))
    even = qkv == out == ffn
    biases = {"qkv_bias": qkv, "attn_out_bias": out, "ffn_bias": ffn}
    settings: Settings = {key: "auto" if even or not on else "on" for key, on in biases.items()}
    settings |= {
        "bias": qkv and even,
        "head_bias": source.has("head.bias"),
        "embed_norm": source.has("embed_norm.gain"),
    }
    settings["tie_embeddings"] = bool(config.tie_word_embeddings)
    for key, names in NUMBERS.items():
        for name in names:
            if hasattr(config, name):
                value = getattr(config, name)
                settings[key] = "off" if value is None else float(value)
    if hasattr(config, "query_pre_attn_scalar"):
        settings["attn_scale"] = config.query_pre_attn_scalar**-0.5
    parallel = first(config, "use_parallel_residual", "parallel_attn")
    if parallel is not None:
        settings["placement"] = "parallel" if parallel else "pre"
        settings["placement.norms"] = 1 + source.has("blocks.{}.norm_ffn.gain")
    return settings | activation(config, source.has("blocks.{}.ffn.gate.weight"))


NUMBERS = {
    "norm.eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "attn_softcap": ("attn_logit_softcapping",),
    "final_softcap": ("final_logit_softcapping",),
    "clip_qkv": ("clip_qkv",),
    "logit_scale": ("logit_scale",),
}
"""Numbers by the names that they have in any family; None means off."""
GELUS = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True, "gelu_fast": True}
"""Whether a GELU is the tanh approximation."""
PLAIN = {"silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2", "xielu": "xielu"}
GATED = {"silu": "swiglu", "swish": "swiglu", "relu": "reglu", "relu2": "reglu2", "sigmoid": "glu"}


def activation(config: Any, gated: bool) -> Settings:
    """The FFN of an activation function; the preset's if the configuration names none."""
    names = ("hidden_activation", "hidden_act", "activation_function", "activation")
    name = first(config, *names)
    if name is None:
        return {}
    if name in GELUS and gated:
        return {"ffn": "geglu", "ffn.tanh": GELUS[name]}
    if name in GELUS:
        return {"ffn": "gelu_tanh" if GELUS[name] else "gelu"}
    ffn = (GATED if gated else PLAIN).get(name)
    if ffn is None:
        raise refuse(config.model_type, f"activation={name}", "there is no FFN with this activation here")
    return {"ffn": ffn}


def windows(config: Any) -> Settings:
    """The window of each layer."""
    width, types = first(config, "sliding_window"), first(config, "layer_types")
    if width is None:
        return {"window": "off"}
    if types is None:
        return {"window": width}
    widths = by_layer([width if kind == "sliding_attention" else 0 for kind in types])
    return {"window": widths or "off"}


def positions(config: Any, shape: Shape) -> Settings:
    """RoPE with its scaling; the preset's positions if the configuration has no RoPE."""
    if first(config, "rotary_dim") is not None:  # GPT-J
        return {"position.fraction": config.rotary_dim / shape.head_dim}
    parameters = first(config, "rope_parameters")
    if not parameters or "rope_type" not in str(parameters):
        return {}
    if parameters.get("llama_4_scaling_beta"):
        raise refuse(
            config.model_type, "llama_4_scaling_beta", "queries do not grow with the position in layers with RoPE"
        )
    types = first(config, "layer_types", default=[])
    nested = any(isinstance(value, dict) for value in parameters.values())
    ropes = [parameters[kind] for kind in types] if nested else [parameters]
    widths = {int(shape.head_dim * rope.get("partial_rotary_factor", 1.0)) for rope in ropes}
    if len(widths) > 1 or widths.pop() % 2:
        raise refuse(config.model_type, "partial_rotary_factor", "one even number of rotated channels is possible")
    width = int(shape.head_dim * ropes[0].get("partial_rotary_factor", 1.0))
    settings = {
        "position": "rope",
        "position.fraction": width / shape.head_dim,
        "position.theta": by_layer([float(rope["rope_theta"]) for rope in ropes]),
    }
    kinds = {rope["rope_type"] for rope in ropes} - {"default"}
    if not kinds:
        return settings
    kind = kinds.pop()
    if kinds or (kind not in SCALINGS and "alpha" not in ropes[0]):
        reason = UNKNOWN_SCALINGS.get(kind, "there is no such scaling here")
        raise refuse(config.model_type, f"rope_type={kind}", "two scalings in one model" if kinds else reason)
    option, keys = SCALINGS.get(kind, SCALINGS["linear"])
    settings["position"] = option
    whole = next(rope for rope in ropes if rope["rope_type"] == kind)
    scaled = [scaling(config, rope, whole) for rope in ropes]
    for key in keys:
        settings[f"position.{key}"] = by_layer([values[key] for values in scaled])
    return settings


SCALINGS = {
    "linear": ("rope_interpolated", ("factor", "method")),
    "llama3": ("rope_llama3", ("factor", "low_freq_factor", "high_freq_factor", "original_context")),
    "yarn": (
        "rope_yarn",
        ("factor", "beta_fast", "beta_slow", "original_context", "attention_factor", "truncate"),
    ),
}
"""Options by the library's names of scalings, and their keys."""
UNKNOWN_SCALINGS = {
    "dynamic": "frequencies depend on the length of each text",
    "longrope": "frequencies depend on the length of each text, with a factor per channel",
    "proportional": "the frequencies of a part of the channels are spread over the whole head",
}


def scaling(config: Any, rope: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a layer's scaled RoPE. A layer without scaling has the factor 1.

    Args:
        rope: The layer's parameters.
        whole: The parameters of a layer with scaling.
    """
    original = whole.get("original_max_position_embeddings") or config.max_position_embeddings
    plain = rope["rope_type"] == "default"
    factor = whole.get("alpha") or whole.get("factor") or config.max_position_embeddings / original
    length = yarn_length(whole, factor)
    return {
        "factor": 1.0 if plain else float(factor),
        "method": "ntk" if "alpha" in whole else "linear",
        "low_freq_factor": whole.get("low_freq_factor"),
        "high_freq_factor": whole.get("high_freq_factor"),
        "beta_fast": whole.get("beta_fast") or 32.0,
        "beta_slow": whole.get("beta_slow") or 1.0,
        "truncate": whole.get("truncate", True),
        "original_context": int(original),
        "attention_factor": "auto" if math.isclose(length, yarn_length({}, factor)) else length,
    }


def yarn_length(rope: Mapping[str, Any], factor: float) -> float:
    """YaRN's factor on rotated q and k; without keys of its own, the paper's."""
    if rope.get("attention_factor"):
        return float(rope["attention_factor"])
    log = 0.1 * math.log(max(1.0, factor))
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return (log * rope["mscale"] + 1) / (log * rope["mscale_all_dim"] + 1)
    return log + 1


@cache
def preset_values(preset: str) -> dict[str, Any]:
    """The values of all keys under a preset."""
    return compose_values([f"preset={preset}"])


def overrides_of(settings: Settings, preset: str) -> list[str]:
    """The overrides that turn a preset into the settings; other keys are as in the preset."""
    start = preset_values(preset)
    overrides = [f"preset={preset}"]
    for axis in AXES:
        values = start[axis]
        name = settings.get(axis, values["name"])
        if values["name"] != name:
            overrides.append(f"{axis}={name}")
            values = default_option(axis, name).keys
        for key, spec in option_files(axis)[name].keys.items():
            value = accepted(spec.constraint, f"{axis}.{key}", settings.get(f"{axis}.{key}", values[key]))
            if value != spec.constraint.accept(f"{axis}.{key}", values[key]):
                overrides.append(f"{axis}.{key}={show(value)}")
    scalars = {key: constraint for key, constraint in keys_of(RunConfig).items() if key in settings}
    for key, constraint in scalars.items():
        value = accepted(constraint, key, settings[key])
        if value != constraint.accept(key, start[key]):
            overrides.append(f"{key}={show(value)}")
    for key, constraint in keys_of(ModelConfig).items():
        name = f"model.{key}"
        if name in settings and accepted(constraint, name, settings[name]) != start["model"][key]:
            overrides.append(f"{name}={show(settings[name])}")
    return overrides


def accepted(constraint: Any, key: str, value: Any) -> Any:
    """The value as the key's constraint reads it.

    Raises:
        ConfigError: The key can't have it.
    """
    try:
        return constraint.accept(key, value)
    except ConfigError as error:
        fix = "`nexus-ablate list` shows the options that exist"
        raise ConfigError("this configuration cannot be expressed", f"{key}={value}: {error.problem}", fix) from error
