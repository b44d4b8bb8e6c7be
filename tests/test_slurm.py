"""SLURM: preempted, timed out, cancelled and crashed jobs, on a real cluster of two nodes and four GPUs, and simulated.

The cluster is that of scripts/slurm_up; the tests that need it are skipped where SLURM is not installed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.config import compose as compose_module
from nexus_ablate.config.compose import compose
from nexus_ablate.config.options import Option
from nexus_ablate.config.plugins import VARIABLE as PLUGINS
from nexus_ablate.data import fingerprint_of
from nexus_ablate.launch import slurm as slurm_module
from nexus_ablate.launch import slurm_job, slurm_queue
from nexus_ablate.launch.jobs import Job
from nexus_ablate.launch.launch import launch, plan
from nexus_ablate.launch.slurm import Slurm
from nexus_ablate.launch.slurm_job import REQUEUES, SlurmTask
from nexus_ablate.launch.slurm_queue import ENDED, entries_of
from nexus_ablate.launch.worker import Task
from nexus_ablate.provenance import source_hash
from nexus_ablate.runs import find_runs, read_run, run_path
from nexus_ablate.study.definition import read_study
from nexus_ablate.track.run_on_wandb import place_of
from nexus_ablate.training import session
from nexus_ablate.training.session import train
from tests.faults.bench import logged
from tests.faults.test_secrets import ENVIRONMENT, TYPED, traces
from tests.leaking_norm import write_control
from tests.leaking_norm import write_plugin as write_leaking_plugin
from tests.trial_norm import write_plugin

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
WITH_SLURM = pytest.mark.skipif(
    not shutil.which("slurmctld") or not shutil.which("munged") or os.geteuid() != 0,
    reason="SLURM and munge are not installed, or this is not root",
)


# ------------------------------------------------------------------------------------- one job, and a SLURM that is not


def task_of(overrides):
    """The task of one run."""
    config = compose(overrides)
    identity = session.identity_of(config, fingerprint_of(config.data, config.model.context))
    path = run_path(config.runs_dir, config.experiment, "mine", config.seed, identity)
    return Task.of(Job("mine", config.seed, "mine", path, overrides, config), {})


@pytest.fixture
def job(tiny_run, tmp_path, monkeypatch):
    """Run a task as submitit does in job 7_3, with a scontrol that writes down what it is asked."""
    from submitit.core.submission import process_job
    from submitit.core.utils import DelayedSubmission

    folder = tmp_path / "submitit"
    folder.mkdir()
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    requests = tmp_path / "asked"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {requests}\ncat {tmp_path}/state\n')
    scontrol.chmod(0o755)
    (tmp_path / "state").write_text("JobId=10 JobState=RUNNING\n")
    variables = {"SLURM_JOB_ID": "10", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    for name, value in {"SUBMITIT_EXECUTOR": "slurm", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2)}

    class FakeJob:
        """`overrides` of the run; `minutes` of the job; `time_outs` that submitit accepts."""

        run = tmp_path / "runs"

        def submit(self, *overrides, minutes=60, time_outs=REQUEUES, source=None):
            self.overrides = tiny_run(*overrides)
            task = task_of(self.overrides)
            task = replace(task, source=source or task.source)
            delayed = DelayedSubmission(SlurmTask(task, folder))
            delayed.set_timeout(minutes, time_outs)
            delayed.dump(folder / "7_3_submitted.pkl")

        def start(self, restarts=0, number=None, after=0):
            """Its exit status; the signal `number` comes once its log has more than `after` rows."""
            monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
            done = threading.Event()
            sender = threading.Thread(target=self._signal, args=(number, after, done), daemon=True)
            sender.start()
            try:
                process_job(folder)
            except SystemExit as left:
                return left.code
            finally:
                done.set()
                sender.join()
            return 0

        def _signal(self, number, after, done):
            while number and not done.is_set():
                logs = list(self.run.glob("*/*/*/metrics.jsonl"))  # checkpoints come and go below
                if logs and len(logs[0].read_text().splitlines()) > after:
                    os.kill(os.getpid(), number)
                    return
                time.sleep(0.001)

        @property
        def requeues(self):
            lines = requests.read_text().splitlines() if requests.exists() else []
            return [line.split()[-1] for line in lines if line.startswith("requeue")]

        @property
        def record(self):
            (path,) = find_runs([self.run])
            return read_run(path)

        def answer(self):
            return json.loads((folder / "7_3.json").read_text())

        def becomes(self, state):
            (tmp_path / "state").write_text(f"JobId=10 JobState={state}\n")

    yield FakeJob()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def slowly(monkeypatch):
    """Steps of a few milliseconds, so that a signal finds one."""
    from nexus_ablate.training.trainer import Trainer

    step = Trainer.step_and_record
    monkeypatch.setattr(Trainer, "step_and_record", lambda self: (time.sleep(0.004), step(self))[1])


@pytest.mark.slow
@pytest.mark.parametrize("times", [4, pytest.param(30, marks=pytest.mark.long)])
def test_preemptions_requeue_the_job_each_time_once_and_change_nothing(job, slowly, tmp_path, times):
    steps = times * 8 + 20  # on a busy machine a signal comes some steps late, and the run must not end before the last
    job.submit(f"train.steps={steps}", "train.checkpoint_every=1000")
    cycles = 0
    while (left := job.start(cycles, signal.SIGUSR2 if cycles < times else None, after=3 * (cycles + 1))) != 0:
        assert left == -1, "submitit's way to leave a job that is put back"
        cycles += 1
        assert job.requeues == ["7_3"] * cycles
        assert job.record.state == "preempted"
        assert "SIGUSR2" in job.record.status["reason"]
    assert cycles == times
    assert job.record.state == "finished"
    assert job.record.env["slurm_restarts"] == times
    assert len(job.record.env["earlier"]) == times, "the same directory each time"
    alone = train(compose([*job.overrides, f"runs_dir={tmp_path / 'alone'}"]), quiet=True)
    assert logged(alone.path) == logged(job.record.path)


def test_without_our_part_a_preempted_job_would_count_as_done(job, slowly, monkeypatch):
    monkeypatch.setattr(slurm_job, "put_back", lambda: "")
    job.submit("train.steps=200")
    assert job.start(0, signal.SIGUSR2, after=5) == errors.PREEMPTED
    assert job.requeues == []


def test_a_cancelled_job_is_saved_and_does_not_come_back(job, slowly):
    job.submit("train.steps=200")
    job.becomes("CANCELLED")
    assert job.start(0, signal.SIGTERM, after=5) == errors.PREEMPTED
    assert job.requeues == []
    assert job.record.state == "preempted"
    assert "its job as cancelled" in job.answer()["reason"]


@pytest.mark.parametrize("where", ["compose", "load a plugin", "prepare", "evaluate"])
def test_a_signal_before_or_after_training_puts_the_job_back_too(job, monkeypatch, where):
    """While data is prepared there is no run yet; while a finished run is evaluated it is finished.

    What is interrupted while it composes, or while it loads a plugin, makes another error of the signal.
    """
    once = []
    places = {"compose": (compose_module, "compose"), "load a plugin": (session, "plugins_used")}
    module, name = places.get(where, (session, where))

    def stopped(*arguments, **keywords):
        if not once:
            once.append(where)
            try:
                signal.raise_signal(signal.SIGUSR2)
            except errors.Preempted as error:
                if where not in places:
                    raise
                raise ValueError("the library's own") from error
        return kept(*arguments, **keywords)

    job.submit("evals=[quantization]")
    kept = getattr(module, name)
    monkeypatch.setattr(module, name, stopped)
    assert job.start() == -1
    assert job.requeues == ["7_3"]
    assert job.start(1) == 0
    assert job.record.state == "finished"
    assert "quantization" in job.record.summary


def test_a_job_that_is_put_back_for_ever_is_stopped(job, slowly):
    job.submit("train.steps=200")
    assert job.start(REQUEUES, signal.SIGUSR2, after=5) == errors.PREEMPTED
    assert job.requeues == []
    assert f"{REQUEUES} times" in job.answer()["reason"]


def test_time_outs_are_counted_by_submitit(job, slowly):
    job.submit("train.steps=300", minutes=5, time_outs=1)  # below ten minutes it takes any USR2 for a time-out
    assert job.start(0, signal.SIGUSR2, after=5) == -1
    assert job.start(1, signal.SIGUSR2, after=60) == errors.PREEMPTED
    assert job.requeues == ["7_3"]
    assert "timed-out too many times" in job.answer()["reason"]


def test_the_run_of_a_job_is_not_that_of_the_agent_which_submitted_it(job, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep001")
    monkeypatch.setenv("WANDB_RUN_ID", "agentrun1")
    job.submit()
    assert job.start() == 0
    assert place_of(job.record.path, Option("wandb", {})).id != "agentrun1"


def test_a_queued_run_refuses_code_that_it_was_not_submitted_with(job):
    job.submit(source="0" * 64)
    assert job.start() == errors.CONFIG
    answer = job.answer()
    assert "the code changed" in answer["reason"]
    assert source_hash()[:8] in answer["reason"]
    assert not job.run.exists()


def test_a_queued_run_refuses_data_that_it_was_not_submitted_with(job, tmp_path):
    job.submit()
    task = replace(task_of(job.overrides), path=tmp_path / "runs" / "s0-00000000")
    answer = slurm_job.train_in_job(task)
    assert answer.status == errors.CONFIG
    assert "options, data or plugin changed" in answer.reason
    assert not job.run.exists()


# ----------------------------------------------------------------------------------- submitting, to a SLURM that is not


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """sbatch that takes everything, and a squeue that says what the test wants."""
    folder = tmp_path / "bin"
    folder.mkdir()
    squeue, scripts = tmp_path / "squeue", tmp_path / "scripts"
    squeue.write_text("")
    tools = {
        "sbatch": f"""case "$1" in --test-only) echo "$@" >> {tmp_path}/tried;;
            *) cat "$1" >> {scripts}; echo "Submitted batch job $(grep -c '^#!' {scripts})";; esac""",
        "squeue": f"cat {squeue}",
        **{"scontrol": "true", "srun": "true", "sacct": "echo no database >&2; exit 1"},
    }
    for name, script in tools.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return SimpleNamespace(queue=squeue, scripts=scripts, tried=tmp_path / "tried")


def study(tiny_run, *more):
    """The study and the launch overrides of `mine`."""
    return read_study(["mine", "vary.norm=layer", *(t for t in tiny_run() if t != "train.threads=1"), *more])


def folder(requested):
    return plan(*requested).folder


def test_what_slurm_is_asked_for(tiny_run, fake_slurm):
    backend = Slurm(time=30, mem_gb=3, cpus=2, parallel=5, sbatch={"partition": "gpu", "account": "mine"})
    backend.check()
    assert launch(*study(tiny_run, "seeds=0,1"), backend) == 0
    lines = {line for line in fake_slurm.scripts.read_text().splitlines() if line.startswith("#SBATCH")}
    for setting in ("partition=gpu", "time=30", "mem=3G", "cpus-per-task=2", "account=mine"):
        assert f"#SBATCH --{setting}" in lines
    assert "#SBATCH --array=0-3%4" in lines
    assert "#SBATCH --signal=USR2@120" in lines
    assert "--partition=gpu" in fake_slurm.tried.read_text(), "tried out without a job"


SETTINGS = (
    {
        **{"timeout_min=5": "--time=5", "mem_gb=2": "--mem=2G", "cpus_per_task=1": "--cpus-per-task=1"},
        **{"partition=low": "--partition=low", "gres=gpu:2": "--gres=gpu:2", "qos=high": "--qos=high"},
        **{"account=mine": "--account=mine", "constraint=a100": "--constraint=a100", "exclude=n1": "--exclude=n1"},
        **{"comment=x": "--comment=x", "name=x": "--job-name=x", "nodes=1": "--nodes=1"},
        **{"tasks_per_node=1": "--ntasks-per-node=1", "additional_parameters.reservation=r": "--reservation=r"},
    },
    {
        "gpus_per_node=2": "--gpus-per-node=2",
        "cpus_per_gpu=8": "--cpus-per-gpu=8",
        "mem_per_cpu=1G": "--mem-per-cpu=1G",
    },
    {"gpus_per_task=1": "--gpus-per-task=1", "mem_per_gpu=9G": "--mem-per-gpu=9G"},
)
"""Settings of Hydra's submitit launcher, and the option of sbatch that each is: those that may stand together."""
NOT_BESIDE = {"--mem-per-cpu": "--mem", "--mem-per-gpu": "--mem", "--cpus-per-gpu": "--cpus-per-task"} | dict.fromkeys(
    ("--gpus-per-node", "--gpus-per-task"), "--gres"
)


