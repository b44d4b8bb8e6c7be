"""What only a GPU can show of the step: that it never waits, and that its late check stops a run in time."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from nexus_ablate.config.compose import compose
from nexus_ablate.errors import Diverged
from nexus_ablate.model import build_model
from nexus_ablate.runs import read_run
from nexus_ablate.training.session import train
from nexus_ablate.training.step import Step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the compiler's own import
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # PyTorch captures one to begin with
]

ROWS = np.random.default_rng(0).integers(0, 256, (4, 9))
MANY = np.random.default_rng(0).integers(0, 256, (4, 1025))
"""Above 3,072 tokens PyTorch sorts them for the gradient of an embedding, with other kernels."""


def step_of(tiny, *overrides, rows=ROWS):
    config = tiny("train.device=cuda", "train.batch_size=4", f"model.context={rows.shape[1] - 1}", *overrides)
    return Step(config, build_model(config).cuda().train(), 100, lambda number: rows)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # PyTorch calls it a prototype
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", ["whole", "chunked"])
def test_a_step_waits_for_nothing(tiny, precision, loss):
    step = step_of(tiny, f"train.precision={precision}", f"train.loss={loss}", rows=MANY)
    step.take(0, MANY)  # kernels are loaded on first use
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(1, 5):
            step.take(number, MANY)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(step.read()) == 5


def test_a_run_with_the_defaults_of_a_gpu_finishes_and_says_how_it_was_executed(tiny_run):
    """The front door: data, probe, evaluation, checkpoint and resume on a GPU, uncompiled and compiled."""
    for compiled in ("off", "on"):
        overrides = tiny_run(
            "train.device=cuda", f"train.compile={compiled}", "probe=full", f"seed={int(compiled == 'on')}"
        )
        outcome = train(compose(overrides), overrides, quiet=True)
        summary = outcome.summary
        assert summary["device"].startswith("cuda") and summary["float32_matmul_precision"] == "highest"
        assert (summary["compiled"], summary["programs"], summary["graph_breaks"]) == (
            (True, 2, 0) if compiled == "on" else (False, 0, 0)
        )
        bf16 = torch.cuda.get_device_capability() >= (8, 0)
        assert (read_run(outcome.path).config or {})["train"]["precision"] == ("bf16" if bf16 else "fp32")
        assert math.isfinite(summary["val_loss"]) and summary["peak_memory_bytes"] > 0


def test_a_number_that_is_not_finite_is_reported_with_its_step_and_changes_no_weight(tiny, monkeypatch):
    step = step_of(tiny)
    step.take(0, ROWS)
    before = {name: p.detach().clone() for name, p in step.model.named_parameters()}
    loss_of = step.loss
    monkeypatch.setattr(step, "loss", lambda rows, weight: (loss_of(rows, weight)[0] * math.nan, None, {}, {}))
    for number in range(1, 4):
        step.take(number, ROWS)
    assert all(torch.equal(before[name], p) for name, p in step.model.named_parameters())
    with pytest.raises(Diverged, match="at step 2"):
        step.read()


def test_cuda_graphs_compute_what_the_uncompiled_step_does(tiny):
    """Every replay overwrites what the last one gave out: twenty steps, losses read at the end."""
    results = []
    for compiled in ("off", "graphs"):
        step = step_of(tiny, f"train.compile={compiled}", "train.precision=fp32")
        if step.compiled:
            step.compile(ROWS)
        for number in range(20):
            step.take(number, ROWS)
        results.append([(seen.loss, seen.norm) for seen in step.read()])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-3)


def test_the_fused_attention_of_a_gpu_is_the_plain_one(tiny):
    config = tiny("train.device=cuda")
    model = build_model(config).cuda().eval()
    tokens = torch.from_numpy(ROWS).cuda()
    with torch.no_grad():
        fused = model(tokens)
        blocks: Any = model.blocks
        for block in blocks:
            block.attn.core.fused = False
        torch.testing.assert_close(fused, model(tokens), rtol=1e-3, atol=1e-4)
