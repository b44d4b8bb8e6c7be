"""From values to a checked RunConfig, and the meaning of every `auto`."""

from __future__ import annotations

import dataclasses
from typing import Any

from nexus_ablate.config.grammar import ratio, show, times_auto
from nexus_ablate.config.options import (
    IN_OTHER_LAYERS,
    LATER,
    OPTIONS,
    OTHER_VERSION,
    Option,
    check_option,
    checked_keys,
    default_option,
    option_files,
)
from nexus_ablate.config.rules import apply_rules, check_rules, without_effect
from nexus_ablate.config.run_config import CLOSED_GROUPS, OPTION_GROUPS, ModelConfig, Resolved, RunConfig, keys_of
from nexus_ablate.config.spelling import one_spelling
from nexus_ablate.errors import ConfigError, unknown
from nexus_ablate.gpus import multiplies_bf16

TOKENS_PER_PARAMETER = 20
"""Of the budget `train.steps=auto`: compute-optimal for large models. Hoffmann et al. 2022, arXiv:2203.15556."""
RATE_TIMES_WIDTH = 0.384
"""The best peak rate of Adam's updates falls as 1 / d_model (docs/baseline.md): 1.2e-2 at 32, 3e-3 at 128."""

PRESCRIBABLE = ("norm_bias", "final_norm", "embed_scale", "d_ff_ratio", "nope_every", "init", "qk_norm")
"""The keys that an option may prescribe where they are `auto` (a placement may prescribe `qk_norm` where it is `none`).

An option that prescribes `init` may prescribe the keys of that init too: `{init: gpt2, init.branch_scale: off}`."""

STARTS_AS = {"learned": "sqrt_d"}
"""Values of `embed_scale` that start equal to another one. If options prescribe both, the first satisfies both."""


def from_values(values: dict[str, Any]) -> RunConfig:
    """A checked RunConfig from nested values, composed by Hydra or read from config.yaml.

    Raises:
        ConfigError: An unknown key or name, a value of the wrong type or range, or contradictory options.
    """
    parts: dict[str, Any] = {}
    scalars = keys_of(RunConfig)
    for name, value in values.items():
        if name in OPTION_GROUPS:
            parts[name] = check_option(name, _mapping(name, value))
        elif name in CLOSED_GROUPS:
            keys, no_key = keys_of(CLOSED_GROUPS[name]), "there is no key of this name"
            parts[name] = CLOSED_GROUPS[name](**checked_keys(name, name, _mapping(name, value), keys, no_key))
        elif name in scalars:
            parts[name] = scalars[name].accept(name, value)
        else:
            raise unknown("there is no key of this name", name, [*scalars, *CLOSED_GROUPS, *OPTION_GROUPS])
    for name, meant in LATER.items():
        if name not in parts and "name" in meant:
            parts[name] = default_option(name, meant["name"])
    missing = {f.name for f in dataclasses.fields(RunConfig) if f.init} - parts.keys()
    if missing:
        raise ConfigError("the configuration is incomplete", f"no {', '.join(sorted(missing))}", OTHER_VERSION)
    return checked(RunConfig(**parts))


def checked(config: RunConfig) -> RunConfig:
    """The configuration in one spelling, with `resolved`, and without the `auto` of `train.precision` and `optim.lr`.

    So config.yaml, identity and every other machine that reads the configuration have precision and rate themselves.

    Raises:
        ConfigError: A rule between two keys is broken, or options contradict each other.
    """
    if config.train.precision == "auto":
        config.train = dataclasses.replace(config.train, precision=precision_on(config.train.device))
    if isinstance(lr := config.optim.keys["lr"], str):
        rate = float(f"{times_auto(lr) * default_rate(config):.6g}")
        config.optim = Option(config.optim.name, config.optim.keys | {"lr": rate})
    check_rules(config)
    notes = one_spelling(config)
    config.resolved = resolve(config)
    config.resolved.notes += notes
    return config