def tried_options(fake_slurm):
    """What SLURM was asked to check, by option."""
    return dict(word.partition("=")[::2] for word in fake_slurm.tried.read_text().split())


ALONE = ("--partition", "--account", "--qos", "--constraint", "--gres", "--nodes")
SPELLED = [{f"hydra.launcher.{setting}": option for setting, option in group.items()} for group in SETTINGS]
SPELLED += [{f"--sbatch {option.removeprefix('--')}": option for option in group.values()} for group in SETTINGS]
SPELLED += [{option.replace("=", " "): option for option in SETTINGS[0].values() if option.startswith(ALONE)}]


@pytest.mark.parametrize("typed", SPELLED)
def test_an_option_of_sbatch_is_taken_in_every_spelling(typed, fake_slurm, tiny_run):
    """The usual ones alone; every one by --sbatch, and as Hydra's submitit launcher calls it."""
    words = [*tiny_run("train.device=auto"), "norm=rms,layer", "--launcher", "slurm"]
    assert main(["-m", *words, *" ".join(typed).split()]) == 0
    tried = tried_options(fake_slurm)
    lines = [line.removeprefix("#SBATCH ") for line in fake_slurm.scripts.read_text().splitlines()]
    for option, _, value in (option.partition("=") for option in typed.values()):
        assert tried[option] == value and NOT_BESIDE.get(option) not in tried
        assert f"{option}={value}" in lines


