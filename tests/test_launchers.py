"""Hydra's launchers, the study queue and the GPUs of one machine: bad jobs, killed drivers, nothing lost."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.launch import hydra, local, multirun
from nexus_ablate.launch.jobs import JobResult
from nexus_ablate.launch.launch import launch
from nexus_ablate.runs import find_runs, read_run
from tests.faults.bench import logged
from tests.test_study_queue import nexus, start
from tests.trial_norm import BAD, WORDS, write_plugin


@pytest.fixture
def plugin(tmp_path):
    return str(write_plugin(tmp_path / "plugin"))


SETTINGS = {"joblib": ["hydra.launcher.n_jobs=2"], "pool": ["hydra.launcher.workers=2"]}
"""What lets a launcher run two jobs at a time. `pool` is a plugin of these tests."""


@pytest.fixture(autouse=True)
def pool_launcher(monkeypatch):
    path = [str(Path(__file__).with_name("pool_launcher")), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))


def launched_by(launcher):
    """Overrides for one of Hydra's launchers."""
    return [f"hydra/launcher={launcher}", *SETTINGS.get(launcher, [])]


def parts(runs_dir):
    """The runs by the part that they were given."""
    return {(run.config or {})["norm"]["part"]: run for run in map(read_run, find_runs([runs_dir]))}


def good_ones_finished_and_bad_ones_are_reported(done, runs_dir, requested):
    assert done.returncode == errors.BUG, done.stderr
    result, printed = parts(runs_dir), " ".join(done.stderr.split())
    assert {part: run.state for part, run in result.items()} == {
        part: "failed" if part in BAD else "finished" for part in requested
    }, done.stderr
    for part in set(requested) & set(BAD):
        reason = result[part].status["reason"]
        assert WORDS[part] in reason
        assert " ".join(reason.split()[:4]) in printed
        assert reason in (result[part].path / "log.txt").read_text()


# ------------------------------------------------------------------------------------------------------ bad jobs (R8)


@pytest.mark.slow
def test_a_multirun_survives_runs_that_fail_and_that_end_their_process(tiny_run, plugin, tmp_path):
    requested = (11, 10, 0)
    arguments = ["-m", *tiny_run("norm=trial", "train.steps=6"), f"norm.part={','.join(map(str, requested))}"]
    done = nexus(arguments, plugin, cwd=tmp_path)
    good_ones_finished_and_bad_ones_are_reported(done, tmp_path / "runs", requested)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("launcher", ["basic", "joblib", "pool", "queue"])
def test_of_twenty_jobs_the_good_ones_finish_and_the_bad_ones_are_listed(
    tiny_run, plugin, tmp_path, launcher, monkeypatch
):
    monkeypatch.setenv("TRIAL_IN_A_HURRY", "1")
    requested, sweep = range(20), ",".join(map(str, range(20)))
    if launcher == "queue":
        base = [text for text in tiny_run("norm=trial", "train.steps=6") if text != "train.threads=1"]
        arguments = ["study", "mine", f"vary.norm.part={sweep}", "seeds=0-0", *base, "--workers", "2"]
    else:
        arguments = ["-m", *tiny_run("norm=trial", "train.steps=6"), f"norm.part={sweep}", *launched_by(launcher)]
    done = nexus(arguments, plugin, cwd=tmp_path)
    good_ones_finished_and_bad_ones_are_reported(done, tmp_path / "runs", requested)