def precision_on(device: str) -> str:
    """The meaning of `train.precision=auto` for a `train.device` on this machine."""
    return "bf16" if multiplies_bf16(device) else "fp32"


def default_rate(config: RunConfig) -> float:
    """The meaning of `optim.lr=auto`: by the width at which the rate applies, which is the base width under muP."""
    width = config.param.keys.get("base_width", config.model.d_model)
    return float(f"{RATE_TIMES_WIDTH / width:.3g}")


def default_tokens(model: ModelConfig) -> int:
    """The budget of `train.steps=auto`, in tokens: the same for every architecture of this size.

    The default block has 4 d^2 parameters in attention and 8 d^2 in its FFN.
    """
    return TOKENS_PER_PARAMETER * 12 * model.n_layers * model.d_model**2


def changed(config: RunConfig, **values: Any) -> RunConfig:
    """A copy with other values, checked and resolved again.

    Raises:
        ConfigError: As in `checked`.
    """
    return checked(dataclasses.replace(config, **values))


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is a group of keys", show(value), f"use {name}=OPTION or {name}.KEY=VALUE")
    return value


class Prescriptions:
    """The values that the chosen options prescribe for keys that are `auto`.

    Attributes:
        config: What the user chose.
        chosen: The option file of each axis.
        notes: Changes by prescriptions that the user didn't ask for.
        sources: The option that determined an `auto`, by key.

    Raises:
        ConfigError: An option prescribes a key that can't be prescribed.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.chosen = {axis: option_files(axis)[getattr(config, axis).name] for axis in OPTIONS}
        self.notes: list[str] = []
        self.sources: dict[str, str] = {}
        scalars = keys_of(RunConfig)
        for option in self.chosen.values():
            for name, value in option.prescribes.items():
                if name in ("init", "qk_norm") and value not in option_files(name):
                    problem = f"{option.override} prescribes an option of {name} that does not exist"
                    raise unknown(problem, str(value), option_files(name))
                if name == "qk_norm" and option.axis != "placement":
                    problem = f"{option.override} prescribes qk_norm, which only a placement can"
                    raise ConfigError(problem, f"prescribes: {{qk_norm: {value}}}", "refuses: {qk_norm=none: why}")
                if name in scalars:
                    scalars[name].accept(name, value)
                if name not in PRESCRIBABLE and not name.startswith("init."):
                    problem = f"{option.override} prescribes a key that options can't prescribe"
                    raise unknown(problem, name, PRESCRIBABLE)

    def meaning(self, name: str, fallback: Any = None) -> Any:
        """A key's value, or the meaning of `auto`.

        Raises:
            ConfigError: Two options prescribe different values.
        """
        value = getattr(self.config, name)
        return self._prescribed(name, fallback) if value == "auto" else value

    def _prescribed(self, name: str, fallback: Any) -> Any:
        """What the options prescribe for a key that is `auto`, or the fallback."""
        options = [option for option in self.chosen.values() if name in option.prescribes and option.axis != name]
        wishes = {option.override: option.prescribes[name] for option in options}
        satisfied = [STARTS_AS.get(wish) for wish in wishes.values() if isinstance(wish, str)]
        wishes = {source: wish for source, wish in wishes.items() if wish not in satisfied}
        if len(set(map(str, wishes.values()))) > 1:
            got = ", ".join(f"{source} wants {show(wish)}" for source, wish in wishes.items())
            raise ConfigError(f"{name}=auto has two meanings here", got, f"set {name} yourself")
        if not wishes:
            return fallback
        source, wish = next(iter(wishes.items()))
        self.sources[name] = source
        if fallback not in (None, wish):
            self.notes.append(f"{source} also changes {name} to {show(wish)}")
        return wish

    def init(self) -> Option:
        """The init, with the keys set by the option that prescribes it."""
        if self.config.init.name != "auto":
            return self.config.init
        name = self._prescribed("init", option_files("init")["auto"].prescribes["init"])
        values = default_option("init", name).flat()
        for source in self.chosen.values():
            if source.override != self.sources.get("init"):
                continue
            for key, value in source.prescribes.items():
                if key.startswith("init."):
                    self.notes.append(f"{source.override} also changes {key} to {show(value)}")
                    values[key.removeprefix("init.")] = value
        return check_option("init", values)

    def qk_norm(self) -> Option:
        """The norm of q and k. If it is `none`, a placement that norms q, k and v replaces it."""
        placement = self.chosen["placement"]
        name = placement.prescribes.get("qk_norm")
        if name is None or self.config.qk_norm.name != "none":
            return self.config.qk_norm
        self.sources["qk_norm"] = placement.override
        self.notes.append(f"{placement.override} also changes qk_norm to {name}")
        return default_option("qk_norm", name)


def resolve(config: RunConfig) -> Resolved:
    """The meaning of every `auto`, from the prescriptions of the chosen options.

    Raises:
        ConfigError: Two options prescribe different values, or an option refuses a requested value.
    """

    def on_or_off(bias: str) -> bool:
        return config.bias if bias == "auto" else bias == "on"

    def ffn_width(d_ff_ratio: object) -> int:
        multiple = config.model.d_ff_multiple
        return max(1, round(ratio(d_ff_ratio) * config.model.d_model / multiple)) * multiple

    prescriptions = Prescriptions(config)
    meaning = prescriptions.meaning
    init, qk_norm = prescriptions.init(), prescriptions.qk_norm()
    model, train = config.model, config.train
    pattern = config.window if isinstance(config.window, list) else [0 if config.window == "off" else config.window]
    d_ff = ffn_width(meaning("d_ff_ratio") or 4)
    layers, others = show(config.ffn.keys["layers"]), option_files("ffn")[IN_OTHER_LAYERS["ffn"]]
    published = ffn_width(others.prescribes["d_ff_ratio"])
    if layers != "all" and config.d_ff_ratio == "auto" and published != d_ff:
        note = f"the other layers, with {others.override}, have d_ff {d_ff} too, not their published {published}"
        prescriptions.notes.append(f"ffn.layers={layers}: {note}; d_ff_ratio sets that of all")
    tokens_per_step = train.batch_size * train.grad_accum * model.context
    tokens = default_tokens(model) if train.tokens == "auto" else train.tokens
    steps: int = -(-tokens // tokens_per_step)
    if train.tokens == "auto" and train.steps != "auto":
        steps = train.steps
    resolved = Resolved(
        norm_bias=meaning("norm_bias") in (True, "on"),
        final_norm=meaning("final_norm") in (True, "on"),
        embed_scale=meaning("embed_scale", "off"),
        d_embed=model.d_model if config.d_embed == "auto" else config.d_embed,
        nope_every=meaning("nope_every", "off"),
        init=init,
        qk_norm=with_eps(qk_norm, config.norm),
        qkv_bias=on_or_off(config.qkv_bias),
        attn_out_bias=on_or_off(config.attn_out_bias),
        ffn_bias=on_or_off(config.ffn_bias),
        n_kv_heads=model.n_heads if config.n_kv_heads == "auto" else config.n_kv_heads,
        windows=[pattern[layer % len(pattern)] for layer in range(model.n_layers)],
        head_dim=model.d_model // model.n_heads if model.head_dim == "auto" else model.head_dim,
        d_ff=d_ff,
        d_ff_ratio=d_ff / model.d_model,
        steps=steps if train.flops == "auto" else None,
        tokens_per_step=tokens_per_step,
        notes=prescriptions.notes,
        prescribed=prescriptions.sources,
    )
    resolved.notes += without_effect(config, resolved) + apply_rules(config, resolved, prescriptions.chosen)
    return resolved


def with_eps(qk_norm: Option, norm: Option) -> Option:
    """The option with `eps: auto` replaced by the block norm's eps, or 1e-6 if that norm has none."""
    if qk_norm.keys.get("eps") != "auto":
        return qk_norm
    return Option(qk_norm.name, qk_norm.keys | {"eps": norm.keys.get("eps", 1e-6)})