@pytest.mark.parametrize("word", ["hydra.launcher.setup=[module load cuda,export X=1]", ""])
def test_setup_lines_stand_before_the_run_in_the_script_of_a_job(word, fake_slurm, tiny_run):
    flags = ["--sbatch", "setup=module load cuda", "--sbatch", "setup=export X=1", "--sbatch", "exclusive=true"]
    words = ["-m", *tiny_run(), "norm=rms,layer", "--launcher", "slurm"]
    assert main([*words, *([word] if word else flags)]) == 0
    script = fake_slurm.scripts.read_text().splitlines()
    assert script.index("module load cuda") < script.index("export X=1") < script.index("# command")
    assert ("#SBATCH --exclusive" in script) == (not word)


@pytest.mark.parametrize("setup", ["module load cuda", "5", "null"])
def test_one_setup_line_needs_no_brackets(setup, fake_slurm, tiny_run):
    words = [*tiny_run(), "norm=rms,layer", "--launcher", "slurm", f"hydra.launcher.setup={setup}"]
    assert main(["-m", *words]) == 0
    assert (setup in fake_slurm.scripts.read_text().splitlines()) == (setup != "null")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--nodes 2", "a job trains one run in one process"),
        ("hydra.launcher.tasks_per_node=4", "a job trains one run in one process"),
        ("hydra.launcher.max_num_timeout=3", "nexus-ablate sets this for every job"),
        ("hydra.launcher.setup=[module", "setup is a list of lines"),
        ("--qos", "--qos needs a value"),
        ("--sbatch comment=hf_canaryCANARYcanaryCANARYcanary0123", "contains a secret"),
    ],
)
def test_what_no_job_can_have_is_refused_in_three_lines(words, problem, fake_slurm, tiny_run, capsys, tmp_path):
    assert main(["-m", *tiny_run(), "norm=rms,layer", "--launcher", "slurm", *words.split()]) == errors.CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and problem in lines[0]
    assert not (tmp_path / "runs").exists()


