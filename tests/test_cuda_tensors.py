"""Every option on the tensors of a GPU, without one: devices agree, nothing waits, and lower precision is applied."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_cuda import fake_cuda, register_guard
from options import EVERY_OPTION
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn import functional

from nexus_ablate.axes.modules import Linear, projections
from nexus_ablate.measure import probe as probes
from nexus_ablate.measure.counts import peak_flops
from nexus_ablate.measure.evaluation.quantization import linear_maps
from nexus_ablate.measure.probe import evaluation_mode, probe
from nexus_ablate.model import GPT
from nexus_ablate.training import memory
from nexus_ablate.training.memory import TrainingPeak
from nexus_ablate.training.step import Step

ROWS = np.zeros((2, 9), np.int64)
KEYS = ["z_loss=1e-3", "attn_softcap=5", "final_softcap=5", "window=4", "kv_bias=key_value", "sink_token=on"]
KEYS += ["model.dropout=0.1", "n_kv_heads=1", "train.loss=chunked", "train.optimizer=plain", "tie_embeddings=off"]
KEYS += ["train.precision=fp32", "train.activation_checkpointing=on", "optim.cautious_decay=on"]
FEW = ["position=alibi", "normalizer=sink", "norm=layer", "train.loss=chunked", "train.optimizer=plain"]


@pytest.fixture(scope="session")
def guard(tmp_path_factory):
    register_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture
def on_gpu(guard, tiny, monkeypatch):
    """Takes a training step, an evaluation and a probe on the tensors of a GPU; returns the step's numbers."""
    monkeypatch.setattr(probes, "_numbers", lambda seen: seen)

    def take(*overrides):
        config = tiny("train.device=cuda", "train.batch_size=2", "train.precision=bf16", *overrides)
        with fake_cuda(monkeypatch):
            with torch.device("cuda"):
                model = GPT(config, 256).train()
            step = Step(config, model, 2, lambda number: ROWS)
            step.take(0, ROWS)
            (_, numbers), *_ = step._unread
            with evaluation_mode(model):
                assert step.window_losses(ROWS).device.type == "cuda"
            tokens = torch.zeros(2, 8, dtype=torch.long, device="cuda")
            probed = probe(model, tokens, precision=step.precision_context)
            assert {figure.device.type for figure in probed.values()} == {"cuda"}
            assert {p.device.type for p in model.parameters()} == {"cuda"}
            assert {tensor.device.type for tensor in step.optimizer.tensors().values()} == {"cuda"}
        return numbers

    return take


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a process that has used a GPU cannot be forked")
def test_a_process_with_the_guard_still_has_children_that_can_train(guard, tmp_path):
    """Tests of several processes fork their own, and may run after these in the same process."""
    program = (
        "import os, pathlib, sys, fake_cuda, torch\n"
        "train = lambda: torch.ones(1, requires_grad=True).backward()\n"
        "fake_cuda.register_guard(pathlib.Path(sys.argv[1])); train()\n"
        "if child := os.fork(): sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "train()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("override", FEW)
def test_a_step_an_evaluation_and_a_probe_stay_on_the_gpu_and_wait_for_nothing(on_gpu, override):
    assert on_gpu(override).device.type == "cuda"


@pytest.mark.slow
@pytest.mark.parametrize("override", sorted({*EVERY_OPTION, *KEYS} - {*FEW}))
def test_every_option_stays_on_the_gpu_and_waits_for_nothing(on_gpu, override):
    assert on_gpu(*override.split()).device.type == "cuda"


@pytest.mark.parametrize("optimizer", ["muon", "normuon", "adafactor"])
def test_the_optimizers_of_pytorch_that_cannot_skip_a_step_wait_for_its_numbers(on_gpu, optimizer):
    with pytest.raises(DataDependentOutputException):
        on_gpu(f"optim={optimizer}")


def test_a_probe_multiplies_in_the_precision_of_the_run_and_maps_attention_in_float32(guard, tiny, monkeypatch):
    results = {}

    def dtypes(precision):
        config = tiny("train.device=cuda", f"train.precision={precision}")
        with fake_cuda(monkeypatch):
            with torch.device("cuda"):
                model = GPT(config, 256).eval()
            step = Step(config, model, 2, lambda number: ROWS)
            core, linear = model.blocks[0].attn.core, model.blocks[0].attn.out
            linear.register_forward_hook(lambda module, inputs, output: results.update(product=output.dtype))
            scores = core.scores
            core.scores = lambda *x: results.setdefault("map", scores(*x))
            results.clear()
            probe(model, torch.zeros(2, 8, dtype=torch.long, device="cuda"), precision=step.precision_context)
        return results["product"], results["map"].dtype

    monkeypatch.setattr(probes, "_numbers", lambda seen: seen)
    assert dtypes("bf16") == (torch.bfloat16, torch.float32)
    assert dtypes("fp32") == (torch.float32, torch.float32)


def test_on_a_gpu_queries_keys_and_values_are_one_product_with_the_values_of_three():
    x_BTD = torch.randn(2, 3, 8)
    on_gpu = SimpleNamespace(is_cuda=True, x_BTD=x_BTD)
    for biased in ((True, True, True), (False, False, False), (True, False, True)):
        linears = [Linear(8, rows, bias, "query") for rows, bias in zip((8, 4, 4), biased, strict=True)]
        products = []
        for linear in linears:
            nn.init.normal_(linear.weight)
            if linear.bias is not None:
                nn.init.normal_(linear.bias)
            linear.product = lambda x, *weights, products=products: (
                products.append(1) or functional.linear(x.x_BTD, *weights)
            )
        stacked = projections(on_gpu, linears)
        for result, linear in zip(stacked, linears, strict=True):
            torch.testing.assert_close(result, functional.linear(x_BTD, linear.weight, linear.bias))
        assert len(products) == 1


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_on_a_gpu_the_hooks_of_every_linear_layer_fire(guard, monkeypatch, tiny, register):
    """Quantization rounds inputs in such hooks, and a failed run names the layer that failed by them."""
    fired = set()
    with fake_cuda(monkeypatch):
        with torch.device("cuda"):
            model = GPT(tiny("train.device=cuda"), 256).eval()
        layers = linear_maps(model.blocks)
        for layer in layers:
            getattr(layer, register)(lambda module, *_: fired.add(module))
        model(torch.zeros(2, 8, dtype=torch.long, device="cuda"))
    assert fired == set(layers)


# ----------------------------------------------------------------------------------------------- what a GPU reports


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100 PCIe", 756e12),
        ("A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("Tesla V100-PCIE-16GB", 112e12),
        ("some other GPU", None),
    ],
)
def test_a_gpu_has_the_peak_of_its_own_data_sheet_or_none(name, peak):
    assert peak_flops(name, "bf16") == peak


def test_the_peak_is_that_of_the_run_s_precision():
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") == 67e12


def test_peak_memory_on_a_gpu_leaves_out_evaluations_and_probes(monkeypatch):
    allocated = {"peak": 0}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocated["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: allocated.update(peak=10))
    peak = TrainingPeak(torch.device("cuda"))
    allocated["peak"] = 100  # training
    peak.pause()
    allocated["peak"] = 5000  # an evaluation
    peak.resume()
    assert peak.bytes() == 100
    allocated["peak"] = 120
    assert peak.bytes() == 120
    assert TrainingPeak(torch.device("cpu")).bytes() == memory.resident_peak_bytes()
