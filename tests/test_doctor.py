"""`doctor`: what it finds, what it says to do, what it never shows."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path

import pytest

from nexus_ablate import errors, gpus
from nexus_ablate.cli import doctor, main
from nexus_ablate.cli.doctor import MachineCheck, checks, device, directory, packages, shared, slurm, wandb


def tool(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Commands that are faked, and none of the machine's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return lambda name, script="exit 0": tool(folder, name, script)


@pytest.fixture
def importable(monkeypatch):
    """Packages that can be imported, which takes seconds to see."""
    monkeypatch.setattr(doctor, "import_error", lambda modules: ("", ""))


def test_this_machine_is_ready_and_every_line_says_how_it_is(capsys, tmp_path):
    assert main(["doctor", str(tmp_path)]) == errors.OK
    lines = capsys.readouterr().out.strip().splitlines()
    assert {line.split()[0] for line in lines} <= {"ready", "missing"}
    for name in ("packages", "device", "runs", "W&B", "C++ compiler", "SLURM"):
        assert any(f" {name}" in line for line in lines), name
    assert all("->" in line for line in lines if line.startswith("missing")), "what is missing can be fixed"


def test_json_says_the_same(importable, capsys, tmp_path):
    assert main(["doctor", "--json", str(tmp_path)]) == errors.OK
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] is True
    assert [check["name"] for check in report["checks"]] == [check.name for check in checks(tmp_path)]


def test_keys_are_never_shown(importable, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2 + "01234567")
    for flags in ([], ["--json"]):
        main(["doctor", *flags, str(tmp_path)])
    said = "".join(capsys.readouterr())
    assert "0123456789" not in said
    assert "a key is present: runs are mirrored" in said


def test_a_directory_that_cannot_hold_runs_is_what_stops_everything(importable, capsys, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert directory("runs", tmp_path / "new" / "runs", "").ready, "it need not be there yet"
    assert not (tmp_path / "new").exists()
    assert main(["doctor", str(blocked)]) == errors.CONFIG
    assert "a file is where a directory is needed  -> runs_dir=DIR" in capsys.readouterr().out
    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", lambda **_: (_ for _ in ()).throw(PermissionError(13, "no")))
    assert main(["doctor", str(tmp_path)]) == errors.CONFIG
    said = capsys.readouterr().out
    assert "runs_dir=DIR" in said
    assert "fix this before training any run: runs" in said


def test_a_directory_inside_one_that_may_not_be_read_is_missing(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    check = directory("runs", tmp_path / "new", "runs_dir=DIR")
    assert (check.ready, check.need) == (False, True) and "Permission denied" in check.detail


def test_little_space_is_missing_space(tmp_path, monkeypatch):
    usage = os.statvfs(tmp_path)
    free = usage.f_bavail * usage.f_frsize
    monkeypatch.setattr(doctor, "LITTLE_SPACE", free * 2)
    check = directory("runs", tmp_path, "runs_dir=DIR")
    assert not check.ready
    assert check.need


def test_a_package_out_of_bounds_is_named_with_the_command_that_fixes_it(monkeypatch):
    versions = {"torch": "2.4.0"}
    real = metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: versions.get(name) or real(name))
    (bad,) = packages()
    assert (bad.name, bad.detail, bad.ready, bad.need) == ("torch", "2.4.0", False, True)
    assert bad.fix.startswith("pip install 'torch")


def test_a_package_that_cannot_be_imported_is_named_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import numpy.nowhere")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor.import_error(("json", "broken", "absent"))[0] == "broken"
    assert doctor.import_error(("json",)) == ("", "")
    (tmp_path / "endless.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "IMPORT_SECONDS", 2.0)
    assert doctor.import_error(("json", "endless")) == ("endless", "it takes more than 2 s")
    monkeypatch.setattr(doctor, "import_error", lambda modules: ("broken", "No module named 'numpy.nowhere'"))
    (check,) = packages()
    assert (check.name, check.ready, check.need) == ("broken", False, True)
    assert "numpy.nowhere" in check.detail and check.fix == "pip install --force-reinstall broken"


def test_gpus_that_torch_cannot_use_are_reported(tools, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.13.0+cpu")
    check = device()
    assert not check.ready
    assert "built for the CPU" in check.detail
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "2.13.0")
    gpus.described_gpus.cache_clear()
    tools("nvidia-smi", "printf 'Some GPU, 9.0, 81920\\nSome GPU, 9.0, 81920\\n'")
    check = device()
    gpus.described_gpus.cache_clear()
    assert check.ready
    assert check.detail == "2 GPUs (Some GPU, 80 GiB, Some GPU, 80 GiB)"


def test_without_a_compiler_torch_compile_is_reported_as_unavailable(importable, tools, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    compiler = by_name(checks(tmp_path))["C++ compiler"]
    assert not compiler.ready and "train.compile=off" in compiler.fix
    tools("clang++")
    assert by_name(checks(tmp_path))["C++ compiler"].detail == "clang++"


def test_a_chosen_mode_is_reported(monkeypatch, tmp_path):
    for variable in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    assert wandb().detail == "no key: runs are saved in files only"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb().detail == "no key: offline copies"


def by_name(described) -> dict[str, MachineCheck]:
    return {check.name: check for check in described}


def test_a_cluster_is_described_by_its_partitions(tools, tmp_path):
    for name in ("sbatch", "squeue", "scontrol"):
        tools(name)
    asks = "--format=%R (%D nodes, %c cores and %m MB each, %G, %a)"
    tools("sinfo", f"test \"$2\" = '{asks}' && echo 'low (2 nodes, gpu:2, up)'; echo 'high (2 nodes, (null), up)'")
    (check,) = slurm(tmp_path, submit=False)
    assert check.detail == "partitions low (2 nodes, gpu:2, up), high (2 nodes, no GPUs, up)" and not check.need


def test_a_job_looks_for_a_file(tools, tmp_path):
    tools("srun", 'for last; do :; done; test "$1" = --ntasks=1 -a -e "$last"')
    assert shared(tmp_path).ready
    tools("srun", "echo 'srun: error: Unable to allocate resources' >&2; exit 1")
    assert "Unable to allocate" in shared(tmp_path).detail
    assert not list(tmp_path.glob(".doctor*"))


def test_a_job_that_never_starts_is_no_traceback(tools, tmp_path, monkeypatch):
    tools("srun", "exec /bin/sleep 60")
    monkeypatch.setattr(doctor, "SRUN_SECONDS", 0.2)
    check = shared(tmp_path)
    assert not check.ready and "srun does not answer" in check.detail