def test_a_node_that_cannot_exist_is_said_to_lack_memory_or_cores(fake_slurm, tiny_run, tmp_path, capsys):
    text = "#!/bin/sh\necho 'sbatch: error: Requested node configuration is not available' >&2; exit 1\n"
    (tmp_path / "bin" / "sbatch").write_text(text)
    assert main(["-m", *tiny_run(), "norm=rms,layer", "--launcher", "slurm"]) == errors.CONFIG
    assert "try: --mem-gb, --cpus and --gres of a node that exists" in capsys.readouterr().err


def test_a_job_on_a_dead_node_that_stays_completing_is_submitted_again(tiny_run, fake_slurm, capsys):
    requested = study(tiny_run, "seeds=0,1")
    assert launch(*requested, Slurm()) == 0
    fake_slurm.queue.write_text("1_0|COMPLETING\n1_1|RUNNING\n1_2|PENDING\n1_3|REQUEUED\n")
    capsys.readouterr()
    assert launch(*requested, Slurm()) == 0
    assert "1 run submitted as SLURM job 2, 3 already in the queue" in capsys.readouterr().err


@pytest.mark.parametrize("waits", [True, False])
def test_a_signal_before_submitit_handles_it_does_not_end_a_job(waits):
    command = slurm_module.python_that_waits() if waits else shlex.quote(sys.executable)
    code = "import os, signal; os.kill(os.getpid(), signal.SIGUSR2); print('on')"
    done = subprocess.run(f"{command} -c {shlex.quote(code)}", shell=True, capture_output=True, text=True)
    assert (done.stdout == "on\n") == waits


