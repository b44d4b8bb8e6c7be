"""Fast paths give what the plain ones give, and each can be turned off."""

import ctypes
import errno
import math
import random
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from faults.bench import at_step, logged, run
from faults.test_nonfinite import Poison
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nexus_ablate.config.compose import compose
from nexus_ablate.errors import ConfigError, Diverged
from nexus_ablate.kernels import blockwise, linear, loss, softmax_attention
from nexus_ablate.kernels.normalization import rms_norm
from nexus_ablate.model import build_model
from nexus_ablate.training import choices, device, memory, step
from nexus_ablate.training.device import Hardware
from nexus_ablate.training.session import train
from nexus_ablate.training.step import Step, steps_of


def assert_close(results, **tolerance):
    """Check the tensors of two ways to compute the same against each other."""
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, **tolerance)


def leaves_of(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


def plain_rms(x, eps, gain):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def test_rms_norm_is_its_formula_to_the_bit_and_so_are_its_gradients_in_float64():
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    gain = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.equal(rms_norm(x, 1e-6, gain), plain_rms(x, 1e-6, gain))
    assert torch.autograd.gradcheck(lambda x, gain: rms_norm(x, 1e-6, gain), (x, gain))


def attention_of(x):
    """Of one head whose queries, keys and values are x."""
    return blockwise.blockwise_attention(*[x[None, None]] * 3, None, 1.0)


@pytest.mark.parametrize(
    "fast",
    [
        lambda x: rms_norm(x, 1e-6, torch.ones(4)),
        lambda x: rms_norm(x.bfloat16(), 1e-6, torch.ones(4, dtype=torch.bfloat16)),
        attention_of,
        pytest.param(
            lambda x: linear.linear(x, torch.eye(4)), marks=pytest.mark.skipif(not linear.ONE_DNN, reason="no oneDNN")
        ),
    ],
    ids=["rms", "rms in bfloat16", "attention", "linear"],
)
def test_a_second_derivative_of_what_has_none_is_refused_and_not_wrong(fast, monkeypatch):
    monkeypatch.setattr(linear, "WORTH_MULTIPLYING", 0)
    x = torch.randn(2, 4, requires_grad=True)
    first = torch.autograd.grad(fast(x).square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# ------------------------------------------------------------------------------------------------ linear maps


@pytest.fixture
def onednn_always(monkeypatch):
    if not linear.ONE_DNN:
        pytest.skip("PyTorch has no oneDNN for this processor")
    monkeypatch.setattr(linear, "WORTH_MULTIPLYING", 0)


def products(model, rows=1):
    """How often each library multiplies in a forward and backward pass over 8 tokens a row."""
    counted = Counter()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counted[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    with Names():
        model(torch.zeros(rows, 8, dtype=torch.long)).sum().backward()
    return counted["_linear_pointwise"], counted["mm"] + counted["addmm"]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8), (2, 1, 3, 8)])
def test_onednn_s_linear_layer_and_its_gradients_are_blas_s_up_to_rounding(onednn_always, shape, biased):
    tensors = [torch.randn(shape), torch.randn(5, 8), torch.randn(5)][: 2 + biased]
    grad = torch.randn(5).expand(*shape[:-1], 5)  # as a sum hands it on: not contiguous
    results = []
    for product in (linear.linear, F.linear):
        leaves = leaves_of(*tensors)
        y = product(*leaves)
        results.append((y.detach(), *torch.autograd.grad(y, leaves, grad)))
    assert_close(results)


def test_onednn_takes_the_large_products_of_a_float32_run_on_a_cpu_and_no_others(onednn_always, tiny_run, monkeypatch):
    model = build_model(compose(tiny_run("train.device=cpu")))
    maps = sum(isinstance(part, torch.nn.Linear) for part in model.modules()) + 1  # and the tied head
    by_onednn, by_blas = products(model)
    assert by_onednn == 2 * maps and by_blas == maps  # forward and g W; g' x
    with torch.autocast("cpu", torch.bfloat16):
        assert products(model)[0] == 0
    double = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    assert linear.linear(double, torch.eye(8, dtype=torch.float64)).grad_fn.name() == "MmBackward0"
    monkeypatch.setattr(linear, "WORTH_MULTIPLYING", 3 * 8 * model.geometry.d_model**2)
    assert products(model, rows=2)[0] < products(model, rows=3)[0] == by_onednn


