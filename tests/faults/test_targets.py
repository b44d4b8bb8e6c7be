"""Paths and studies that cannot be used end in three lines, and nothing is half made."""

from __future__ import annotations

import os
import shutil

import pytest
import yaml

from faults.bench import at_step, only, run
from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.cli.verb import all_verbs
from nexus_ablate.runs import make_directory

LONG = "x" * 5000


def refused(capsys, *command: str) -> str:
    """The three lines that a command ends in, with status 2."""
    capsys.readouterr()
    assert main(list(command)) == errors.CONFIG
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 3, said
    return said


@pytest.mark.parametrize("kind", ["a folder", "a link to itself", "nothing"])
def test_a_study_that_is_no_file_is_refused_at_once(tmp_path, capsys, kind):
    path = tmp_path / "mine.yaml"
    {
        "a folder": path.mkdir,
        "a link to itself": lambda: path.symlink_to(path),
        "nothing": lambda: None,
    }[kind]()
    refused(capsys, "plan", str(path))


@pytest.mark.parametrize("target", ["loop/x", f"{LONG}", "nowhere/x", "folder"])
def test_a_target_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, monkeypatch, capsys, target):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("nexus_ablate.comparison.compare.compare", None)
    refused(capsys, "compare", str(tmp_path), "--html", target)
    refused(capsys, "show", str(tmp_path), "--out", f"{target}.png" if target != "folder" else "nowhere/folder.png")
    assert sorted(os.listdir(tmp_path)) == ["folder", "loop"]


def test_a_folder_without_permission_is_named_before_anything_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("nexus_ablate.comparison.compare.compare", None)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    said = refused(capsys, "compare", str(tmp_path), "--html", str(tmp_path / "x.html"))
    assert f"got: {tmp_path}\n  try: --html x.html" in said and not list(tmp_path.iterdir())


OUTPUTS = [(verb, flag) for verb in all_verbs() for flag in verb.flags if flag.takes == "FILE"]


@pytest.mark.parametrize(("verb", "flag"), OUTPUTS, ids=[f"{verb.name}{flag.name}" for verb, flag in OUTPUTS])
def test_an_output_of_any_verb_replaces_an_existing_file_only_with_force(tmp_path, verb, flag):
    ending = "png" if "picture" in flag.meaning else "yaml" if flag.name == "--new" else "md"
    file = tmp_path / f"notes.{ending}"
    verb.parse(["word", flag.name, str(file)])
    file.touch()
    with pytest.raises(errors.ConfigError, match="would replace an existing file") as refused:
        verb.parse(["word", flag.name, str(file)])
    assert "--force" in refused.value.fix
    verb.parse(["word", flag.name, str(file), "--force"])


@pytest.mark.parametrize("text", ["x", "xx", "\n", "", "aaaa" * 50])
def test_a_text_of_one_character_is_refused_before_a_directory_is_made(tiny_run, tmp_path, capsys, text):
    (tmp_path / "one.txt").write_text(text)
    refused(capsys, *tiny_run(f"data.files=[{tmp_path / 'one.txt'}]", "data.tokenizer=char"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("runs_dir", "status"), [(LONG, 5), ("/dev/null/x", 5), ("loop/x", 5)])
def test_a_runs_dir_that_cannot_be_is_refused_and_leaves_nothing(
    tiny_run, tmp_path, monkeypatch, capsys, runs_dir, status
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(os.listdir(tmp_path))
    command = [text for text in tiny_run() if not text.startswith("runs_dir=")]
    assert main([*command, f"runs_dir={runs_dir}"]) == status
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert [name for name in sorted(os.listdir(tmp_path)) if name != "cache"] == before


def test_a_run_resumes_where_runs_dir_itself_is_a_link(tiny_run, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    run(tiny_run("train.steps=2"))
    assert only(tmp_path / "disk")


@pytest.mark.parametrize("flag", ["--html", "--csv", "--json"])
def test_a_report_never_takes_the_place_of_a_device_or_a_pipe(tmp_path, capsys, flag):
    """Root may replace /dev/null by a file, also in a container."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["compare", str(tmp_path), flag, str(pipe), "--force"]) == errors.CONFIG
    problem, got, fix = capsys.readouterr().err.splitlines()
    assert "a device or a pipe" in problem and str(pipe) in got and f"{flag} report" in fix
    assert pipe.is_fifo()


def test_of_a_directory_that_cannot_be_made_no_part_is_left(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "a" / "b" / ("c" * 300), tmp_path / "file" / "b"):
        with pytest.raises(errors.StorageError):
            make_directory(path, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_folder_that_is_deleted_while_it_trains_ends_in_status_5_and_stays_deleted(tiny_run, tmp_path, monkeypatch):
    command = tiny_run()
    at_step(monkeypatch, lambda step: step == 7 and shutil.rmtree(only(tmp_path / "runs"), ignore_errors=True))
    assert main(command) == errors.STORAGE
    assert not list((tmp_path / "runs").glob("*/*/*/*"))


def test_a_folder_that_has_another_s_name_by_now_is_left_to_it(tiny_run, tmp_path, monkeypatch):
    def take_over(step: int) -> None:
        if step == 7:
            path = only(tmp_path / "runs")
            path.rename(tmp_path / "moved")
            path.mkdir()
            (path / "LOCK").write_text("another process")

    at_step(monkeypatch, take_over)
    assert main(tiny_run()) == errors.STORAGE
    (path,) = (tmp_path / "runs").glob("*/*/*")
    assert [file.name for file in path.iterdir()] == ["LOCK"]


@pytest.mark.slow
def test_a_config_with_more_layers_than_its_checkpoint_is_not_evaluated(tiny_run, capsys):
    path = run(tiny_run()).path
    config = yaml.safe_load((path / "config.yaml").read_text())
    config["model"]["n_layers"] = 10
    config["resolved"]["windows"] = [0] * 10
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["evaluate", str(path), "--evals", "quantization"]) in (errors.CONFIG, errors.CHECKPOINT)
    assert "are from another version" in capsys.readouterr().err