def test_nothing_that_is_queued_or_done_is_submitted_again_and_what_slurm_forgot_is(tiny_run, fake_slurm, capsys):
    requested = study(tiny_run, "seeds=0,1")
    assert launch(*requested, Slurm()) == 0
    states = ["1_0|PENDING", "1_1|RUNNING", "1_2|CANCELLED"]
    fake_slurm.queue.write_text("\n".join(states) + "\n")
    capsys.readouterr()
    assert launch(*requested, Slurm()) == 0
    said = capsys.readouterr().err
    assert "2 runs submitted as SLURM job 2 (array of 2), 2 already in the queue" in said, said
    assert main(["status", str(folder(requested))]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no runs here; 4 missing"


@pytest.mark.parametrize("locked", [True, False])
def test_of_two_submissions_at_the_same_instant_one_submits_each_run_once(tiny_run, fake_slurm, monkeypatch, locked):
    """The second one begins while the first one has looked and not yet written down what it submitted."""
    requested, statuses = study(tiny_run, "seeds=0,1"), []
    kept = Slurm._submit

    def overtaken(*arguments):
        monkeypatch.setattr(Slurm, "_submit", kept)
        try:
            statuses.append(launch(*requested, Slurm()))
        except errors.AlreadyRunning as error:
            statuses.append(error.status)
            assert "is being launched" in error.problem
        return kept(*arguments)

    monkeypatch.setattr(Slurm, "_submit", overtaken)
    if not locked:
        monkeypatch.setattr(slurm_module, "take_lock", lambda *arguments: None)
    statuses.append(launch(*requested, Slurm()))
    assert statuses == ([errors.ALIVE, errors.OK] if locked else [errors.OK, errors.OK])
    assert fake_slurm.scripts.read_text().count("#!") == (1 if locked else 2)


def test_a_study_continued_by_slurm_submits_what_is_missing(tiny_run, fake_slurm, instant, capsys):
    requested = study(tiny_run, "seeds=0,1", "lr_grid=1e-3,3e-3,9e-3")
    jobs = plan(*requested).jobs
    for job in jobs[:5]:
        instant.end(job, "finished")
    assert launch(*requested, Slurm()) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "7 runs submitted" in said and "then nexus-ablate compare" in said
    for job in jobs:
        instant.end(job, "diverged" if job is jobs[0] else "finished")
    assert launch(*requested, Slurm()) == errors.DIVERGED


def test_more_runs_than_an_array_holds_become_several(tiny_run, fake_slurm, capsys, monkeypatch):
    monkeypatch.setattr(slurm_module, "LONGEST_ARRAY", 3)
    assert launch(*study(tiny_run, "seeds=0,1"), Slurm()) == 0
    assert "4 runs submitted as SLURM job 1 (array of 3) and 2" in capsys.readouterr().err


HANGS = (
    ("sbatch", "--launcher slurm", "sbatch does not answer"),
    ("squeue", "--launcher slurm", "squeue does not answer"),
    ("sacct", "--launcher slurm", "sacct does not answer"),
)


@pytest.mark.parametrize(("command", "words", "problem"), HANGS)
def test_a_slurm_that_hangs_ends_in_three_lines(
    command, words, problem, tiny_run, fake_slurm, tmp_path, monkeypatch, capsys
):
    assert main(["study", "mine", "vary.norm=layer", "seeds=0,1", *tiny_run(), *words.split()]) == 0
    capsys.readouterr()
    (tmp_path / "bin" / command).write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(slurm_queue, "ANSWER_SECONDS", 0.5)
    began = time.monotonic()
    assert main(["study", "mine", "vary.norm=layer", "seeds=0,1", *tiny_run(), *words.split()]) == errors.CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and problem in lines[0] and "no answer within 0.5 s" in lines[1]
    assert time.monotonic() - began < 20


def test_a_submission_that_hangs_is_ended(tiny_run, fake_slurm, tmp_path, monkeypatch, capsys):
    text = '#!/bin/sh\n[ "$1" = --test-only ] || exec sleep 60\n'
    (tmp_path / "bin" / "sbatch").write_text(text)
    monkeypatch.setattr(slurm_queue, "ANSWER_SECONDS", 1)
    words = ["study", "mine", "vary.norm=layer", "seeds=0,1", *tiny_run(), "--launcher", "slurm"]
    assert main(words) == errors.CONFIG
    assert "SLURM did not take the jobs" in capsys.readouterr().err


def test_a_controller_that_is_down_is_not_said_to_refuse_the_resources(tiny_run, fake_slurm, tmp_path, capsys):
    text = "#!/bin/sh\necho 'sbatch: error: Unable to contact slurm controller (connect failure)' >&2; exit 1\n"
    (tmp_path / "bin" / "sbatch").write_text(text)
    words = ["study", "mine", "vary.norm=layer", "seeds=0,1", *tiny_run(), "--launcher", "slurm"]
    assert main(words) == errors.CONFIG
    assert capsys.readouterr().err.startswith("error: sbatch does not answer")


def test_a_folder_in_which_slurm_would_replace_a_part_is_refused(tiny_run, fake_slurm, tmp_path, capsys):
    words = ["study", "mine", "vary.norm=layer", "seeds=0,1", *tiny_run(f"runs_dir={tmp_path}/a%j")]
    assert main([*words, "--launcher", "slurm"]) == errors.CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "a folder with % in its path" in lines[0]
    assert not fake_slurm.scripts.exists()


def test_the_accounting_says_how_a_job_that_left_the_queue_ended(tiny_run, fake_slurm, tmp_path, capsys):
    """Of a sacct with more columns than asked for, as that of scripts/slurm_up, the first two count."""
    requested = study(tiny_run, "seeds=0,1")
    launch(*requested, Slurm())
    (tmp_path / "ended").write_text("JobID|State|NodeList\n1_0|CANCELLED by 0|n1\n1_1|OUT_OF_MEMORY|n1\n")
    (tmp_path / "bin" / "sacct").write_text(f"#!/bin/sh\ncat {tmp_path / 'ended'}\n")
    states = [entry.state for entry in entries_of(folder(requested)).values()]
    assert states == ["CANCELLED", "OUT_OF_MEMORY", "", ""]


@pytest.mark.parametrize(("retry_failed", "submitted"), [(False, 3), (True, 4)])
def test_a_run_whose_job_crashed_is_failed_and_submitted_again_when_asked_for(
    tiny_run, fake_slurm, instant, capsys, retry_failed, submitted
):
    requested = study(tiny_run, "seeds=0,1")
    launch(*requested, Slurm())
    job = plan(*requested).jobs[1]
    instant.end(job, "running")
    fake_slurm.queue.write_text("1_1|OUT_OF_MEMORY\n")
    assert launch(*requested, Slurm(), retry_failed=retry_failed) == 0
    assert f"{submitted} runs submitted" in capsys.readouterr().err
    assert "ended as OUT_OF_MEMORY" in read_run(job.path).status["reason"]
    assert launch(*requested, Slurm(), retry_failed=True) == 0
    assert "4 runs submitted" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- a real cluster


class Cluster:
    """Two nodes with two cores and two GPUs each, and a copy of the code that nobody edits meanwhile."""

    def __init__(self, root: Path, plugin: Path) -> None:
        self.root, self.plugin, self.put_back = root, plugin, {}
        self.command = [sys.executable, "-m", "nexus_ablate", "--plugin", str(plugin)]

    def nexus(self, *arguments):
        command = [*self.command, *arguments]  # in another folder than the code, which Python would prefer
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=self.root)

    def jobs(self):
        """State and reason of each job that was not forgotten."""
        accounting = subprocess.run(
            ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r"], capture_output=True, text=True
        )
        return {row[0]: row[1:] for row in (line.split("|") for line in accounting.stdout.splitlines())}

    def release(self):
        """Jobs that were put back begin soon. SLURM itself waits two minutes, because the end of their last life is
        still on its way; three seconds do here."""
        now = time.monotonic()
        waiting = [job for job, (state, reason) in self.jobs().items() if (state, reason) == ("PENDING", "BeginTime")]
        self.put_back = {job: self.put_back.get(job, now) for job in waiting}
        for job, since in self.put_back.items():
            if now - since > 3:
                subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], capture_output=True)

    def settle(self, seconds=400.0, driver=None):
        """Wait until no job is left and the driver has ended."""
        end = time.monotonic() + seconds
        while any(state not in ENDED for state, _ in self.jobs().values()) or (driver and driver.poll() is None):
            assert time.monotonic() < end, self.jobs()
            self.release()
            time.sleep(0.3)

    def run_of(self, runs_dir, part, rows_at_least=0, seconds=120.0):
        """The run of a part, once its log is as long as that; a run that is waited for is running."""
        end = time.monotonic() + seconds
        while True:
            for path in find_runs([runs_dir]) if runs_dir.exists() else []:
                run, log = read_run(path), path / "metrics.jsonl"
                if run.config is None or run.config["norm"].get("part") != part:
                    continue
                long = log.exists() and len(log.read_text().splitlines()) >= rows_at_least
                if long and (run.state == "running" or not rows_at_least):
                    return run
            assert time.monotonic() < end, (part, self.jobs())
            self.release()
            time.sleep(0.1)

    def disturb(self, runs_dir, held):
        """Take the node of part 7 for a more important job, and cancel the job of part 9.

        Both wait in a step while the file `held` is there, so that neither ends before it is stopped.
        """
        victim = self.run_of(runs_dir, 7, rows_at_least=4)
        flags = ["--partition=high", f"--nodelist={victim.env['slurm_node']}", "--gres=gpu:2", "--mem=100"]
        subprocess.run(["sbatch", *flags, "--output=/dev/null", "--wrap=sleep 1"], check=True, capture_output=True)
        self.until_preempted(victim)
        cancelled = self.run_of(runs_dir, 9, rows_at_least=3)
        subprocess.run(["scancel", cancelled.env["slurm_job"]], check=True)
        self.until_preempted(cancelled)
        held.unlink()

    def until_preempted(self, run, seconds=120.0):
        end = time.monotonic() + seconds
        while read_run(run.path).state != "preempted":
            assert time.monotonic() < end, self.jobs()
            time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    root = tmp_path_factory.mktemp("slurm")
    for name in ("nexus_ablate", "conf"):
        shutil.copytree(ROOT / name, root / "code" / name, ignore=shutil.ignore_patterns("__pycache__"))
    up = subprocess.run([ROOT / "scripts" / "slurm_up", root / "cluster"], capture_output=True, text=True, timeout=60)
    assert up.returncode == 0, up.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(root / "cluster" / "slurm.conf"))
        patch.setenv("PATH", f"{root / 'cluster' / 'bin'}:{os.environ['PATH']}")
        patch.setenv("PYTHONPATH", str(root / "code"))
        yield Cluster(root, write_plugin(root / "plugin"))
    subprocess.run([ROOT / "scripts" / "slurm_down", root / "cluster"], timeout=60, check=True)


