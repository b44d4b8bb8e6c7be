"""Whole runs and W&B: training is the same whatever W&B does, and what W&B lacks is brought to it afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import wandb
from faults.bench import logged
from wandb_server import serving_alone
from written_runs import Writer

from nexus_ablate import cli, compose, train
from nexus_ablate.config.options import Option
from nexus_ablate.runs import read_jsonl
from nexus_ablate.track import refresh, start_tracker


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serving_alone(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
def command(capsys):
    """What a command prints."""

    def run(*arguments, status=0):
        code = cli.main(list(arguments))
        printed = capsys.readouterr()
        assert code == status, printed.err
        return printed.out + printed.err

    return run


# A run that trains


TRAIN = """
import functools, json, sys
from nexus_ablate import compose, track, train
from nexus_ablate.training import session

track.mirror.INIT_TIMEOUT = 2.0
session.start_tracker = functools.partial(track.start_tracker, patience=float(sys.argv[2]))
print(train(compose(json.loads(sys.argv[1]))).path)
"""


def trained(overrides, patience=4.0):
    """A run trained in a process of its own: its directory, and what was printed.

    Args:
        patience: Seconds that its end waits for W&B; a busy machine needs more than four.
    """
    command = [sys.executable, "-c", TRAIN, json.dumps(overrides), str(patience)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip().splitlines()[-1]), done.stdout + done.stderr


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


def assert_same(path, tiny_run):
    """The run at `path` measured what the same one measures without W&B, to the last digit and in every row."""
    plain = train(compose(tiny_run("runs_dir=plain")), quiet=True)
    assert logged(path) == logged(plain.path) and len(logged(path)) == 21
    assert json.loads((path / "status.json").read_text())["state"] == "finished"


def test_without_the_package_the_run_is_the_same_and_complete(tiny_run, server, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    outcome = train(compose([*tiny_run(), "tracker=wandb"]), brief=True)
    assert_same(outcome.path, tiny_run)
    assert "W&B failed (ModuleNotFoundError" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("key wrong", "401"),
        long("dies", "W&B did not answer"),
        long("refused", "W&B failed (CommError"),
        long("error", "W&B failed (CommError"),
        long("silent", "W&B failed (CommError"),
        long("slow", "W&B failed (CommError"),
    ],
)
def test_whatever_is_wrong_with_wandb_the_run_is_the_same_and_complete(tiny_run, server, monkeypatch, fault, said):
    if fault == "refused":
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    elif fault == "dies":
        server.die_after_start = "silent"
    else:
        server.behaviour = "unauthorized" if fault == "key wrong" else fault
    ends_by_itself = fault == "key wrong"
    path, printed = trained([*tiny_run(), "tracker=wandb"], patience=60.0 if ends_by_itself else 4.0)
    assert said in printed
    assert_same(path, tiny_run)


@pytest.mark.slow
def test_a_run_reaches_wandb_where_the_environment_names_a_service_that_has_ended(tiny_run, server, monkeypatch):
    """As W&B leaves it to the child processes of a notebook; W&B alone then fails to connect."""
    monkeypatch.setenv("WANDB_SERVICE", "3-1-unix-/nowhere")
    command = [sys.executable, "-m", "nexus_ablate", *tiny_run("tracker=wandb")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and f"W&B: {server.url}" in done.stderr, done.stderr


@pytest.mark.slow
def test_evaluations_reach_the_summary_with_the_run_and_afterwards(tiny_run, server, command):
    path = train(compose([*tiny_run("evals=[extrapolation]"), "tracker=wandb"]), quiet=True).path
    (run,) = server.runs.values()
    assert run.steps == list(range(21)) and run.complete
    assert run.summary["extrapolation/sliding/2"] > 0 and "quantization/loss" not in run.summary
    history = len(run.history)
    command("evaluate", str(path), "--evals", "quantization")
    assert run.summary["quantization/loss"] > 0 and run.summary["extrapolation/sliding/2"] > 0
    assert (len(run.history), run.complete, run.exitcode) == (history, True, 0)


@pytest.mark.slow
@pytest.mark.parametrize("probe", ["off", "standard"])
def test_the_summary_is_the_run_s_and_not_its_last_row(tiny_run, server, probe):
    path = train(compose([*tiny_run(f"probe={probe}"), "tracker=wandb"]), quiet=True).path
    (run,) = server.runs.values()
    summary = json.loads((path / "summary.json").read_text())
    numbers = {name: value for name, value in summary.items() if isinstance(value, float)}
    assert numbers["grad_norm/global"] != read_jsonl(path / "metrics.jsonl")[-1]["grad_norm/global"]
    assert {name: run.summary[name] for name in numbers} == numbers


# Sync


@pytest.fixture
def study(tmp_path):
    return Writer(tmp_path / "runs", "norms")


def by_name(server):
    return {run.fields["displayName"]: run for run in server.runs.values()}


@pytest.mark.slow
def test_runs_tracked_by_files_alone_arrive_whole_and_a_second_time_changes_nothing(
    server, study, command, monkeypatch
):
    study.run(seed=0, summary={"quantization": {"loss": 2.5}})
    study.run("norm=layer", seed=1, state="diverged")
    study.run("norm=t5", seed=0, state="preempted", steps=200)
    study.run("norm=none", state="running")
    alive = study.run("norm=scale", state="running") / "status.json"
    status = json.loads(alive.read_text()) | {"heartbeat": datetime.now(UTC).isoformat(timespec="seconds")}
    alive.write_text(json.dumps(status))
    monkeypatch.setenv("COLUMNS", "80")
    study.run("placement=sandwich", "qk_norm=rms", "position=rope_yarn", state="running")
    for sent in (201, 0):
        lines = command("sync", "runs").splitlines()
        table = [line.split() for line in lines]
        assert [line[-1] for line in table if "baseline" in line] == [str(sent)]
        assert any("…" in line and "lost" in line for line in lines), "a long name is cut, and nothing else"
        assert all(len(line) <= 80 and line.count("…") <= 1 for line in lines if not line.startswith("W&B"))
        arrived = by_name(server)
        long = "placement=sandwich,position=rope_yarn,qk_norm=rms/s0"
        assert arrived.keys() == {"baseline/s0", "norm=layer/s1", "norm=none/s0", "norm=t5/s0", long}, (
            "a live one waits"
        )
        assert arrived["baseline/s0"].steps == list(range(0, 401, 2))
        assert arrived["norm=t5/s0"].steps == list(range(0, 201, 2)) and arrived["norm=t5/s0"].preempting
        assert arrived["baseline/s0"].summary["quantization/loss"] == 2.5
        ends = {name: (run.summary["status"], run.exitcode) for name, run in arrived.items()}
        assert ends == {
            "baseline/s0": ("finished", 0),
            "norm=layer/s1": ("diverged", 1),
            "norm=none/s0": ("lost", 1),
            "norm=t5/s0": ("preempted", 1),
            long: ("lost", 1),
        }
        assert len(pictures(arrived["baseline/s0"])) == 1 and len(server.runs) == 5
    assert not list(study.root.rglob("wandb/")), "nothing of W&B's own is left in a run directory"


def pictures(run):
    return [name for name in run.files if name.startswith("media/images/heat_map/")]


def test_a_run_that_has_ended_is_skipped_while_its_mirror_still_sends_it(server, study, command):
    path, said = study.run("tracker=wandb"), []
    with start_tracker(Option("wandb", {"project": "p", "entity": "none"}), path, said.append, said.append) as mirror:
        while not said:  # W&B has not accepted it
            time.sleep(0.05)
            mirror.row_written()
        assert said == [f"W&B: {json.loads((path / 'wandb.json').read_text())['url']}"]
        assert "finished" not in command("sync", "runs") and "being sent, skipped" in command("sync", "runs")
    assert "finished" in command("sync", "runs")
    (run,) = server.runs.values()
    assert run.steps == list(range(0, 401, 2)) and len(pictures(run)) == 1


@pytest.mark.slow
def test_a_run_keeps_its_place_and_goes_elsewhere_only_on_request(server, study, command):
    study.run(steps=10)
    assert f"W&B: {server.url}/me/nexus-ablate/runs/" in command("sync", "runs")
    command("sync", "runs", "--wandb", "other")
    command("sync", "runs")
    command("sync", "runs", "--wandb", "nexus-ablate")
    assert [run.fields["project"] for run in server.runs.values()] == ["nexus-ablate", "other"]
    assert [run.steps for run in server.runs.values()] == [list(range(0, 11, 2))] * 2


def test_a_place_that_refused_ends_a_sync_in_three_lines_and_is_not_kept(server, study, command):
    path = study.run()
    server.behaviour = "unauthorized"
    printed = command("sync", "runs", "--wandb", "typo", status=2)
    assert printed.startswith("error: W&B failed") and "try: set WANDB_API_KEY" in printed
    assert len(printed.splitlines()) == 3
    wandb.teardown()  # each command is a process
    server.behaviour = "ok"
    command("sync", "runs")
    command("sync", "runs")
    (run,) = server.runs.values()
    assert run.fields["project"] == "nexus-ablate"
    assert json.loads((path / "wandb.json").read_text())["project"] == "nexus-ablate"


def test_a_damaged_run_says_so_and_the_others_have_their_turn(server, study, command):
    broken, unsent = study.run(seed=0), study.run(seed=1)
    study.run(seed=2)
    (broken / "config.yaml").write_text("[")
    (unsent / "wandb.json").write_text("[")
    printed = command("sync", "runs", status=2)
    assert "config.yaml is damaged" in printed and "wandb.json is damaged" in printed
    assert by_name(server).keys() == {"baseline/s2"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nowhere"], "this directory does not exist"),
        (["runs", "--wanbd", "x"], "try: --wandb"),
        ([], "sync needs at least one directory"),
    ],
)
def test_mistakes_are_said_and_nothing_is_asked(server, study, arguments, problem, capsys):
    study.run()
    assert cli.main(["sync", *arguments]) == 2
    printed = capsys.readouterr()
    assert problem in printed.out + printed.err and server.requests == 0


def test_without_a_key_the_way_to_one_is_said(server, study, monkeypatch, capsys):
    study.run()
    monkeypatch.delenv("WANDB_API_KEY")
    assert cli.main(["sync", "runs"]) == 2
    assert "wandb login" in capsys.readouterr().err and server.requests == 0


def test_news_of_a_finished_run_that_wandb_does_not_take_are_a_line_and_no_error(server, study):
    path, lines = study.run("tracker=wandb"), []
    refresh(path, lines.append)
    assert lines == [] and server.requests == 0, "it never was on W&B"
    (path / "wandb.json").write_text('{"id": "x", "project": "p", "entity": "me"}')
    server.behaviour = "unauthorized"
    refresh(path, lines.append)
    assert len(lines) == 1 and "401" in lines[0] and f"`nexus-ablate sync {path}`" in lines[0]


@pytest.mark.parametrize("tracker", ["files", "wandb_offline"])
def test_news_of_a_run_that_only_a_sync_sends_say_so(server, study, tracker):
    path, lines = study.run(f"tracker={tracker}"), []
    (path / "wandb.json").write_text('{"id": "x", "project": "p", "entity": "me"}')
    refresh(path, lines.append)
    assert lines == [f"W&B lacks what is new of this run; `nexus-ablate sync {path}` sends it"]


# A comparison


@pytest.mark.parametrize(
    ("place", "fix"),
    [
        ("team/", "--wandb nexus-ablate"),
        ("/mine", "--wandb nexus-ablate"),
        ("a/b/c", "--wandb nexus-ablate"),
        ("me/my project?", "--wandb me/my project-"),
        ("x" * 200, f"--wandb {'x' * 128}"),
    ],
)
def test_a_place_that_wandb_lacks_is_refused_before_anything_is_compared(server, study, command, place, fix):
    assert f"try: {fix.rstrip('-')}" in command("compare", "nowhere", "--wandb", place, status=2)
    assert server.requests == 0


@pytest.mark.slow
def test_a_comparison_of_settings_has_the_table_of_each_and_a_name_of_its_own(server, study, command):
    for setting, loss in (("usual", 1.9), ("quarter", 2.2)):
        study.study = f"mini@{setting}"
        study.arm(losses=[2.0, 2.1, 2.05])
        study.arm("norm=layer", losses=[loss, loss + 0.12, loss + 0.05])
        study.plan(("norm=layer",), setting=setting, settings={"usual": "bias=off", "quarter": "bias=on"})
    study.study = "bias"
    study.arm(losses=[2.0, 2.1, 2.05])
    study.arm("bias=on", losses=[2.0, 2.1, 2.06])
    study.plan(("bias=on",))
    others = ["runs/mini@usual", "runs/mini --baseline norm=layer", "runs/mini@usual runs/bias"]
    for words in ("runs/mini", *others):
        command("compare", *words.split(), "--wandb", "mine")
    whole, one, other, two = server.runs.values()
    names = [run.fields["displayName"] for run in (whole, one, other, two)]
    assert names == [f"compare {words.replace('runs/', '')}" for words in ("runs/mini", *others)]
    assert {"verdict/mini@usual", "verdict/bias"} <= two.summary.keys()
    assert "usual: " in whole.summary["answer"] and "quarter: " in whole.summary["answer"]
    assert {"verdict/usual", "verdict/quarter"} <= whole.summary.keys()


@pytest.mark.slow
def test_a_comparison_is_a_run_with_table_and_page_and_a_versioned_artifact(server, study, command):
    study.arm(losses=[2.0, 2.1, 2.05])
    study.arm("norm=layer", losses=[1.9, 2.02, 1.95])
    study.plan(("norm=layer",))
    for _ in range(2):
        assert f"W&B: {server.url}/me/mine/runs/compare-" in command("compare", "runs/norms", "--wandb", "me/mine")
    (run,) = server.runs.values()
    assert run.fields["jobType"] == "compare" and "norm=layer" in run.summary["answer"]
    table = json.loads(next(data for name, data in run.files.items() if name.startswith("media/table/")))
    assert table["columns"][0] == "arm" and [row[0] for row in table["data"]] == ["baseline", "norm=layer"]
    artifact = next(a for a in server.artifacts.values() if a.fields["artifactCollectionName"] == "comparison-norms")
    assert artifact.committed
    assert artifact.files.keys() >= {"report.html", "report.md", "table.csv", "comparison.json"}


@pytest.mark.slow
@pytest.mark.parametrize("agent", [True, False])
def test_a_run_that_an_agent_starts_is_the_agent_s_run_and_stays_it(tiny_run, server, monkeypatch, command, agent):
    if agent:
        monkeypatch.setenv("WANDB_SWEEP_ID", "sweep001")
    monkeypatch.setenv("WANDB_RUN_ID", "agentrun1")
    path, _ = trained([*tiny_run(), "tracker=wandb"], patience=60.0)
    (run_id,) = server.runs
    assert (run_id == "agentrun1") == agent, "the control: without a sweep, W&B keeps to the id that it is given"
    assert json.loads((path / "wandb.json").read_text())["id"] == run_id
    for variable in ("WANDB_SWEEP_ID", "WANDB_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    command("sync", str(path))
    assert [*server.runs] == [run_id]


def test_where_wandb_is_switched_off_a_run_that_asks_for_it_says_so_and_asks_no_server(
    tiny_run, server, monkeypatch, capsys
):
    for variable, value in (("WANDB_MODE", "disabled"), ("WANDB_DISABLED", "true")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            train(compose([*tiny_run(), "tracker=wandb", f"runs_dir={variable}"]), brief=True)
        assert "W&B is switched off here" in capsys.readouterr().err
    assert server.requests == 0
    train(compose([*tiny_run(), "tracker=wandb", "runs_dir=control"]), quiet=True)
    assert server.requests > 0
