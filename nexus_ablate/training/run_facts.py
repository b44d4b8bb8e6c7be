"""What a run says about itself before its first step, on the terminal and in log.txt."""

from __future__ import annotations

from nexus_ablate.console import several
from nexus_ablate.data import repeats
from nexus_ablate.measure.counts import parameters
from nexus_ablate.measure.regime import regime_of
from nexus_ablate.training.trainer import Trainer


def run_facts(trainer: Trainer, arm: str, decay: dict[str, list[str]], threads: int) -> dict[str, str]:
    """The table before the first step: arm, notes, model size, data, training budget, regime, device.

    Args:
        decay: From `decay_groups`.
    """
    config, data, world = trainer.config, trainer.data, trainer.world
    model, resolved, tokens = config.model, config.resolved, len(data.train)
    sizes = {name: parameter.numel() for name, parameter in trainer.model.named_parameters()}
    decayed, free = (sum(sizes[name] for name in decay[group]) for group in ("decayed", "free"))
    params, without_tables = parameters(trainer.model)
    regime = regime_of(config, without_tables, trainer.steps, tokens)
    warnings = repeats.warnings(data.repeated) + regime.warnings()
    several_devices = f"{world.size} x " if world.size > 1 else ""
    return {
        "arm": arm.replace(",", ", "),
        **({"note": "; ".join(resolved.notes)} if resolved.notes else {}),
        "model": f"{model.name}: {model.n_layers} layers, d_model {model.d_model}, "
        f"{model.n_heads} heads of {resolved.head_dim}, d_ff {resolved.d_ff} ({resolved.d_ff_ratio:.3g} d)",
        "parameters": f"{params:,} ({without_tables:,} without embeddings)",
        "data": f"{config.data.name}: {tokens:,} tokens, vocabulary {data.vocab_size:,}",
        "training": f"{trainer.steps:,} steps x {resolved.tokens_per_step:,} tokens, seed {config.seed}",
        "decay": f"{decayed:,} parameters at {config.weight_decay:g} ({config.schedule.decay}), {free:,} free",
        "regime": str(regime),
        **({"warning": "\n".join(warnings)} if warnings else {}),
        "device": f"{several_devices}{world.device}, {several(threads, 'thread')}",
        "execution": "; ".join(trainer.step.choices.why.values()),
    }
