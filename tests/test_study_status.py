"""`status` and the plan's fairness header, from directories and definitions alone."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from written_runs import Writer

from nexus_ablate import cli
from nexus_ablate.config.compose import compose
from nexus_ablate.console import duration
from nexus_ablate.execution.run_states import LOSS, Watcher, last_row
from nexus_ablate.execution.state_table import summary, table, troubles
from nexus_ablate.planning import cost
from nexus_ablate.planning.cores_and_gpus import Places
from nexus_ablate.planning.cost import cost_of
from nexus_ablate.planning.design import expand
from nexus_ablate.planning.jobs import Runs
from nexus_ablate.planning.preview import fairness, make_plan
from nexus_ablate.planning.study_yaml import write_record
from nexus_ablate.runs import read_run
from nexus_ablate.study.decoding import decode_file
from nexus_ablate.study.definition import read_request
from nexus_ablate.training.session import train


@pytest.fixture
def launched(tiny_run, tmp_path):
    """A study with its record, one run of each of two arms finished, and the rest to come."""
    requested = [text for text in tiny_run() if text != "train.threads=1"]
    request = read_request(["mine", "vary.norm=layer", "vary.bias=on", "seeds=0,1", *requested])
    runs = Runs.of(request)
    write_record(runs)
    for job in runs.claims[:2]:
        train(compose([*job.overrides, "train.threads=1"]), quiet=True, arm=job.arm)
    return runs.study, runs


def drawn(lines, **options):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table(lines, **options))
    return console.export_text()


def test_status_shows_what_is_there_and_what_is_to_come(launched):
    _, runs = launched
    lines = Watcher().lines([runs.request.directory])
    assert [(line.arm, line.seed, line.state) for line in lines] == [
        ("baseline", 0, "finished"),
        ("baseline", 1, "waiting"),
        ("bias=on", 0, "waiting"),
        ("bias=on", 1, "waiting"),
        ("norm=layer", 0, "finished"),
        ("norm=layer", 1, "waiting"),
    ]
    arm = read_run(runs.claims[1].path).summary
    assert arm is not None
    shown = lines[4]
    assert (shown.step, shown.steps) == (20, 20)
    assert shown.loss == arm["val_loss"]
    assert summary(lines) == "2 finished, 4 waiting"
    base = read_run(runs.claims[0].path).summary
    assert base is not None
    row = next(line for line in drawn(lines).splitlines() if "norm=layer" in line)
    assert f" {arm['val_loss'] - base['val_loss']:+.4f} " in row, "its difference to the baseline's run with this seed"


def test_the_loss_of_a_running_run_is_the_last_that_was_measured(launched):
    _, runs = launched
    log = runs.claims[1].path / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= 13))
    at_ten = {row["step"]: row[LOSS] for row in rows if LOSS in row}[10]
    line = Watcher().line(runs.claims[1].path)
    assert (line.step, line.loss) == (13, at_ten)


def test_a_failed_and_a_damaged_run_have_their_reason_and_stop_nothing(launched, tmp_path):
    _, runs = launched
    path = runs.claims[1].path
    status = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps(status | {"state": "failed", "reason": "no [bold]luck[/bold]\x1b[2J"}))
    (runs.claims[0].path / "status.json").write_text("{")
    (runs.request.directory / "study.yaml").write_text("a: [")
    lines = Watcher().lines([tmp_path / "runs"])
    assert sorted(line.state for line in lines) == ["damaged", "damaged", "failed"]
    said = "\n".join(troubles(lines))
    assert "no [bold]luck[/bold]" in said
    assert str(path / "log.txt") in said
    assert "study.yaml" in said
    assert "\x1b" not in drawn(lines)


def test_a_torn_last_line_is_not_read(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert last_row(log) == {}
    end = '"tokens": 0, "flops": 0, "seconds": 0'
    log.write_text(f'{{"step": 1, "val/loss": 2.0, {end}}}\n{{"step": 2, {end}}}\n{{"step": 3, "val/lo')
    assert last_row(log)["step"] == 2
    assert last_row(log, LOSS)["step"] == 1
    log.write_text("".join(f'{{"step": {n}, {end}, "x": [{"1, " * 500}1]}}\n' for n in range(1000)))
    assert last_row(log)["step"] == 999


def test_a_long_table_keeps_what_runs_and_what_failed(launched):
    _, runs = launched
    lines = Watcher().lines([runs.request.directory])
    shown = drawn(lines, limit=2)
    assert shown.count("finished") == 2
    assert "waiting" not in shown


def test_a_long_table_of_runs_to_come_fits_the_terminal(tmp_path):
    """Of a learning-rate grid many runs to come look alike."""
    Writer(tmp_path, "mine").plan(("norm=layer",), lr_grid=[0.001, 0.003, 0.01], tuning_seeds=[1001, 1002])
    lines = Watcher().lines([tmp_path / "mine"])
    assert len(lines) > 20
    assert drawn(lines, limit=4).count("waiting") == 4


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, ""), (0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2.0 h"), (40 * 3600, "40 h"), (172800, "2.0 d")],
)
def test_durations_are_for_people(seconds, said):
    assert duration(seconds) == said


def test_plan_goes_by_finished_runs_where_there_are_any(launched):
    _, runs = launched
    plan = make_plan(runs, Places(2, 1, []))
    assert [(arm.arm.name, arm.recorded) for arm in plan.arms] == [
        ("baseline", True),
        ("norm=layer", True),
        ("bias=on", False),
    ]
    assert plan.states == {"finished": 2, "missing": 4}
    assert plan.runs == 6
    assert plan.seconds is not None
    assert plan.arms[1].params_share == pytest.approx(80 / 10064)
    summaries = [read_run(job.path).summary or {} for job in runs.claims[:2]]
    assert [plan.arms[n].cost.params for n in (0, 1)] == [s["params"] for s in summaries]
    assert [plan.arms[n].cost.flops_per_token for n in (0, 1)] == [s["flops_per_token"] for s in summaries]


def levels(**options):
    study, configs = expand(decode_file({"name": "x", "question": "?"} | options))
    costs = {arm: cost_of(config) for arm, config in configs.items()}
    return {check.name: check.status for check in fairness(study, configs, costs)}


@pytest.mark.parametrize(
    ("options", "condition", "status"),
    [
        ({"arms": ["norm=layer"]}, "learning_rate", "WARN"),
        ({"arms": ["norm=layer"], "seeds": [0, 1]}, "seeds", "WARN"),
        ({"arms": ["d_ff_ratio=5"]}, "params", "WARN"),
        ({"arms": ["model.context=64"]}, "batches", "FAIL"),
        ({"arms": ["train.eval_tokens=128"]}, "evaluation", "FAIL"),
        ({"arms": ["train.steps=400"]}, "tokens", "FAIL"),
        ({"arms": ["norm=layer"], "baseline": ["train.steps=0"]}, "tokens", "PASS"),
        ({"arms": ["optim.schedule=linear"]}, "schedule", "FAIL"),
        ({"arms": ["train.precision=bf16"]}, "machine", "FAIL"),
        ({"arms": ["norm=layer"], "lr_grid": [1e-3, 2e-3]}, "learning_rate", "WARN"),
        ({"arms": ["norm=layer"], "lr_grid": [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]}, "learning_rate", "PASS"),
    ],
)
def test_an_unfair_study_is_flagged_beforehand(options, condition, status):
    statuses = levels(**options)
    assert statuses[condition] == status
    others = {value for name, value in statuses.items() if name != condition}
    assert "FAIL" not in others or condition in ("batches", "tokens")


def test_plan_counts_each_arm_once(tmp_path, monkeypatch, capsys):
    counted, count = [], cost._counted
    monkeypatch.setattr(cost, "_COUNTED", {})
    monkeypatch.setattr(cost, "_counted", lambda config: counted.append(config.norm.name) or count(config))
    assert cli.main(["plan", "x", "vary.norm=layer,dyt", f"runs_dir={tmp_path}", "seeds=0,1", "model.n_layers=1"]) == 0
    assert sorted(counted) == ["dyt", "layer", "rms"]
    assert "6 runs" in capsys.readouterr().out


def test_a_study_is_found_by_its_name_and_one_with_strata_in_all_its_folders(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for stratum in ("small", "large"):
        writer = Writer(tmp_path / "runs", f"mine@{stratum}")
        writer.plan(("norm=layer",), of="mine", stratum=stratum)
        writer.run(seed=0)
    for word in ("mine", "runs/mine"):
        assert cli.main(["status", word]) == 0
        assert "2 finished, 18 waiting" in capsys.readouterr().out


def test_what_is_no_run_has_no_seed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Writer(tmp_path / "runs", "mine").run(seed=0)
    (tmp_path / "runs" / "mine" / "study.yaml").write_text("a: [")
    assert cli.main(["status", "mine"]) == 0
    assert "\nstudy.yaml damaged: " in capsys.readouterr().out


def test_a_study_is_found_from_inside_its_folder(tmp_path, capsys, monkeypatch):
    writer = Writer(tmp_path / "runs", "mine")
    writer.plan(("norm=layer",))
    writer.run(seed=0)
    monkeypatch.chdir(tmp_path / "runs" / "mine" / "baseline")
    assert cli.main(["status", ".."]) == 0
    assert "1 finished, 9 waiting" in capsys.readouterr().out
