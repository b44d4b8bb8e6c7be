"""The architecture of a configuration as plain data: equations, norms, parameters, initial values, FLOPs, kernels.

Everything comes from the model on the meta device, the option files and the resolved configuration.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nexus_ablate.attention_core import AttentionCore
from nexus_ablate.axes.attention import ATTENTION
from nexus_ablate.axes.ffn import FFN
from nexus_ablate.axes.gate import GATE
from nexus_ablate.axes.head import HEAD
from nexus_ablate.axes.init import INIT, drawn_weights, first_std, layer_of
from nexus_ablate.axes.mixer import MIXER
from nexus_ablate.axes.modules import parameter_roles
from nexus_ablate.axes.norm import NORM
from nexus_ablate.axes.normalizer import NORMALIZER
from nexus_ablate.axes.placement import PLACEMENT
from nexus_ablate.axes.position import POSITION
from nexus_ablate.axes.qk_norm import QK_NORM
from nexus_ablate.config.compose import differences
from nexus_ablate.config.options import AXES, IN_OTHER_LAYERS, Option, OptionFile, at_layer, option_files
from nexus_ablate.config.rules import READ_BY_MIXERS
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.measure.counts import flops_by_module, parameters
from nexus_ablate.measure.probe import hooks
from nexus_ablate.model import GPT
from nexus_ablate.optimizers import parameters_of
from nexus_ablate.runs import arm_name

Facts = dict[str, Any]


def architecture(config: RunConfig, model: GPT, decay_groups: dict[str, list[str]]) -> Facts:
    """Describe the model of a configuration.

    Args:
        model: The configuration's model on the meta device.
        decay_groups: Names of the parameters that are `decayed` and `free`, from the optimizer.
    """
    size, resolved = config.model, config.resolved
    component, roles = component_of(config, model), parameter_roles(model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    everything, without_embeddings = parameters(model)
    norms, spent = traced(model, size.context, config.train.batch_size)
    tokens = config.train.batch_size * size.context
    decay: Facts = {"weight_decay": config.weight_decay, "which": config.schedule.decay}
    for group, names in decay_groups.items():
        decay[group] = totals({name: sizes[name] for name in names}, roles.__getitem__)
    return {
        "arm": arm_name(differences(config)),
        "size": {**dataclasses.asdict(size), "head_dim": resolved.head_dim},
        "vocab_size": model.geometry.vocab_size,
        "equations": equations(config, model),
        "norms": norms,
        "parameters": {
            "total": everything,
            "without_embeddings": without_embeddings,
            "by_component": totals(sizes, component),
        },
        "init": resolved.init.name,
        "tensors": tensors(config, model),
        "decay": decay,
        "ffn": {"d_ff": resolved.d_ff, "d_ff_ratio": resolved.d_ff_ratio, "multiple_of": size.d_ff_multiple},
        "flops_per_token": {
            "training": 3 * sum(spent.values()) / tokens,
            "forward": {name: flops / tokens for name, flops in totals(spent, component).items()},
        },
        "kernels": kernels(model),
        "auto": automatic(config, model),
        "notes": resolved.notes,
        "equivalent": equivalent(config),
    }


def chosen_options(config: RunConfig) -> dict[str, tuple[Option, OptionFile]]:
    """The option of each axis, with `auto` and prescribed values resolved."""
    options = config.options()
    return {axis: (options[axis], option_files(axis)[options[axis].name]) for axis in AXES}


def equations(config: RunConfig, model: GPT) -> list[Facts]:
    """From the tokens to the logits: x is the residual stream, A attention, F the FFN, N the norm."""
    resolved, scale = config.resolved, config.resolved.embed_scale
    is_narrow = resolved.d_embed != config.model.d_model
    factors = {"off": "", "sqrt_d": "sqrt(d_model) ", "learned": "s "}
    factor = factors[scale] if isinstance(scale, str) else f"{scale:g} "
    learned = ", s learned, initially sqrt(d_model)" if factor == "s " else ""
    logit_factor = "" if config.logit_scale == "off" else f"{config.logit_scale:g}"
    first = _those(
        (f"x = {factor}E[token]{learned}", True),
        ("x <- W x, from d_embed to d_model", is_narrow),
        ("x <- N(x), positions included", config.embed_norm),
        ("a learned token without a position comes before the text", config.sink_token),
    )
    head, normed = "E" if config.tie_embeddings else "W", ", normed" if resolved.final_norm else ""
    last = _those(
        (f"logits = {head} h, h the output of the last block{normed}", True),
        ("h <- W h first, from d_model to d_embed", is_narrow),
        (f"logits <- {logit_factor} logits", logit_factor),
        ("logits <- logits + b", config.head_bias),
        ("logits <- c tanh(logits / c)", config.final_softcap != "off"),
    )
    attention = {"n_kv_heads": resolved.n_kv_heads, "attn_scale": attn_scale(model)}
    attention |= {key: getattr(resolved, key) for key in ("qkv_bias", "attn_out_bias")}
    attention |= {key: getattr(config, key) for key in ("attn_softcap", "window", "kv_bias", "clip_qkv")}
    switches = {
        "norm": {"norm_bias": resolved.norm_bias, "norm_gain_sites": config.norm_gain_sites},
        "placement": {"final_norm": resolved.final_norm},
        "position": {"nope_every": resolved.nope_every},
        "attention": attention,
        "ffn": {"d_ff": resolved.d_ff, "ffn_bias": resolved.ffn_bias},
    }
    entry = {"embed_scale": scale, "embed_norm": config.embed_norm, "d_embed": resolved.d_embed}
    parts: list[Facts] = [{"of": "embedding", "lines": first, "keys": entry}]
    for axis, (option, file) in chosen_options(config).items():
        if axis in READ_BY_MIXERS and not config.layers_reading(axis):
            continue
        lines, keys = file.equation or [file.summary], option.keys | switches.get(axis, {})
        if keys.get("layers") == "all":
            del keys["layers"]
        elif "layers" in keys:
            lines = [*lines, f"the other layers have {axis}={IN_OTHER_LAYERS[axis]}"]
        parts.append({"of": f"{axis}={option.name}", "lines": lines, "keys": keys})
    ends = ("tie_embeddings", "head_bias", "logit_scale", "final_softcap", "z_loss")
    return [*parts, {"of": "head", "lines": last, "keys": {key: getattr(config, key) for key in ends}}]


def _those(*lines: tuple[str, Any]) -> list[str]:
    """The lines beside which something true stands."""
    return [line for line, holds in lines if holds]


def component_of(config: RunConfig, model: GPT) -> Callable[[str], str]:
    """A function that returns the component of a parameter or module, by its full name."""
    chosen = chosen_options(config)
    registries = (NORM, PLACEMENT, POSITION, NORMALIZER, QK_NORM, GATE, FFN, HEAD)
    kinds: dict[Any, str] = {registry.get(chosen[registry.axis][0].name): registry.axis for registry in registries}
    kinds |= {AttentionCore: "scores", ATTENTION.get(config.attention.name): "scores"}
    kinds |= {MIXER.get(at_layer("mixer", config.mixer, n).name): "attention" for n in range(config.model.n_layers)}
    kinds |= {FFN.get(at_layer("ffn", config.ffn, n).name): "ffn" for n in range(config.model.n_layers)}
    modules = dict(model.named_modules())

    def component(name: str) -> str:
        component, at = name.partition(".")[0] or "head", ""  # the model's own products are those of the head
        for piece in name.split("."):
            at = f"{at}.{piece}".lstrip(".")
            component = kinds.get(type(modules.get(at)), component)
            if component not in ("blocks", "placement", "attention", "scores", "ffn"):  # these hold parts of other axes
                break
        return component

    return component


def traced(model: GPT, context: int, rows: int) -> tuple[list[Facts], dict[str, int]]:
    """The sites of norms (the module's name in its block, the width, and the blocks), and the FLOPs by module."""
    widths: dict[str, int] = {}
    norms = tuple(NORM.get(name) for name in NORM.names())

    def watch(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        widths[name] = inputs[0].shape[-1]

    with hooks() as handles:
        for name, module in model.named_modules():
            if type(module) in norms:
                handles.append(module.register_forward_pre_hook(partial(watch, name)))
        spent = flops_by_module(model, context, rows)
    sites = []
    for name, width in widths.items():
        layer = layer_of(name)
        site = name if layer is None else name.split(".", 2)[2]
        sites.append((layer, {"site": site, "width": width, "blocks": []}))
    return merged(sites, "blocks"), spent


def merged(rows: Iterable[tuple[int | None, Facts]], blocks: str) -> list[Facts]:
    """Rows that differ in nothing but their block as one row.

    Args:
        rows: Each with its block; None: outside the blocks.
        blocks: The key of the row's list of blocks, which is empty before.
    """
    found: dict[str, Facts] = {}
    for layer, row in rows:
        found.setdefault(repr(row), row)[blocks] += [] if layer is None else [layer]
    return list(found.values())


def totals(counts: dict[str, int], group: Callable[[str], str]) -> dict[str, int]:
    """The sum of the counts of each group of names, the largest first, without zeros."""
    sums: Counter[str] = Counter()
    for name, count in counts.items():
        sums[group(name)] += count
    return {name: count for name, count in sums.most_common() if count}


def tensors(config: RunConfig, model: GPT) -> list[Facts]:
    """Initial standard deviation, peak learning rate and decay per step at the peak of every tensor.

    Tensors that differ in nothing but their block are one row, `blocks.*.attn.query.weight`. `std` is None where a
    module sets the values, and `eps` where the optimizer is not AdamW.
    """
    init, weights = INIT.build(config.resolved.init, model.geometry), drawn_weights(model)
    keys = config.optim.keys
    rows = []
    for p in parameters_of(model, config.optim, config.weight_decay):
        layer, lr = layer_of(p.name), config.schedule.lr * p.lr_factor
        drawn = weights.get(p.name)
        row = {
            "tensor": p.name if layer is None else p.name.replace(f"blocks.{layer}.", "blocks.*.", 1),
            "role": p.role,
            "blocks": [],
            "shape": list(p.tensor.shape),
            "std": None if drawn is None else first_std(drawn, init, model.init_gains, model.param),
            "lr": lr,
            "decay": lr * p.weight_decay,
            "eps": keys.get("eps", 0.0) * p.eps_factor if keys.get("beta2") else None,
        }
        rows.append((layer, row))
    return merged(rows, "blocks")


def kernels(model: GPT) -> list[Facts]:
    """How each layer computes attention and why, and the kernel on a GPU."""
    geometry, rows = model.geometry, []
    shape = (1, geometry.n_heads, geometry.context, geometry.head_dim)
    query_BHTd = torch.empty(shape, device=model.embedding.weight.device)
    for core in model.modules():
        if isinstance(core, AttentionCore):
            position = model.position_at(core.layer)
            bias = position.query_bias(query_BHTd, core.layer, core.scale)
            bias = position.score_bias(geometry.context, core.layer) if bias is None else bias
            kernel, why = core.kernel
            gpu = core.gpu_kernel(geometry.context, bias)
            rows.append((core.layer, {"layers": [], "kernel": kernel, "reason": why, "gpu": gpu}))
    return merged(rows, "layers")


def automatic(config: RunConfig, model: GPT) -> list[Facts]:
    """Every architecture key that is `auto`: its value here, and the option or rule that determines it."""
    resolved, switches = config.resolved, dataclasses.fields(config)
    settings = [(f.name, getattr(config, f.name), f.metadata["meaning"]) for f in switches if "meaning" in f.metadata]
    settings += [("model.head_dim", config.model.head_dim, "auto: d_model / n_heads"), ("init", config.init.name, "")]
    settings += [(name, "auto", "") for name in resolved.prescribed]
    for axis, (option, file) in chosen_options(config).items():
        settings += [(f"{axis}.{key}", value, file.keys[key].meaning) for key, value in option.keys.items()]
    known = vars(resolved) | {"model.head_dim": resolved.head_dim, "init": resolved.init.name}
    known |= {"qk_norm": resolved.qk_norm.name, "attn_scale": attn_scale(model)}
    rules = {key: meaning.partition("auto: ")[2] for key, value, meaning in settings if value == "auto"}
    return [
        {"key": key, "means": known.get(key), "by": resolved.prescribed.get(key) or rule or "no option prescribes it"}
        for key, rule in rules.items()
    ]


def attn_scale(model: GPT) -> float | None:
    """The factor on the scores, the same in all layers; None if the mixer has no scores."""
    return next((module.scale for module in model.modules() if isinstance(module, AttentionCore)), None)


def equivalent(config: RunConfig) -> list[dict[str, str]]:
    """The options that are declared equal to a chosen one as functions, and when."""
    pairs = []
    for axis, (option, file) in chosen_options(config).items():
        name = f"{axis}={option.name}"
        others = {f"{axis}={o.name}": o.equals[name] for o in option_files(axis).values() if name in o.equals}
        pairs += [{"option": name, "same_as": other, "when": when} for other, when in (file.equals | others).items()]
    return pairs