def test_linear_blas_turns_onednn_off_in_every_linear_layer_and_in_the_head(onednn_always, tiny_run):
    assert products(build_model(compose(tiny_run("train.linear=blas", "qkv_bias=on"))))[0] == 0


def test_gradients_of_linear_layers_that_share_an_input_add_up_in_float32():
    x, weights = torch.randn(64, 16, requires_grad=True), torch.randn(3, 16, 16)
    gradients = torch.randn(3, 64, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [F.linear(part, weight) for part, weight in zip(linear.shared(x, 3), weights, strict=True)]
    (result,) = torch.autograd.grad(outputs, x, [*gradients])
    assert torch.equal(result, (gradients @ weights.bfloat16()).float().sum(0))


@pytest.mark.parametrize("ffn", ["gelu", "swiglu"])
def test_a_block_keeps_one_low_precision_copy_for_q_k_and_v_and_one_for_the_ffn(tiny, ffn):
    model, made = build_model(tiny(f"ffn={ffn}", "model.n_layers=1", "norm=layer")), Counter()
    shape = torch.Size((3, 8, model.geometry.d_model))

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ == "_to_copy" and args[0].shape == shape:
                made[out.dtype] += 1
            return out

    with Casts(), torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(shape)
        model.blocks[0](x, model.context(x))
    assert made[torch.bfloat16] == 2


# ------------------------------------------------------------------------------------------------------ attention


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of four queries wherever attention is fused."""
    monkeypatch.setattr(blockwise, "QUERIES", 4)
    monkeypatch.setattr(blockwise, "SHORTEST", 0)
    monkeypatch.setattr(blockwise, "WORTH_MULTIPLYING", 0)


def causal_mask(T, S, *lead):
    """A bias of every pair, -inf where a key stands behind the query's place from the end, or where one is hidden."""
    mask = torch.randn(*lead, T, S, dtype=torch.float64)
    unseen = torch.ones(T, S).triu(S - T + 1).bool()
    unseen[2:, 1:2] = True
    return mask.masked_fill(unseen, -math.inf)


@pytest.mark.parametrize("T", [1, 4, 10])  # less than a block, one, and two and a half
@pytest.mark.parametrize(("lead", "more"), [(None, 0), ((1, 1), 0), ((1, 2), 1), ((3, 2), 2)])
def test_blockwise_attention_is_the_fused_kernel_s_in_outputs_and_all_gradients(small_blocks, T, lead, more):
    S = T + more
    q, k, v = (torch.randn(3, n, 2, 8, dtype=torch.float64).transpose(1, 2) for n in (T, S, S))
    masks = [] if lead is None else [causal_mask(T, S, *lead)]

    def by_blocks(q, k, v, mask=None):
        return blockwise.blockwise_attention(q, k, v, mask, 0.3)

    def fused(q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=0.3)

    results = []
    for attend in (by_blocks, fused):
        leaves = leaves_of(q, k, v, *masks)
        out = attend(*leaves)
        weight = torch.arange(out.numel(), dtype=torch.float64).view(out.shape).sin()
        results.append((out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)))
    assert_close(results)


@pytest.mark.parametrize("overrides", [[], ["normalizer=sink"], ["kv_bias=key_value"], ["window=3", "position=t5"]])
def test_a_model_with_blockwise_attention_is_the_plain_path_in_logits_and_gradients(small_blocks, tiny, overrides):
    model = build_model(tiny("model.context=24", *overrides))
    tokens, result = torch.randint(0, 256, (2, 24)), []
    for fused in (True, False):
        for block in model.blocks:
            block.attn.core.fused = fused
        loss_of = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        result.append((loss_of.detach(), *torch.autograd.grad(loss_of, list(model.parameters()))))
    assert_close(result, rtol=1e-4, atol=1e-6)


@pytest.fixture
def by_blocks(small_blocks, tiny, monkeypatch):
    """A function: the number of layers in which a model's attention is blockwise."""
    taken = []

    def counting(*args):
        taken.append(args)
        return blockwise.blockwise_attention(*args)

    monkeypatch.setattr(softmax_attention, "blockwise_attention", counting)

    def count(*overrides, training=True):
        taken.clear()
        config = tiny(*overrides)
        build_model(config).train(training)(torch.zeros(2, config.model.context, dtype=torch.long))
        return len(taken)

    return count


