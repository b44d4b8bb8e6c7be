"""The W&B mirror: what it sends, and that nothing W&B does or fails to do reaches the run."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from written_runs import Writer, config_of

from nexus_ablate import __version__
from nexus_ablate.config.options import default_option, option_files
from nexus_ablate.runs import read_run
from nexus_ablate.runs.formats import WandbRun
from nexus_ablate.track import FilesTracker, account, mirror, run_on_wandb, start_tracker
from nexus_ablate.track.run_on_wandb import settings_of

KEY = "k3y" * 14


def option(name):
    return default_option("tracker", name)


# What `auto` means


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """An environment without any trace of W&B."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    return tmp_path


@pytest.fixture
def keyed(bare, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)


SERVER = "machine wandb.example:8080\n  login user\n  password k3y\n"
DEFAULT_SERVERS = [
    f"machine {host}\n  login user\n  password k3y\n" for host in ("api.wandb.ai", "api.forge.coreweave.com")
]
WITH_KEY = {"WANDB_API_KEY": KEY}


def test_every_option_file_is_well_formed_and_files_has_no_key():
    files = option_files("tracker")
    assert sorted(files) == ["auto", "files", "wandb", "wandb_offline"]
    assert files["files"].keys == {}
    for name in ("auto", "wandb", "wandb_offline"):
        assert {k: v.default for k, v in files[name].keys.items()} == {"project": "nexus-ablate", "entity": "none"}


@pytest.mark.parametrize(
    ("name", "variables", "netrc", "settings", "expected"),
    [
        ("auto", {}, "", "", "files"),
        ("auto", WITH_KEY, "", "", "wandb"),
        ("auto", {"WANDB_IDENTITY_TOKEN_FILE": KEY}, "", "", "wandb"),
        *(("auto", {}, server, "", "wandb") for server in DEFAULT_SERVERS),
        # the server that is configured, and no other
        ("auto", {}, SERVER, "", "files"),
        ("auto", {"WANDB_BASE_URL": "https://wandb.example:8080"}, SERVER, "", "wandb"),
        ("auto", {}, SERVER, "[default]\nbase_url = https://wandb.example:8080\n", "wandb"),
        # a netrc without a key, and files that cannot be read
        ("auto", {}, "machine api.wandb.ai login", "", "files"),
        ("auto", {}, "default login user password x", "", "files"),
        ("auto", {}, "machine api.wandb.ai login user\n", "", "files"),
        ("auto", {}, "\xff", "", "files"),
        ("auto", WITH_KEY, "", "mode = offline\n", "wandb"),
        # the mode that the user gave W&B
        *(
            ("auto", WITH_KEY | {"WANDB_MODE": mode}, "", "", expected)
            for mode, expected in (("offline", "wandb_offline"), ("disabled", "files"), ("online", "wandb"))
        ),
        ("auto", WITH_KEY, "", "[default]\nmode = offline\n", "wandb_offline"),
        # W&B is off where the machine says so, whatever is chosen
        *((name, {"WANDB_MODE": "disabled"}, "", "", "files") for name in ("files", "wandb", "wandb_offline")),
        *((name, WITH_KEY | {"WANDB_DISABLED": "true"}, "", "", "files") for name in ("auto", "wandb")),
        ("wandb", WITH_KEY | {"WANDB_MODE": "offline"}, "", "", "wandb_offline"),
        ("wandb", {"WANDB_MODE": "online", "WANDB_DISABLED": "false"}, "", "", "wandb"),
    ],
)
def test_auto_follows_credentials_and_the_mode_of_wandb(bare, monkeypatch, name, variables, netrc, settings, expected):
    (bare / "netrc").write_bytes(netrc.encode("latin-1"))
    (bare / "wandb-config").mkdir()
    (bare / "wandb-config" / "settings").write_text(settings)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert account.resolve_mode(option(name)) == expected


# A stand-in for the package: what the mirror calls, and every way it can go wrong


