"""A published configuration as overrides, by one set of rules for all families, and its weights as a state dict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from nexus_ablate.config.compose import compose, compose_values, differences
from nexus_ablate.config.grammar import show
from nexus_ablate.config.options import AXES
from nexus_ablate.config.overrides import check_overrides
from nexus_ablate.config.run_config import RunConfig, by_key
from nexus_ablate.errors import ConfigError
from nexus_ablate.pretrained.families import FAMILIES, Family, Settings, by_layer, first, refuse
from nexus_ablate.pretrained.names import Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from nexus_ablate.model import GPT

BIASED = ("layer", "layer_zero")
"""Norms with a bias by default."""
NO_ARCHITECTURE = frozenset(
    "init norm_gain_sites data optim weight_decay z_loss train probe preset model.dropout model.context".split()
)
"""Keys and groups that may differ between a run and the weights that it starts from: the same tensors give the same
logits."""
NEUTRAL = {"bias": 0.0, "gain": 1.0, "excess": 0.0}
"""Values of parameters that a family doesn't have; the proof says whether that is right."""


@dataclass(frozen=True)
class Expression:
    """A published decoder in the words of this project.

    Attributes:
        overrides: The overrides for its architecture and sizes.
        context: The number of its positions.
        source: Where its tensors are.
    """

    overrides: list[str]
    context: int
    source: Tensors

    def state(self, model: GPT) -> dict[str, Tensor]:
        """The state dict of a model, from the published tensors and in the precision of its parameters.

        Raises:
            ConfigError: A tensor is missing or has another shape.
        """
        import torch

        state = {}
        for name, parameter in model.state_dict().items():
            tensor, leaf = self.source.tensor(name), name.rpartition(".")[2]
            if tensor is None and leaf in NEUTRAL:
                tensor = torch.full_like(parameter, NEUTRAL[leaf])
            if name == "position.table.weight" and tensor is not None:  # OPT's begins with two rows that are never used
                tensor = tensor[-self.context :][: len(parameter)]
            if tensor is None or tensor.shape != parameter.shape:
                raise refuse(self.source.config, name, f"its tensor is missing or not {tuple(parameter.shape)}")
            state[name] = tensor.to(parameter.dtype)
        return state


def express(config: Any, published: Mapping[str, Tensor]) -> Expression:
    """The overrides that express a published decoder.

    Args:
        config: The library's configuration.
        published: Its tensors by their names.

    Raises:
        ConfigError: It can't be expressed; the message says which part of it.
    """
    family = FAMILIES.get(config.model_type, Family())
    source = Tensors(config, published, family)
    if missing := missing_parts(source, family.unused):
        raise refuse(config, "missing here", missing)
    settings = sizes(config, source) | parts(config, source) | positions(config, source.shape.head_dim)
    settings |= windows(config) | family.fixed | family.read(config)
    if settings.get("qk_norm.gain") != "off" and not source.has("blocks.{}.attn.qk_norm.query.gain"):
        settings["qk_norm"] = "none"
    preset = "llama3" if family.preset == "llama" and "position.low_freq_factor" in settings else family.preset
    norm = settings.get("norm", _values([f"preset={preset}"])["norm"])
    if norm in BIASED:
        settings["norm_bias"] = "auto" if source.has("blocks.{}.norm_attn.bias") else "off"
    overrides = overrides_of(settings, preset)
    try:
        compose(overrides)
    except ConfigError as error:
        raise refuse(config, error.got, error.problem) from error
    return Expression(overrides, settings["model.context"], source)


def check_architecture(config: RunConfig, expression: Expression) -> None:
    """Check that a run has the architecture of the published weights that it starts from.

    Raises:
        ConfigError: It has another one.
    """
    for key, value in differences(config, compose(expression.overrides)).items():
        if key not in NO_ARCHITECTURE and key.partition(".")[0] not in NO_ARCHITECTURE:
            problem = "the weights to start from are of another architecture"
            raise ConfigError(problem, f"{key}={value}", "the line that `import` prints")


# --------------------------------------------------------------------------------------------------------------- rules


