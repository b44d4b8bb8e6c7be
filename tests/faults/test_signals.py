"""Asked to stop at any instant: the step is saved, exit 75, and the same command resumes to the same end (R3)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from faults.bench import at_every_call, at_step, fresh, only, result, run, sizes
from nexus_ablate import errors
from nexus_ablate.errors import Preempted
from nexus_ablate.model import GPT
from nexus_ablate.runs import read_run
from nexus_ablate.training.signals import StopRequest

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")
SHORT = ("train.steps=12", "train.checkpoint_every=4", "train.eval_every=3", "model.n_layers=1")
STATES = {"preempted", "finished"}


def instants(patch: pytest.MonkeyPatch, act) -> None:
    """Call `act` at each step, at each validation or probe pass, and before each call that changes the disk."""
    at_step(patch, lambda step: act("step"))
    at_every_call(patch, act)
    forward = GPT.forward

    def watched(self, *arguments, **options):
        if not self.training:
            act("evaluation")
        return forward(self, *arguments, **options)

    patch.setattr(GPT, "forward", watched)


def interrupted_at(number: int, names: list[str]):
    """Send this process the signals at the `number`-th instant."""
    left = [number]

    def send(_: str) -> None:
        left[0] -= 1
        if left[0] == -1:
            for name in names:
                os.kill(os.getpid(), getattr(signal, name))

    return send


@sizes(5, 100, fast=True)
@pytest.mark.usefixtures("signals_as_in_a_terminal")
def test_a_signal_at_any_instant_stops_the_run_and_costs_nothing(tiny_run, tmp_path, monkeypatch, counted, count):
    expected = result(run(tiny_run(*SHORT)).path)
    passed: list[str] = []
    with monkeypatch.context() as patch:
        instants(patch, passed.append)
        run(tiny_run(*SHORT, f"runs_dir={tmp_path / 'dry'}"))
    first = passed.index("step")  # before it the run is not begun: the signal ends the process as it ends any other
    draw = random.Random(count)
    longest, stopped, where = 0.0, 0, set()
    for _ in range(count):
        number = draw.randrange(first, len(passed) - 12)  # the last few belong to the summary: see below
        names = draw.choices(NAMES, k=draw.choice((1, 2)))
        with fresh(tmp_path) as runs_dir:
            overrides = tiny_run(*SHORT, f"runs_dir={runs_dir}")
            with monkeypatch.context() as patch:
                instants(patch, interrupted_at(number, names))
                start = time.monotonic()
                try:
                    run(overrides)
                except Preempted as preempted:
                    assert preempted.status == errors.PREEMPTED
                    assert preempted.got in names and "; saved at step " in str(preempted)
                    stopped += 1
                longest = max(longest, time.monotonic() - start)
            assert read_run(only(runs_dir)).state in STATES
            assert result(run(overrides).path) == expected, (passed[number], names)
            where.add(passed[number])
    assert longest < 30
    assert stopped > count / 2  # a signal in the last step lets the run end
    counted(f"{count} of {count} signals, {stopped} stopped with exit 75, at {', '.join(sorted(where))}")


def test_control_without_the_handler_a_signal_loses_the_steps_since_the_checkpoint(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(StopRequest, "__enter__", lambda self: self)

    class Stopped(BaseException):
        """What an unhandled signal does to Python."""

    def handler(number, frame):
        raise Stopped

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with monkeypatch.context() as patch:
            at_step(patch, lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 3 else None)
            with pytest.raises(Stopped):
                run(tiny_run(*SHORT))
    finally:
        signal.signal(signal.SIGTERM, before)
    path = only(tmp_path / "runs")
    assert read_run(path).state != "preempted"
    assert not list((path / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_process_that_receives_a_stop_signal_exits_with_75_and_resumes(tiny_run, tmp_path):
    overrides = tiny_run("train.steps=300000", "train.log_every=100", "train.eval_every=1000000", "probe=off")
    process = subprocess.Popen([sys.executable, "-m", "nexus_ablate", *overrides], stderr=subprocess.PIPE, text=True)
    while not list((tmp_path / "runs").glob("*/*/*/checkpoints/step_*")) and process.poll() is None:
        time.sleep(0.05)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == errors.PREEMPTED, said
    assert time.monotonic() - start < 30
    assert said.strip().splitlines()[-1] == "  try: run the same command again"
    assert "Traceback" not in said
    assert read_run(only(tmp_path / "runs")).state == "preempted"


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.1, 0.8])
def test_a_process_that_is_stopped_before_its_first_step_leaves_nothing_that_is_in_the_way(tiny_run, tmp_path, delay):
    command = [sys.executable, "-m", "nexus_ablate", *tiny_run("train.steps=5")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert read_run(only(tmp_path / "runs")).state == "finished"


IMPORTING = """
import sys
from pathlib import Path
folder = Path(sys.argv.pop(1))
(folder / "swallows.py").write_text(
    "import signal\\ntry:\\n    signal.raise_signal(signal.SIGINT)\\nexcept BaseException:\\n    print('went on')\\n"
)
sys.path.insert(0, str(folder))
from nexus_ablate import cli
from nexus_ablate.cli import list as verb
def run(words, flags):
    {action}
    return 0
verb.run = run
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("action", "status"),
    [
        ("import swallows", -signal.SIGINT),  # a library may catch it, or abort in native code
        ("signal.raise_signal(signal.SIGINT)", 130),
        ("try:\n        signal.raise_signal(signal.SIGINT)\n    finally:\n        raise RuntimeError", 130),
    ],
)
def test_ctrl_c_ends_a_command_without_a_traceback_wherever_it_comes(tmp_path, action, status):
    code = IMPORTING.format(action=f"import signal\n    {action}")
    command = [sys.executable, "-c", code, str(tmp_path), "list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


@pytest.mark.slow
def test_ctrl_c_during_the_imports_of_a_run_shows_no_traceback(tiny_run, tmp_path):
    command = [sys.executable, "-m", "nexus_ablate", *tiny_run("train.steps=5")]
    for tenth in range(1, 13):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        time.sleep(tenth / 10)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
        assert process.returncode in (-signal.SIGINT, 130, errors.PREEMPTED, 0), (tenth, said)
        assert "Traceback" not in said and "ignored" not in said, (tenth, said)


INSISTENT = """
import os, signal, sys, threading, time
from nexus_ablate.cli import main
from nexus_ablate.training import session, signals
give_up = session._give_up
def insisted(*arguments):
    give_up(*arguments)
    for name in signals.SIGNALS:
        os.kill(os.getpid(), getattr(signal, name))
session._give_up = insisted
from nexus_ablate.data import Batches
batch = Batches.batch
def stopped(self, step):
    if step == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return batch(self, step)
Batches.batch = stopped
sys.exit(main({arguments}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("protected", [True, False])
def test_signals_after_the_save_leave_the_exit_status_at_75(tiny_run, tmp_path, protected):
    """A second Ctrl-C, or a scheduler's. The control: called as a function, main gives the handlers back."""
    code = INSISTENT.format(arguments="" if protected else "sys.argv[1:]")
    command = [sys.executable, "-c", code, *tiny_run("train.steps=8")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert read_run(only(tmp_path / "runs")).state == "preempted"
    if protected:
        assert done.returncode == errors.PREEMPTED, done.stderr
        assert "Traceback" not in done.stderr
    else:
        assert done.returncode < 0, done.stderr