class FakeRun:
    url, dir, entity, resumed = "http://wandb.example/run", "/run/files", "me", False

    def __init__(self):
        self.starting_step = 0
        self.rows = []
        self.media = []
        self.metrics = []
        self.summary = {}
        self.exit_code = None
        self.preempting = False
        self.on_log = lambda: None
        self.on_finish = lambda: None

    def define_metric(self, name, step_metric, summary=None):
        self.metrics.append((name, step_metric, summary))

    def log(self, row, step=None, commit=None):
        if not row:
            assert commit and not self.summary.get("status"), "an open row would replace the summary's values"
            return
        self.on_log()
        if step is None:
            self.media.append(row)
        else:
            self.rows.append((row, step))

    def mark_preempting(self):
        self.preempting = True

    def finish(self, exit_code):
        self.on_finish()
        self.exit_code = exit_code


class FakeWandb(ModuleType):
    """`wandb` with one run, and a hook that runs inside `init`."""

    def __init__(self):
        super().__init__("wandb")
        self.run = FakeRun()
        self.on_init = lambda: None
        self.inits = []
        self.Settings = type("Settings", (SimpleNamespace,), {"model_fields": AnyName()})
        self.Table = self.Image = lambda *arguments, **named: (*arguments, named)

    def setup(self, settings):
        assert settings.silent

    def init(self, config, settings):
        self.on_init()
        self.inits.append((vars(settings), config))
        self.run.id, self.run.project = settings.run_id, settings.project
        return self.run


class AnyName:
    def __contains__(self, name):
        return True


@pytest.fixture
def fake(monkeypatch):
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    yield module
    for thread in threading.enumerate():  # one that was left behind would go on to import the real package
        if thread.name == "wandb-mirror":
            thread.join(30)


@pytest.fixture
def lines():
    return []


class Training:
    """A run directory that is being written, and its tracker."""

    def __init__(self, path, say):
        self.path, self.say = path, say

    def start(self, name="wandb", patience=5.0):
        return start_tracker(option(name), self.path, self.say, self.say, patience)

    def row(self, step, **more):
        with (self.path / "metrics.jsonl").open("a") as log:
            log.write(json.dumps(row(step) | more) + "\n")


@pytest.fixture
def training(tmp_path, keyed, lines):
    def say(line):
        assert threading.current_thread() is threading.main_thread()
        lines.append(line)

    path = Writer(tmp_path, "norms").run("norm=layer", seed=3, state="running")
    (path / "metrics.jsonl").write_text("")
    return Training(path, say)


def row(step):
    return {"step": step, "tokens": 100 * step, "flops": 1e6 * step, "seconds": step / 10, "train/loss": 1 / (step + 1)}


def test_files_alone_is_no_thread_and_no_file(training, fake):
    threads, files = threading.active_count(), sorted(training.path.iterdir())
    with training.start("files") as tracker:
        tracker.row_written()
    assert isinstance(tracker, FilesTracker)
    assert threading.active_count() == threads
    assert sorted(training.path.iterdir()) == files and fake.inits == []


def test_the_run_is_described_to_wandb(training, fake, lines):
    training.start().finish("finished", {})
    settings, config = fake.inits[0]
    expected = {
        "mode": "online",
        "project": "nexus-ablate",
        "entity": None,
        "run_group": "norms",
        "run_job_type": "train",
        "run_name": "norm=layer/s3",
        "resume": "allow",
        "root_dir": str(training.path),
        "reinit": "create_new",
        "console": "off",
        "silent": True,
        "disable_git": True,
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_save_requirements": False,
        "x_transaction_log_flush_interval": 1.0,
    }
    assert settings.items() >= expected.items()
    assert settings["stop_fn"]() is None, "the Stop button in the browser does not reach the run"
    assert settings["run_tags"][:2] == ("norm=layer", "placement=pre")
    flat = {"study": "norms", "arm": "norm=layer", "seed": 3, "axis/norm": "layer", "axis/placement": "pre"}
    assert config.items() >= flat.items()
    typed, _ = config_of(("norm=layer",))
    assert config["model"] == typed["model"] and config["norm"] == typed["norm"], "nested as typed"
    assert fake.run.metrics == [("*", "tokens", None)]
    assert lines == [f"W&B: {fake.run.url}"]