@pytest.fixture
def trials(cluster, tiny_run, tmp_path, monkeypatch):
    """Overrides of runs with some parts; what each would be undisturbed."""
    runs_dir = tmp_path / "runs"
    monkeypatch.setenv(PLUGINS, "")  # what a test composes with the plugin is not for the tests after it

    class Trials:
        directory = runs_dir / "trials"
        held = tmp_path / "held"
        overrides = tiny_run("norm=trial", "train.steps=30")

        def study(self, *parts):
            return ["study", "trials", f"vary.norm.part={','.join(map(str, parts))}", "seeds=0-0", *self.overrides]

        def hold(self):
            """Let slow runs wait in a step until `Cluster.disturb`."""
            self.held.touch()
            monkeypatch.setenv("TRIAL_HELD_BY", str(self.held))

        def undisturbed(self, part):
            monkeypatch.setenv("TRIAL_IN_A_HURRY", "1")
            overrides = [*self.overrides, f"norm.part={part}", f"runs_dir={tmp_path / 'alone'}"]
            return logged(train(compose(overrides, plugins=[cluster.plugin]), quiet=True).path)

        def states(self):
            runs = [read_run(path) for path in find_runs([runs_dir])]
            return {(run.config or {})["norm"]["part"]: run.state for run in runs}

        def finished(self):
            """Metrics and result of each finished run, and when they were written."""
            runs = [path for path in find_runs([runs_dir]) if read_run(path).state == "finished"]
            files = [path / name for path in runs for name in ("metrics.jsonl", "summary.json", "status.json")]
            return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}

    return Trials()


