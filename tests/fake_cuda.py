"""Tensors on a GPU that isn't there: shapes, dtypes and devices without values.

An operation that would wait for the GPU to read a value raises, so these tensors also show that nothing waits.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::DeviceGuardImplRegistrar registered(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
"""
"""A PyTorch built without CUDA refuses even to index a fake CUDA tensor, because nothing can switch GPUs."""


def register_guard(folder: Path) -> None:
    """Register a device guard that does nothing, where PyTorch was built without CUDA.

    A backward pass comes first: the first one in a process starts a thread for each device with a guard, and a process
    with such threads has no children that can train.
    """
    if torch.version.cuda:
        return
    torch.ones(1, requires_grad=True).backward()
    if not shutil.which("g++"):
        pytest.skip("PyTorch is built without CUDA, and there is no g++ to build a device guard with")
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    torch_folder = Path(torch.__file__).parent
    paths = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"]
    command = ["g++", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library), *paths]
    subprocess.run(command, check=True, capture_output=True, text=True)
    ctypes.CDLL(str(library))


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside the `with`, device `cuda` exists. A backward pass, which needs CUDA itself, makes gradients of zeros."""

    def backward(loss: torch.Tensor) -> None:
        assert loss.device.type == "cuda" and loss.grad_fn is not None
        seen, waiting = set(), [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if (leaf := getattr(node, "variable", None)) is not None:
                leaf.grad = torch.zeros_like(leaf)
            waiting += [following for following, _ in node.next_functions]

    with monkeypatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(torch.Tensor, "backward", backward)
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        patch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100")
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
        yield
