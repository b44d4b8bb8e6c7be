"""`status` and `plan`, from a study's record and directories alone."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from rich.console import Console
from written_runs import Writer

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.console import duration
from nexus_ablate.launch.states import LOSS, read_line, read_lines, table, troubles
from nexus_ablate.runs.reading import last_row

STATES = ("finished", "diverged", "failed", "preempted", "created", "running")


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A study of two arms and five seeds in runs/, of which the baseline's runs are in all states."""
    monkeypatch.chdir(tmp_path)
    writer = Writer(tmp_path / "runs", "mine")
    writer.plan(("norm=layer",))
    for seed, state in enumerate(STATES[:5]):
        writer.run(seed=seed, state=state)
    writer.run("norm=layer", seed=0, state="running")
    lists(writer, missing=4)
    return writer


def lists(writer, missing):
    """Write the list of runs that the launch of a study leaves, of which some have not begun."""
    folder = writer.paths[0].parents[1]
    runs = [str(path.relative_to(folder)) for path in writer.paths]
    runs += [f"norm=layer/s{seed}-0123abcd" for seed in range(1, 1 + missing)]
    (folder / "runs.txt").write_text("".join(f"{run}\n" for run in runs))


def drawn(lines, **options):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table(lines, **options))
    return console.export_text()


@pytest.mark.parametrize("word", ["mine", "runs/mine", "runs/mine/../mine"])
def test_status_counts_each_state_and_what_is_missing(written, capsys, word):
    assert main(["status", word]) == 0
    said = capsys.readouterr().out
    # a host that is not this one, and a heartbeat of years ago
    assert said.splitlines()[-1] == "1 finished, 1 failed, 1 diverged, 2 lost, 1 preempted; 4 missing"
    assert "baseline s2 failed: it is failed" in said


def test_a_file_that_is_renamed_while_sizes_are_summed_stops_nothing(written, capsys, monkeypatch):
    walk = os.walk

    def walk_before_a_rename(path):
        for folder, folders, names in walk(path):
            yield folder, folders, [*names, ".status.json.tmp"]

    monkeypatch.setattr(os, "walk", walk_before_a_rename)
    assert main(["status"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 finished, 1 failed")


def test_status_in_json_is_a_line_for_each_run(written, capsys):
    assert main(["status", "mine", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 6
    assert {"study", "arm", "seed", "id", "path", "state", "step", "steps", "loss", "reason"} < rows[0].keys()
    assert (rows[0]["arm"], rows[0]["seed"], rows[0]["state"], rows[0]["step"]) == ("baseline", 0, "finished", 400)


MISSING = (
    ((), 2 * 2),
    (("lr_grid=1e-3,2e-3,4e-3",), 2 * 2 * 3),
    (("worth=on",), 2 * 2 + 2 * 2),
)


@pytest.mark.parametrize(("words", "runs"), MISSING)
def test_what_a_stopped_launch_has_not_begun_is_missing(tiny_run, instant, capsys, monkeypatch, tmp_path, words, runs):
    monkeypatch.chdir(tmp_path)
    base = [text for text in tiny_run() if not text.startswith(("runs_dir", "model.n_layers"))]
    study = ["study", "mine", "vary.norm=layer", "seeds=0,1", *words, *base]
    instant.stop_after = 3
    assert main(study) == errors.PREEMPTED
    capsys.readouterr()
    for word in ("mine", "runs"):
        assert main(["status", word]) == 0
        said = capsys.readouterr().out.splitlines()[-1]
        assert said.startswith(f"3 finished; {runs - 3} missing")


def test_settings_are_shown_together_by_the_study_s_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for setting in ("small", "large"):
        writer = Writer(tmp_path / "runs", f"mine@{setting}")
        writer.plan(("norm=layer",), settings={"small": "bias=on", "large": "bias=off"})
        writer.run(seed=0)
        lists(writer, missing=9)
    for word in ("mine", "runs/mine"):
        assert main(["status", word]) == 0
        assert "2 finished; 18 missing" in capsys.readouterr().out


def test_the_loss_of_a_running_run_is_the_last_that_was_measured(finished_run):
    path = finished_run()
    log = path / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= 13))
    at_ten = {row["step"]: row[LOSS] for row in rows if LOSS in row}[10]
    assert "end with different batches" in read_line(path).reason, "as a finished run it is no result"
    status = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps(status | {"state": "preempted"}))
    line = read_line(path)
    assert (line.step, line.steps, line.loss) == (13, 20, at_ten)


def test_a_failed_and_a_damaged_run_have_their_reason_and_stop_nothing(written):
    status = json.loads((written.paths[2] / "status.json").read_text())
    (written.paths[2] / "status.json").write_text(json.dumps(status | {"reason": "no [bold]luck[/bold]\x1b[2J"}))
    (written.paths[0] / "status.json").write_text("{")
    lines, _ = read_lines([written.root])
    assert [line.state for line in lines][:2] == ["failed", "diverged"]
    said = "\n".join(troubles(lines))
    assert "no [bold]luck[/bold]" in said and "status.json is damaged" in said
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


def test_a_long_table_keeps_what_still_runs(written):
    path = written.paths[-1]
    status = json.loads((path / "status.json").read_text()) | {"heartbeat": datetime.now(UTC).isoformat()}
    (path / "status.json").write_text(json.dumps(status))
    shown = drawn(read_lines([written.root])[0], limit=1)
    assert "running" in shown and "finished" not in shown


@pytest.mark.parametrize("words", [["empty"], ["empty", "--watch"], ["empty", "--json"]], ids=" ".join)
def test_status_without_a_run_to_show_shows_none(tmp_path, monkeypatch, words, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["status", *words]) == 0
    assert capsys.readouterr().out.strip() in ("no runs here", "")


def test_a_watched_table_ends_with_the_last_run(written, monkeypatch):
    for path in written.paths:
        status = json.loads((path / "status.json").read_text())
        (path / "status.json").write_text(json.dumps(status | {"state": "finished"}))
        (path / "summary.json").write_text("{}")
    lists(written, missing=0)
    assert main(["status", "mine", "--watch"]) == 0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, ""), (0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2.0 h"), (40 * 3600, "40 h"), (172800, "2.0 d")],
)
def test_durations_are_for_people(seconds, said):
    assert duration(seconds) == said


