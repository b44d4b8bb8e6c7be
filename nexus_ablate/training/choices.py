"""What `auto` means for the execution of a training step on a device: compiled or not, logits whole or in chunks."""

from __future__ import annotations

from dataclasses import dataclass

from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.kernels.loss import chunks_losses
from nexus_ablate.measure.counts import peak_flops
from nexus_ablate.training.device import Hardware, compiles_on_cpu

COMPILE_SAVES = 0.4
"""Share of the arithmetic of an uncompiled step on a GPU that compiling saves: nanoGPT's README reports 250 ms before
and 135 after."""
COMPILE_SECONDS, COMPILE_SECONDS_PER_LAYER = 26.0, 0.7
"""Of a program that no earlier run has compiled. Measured on an H200 with 4 and 10 layers, as are the times below."""
LAUNCH_SECONDS_PER_LAYER, LAUNCH_SECONDS_COMPILED = 5.5e-3, 2.4e-3
"""Least time of a block's share of a step on a GPU, uncompiled and compiled: what its kernels take to launch."""
UTILIZATION, USUAL_PEAK = 0.4, 100e12
"""Share of the peak that an uncompiled step reaches, and the FLOPs per second of a GPU whose peak is unknown."""


@dataclass(frozen=True)
class Choices:
    """How the step of a run is executed.

    Attributes:
        compiled: Whether it is compiled.
        chunked: Whether the logits are computed in chunks.
        why: The reason of each choice by its key in `train`, as shown before the first step and by `explain`.
    """

    compiled: bool
    chunked: bool
    why: dict[str, str]


def choices(
    config: RunConfig, parameters: int, vocab_size: int, steps: int, hardware: Hardware, processes: int = 1
) -> Choices:
    """How the step of a run is executed on a device.

    Args:
        parameters: Their number.
        processes: Number of processes that share the batch.
    """
    train = config.train
    step_flops = 6 * parameters * config.resolved.tokens_per_step / processes
    compiled, compile_why = train.compile in ("on", "graphs"), f"train.compile={train.compile}"
    if train.compile == "auto":
        compiled, compile_why = compiling_pays(config, steps, step_flops, hardware)
    rows = train.batch_size // processes * config.model.context
    memory = hardware.memory if compiled else 0
    loss = "whole" if config.data.keys.get("score") == "answers" else train.loss  # chunks count every target
    chunked = chunks_losses(loss, rows, vocab_size, train.precision, memory)
    size = f"{rows * vocab_size * 4 / 2**20:,.0f} MiB in float32"
    return Choices(
        compiled,
        chunked,
        {
            "precision": f"{train.precision} products" + (", float32 ones without TF32" * (hardware.kind == "cuda")),
            "compile": f"{'compiled' if compiled else 'not compiled'} ({compile_why})",
            "loss": f"logits {'in chunks' if chunked else 'whole'} ({size})",
        },
    )


def compiling_pays(config: RunConfig, steps: int, step_flops: float, hardware: Hardware) -> tuple[bool, str]:
    """Whether compiling takes less time than it saves, and why.

    Args:
        steps: Length of the run.
        step_flops: Of one step in this process: 6 per parameter and token.
    """
    if hardware.kind == "cpu":
        return compiles_on_cpu(config)
    if hardware.kind != "cuda":
        return False, f"not on {hardware.kind}"
    peak = peak_flops(hardware.name, config.train.precision) or USUAL_PEAK
    computing, blocks = step_flops / (UTILIZATION * peak), config.model.n_layers * config.train.grad_accum
    uncompiled = max(computing, LAUNCH_SECONDS_PER_LAYER * blocks)
    compiled = max((1 - COMPILE_SAVES) * computing, LAUNCH_SECONDS_COMPILED * blocks)
    saved = steps * (uncompiled - compiled)
    cost = COMPILE_SECONDS + COMPILE_SECONDS_PER_LAYER * config.model.n_layers
    return saved > cost, f"would save about {saved:,.0f} s and take {cost:,.0f}"
