"""The W&B mirror: what it sends, and that nothing W&B does or fails to do reaches the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from wandb_server import SLOW_SECONDS, Behaviour, WandbServer, serving

from nexus_ablate import track
from nexus_ablate.registry import Option, check_option, option_files
from nexus_ablate.track import FilesTracker, Tracker, WandbTracker, resolve_mode, start_tracker

KEY = "k3y" * 14
ROOT = Path(__file__).parent.parent


def option(name: str) -> Option:
    return check_option(
        "tracker", {k.name: k.default for k in option_files("tracker")[name].keys.values()} | {"name": name}
    )


# What `auto` means


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment without any trace of W&B."""
    return {"NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path / "wandb-config")}


def write_netrc(environ: dict[str, str], text: str) -> None:
    Path(environ["NETRC"]).write_text(text)


def write_settings(environ: dict[str, str], text: str) -> None:
    Path(environ["WANDB_CONFIG_DIR"]).mkdir()
    Path(environ["WANDB_CONFIG_DIR"], "settings").write_text(text)


def test_every_option_file_is_well_formed_and_files_has_no_key():
    files = option_files("tracker")
    assert sorted(files) == ["auto", "files", "wandb", "wandb_offline"]
    assert files["files"].keys == {}
    for name in ("auto", "wandb", "wandb_offline"):
        assert {k: v.default for k, v in files[name].keys.items()} == {"project": "nexus-ablate", "entity": "none"}


def test_auto_is_files_alone_where_no_credentials_are(bare: dict[str, str]):
    assert resolve_mode(option("auto"), bare) == "files"


@pytest.mark.parametrize("variable", ["WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"])
def test_auto_is_wandb_where_a_variable_gives_credentials(bare: dict[str, str], variable: str):
    assert resolve_mode(option("auto"), bare | {variable: KEY}) == "wandb"


@pytest.mark.parametrize("host", ["api.wandb.ai", "api.forge.coreweave.com"])
def test_auto_is_wandb_where_the_netrc_file_knows_the_default_server(bare: dict[str, str], host: str):
    write_netrc(bare, f"machine {host}\n  login user\n  password {KEY}\n")
    assert resolve_mode(option("auto"), bare) == "wandb"


def test_auto_looks_for_the_server_that_is_configured_and_no_other(bare: dict[str, str]):
    write_netrc(bare, f"machine wandb.example:8080\n  login user\n  password {KEY}\n")
    assert resolve_mode(option("auto"), bare) == "files"
    assert resolve_mode(option("auto"), bare | {"WANDB_BASE_URL": "https://wandb.example:8080"}) == "wandb"
    write_settings(bare, "[default]\nbase_url = https://wandb.example:8080\n")
    assert resolve_mode(option("auto"), bare) == "wandb"


@pytest.mark.parametrize(
    "text", ["machine api.wandb.ai login", "default login user password x", "machine api.wandb.ai login user\n", "\xff"]
)
def test_auto_takes_a_netrc_file_without_a_key_for_no_credentials(bare: dict[str, str], text: str):
    Path(bare["NETRC"]).write_bytes(text.encode("latin-1"))
    assert resolve_mode(option("auto"), bare) == "files"


@pytest.mark.parametrize(
    ("mode", "expected"), [("offline", "wandb_offline"), ("disabled", "files"), ("online", "wandb")]
)
def test_auto_follows_the_mode_that_the_user_gave_wandb(bare: dict[str, str], mode: str, expected: str):
    assert resolve_mode(option("auto"), bare | {"WANDB_API_KEY": KEY, "WANDB_MODE": mode}) == expected
    write_settings(bare, f"[default]\nmode = {mode}\n")
    assert resolve_mode(option("auto"), bare | {"WANDB_API_KEY": KEY}) == expected


def test_auto_takes_a_broken_settings_file_for_an_empty_one(bare: dict[str, str]):
    write_settings(bare, "mode = offline\n")
    assert resolve_mode(option("auto"), bare | {"WANDB_API_KEY": KEY}) == "wandb"


@pytest.mark.parametrize("name", ["files", "wandb", "wandb_offline"])
def test_a_chosen_mode_stands_whatever_the_environment_says(bare: dict[str, str], name: str):
    assert resolve_mode(option(name), bare | {"WANDB_MODE": "disabled"}) == name


# A stand-in for the package: what the mirror calls, and every way it can go wrong


class FakeRun:
    url, dir, step, resumed = "http://wandb.example/run", "/run/files", 0, False

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, Any], int]] = []
        self.metrics: list[tuple[str, str]] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.preempting = False
        self.on_log: Callable[[], object] = lambda: None
        self.on_finish: Callable[[], object] = lambda: None

    def define_metric(self, name: str, step_metric: str) -> None:
        self.metrics.append((name, step_metric))

    def log(self, row: dict[str, Any], step: int) -> None:
        self.on_log()
        self.rows.append((row, step))

    def mark_preempting(self) -> None:
        self.preempting = True

    def finish(self, exit_code: int) -> None:
        self.on_finish()
        self.exit_code = exit_code