@pytest.mark.slow
def test_without_a_process_apart_a_bad_run_takes_the_launcher_with_it(tiny_run, plugin, tmp_path):
    code = (
        "import sys\nfrom nexus_ablate.launch import local\n"
        "local.Worker.train = lambda self, task, *_: task.train()\n"
        "from nexus_ablate.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    arguments = ["--plugin", plugin, "-m", *tiny_run("norm=trial", "train.steps=4"), "norm.part=11,9", "--workers", "1"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 7
    assert 9 not in parts(tmp_path / "runs")


@pytest.mark.slow
def test_joblib_trains_as_basic_does_and_two_at_a_time(tiny_run, tmp_path):
    sweep = ["-m", *tiny_run("train.steps=6"), "norm=rms,layer"]
    done = nexus([*sweep, *launched_by("joblib")], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    both = [read_run(path) for path in find_runs([tmp_path / "runs"])]
    assert {run.state for run in both} == {"finished"}
    assert len({run.status["pid"] for run in both}) == 2


def test_a_launcher_finds_a_folder_with_an_apostrophe(tiny_run, tmp_path, monkeypatch):
    places = []
    monkeypatch.setattr(hydra, "train_apart", lambda task: places.append(task.overrides) or JobResult(errors.OK))
    (tmp_path / "bob's").mkdir()
    monkeypatch.chdir(tmp_path / "bob's")
    words = [text for text in tiny_run() if not text.startswith("runs_dir")]
    main(["-m", *words, "norm=rms,layer", *launched_by("joblib"), "hydra.launcher.n_jobs=1"])
    folders = {compose([text]).runs_dir for overrides in places for text in overrides if text.startswith("runs_dir")}
    assert len(places) == 2 and folders == {str(tmp_path / "bob's/runs")}


def test_after_a_signal_a_launcher_begins_no_further_run(tmp_path, monkeypatch):
    monkeypatch.setattr(hydra, "_stopped_by", "SIGTERM")
    result = hydra.train_apart(SimpleNamespace())
    assert result == JobResult(errors.PREEMPTED, "not started, because of SIGTERM")


def test_a_signal_to_a_job_in_this_process_ends_its_launch_and_not_the_next_one(tiny_run, monkeypatch, capsys):
    class Worker(local.Worker):
        def train(self, task, must_stop):
            if is_signalled:
                signal.raise_signal(signal.SIGTERM)
            return JobResult(errors.PREEMPTED if must_stop() else errors.OK)

    monkeypatch.setattr(hydra, "_worker", Worker())
    monkeypatch.setattr(hydra, "_stopped_by", "")
    sweep = multirun.study_of(tiny_run("norm=rms,layer"))
    for is_signalled, status in ((True, errors.PREEMPTED), (False, errors.OK)):
        assert launch(*sweep, hydra.HydraLauncher("joblib", ("hydra.launcher.n_jobs=1",))) == status
        assert ("stopped (SIGTERM)" in capsys.readouterr().err) == is_signalled


@pytest.mark.parametrize(("handler", "status"), [(signal.SIG_IGN, errors.OK), (signal.SIG_DFL, errors.PREEMPTED)])
def test_a_closed_terminal_ends_a_launcher_unless_nohup_ignores_it(tiny_run, monkeypatch, handler, status):
    def trained(task):
        signal.raise_signal(signal.SIGHUP)
        return JobResult(errors.OK)

    monkeypatch.setattr(hydra, "train_apart", trained)
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert main(["-m", *tiny_run(), "norm=rms,layer", *launched_by("joblib"), "hydra.launcher.n_jobs=1"]) == status
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_signal_saves_the_run_of_a_multirun_and_the_same_command_resumes(tiny_run, plugin, tmp_path):
    arguments = ["-m", *tiny_run("norm=trial", "train.steps=12"), "norm.part=9,7", "--workers", "1"]
    driver = start(arguments, plugin)
    end = time.monotonic() + 60
    while not (logs := list((tmp_path / "runs").glob("*/*/*/metrics.jsonl"))) or len(logs[0].read_bytes()) < 2000:
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(driver.pid, signal.SIGTERM)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == errors.PREEMPTED, said
    assert {part: run.state for part, run in parts(tmp_path / "runs").items()} == {9: "preempted"}, said


def test_a_worker_whose_peak_memory_cannot_be_reset_trains_one_run(monkeypatch):
    left = []
    monkeypatch.setattr(local, "reset_peak_memory", lambda: False)
    monkeypatch.setattr(local.connection, "wait", lambda *_: True)
    worker = local.Worker()
    worker._process = SimpleNamespace(is_alive=lambda: True, sentinel=None, join=lambda: left.append("joined"))
    worker._pipe = SimpleNamespace(send=lambda _: 0, poll=lambda: True, recv=lambda: JobResult(0), close=lambda: 0)
    assert worker.train(SimpleNamespace(), lambda: False).status == 0
    assert left == ["joined"]


def test_a_run_that_is_stopped_while_there_is_nothing_to_save_is_not_said_to_have_no_step(monkeypatch):
    """A worker ends at once on SIGTERM before the first step, and in evaluations after the last one."""
    waited = iter([[], ["sentinel"]])
    monkeypatch.setattr(local.connection, "wait", lambda *_: next(waited))
    worker = local.Worker()
    worker._process = SimpleNamespace(
        is_alive=lambda: True, sentinel=None, join=lambda: 0, terminate=lambda: 0, exitcode=-signal.SIGTERM
    )
    worker._pipe = SimpleNamespace(send=lambda _: 0, poll=lambda: False, close=lambda: 0)
    result = worker.train(SimpleNamespace(path=Path("run")), lambda: True)
    assert result == JobResult(errors.PREEMPTED, "stopped before or after its training")


def test_an_error_while_runs_are_trained_ends_every_worker_and_is_the_exit_status(tiny_run, monkeypatch, capsys):
    closed = []

    class Worker(local.Worker):
        def train(self, task, must_stop, limit):
            if task.folder == "baseline":
                return JobResult(errors.OK)
            raise errors.StorageError("cannot write status.json", "No space left on device", "free some space")

        def close(self):
            closed.append(self.log.name)

    monkeypatch.setattr(local, "Worker", Worker)
    assert main(["study", "mine", "vary.norm=layer", "seeds=0,1", *tiny_run(), "--workers", "2"]) == errors.STORAGE
    assert sorted(closed) == ["worker0.log", "worker1.log"]
    assert "error: cannot write status.json" in capsys.readouterr().err


def test_a_signal_while_the_workers_close_is_obeyed_before_the_next_setting(tiny_run, monkeypatch, capsys):
    trained = []

    class Worker(local.Worker):
        def train(self, task, must_stop, limit):
            trained.append(task.folder)
            return JobResult(errors.OK)

        def close(self):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(local, "Worker", Worker)
    words = ["vary.norm=layer", "seeds=0", "settings.one=bias=on", "settings.two=bias=off", "--workers", "1"]
    assert main(["study", "mine", *words, *tiny_run()]) == errors.PREEMPTED
    assert trained == ["baseline", "norm=layer"]
    assert "stopped (SIGTERM)" in capsys.readouterr().err


def test_a_worker_whose_process_cannot_start_is_closed_without_another_error(monkeypatch):
    def start(self):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(local.SpawnProcess, "start", start)
    worker = local.Worker()
    with pytest.raises(OSError, match="temporarily unavailable"):
        worker.train(SimpleNamespace(), lambda: False)
    worker.close()


# ------------------------------------------------------------------------------------------------ studies by launchers


def study_of(tiny_run, *overrides):
    """A study of an arm that takes a second, whose folder comes last."""
    base = [text for text in tiny_run("norm=trial", *overrides) if not text.startswith("runs_dir=")]
    return ["study", "mine", "vary.norm.part=9", "seeds=0,1", *base]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "pool"])