def test_a_study_is_found_from_inside_its_folder(written, capsys, monkeypatch):
    monkeypatch.chdir(written.root / "mine" / "baseline")
    assert main(["status", ".."]) == 0
    assert "; 4 missing" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status runs/mine", "list"])
def test_a_reader_that_has_gone_is_no_failure(written, command):
    code = "import sys\nfrom nexus_ablate.cli import main\nsys.exit(main())"
    words = [sys.executable, "-c", code, *command.split()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as driver:
        driver.stdout.close()
        assert (driver.stderr.read(), driver.wait(60)) == (b"", 0)


# -------------------------------------------------------------------------------------------------------------- plan


def plan(capsys, *words):
    status = main(["plan", *words])
    shown = capsys.readouterr()
    return status, " ".join((shown.out + shown.err).split())


def test_plan_shows_everything_and_writes_nothing(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    vary = ["vary.norm=layer,rms", "vary.n_kv_heads=3", "vary.placement=deepnorm"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    status, said = plan(capsys, "mine", *vary, "seeds=0-4", "lr_grid=1e-3,2e-3,4e-3", *tiny_run())
    assert status == 0
    for shown in (
        "norm=layer",
        "equal norm=rms is baseline",
        "refused n_kv_heads=3",
        "placement=deepnorm also changes init to xavier",
        "5 seeds show",
        "SD of a pair's difference with 80% power",
        "45 runs, 45 missing",
        "tokens per parameter",
    ):
        assert shown in said, (shown, said)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_plan_notes_once_what_several_arms_change(tmp_path, monkeypatch, capsys):
    arms = "{a: placement=hybridnorm, b: placement=hybridnorm bias=on}"
    (tmp_path / "mine.yaml").write_text(f"baseline: [model=femto]\narms: {arms}\n")
    monkeypatch.chdir(tmp_path)
    _, said = plan(capsys, "mine.yaml")
    assert said.count("note placement=hybridnorm also changes qk_norm to qkv") == 1


ARMS = (("optim=muon", True), ("optim=muon optim.lr=5e-3", False), ("norm=layer", False))


@pytest.mark.parametrize(("arm", "drops"), ARMS)
def test_plan_names_what_an_arm_loses_with_another_optimizer(tmp_path, monkeypatch, capsys, arm, drops):
    (tmp_path / "mine.yaml").write_text(f"baseline: [model=femto, optim.lr=5e-3]\narms: {{other: {arm}}}\n")
    monkeypatch.chdir(tmp_path)
    status, said = plan(capsys, "mine.yaml")
    note = "other drops optim.lr=5e-3 of the baseline; write it in the arm to keep it"
    assert status == 0 and (note in said) == drops


def test_plan_goes_by_finished_runs_where_there_are_any(tiny_run, instant, capsys):
    words = ["mine", "vary.norm=layer", "seeds=0,1", *tiny_run()]
    instant.failing = {("norm=layer", 0), ("norm=layer", 1)}
    assert main(["study", *words]) == errors.BUG
    capsys.readouterr()
    status, said = plan(capsys, *words)
    assert status == 0 and "4 runs, 0 missing" in said
    before_runs, _, of_arm = said.partition("norm=layer ")
    assert "~" not in before_runs and "~" in of_arm
    assert "2 seeds; a word about a difference needs 5" in said


def test_plan_checks_each_setting_and_totals_all(tiny_run, capsys):
    base = [text for text in tiny_run() if not text.startswith("model.n_layers")]
    settings = ["settings.one=model.n_layers=1", "settings.two=model.n_layers=2"]
    status, said = plan(capsys, "mine", "vary.norm=layer", "seeds=0-4", *settings, *base)
    assert status == 0 and "20 runs, 20 missing" in said
    assert said.count("early training") == 2 and "one: model.n_layers=1" in said