def test_a_second_run_of_the_same_arm_and_seed_is_told_from_the_first(training, fake):
    described = []
    again = training.path.with_name(f"{training.path.name}-r2")
    shutil.copytree(training.path, again)
    for record in map(read_run, (training.path, again)):
        settings = settings_of(record, WandbRun("a1", "p"), "online", training.path, 1.0, 1.0)
        config = run_on_wandb.config_of(record)
        described.append((settings["run_name"], config["repetition"], config["id"]))
    (first, one, first_id), (second, two, second_id) = described
    assert (first, one, second, two) == ("norm=layer/s3", 1, "norm=layer/s3-r2", 2) and second_id == f"{first_id}-r2"


def test_settings_that_this_version_of_wandb_lacks_are_left_out(training, fake, lines):
    fake.Settings.model_fields = {"mode": None, "project": None, "run_name": None}
    training.start().finish("finished", {})
    assert fake.inits[0][0] == {"mode": "online", "project": "nexus-ablate", "run_name": "norm=layer/s3"}


def test_names_and_tags_that_wandb_would_refuse_are_cut(tmp_path, fake, keyed):
    path = Writer(tmp_path, "s" * 200).run("norm=layer", folder="a" * 200, state="running")
    start_tracker(option("wandb"), path, print, print, 5.0).finish("finished", {})
    settings, _ = fake.inits[0]
    assert len(settings["run_name"]) == len(settings["run_group"]) == 128
    assert max(map(len, settings["run_tags"])) <= 64


def test_the_service_of_another_process_is_not_used_and_this_one_s_is_kept(training, fake, monkeypatch):
    """W&B passes its address on to child processes, and it ends with its own process."""
    seen = []
    fake.on_init = lambda: seen.append(os.environ.get("WANDB_SERVICE"))
    for address in ("3-1-unix-/nowhere", f"3-{os.getpid()}-unix-/socket"):
        monkeypatch.setenv("WANDB_SERVICE", address)
        training.start().finish("finished", {})
    assert seen == [None, address]


def test_a_run_directory_keeps_its_place_on_wandb_and_two_directories_differ(training, fake):
    training.start().finish("preempted", {})
    training.start(patience=60).finish("finished", {})  # whoever still sends keeps others from it
    kept = json.loads((training.path / "wandb.json").read_text())
    place = {"id": fake.inits[0][0]["run_id"], "project": "nexus-ablate", "entity": "me"}
    assert kept == place | {"url": fake.run.url}
    (training.path / "wandb.json").unlink()
    training.start().finish("finished", {})
    first, again, other = (settings["run_id"] for settings, _ in fake.inits)
    assert first == again != other


def test_numbers_are_sent_and_one_that_is_not_finite_replaces_the_last_that_was(training, fake):
    tracker = training.start()
    training.row(7, zero=0.0, none=None, nonfinite=["none"], batch_hash="abc")
    tracker.finish(
        "finished", {"val_loss": 2.0, "none": None, "deep": {"nan": float("nan"), "k": "text", "n": {"2": 1}}}
    )
    assert math.isnan(fake.run.rows[0][0].pop("none"))
    assert fake.run.rows == [({**row(7), "zero": 0.0}, 7)]
    assert fake.run.summary == {"val_loss": 2.0, "deep/k": "text", "deep/n/2": 1, "status": "finished"}


def test_a_finished_run_shows_its_blocks_as_pictures_once(training, fake, monkeypatch):
    training.start().finish("preempted", {})
    assert fake.run.media == [], "rows are to come"
    training.start().finish("finished", {})
    (sent,) = fake.run.media
    assert sent["heat_map/act/resid/kurtosis_token"][0].shape[2] == 4
    fake.run.summary |= {key: {} for key in sent}
    training.start().finish("finished", {})
    assert len(fake.run.media) == 1


@pytest.mark.parametrize(
    ("status", "exit_code", "preempting"), [("finished", 0, False), ("diverged", 1, False), ("preempted", 1, True)]
)
def test_wandb_is_told_once_how_the_run_ended(training, fake, status, exit_code, preempting):
    with training.start() as tracker:
        tracker.finish(status, {})
    assert (fake.run.summary["status"], fake.run.exit_code, fake.run.preempting) == (status, exit_code, preempting)


def test_an_error_of_the_training_makes_the_copy_failed(training, fake):
    with pytest.raises(ZeroDivisionError), training.start():
        raise ZeroDivisionError
    assert fake.run.summary["status"] == "failed"


