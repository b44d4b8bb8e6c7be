"""`nexus-ablate explain KEY=VALUE ...`: the architecture of a configuration. Nothing is trained, no data are read."""

from __future__ import annotations

import gc
import json
import math
import sys
from typing import Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import Flag, Verb, whole
from nexus_ablate.config.compose import compose
from nexus_ablate.config.grammar import show
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import printable
from nexus_ablate.training import signals

VERB = Verb(
    "explain",
    "the architecture of a configuration: equations, sizes, FLOPs",
    "[KEY=VALUE ...]",
    (
        ("explain", "the baseline"),
        ("explain norm=dyt placement=deepnorm", "including what these options also change"),
        ("explain preset=gpt2 model=base --vocab 50257", ""),
    ),
    (
        Flag("--vocab", "N", "tokens in the vocabulary (256)", whole("--vocab", 50257, "of tokens")),
        Flag("--json", "", "for programs"),
    ),
    "Prints equations, norms, parameters, initial values, decay, FLOPs and the attention kernel. Trains nothing, and "
    "the data need not exist.",
    kind="runs",
)


def run(overrides: list[str], flags: dict[str, Any]) -> int:
    """Print the architecture of a configuration."""
    gc.disable()  # a quarter of the time: each collection goes through all that torch has imported
    try:
        return _explain(overrides, flags)
    finally:
        if not signals.ends_with_this_command:
            gc.enable()


