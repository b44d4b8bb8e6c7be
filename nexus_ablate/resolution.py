"""What every `auto` comes to mean: what the chosen options prescribe, and the numbers that follow from the sizes."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nexus_ablate.errors import ConfigError, unknown
from nexus_ablate.registry import AXES, Option, check_option, option_files
from nexus_ablate.schema import ratio, show

if TYPE_CHECKING:
    from nexus_ablate.config import RunConfig

MEANT = (
    "norm_bias",
    "final_norm",
    "embed_scale",
    "d_ff_ratio",
    "qkv_bias",
    "attn_out_bias",
    "ffn_bias",
    "n_kv_heads",
)
"""The keys whose `auto` has a meaning in `resolved`."""

PRESCRIBABLE = ("norm_bias", "final_norm", "embed_scale", "d_ff_ratio", "init", "qk_norm")
"""The keys whose `auto` an option may give a meaning (`qk_norm`, which has no `auto`: a placement in place of none).

With `init` come the keys of that init, as in `{init: gpt2, init.branch_scale: off}`."""

STARTS_AS = {"learned": "sqrt_d"}
"""A value of `embed_scale` that starts as another one: where options prescribe both, it satisfies both."""


@dataclass
class Resolved:
    """What every `auto` came to mean, and the numbers that follow from the configuration."""

    norm_bias: bool
    final_norm: bool
    embed_scale: str
    init: Option
    qk_norm: Option
    qkv_bias: bool
    attn_out_bias: bool
    ffn_bias: bool
    n_kv_heads: int
    windows: list[int]
    head_dim: int
    d_ff: int
    d_ff_ratio: float
    steps: int | None
    tokens_per_step: int
    notes: list[str] = field(default_factory=list)
    prescribed: dict[str, str] = field(default_factory=dict)
    """The option that gave an `auto` its meaning, by key."""

    def flat(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "init": self.init.flat(), "qk_norm": self.qk_norm.flat()}


def resolve(config: RunConfig) -> Resolved:
    """The meaning of every `auto`, from what the chosen options prescribe.

    Raises:
        ConfigError: Two options prescribe different things, or an option refuses a value that was asked for.
    """
    chosen = {axis: option_files(axis)[getattr(config, axis).name] for axis in AXES}
    notes: list[str] = []
    prescribed: dict[str, str] = {}
    for axis, option in chosen.items():
        for name in {key for key in option.prescribes if not key.startswith("init.")} - {*PRESCRIBABLE}:
            raise unknown(f"{axis}={option.name} prescribes a key that nothing asks it for", name, PRESCRIBABLE)

    def meaning(name: str, asked: Any, fallback: Any = None) -> Any:
        if asked != "auto":
            return asked
        wishes = {f"{a}={o.name}": o.prescribes[name] for a, o in chosen.items() if name in o.prescribes and a != name}
        met = {STARTS_AS.get(value) for value in wishes.values()}
        wishes = {who: value for who, value in wishes.items() if value not in met}
        if len(set(map(str, wishes.values()))) > 1:
            got = ", ".join(f"{who} wants {show(what)}" for who, what in wishes.items())
            raise ConfigError(f"{name}=auto has two meanings here", got, f"set {name} yourself")
        if not wishes:
            return fallback
        who, what = next(iter(wishes.items()))
        prescribed[name] = who
        if fallback not in (None, what):
            notes.append(f"{who} also changes {name} to {show(what)}")
        return what

    init_name = meaning("init", config.init.name, option_files("init")["auto"].prescribes["init"])
    init = config.init
    if init.name == "auto":
        who = prescribed.get("init", "")
        wishes = next((o.prescribes for a, o in chosen.items() if f"{a}={o.name}" == who), {})
        keys = {key: value for key, value in wishes.items() if key.startswith("init.")}
        values = {key.removeprefix("init."): value for key, value in keys.items()}
        init = check_option("init", default_option("init", init_name).flat() | values)
        notes += [f"{who} also changes {key} to {show(value)}" for key, value in keys.items()]
    model, train = config.model, config.train
    qk_norm = config.qk_norm
    if "qk_norm" in chosen["placement"].prescribes and qk_norm.name == "none":  # the placement norms q, k and v itself
        qk_norm = default_option("qk_norm", chosen["placement"].prescribes["qk_norm"])
        prescribed["qk_norm"] = f"placement={chosen['placement'].name}"
        notes.append(f"placement={chosen['placement'].name} also changes qk_norm to {qk_norm.name}")
    pattern = [0] if config.window == "off" else config.window if isinstance(config.window, list) else [config.window]
    d_ff_ratio = ratio(meaning("d_ff_ratio", config.d_ff_ratio) or 4)
    d_ff = max(1, round(d_ff_ratio * model.d_model / model.d_ff_multiple)) * model.d_ff_multiple
    tokens_per_step = train.batch_size * train.grad_accum * model.context
    steps = train.steps if train.tokens == "auto" else -(-train.tokens // tokens_per_step)
    resolved = Resolved(
        norm_bias=meaning("norm_bias", config.norm_bias) in (True, "on"),
        final_norm=meaning("final_norm", config.final_norm) in (True, "on"),
        embed_scale=meaning("embed_scale", config.embed_scale, "off"),
        init=init,
        qk_norm=qk_norm,
        qkv_bias=config.bias if config.qkv_bias == "auto" else config.qkv_bias == "on",
        attn_out_bias=config.bias if config.attn_out_bias == "auto" else config.attn_out_bias == "on",
        ffn_bias=config.bias if config.ffn_bias == "auto" else config.ffn_bias == "on",
        n_kv_heads=model.n_heads if config.n_kv_heads == "auto" else config.n_kv_heads,
        windows=[pattern[layer % len(pattern)] for layer in range(model.n_layers)],
        head_dim=model.d_model // model.n_heads if model.head_dim == "auto" else model.head_dim,
        d_ff=d_ff,
        d_ff_ratio=d_ff / model.d_model,
        steps=steps if train.flops == "auto" else None,
        tokens_per_step=tokens_per_step,
        notes=notes,
        prescribed=prescribed,
    )
    if config.position.keys.get("every", 0) > model.n_layers:
        got = f"{model.n_layers} layers and position.every={config.position.keys['every']}"
        notes.append(f"position={config.position.name} leaves no layer without positions: {got}")
    settings = {f"{axis}={option.name}" for axis, option in chosen.items()} | {f"init={init_name}"}
    settings |= {f"{name}={show(getattr(resolved, name))}" for name in MEANT}
    options = {axis: getattr(config, axis) for axis in AXES} | {"init": resolved.init}
    settings |= {f"{axis}.{k}={show(v)}" for axis, option in options.items() for k, v in option.keys.items()}
    settings |= {f"{name}={show(value)}" for name, value in vars(config).items() if not isinstance(value, Option)}
    in_blocks = {site for site, needs in chosen["placement"].norm_sites.items() if {needs} <= settings | {""}}
    sites = gain_sites(config, in_blocks, {"final"} if resolved.final_norm else set())
    settings |= {f"norm.gain_init@{site}={show(config.norm.keys.get('gain_init'))}" for site in sites}
    for axis, option in chosen.items():
        me = f"{axis}={option.name}"
        for rule, reason in option.refuses.items():
            if set(rule.split()) <= settings:
                raise ConfigError(f"{me} and {_spelled(rule)} contradict each other", fix=reason)
        broken = sorted(rule for rule in option.warns if set(rule.split()) <= settings)
        notes += [f"{me}{'' if rule == me else f' with {_spelled(rule)}'}: {option.warns[rule]}" for rule in broken]
    return resolved


def _spelled(rule: str) -> str:
    """A rule in the words that a user types: `norm.gain_init@ffn=0` is `norm.gain_init=0 at ffn`."""
    return " and ".join(re.sub(r"@(\w+)=(\S+)", r"=\2 at \1", setting) for setting in rule.split())


def gain_sites(config: RunConfig, in_blocks: set[str], outside: set[str]) -> set[str]:
    """The sites whose norms start at `norm.gain_init`.

    Args:
        in_blocks: Sites at which the placement has norms.
        outside: And the final norm's, if there is one.

    Raises:
        ConfigError: A list of sites that would change nothing, or names a site without a norm.
    """
    requested, gain = config.norm_gain_sites, config.norm.keys.get("gain_init", 1.0)
    if requested == "blocks":
        return in_blocks
    if gain == 1 or not requested:
        got = f"norm_gain_sites={show(requested)} with norm={config.norm.name}, norm.gain_init={show(gain)}"
        raise ConfigError("norm_gain_sites would change nothing", got, "norm.gain_init=0 norm_gain_sites=[ffn]")
    for site in requested:
        if site not in in_blocks | outside:
            what = f"placement={config.placement.name} has no norm at this site"
            raise unknown(what, site, sorted(in_blocks) + sorted(outside))
    return set(requested)


def default_option(group: str, name: str) -> Option:
    """An option with the values of its YAML."""
    return Option(name, {k: spec.default for k, spec in option_files(group)[name].keys.items()})