def test_rows_go_as_they_are_written_and_a_half_written_one_waits(training, fake):
    tracker = training.start()
    training.row(0)
    log = (training.path / "metrics.jsonl").open("a")
    line = json.dumps(row(1)) + "\n"
    log.write(line[:15])
    log.flush()
    tracker.row_written()
    until(lambda: len(fake.run.rows) == 1, tracker)
    log.write(line[15:])
    log.close()
    tracker.finish("finished", {})
    assert fake.run.rows == [(row(0), 0), (row(1), 1)]


def test_a_resumed_run_sends_what_wandb_lacks_and_nothing_twice(training, fake):
    for step in range(5):
        training.row(step)
    fake.run.starting_step = 2
    training.start().finish("finished", {})
    assert fake.run.rows == [(row(step), step) for step in (2, 3, 4)]


def test_control_a_wandb_that_does_not_say_what_it_has_gets_it_again(training, fake):
    training.row(0)
    training.start().finish("preempted", {})
    training.start().finish("finished", {})
    assert fake.run.rows == [(row(0), 0)] * 2


def test_the_log_is_not_read_before_the_run_has_cut_it_back_to_its_checkpoint(training, fake):
    for step in range(6):
        training.row(step)
    tracker = training.start()
    until(lambda: bool(fake.inits), tracker, wake=False)
    (training.path / "metrics.jsonl").write_text(json.dumps(row(0)) + "\n")
    training.row(1, later=2.0)
    tracker.finish("finished", {})
    assert fake.run.rows == [(row(0), 0), ({**row(1), "later": 2.0}, 1)]


def test_control_read_earlier_the_log_holds_rows_that_the_run_takes_back(training, fake):
    for step in range(6):
        training.row(step)
    tracker = training.start()
    until(lambda: len(fake.run.rows) == 6, tracker)
    tracker.finish("finished", {})
    assert fake.run.rows[-1] == (row(5), 5)


# Isolation


def fails(error):
    def fail():
        raise error

    return fail


def until(reached, tracker, wake=True):
    deadline = time.monotonic() + 10
    while not reached() and time.monotonic() < deadline:
        if wake:
            tracker.row_written()
        time.sleep(0.01)
    assert reached()


def seconds_for_1000_rows(training):
    training.row(0)
    begun = time.perf_counter()
    tracker = training.start(patience=0.2)
    for _ in range(1000):
        tracker.row_written()
    return tracker, time.perf_counter() - begun


def test_a_wandb_that_never_answers_holds_up_neither_the_rows_nor_the_end(training, fake, lines):
    gate = threading.Event()
    fake.on_init = lambda: gate.wait(30)
    tracker, seconds = seconds_for_1000_rows(training)
    assert seconds < 1
    begun = time.perf_counter()
    tracker.finish("finished", {})
    assert time.perf_counter() - begun < 1
    where = f"nothing is lost: `nexus-ablate sync {training.path}` sends the rest"
    assert lines == [f"W&B did not answer within 0.2 s, so the upload was stopped; {where}"]
    gate.set()


def test_control_without_the_thread_the_same_wandb_does_hold_up_the_rows(training, lines, monkeypatch):
    class Inline(threading.Thread):
        def start(self):
            self.run()

    def answer_late(*_):
        time.sleep(1.1)
        raise TimeoutError

    monkeypatch.setattr(mirror.threading, "Thread", Inline)
    monkeypatch.setattr(mirror, "Upload", answer_late)
    _, seconds = seconds_for_1000_rows(training)
    assert seconds > 1, lines


@pytest.mark.slow
def test_a_wandb_that_is_too_slow_for_the_rows_lags_behind_and_lacks_none(training, fake):
    fake.run.on_log = lambda: time.sleep(0.03)
    tracker = training.start(patience=30)
    begun = time.perf_counter()
    for step in range(100):
        training.row(step)
        tracker.row_written()
    assert len(fake.run.rows) < 100, "W&B is still busy with the rows that are written"
    tracker.finish("finished", {})
    assert [step for _, step in fake.run.rows] == list(range(100))
    assert time.perf_counter() - begun > 3


