"""The mirror with the real package against a server on this machine, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from wandb_server import serving
from written_runs import Writer

KEY = "k3y" * 14
ROOT = Path(__file__).parent.parent

LEG = """
import json, os, sys, time
from pathlib import Path
from nexus_ablate import track
from nexus_ablate.config.options import Option

run_dir, name, first, last, status, init_timeout, patience = json.loads(sys.argv[1])
track.mirror.INIT_TIMEOUT = init_timeout
said = []
begun = time.perf_counter()
tracker = track.start_tracker(Option(name, {"project": "p", "entity": "none"}), Path(run_dir), said.append,
                              said.append, patience=patience)
log = Path(run_dir, "metrics.jsonl")
log.write_text("".join(log.read_text().splitlines(True)[:first]))  # as a resumed run does
with log.open("a") as file:
    for step in range(first, last):
        row = {"step": step, "tokens": 100 * step, "flops": 1.0, "seconds": 0.1, "train/loss": 1 / (step + 1)}
        file.write(json.dumps(row) + "\\n")
        file.flush()
        tracker.row_written()
logged = time.perf_counter() - begun
if status == "killed":
    while not said:
        tracker.row_written()
        time.sleep(0.05)
    time.sleep(2)
    os.kill(os.getpid(), 9)
tracker.finish(status, {"val_loss": 1.5, "extrapolation": {"sliding": {"2": 1.75}}})
print(json.dumps({"said": said, "logged": logged, "finished": time.perf_counter() - begun}))
"""


@pytest.fixture
def run_dir(tmp_path):
    path = Writer(tmp_path / "runs", "norms").run("norm=layer", seed=3, state="running")
    (path / "metrics.jsonl").write_text("")
    return path


def environment(run_dir, url):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    home = run_dir.parents[2]
    return clean | {"HOME": str(home), "NETRC": str(home / "netrc"), "WANDB_BASE_URL": url, "WANDB_API_KEY": KEY}


def run_leg(
    run_dir,
    url,
    *,
    name="wandb",
    rows=(0, 20),
    status="finished",
    init_timeout=15.0,
    patience=20.0,
):
    """Write some rows and mirror them from a fresh process; what it reports, and its whole life in seconds."""
    arguments = json.dumps([str(run_dir), name, *rows, status, init_timeout, patience])
    command = [sys.executable, "-c", LEG, arguments]
    begun = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment(run_dir, url), capture_output=True, text=True, timeout=120)
    seconds = time.perf_counter() - begun
    assert done.stderr == "", "W&B's own messages stay off the terminal"
    assert done.returncode == (-signal.SIGKILL if status == "killed" else 0)
    assert not [path for path in run_dir.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    return json.loads(done.stdout or "{}"), seconds


def only_run(server):
    (run,) = server.runs.values()
    return run


def sync(run_dir, url, status=0):
    """What `nexus-ablate sync` prints."""
    command = [sys.executable, "-m", "nexus_ablate", "sync", str(run_dir)]
    done = subprocess.run(command, cwd=ROOT, env=environment(run_dir, url), capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def settle(run_dir, state):
    status = json.loads((run_dir / "status.json").read_text()) | {"state": state}
    (run_dir / "status.json").write_text(json.dumps(status))
    if state == "finished":
        (run_dir / "summary.json").write_text('{"val_loss": 1.5}')


def offline_rows(run_dir):
    (folder,) = (run_dir / "wandb").glob("offline-run-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [record for record in map(json.loads, done.stdout.splitlines()) if record["type"] == "history"]


@pytest.mark.slow
def test_the_server_gets_all_that_there_is(run_dir):
    with serving() as server:
        report, _ = run_leg(run_dir, server.url)
        (run_id,) = server.runs
        run = only_run(server)
        assert set(server.unknown) <= {"ServerFeaturesQuery"}, "this server knows what the package asks"
    assert run.steps == list(range(20))
    assert [row["tokens"] for row in run.history] == [100 * step for step in range(20)]
    assert (run.complete, run.exitcode) == (True, 0)
    assert run.summary.items() >= {"val_loss": 1.5, "extrapolation/sliding/2": 1.75, "status": "finished"}.items()
    assert run.summary["train/loss"] == 1 / 20
    assert run.config.items() >= {"study": "norms", "arm": "norm=layer", "axis/norm": "layer", "seed": 3}.items()
    assert run.config["model"]["d_model"] == 16
    assert run.fields.items() >= {"groupName": "norms", "jobType": "train", "displayName": "norm=layer/s3"}.items()
    assert "norm=layer" in run.fields["tags"]
    assert report["said"] == [f"W&B: {server.url}/me/p/runs/{run_id}"]
    pictures = [data for name, data in run.files.items() if name.startswith("media/images/heat_map/")]
    assert pictures and all(data.startswith(b"\x89PNG") for data in pictures)


@pytest.mark.slow
def test_offline_no_server_is_asked_and_the_way_to_it_is_said(run_dir):
    with serving() as server:
        report, _ = run_leg(run_dir, server.url, name="wandb_offline")
        assert server.requests == 0
        assert len(offline_rows(run_dir)) == 20
        assert report["said"] == [f"W&B: offline; `nexus-ablate sync {run_dir}` sends the run later"]


def test_a_server_that_rejects_the_key_is_said_at_once(run_dir):
    with serving("unauthorized") as server:
        report, _ = run_leg(run_dir, server.url)
    assert len(report["said"]) == 1 and "401" in report["said"][0]


@pytest.mark.slow
def test_after_a_preemption_and_a_kill_wandb_has_every_step_once(run_dir):
    with serving() as server:
        run_leg(run_dir, server.url, rows=(0, 6), status="preempted")
        run = only_run(server)
        assert run.preempting and run.steps == list(range(6))
        run_leg(run_dir, server.url, rows=(6, 20), status="killed")
        run_leg(run_dir, server.url, rows=(10, 30))
    assert run.steps == list(range(30))
    assert (run.complete, run.exitcode) == (True, 0)
    assert run.summary["train/loss"] == 1 / 30


@pytest.mark.slow
def test_a_killed_offline_run_lost_at_most_its_last_second_and_a_sync_brings_the_rest(run_dir):
    run_leg(run_dir, "http://127.0.0.1:9", name="wandb_offline", status="killed")
    assert len(offline_rows(run_dir)) == 19  # the row of the current step stays open
    with serving() as server:
        settle(run_dir, "failed")
        sync(run_dir, server.url)
        assert only_run(server).steps == list(range(20))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("behaviour", ["refused", "error", "silent"])
def test_a_server_out_of_order_costs_the_run_nothing_but_a_short_wait_at_the_end(run_dir, behaviour):
    with serving("silent" if behaviour == "refused" else behaviour) as server:  # type: ignore[arg-type]
        url = "http://127.0.0.1:9" if behaviour == "refused" else server.url
        report, seconds = run_leg(run_dir, url, rows=(0, 1000), init_timeout=2.0, patience=12.0)
    assert report["logged"] < 1 and report["finished"] < 12
    assert seconds < 30
    assert len(report["said"]) == 1 and report["said"][0].startswith("W&B failed (CommError: ")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("behaviour", ["error", "silent"])
def test_a_server_that_dies_in_the_middle_is_left_and_a_sync_sends_the_rest(run_dir, behaviour):
    with serving() as server:
        server.die_after_rows = (1, behaviour)
        report, seconds = run_leg(run_dir, server.url, rows=(0, 1000), patience=6.0)
        assert report["logged"] < 1 and report["finished"] < 10
        assert seconds < 30
        assert report["said"][1].startswith(("W&B failed (TimeoutError: ", "W&B did not answer within 6 s"))
        server.die_after_rows, server.behaviour = None, "ok"
        settle(run_dir, "finished")
        sync(run_dir, server.url)
        assert only_run(server).steps == list(range(1000)) and only_run(server).complete


@pytest.mark.slow
@pytest.mark.long
def test_a_slow_server_gets_every_row_and_holds_up_none(run_dir):
    with serving("slow") as server:
        server.slow_seconds = 0.3
        report, _ = run_leg(run_dir, server.url)
        assert only_run(server).steps == list(range(20))
    assert report["logged"] < 0.3
