"""`nexus-ablate explain KEY=VALUE ...`: the architecture of a configuration. Nothing is trained, no data are read."""

from __future__ import annotations

import gc
import json
import math
from typing import Any

from nexus_ablate.cli.flags import JSON, Flags
from nexus_ablate.cli.verb import Verb
from nexus_ablate.config.compose import compose
from nexus_ablate.config.grammar import show
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.console import compact
from nexus_ablate.errors import OK
from nexus_ablate.training import signals

Facts = dict[str, Any]
Rows = list[tuple[str, ...]]

VERB = Verb(
    "explain",
    "the architecture of a configuration: equations, sizes, FLOPs",
    "[KEY=VALUE ...]",
    (
        ("explain", "the baseline"),
        ("explain norm=dyt placement=deepnorm", "including what these options also change"),
        ("explain preset=gpt2 model=base vocab_size=50257", ""),
    ),
    (JSON,),
    "Prints the shape, the regime, the equations and the parameters. Trains nothing, and the data need not exist. "
    "`--json` also has kernels, each tensor's start and rates, and equal options.",
    kind="runs",
)


def run(overrides: list[str], flags: Flags) -> int:
    """Print the architecture of a configuration."""
    gc.disable()  # a quarter of the time: each collection goes through all that torch has imported
    try:
        facts = facts_of(overrides)
        if "json" in flags:
            print(json.dumps(facts, indent=1, allow_nan=False))
        else:
            describe(facts)
        return OK
    finally:
        if not signals.ends_with_this_command:
            gc.enable()


def facts_of(overrides: list[str]) -> Facts:
    """What `--json` prints. Without `vocab_size` the tokens are those of the data, or 256 where only a text could tell.

    Raises:
        ConfigError: The configuration cannot be run.
    """
    config = compose(overrides)

    from nexus_ablate.launch.cost import vocabulary
    from nexus_ablate.measure.architecture import architecture
    from nexus_ablate.model import countable_model
    from nexus_ablate.optimizers import decay_groups

    vocab_size = 256 if config.data.keys.get("tokenizer") in ("bytes", "char") else vocabulary(config)
    model = countable_model(config, vocab_size or 256)
    facts = architecture(config, model, decay_groups(model, config.schedule.decay, config.schedule.groups))
    facts["regime"] = _regime(config, facts["parameters"]["without_embeddings"])
    facts["execution"] = _execution(config, facts["parameters"]["total"], facts["vocab_size"])
    return facts


def _regime(config: RunConfig, params: int) -> Facts:
    """What the budget lets a run show; of a budget in FLOPs the steps depend on the vocabulary of the data."""
    from nexus_ablate.data import repeated_text, repeats
    from nexus_ablate.launch.cost import cost_of, text_tokens
    from nexus_ablate.measure.regime import regime_of

    steps = config.resolved.steps
    if steps is None:
        steps = cost_of(config).steps
    regime = regime_of(config, params, steps, text_tokens(config))
    copies = repeats.warnings(repeated_text(config.data, config.model.context))
    return {
        "tokens_per_parameter": regime.tokens / regime.params,
        "epochs": regime.epochs,
        "steps": regime.steps,
        "decay_timescale_steps": regime.decay_steps if math.isfinite(regime.decay_steps) else None,
        "summary": str(regime),
        "warnings": copies + regime.warnings(),
    }


def _execution(config: RunConfig, parameters: int, vocab_size: int) -> dict[str, str]:
    """How a training step would be executed on this machine, and why."""
    from nexus_ablate.config.resolve import precision_on
    from nexus_ablate.gpus import described_gpus, on_gpu
    from nexus_ablate.training.choices import choices
    from nexus_ablate.training.device import Hardware
    from nexus_ablate.training.step import steps_of

    hardware = Hardware(config.train.device.replace("auto", "cpu"))
    if on_gpu(config.train.device):
        hardware = Hardware("cuda")
        for gpu in described_gpus()[:1]:
            hardware = Hardware("cuda", gpu.name, gpu.memory)
    chosen = choices(config, parameters, vocab_size, steps_of(config, vocab_size), hardware)
    precision = f"{chosen.why['precision']}; train.precision=auto is {precision_on(config.train.device)} here"
    return {"device": hardware.name or hardware.kind, **chosen.why, "precision": precision}


def describe(facts: Facts) -> None:
    """Print one screen: the shape, the regime, the equations in force and the size."""
    size, ffn, regime, parameters = facts["size"], facts["ffn"], facts["regime"], facts["parameters"]
    shape = f"{size['n_layers']} blocks, d_model {size['d_model']}, {size['n_heads']} heads of {size['head_dim']}"
    width = f"d_ff {ffn['d_ff']} = {ffn['d_ff_ratio']:.4g} d_model"
    text = f"{size['name']}: {shape}, {width}, context {size['context']}, vocabulary {facts['vocab_size']:,}"
    rows: Rows = [("model", text)]
    rows += [("note", note) for note in facts["notes"]]
    rows.append(("regime", regime["summary"]))
    rows += [("warning", warning) for warning in regime["warnings"]]
    _print(facts["arm"].replace(",", ", "), rows)

    parts = [part for part in facts["equations"] if not part["of"].endswith("=none")]
    _print("equations: x is the residual stream, A attention, F the FFN, N the norm", _equations(parts))

    total = f"{parameters['total']:,} parameters ({parameters['without_embeddings']:,} without embeddings)"
    training = compact(facts["flops_per_token"])
    costs = f"{total}; FLOPs per token: {training} in training, a third in the forward pass"
    _print(costs, [("--json", "also kernels, each tensor's start and rates, equal options")])


def _print(title: str, rows: Rows) -> None:
    """Print rows under a title; nothing where there are none."""
    from rich.text import Text

    from nexus_ablate.console import folded, open_console

    if rows:
        console = open_console()
        console.print("", Text(title, "bold"), folded(rows, names="dim"), sep="\n")


def _equations(parts: list[Facts]) -> Rows:
    """The lines of each part, then its keys without those that are off."""
    rows: Rows = []
    for part in parts:
        keys = [f"{key}={_short(value)}" for key, value in part["keys"].items() if value not in (False, "off")]
        name = part["of"]
        for line in filter(None, (*part["lines"], " ".join(keys))):
            rows.append((name, line))
            name = ""
    return rows


def _short(value: Any) -> str:
    """A value to six digits."""
    return f"{value:.6g}" if isinstance(value, float) else show(value)