class FakeWandb(ModuleType):
    """`wandb` with one run, and a hook that runs inside `init`."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.run = FakeRun()
        self.on_init: Callable[[], object] = lambda: None
        self.inits: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.Settings: Any = type("Settings", (SimpleNamespace,), {"model_fields": AnyName()})

    def setup(self, settings: SimpleNamespace) -> None:
        assert settings.silent

    def init(self, config: dict[str, Any], settings: SimpleNamespace) -> FakeRun:
        self.on_init()
        self.inits.append((vars(settings), config))
        return self.run


class AnyName:
    def __contains__(self, name: str) -> bool:
        return True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def lines() -> list[str]:
    return []


Start = Callable[..., Tracker]


@pytest.fixture
def start(tmp_path: Path, bare: dict[str, str], lines: list[str]) -> Start:
    def say(line: str) -> None:
        assert threading.current_thread() is threading.main_thread()
        lines.append(line)

    def begin(name: str = "wandb", *, environ: dict[str, str] | None = None, **changes: Any) -> Tracker:
        arguments: dict[str, Any] = {
            "run_dir": tmp_path,
            "config": {"model": {"d_model": 8}},
            "axes": {"norm": "rms", "placement": "pre"},
            "study": "norms",
            "arm": "norm=rms",
            "seed": 3,
            "tags": ["cpu"],
            "say": say,
            "patience": 5.0,
        }
        found = bare | {"WANDB_API_KEY": KEY} if environ is None else environ
        return start_tracker(option(name), environ=found, **(arguments | changes))

    return begin


def row(step: int) -> dict[str, float | None]:
    return {"step": step, "tokens": 100 * step, "train/loss": 1.0 / (step + 1)}


def test_files_alone_is_no_thread_and_no_file(start: Start, tmp_path: Path, fake: FakeWandb):
    threads = threading.active_count()
    with start("files") as tracker:
        tracker.log(row(0), 0)
    assert isinstance(tracker, FilesTracker)
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == [] and fake.inits == []


def test_the_run_is_described_to_wandb(start: Start, fake: FakeWandb, tmp_path: Path, lines: list[str]):
    start().finish("finished", {})
    settings, config = fake.inits[0]
    expected = {
        "mode": "online",
        "project": "nexus-ablate",
        "entity": None,
        "run_group": "norms",
        "run_job_type": "train",
        "run_name": "norm=rms/s3",
        "run_tags": ("norm=rms", "placement=pre", "cpu"),
        "resume": "allow",
        "root_dir": str(tmp_path),
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
    names = {"study": "norms", "arm": "norm=rms", "seed": 3, "axis/norm": "rms", "axis/placement": "pre"}
    assert config == {"model": {"d_model": 8}, **names}
    assert fake.run.metrics == [("*", "tokens")]
    assert lines == [f"W&B: {fake.run.url}"]


def test_names_and_tags_that_wandb_would_refuse_are_cut(start: Start, fake: FakeWandb):
    start(arm="a" * 200, study="s" * 200, tags=["t" * 65, "t" * 66]).finish("finished", {})
    settings, _ = fake.inits[0]
    assert len(settings["run_name"]) == len(settings["run_group"]) == 128
    assert settings["run_tags"][2:] == ("t" * 64,)


def test_settings_that_this_wandb_does_not_have_are_left_out(start: Start, fake: FakeWandb, lines: list[str]):
    fake.Settings.model_fields = {"mode", "run_id"}
    start().finish("finished", {})
    assert set(fake.inits[0][0]) == {"mode", "run_id"}
    assert lines == [f"W&B: {fake.run.url}"]


def test_the_stop_button_in_the_browser_does_not_reach_the_run(start: Start, fake: FakeWandb):
    start().finish("finished", {})
    assert fake.inits[0][0]["stop_fn"]() is None


def test_a_run_directory_keeps_its_wandb_id_and_two_directories_differ(start: Start, fake: FakeWandb, tmp_path: Path):
    start().finish("preempted", {})
    start().finish("finished", {})
    (tmp_path / "wandb_id.txt").unlink()
    start().finish("finished", {})
    first, again, other = (settings["run_id"] for settings, _ in fake.inits)
    assert first == again != other


def test_numbers_that_are_missing_or_not_finite_are_not_sent(start: Start, fake: FakeWandb):
    nan, inf = float("nan"), float("inf")
    tracker = start()
    tracker.log({"tokens": 5.0, "zero": 0.0, "none": None, "nan": nan, "inf": inf}, 7)
    tracker.finish("finished", {"val_loss": 2.0, "none": None, "deep": {"nan": nan, "k": "text"}})
    assert fake.run.rows == [({"step": 7, "tokens": 5.0, "zero": 0.0}, 7)]
    assert fake.run.summary == {"val_loss": 2.0, "deep": {"k": "text"}, "status": "finished"}


def test_a_row_that_the_caller_changes_later_is_sent_as_it_was(start: Start, fake: FakeWandb):
    gate = threading.Event()
    fake.on_init = lambda: gate.wait(30)
    tracker, mine = start(), row(1)
    tracker.log(mine, 1)
    mine["tokens"] = -1.0
    gate.set()
    tracker.finish("finished", {})
    assert fake.run.rows[0][0]["tokens"] == 100


@pytest.mark.parametrize(
    ("status", "exit_code", "preempting"), [("finished", 0, False), ("diverged", 1, False), ("preempted", 1, True)]
)
def test_wandb_is_told_how_the_run_ended(start: Start, fake: FakeWandb, status: str, exit_code: int, preempting: bool):
    start().finish(status, {})
    assert (fake.run.exit_code, fake.run.preempting) == (exit_code, preempting)


def test_leaving_the_block_finishes_once_and_an_error_makes_it_failed(start: Start, fake: FakeWandb):
    with start() as tracker:
        tracker.finish("diverged", {})
    assert fake.run.summary["status"] == "diverged"
    with pytest.raises(ZeroDivisionError), start():
        raise ZeroDivisionError
    assert fake.run.summary["status"] == "failed"


def test_a_resumed_run_sends_the_rows_that_a_kill_took_from_wandb(start: Start, fake: FakeWandb, tmp_path: Path):
    logged = [row(step) | {"nan": None} for step in range(4)]
    half_written = '{"step": 4, "tok'
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logged) + half_written)
    fake.run.resumed, fake.run.step = True, 2
    tracker = start()
    tracker.log(row(4), 4)
    tracker.finish("finished", {})
    assert fake.run.rows == [(row(step), step) for step in (2, 3, 4)]


def test_a_run_that_was_killed_before_its_first_row_resumes(start: Start, fake: FakeWandb, lines: list[str]):
    fake.run.resumed = True
    start().finish("finished", {})
    assert lines == [f"W&B: {fake.run.url}"] and fake.run.exit_code == 0


# Isolation


def fails(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def until(lines: list[str], count: int, tracker: Tracker) -> None:
    """Log until the mirror has said `count` lines."""
    deadline = time.monotonic() + 10
    while len(lines) < count and time.monotonic() < deadline:
        tracker.log(row(0), 0)
        time.sleep(0.01)


def seconds_for_1000_rows(start: Start) -> tuple[Tracker, float]:
    begun = time.perf_counter()
    tracker = start(patience=0.2)
    for step in range(1000):
        tracker.log(row(step), step)
    return tracker, time.perf_counter() - begun


def test_a_wandb_that_never_answers_holds_up_neither_the_rows_nor_the_end(
    start: Start, fake: FakeWandb, lines: list[str], tmp_path: Path
):
    gate = threading.Event()
    fake.on_init = lambda: gate.wait(30)
    tracker, seconds = seconds_for_1000_rows(start)
    assert seconds < 1
    begun = time.perf_counter()
    tracker.finish("finished", {})
    assert time.perf_counter() - begun < 1
    where = f"every row is in {tmp_path / 'metrics.jsonl'}"
    assert lines == [f"W&B has not answered within 0.2 s and is left behind; {where}"]
    gate.set()


def test_control_without_the_thread_the_same_wandb_does_hold_up_the_rows(
    start: Start, fake: FakeWandb, monkeypatch: pytest.MonkeyPatch
):
    class Inline(threading.Thread):
        def start(self) -> None:
            self.run()

    def answer_late() -> None:
        time.sleep(1.1)
        raise TimeoutError

    monkeypatch.setattr(track.threading, "Thread", Inline)
    fake.on_init = answer_late
    _, seconds = seconds_for_1000_rows(start)
    assert seconds > 1


def test_a_wandb_that_hangs_at_the_end_is_left_behind(start: Start, fake: FakeWandb, lines: list[str]):
    gate = threading.Event()
    fake.run.on_finish = lambda: gate.wait(30)
    start(patience=0.2).finish("finished", {})
    assert ["not answered within 0.2 s" in line for line in lines] == [False, True]
    gate.set()


def test_a_preempted_run_waits_for_wandb_no_longer_than_the_scheduler_allows(
    start: Start, fake: FakeWandb, lines: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(track, "PREEMPTED_PATIENCE", 0.1)
    gate = threading.Event()
    fake.run.on_finish = lambda: gate.wait(30)
    start(patience=30.0).finish("preempted", {})
    assert "not answered within 0.1 s" in lines[-1]
    gate.set()


def test_a_missing_package_is_said_once_and_nothing_else_happens(
    start: Start, lines: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with start() as tracker:
        until(lines, 1, tracker)
        tracker.log(row(1), 1)
    assert len(lines) == 1
    assert lines[0].startswith("W&B failed (ModuleNotFoundError: ")
    assert lines[0].endswith(f"every row is in {tmp_path / 'metrics.jsonl'}")


def test_an_error_in_the_middle_is_said_once_and_ends_the_copy(
    start: Start, fake: FakeWandb, lines: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(track, "QUEUE_ROWS", 4)
    fake.run.on_log = fails(ConnectionResetError("went\naway"))
    with start() as tracker:
        until(lines, 2, tracker)
        assert isinstance(tracker, WandbTracker)
        dropped = tracker._dropped
        for step in range(10):
            tracker.log(row(step), step)
        assert tracker._dropped == dropped, "rows pile up for nobody"
    assert lines[1].startswith("W&B failed (ConnectionResetError: went away); ")
    assert len(lines) == 2 and fake.run.rows == []


def test_a_run_directory_that_cannot_be_written_ends_the_copy_only(start: Start, fake: FakeWandb, lines: list[str]):
    with start(run_dir=Path("/nowhere")) as tracker:
        tracker.log(row(0), 0)
    assert len(lines) == 1 and lines[0].startswith("W&B failed (FileNotFoundError: ")


def test_without_credentials_wandb_is_never_asked_since_it_would_ask_the_user(
    start: Start, bare: dict[str, str], fake: FakeWandb, lines: list[str]
):
    tracker = start("wandb", environ=bare)
    assert isinstance(tracker, FilesTracker) and fake.inits == []
    assert len(lines) == 1 and "wandb login" in lines[0]


def test_a_queue_that_is_full_drops_the_oldest_rows_and_says_how_many(
    start: Start, fake: FakeWandb, lines: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(track, "QUEUE_ROWS", 4)
    gate = threading.Event()
    fake.on_init = lambda: gate.wait(30)
    tracker = start()
    for step in range(10):
        tracker.log(row(step), step)
    gate.set()
    tracker.finish("finished", {})
    sent = [step for _, step in fake.run.rows]
    assert sent == list(range(10 - len(sent), 10)) and 3 <= len(sent) <= 4
    assert lines[-1].startswith(f"W&B was too slow for {10 - len(sent)} rows and lacks them; ")


def leaks(start: Start, fake: FakeWandb, lines: list[str]) -> str:
    fake.on_init = fails(ValueError(f"key {KEY} refused by https://me:passw0rd@wandb.example"))
    tracker = start(config={"data": {"path": ["https://me:passw0rd@host/x", KEY]}})
    assert isinstance(tracker, WandbTracker)
    tracker.finish("finished", {})
    return " ".join(lines) + json.dumps(dict(tracker._config))


def test_no_secret_reaches_the_terminal_or_the_config(start: Start, fake: FakeWandb, lines: list[str]):
    text = leaks(start, fake, lines)
    assert KEY not in text and "passw0rd" not in text
    assert "https://***@wandb.example" in text and "https://***@host/x" in text


def test_control_without_redaction_the_secrets_do_reach_them(
    start: Start, fake: FakeWandb, lines: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(track, "_redactor", lambda environ: lambda value: value)
    text = leaks(start, fake, lines)
    assert text.count(KEY) == text.count("passw0rd") == 2


# The real package, in a process of its own


LEG = """
import json, os, sys, time
from pathlib import Path
from nexus_ablate import track
from nexus_ablate.registry import Option

