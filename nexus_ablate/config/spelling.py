"""Of several spellings of one computation a configuration keeps one, so that they are one run under one name."""

from __future__ import annotations

from typing import Any

from nexus_ablate.config.grammar import show
from nexus_ablate.config.groups import choices_of
from nexus_ablate.config.options import COMMON_KEYS, IN_OTHER_LAYERS, Option, default_option, option_files
from nexus_ablate.config.run_config import RunConfig, by_key

BY_LAYER = ("theta", "factor")
"""Keys of the positions whose list has a value for each layer in turn."""
ROTATES_NOTHING = ("none", "learned", "sinusoidal", "alibi", "t5", "kerple", "fire")
"""The positions that leave queries and keys as they are."""
PLAIN_QUERIES = ("dot", "luong_dot")
"""The scores that leave queries as they are."""
BYTES = 256
"""Size of the vocabulary of `data.tokenizer=bytes`."""


def one_spelling(config: RunConfig) -> list[str]:
    """Give equal computations equal values, and keys that change nothing their defaults.

    Returns:
        A note for each value that changed nothing.
    """
    notes = []
    for name in ("nope_every", "norm_gain_sites"):
        value = getattr(config, name)
        if isinstance(value, list):
            setattr(config, name, sorted(set(value)))
    for axis in IN_OTHER_LAYERS:
        if isinstance(listed := getattr(config, axis).keys.get("layers"), list):
            _set(config, f"{axis}.layers", sorted(listed))
    default = default_option("position", choices_of("config")["position"])
    if config.position == default and not config.layers_reading("position"):
        notes.append(f"mixer={config.mixer.name} does not read position, so it is position=none")
        config.position = Option("none")
    layers = config.nope_every
    if isinstance(layers, list) and layers == [*range(layers[0], config.model.n_layers, layers[0] + 1)]:
        config.nope_every = layers[0] + 1
    biases = {config.qkv_bias, config.attn_out_bias, config.ffn_bias}
    if "auto" not in biases:
        if config.bias and "off" in biases:
            notes.append("bias=on: qkv_bias, attn_out_bias and ffn_bias are given, so it has no effect")
        config.bias = biases == {"on"}
        if len(biases) == 1:
            config.qkv_bias = config.attn_out_bias = config.ffn_bias = "auto"
    config.window = _period(config.window) or "off"
    for key in config.position.keys.keys() & {*BY_LAYER}:
        _set(config, f"position.{key}", _period(config.position.keys[key]))
    if config.embed_scale != "auto":
        scales = {1.0: "off", config.model.d_model**0.5: "sqrt_d"}
        config.embed_scale = scales.get(config.embed_scale, config.embed_scale)
    if config.logit_scale == 1:
        config.logit_scale = "off"
    if config.vocab_size == BYTES and config.data.keys.get("tokenizer") == "bytes":
        config.vocab_size = "auto"
    if config.train.precision == "fp32" and config.norm.keys.get("fp32") is False:
        notes.append("norm.fp32=off: train.precision=fp32 is float32 throughout, so it has no effect")
    if config.probe.name == "off" and config.probe.every != "auto":
        notes.append(f"probe.every={config.probe.every}: probe=off, so it has no effect")
    for name, reason in unused_keys(config).items():
        group, _, key = name.partition(".")
        option: Option = getattr(config, group)
        file = option_files(group)[option.name]
        if key not in option.keys or (file.plugin and key not in COMMON_KEYS.get(group, {})):
            continue
        value, default = option.keys[key], file.keys[key].default
        if value != default:
            notes.append(f"{name}={show(value)}: {reason}, so it has no effect")
            _set(config, name, default)
    return notes


def unused_keys(config: RunConfig) -> dict[str, str]:
    """The keys of options that change nothing beside the others, with the reason."""
    schedule, tokenizer = config.schedule.schedule, config.data.keys.get("tokenizer")
    unused = {}
    if schedule != "wsd":
        unused["optim.cooldown"] = f"optim.schedule={schedule} has no phase of cooling"
    if schedule == "constant":
        unused["optim.final_lr"] = "optim.schedule=constant keeps the peak rate"
    if not config.weight_decay:
        decay = ("optim.decay", "optim.decay_mode", "optim.cautious_decay")
        unused |= dict.fromkeys(decay, "weight_decay=0 decays nothing")
    if tokenizer != "bpe":
        unused["data.bpe_vocab"] = f"data.tokenizer={tokenizer} is not trained"
    if config.normalizer.keys.get("gamma") != "auto":
        unused["normalizer.alpha"] = "normalizer.gamma is given"
    if config.gate.keys.get("form") != "mlp":
        unused["gate.hidden"] = f"gate.form={config.gate.keys.get('form')} has no hidden layer"
    settings = {f"{key}={show(value)}" for key, value in by_key(config.nested()).items()}
    placement, sites = f"placement={config.placement.name}", norm_sites(config, settings)
    if not any(site.startswith("attn") for site in sites):
        unused["norm.alpha_attn"] = f"{placement} has no norm in attention"
    if not sites and config.norm_gain_sites == "blocks" and option_files("mixer")[config.mixer.name].plugin is None:
        unused["norm.gain_init"] = f"{placement} has no norm in its blocks"
    between = config.conv.name != "none" or config.gate.name != "none" or config.attention.name not in PLAIN_QUERIES
    if config.position.name in ROTATES_NOTHING and not between:
        unused["qk_norm.after_rotation"] = f"position={config.position.name} rotates nothing"
    return unused


def norm_sites(config: RunConfig, settings: set[str]) -> set[str]:
    """The sites of the placement's norms under these settings (`key=value`)."""
    sites = option_files("placement")[config.placement.name].norm_sites
    return {site for site, needs in sites.items() if not needs or needs in settings}


def _set(config: RunConfig, name: str, value: Any) -> None:
    """Set a key of an option. Another configuration may share the former option."""
    group, _, key = name.partition(".")
    option = getattr(config, group)
    setattr(config, group, Option(option.name, option.keys | {key: value}))


def _period(value: Any) -> Any:
    """The shortest list that repeats to the same values by layer; its value if it has one. Any other value as it is."""
    if not isinstance(value, list):
        return value
    periods = (value[:n] for n in range(1, len(value) + 1) if len(value) % n == 0)
    shortest = next(period for period in periods if period * (len(value) // len(period)) == value)
    return shortest if len(shortest) > 1 else shortest[0]
