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

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.comparison.learning_rates import rate_at
from nexus_ablate.config.compose import compose
from nexus_ablate.execution.local_pool import mark_failed
from nexus_ablate.planning.cores_and_gpus import Places, places_for
from nexus_ablate.planning.jobs import Runs
from nexus_ablate.runs import find_runs, read_jsonl, read_run
from nexus_ablate.study.decoding import read_study
from nexus_ablate.study.definition import read_request
from nexus_ablate.training.device import IdleCores
from nexus_ablate.training.session import train

CLOCK = {"seconds", "tokens_per_second", "peak_memory_bytes"}
LAUNCH = ("runs_dir", "tracker", "train.device", "train.threads", "train.checkpoint_every", "train.log_every")
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


def names(arguments):
    """The overrides that a second command needs: the study's name and how it is carried out."""
    return ["study", "mine", *(text for text in arguments if text.split("=")[0] in LAUNCH)]


def states(runs_dir):
    return {(run.arm, run.seed): run.state for run in map(read_run, find_runs([runs_dir / "mine"]))}


def rows(path):
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in read_jsonl(path / "metrics.jsonl")]


def photograph(root: Path):
    """Every file's content and time."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
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
        assert rows(alone.path) == rows(path)
        assert record.env is not None
        assert record.env["runs_per_device"] == 2

    shorter = nexus(study("vary.norm=layer,rms", "seeds=0"))
    assert shorter.returncode == errors.CONFIG
    assert "--amend" in shorter.stderr
    assert len(shorter.stderr.strip().splitlines()) <= 3
    larger = nexus([*names(study()), "seeds=0,1,2", "--amend"])
    assert larger.returncode == 0, larger.stderr
    assert "2 runs queued" in larger.stderr
    after = photograph(runs_dir)
    assert {p: after[p] for p in before if "s0-" in str(p) or "s1-" in str(p)} == {
        p: before[p] for p in before if "s0-" in str(p) or "s1-" in str(p)
    }


@pytest.mark.slow
def test_a_crash_marks_its_run_and_the_others_have_their_turn(study, plugin, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "question: does one bad run stop the others?\nseeds: [0]\narms:\n- norm=crash norm.how=exit\n"
        "- norm=crash norm.how=kill\n- norm=crash\n- norm=layer optim.lr=1e30 optim.clip=off\n- norm=layer\n"
    )
    arguments = ["study", f"{path}", *study()[2:], "--workers", "2"]
    done = nexus(arguments, plugin)
    assert done.returncode == errors.BUG, done.stderr
    runs = {run.arm: run for run in map(read_run, find_runs([tmp_path / "runs"]))}
    assert {arm: run.state for arm, run in runs.items()} == {
        "baseline": "finished",
        "norm=crash": "failed",
        "norm=crash,norm.how=exit": "failed",
        "norm=crash,norm.how=kill": "failed",
        "norm=layer": "finished",
        "norm=layer,optim.clip=off,optim.lr=1e+30": "diverged",
    }
    reasons = {arm: run.status["reason"] for arm, run in runs.items()}
    assert "RuntimeError: made to fail" in reasons["norm=crash"]
    assert "exit status 7" in reasons["norm=crash,norm.how=exit"]
    assert "SIGKILL" in reasons["norm=crash,norm.how=kill"]
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
from nexus_ablate.execution import local_pool
from nexus_ablate.execution.launch import launch
from nexus_ablate.study.definition import read_request

folder = Path(sys.argv[1])

def clock():
    '''Past the limit once one run hangs and one is slow; past the grace once the last run has the slow one's worker.'''
    if list(folder.glob("runs/mine/norm=layer/s0-*/status.json")):
        return 1002.0 + local_pool.GRACE_SECONDS
    rows = [len(log.read_bytes().splitlines()) for log in folder.glob("runs/mine/*slow*/s0-*/metrics.jsonl")]
    return 1001.0 if (folder / "hangs").exists() and max(rows, default=0) > 3 else 0.0

if __name__ == "__main__":
    local_pool.time = SimpleNamespace(monotonic=clock)
    sys.exit(launch(read_request(sys.argv[2:]), local_pool.LocalPool(workers=2, limit=1000.0)))
"""