@pytest.mark.parametrize(("status", "patience", "seconds"), [("failed", 0.5, "0.5"), ("preempted", 30.0, "0.1")])
def test_a_wandb_that_hangs_at_the_end_is_left_behind(training, fake, lines, monkeypatch, status, patience, seconds):
    monkeypatch.setattr(mirror, "PREEMPTED_PATIENCE", 0.1)  # a scheduler kills the process soon
    gate = threading.Event()
    fake.run.on_finish = lambda: gate.wait(30)
    training.start(patience=patience).finish(status, {})
    assert [f"did not answer within {seconds} s" in line for line in lines] == [False, True]
    gate.set()


UNANSWERED = """
import sys, torch
from pathlib import Path
from nexus_ablate.cli import main
from nexus_ablate.track.mirror import WandbTracker

def never_answers():
    numbers = torch.ones(3000, 3000)
    while True:
        numbers.relu()

WandbTracker(never_answers, Path(sys.argv[1]), print, print, patience=0.1).finish("finished", {})
sys.argv = ["nexus-ablate", "--version"]
status = main(ARGUMENTS)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [("None", 0), pytest.param('["--version"]', -signal.SIGABRT, id="control: Python ends, not the command")],
)
def test_a_command_whose_upload_is_stopped_ends_with_its_own_status(tmp_path, arguments, status):
    code = UNANSWERED.replace("ARGUMENTS", arguments)
    ended = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stderr
    assert ended.stdout.splitlines()[1:] == [__version__], "what was printed before is not lost"


def test_a_missing_package_is_said_once_and_nothing_else_happens(training, lines, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with training.start() as tracker:
        until(lambda: bool(lines), tracker)
        tracker.row_written()
    assert len(lines) == 1
    assert lines[0].startswith("W&B failed (ModuleNotFoundError: ")
    assert lines[0].endswith(f"nothing is lost: `nexus-ablate sync {training.path}` sends the rest")


def test_an_error_in_the_middle_is_said_once_and_ends_the_copy(training, fake, lines):
    fake.run.on_log = fails(ConnectionResetError("went\naway"))
    training.row(0)
    with training.start() as tracker:
        until(lambda: len(lines) == 2, tracker)
        for _ in range(10):
            tracker.row_written()
    assert lines[1].startswith("W&B failed (ConnectionResetError: went away); ")
    assert len(lines) == 2 and fake.run.rows == []


def test_a_run_directory_that_cannot_be_read_ends_the_copy_only(fake, lines, keyed):
    with start_tracker(option("wandb"), Path("/nowhere"), lines.append, lines.append) as tracker:
        tracker.row_written()
    assert len(lines) == 1 and lines[0].startswith("W&B failed (FileNotFoundError: ") and fake.inits == []


def test_without_credentials_wandb_is_never_asked_since_it_would_ask_the_user(training, fake, lines, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY")
    tracker = training.start("wandb")
    assert isinstance(tracker, FilesTracker) and fake.inits == []
    assert len(lines) == 1 and "wandb login" in lines[0]


@pytest.fixture
def key_in_netrc(training, bare, monkeypatch):
    """A key that no variable of the environment holds: those are masked anyway."""
    monkeypatch.delenv("WANDB_API_KEY")
    (bare / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")


def leaks(training, fake, lines):
    (training.path / "config.yaml").write_text(f"data: {{path: ['https://me:passw0rd@host/x', {KEY}]}}\n")
    training.start().finish("failed", {})
    fake.on_init = fails(ValueError(f"key {KEY} refused by https://me:passw0rd@wandb.example"))
    training.start().finish("failed", {})
    return " ".join(lines) + json.dumps(fake.inits[0][1])


def test_no_secret_reaches_the_terminal_or_the_config(training, fake, lines, key_in_netrc):
    text = leaks(training, fake, lines)
    assert KEY not in text and "passw0rd" not in text
    assert "https://<secret>@wandb.example" in text and "https://<secret>@host/x" in text


def test_control_without_redaction_the_secrets_do_reach_them(training, fake, lines, monkeypatch, key_in_netrc):
    for module in (run_on_wandb, account):
        monkeypatch.setattr(module, "redact", lambda value: value)
    text = leaks(training, fake, lines)
    assert text.count(KEY) == 2
    assert text.count("passw0rd") == 1, "on a terminal whatever looks like a password is masked anyway"
