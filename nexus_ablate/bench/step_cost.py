"""Benchmark a run's training step, with logging and probes: how long it takes, and where the time goes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from nexus_ablate.bench.timing import MOST_PROGRAMS, Spread, clock_of, in_turn, product_rate, ratios, spread
from nexus_ablate.config.compose import compose
from nexus_ablate.config.rules import check_vocabulary
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.data import prepare
from nexus_ablate.model import build_model
from nexus_ablate.runs import Launch, identity, open_run, run_path
from nexus_ablate.track import FilesTracker
from nexus_ablate.training.device import device_of
from nexus_ablate.training.display import Display
from nexus_ablate.training.memory import keep_freed_memory
from nexus_ablate.training.signals import StopRequest
from nexus_ablate.training.trainer import Trainer

BUDGET = ("train.steps", "train.tokens", "train.flops", "train.eval_every")
PROBES = "probe.every=100"
"""Of a run without an end, unless the user says otherwise: as often as in the default run, or more."""

WARM_STEPS = 3
PROFILED_STEPS = 10

KINDS = {  # an operation belongs to the first part with a prefix of its name
    "fused by the compiler": ("triton_poi", "triton_red", "triton_per", "Torch-Compiled Region", "CompiledFunction"),
    "attention": (
        "aten::_scaled_dot_product",
        "flash",  # kernels of flash attention and cuDNN also name cutlass and sm90
        "fmha",
        "sdpa",
        "flex_attention",
        "softmax_warp",
        "aten::_efficient_attention",
        "aten::bmm",
        "aten::_softmax",
        "_Blockwise",
    ),
    "matrix products": (
        "aten::mm",
        "aten::addmm",
        "mkldnn::_linear",
        "gemm",
        "cutlass",
        "ampere",
        "sm90",
        "nvjet",
        "triton_tem",
        "triton_mm",
    ),
    "norms": (
        "aten::native_layer_norm",
        "aten::_fused_rms_norm",
        "_RootMeanSquare",
        "aten::rsqrt",
        "aten::mean",
        "aten::var_mean",
        "layer_norm",
        "GammaBeta",
        "rsqrt_kernel",
        "MeanOps",
    ),
    "activations": (
        "aten::gelu",
        "aten::silu",
        "aten::relu",
        "aten::threshold",
        "aten::sigmoid",
        "aten::tanh",
        "GeluCUDA",
        "GeluBackward",
        "silu_kernel",
        "silu_backward",
        "threshold_kernel",
        "sigmoid_kernel",
        "tanh_kernel",
    ),
    "loss": (
        "aten::_log_softmax",
        "aten::nll_loss",
        "aten::logsumexp",
        "SoftMaxForward",
        "SoftMaxBackward",
        "nll_loss",
    ),
    "optimizer, norms, clipping": (
        "Optimizer",
        "aten::_fused_adamw",
        "aten::_foreach",
        "aten::linalg_vector_norm",
        "multi_tensor_apply",
        "lpnorm",
    ),
    "copies": (
        "aten::copy_",
        "aten::cat",
        "aten::clone",
        "aten::fill_",
        "aten::embedding",
        "aten::index",
        "Memcpy",
        "Memset",
        "direct_copy",
        "bfloat16_copy",
        "FillFunctor",
        "CatArray",
        "embedding_backward",
        "indexing_backward",
        "index_kernel",
        "indexSelect",
    ),
    "elementwise": (
        "aten::add",
        "aten::mul",
        "aten::sub",
        "aten::div",
        "aten::neg",
        "aten::sum",
        "aten::roll",
        "aten::square",
        "aten::pow",
        "elementwise_kernel",
        "reduce_kernel",
    ),
}
"""Parts of a profile: prefixes of operations' names, or substrings of GPU kernels' names. A kernel that names several
parts (`pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>`) belongs to the first."""


@dataclass(frozen=True)
class StepCost:
    """The cost of a configuration's step, with everything that a run does in it.

    Attributes:
        name: The override by which the configuration differs from the first; empty for the first.
        seconds: Seconds per step.
        ratio: Its time divided by the first one's, over blocks of the same round.
        rate_share: Model FLOPs per second divided by the measured rate of matrix products.
        peak_memory_bytes: Of the process; None where it holds several configurations.
        parts: Seconds per step by part of the profile; `Python` (on a GPU `idle`) is the time outside all operations.
    """

    name: str
    seconds: Spread
    ratio: Spread
    tokens_per_second: float
    rate_share: float
    peak_memory_bytes: int | None
    parts: dict[str, float]


def endless(overrides: list[str]) -> list[str]:
    """Overrides of the same run without an end: it steps, logs and probes, and never validates.

    It compiles only with `train.compile=on`: `auto` depends on the length of the run, which is unlimited here.
    """
    kept = [o for o in overrides if o.partition("=")[0] not in BUDGET and o != "probe.every=auto"]
    return ["train.compile=off", PROBES, *kept, "train.steps=1000000000", "train.eval_every=1000000000"]


@contextmanager
def running(config: RunConfig, vocab_size: int | None = None) -> Iterator[Trainer]:
    """A trainer that is ready to take steps; its run directory lives as long as the `with`.

    Args:
        vocab_size: The model's vocabulary size, at least the data's, which is the default.

    Raises:
        ConfigError: The embedding is smaller than the tokenizer, or the run should be compiled, but torch.compile
            doesn't work on this machine.
    """
    data = prepare(config.data, context=config.model.context)
    check_vocabulary(config, data.vocab_size)
    ident = identity(config.science(), "bench", "0", {})
    with (
        tempfile.TemporaryDirectory() as folder,
        open_run(run_path(folder, "bench", "step", config.seed, ident), Launch(ident, "", [], {})) as run,
    ):
        model = build_model(config, vocab_size or data.vocab_size).to(device_of(config.train))
        trainer = Trainer(config, model, data, run, FilesTracker(), Display(quiet=True), StopRequest())
        model.train()
        if trainer.step.compiled:
            trainer.step.compile(trainer.batches.batch(0))
        yield trainer


def bench_steps(overrides: list[str], others: list[str], seconds: float) -> list[StepCost]:
    """Time and profile the steps of a configuration and of variants that differ by one override, in turn.

    Args:
        overrides: The configuration; already checked, alone and with each variant. The length of the run is ignored.
        others: The override of each variant.
        seconds: Approximate total time, without building and compiling; at least five blocks of each are measured.
    """
    first = compose(endless(overrides))
    configs = {"": first}
    for other in others:
        configs[other] = compose(endless([*overrides, other]))
    if first.train.threads != "auto":
        torch.set_num_threads(first.train.threads)
    keep_freed_memory()
    every = max(first.train.log_every, *(config.probe.every for config in configs.values()))  # a block has a probe
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=MOST_PROGRAMS))
        trainers = {name: stack.enter_context(running(config)) for name, config in configs.items()}
        for trainer in trainers.values():
            _take_steps(trainer, WARM_STEPS)
        device = trainers[""].device
        blocks = {name: partial(_take_steps, trainer, every) for name, trainer in trainers.items()}
        taken = in_turn(blocks, seconds, clock_of(device))
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(first.train.precision, torch.float32)
        rate = product_rate(device, dtype)
        costs = []
        for name, trainer in trainers.items():
            step = spread([block / every for block in taken[name]])
            tokens_per_second = trainer.tokens_per_step / step.median
            costs.append(
                StepCost(
                    name=name,
                    seconds=step,
                    ratio=ratios(taken[name], taken[""]),
                    tokens_per_second=tokens_per_second,
                    rate_share=trainer.flops_per_token * tokens_per_second / rate,
                    peak_memory_bytes=None if others else trainer.peak_memory(),
                    parts=profiled(trainer, step.median),
                )
            )
    return costs


def _take_steps(trainer: Trainer, number: int) -> None:
    for _ in range(number):
        trainer.step_and_record()


def profiled(trainer: Trainer, step_seconds: float) -> dict[str, float]:
    """Seconds per step by part, the longest first, scaled to sum to `step_seconds` without the profiler's overhead."""
    from torch.profiler import ProfilerActivity, profile

    cuda, clock = trainer.device.type == "cuda", clock_of(trainer.device)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        start = clock.now()
        for _ in range(PROFILED_STEPS):
            trainer.advance()
        clock.wait()
        whole = clock.now() - start
    seconds_by_part: dict[str, float] = dict.fromkeys((*KINDS, "autograd, views, the rest"), 0.0)
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
        seconds_by_part[part_of(event.key)] += microseconds / 1e6
    seconds_by_part["idle" if cuda else "Python"] = max(0.0, whole - sum(seconds_by_part.values()))
    whole = sum(seconds_by_part.values())
    parts = {name: step_seconds * seconds / whole for name, seconds in seconds_by_part.items()}
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def part_of(name: str) -> str:
    """The part of KINDS that an operation or kernel belongs to."""
    lowered = name.lower()
    for part, beginnings in KINDS.items():
        if any(name.startswith(b) or (not b.startswith("aten::") and b.lower() in lowered) for b in beginnings):
            return part
    return "autograd, views, the rest"
