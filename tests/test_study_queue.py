"""A study run, broken and resumed, in processes of its own."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from faults.bench import logged

from nexus_ablate import errors
from nexus_ablate.config.compose import compose
from nexus_ablate.launch.local import Places, mark_failed, places_for
from nexus_ablate.runs import find_runs, read_jsonl, read_run
from nexus_ablate.training.device import IdleCores
from nexus_ablate.training.session import train

CRASH = '''
import os, signal, time
from nexus_ablate.axes.norm import NORM, RMSNorm

@NORM.register("crash")
class Crash(RMSNorm):
    """RMSNorm until forward `at` in training; then the end, or a slow life, as `how` says."""

    def __init__(self, width, bias, site, *, how, at):
        super().__init__(width, bias, site, eps=1e-6, gain_init=1.0, fp32=True)
        self.how, self.left = how, at

    def forward(self, x):
        if self.training and x.device.type != "meta":
            self.left -= 1
            if self.left < 0:
                {"raise": fail, "exit": leave, "kill": die, "slow": rest, "hang": hang}[self.how]()
        return super().forward(x)

def fail():
    raise RuntimeError("made to fail")

def leave():
    os._exit(7)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def rest():
    time.sleep(0.02)

def hang():
    open(os.path.join(os.environ["HANGS_IN"], "hangs"), "w").close()
    while True:
        time.sleep(1)
'''


@pytest.fixture
def study(tiny_run, tmp_path):
    """Overrides of a study of tiny runs."""

    def make(*arguments: str) -> list[str]:
        return ["study", "mine", *(text for text in tiny_run() if text != "train.threads=1"), *arguments]

    return make


@pytest.fixture
def plugin(tmp_path):
    """A norm that ends its process."""
    directory = tmp_path / "crashing"
    (directory / "norm").mkdir(parents=True)
    (directory / "crash.py").write_text(CRASH)
    lines = [
        "# Made to fail.",
        "name: crash",
        "how: raise  # raise | exit | kill | slow | hang; how",
        "at: 10  # int [0, inf); when",
    ]
    (directory / "norm" / "crash.yaml").write_text("\n".join(lines))
    return str(directory)


def command(arguments, plugin=""):
    return [sys.executable, "-m", "nexus_ablate", *(["--plugin", plugin] if plugin else []), *arguments]


def nexus(arguments, plugin="", cwd=None):
    return subprocess.run(command(arguments, plugin), capture_output=True, text=True, timeout=300, cwd=cwd)


def start(arguments, plugin=""):
    """The command in a group of its own, with SIGINT as in a terminal also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # an ignored signal stays so in children
    try:
        return subprocess.Popen(
            command(arguments, plugin),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def until(true, seconds=120.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "never"
        time.sleep(0.05)


def states(runs_dir):
    return {(run.arm, run.seed): run.state for run in map(read_run, find_runs([runs_dir / "mine"]))}


def photograph(root: Path):
    """Every file's content and time, without the locks, in which their last owner stands."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != "LOCK"]
    return {path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.slow
def test_what_is_missing_is_run_once_and_like_each_run_alone(study, tmp_path):
    runs_dir = tmp_path / "runs"
    done = nexus(study("vary.norm=layer,rms", "seeds=0,1", "--workers", "2"))
    assert done.returncode == 0, done.stderr
    assert "norm=rms equals baseline" in done.stderr
    assert "4/4" in done.stderr
    assert f"nexus-ablate compare {runs_dir}/mine" in done.stderr
    arms = ("baseline", "norm=layer")
    assert states(runs_dir) == {(arm, seed): "finished" for arm in arms for seed in (0, 1)}

    before = photograph(runs_dir)
    again = nexus(study("vary.norm=layer,rms", "seeds=0,1"))
    assert again.returncode == 0, again.stderr
    assert "nothing to run" in again.stderr
    assert photograph(runs_dir) == before

    threads = IdleCores.cores() // 2 or 1
    overrides = study()[2:]
    for path in find_runs([runs_dir / "mine"]):
        record = read_run(path)
        changes = [f"seed={record.seed}", f"runs_dir={tmp_path / 'alone'}", f"train.threads={threads}"]
        changes += [] if record.arm == "baseline" else [record.arm]
        alone = train(compose([*overrides, *changes]), quiet=True)
        assert alone.path.name == path.name, "the same identity"
        assert logged(alone.path) == logged(path)
        assert record.env is not None
        assert record.env["runs_per_device"] == 2

    larger = nexus(study("vary.norm=layer,rms", "seeds=0,1", "--add-seeds", "1"))
    assert larger.returncode == 0, larger.stderr
    assert "2 runs queued" in larger.stderr
    after = photograph(runs_dir)
    kept = [path for path in before if "/s0-" in str(path) or "/s1-" in str(path)]
    assert {path: after[path] for path in kept} == {path: before[path] for path in kept}


@pytest.mark.slow
def test_a_crash_marks_its_run_and_the_others_have_their_turn(study, plugin, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "question: does one bad run stop the others?\nseeds: [0]\narms:\n  exits: norm=crash norm.how=exit\n"
        "  dies: norm=crash norm.how=kill\n  raises: norm=crash\n  explodes: norm=layer optim.lr=1e30 optim.clip=off\n"
        "  layer: norm=layer\n"
    )
    arguments = ["study", f"{path}", *study()[2:], "--workers", "2"]
    done = nexus(arguments, plugin)
    assert done.returncode == errors.BUG, done.stderr
    runs = {run.arm: run for run in map(read_run, find_runs([tmp_path / "runs"]))}
    assert {arm: run.state for arm, run in runs.items()} == {
        "baseline": "finished",
        "raises": "failed",
        "exits": "failed",
        "dies": "failed",
        "layer": "finished",
        "explodes": "diverged",
    }
    reasons = {arm: run.status["reason"] for arm, run in runs.items()}
    assert "RuntimeError: made to fail" in reasons["raises"]
    assert "exit status 7" in reasons["exits"]
    assert "SIGKILL" in reasons["dies"]
    for arm, reason in reasons.items():
        if reason:
            assert reason in done.stderr
            assert reason in (runs[arm].path / "log.txt").read_text()

    before = photograph(tmp_path / "runs")
    again = nexus(arguments, plugin)
    assert again.returncode == errors.BUG
    assert photograph(tmp_path / "runs") == before, "what failed is not tried again unasked"
    retried = nexus([*arguments, "--retry", "failed"], plugin)
    assert "3 runs queued" in retried.stderr
    assert "3 already ended" in retried.stderr, "the diverged one has a result"
    assert retried.returncode == errors.DIVERGED
    ended = list(states(tmp_path / "runs").values())
    assert (ended.count("finished"), ended.count("diverged")) == (5, 1), "from step 10 on they live long enough"


LIMITED = """
import sys
from pathlib import Path
from types import SimpleNamespace
from nexus_ablate.launch import local
from nexus_ablate.launch.launch import launch
from nexus_ablate.study.definition import read_study

folder = Path(sys.argv[1])

def clock():
    '''Past the limit once one run hangs and one is slow; past the grace once the last run has the slow one's worker.'''
    if list(folder.glob("runs/mine/layer/s0-*/status.json")):
        return 1002.0 + local.GRACE_SECONDS
    rows = [len(log.read_bytes().splitlines()) for log in folder.glob("runs/mine/slow/s0-*/metrics.jsonl")]
    return 1001.0 if (folder / "hangs").exists() and max(rows, default=0) > 3 else 0.0

if __name__ == "__main__":
    local.time = SimpleNamespace(monotonic=clock)
    sys.exit(launch(*read_study(sys.argv[2:]), local.LocalPool(workers=2, limit=1000.0)))
"""


@pytest.mark.slow
def test_a_run_whose_time_is_over_is_saved_and_one_that_hangs_does_not_hold_the_others(study, plugin, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "question: does one endless run stop the others?\nseeds: [0]\narms:\n  hang: norm=crash norm.how=hang\n"
        "  slow: norm=crash norm.how=slow norm.at=0 train.steps=2000\n  layer: norm=layer\n"
    )
    (tmp_path / "limited.py").write_text(LIMITED)
    done = subprocess.run(
        [sys.executable, tmp_path / "limited.py", tmp_path, f"{path}", *study()[2:]],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"NEXUS_ABLATE_PLUGINS": plugin, "HANGS_IN": str(tmp_path)},
    )
    runs = {run.arm: run for run in map(read_run, find_runs([tmp_path / "runs" / "mine"]))}
    assert {arm: run.state for arm, run in runs.items()} == {
        "baseline": "finished",
        "layer": "finished",
        "hang": "failed",
        "slow": "preempted",
    }, done.stderr
    assert "slow s0 preempted: its time limit was reached; stopped by SIGTERM; saved at step" in done.stderr
    assert "its time limit was reached, and it did not stop" in runs["hang"].status["reason"]
    assert done.returncode == errors.BUG


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, *(pytest.param(how, marks=pytest.mark.long) for how in (signal.SIGTERM, signal.SIGINT))]
)
def test_a_stopped_driver_continues_with_the_same_command(study, plugin, tmp_path, how):
    runs_dir = tmp_path / "runs"
    slow = study(
        "norm=crash", "norm.how=slow", "norm.at=0", "vary.bias=on", "seeds=0,1", "train.steps=60", "--workers", "2"
    )
    driver = start(slow, plugin)
    until(lambda: runs_dir.exists() and sum(s == "running" for s in states_now(runs_dir)) == 2)
    until(lambda: all(len(rows_now(path)) > 8 for path in find_runs([runs_dir])))
    os.killpg(driver.pid, how) if how == signal.SIGINT else os.kill(driver.pid, how)  # Ctrl-C reaches the whole group
    driver.communicate(timeout=60)
    assert driver.returncode == (-9 if how == signal.SIGKILL else errors.PREEMPTED)
    until(lambda: set(states_now(runs_dir)) == {"preempted"}, 30)  # orphans stop by themselves
    assert len(find_runs([runs_dir])) == 2, "no run was begun after the signal"
    begun = {path: read_jsonl(path / "metrics.jsonl")[-1]["step"] for path in find_runs([runs_dir])}

    done = nexus(slow, plugin)
    assert done.returncode == 0, done.stderr
    assert set(states(runs_dir).values()) == {"finished"}
    assert len(states(runs_dir)) == 4
    for path, step in begun.items():
        steps = [row["step"] for row in read_jsonl(path / "metrics.jsonl")]
        assert steps == list(range(61)), f"was stopped at {step}"
        assert "resum" in (path / "log.txt").read_text() or read_run(path).env["earlier"]  # type: ignore[index]
    undisturbed = tmp_path / "undisturbed"
    alone = [f"runs_dir={undisturbed}" if text.startswith("runs_dir=") else text for text in slow]
    assert nexus(alone, plugin).returncode == 0
    for path in find_runs([runs_dir]):
        assert logged(path) == logged(undisturbed / path.relative_to(runs_dir))


def states_now(runs_dir):
    results = []
    for path in find_runs([runs_dir]):
        results.append(read_run(path).state)
    return results


def rows_now(path):
    return read_jsonl(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []


def test_a_run_that_is_gone_without_a_word_gets_a_reason_and_a_result_keeps_its_own(tiny_run):
    outcome = train(compose(tiny_run()), quiet=True)
    mark_failed(outcome.path, "gone")
    assert read_run(outcome.path).state == "finished"
    mark_failed(outcome.path.with_name("s0-00000000"), "gone")
    assert not outcome.path.with_name("s0-00000000").exists()


SHARED = (
    (8, "", "auto", 10, Places(8, 1, []), "one per core"),
    (8, "", "auto", 3, Places(3, 2, []), "no more than there are jobs"),
    (8, "", 3, 10, Places(3, 2, []), "who says a number gets it"),
    (8, "2,5", "auto", 10, Places(2, 4, ["2", "5"]), "one per GPU"),
    (8, "2,5", 5, 10, Places(5, 1, ["2", "5"]), "several on each GPU"),
    (2, "0", 4, 10, Places(4, 1, ["0"]), "at least one thread"),
)


@pytest.mark.parametrize(("cores", "visible", "requested", "number", "expected", "why"), SHARED)
def test_cores_and_gpus_are_shared(cores, visible, requested, number, expected, why, monkeypatch):
    monkeypatch.setattr(IdleCores, "cores", staticmethod(lambda: cores))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    train = SimpleNamespace(device="auto", threads="auto")
    jobs = [SimpleNamespace(config=SimpleNamespace(train=train))] * number
    assert places_for(jobs, requested) == expected, why
    train.device = "cpu"
    assert places_for(jobs, requested).gpus == [], "train.device=cpu was asked for"


def test_worker_n_takes_gpu_n_modulo_their_number(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-a")
    places = Places(5, 1, ["2", "GPU-a"])
    assert [places.gpu(worker) for worker in range(5)] == ["2", "GPU-a", "2", "GPU-a", "2"]
    assert places.run_conditions == {"workers": 5, "runs_per_device": 3}
    assert Places(2, 1, []).gpu(1) is None and Places(2, 1, []).run_conditions["runs_per_device"] == 2


def test_a_worker_takes_no_more_threads_than_the_environment_allows(tiny, monkeypatch):
    monkeypatch.setattr(IdleCores, "cores", lambda: 8)
    job = SimpleNamespace(config=tiny("train.device=cpu"))
    for bound, threads in (("", 8), ("3", 3)):
        monkeypatch.setenv("OMP_NUM_THREADS", bound)
        assert places_for([job], 1).threads == threads


LEAVES = """
import sys
from nexus_ablate.axes.norm import NORM, RMSNorm

@NORM.register("leaves")
class Leaves(RMSNorm):
    '''Ends its process as a script does.'''

    def __init__(self, width, bias, site):
        super().__init__(width, bias, site, eps=1e-6, gain_init=1.0, fp32=True)

    def forward(self, x):
        if x.device.type != "meta":
            sys.exit("password=canary-of-a-secret")
        return super().forward(x)
"""


@pytest.mark.slow
def test_a_plugin_that_exits_with_a_secret_fails_its_run_alone_and_leaves_no_trace_of_it(study, tmp_path):
    plugin = tmp_path / "leaving"
    (plugin / "norm").mkdir(parents=True)
    (plugin / "leaves.py").write_text(LEAVES)
    (plugin / "norm" / "leaves.yaml").write_text("# Leaves.\nname: leaves\n")
    done = nexus(study("vary.norm=leaves", "seeds=0,1", "--workers", "1"), str(plugin))
    assert done.returncode == errors.BUG
    assert sorted(states(tmp_path / "runs").values()) == ["failed", "failed", "finished", "finished"]
    written = [path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert not [data for data in [*written, done.stderr.encode()] if b"canary-of-a-secret" in data]