run_dir, name, first, last, status, init_timeout, patience = json.loads(sys.argv[1])
track.INIT_TIMEOUT = init_timeout
rows = [{"step": i, "tokens": 100 * i, "train/loss": 1 / (i + 1)} for i in range(last)]
(Path(run_dir) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
said = []
begun = time.perf_counter()
tracker = track.start_tracker(
    Option(name, {"project": "p", "entity": "none"}), run_dir=Path(run_dir), config={"model": {"d_model": 8}},
    axes={"norm": "rms"}, study="norms", arm="norm=rms", seed=3, tags=[], say=said.append, patience=patience,
)
for row in rows[first:]:
    tracker.log(row, row["step"])
logged = time.perf_counter() - begun
if status == "killed":
    while not said:
        tracker.log(rows[-1], rows[-1]["step"])
        time.sleep(0.05)
    time.sleep(2)
    os.kill(os.getpid(), 9)
tracker.finish(status, {"val_loss": 1.5})
print(json.dumps({"said": said, "logged": logged, "finished": time.perf_counter() - begun}))
"""


def run_leg(
    tmp_path: Path,
    url: str,
    *,
    name: str = "wandb",
    rows: tuple[int, int] = (0, 20),
    status: str = "finished",
    init_timeout: float = 15.0,
    patience: float = 20.0,
) -> tuple[dict[str, Any], float]:
    """Mirror some rows from a fresh process; what it reports, and its whole life in seconds."""
    run_dir = tmp_path / "run"
    run_dir.mkdir(exist_ok=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": url, "WANDB_API_KEY": KEY}
    arguments = json.dumps([str(run_dir), name, *rows, status, init_timeout, patience])
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", LEG, arguments], cwd=ROOT, env=clean | home, capture_output=True, text=True, timeout=120
    )
    seconds = time.perf_counter() - begun
    assert done.stderr == "", "W&B's own messages stay off the terminal"
    assert done.returncode == (-signal.SIGKILL if status == "killed" else 0)
    assert not [path for path in run_dir.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    return json.loads(done.stdout or "{}"), seconds


def sent_steps(server: WandbServer) -> list[int]:
    (run,) = server.runs.values()
    return [row["step"] for row in run.history]


def offline_rows(tmp_path: Path) -> list[dict[str, Any]]:
    (run_dir,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [record for record in map(json.loads, done.stdout.splitlines()) if record["type"] == "history"]


def test_importing_the_module_does_not_import_wandb():
    code = "import sys, nexus_ablate.track; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_server_gets_every_row_the_config_the_summary_and_the_end(tmp_path: Path):
    with serving() as server:
        report, _ = run_leg(tmp_path, server.url)
        (run_id,) = server.runs
        run = server.runs[run_id]
    assert sent_steps(server) == list(range(20))
    assert [row["tokens"] for row in run.history] == [100 * step for step in range(20)]
    assert (run.complete, run.exitcode) == (True, 0)
    assert run.summary.items() >= {"val_loss": 1.5, "status": "finished"}.items()
    assert run.config.items() >= {"model": {"d_model": 8}, "axis/norm": "rms", "seed": 3}.items()
    shown = {"groupName": "norms", "jobType": "train", "displayName": "norm=rms/s3", "tags": ["norm=rms"]}
    assert run.fields.items() >= shown.items()
    assert report["said"] == [f"W&B: {server.url}/me/p/runs/{run_id}"]


def test_offline_the_run_directory_holds_every_row_and_no_server_is_asked(tmp_path: Path):
    with serving() as server:
        report, _ = run_leg(tmp_path, server.url, name="wandb_offline")
        assert server.requests == 0
    assert len(offline_rows(tmp_path)) == 20
    assert report["said"][0].startswith("W&B: offline, push later with `wandb sync ")


def test_a_server_that_rejects_the_key_is_said_at_once(tmp_path: Path):
    with serving("unauthorized") as server:
        report, _ = run_leg(tmp_path, server.url)
    assert len(report["said"]) == 1 and "401" in report["said"][0]


@pytest.mark.slow
def test_after_a_preemption_and_a_kill_wandb_has_every_step_once(tmp_path: Path):
    with serving() as server:
        run_leg(tmp_path, server.url, rows=(0, 6), status="preempted")
        (run,) = server.runs.values()
        assert run.preempting and sent_steps(server) == list(range(6))
        run_leg(tmp_path, server.url, rows=(6, 20), status="killed")
        run_leg(tmp_path, server.url, rows=(10, 30))
    assert sent_steps(server) == list(range(30))
    assert (run.complete, run.exitcode) == (True, 0)


@pytest.mark.slow
def test_a_killed_offline_run_lost_at_most_its_last_second(tmp_path: Path):
    run_leg(tmp_path, "http://127.0.0.1:9", name="wandb_offline", status="killed")
    assert len(offline_rows(tmp_path)) == 19  # the row of the current step stays open


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", ["refused", "error", "silent"])
def test_a_server_out_of_order_costs_the_run_nothing_but_a_short_wait_at_the_end(tmp_path: Path, behaviour: str):
    with serving("silent" if behaviour == "refused" else behaviour) as server:  # type: ignore[arg-type]
        url = "http://127.0.0.1:9" if behaviour == "refused" else server.url
        report, seconds = run_leg(tmp_path, url, rows=(0, 1000), init_timeout=2.0, patience=12.0)
    assert report["logged"] < 1 and report["finished"] < 12
    assert seconds < 30
    assert len(report["said"]) == 1 and report["said"][0].startswith("W&B failed (CommError: ")


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", ["error", "silent"])
def test_a_server_that_dies_in_the_middle_costs_the_run_nothing_but_a_short_wait_at_the_end(
    tmp_path: Path, behaviour: Behaviour
):
    with serving() as server:
        server.die_after_start = behaviour
        report, seconds = run_leg(tmp_path, server.url, rows=(0, 1000), patience=8.0)
    assert report["logged"] < 1 and report["finished"] < 10
    assert seconds < 30
    assert report["said"][1].startswith("W&B failed (TimeoutError: ")


@pytest.mark.slow
def test_a_slow_server_gets_every_row_and_holds_up_none(tmp_path: Path):
    with serving("slow") as server:
        report, _ = run_leg(tmp_path, server.url)
    assert sent_steps(server) == list(range(20))
    assert report["logged"] < SLOW_SECONDS