def test_attention_is_blockwise_in_float32_on_a_cpu_and_attention_sdpa_turns_that_off(by_blocks, tiny):
    layers = build_model(tiny()).geometry.n_layers
    assert by_blocks() == by_blocks("position=alibi") == by_blocks("normalizer=sink") == layers
    assert by_blocks("train.attention=sdpa") == by_blocks("attn_softcap=5") == 0
    assert by_blocks("model.dropout=0.1") == 0 and by_blocks("model.dropout=0.1", training=False) == layers
    with torch.autocast("cpu", torch.bfloat16):  # norms leave some of q, k and v in float32
        assert by_blocks() == by_blocks("qk_norm=rms") == by_blocks("qk_norm=qkv") == 0


def test_attention_is_blockwise_where_that_is_faster_and_keeps_no_large_map(by_blocks, tiny, monkeypatch):
    model = build_model(tiny())
    layers, heads, width = model.geometry.n_layers, model.geometry.n_heads, model.geometry.head_dim
    monkeypatch.setattr(blockwise, "SHORTEST", 6)
    assert by_blocks("model.context=6") == layers and by_blocks("model.context=5") == 0
    monkeypatch.setattr(blockwise, "KEPT_BYTES", 4 * 2 * heads * 8 * 8)
    assert by_blocks("model.context=8") == layers and by_blocks("model.context=9") == 0
    monkeypatch.setattr(blockwise, "WORTH_MULTIPLYING", 2 * heads * 8 * 8 * width)
    assert by_blocks("model.context=8") == layers and by_blocks("model.context=7") == 0


# ------------------------------------------------------------------------------------------------------- the loss


def attached(x, weight, targets, *arguments):
    """The chunked losses as the step has them, values that carry gradients; three rows of 16 logits in a chunk."""
    most = {"most_bytes": 3 * 16 * 4}
    value, z_value, *gradients = loss.chunked_losses(x.detach(), weight.detach(), targets, *arguments, **most)
    return loss.attach_gradients(value, x, weight, *gradients), z_value


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("z_factor", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_chunked_loss_and_its_gradients_are_the_whole_one_s(monkeypatch, z_factor, softcap, compiling):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)  # the form that a compiler fuses
    x = torch.randn(10, 4, dtype=torch.float64)
    weight, targets = torch.randn(16, 4, dtype=torch.float64), torch.randint(0, 16, (10,))
    results = []
    for chunked in (False, True):
        leaves = leaves_of(x, weight)
        if chunked:
            value, z_value = attached(*leaves, targets, z_factor, F.linear, softcap)
            total = 3 * value  # a factor from outside, as gradient accumulation has
        else:
            logits = F.linear(*leaves)
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            value, z_value = loss.losses(logits, targets, z_factor)
            total = 3 * (value + z_value)
        tensors = value.detach(), z_value.detach(), *torch.autograd.grad(total, leaves)
        results.append([tensor.float() for tensor in tensors])
    assert_close(results, rtol=1e-5, atol=1e-6)