@pytest.mark.slow
def test_a_run_whose_time_is_over_is_saved_and_one_that_hangs_does_not_hold_the_others(study, plugin, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "question: does one endless run stop the others?\nseeds: [0]\narms:\n- norm=crash norm.how=hang\n"
        "- norm=crash norm.how=slow norm.at=0 train.steps=2000\n- norm=layer\n"
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
    slow = "norm=crash,norm.at=0,norm.how=slow,train.steps=2000"
    assert {arm: run.state for arm, run in runs.items()} == {
        "baseline": "finished",
        "norm=layer": "finished",
        "norm=crash,norm.how=hang": "failed",
        slow: "preempted",
    }, done.stderr
    assert f"{slow} s0 preempted: its time limit was reached; stopped by SIGTERM; saved at step" in done.stderr
    assert "its time limit was reached, and it did not stop" in runs["norm=crash,norm.how=hang"].status["reason"]
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
        assert rows(path) == rows(undisturbed / path.relative_to(runs_dir))


def states_now(runs_dir):
    results = []
    for path in find_runs([runs_dir]):
        results.append(read_run(path).state)
    return results


def rows_now(path):
    return read_jsonl(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []


@pytest.mark.slow
def test_every_arm_is_tuned_and_then_trained_at_its_best_rate(study, tmp_path):
    requested = study("vary.norm=layer", "seeds=0", "lr_grid=1e-4,3e-3,1e30", "tuning_seeds=7,8", "optim.clip=off")
    done = nexus([*requested, "--workers", "2"])
    assert done.returncode == errors.DIVERGED, "a rate that is too high diverges, which is a result"
    request = read_request([text for text in requested[1:] if not text.startswith("--")])
    runs = Runs.of(request)
    assert {job.arm for job in runs.tuning} == {
        "baseline", "optim.lr=0.0001", "optim.lr=1e+30",
        "norm=layer", "norm=layer,optim.lr=0.0001", "norm=layer,optim.lr=1e+30",
    }  # fmt: skip
    for arm in runs.study.all_arms:
        (best,) = {1e-4, 3e-3} & {*runs.rates(arm)}
        assert {rate_at(best, -1), rate_at(best, 1)} < {*runs.rates(arm)}
        assert len(runs.rates(arm)) <= 5, "two more where the lowest is outermost"
    assert all(job.state()[0] == "finished" for job in runs.claims)
    final = states(tmp_path / "runs")
    assert {seed for _, seed in final} == {0, 7, 8}
    assert final[("baseline", 7)] == "finished"
    assert final[("optim.lr=1e+30", 7)] == "diverged"


def test_a_run_that_is_gone_without_a_word_gets_a_reason_and_a_result_keeps_its_own(tiny_run):
    outcome = train(compose(tiny_run()), quiet=True)
    mark_failed(outcome.path, "gone")
    assert read_run(outcome.path).state == "finished"
    mark_failed(outcome.path.with_name("s0-00000000"), "gone")
    assert not outcome.path.with_name("s0-00000000").exists()


def test_cores_are_shared(tiny, monkeypatch):
    monkeypatch.setattr(IdleCores, "cores", staticmethod(lambda: 8))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    request = read_request("x vary.norm=layer train.device=cpu model.d_model=64 seeds=0,1,2,3,4".split())
    jobs = Runs.of(request).claims
    for chosen, requested, expected, why in (
        (jobs, "auto", Places(8, 1, []), "one per core"),
        (jobs[:3], "auto", Places(3, 2, []), "no more than there are jobs"),
        (jobs, 3, Places(3, 2, []), "who says a number gets it"),
    ):
        assert places_for(chosen, requested) == expected, why
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert places_for(jobs, "auto").gpus == [], "train.device=cpu was asked for"
    request = read_request("x vary.norm=layer train.device=auto model.d_model=64".split())
    where = places_for(Runs.of(request).claims, "auto")
    assert (where.workers, where.gpus) == (2, ["2", "5"])
    assert where.run_conditions == {"workers": 2, "runs_per_device": 1}


@pytest.mark.parametrize(("per_gpu", "expected"), [(1, (3, 1)), (2, (6, 2))])
def test_a_study_has_as_many_workers_on_each_visible_gpu_as_asked_for(monkeypatch, per_gpu, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    jobs = [SimpleNamespace(config=compose(["train.threads=1"]))] * 9
    where = places_for(jobs, "auto", per_gpu)
    assert (where.workers, where.run_conditions["runs_per_device"]) == expected
    assert where.gpus == ["0", "1", "2"]


def test_plan_shows_everything_and_writes_nothing(study, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").touch()
    before = photograph(tmp_path)
    requested = study(
        "vary.norm=layer,rms", "vary.n_kv_heads=3", "vary.placement=deepnorm", "seeds=0,1", "lr_grid=1e-3,2e-3"
    )
    assert main(["plan", *requested[1:]]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for shown in (
        "norm=layer",
        "try n_kv_heads=1",
        "norm=rms is baseline",
        "also changes init",
        "x 3 rates, and before that 2 rates x 2 tuning seeds per arm",
        "flops:",
    ):
        assert shown in printed, shown
    assert "6 arms" not in printed
    assert "30 runs: 3 arms x seeds 0,1 x 3 rates" in printed
    assert photograph(tmp_path) == before
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arm", "drops"), [("optim=muon", True), ("optim=muon optim.lr=5e-3", False), ("norm=layer", False)]
)
def test_plan_names_what_an_arm_loses_with_another_optimizer(tmp_path, monkeypatch, capsys, arm, drops):
    text = f"question: is it?\nbaseline: [model=femto, optim.lr=5e-3]\narms: [{arm}]\n"
    (tmp_path / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "mine.yaml"]) == 0
    note = "optim=muon drops optim.lr=5e-3 of the baseline; write it in the arm to keep it"
    assert (note in " ".join(capsys.readouterr().out.split())) == drops


@pytest.mark.slow
def test_a_single_run_and_a_multirun_may_still_choose_their_folder(tiny_run, tmp_path):
    done = nexus(["train", *tiny_run("experiment=elsewhere", "train.steps=2")])
    assert done.returncode == 0, done.stderr
    assert [path.parent.parent.name for path in find_runs([tmp_path / "runs"])] == ["elsewhere"]
    assert read_study(tmp_path / "runs" / "elsewhere") is None
    done = nexus(["-m", *tiny_run("experiment=there", "train.steps=2", "seed=1")])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "there").is_dir()