def test_the_runs_of_a_study_are_the_same_by_a_launcher_and_by_the_queue(tiny_run, tmp_path, launcher):
    by_launcher = ["--launcher", launcher, *SETTINGS[launcher]]
    base = [text for text in tiny_run() if not text.startswith("runs_dir=")]
    study = ["study", "mine", "vary.norm=layer", "seeds=0,1", "lr_grid=1e-3,2e-3,4e-3", *base]
    done = nexus([*study, "runs_dir=launched", *by_launcher], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert nexus([*study, "runs_dir=queued", "--workers", "1"], cwd=tmp_path).returncode == 0
    runs = find_runs([tmp_path / "launched"])
    assert [path.relative_to(tmp_path / "launched") for path in runs] == [
        path.relative_to(tmp_path / "queued") for path in find_runs([tmp_path / "queued"])
    ]
    assert len(runs) == 2 * 2 * 3, "each seed at each rate"
    for path in runs:
        assert logged(path) == logged(tmp_path / "queued" / path.relative_to(tmp_path / "launched"))
        assert (read_run(path).env or {})["launcher"] == launcher
    again = nexus([*study, "runs_dir=launched", *by_launcher], cwd=tmp_path)
    assert again.returncode == 0 and "nothing to run" in again.stderr


@pytest.mark.slow
def test_a_worker_of_a_launcher_is_killed_and_the_same_command_resumes_its_run(tiny_run, plugin, tmp_path, monkeypatch):
    study = [*study_of(tiny_run, "train.steps=60"), f"runs_dir={tmp_path / 'killed'}"]
    study += ["--launcher", "joblib", *SETTINGS["joblib"]]
    driver = start(study, plugin)
    end = time.monotonic() + 100
    while (
        not (slow := list((tmp_path / "killed").glob("mine/norm.part=9/*/metrics.jsonl"))) or not slow[0].stat().st_size
    ):
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.5)  # beyond its first checkpoint
    trained_by = read_run(slow[0].parent).status["pid"]
    (line,) = [line for line in Path(f"/proc/{trained_by}/status").read_text().splitlines() if line.startswith("PPid:")]
    os.kill(int(line.split()[1]), signal.SIGKILL)
    _, said = driver.communicate(timeout=100)
    assert driver.returncode == errors.PREEMPTED, said
    assert "joblib gave up (TerminatedWorkerError" in said and "the same command launches what is missing" in said
    killed = read_run(slow[0].parent)
    assert killed.state in ("lost", "preempted") and 0 < killed.metrics()[-1]["step"] < 60
    done = nexus(study, plugin, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resuming from step" in (killed.path / "log.txt").read_text() + done.stdout + done.stderr
    undisturbed = [*study_of(tiny_run, "train.steps=60"), f"runs_dir={tmp_path / 'alone'}", "--workers", "1"]
    monkeypatch.setenv("TRIAL_IN_A_HURRY", "1")
    assert nexus(undisturbed, plugin).returncode == 0
    runs = find_runs([tmp_path / "killed"])
    assert len(runs) == 4
    for path in runs:
        assert logged(path) == logged(tmp_path / "alone" / path.relative_to(tmp_path / "killed"))


def test_a_run_that_its_launcher_could_not_start_says_why():
    from hydra.core.utils import JobReturn, JobStatus

    job = SimpleNamespace(state=lambda: ("missing", ""), result=lambda: JobResult(errors.PREEMPTED))
    failed = JobReturn(status=JobStatus.FAILED)
    failed.return_value = ValueError("no such node")
    result = hydra.result_from(job, failed)
    assert result.status == errors.BUG and "never started: ValueError: no such node" in result.reason
    assert hydra.result_from(job, None) == JobResult(errors.PREEMPTED, "not started")


# ------------------------------------------------------------------------------------------------ killed drivers (R9)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kills", [5, 50])
def test_a_driver_that_is_killed_again_and_again_ends_with_the_table_of_an_undisturbed_one(
    tiny_run, tmp_path, plugin, kills, monkeypatch
):
    """Each cycle kills the driver at a random moment of its life; an undisturbed cycle then finishes."""
    monkeypatch.setenv("TRIAL_IN_A_HURRY", "1")
    base = ["study", "mine", "vary.norm.part=1,2,3,4,5,6,7", "seeds=0,1", "--workers", "1"]
    base += [text for text in tiny_run("norm=trial", "train.steps=40") if text != "train.threads=1"]
    runs_dir, moments = tmp_path / "runs", random.Random(0)
    kept: dict = {}
    for _ in range(kills):
        driver = start(base, plugin)
        try:
            driver.communicate(timeout=moments.uniform(0.2, 8.0))
        except subprocess.TimeoutExpired:
            os.kill(driver.pid, signal.SIGKILL)
            driver.communicate(timeout=60)
        finished = (
            [path for path in find_runs([runs_dir]) if read_run(path).state == "finished"] if runs_dir.exists() else []
        )
        for path in finished:
            now = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in path.iterdir() if f.is_file()}
            assert kept.setdefault(path, now) == now, "a finished run was touched"
    assert find_runs([runs_dir]), "a driver got as far as a run"
    done = nexus(base, plugin)
    assert done.returncode == 0, done.stderr
    alone = [text.replace(str(runs_dir), str(tmp_path / "alone")) for text in base]
    assert nexus(alone, plugin).returncode == 0
    runs = find_runs([runs_dir])
    assert len(runs) == 16
    for path in runs:
        assert logged(path) == logged(tmp_path / "alone" / path.relative_to(runs_dir))


