"""Finding runs again: `status`, ids and `last`, `show`, `sample`."""

from __future__ import annotations

import os
import shlex

import pytest
from written_runs import Writer

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.runs.lookup import id_of, run_at


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with three finished runs of two experiments and a failed one, the last of which is `norm=dyt`'s."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    mine, other = Writer(tmp_path / "runs", "mine"), Writer(tmp_path / "runs", "other")
    paths = {
        "baseline": mine.run(loss=2.0),
        "norm=layer": mine.run("norm=layer", loss=1.5),
        "norm=none": mine.run("norm=none", state="failed"),
        "norm=dyt": other.run("norm=dyt", loss=2.5),
    }
    for age, path in enumerate(reversed(paths.values())):
        os.utime(path / "status.json", (1e9 - age, 1e9 - age))
    (paths["norm=layer"] / "large").write_bytes(b"x" * 5_000_000)
    return paths


def printed(capsys, command):
    capsys.readouterr()
    assert main(shlex.split(command)) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys, command):
    assert main(shlex.split(command)) == errors.CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["error", "got", "try"]
    return lines


def test_status_lists_every_run_with_id_loss_and_disk_use(desk, capsys):
    lines = printed(capsys, "status")
    columns = ["arm", "id", "study", "seed", "state", "step", "val", "loss", "age", "disk"]
    assert lines[0].split() == columns
    (line,) = [line for line in lines if line.startswith("norm=layer ")]
    assert id_of(desk["norm=layer"]) in line.split() and "1.5000" in line and "5.0" in line and line.endswith("MB")
    assert lines[-1].startswith("3 finished, 1 failed, 5.")


@pytest.mark.parametrize("verb", ["evaluate", "sync"])
def test_a_folder_without_runs_is_refused_by_each_verb_that_takes_runs(desk, capsys, monkeypatch, verb):
    monkeypatch.setenv("WANDB_API_KEY", "k3y" * 14)
    os.mkdir("empty")
    lines = refused(capsys, f"{verb} empty")
    assert lines == ["error: there is no run here", "  got: empty", "  try: nexus-ablate status"]
    printed(capsys, lines[2].removeprefix("  try: nexus-ablate "))
    os.mkdir("runs/begun")
    assert refused(capsys, f"{verb} begun")[0] == "error: there is no run here", "a name is that of a study in runs/"
    assert refused(capsys, f"{verb} bgun")[0] == "error: this directory does not exist"


def test_a_run_is_found_by_id_by_the_start_of_its_id_and_as_the_last(desk):
    path = desk["norm=layer"]
    for word in (id_of(path), id_of(path)[:5], os.path.relpath(path), str(path)):
        assert run_at(word, "show").resolve() == path.resolve()
    assert run_at("last", "show").resolve() == desk["norm=dyt"].resolve()
    os.utime(path / "status.json", (2e9, 2e9))
    assert run_at("last", "show").resolve() == path.resolve()


def test_the_same_run_in_two_experiments_has_one_id(desk, tmp_path):
    twin = Writer(tmp_path / "runs", "twin").run("norm=layer", loss=1.5)
    assert id_of(twin) == id_of(desk["norm=layer"])
    os.utime(twin / "status.json", (1, 1))
    assert run_at(id_of(twin), "show").resolve() == desk["norm=layer"].resolve()


def test_a_word_that_names_no_run_is_refused_with_a_command_that_lists_them(desk, capsys, monkeypatch, tmp_path):
    for verb in ("show", "sample", "show last"):
        assert "nexus-ablate status" in refused(capsys, f"{verb} nothing")[2]
        assert "nexus-ablate status" in refused(capsys, f"{verb} 0123abc")[2]
    assert "a folder of 3 runs" in refused(capsys, "sample runs/mine")[1]
    assert "nexus-ablate show last last" in refused(capsys, "show last last last")[2]
    assert "--out run.png" in refused(capsys, "show last last --out both.png")[2]
    monkeypatch.chdir(tmp_path / "runs")
    assert main(["status"]) == 0 and "no runs here" in capsys.readouterr().out


def test_show_lists_configuration_consequences_and_results_that_differ(desk, capsys):
    one, other = (id_of(desk[name]) for name in ("baseline", "norm=layer"))
    lines = [line.split() for line in printed(capsys, f"show {one} {other}")]
    assert lines[0] == ["key", "part", one, other]
    assert ["norm", "config", "rms", "layer"] in lines
    assert ["norm_bias", "follows", "off", "on"] in lines
    assert ["val_loss", "result", "2", "1.5"] in lines
    assert not any(line[0] == "placement" for line in lines)
    (line,) = printed(capsys, f"show {one} {one}")
    assert line.startswith("the two runs have the same configuration")


def test_show_takes_the_last_run(desk, capsys):
    assert any("norm=dyt" in line for line in printed(capsys, "show last"))


@pytest.fixture
def trained(tiny_run, tmp_path, monkeypatch):
    from nexus_ablate.training.session import train

    monkeypatch.chdir(tmp_path)
    overrides = tiny_run("train.steps=2", "probe=off")
    return train(compose(overrides), overrides, quiet=True).path


def test_sample_continues_a_prompt_and_repeats_itself(trained, capsys):
    def text(flags):
        return "\n".join(printed(capsys, f"sample last {flags}"))

    assert text("--prompt 'to be'").startswith("to be")
    assert len(text("--prompt 'to be'")) > len("to be")
    assert text("") == text("")


def test_a_sample_of_a_text_without_line_breaks_needs_a_prompt(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    overrides = [text for text in tiny_run("train.steps=1", "probe=off") if not text.startswith("data")]
    overrides += ["data=copy", "data.length=8", "data.most=4", "data.sequences=64"]
    assert main(overrides) == 0
    capsys.readouterr()
    assert main(["sample", "last"]) == 2
    command = capsys.readouterr().err.splitlines()[-1].removeprefix("  try: nexus-ablate ")
    assert main(shlex.split(command)) == 0


def test_a_sample_acts_on_no_terminal():
    from nexus_ablate.errors import escaped

    assert escaped("a\x1b[2J\tb\n", kept="\n\t") == "a\\x1b[2J\tb\n"