def sizes(config: Any, source: Tensors) -> Settings:
    """Sizes and the vocabulary."""
    rows, d_embed = source.published[source.find("embedding.weight")[1][0]].shape
    d_model, shape = config.hidden_size, source.shape
    settings: Settings = {
        "vocab_size": rows,
        "d_embed": d_embed,
        "model.d_model": d_model,
        "model.n_layers": config.num_hidden_layers,
        "model.n_heads": shape.n_heads,
        "model.head_dim": shape.head_dim,
        "n_kv_heads": shape.n_kv_heads,
        "d_ff_ratio": str(Fraction(source.size("blocks.0.ffn.down.weight"), d_model**2)),
        "model.d_ff_multiple": 1,
        "model.context": first(config, "max_position_embeddings", "max_seq_len", "seq_length", default=2048),
    }
    usual = {"d_embed": d_model, "model.head_dim": d_model / shape.n_heads, "n_kv_heads": shape.n_heads}
    return settings | {key: "auto" for key, size in usual.items() if settings[key] == size}


NUMBERS = {
    "rms_norm_eps": "norm.eps",
    "layer_norm_eps": "norm.eps",
    "layer_norm_epsilon": "norm.eps",
    "norm_eps": "norm.eps",
    "norm_epsilon": "norm.eps",
    "attn_logit_softcapping": "attn_softcap",
    "final_logit_softcapping": "final_softcap",
    "clip_qkv": "clip_qkv",
    "logit_scale": "logit_scale",
}
"""Keys here by the names of numbers in any family; None means off."""
FFNS = {
    "gelu": ("gelu", "geglu"),
    "gelu_new": ("gelu_tanh", "geglu"),
    "gelu_pytorch_tanh": ("gelu_tanh", "geglu"),
    "gelu_fast": ("gelu_tanh", "geglu"),
    "silu": ("silu", "swiglu"),
    "swish": ("silu", "swiglu"),
    "relu": ("relu", "reglu"),
    "relu2": ("relu2", "reglu2"),
    "sigmoid": ("", "glu"),
    "xielu": ("xielu", ""),
}
"""FFNs by their activation function, without and with a gate."""
EXACT_GELU = "gelu"
"""The activation function that isn't approximated with tanh."""


def parts(config: Any, source: Tensors) -> Settings:
    """Norms, biases, the FFN and the head."""
    sites = {"qkv_bias": "attn.query", "attn_out_bias": "attn.out", "ffn_bias": "ffn.up"}
    biased = [key for key, module in sites.items() if source.has(f"blocks.{{}}.{module}.bias")]
    everywhere = len(biased) == len(sites)
    settings: Settings = dict.fromkeys(sites, "auto")
    if not everywhere:
        settings |= dict.fromkeys(biased, "on")
    settings |= {
        "bias": everywhere,
        "head_bias": source.has("head.bias"),
        "embed_norm": source.has("embed_norm.gain"),
        "tie_embeddings": bool(config.tie_word_embeddings),
    }
    for name, key in NUMBERS.items():
        if hasattr(config, name):
            settings[key] = first(config, name, default="off")
    if hasattr(config, "query_pre_attn_scalar"):
        is_usual = config.query_pre_attn_scalar == source.shape.head_dim
        settings["attn_scale"] = "auto" if is_usual else config.query_pre_attn_scalar**-0.5
    parallel = first(config, "use_parallel_residual", "parallel_attn")
    if parallel is not None:
        settings["placement"] = "parallel" if parallel else "pre"
        settings["placement.norms"] = 1 + source.has("blocks.{}.norm_ffn.gain")
    activation = first(config, "hidden_activation", "hidden_act", "activation_function", "activation")
    if activation is None:
        return settings
    ffn = FFNS.get(activation, ("", ""))[source.has("blocks.{}.ffn.gate.weight")]
    if not ffn:
        raise refuse(config, f"activation={activation}", "there is no FFN with this activation here")
    return settings | {"ffn": ffn, "ffn.tanh": activation != EXACT_GELU}


def windows(config: Any) -> Settings:
    """The window of each layer."""
    width, types = first(config, "sliding_window"), first(config, "layer_types")
    if width is None or types is None:
        return {"window": width or "off"}
    widths = [width if kind == "sliding_attention" else 0 for kind in types]
    return {"window": by_layer(widths) or "off"}


SCALINGS = {"linear": "rope_interpolated", "llama3": "rope_llama3", "yarn": "rope_yarn"}
"""Options by the library's names of scalings."""