def test_a_chunked_loss_forms_no_more_logits_than_a_chunk_at_a_time():
    seen = []

    def product(x, weight):
        seen.append(tuple(F.linear(x, weight).shape))
        return F.linear(x, weight)

    x, weight = torch.randn(10, 4, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    attached(x, weight, torch.randint(0, 16, (10,)), 0.0, product)[0].backward()
    # of each chunk its logits, and the gradient of its rows; none again in the backward pass
    assert seen == [(3, 16), (3, 4), (3, 16), (3, 4), (3, 16), (3, 4), (1, 16), (1, 4)]


def test_auto_chunks_what_would_be_large_and_never_float16():
    large = loss.WORTH_BYTES // (4 * 50257) + 1
    assert loss.chunks_losses("auto", large, 50257, "bf16")
    assert not loss.chunks_losses("auto", large, 50257, "fp16")
    assert not loss.chunks_losses("auto", 2048, 256, "fp32")
    assert loss.chunks_losses("chunked", 1, 256, "fp32")
    assert not loss.chunks_losses("whole", large, 50257, "bf16")


def test_auto_leaves_the_loss_whole_in_a_compiled_step_whose_gpu_has_the_memory():
    gpt2 = "auto", 16 * 1024, 50304, "bf16"
    assert not loss.chunks_losses(*gpt2, compiled_memory=80 * 2**30)
    assert loss.chunks_losses(*gpt2, compiled_memory=16 * 2**30)
    assert loss.chunks_losses("chunked", *gpt2[1:], compiled_memory=80 * 2**30)


# ------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of five rows of logits."""
    monkeypatch.setattr(step, "LOGIT_BYTES", 5 * 256 * 4)


LENGTH = ["train.steps=30", "train.checkpoint_every=1000", "train.eval_every=1000", "probe=off"]
ALL_AT_ONCE = ["z_loss=0.01", "final_softcap=5", "tie_embeddings=off", "train.precision=bf16"]
SAME_RUNS = {
    "oneDNN": ("onednn_always", ["bias=on"], [], ["train.linear=blas"], 1e-4),
    "blockwise attention": ("small_blocks", [], [], ["train.attention=sdpa"], 1e-4),
    "the fused optimizer": (None, [], [], ["train.optimizer=plain"], 1e-4),
    "a chunked loss": ("small_chunks", [], ["train.loss=chunked"], ["train.loss=whole"], 1e-3),
    "a chunked loss, capped in bfloat16": (
        "small_chunks", ALL_AT_ONCE, ["train.loss=chunked"], ["train.loss=whole"], 0.02,
    ),
}  # fmt: skip
"""Fast paths with a fixture that makes a small run take them, what both runs have, and what each has."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "a chunked loss")) for name in SAME_RUNS]
)
def test_a_run_on_a_fast_path_is_the_same_run(name, tiny_run, tmp_path, request, monkeypatch):
    fixture, both, fast, plain, tolerance = SAME_RUNS[name]
    if fixture is not None:
        request.getfixturevalue(fixture)
    fast_rows = logged(run(tiny_run(*LENGTH, *both, *fast)).path)
    if name == "the fused optimizer":
        monkeypatch.delattr(torch, "_fused_adamw_")
    plain_rows = logged(run(tiny_run(*LENGTH, *both, *plain, f"runs_dir={tmp_path / 'other'}")).path)
    for a, b in zip(fast_rows, plain_rows, strict=True):
        if "train/loss" in a:
            assert a["train/loss"] == pytest.approx(b["train/loss"], rel=tolerance)
    assert fast_rows[1]["train/loss"] == pytest.approx(plain_rows[1]["train/loss"], rel=1e-5)


# ------------------------------------------------------------------------------------- no waiting for the device


@pytest.fixture
def unwaited(monkeypatch):
    """A step that does on the CPU what it does on a GPU: nothing is looked at before it is read."""
    made = Step.__init__

    def late(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.checks_at_once = False

    monkeypatch.setattr(Step, "__init__", late)


def test_reading_late_is_the_same_run(tiny_run, tmp_path, request):
    at_once = run(tiny_run("train.log_every=7"))
    request.getfixturevalue("unwaited")
    late = run(tiny_run("train.log_every=7", f"runs_dir={tmp_path / 'other'}"))
    assert logged(late.path) == logged(at_once.path)


READ_LATE = ("train.log_every=10", "probe=off", "train.checkpoint_every=1000")


@pytest.mark.parametrize("place", ["loss", "gradient"])
def test_a_number_that_is_not_finite_leaves_the_weights_alone_until_it_is_read_and_is_reported_for_the_right_step(
    tiny_run, monkeypatch, unwaited, place
):
    steps = []
    at_step(monkeypatch, steps.append)
    poison = Poison(place, 3, math.nan, random.Random(0), monkeypatch)
    with pytest.raises(Diverged, match="at step 4"):
        run(tiny_run(*READ_LATE))
    assert max(steps) == 9, "steps went on meanwhile"
    assert poison.touched() == []


def test_control_without_the_flag_the_weights_would_become_non_finite(tiny_run, monkeypatch, unwaited):
    monkeypatch.setattr(torch, "maximum", lambda spoilt, now: spoilt)
    poison = Poison("loss", 3, math.nan, random.Random(0), monkeypatch)
    with pytest.raises(Diverged):
        run(tiny_run(*READ_LATE))
    assert poison.touched() != []


# --------------------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone")
def test_freed_memory_is_kept_so_that_steps_cause_no_page_faults_unless_the_user_set_glibc_s_own_variables():
    import os
    import subprocess

    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    own = plain | {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}
    code = """
import resource, torch
from nexus_ablate.training.memory import keep_freed_memory
keep_freed_memory()
def step():
    tensors = [torch.ones(2**20) for _ in range(16)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    faults = {}
    for how, environment in {"kept": plain, "given back": own}.items():
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        faults[how] = int(done.stdout)
    assert faults["kept"] < 100 < 1000 < faults["given back"]


def test_where_there_is_no_glibc_nothing_happens(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    memory.keep_freed_memory()


# -------------------------------------------------------------------------------------------------- torch.compile


def no_compiler(monkeypatch, error):
    def refuse(forward, **_):
        def call(*_):
            raise error

        return call

    monkeypatch.setattr(torch, "compile", refuse)


def test_auto_compiles_long_runs_and_on_a_cpu_only_where_a_compiler_is(monkeypatch):
    def pays(kind, steps, flops, name="NVIDIA H100", **values):
        config = compose([*(f"{key.replace('__', '.')}={value}" for key, value in values.items())])
        return choices.compiling_pays(config, steps, flops, Hardware(kind, name))[0]

    gpt2 = {"model": "base", "train__precision": "bf16"}
    assert pays("cuda", 2000, 2.4e13, **gpt2) and not pays("cuda", 800, 2.4e13, **gpt2), "59 s and 24 s to save"
    assert pays("cuda", 800, 2.4e13, name="NVIDIA A100", **gpt2), "a slower GPU has more to save"
    assert pays("cuda", 3000, 1e9) and not pays("cuda", 2000, 1e9), "a small model launches kernels all the time"
    assert pays("cuda", 2000, 1e9, train__grad_accum=4)
    assert not pays("mps", 10**9, 1e20)
    monkeypatch.setattr(device, "cxx_compiler", lambda: "g++")
    for model, compiles in {"femto": False, "pico": True, "nano": True}.items():
        assert pays("cpu", 1, 1, model=model) == compiles
        assert pays("cpu", 1, 1, model=model, norm="layer", ffn="gelu", mixer="gated_delta") == compiles, "as every arm"
    assert not pays("cpu", 1, 1, train__steps=100) and pays("cpu", 1, 1, model="femto", train__flops=2e12)
    monkeypatch.setattr(device, "cxx_compiler", lambda: "")
    assert not pays("cpu", 1, 1)


@pytest.mark.parametrize(("requested", "mode"), [("on", None), ("graphs", "reduce-overhead")])
def test_graphs_asks_the_compiler_for_cuda_graphs_and_marks_each_forward_pass(tiny, monkeypatch, requested, mode):
    asked_for, marked = [], []
    monkeypatch.setattr(torch, "compile", lambda forward, mode, dynamic: asked_for.append(mode) or forward)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marked.append(1))
    config, batch = tiny(f"train.compile={requested}", "train.batch_size=2"), np.zeros((2, 9), dtype=np.int64)
    stepper = Step(config, build_model(config).train(), 3, lambda number: batch)
    stepper.compile(batch)
    stepper.take(0, batch)
    assert asked_for == [mode] and len(marked) == (2 if requested == "graphs" else 0)


def test_a_default_run_is_compiled_where_a_compiler_is_and_a_short_one_is_not():
    compiled = []
    for length in ([], ["train.steps=100"]):
        config = compose(["data=stdlib", "data.tokenizer=bytes", "train.device=cpu", *length])
        compiled.append(Step(config, build_model(config), steps_of(config, 256), lambda n: None).compiled)
    assert compiled == [bool(device.cxx_compiler()), False]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no working C++ compiler\nand more"), "no working C++ compiler"),
        (OSError(errno.ENOSPC, "No space left on device"), "[Errno 28] No space left on device"),
    ],
)
def test_a_run_that_auto_cannot_compile_says_so_and_is_the_uncompiled_run(
    tiny_run, tmp_path, monkeypatch, capsys, error, reason
):
    plain = run(tiny_run("norm=batch"))
    monkeypatch.setattr(choices, "compiling_pays", lambda *_: (True, "it is long"))
    no_compiler(monkeypatch, error)
    fell_back = train(compose(tiny_run("norm=batch", f"runs_dir={tmp_path / 'other'}")), [])
    assert f"training without torch.compile, which failed: {reason}\n" in capsys.readouterr().err
    assert f"torch.compile failed: {reason}\n" in (fell_back.path / "log.txt").read_text()
    assert logged(fell_back.path) == logged(plain.path)


def test_a_requested_compiler_that_does_not_work_is_three_lines(tiny_run, monkeypatch):
    no_compiler(monkeypatch, RuntimeError("no working C++ compiler\nand more"))
    with pytest.raises(ConfigError, match=r"no working C\+\+ compiler") as caught:
        run(tiny_run("train.compile=on"))
    assert "train.compile=off" in str(caught.value)