# ------------------------------------------------------------------------------------------ launchers that are not here


@pytest.mark.parametrize("words", [["hydra/launcher=ray"], ["--launcher", "ray"]])
@pytest.mark.parametrize("command", [["-m", "norm=layer,rms"], ["study", "norms"]])
@pytest.mark.parametrize("has_other_plugins", [True, False])
def test_a_launcher_that_is_not_installed_is_named_with_its_package(
    command, words, has_other_plugins, monkeypatch, capsys
):
    def find_spec(name: str) -> None:
        if not has_other_plugins:
            raise ModuleNotFoundError("No module named 'hydra_plugins'")

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert main([*command, *words]) == errors.CONFIG
    assert "try: pip install 'hydra-ray-launcher'" in capsys.readouterr().err


def test_the_processes_of_a_launcher_take_the_gpus_in_turn(monkeypatch):
    from hydra.core.hydra_config import HydraConfig

    taken = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setattr(hydra, "train_apart", lambda task: taken.append(hydra._worker.gpu))
    for number in (0, 1, 2):
        current = SimpleNamespace(job=SimpleNamespace(num=number), overrides=SimpleNamespace(task=[]))
        monkeypatch.setattr(HydraConfig, "get", lambda current=current: current)
        monkeypatch.setattr(hydra._worker, "gpu", "")
        hydra.train_current({(): None}, SimpleNamespace(train=SimpleNamespace(device="auto")))
    assert taken == ["2", "5", "2"]
