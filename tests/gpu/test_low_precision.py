"""That norm.fp32=off is one arithmetic: a GPU under autocast computes what a CPU does."""

import pytest
import torch

from nexus_ablate.axes.norm import NORM
from nexus_ablate.config.options import default_option

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("name", ["layer", "layer_nonparam", "rms", "rms_zero"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offset", [0, 30])
def test_both_passes_in_low_precision_are_those_of_a_cpu(name, dtype, offset):
    option = default_option("norm", name)
    option.keys["fp32"] = False
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)) + offset
    grad = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        norm = NORM.build(option, 96, False, "ffn").to(device)
        leaf = x.to(device).requires_grad_()
        with torch.autocast(device, dtype=dtype):
            y = norm(leaf)
        assert y.dtype == dtype
        results.append(
            [y.cpu(), *(g.cpu() for g in torch.autograd.grad(y, [leaf, *norm.parameters()], grad.to(device)))]
        )
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert (on_cpu == on_gpu).double().mean() > 0.98  # float32 sums in another order now and then round otherwise
