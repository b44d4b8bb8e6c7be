"""Runs that cannot be trained: checks before the directory is made, and the error when memory has run out."""

from __future__ import annotations

from nexus_ablate.config.rules import check_vocabulary
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.errors import ConfigError
from nexus_ablate.training.distributed import Place, place
from nexus_ablate.training.start import initial_model


def check_start(config: RunConfig, vocab_size: int) -> None:
    """Check that a run can start, before its directory is made.

    Args:
        vocab_size: Number of tokens of the tokenizer.

    Raises:
        ConfigError: The embedding is too small for the tokenizer, the weights to start from don't fit the model, or
            `optim.groups` names a role that the model doesn't have.
    """
    check_groups(config)
    check_vocabulary(config, vocab_size)
    if "run" in config.init.keys:
        initial_model(config, vocab_size)


def check_groups(config: RunConfig) -> None:
    """Check that the model has parameters of every role in `optim.groups`.

    Raises:
        ConfigError: It lacks one.
    """
    if not config.schedule.groups:
        return
    from nexus_ablate.model import countable_model
    from nexus_ablate.optimizers import parameters_of

    parameters_of(countable_model(config), config.optim, config.weight_decay)


def check_world(config: RunConfig, place: Place) -> None:
    """Check that a run can be distributed over the processes.

    Raises:
        ConfigError: The batch size is not divisible by them, or the model computes statistics or a loss over the batch.
    """
    if place.size == 1:
        return
    if config.train.batch_size % place.size:
        fix = f"a batch size that is a multiple of {place.size}; adjust train.grad_accum to keep the tokens per step"
        got = f"{config.train.batch_size} sequences, {place.size} processes"
        raise ConfigError("train.batch_size must be divisible by the number of processes", got, fix)
    from nexus_ablate.model import countable_model

    model = countable_model(config)
    updated = {  # by sums over all processes
        f"{name}.{buffer}"
        for name, module in model.named_modules()
        for buffer, _ in module.named_buffers(recurse=False)
        if hasattr(module, "after_step")
    }
    if model.state_dict().keys() - dict(model.named_parameters()).keys() - updated:
        problem = f"norm={config.norm.name} computes statistics over the batch, and each process only sees a part of it"
        raise ConfigError(problem, f"{place.size} processes", "train it in one process, or with another norm")
    if any(getattr(module, "balance", 0) for module in model.modules()):
        problem = f"ffn={config.ffn.name} balances its experts over the batch, and each process only sees a part of it"
        raise ConfigError(problem, f"{place.size} processes", "train it in one process, or with ffn.balance=0")


def too_large(config: RunConfig) -> ConfigError:
    """The error for a run that has used up the memory, with the settings that take less."""
    train, layers, width = config.train, config.model.n_layers, config.model.d_model
    fix = "a smaller model"
    if not train.activation_checkpointing:
        fix = f"train.activation_checkpointing=on, or {fix}"
    processes = place().size
    smaller = [size for size in range(processes, train.batch_size, processes) if train.batch_size % size == 0]
    if smaller:
        more = train.grad_accum * train.batch_size // smaller[-1]
        without_graphs = " train.compile=on" if train.compile == "graphs" else ""
        fix = f"train.batch_size={smaller[-1]} train.grad_accum={more}{without_graphs}, or {fix}"
    got = f"train.batch_size={train.batch_size}, model.n_layers={layers}, model.d_model={width}"
    return ConfigError("this run does not fit in memory", got, fix)