SUBMIT = ("--launcher", "slurm", "--gres", "gpu:1", "--mem-gb", "1", "--cpus", "1")


@pytest.mark.slow
@WITH_SLURM
def test_a_submitted_study_outlives_preemption_cancelling_and_a_failure(cluster, trials):
    trials.hold()
    done = cluster.nexus(*trials.study(0, 7, 9, 10), *SUBMIT)
    assert done.returncode == 0, done.stderr
    assert "4 runs submitted" in done.stderr
    again = cluster.nexus(*trials.study(0, 7, 9, 10), *SUBMIT)
    assert "0 runs submitted, 4 already in the queue" in again.stderr, again.stderr
    cluster.run_of(trials.directory, 7)  # SLURM starts jobs seconds after they were submitted
    printed = cluster.nexus("status", str(trials.directory)).stdout
    assert re.search("[1-4] (created|running)", printed), printed

    cluster.disturb(trials.directory, trials.held)
    cluster.settle()
    assert trials.states() == {0: "finished", 7: "finished", 9: "preempted", 10: "failed"}
    preempted = cluster.run_of(trials.directory, 7)
    assert preempted.env["slurm_restarts"] >= 1
    assert logged(preempted.path) == trials.undisturbed(7)
    printed = " ".join(cluster.nexus("status", str(trials.directory)).stdout.split())
    assert "norm.part=9 s0 preempted: stopped by SIGTERM" in printed
    assert "RuntimeError: made to fail" in printed

    before = trials.finished()
    more = cluster.nexus(*trials.study(0, 7, 9, 10), *SUBMIT)
    assert "1 run submitted" in more.stderr, more.stderr
    cluster.settle()
    assert trials.states() == {0: "finished", 7: "finished", 9: "finished", 10: "failed"}
    assert {file: state for file, state in trials.finished().items() if file in before} == before
    assert logged(cluster.run_of(trials.directory, 9).path) == trials.undisturbed(9)
    nothing = cluster.nexus(*trials.study(0, 7, 9, 10), *SUBMIT)
    assert "nothing to run: all 4 runs have ended" in nothing.stderr
    assert nothing.returncode == errors.BUG, "as the failed run"


@pytest.mark.slow
@WITH_SLURM
@pytest.mark.parametrize(
    "begins", [["study", "leaks", "vary.norm.fails=on", "seeds=0-0"], ["-m", "norm.fails=off,on"]], ids=["study", "-m"]
)
def test_jobs_that_leak_and_fail_leave_no_secret_in_any_file(cluster, tiny_run, tmp_path, monkeypatch, begins):
    monkeypatch.setenv(PLUGINS, "")
    monkeypatch.setenv("LEAK_BELOW_PYTHON", "1")
    monkeypatch.setenv("LEAK_ENDS_BY", "SystemExit")
    for name, secret in ENVIRONMENT.items():
        monkeypatch.setenv(name, secret)  # SLURM gives it to the jobs
    plugin = ["--plugin", str(write_leaking_plugin(tmp_path / "leaks"))]
    words = [*begins, *tiny_run("norm=leak", "train.steps=4")]
    words += [f"question=is it {' or '.join(TYPED.values())}?"] if "study" in begins else []
    done = cluster.nexus(*plugin, *words, *SUBMIT)
    assert done.returncode == 0, done.stderr
    typed = cluster.nexus(*plugin, *words, "tracker=auto", f"tracker.entity='{TYPED['with a prefix']}'", *SUBMIT)
    assert typed.returncode == errors.CONFIG and "contains a secret" in typed.stderr
    cluster.settle()
    printed = cluster.nexus("status", str(tmp_path / "runs")).stdout
    assert "login refused: <secret>" in printed
    assert "finished" in printed
    assert traces(tmp_path / "runs", done.stdout + done.stderr + typed.stdout + typed.stderr + printed) == []
    logs = [path.read_text() for path in (tmp_path / "runs").rglob("*_log.out")]
    assert len(logs) == 2 and all("printed <secret>" in log and "child <secret>" in log for log in logs)

    monkeypatch.setenv("PYTHONPATH", f"{write_control(tmp_path / 'control')}:{os.environ['PYTHONPATH']}")
    cluster.nexus(*plugin, *words, f"runs_dir={tmp_path / 'unmasked'}", *SUBMIT)
    cluster.settle()
    leaks = {Path(place).name for place in traces(tmp_path / "unmasked")}
    assert {"status.json", "log.txt"} <= leaks and any(name.endswith("_log.out") for name in leaks)


