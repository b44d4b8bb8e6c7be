"""Compiled runs: how many programs, whichever runs a process trained before, and what they compute."""

import functools
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torch._dynamo
from faults.bench import logged
from options import EVERY_OPTION

from nexus_ablate.config.compose import compose
from nexus_ablate.launch.launch import plan
from nexus_ablate.launch.local import Worker
from nexus_ablate.launch.multirun import study_of
from nexus_ablate.launch.worker import Task
from nexus_ablate.measure.probe import evaluation_mode
from nexus_ablate.model import build_model
from nexus_ablate.runs import read_run
from nexus_ablate.training import device, step
from nexus_ablate.training.session import train
from nexus_ablate.training.step import Step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own import

ARMS = [
    "norm=rms",
    "norm=layer",
    "norm=batch",
    "norm=none",
    "placement=post",
    "placement=hybrid",
    "position=alibi",
    "position=fire",
    "normalizer=sink",
    "normalizer=sigmoid",
    "qk_norm=rms",
    "ffn=gelu",
]
ONCE = {"compiled": True, "programs": 1, "graph_breaks": 0}


@pytest.fixture
def traced(monkeypatch):
    """torch.compile without its slow half: Dynamo's programs, run as they were written."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()


@pytest.fixture
def arm(tiny_run):
    """Overrides of an arm whose last batch of an evaluation has fewer windows than the first."""
    return lambda *overrides: tiny_run("model.context=64", "train.eval_tokens=8256", "train.steps=4", *overrides)


def compiler_facts(overrides):
    summary = train(compose(overrides), overrides, quiet=True).summary
    return {name: summary[name] for name in ONCE}


def trained(arms, folder, overrides):
    """Rows of each arm, all trained by one worker process in this order; nothing that a clock says."""
    worker, result = Worker(1, None, folder / "worker.log"), {}
    for name in arms:
        (job,) = plan(*study_of([*overrides, name])).jobs
        answer = worker.train(Task.of(job, {}), lambda: False)
        assert answer.status == 0, answer.reason
        record = read_run(answer.path)
        rows = logged(answer.path) + logged(answer.path, "probes.jsonl")
        result[name] = rows, {key: record.summary[key] for key in ONCE}
    worker.close()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [True, False])
def test_a_run_has_programs_of_its_own_only_where_those_of_other_arms_are_forgotten(traced, arm, monkeypatch, forgets):
    """Dynamo keeps 8 programs per function, which eight arms use up; here it keeps 1, and one arm uses it up."""
    step.forget_programs()
    if not forgets:
        monkeypatch.setattr(step, "forget_programs", torch._dynamo.utils.counters.clear)
    with torch._dynamo.config.patch(recompile_limit=1):
        facts = [compiler_facts(arm("train.compile=on", name)) for name in ("norm=none", "norm=dyt")]
    assert facts == [ONCE, ONCE if forgets else ONCE | {"programs": 0}]


@pytest.mark.slow
def test_twelve_arms_in_one_process_have_one_program_each_and_no_graph_break(traced, arm):
    facts = {name: compiler_facts(arm("train.compile=on", name)) for name in ARMS}
    assert facts == dict.fromkeys(ARMS, ONCE)


@pytest.mark.slow
@pytest.mark.parametrize("override", EVERY_OPTION)
def test_every_option_is_one_program_for_training_and_on_a_cpu_none_for_evaluation(traced, tiny, override):
    rows = np.random.default_rng(0).integers(0, 256, (4, 9))
    config = tiny("train.compile=on", "train.batch_size=4", "train.device=cpu", *override.split())
    stepper = Step(config, build_model(config).train(), 3, lambda number: rows)
    step.forget_programs()
    stepper.compile(rows)
    for number in range(3):
        stepper.take(number, rows)
        with evaluation_mode(stepper.model):
            stepper.window_losses(rows)
    assert step.compiled_programs() == {"programs": 1, "graph_breaks": 0}


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["off", pytest.param("on", marks=pytest.mark.long)])
def test_what_an_arm_computes_does_not_depend_on_its_place_in_the_queue(arm, tmp_path, monkeypatch, compiled):
    results = []
    for folder, order in (("forth", ARMS), ("back", ARMS[::-1])):
        (tmp_path / folder).mkdir()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / folder / "programs"))
        overrides = arm(f"train.compile={compiled}", f"runs_dir={tmp_path / folder}")
        results.append(trained(order, tmp_path / folder, overrides))
    assert results[0] == results[1]
    assert {facts["compiled"] for _, facts in results[0].values()} == {compiled == "on"}


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.precision=bf16", "train.loss=chunked", "qk_norm=rms"],
        *(pytest.param([text], marks=pytest.mark.slow) for text in ("norm=rms", "train.loss=chunked")),
    ],
)
def test_a_compiled_step_holds_no_function_of_autograd_which_would_keep_its_programs_from_being_reused(tiny, overrides):
    graphs = []

    def backend(graph, inputs):
        graphs.append({str(node.target) for module in graph.modules() for node in module.graph.nodes})
        return graph.forward

    config = tiny("train.compile=on", *overrides)
    stepper = Step(config, build_model(config).train(), 3, lambda number: None)
    step.forget_programs()
    torch.compile(stepper.compute, backend=backend)(torch.zeros(2, 8, dtype=int), torch.zeros(16, dtype=int))
    assert len(graphs) == 1 and not [name for name in graphs[0] if "autograd" in name]


@pytest.mark.slow
def test_a_second_seed_takes_the_programs_of_the_first_from_the_cache(arm, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "programs"))
    counts = []
    for seed in range(2):
        train(compose(arm("train.compile=on", f"seed={seed}")), quiet=True)
        result = torch._dynamo.utils.counters["aot_autograd"]
        counts.append((result["autograd_cache_miss"], result["autograd_cache_hit"], result["autograd_cache_bypass"]))
    assert counts == [(1, 0, 0), (0, 1, 0)]


@pytest.mark.slow
def test_compiled_losses_are_those_of_eager_steps_within_a_hundred_thousandth(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "programs"))
    rows = np.random.default_rng(0).integers(0, 256, (100, 4, 33))
    losses = {}
    for compiled in ("on", "off"):
        config = tiny(f"train.compile={compiled}", "train.batch_size=4", "model.context=32", "train.device=cpu")
        stepper = Step(config, build_model(config).train(), 100, lambda number: rows[number])
        if stepper.compiled:
            stepper.compile(rows[0])
        for number in range(100):
            stepper.take(number, rows[number])
        losses[compiled] = [seen.loss for seen in stepper.read()]
    np.testing.assert_allclose(losses["on"], losses["off"], rtol=1e-5)


COMPILED_RUN = """
import sys
from nexus_ablate.training import device
device.COMPILE_FLOPS = 0
from nexus_ablate.config.compose import compose
from nexus_ablate.training.session import train
summary = train(compose(sys.argv[1:])).summary
print(summary["compiled"], summary["val_loss"])
"""


def started(overrides, cache_folder):
    """A process that trains a run which `train.compile=auto` compiles, with the compiler's cache in a folder."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache_folder)}
    command = [sys.executable, "-c", COMPILED_RUN, *overrides]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["a file", "read-only"])
