"""A study with strata while it runs: those without a result are named, and nothing is concluded without them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys

import pytest
from written_runs import Writer

from nexus_ablate import cli
from nexus_ablate.runs import find_runs, read_run

LOSSES = [2.0, 2.02, 1.98, 2.01, 1.99]
LOWER = [loss - 0.5 for loss in LOSSES]


def strata(tmp_path, *finished):
    """A study of a shallow and a deep stratum, both planned."""
    for name in ("shallow", "deep"):
        writer = Writer(tmp_path / "runs", f"depth@{name}")
        writer.plan(
            ("norm=layer",),
            of="depth",
            stratum=name,
            all_strata=["shallow", "deep"],
            claim="LayerNorm ends lower",
            expects=[{"arm": "norm=layer", "endpoint": "val_loss", "expected": "lower"}],
        )
        if name in finished:
            writer.arm(losses=LOSSES)
            writer.arm("norm=layer", losses=LOWER)
        else:
            writer.run(state="running")


def test_a_stratum_without_a_result_is_named_and_the_claim_is_preliminary(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strata(tmp_path, "shallow")
    assert cli.main(["compare", "runs/depth", "--html", "page.html", "--md", "page.md"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "preliminary: SUPPORTED: LayerNorm ends lower"
    line = "stratum deep: no result yet (1 lost)"
    assert line in lines
    assert line in (tmp_path / "page.html").read_text() and line in (tmp_path / "page.md").read_text()
    assert cli.main(["compare", "runs/depth", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == {"deep": "1 lost"}


@pytest.mark.parametrize("name", ["depth", "depth@shallow"])
def test_the_claim_is_judged_from_the_only_stratum_that_has_a_folder_and_the_others_are_named(
    tmp_path, capsys, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    strata(tmp_path, "shallow")
    shutil.rmtree("runs/depth@deep")
    assert cli.main(["compare", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "preliminary: SUPPORTED: LayerNorm ends lower"
    assert "stratum deep: no result yet (no folder)" in lines


def test_a_stratum_that_was_not_named_is_not_said_to_lack_a_result(tmp_path, capsys):
    for name in ("a", "b", "c"):
        writer = Writer(tmp_path / "runs", f"depth@{name}")
        writer.arm(losses=LOSSES)
        writer.arm("norm=layer", losses=LOWER)
        writer.plan(("norm=layer",), of="depth", stratum=name, all_strata=["a", "b", "c"])
    assert cli.main(["compare", *(str(tmp_path / f"runs/depth@{name}") for name in ("a", "b"))]) == 0
    assert "no result yet" not in capsys.readouterr().out


def test_an_arm_without_a_result_is_no_pass_of_the_seeds(tmp_path, capsys):
    writer = Writer(tmp_path / "runs", "mine")
    writer.arm(losses=LOSSES)
    writer.plan(("norm=layer",))
    assert cli.main(["compare", str(tmp_path / "runs/mine"), "--details"]) == 0
    printed = capsys.readouterr().out
    assert "WARN seeds: norm=layer lacks seeds 0, 1, 2, 3, 4" in printed
    assert "PASS baseline: no run of the baseline failed to train" in printed


def test_commands_in_a_report_work_outside_of_runs_and_with_spaces(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    for root, place in (("my runs", "'my runs/mine'"), ("runs", "mine")):
        writer = Writer(tmp_path / root, "mine")
        writer.arm(losses=LOSSES)
        writer.arm(
            "norm=layer", losses=[loss + shift for loss, shift in zip(LOSSES, (0.1, -0.05, 0.1, 0, 0.05), strict=True)]
        )
        writer.plan(("norm=layer",), added=[{"when": "2020-01-01", "seeds": [4]}])
        assert cli.main(["compare", f"{root}/mine"]) == 0
        printed = capsys.readouterr().out
        assert (
            f"nexus-ablate study {place} --add-seeds " in printed
            and f"nexus-ablate study {place} --confirm " in printed
        )


@pytest.mark.slow
def test_a_terminal_of_another_encoding_gets_the_table_without_some_characters(tmp_path):
    strata(tmp_path, "shallow", "deep")
    command = [sys.executable, "-m", "nexus_ablate", "compare", "runs/depth"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert b"SUPPORTED" in done.stdout and b"?" in done.stdout


def test_a_run_that_has_not_ended_is_not_sampled_and_its_text_is_not_blamed(tmp_path, capsys):
    path = Writer(tmp_path / "runs").run(state="preempted")
    assert cli.main(["sample", str(path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: this run has not ended, so it has no record of the text that it was validated on",
        f"  got: {path}: preempted",
        "  try: run its command again, which resumes it",
    ]


def test_a_run_that_diverged_is_not_said_to_resume(tmp_path, capsys):
    path = Writer(tmp_path / "runs").run(state="diverged")
    for verb in ("sample", "evaluate"):
        assert cli.main([verb, str(path)]) == 2
        said = capsys.readouterr().err.splitlines()
        assert "diverged" in said[0] + said[1] and said[2] == "  try: nexus-ablate status"


def test_a_damaged_baseline_damages_no_other_run(tmp_path, capsys):
    writer = Writer(tmp_path / "runs", "mine")
    path = writer.run()
    writer.run("norm=layer")
    (path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    assert cli.main(["status", str(tmp_path / "runs/mine")]) == 0
    shown = capsys.readouterr()
    assert "1 finished, 1 damaged" in shown.out + shown.err


@pytest.mark.parametrize("place", [20, -1])
def test_a_line_that_is_no_row_is_damage_for_every_command_and_half_a_line_of_a_killed_run_is_none(
    tmp_path, monkeypatch, capsys, place
):
    monkeypatch.chdir(tmp_path)
    writer = Writer(tmp_path / "runs", "mine")
    _, damaged, killed = writer.run(), writer.run("norm=layer"), writer.run("norm=none", state="running")
    lines = (damaged / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[place] = "no row\n"
    (damaged / "metrics.jsonl").write_text("".join(lines))
    with open(killed / "metrics.jsonl", "a") as log:
        log.write('{"step": 402, "tok')
    reason = f"line {range(1, len(lines) + 1)[place]}: "
    for command, status in (("status mine", 0), ("compare mine", 0), (f"show {damaged}", 2), (f"show {killed}", 0)):
        assert cli.main(shlex.split(command)) == status
        printed = " ".join("".join(capsys.readouterr()).split())
        assert (reason in printed) == (str(killed) not in command), command
        assert "finished" not in printed or command == "status mine"
        if command == "status mine":
            assert "1 finished, 1 damaged, 1 lost" in printed


@pytest.mark.parametrize("words", [["empty"], ["mine", "--filter", "nosuch"]], ids=" ".join)
@pytest.mark.parametrize("flags", [[], ["--watch"]], ids=["once", "watched"])
def test_status_without_a_run_to_show_shows_none(tmp_path, monkeypatch, words, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/empty").mkdir(parents=True)
    Writer(tmp_path / "runs", "mine").run()
    assert cli.main(["status", *words, *flags]) == 0


@pytest.mark.slow
def test_a_page_of_strata_is_watched_until_the_last_of_them_has_ended(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strata(tmp_path, "shallow", "deep")
    folder = next((tmp_path / "runs").glob("depth@deep/norm=layer/*"))
    aside = folder.rename(tmp_path / "aside")
    slept = []

    def end(seconds):
        slept.append(seconds)
        aside.rename(folder)

    monkeypatch.setattr("nexus_ablate.cli.compare.time.sleep", end)
    assert cli.main(["compare", "depth", "--html", "page.html", "--watch"]) == 0
    assert len(slept) == 1


def test_two_studies_of_which_one_is_tuned_name_a_baseline_that_works(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tuned = Writer(tmp_path / "runs", "tuned")
    for rate in ((), ("optim.lr=2.12e-3",), ("optim.lr=4.24e-3",), ("optim.lr=6e-3",)):
        for seed in (0, 1, 1001, 1002):
            tuned.run(*rate, seed=seed, loss=2.0 + 0.1 * len(rate))
            tuned.run("norm=layer", *rate, seed=seed, loss=2.1 + 0.1 * len(rate))
    tuned.plan(("norm=layer",), seeds=[0, 1], lr_grid=[0.003, 0.006], tuning_seeds=[1001, 1002])
    other = Writer(tmp_path / "runs", "untuned")
    other.arm("bias=on", losses=[2.0, 2.1], folder="baseline")
    other.arm("bias=on", "norm=layer", losses=[2.0, 2.2], folder="norm=layer")
    other.plan(("norm=layer",), seeds=[0, 1])
    assert cli.main(["compare", "tuned", "untuned"]) == 2
    said = capsys.readouterr().err
    baseline = said.splitlines()[-1].partition("--baseline ")[2]
    assert baseline, said
    assert cli.main(["compare", "tuned", "untuned", "--baseline", *shlex.split(baseline)]) == 0


@pytest.mark.parametrize("command", ["status runs/mine", "list"])
def test_a_reader_that_has_gone_is_no_failure(tmp_path, command):
    Writer(tmp_path / "runs", "mine").run()
    words = [sys.executable, "-m", "nexus_ablate", *command.split()]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.close()
    assert program.returncode == 0


@pytest.mark.slow
def test_a_run_goes_on_without_a_reader_of_its_display(tiny_run, tmp_path):
    words = [sys.executable, "-m", "nexus_ablate", *tiny_run("train.steps=2")]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as program:
        assert program.stderr is not None
        program.stderr.close()
    assert program.returncode == 0
    assert [read_run(path).state for path in find_runs([tmp_path / "runs"])] == ["finished"]


def test_with_all_strata_nothing_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strata(tmp_path, "shallow", "deep")
    assert cli.main(["compare", "runs/depth"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("SUPPORTED") and "no result yet" not in printed


def test_a_study_without_any_result_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strata(tmp_path)
    assert cli.main(["compare", "runs/depth"]) == 2
    assert "no run here has a result yet" in capsys.readouterr().err


def test_no_other_arm_takes_the_place_of_a_baseline_whose_runs_are_all_damaged(tmp_path, capsys):
    writer = Writer(tmp_path / "runs", "mine")
    writer.arm(losses=[2.0, 2.01, 1.99, 2.0, 2.02])
    writer.arm("norm=layer", losses=[2.1, 2.12, 2.09, 2.11, 2.12])
    writer.plan(("norm=layer",))
    first, *others = sorted((tmp_path / "runs/mine/baseline").glob("s*"))
    for path in others:
        (path / "summary.json").write_text("{")
    assert cli.main(["compare", str(tmp_path / "runs/mine")]) == 0
    assert "TOO FEW SEEDS: norm=layer" in capsys.readouterr().out
    (first / "summary.json").write_text("{")
    assert cli.main(["compare", str(tmp_path / "runs/mine")]) == 2
    problem, got, fix = capsys.readouterr().err.splitlines()
    assert problem.endswith("no run of the study's baseline has a result that can be used") and "5 runs excluded" in got
    assert cli.main(fix.split("nexus-ablate ")[1].split()) == 0


def test_the_plan_of_every_stratum_is_on_disk_before_the_first_run(tiny_run, tmp_path, monkeypatch):
    from nexus_ablate.execution import launch

    seen = []
    monkeypatch.setattr(launch, "launch", lambda *_, **__: seen.append(sorted(tmp_path.rglob("study.yaml"))) or 0)
    text = "question: q?\narms: [norm=layer]\nseeds: [0, 1]\nstrata: {model.n_layers: [1, 2]}\n"
    (tmp_path / "mine.yaml").write_text(text)
    base = [text for text in tiny_run() if not text.startswith("model.n_layers")]
    assert cli.main(["study", str(tmp_path / "mine.yaml"), *base]) == 0
    assert [path.parent.name for path in seen[0]] == ["mine@n_layers-1", "mine@n_layers-2"]


@pytest.mark.parametrize("name", ["depth", "depth@deep"])
def test_a_study_in_runs_is_compared_by_its_name(tmp_path, monkeypatch, capsys, name):
    strata(tmp_path, "shallow", "deep")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", name]) == 0
    by_name = capsys.readouterr().out
    assert cli.main(["compare", f"runs/{name}"]) == 0
    assert capsys.readouterr().out == by_name and "BETTER" in by_name
    assert cli.main(["compare", "dept"]) == 2 and "got: dept" in capsys.readouterr().err, "control"


@pytest.mark.slow
def test_a_reader_who_closes_the_pipe_has_the_saved_files(tmp_path):
    strata(tmp_path, "shallow", "deep")
    command = f"{sys.executable} -m nexus_ablate compare runs/depth --html page.html --csv table.csv | true"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=60)
    assert "SUPPORTED" in (tmp_path / "page.html").read_text() and (tmp_path / "table.csv").stat().st_size


def test_an_empty_record_of_a_study_is_called_empty(tmp_path, capsys):
    writer = Writer(tmp_path, "mine")
    writer.arm(losses=LOSSES)
    (tmp_path / "mine/study.yaml").write_text("")
    assert cli.main(["compare", str(tmp_path / "mine")]) == 2
    assert "got: the file is empty" in capsys.readouterr().err
