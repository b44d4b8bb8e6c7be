"""Memory traffic, FLOPs and memory of a computation, counted per operation while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from nexus_ablate.bench.timing import clock_of, in_turn, spread

FLOPS_PER_ELEMENT = {
    "native_layer_norm": 8,
    "native_layer_norm_backward": 14,
    "_fused_rms_norm": 5,
    "_fused_rms_norm_backward": 10,
    "_softmax": 4,
    "_softmax_backward_data": 4,
    "gelu": 8,
    "gelu_backward": 12,
    "silu": 5,
    "silu_backward": 8,
}
"""FLOPs per element of kernels with several operations. By convention, an exponential or an erf counts as one."""

NO_ARITHMETIC = {
    "clone",
    "copy_",
    "_to_copy",
    "cat",
    "stack",
    "constant_pad_nd",
    "fill_",
    "zero_",
    "zeros",
    "index_select",
}
NO_TRAFFIC = {
    "device",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
}


class Traffic(TorchDispatchMode):
    """Counts inside its `with`.

    Attributes:
        flops: Two per multiply-add of a matrix product (attention: all T x T scores). Other operations count one per
            element of the larger of input and output, or as FLOPS_PER_ELEMENT says.
        bytes_moved: Bytes that the operations read and write, each tensor once per operation; views move nothing.
            Caches are ignored.
        peak_bytes: Most bytes alive at a time, of tensors made inside the `with`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes_moved = self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view:
            return out
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if name not in NO_TRAFFIC:
            self.bytes_moved += sum(x.numel() * x.element_size() for x in inputs + made)
            self.flops += self._flops(func, name, args, kwargs or {}, inputs, made, out)
        self._hold(made, inputs)
        return out

    def _flops(self, func: Any, name: str, args: Any, kwargs: Any, inputs: Any, made: Any, out: Any) -> int:
        if func.overloadpacket in flop_registry:
            return flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):  # not in PyTorch's table
            backward = name.endswith("backward")
            B, H, T, d = args[1 if backward else 0].shape
            return (10 if backward else 4) * B * H * T * args[2 if backward else 1].shape[2] * d
        if name in NO_ARITHMETIC:
            return 0
        return FLOPS_PER_ELEMENT.get(name, 1) * max((x.numel() for x in inputs + made), default=0)

    def _hold(self, made: list[Tensor], inputs: list[Tensor]) -> None:
        old = {x.untyped_storage()._cdata for x in inputs}  # an in-place operation makes no new tensor
        for storage in (x.untyped_storage() for x in made):
            if storage._cdata not in old:
                self._live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())

    def live_bytes(self) -> int:
        """Bytes of the tensors made inside the `with` that are still alive."""
        self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
        return sum(size for _, size in self._live.values())


def counted(work: Callable[[], object]) -> Traffic:
    """Run some work once and count its traffic, FLOPs and memory."""
    with Traffic() as traffic:
        kept = work()
    del kept
    return traffic


def seconds_at_best(traffic: Traffic, flops_per_second: float, bytes_per_second: float) -> float:
    """The roofline: the time of the products or of the memory traffic, whichever is longer. Williams et al. 2009."""
    return max(traffic.flops / flops_per_second, traffic.bytes_moved / bytes_per_second)


def device_rates(device: torch.device, dtype: torch.dtype, copied_bytes: int) -> tuple[float, float]:
    """Measured FLOPs per second of a square matrix product, and bytes per second read and written by a copy.

    Args:
        dtype: The dtype of the product.
        copied_bytes: Size of the copy. With the size of a layer's tensors, it fits into the same caches.
    """
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.randn(max(1, copied_bytes // 4), device=device)
    target = torch.empty_like(source)
    works = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    for work in works.values():
        work()
    taken = in_turn(works, 0.5, clock_of(device))
    product, copy = (spread(taken[name]).low for name in works)
    return 2 * size**3 / product, 2 * source.numel() * 4 / copy
