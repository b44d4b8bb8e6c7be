"""The defaults on a GPU, on machines whose nvidia-smi is a script of this test."""

import json
import re

import pytest
import torch
from conftest import TINY

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose, differences
from nexus_ablate.config.resolve import from_values
from nexus_ablate.gpus import described_gpus
from nexus_ablate.launch.launch import plan
from nexus_ablate.runs import arm_name, find_runs, identity, read_run
from nexus_ablate.study.definition import read_study
from nexus_ablate.study.record import save
from nexus_ablate.training.session import train

H100, A100, V100 = "NVIDIA H100 80GB HBM3, 9.0, 81559", "NVIDIA A100-SXM4-40GB, 8.0, 40960", "Tesla V100, 7.0, 16384"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Moves to a machine with these GPUs, or without any."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def move(*gpus):
        script = folder / "nvidia-smi"
        lines = "\n".join(f"echo '{gpu}'" for gpu in gpus)
        script.write_text(f"#!/bin/sh\n{lines or 'exit 9'}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus)))))
        described_gpus.cache_clear()

    yield move
    described_gpus.cache_clear()


def hash_of(*overrides):
    return identity(compose(list(overrides)).science(), "data", "code", {}).config_hash


def explained(capsys, *overrides):
    assert main(["explain", "--json", *overrides]) == 0
    return json.loads(capsys.readouterr().out)["execution"]


@pytest.mark.parametrize(
    ("gpus", "device", "precision"),
    [
        ([H100], "auto", "bf16"),
        ([A100], "cuda:0", "bf16"),
        ([H100], "cpu", "fp32"),
        ([V100], "auto", "fp32"),
        ([H100, V100], "auto", "fp32"),  # a run may get either
        ([], "auto", "fp32"),
        ([], "cuda", "fp32"),  # nvidia-smi does not answer
    ],
)
def test_precision_is_bf16_where_every_gpu_multiplies_in_it(machine, capsys, gpus, device, precision):
    machine(*gpus)
    assert compose([f"train.device={device}"]).train.precision == precision
    said = explained(capsys, f"train.device={device}")["precision"]
    assert said.startswith(f"{precision} products") and f"train.precision=auto is {precision} here" in said
    assert ("without TF32" in said) == (device != "cpu" and (bool(gpus) or device == "cuda"))


def test_a_run_on_a_cpu_is_the_run_that_it_was_and_another_than_one_on_a_gpu(machine):
    machine()
    on_cpu = hash_of("norm=layer")
    assert on_cpu == hash_of("norm=layer", "train.precision=fp32")
    bf16 = hash_of("norm=layer", "train.precision=bf16")
    machine(H100)
    assert hash_of("norm=layer") == bf16 != on_cpu
    assert hash_of("norm=layer", "train.device=cpu") == on_cpu
    assert hash_of("norm=layer", "train.precision=fp32") == on_cpu


def test_a_run_has_one_name_wherever_auto_chose_its_precision(machine):
    names = []
    for gpus in ([], [H100]):
        machine(*gpus)
        names.append(arm_name(differences(compose(["norm=layer", "train.precision=bf16"]))))
        names.append(arm_name(differences(compose(["norm=layer", "train.precision=fp32"]))))
    names.append(arm_name(differences(compose(["norm=layer"]))))
    assert names == ["norm=layer,train.precision=bf16", "norm=layer"] * 2 + ["norm=layer,train.precision=bf16"]


def test_what_auto_meant_is_saved_and_read_again_on_any_machine(machine):
    machine(H100)
    saved = compose([]).nested()
    assert saved["train"]["precision"] == "bf16"
    machine()
    assert from_values(saved).train.precision == "bf16"


def test_a_study_keeps_the_precision_of_its_first_launch_on_every_machine(machine, tmp_path):
    words = ["mine", "vary.norm=layer", *TINY, f"runs_dir={tmp_path / 'runs'}", "seeds=0,1"]
    machine(H100)
    first = plan(*read_study(words))
    first.folder.mkdir(parents=True)
    save(first.study, first.folder)
    machine()
    for again in (words, ["mine", f"runs_dir={tmp_path / 'runs'}"], [*words, "train.precision=bf16"]):
        assert [job.path for job in plan(*read_study(again)).jobs] == [job.path for job in first.jobs]
    with pytest.raises(errors.ConfigError, match="was launched otherwise") as refused:
        plan(*read_study([*words, "train.precision=fp32"]))
    assert "train.precision: bf16 -> fp32" in refused.value.got


def test_a_job_of_a_study_has_its_precision_on_every_machine(machine, tmp_path):
    machine()
    words = ["mine", "vary.norm=layer", "vary.train.precision=bf16", *TINY, f"runs_dir={tmp_path}"]
    jobs = plan(*read_study(words)).jobs
    machine(H100)
    assert [compose(job.overrides).train.precision for job in jobs] == [job.config.train.precision for job in jobs]
    assert {job.config.train.precision for job in jobs} == {"fp32", "bf16"}


def test_a_gpu_that_pytorch_cannot_use_is_an_error_and_not_a_run_on_the_cpu(machine, tiny_run, tmp_path, monkeypatch):
    machine(H100)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    overrides = [text for text in tiny_run() if text != "train.device=cpu"]
    with pytest.raises(errors.ConfigError, match="PyTorch cannot use the GPU") as refused:
        train(compose(overrides), quiet=True)
    assert torch.__version__ in refused.value.got and "train.device=cpu" in refused.value.fix
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_explain_says_whether_a_gpu_would_compile_and_hold_all_logits(machine, capsys):
    gpt2 = "preset=gpt2", "model=base", "vocab_size=50304", "data.tokenizer=bytes"
    machine(H100)
    short, long = (explained(capsys, *gpt2, f"train.steps={steps}") for steps in (100, 20000))
    assert re.match(r"not compiled \(would save about \d+ s and take 34\)", short["compile"])
    assert re.match(r"compiled \(would save about \d+ s and take 34\)", long["compile"])
    assert long["loss"].startswith("logits whole (3,144 MiB") and long["device"] == "NVIDIA H100 80GB HBM3"
    assert short["loss"].startswith("logits in chunks"), "uncompiled, several copies of them would be held"
    machine("NVIDIA L4, 8.9, 4096")
    assert explained(capsys, *gpt2, "train.steps=200000")["loss"].startswith("logits in chunks")
    machine()
    assert explained(capsys, *gpt2, "train.compile=on")["compile"] == "compiled (train.compile=on)"


def test_a_run_says_before_its_first_step_how_it_is_executed(tiny_run, tmp_path, capsys):
    assert main(tiny_run("train.steps=2")) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(
        r"execution fp32 products; not compiled \(\S+ FLOPs; compiling pays from \S+\); logits whole", said
    )
    (path,) = find_runs([tmp_path / "runs"])
    assert "execution: fp32 products" in (path / "log.txt").read_text()
    assert (read_run(path).config or {})["train"]["precision"] == "fp32"