def test_a_typed_secret_is_not_handed_to_a_job_which_would_keep_it_in_a_file(tiny_run, fake_slurm, tmp_path, capsys):
    words = [*tiny_run(), "vary.norm=layer", "tracker=auto", f"tracker.entity='{TYPED['with a prefix']}'"]
    assert main(["study", "mine", *words, "--launcher", "slurm"]) == errors.CONFIG
    said = capsys.readouterr().err
    assert "contains a secret" in said and "canary" not in said
    assert not (tmp_path / "runs").exists()
    assert not fake_slurm.scripts.exists()


ALL = tuple(range(12))
TRUE_ENDS = {**dict.fromkeys(range(9), "finished"), 9: "preempted", 10: "failed", 11: "failed"}


def gpus_are_shared_out(directory):
    """Every run had one GPU, and all four were used."""
    runs = [read_run(path) for path in find_runs([directory])]
    used = {(run.env["slurm_node"], run.env["cuda_visible_devices"]) for run in runs}
    assert used == {(node, gpu) for node in ("n1", "n2") for gpu in ("0", "1")}


@pytest.mark.slow
@pytest.mark.long
@WITH_SLURM
def test_twelve_submitted_runs_survive_every_failure(cluster, trials):
    submit = [*SUBMIT, "--time", "1"]
    trials.hold()
    done = cluster.nexus(*trials.study(*ALL), *submit)
    assert done.returncode == 0, done.stderr
    assert "12 runs submitted" in done.stderr
    cluster.disturb(trials.directory, trials.held)
    cluster.settle()
    lost = trials.states()
    assert lost == TRUE_ENDS | {11: "lost"}, "a process that is gone cannot say so; SLURM knows"
    assert "RuntimeError: made to fail" in cluster.nexus("status", str(trials.directory)).stdout
    gpus_are_shared_out(trials.directory)
    for part in (7, 8):
        run = cluster.run_of(trials.directory, part)
        assert run.env["slurm_restarts"] >= 1
        assert logged(run.path) == trials.undisturbed(part)

    before = trials.finished()
    more = cluster.nexus(*trials.study(*ALL), *submit)
    assert "1 run submitted" in more.stderr, "the cancelled one; failed ones are tried again when asked to"
    cluster.settle()
    assert trials.states() == TRUE_ENDS | {9: "finished"}
    assert {file: state for file, state in trials.finished().items() if file in before} == before
    compared = cluster.nexus("compare", str(trials.directory))
    assert compared.returncode == 0, compared.stderr


BY_SLURM = ("--launcher slurm --time 5", "hydra/launcher=submitit_slurm hydra.launcher.timeout_min=5")


@pytest.mark.slow
@WITH_SLURM
@pytest.mark.parametrize("launcher", BY_SLURM)
def test_a_multirun_is_submitted_and_ends_with_the_losses_of_runs_on_this_machine(cluster, trials, launcher):
    resources = ["--gres", "gpu:1", "--mem-gb", "1", "--cpus", "1"]
    words = ["-m", *trials.overrides, "norm.part=7,9", *resources, *launcher.split()]
    done = cluster.nexus(*words)
    assert done.returncode == 0, done.stderr
    assert "2 runs submitted" in done.stderr
    again = cluster.nexus(*words)
    assert "0 runs submitted, 2 already in the queue" in again.stderr
    cluster.settle()
    swept = trials.directory.parent / "norm.part=7,9"
    assert trials.states() == {7: "finished", 9: "finished"}
    for part in (7, 9):
        assert logged(cluster.run_of(swept, part).path) == trials.undisturbed(part)
    nothing = cluster.nexus(*words)
    assert nothing.returncode == 0 and "nothing to run: all 2 runs have ended" in nothing.stderr