def test_a_run_whose_compiler_cannot_use_its_cache_folder_says_so_and_trains(tiny_run, tmp_path, place):
    (tmp_path / "file").touch()
    folder = {"a file": tmp_path / "file" / "programs", "read-only": "/proc/programs"}[place]
    process = started(tiny_run("train.steps=2"), folder)
    printed, messages = process.communicate()
    assert process.returncode == 0, messages
    assert "training without torch.compile, which failed: [Errno " in messages
    assert printed.splitlines()[-1].startswith("False ")


@pytest.mark.slow
def test_two_processes_that_compile_the_same_program_at_once_both_train(tiny_run, tmp_path):
    runs = [tiny_run("train.steps=2", f"runs_dir={tmp_path / name}") for name in ("one", "two")]
    processes = [started(overrides, tmp_path / "programs") for overrides in runs]
    results = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    (one, two) = (printed.splitlines()[-1] for printed, _ in results)
    assert one == two and one.startswith("True ")


@pytest.mark.parametrize(
    ("arms", "compiles"), [("norm=layer,rms", True), ("train.steps=100,1920", False), ("model=femto,pico", False)]
)
def test_of_a_study_all_runs_are_compiled_or_none(tmp_path, monkeypatch, arms, compiles):
    monkeypatch.setattr(device, "cxx_compiler", lambda: "g++")
    base = ["data=stdlib", "data.tokenizer=bytes", "train.device=cpu", "seed=0,1", f"runs_dir={tmp_path}"]
    queued = plan(*study_of([*base, arms])).jobs
    assert len(queued) == 4
    assert {"train.compile=off" in job.overrides for job in queued} == {not compiles}


def test_memory_that_runs_out_is_not_taken_for_a_compiler_that_does_not_work(tiny, monkeypatch):
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[...] DefaultCPUAllocator: can't allocate memory: ..."),
    ):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(torch, "compile", lambda forward, fail=fail, **_: fail)
        for requested in ("on", "auto"):
            config = tiny(f"train.compile={requested}", "train.batch_size=2")
            stepper = Step(config, build_model(config).train(), 3, lambda number: None)
            with pytest.raises(RuntimeError) as caught:
                stepper.compile(np.zeros((2, 9), dtype=np.int64))
            assert caught.value is error


def test_the_compiler_s_advice_to_use_tf32_is_no_warning_of_a_run_and_other_warnings_are(tiny, monkeypatch):
    """On a GPU the compiler warns about every float32 product; here warnings are errors."""

    def compiled(words):
        def advise(forward, **_):
            return lambda *inputs: warnings.warn(words, stacklevel=1) or forward(*inputs)

        monkeypatch.setattr(torch, "compile", advise)
        config = tiny("train.compile=on", "train.batch_size=2")
        return Step(config, build_model(config).train(), 3, lambda number: None).compile(np.zeros((2, 9), np.int64))

    assert compiled("TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.") == ""
    with pytest.raises(UserWarning, match="something else"):
        compiled("something else")


def test_a_run_in_float32_uses_no_tf32_and_its_summary_says_so(tiny_run):
    torch.set_float32_matmul_precision("high")
    assert train(compose(tiny_run("train.steps=1")), quiet=True).summary["float32_matmul_precision"] == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
