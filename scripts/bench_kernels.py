"""Rates of a device that bound a training step: matrix products, copies, and attention by each of PyTorch's kernels.

    python scripts/bench_kernels.py [cuda|cpu] [ROWS CONTEXT HEADS HEAD_DIM]

Prints a line per measurement as it comes. Attention is causal, forward and backward in bfloat16: without a mask, with
an additive T x T mask, and with a mask whose gradient is computed too, which is what a learned position bias needs.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nexus_ablate.bench.timing import clock_of, in_turn, spread
from nexus_ablate.bench.traffic import device_rates

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
SECONDS = 1.0


def rates(device: torch.device) -> None:
    torch.set_float32_matmul_precision("highest")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        product, copy = device_rates(device, dtype, 2**30 if device.type == "cuda" else 2**24)
        print(f"{dtype}: products {product / 1e12:.2f} TFLOP/s, copies {copy / 1e9:.0f} GB/s", flush=True)


def attention(device: torch.device, rows: int, context: int, heads: int, width: int) -> None:
    q, k, v = (
        torch.randn(rows, heads, context, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    hidden = torch.full((context, context), -torch.inf, device=device).triu(1)
    mask = (torch.randn(1, heads, context, context, device=device) + hidden).bfloat16()
    for name, backend in BACKENDS.items():
        for kind in ("no mask", "mask", "mask with gradient"):
            bias = None if kind == "no mask" else mask.clone().requires_grad_(kind == "mask with gradient")

            def step(bias: torch.Tensor | None = bias) -> None:
                F.scaled_dot_product_attention(q, k, v, bias, is_causal=bias is None).sum().backward()

            try:
                with sdpa_kernel(backend):
                    step()
                    seconds = spread(in_turn({"step": step}, SECONDS, clock_of(device))["step"]).median
                print(f"attention by {name}, {kind}: {1000 * seconds:.2f} ms", flush=True)
            except RuntimeError as error:  # this kernel doesn't take such inputs
                print(f"attention by {name}, {kind}: not available ({str(error).splitlines()[0][:60]})", flush=True)


if __name__ == "__main__":
    where = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")
    warnings.simplefilter("ignore")  # PyTorch warns about each kernel that doesn't take the inputs
    shape = [int(word) for word in sys.argv[2:6]] or [16, 1024, 12, 64]
    rates(where)
    attention(where, *shape)