def positions(config: Any, head_dim: int) -> Settings:
    """RoPE with its scaling; the preset's positions if the configuration has no RoPE."""
    parameters = first(config, "rope_parameters", default={})
    if "rope_type" not in str(parameters):
        return {}
    if parameters.get("llama_4_scaling_beta"):
        raise refuse(config, "llama_4_scaling_beta", "queries do not grow with the position in layers with RoPE")
    ropes = [parameters]
    if any(isinstance(value, dict) for value in parameters.values()):
        ropes = [parameters[kind] for kind in config.layer_types]
    fractions = [int(head_dim * rope.get("partial_rotary_factor", 1.0)) / head_dim for rope in ropes]
    thetas = [float(rope["rope_theta"]) for rope in ropes]
    settings = {"position": "rope", "position.fraction": by_layer(fractions), "position.theta": by_layer(thetas)}
    scaled = {rope["rope_type"]: rope for rope in ropes if rope["rope_type"] != "default"}
    if not scaled:
        return settings
    kind, rope = scaled.popitem()
    if scaled or (kind not in SCALINGS and "alpha" not in rope):
        raise refuse(config, f"rope_type={kind}", "there is no such scaling here")
    settings |= {f"position.{key}": value for key, value in rope.items() if value is not None}
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = rope.get("factor") or config.max_position_embeddings / original
    factors = {"default": 1.0, kind: float(factor)}
    return settings | {
        "position": SCALINGS.get(kind, "rope_interpolated"),
        "position.original_context": original,
        "position.factor": by_layer([factors[rope["rope_type"]] for rope in ropes]),
    }


def _values(overrides: list[str]) -> dict[str, Any]:
    return by_key(compose_values(check_overrides(overrides, sweeps=False)))


def overrides_of(settings: Settings, preset: str) -> list[str]:
    """The overrides that turn a preset into the settings. Keys that the chosen options don't have are left out."""
    preset_values = _values([f"preset={preset}"])
    overrides = [f"preset={preset}"]
    for axis in AXES:
        if settings.get(axis, preset_values[axis]) != preset_values[axis]:
            overrides.append(f"{axis}={settings[axis]}")
    start = _values(overrides)
    for key, value in settings.items():
        if key not in AXES and key in start and show(start[key]) != show(value):
            overrides.append(f"{key}={show(value)}")
    return overrides


# ------------------------------------------------------------------------------------------------------ what is missing


SIGNS = {
    "a mixture of experts (ffn=moe would do; only a mapping is missing)": (
        r"expert|router|\bmoe|e_score|mlp\.gate\.weight"
    ),
    "layers with a recurrent state (state-space, convolution or linear attention)": (
        r"conv|A_log|dt_(bias|proj)|ssm|mamba|linear_attn|time_mix|attention\.time|[xm]lstm|temporal_block|slope_rate"
    ),
    "keys and values from a narrow projection (latent attention)": r"kv_[ab]_|q_[ab]_|kv_lora",
    "cross-attention to an encoder": r"encoder_attn|cross_attn|crossattention",
    "another modality than text": r"vision|image|audio|speech|visual|modal",
    "differential attention (mixer=differential would do; only a mapping is missing)": r"lambda_[qk]",
    "an embedding for each layer": r"per_layer|altup",
    "an embedding of something other than tokens and positions": r"token_type|segment|lang_emb|z_L_init|pronunciation",
    "a head with layers of its own": r"predictions|generator_|lm_head\.(dense|layer_norm|norm)|pred_layer",
    "learned factors on branches, queries or channels": r"(_residual|layer_scalar|lambda_[12]|sqk|suv\w*|_scale)$",
    "these relative positions": r"rel_|relative|r_w_bias|position_bias",
    "an activation with learned parameters": r"act_fn",
    "a gate on attention (gate=elementwise or headwise would do; only a mapping is missing)": (
        r"attn\.(gate_proj|g_proj|s_gate|gate_bias)"
    ),
}
"""Patterns in the names of tensors by what they are a part of."""
NEEDED = ("embedding", "blocks.{}.attn.query", "blocks.{}.attn.key", "blocks.{}.attn.out", "blocks.{}.ffn.down")


def missing_parts(source: Tensors, unused: tuple[str, ...]) -> str:
    """The parts of a published model that no axis can express, '' if there are none.

    Args:
        source: Where its tensors are.
        unused: Parts of names of tensors that change nothing.
    """
    if getattr(source.config, "is_encoder_decoder", False):
        return "an encoder"
    unknown = source.unknown()
    for part in unused:
        unknown = [name for name in unknown if part not in name]
    if unknown:
        lines = "\n".join(unknown)
        reasons = [meaning for meaning, sign in SIGNS.items() if re.search(sign, lines, re.MULTILINE)]
        return ", ".join(reasons) or f"what {', '.join(unknown[:3])} does"
    has_all = all(source.has(f"{name}.weight") for name in NEEDED)
    return "" if has_all else "blocks of attention and an FFN"
