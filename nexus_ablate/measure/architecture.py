"""The architecture of a configuration as plain data: equations, parameters, initial values, FLOPs, kernels.

Everything comes from the model on the meta device, the option files and the resolved configuration.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from nexus_ablate.attention_core import AttentionCore
from nexus_ablate.axes.init import INIT, drawn_weights, first_std, layer_of
from nexus_ablate.axes.modules import parameter_roles
from nexus_ablate.config.compose import differences
from nexus_ablate.config.options import AXES, IN_OTHER_LAYERS, Option, OptionFile, option_files
from nexus_ablate.config.rules import READ_BY_MIXERS
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.measure.counts import flops_of, parameters
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
    roles = parameter_roles(model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    everything, without_embeddings = parameters(model)
    decay: Facts = {"weight_decay": config.weight_decay, "which": config.schedule.decay}
    for group, names in decay_groups.items():
        decay[group] = totals({name: sizes[name] for name in names}, roles.__getitem__)
    return {
        "arm": arm_name(differences(config)),
        "size": {**dataclasses.asdict(size), "head_dim": resolved.head_dim},
        "vocab_size": model.geometry.vocab_size,
        "equations": equations(config, model),
        "parameters": {"total": everything, "without_embeddings": without_embeddings},
        "init": resolved.init.name,
        "tensors": tensors(config, model),
        "decay": decay,
        "ffn": {"d_ff": resolved.d_ff, "d_ff_ratio": resolved.d_ff_ratio, "multiple_of": size.d_ff_multiple},
        "flops_per_token": flops_of(model, config),
        "kernels": kernels(model),
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
