"""How long a run's training step takes, with logging and probes, and where the time goes:

python scripts/bench_step.py train.device=cpu train.threads=1
python scripts/bench_step.py norm=none --against norm=rms --against norm=layer    steps in turn, and their ratios
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # idle threads sleep
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler is silent

import torch

from nexus_ablate.bench.timing import MOST_PROGRAMS, clock_of, in_turn, ratios, spread
from nexus_ablate.config.compose import compose
from nexus_ablate.config.rules import check_vocabulary
from nexus_ablate.config.run_config import RunConfig
from nexus_ablate.console import grid, open_console
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


def take_steps(trainer: Trainer, number: int) -> None:
    for _ in range(number):
        trainer.step_and_record()


def profiled(trainer: Trainer, step_seconds: float) -> dict[str, float]:
    """Seconds per step by part, scaled to sum to `step_seconds` without the profiler's overhead.

    `Python` (on a GPU `idle`) is the time outside all operations.
    """
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
    return {name: step_seconds * seconds / whole for name, seconds in seconds_by_part.items()}


def part_of(name: str) -> str:
    """The part of KINDS that an operation or kernel belongs to."""
    lowered = name.lower()
    for part, beginnings in KINDS.items():
        if any(name.startswith(b) or (not b.startswith("aten::") and b.lower() in lowered) for b in beginnings):
            return part
    return "autograd, views, the rest"


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measured FLOPs per second of a square matrix product."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    torch.matmul(a, b)  # the first call sets up the library
    taken = in_turn({"product": lambda: a @ b}, 0.25, clock_of(device))["product"]
    return 2 * size**3 / spread(taken).low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the run; its length is ignored")
    parser.add_argument("--against", action="append", default=[], help="an override of a variant; repeat it for more")
    parser.add_argument("--seconds", type=float, default=10, help="measured, without building and compiling")
    arguments = parser.parse_intermixed_args()
    console = open_console()
    configs = {"as given": compose(endless(arguments.overrides))}
    for override in arguments.against:
        configs[override] = compose(endless([*arguments.overrides, override]))
    first = configs["as given"]
    if first.train.threads != "auto":
        torch.set_num_threads(first.train.threads)
    keep_freed_memory()
    steps = max(first.train.log_every, *(config.probe.every for config in configs.values()))  # a block has a probe
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=MOST_PROGRAMS))
        trainers = {name: stack.enter_context(running(config)) for name, config in configs.items()}
        for trainer in trainers.values():
            take_steps(trainer, WARM_STEPS)
        device = trainers["as given"].device
        blocks = {name: partial(take_steps, trainer, steps) for name, trainer in trainers.items()}
        taken = in_turn(blocks, arguments.seconds, clock_of(device))
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(first.train.precision, torch.float32)
        rate = product_rate(device, dtype)
        rows = []
        for name, trainer in trainers.items():
            seconds = spread(taken[name]).median / steps
            tokens_per_second = trainer.tokens_per_step / seconds
            share = trainer.flops_per_token * tokens_per_second / rate
            times = ratios(taken[name], taken["as given"]).text(3)
            rows.append((name, f"{1000 * seconds:.2f}", times, f"{tokens_per_second:,.0f}", f"{share:.0%}"))
        console.print(
            grid(("", "step ms", "times as given", "tokens/s", "of the rate of products"), rows, console.width)
        )
        if len(trainers) == 1:
            print(f"the process took {trainers['as given'].peak_memory() / 2**20:,.0f} MiB at most")
        seconds = spread(taken["as given"]).median / steps
        parts = profiled(trainers["as given"], seconds)
    print("\nwhere the time goes, as given; steps include logging and probes")
    longest_first = sorted(parts.items(), key=lambda part: -part[1])
    rows = [(name, f"{1000 * part:.2f}", f"{part / seconds:.1%}") for name, part in longest_first]
    console.print(grid(("part", "ms", "share"), rows, console.width))


if __name__ == "__main__":
    main()