def _explain(overrides: list[str], flags: dict[str, Any]) -> int:
    config = compose(overrides)

    from nexus_ablate.measure.architecture import architecture
    from nexus_ablate.model import countable_model
    from nexus_ablate.optimizers import decay_groups

    model = countable_model(config, flags.get("vocab", 256))
    facts = architecture(config, model, decay_groups(model, config.schedule.decay, config.schedule.groups))
    facts["regime"] = _regime(config, facts["parameters"]["total"])
    facts["execution"] = execution(config, facts["parameters"]["total"], facts["vocab_size"])
    if "json" in flags:
        json.dump(facts, sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        _print(facts)
    return errors.OK


def _regime(config: RunConfig, params: int) -> dict[str, Any]:
    """What the budget lets a run show; of a budget in FLOPs the steps depend on the vocabulary of the data."""
    from nexus_ablate.measure.regime import regime_of
    from nexus_ablate.planning.cost import cost_of, text_tokens

    steps = config.resolved.steps
    regime = regime_of(config, params, cost_of(config).steps if steps is None else steps, text_tokens(config))
    return {
        "tokens_per_parameter": regime.tokens / regime.params,
        "epochs": regime.epochs,
        "steps": regime.steps,
        "decay_timescale_steps": regime.decay_steps if math.isfinite(regime.decay_steps) else None,
        "summary": str(regime),
        "warnings": regime.warnings(),
    }


def execution(config: RunConfig, parameters: int, vocab_size: int) -> dict[str, str]:
    """How a training step would be executed on this machine, and why."""
    from nexus_ablate.config.resolve import precision_on
    from nexus_ablate.gpus import described_gpus, on_gpu
    from nexus_ablate.training.choices import choices
    from nexus_ablate.training.device import Hardware
    from nexus_ablate.training.step import steps_of

    kind = "cuda" if on_gpu(config.train.device) else config.train.device.replace("auto", "cpu")
    gpu = next(iter(described_gpus()), None) if kind == "cuda" else None
    hardware = Hardware(kind, gpu.name, gpu.memory) if gpu else Hardware(kind)
    chosen = choices(config, parameters, vocab_size, steps_of(config, vocab_size), hardware)
    precision = f"{chosen.why['precision']}; train.precision=auto is {precision_on(config.train.device)} here"
    return {"device": hardware.name or kind, **chosen.why, "precision": precision}


def _print(facts: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from nexus_ablate.console import open_console

    console = open_console()
    for title, rows in sections(facts).items():
        if not rows:
            continue
        console.print(f"\n[bold]{escape(title)}[/bold]")
        grid = Table.grid(padding=(0, 2))
        for column in range(max(map(len, rows))):
            grid.add_column(overflow="fold", no_wrap=column == 0, style="dim" if column == 0 else "")
        for row in rows:
            grid.add_row(*(escape(printable(cell)) for cell in row))
        console.print(grid)


def sections(facts: dict[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """Rows of cells by title, in reading order."""
    size, parameters, initial, decay = facts["size"], facts["parameters"], facts["initial_values"], facts["decay"]
    total, blocks = parameters["total"], size["n_layers"]
    forward = facts["flops_per_token"]["forward"]
    shape = f"{blocks} blocks, d_model {size['d_model']}, {size['n_heads']} heads of {size['head_dim']}"
    ffn = facts["ffn"]
    return {
        facts["arm"].replace(",", ", "): [
            ("model", f"{size['name']}: {shape}, context {size['context']}, vocabulary {facts['vocab_size']:,}"),
            ("d_ff", f"{ffn['d_ff']}, {ffn['d_ff_ratio']:.4g} d_model, a multiple of {ffn['multiple_of']}"),
            *(("note", note) for note in facts["notes"]),
            ("regime", facts["regime"]["summary"]),
            *(("warning", warning) for warning in facts["regime"]["warnings"]),
        ],
        "equations: x is the residual stream, A attention, F the FFN, N the norm": [
            row for part in facts["equations"] for row in _equation(part)
        ],
        "norms": [(n["site"], f"{n['width']} wide", _which(n["blocks"], blocks)) for n in facts["norms"]]
        or [("none",)],
        f"parameters: {total:,} ({parameters['without_embeddings']:,} without embeddings)": [
            (name, f"{count:>13,}", f"{count / total:6.1%}") for name, count in parameters["by_component"].items()
        ],
        _init_title(initial): [
            (role, _std(spec["std"]), f"gain {spec['gain']:.4g}" if spec["gain"] != 1 else "", _times(spec["tensors"]))
            for role, spec in initial["by_role"].items()
        ]
        + [("vector", "as set by its option", "", "")],
        "tensors at the start: learning rate and decay per step are those at the peak of the schedule": [
            (t["tensor"], *_rates(t), _which(t["blocks"], blocks) if t["blocks"] else "") for t in facts["tensors"]
        ],
        f"weight decay {decay['weight_decay']:g} on {decay['which'].replace('_', ' and ')}": [
            (word, ", ".join(f"{role} {count:,}" for role, count in decay[group].items()) or "nothing")
            for word, group in (("decays", "decayed"), ("free", "free"))
        ],
        f"FLOPs per token: {_flops(facts['flops_per_token']['training'])} in training, three times the forward pass": [
            (name, f"{_flops(flops):>9}", f"{flops / sum(forward.values()):6.1%}") for name, flops in forward.items()
        ],
        "attention kernel": [
            row
            for k in facts["kernels"]
            for row in ((k["kernel"], k["reason"], _which(k["layers"], blocks)), ("on a GPU", k["gpu"], ""))
        ],
        "execution on this machine": [*facts["execution"].items()],
        "auto": [(a["key"], "" if a["means"] is None else _short(a["means"]), a["by"]) for a in facts["auto"]],
        "the same function": [(e["option"], f"{e['same_as']}: {e['when']}") for e in facts["equivalent"]],
    }


def _equation(part: dict[str, Any]) -> list[tuple[str, str]]:
    keys = " ".join(f"{key}={_short(value)}" for key, value in part["keys"].items())
    lines = [*part["lines"], *([keys] if keys else [])]
    return [("" if number else part["of"], line) for number, line in enumerate(lines)]


def _short(value: Any) -> str:
    """A value to six digits."""
    return f"{value:.6g}" if isinstance(value, float) else show(value)


def _which(layers: list[int], n_layers: int) -> str:
    """Blocks in words, counted from 0."""
    if not layers:
        return "outside the blocks"
    if len(layers) == n_layers:
        return f"all {n_layers} blocks" if n_layers > 1 else "the block"
    if len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"blocks {layers[0]} to {layers[-1]}"
    return f"block{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"


def _init_title(initial: dict[str, Any]) -> str:
    cut = f", cut off at {initial['cut_off_at_std']:g} std" if initial["cut_off_at_std"] else ""
    return f"initial values: init={initial['init']}, normal{cut}"


def _rates(tensor: dict[str, Any]) -> tuple[str, str, str]:
    std = "set by its option" if tensor["std"] is None else f"std {tensor['std']:.4g}"
    return std, f"lr {tensor['lr']:.4g}", f"decay {tensor['decay']:.3g}" if tensor["decay"] else "no decay"


def _std(std: list[float]) -> str:
    low, high = (f"{value:.4g}" for value in std)
    return f"std {low}" if low == high else f"std {low} to {high}"


def _times(count: int) -> str:
    return f"{count} tensors" if count > 1 else "1 tensor"


def _flops(flops: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= size:
            return f"{flops / size:.4g} {unit}"
    return f"{flops:.4g}"
