import os

import pytest
import torch

from nexus_ablate.config.compose import compose
from nexus_ablate.errors import ConfigError
from nexus_ablate.training.device import (
    IdleCores,
    choose_device,
    choose_threads,
    precision_context,
    share_cores_politely,
)
from nexus_ablate.training.session import train


class Machine(IdleCores):
    """A machine of four cores whose counters a test moves."""

    def __init__(self, wall, others, own):
        self._readings = [(0.0, 0.0, 0.0), (wall, others + own, own)]
        super().__init__()

    def _read(self):
        return self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]

    @staticmethod
    def cores():
        return 4


def test_our_own_work_does_not_count_as_somebody_else_s():
    assert Machine(wall=10, others=0, own=25).count() == 4


def test_cores_that_others_keep_busy_are_not_taken():
    assert Machine(wall=10, others=20, own=10).count() == 2
    assert Machine(wall=10, others=100, own=0).count() == 1  # never none


def test_too_short_a_look_or_a_system_without_counters_counts_all_cores(monkeypatch):
    assert Machine(wall=0.01, others=5, own=0).count() == 4
    machine = Machine(wall=10, others=20, own=0)
    monkeypatch.setattr(machine, "_start", None)
    assert machine.count() == 4


def test_automatic_threads_are_the_free_cores_and_say_so_when_they_are_fewer(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert choose_threads("auto", Machine(10, 0, 5)) == (4, "")
    threads, note = choose_threads("auto", Machine(10, 20, 5))
    assert threads == 2
    assert note == "2 of 4 cores are idle: training with 2 threads"
    assert choose_threads("auto", Machine(10, 30, 5))[1] == "1 of 4 cores is idle: training with 1 thread"


def test_automatic_threads_keep_to_what_a_launcher_set(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose_threads("auto", Machine(10, 0, 5)) == (2, "")
    assert choose_threads("auto", Machine(10, 30, 5))[0] == 1


def test_a_slurm_job_has_the_cores_that_it_was_given(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    assert IdleCores.cores() == 1
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4096")
    allowed = IdleCores.cores()
    monkeypatch.delenv("SLURM_CPUS_ON_NODE")
    assert allowed == IdleCores.cores(), "never more than there are"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({}, 8),
    ],
)
def test_a_container_has_the_cores_of_its_cpu_quota(monkeypatch, tmp_path, files, cores):
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    monkeypatch.setattr("nexus_ablate.training.device._CGROUP", tmp_path)
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert IdleCores.cores() == cores


def test_asking_for_more_threads_than_are_free_is_obeyed_with_a_warning():
    threads, warning = choose_threads(4, Machine(10, 20, 5))
    assert threads == 4
    assert "slower" in warning
    assert choose_threads(2, Machine(10, 20, 5)) == (2, "")


def test_the_real_counters_are_read():
    assert 1 <= IdleCores().count() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("name", ["cuda:99", "mps", "nonsense"])
def test_a_device_that_is_not_there_is_a_configuration_error(name):
    if name == "mps" and torch.backends.mps.is_available():
        return
    with pytest.raises(ConfigError, match=r"train\.device"):
        choose_device(name)


def test_cuda_graphs_without_cuda_are_refused_before_anything_is_made(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="CUDA graphs need a GPU"):
        compose(tiny_run("train.compile=graphs"))  # which says train.device=cpu
    with pytest.raises(ConfigError, match="CUDA graphs need a GPU") as caught:
        train(compose(tiny_run("train.compile=graphs", "train.device=auto")), [])
    assert "train.compile=on" in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_the_cpu_is_always_there():
    assert choose_device("cpu").type == "cpu"
    assert choose_device("auto").type in ("cpu", "cuda", "mps")


def test_low_precision_is_autocast_and_float32_is_nothing():
    x = torch.ones(2, 2)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with precision_context(precision, "cpu"):
            assert (x @ x).dtype == dtype


def test_threads_wait_passively_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    share_cores_politely()
    assert os.environ["GOMP_SPINCOUNT"] == "77"
    del os.environ["GOMP_SPINCOUNT"]
    share_cores_politely()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
