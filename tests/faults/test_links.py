"""Links planted where the tool reads and writes lead nowhere: nothing outside of runs_dir is changed or shown (R18)."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from faults.bench import only, run
from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.runs import find_runs
from nexus_ablate.runs.files import make_directory, open_regular

SHORT = ("train.steps=8", "train.checkpoint_every=2", "model.n_layers=1")


@pytest.fixture
def outside(tmp_path):
    """What nobody may touch: a file, and a directory that looks like checkpoints and like runs."""
    place = tmp_path / "outside"
    (place / "folder" / "step_00000001").mkdir(parents=True)
    (place / "folder" / "step_00000001" / "kept.txt").write_text("confidential")
    (place / "file").write_text('{"confidential": 1, "state": "confidential"}\n')
    return place


def snapshot(place: Path) -> dict[str, tuple[int, bytes]]:
    """Names, times and contents."""
    paths = [place, *sorted(place.rglob("*"))]
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in paths}


def plant(place: Path, target: Path) -> None:
    """A link in the place of a file or a directory, which stands beside it from then on."""
    kept = place.with_name(f"{place.name}.kept")
    if place.exists():
        place.rename(kept)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_run_below_a_link_is_refused(tiny_run, tmp_path, outside, level):
    """The run's own directory, its arm's, its study's."""
    path = run(tiny_run(*SHORT)).path
    place = [path, *path.parents][level]
    plant(place, outside / "folder")
    before = snapshot(outside)
    with pytest.raises(errors.StorageError, match=re.escape(str(place))) as refused:
        run(tiny_run(*SHORT))
    assert "symbolic link" in refused.value.got
    assert snapshot(outside) == before


@pytest.mark.parametrize("state", ["failed", "preempted"])
def test_a_run_whose_checkpoints_are_a_link_is_not_resumed(tiny_run, tmp_path, outside, state):
    path = run(tiny_run(*SHORT)).path
    status = json.loads((path / "status.json").read_text())
    (path / "status.json").write_text(json.dumps(status | {"state": state}))
    plant(path / "checkpoints", outside / "folder")
    before, rows = snapshot(outside), (path / "metrics.jsonl").read_bytes()
    with pytest.raises(errors.StorageError, match="checkpoints"):
        run(tiny_run(*SHORT))
    assert snapshot(outside) == before
    assert (path / "metrics.jsonl").read_bytes() == rows, "no step was trained"


def test_a_study_whose_directory_is_a_link_is_not_even_read(tmp_path, capfd):
    (tmp_path / "runs").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "study.yaml").write_text("question: is it confidential?\n")
    (tmp_path / "runs" / "mine").symlink_to(tmp_path / "outside")
    for verb in (
        ["plan", "mine"],
        ["plan", "mine", "vary.norm=layer"],
        ["study", "mine", "--confirm"],
        ["study", "mine", "--add-seeds", "1"],
    ):
        assert main([*verb, f"runs_dir={tmp_path / 'runs'}"]) == 2
        said = capfd.readouterr().err
        assert "it is a symbolic link" in said and len(said.splitlines()) == 3
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["study.yaml"]


def test_a_link_that_leads_out_is_excluded_with_a_reason_and_its_runs_are_not_read(tiny_run, tmp_path, capfd):
    run(tiny_run(*SHORT))
    elsewhere = run(tiny_run(*SHORT, "seed=1", f"runs_dir={tmp_path / 'elsewhere'}")).path
    here = only(tmp_path / "runs")
    (here.parent / elsewhere.name).symlink_to(elsewhere)
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "elsewhere" / "scratch")
    assert find_runs([tmp_path / "runs"]) == [here]
    assert find_runs([tmp_path / "runs" / "linked"]) == [tmp_path / "runs" / "linked" / elsewhere.parent.name /
                                                         elsewhere.name]  # fmt: skip
    assert main(["compare", str(tmp_path / "runs"), "--csv", "-", "--md", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text().count("a link, which is not followed") == 2


def test_a_run_resumes_where_runs_dir_itself_is_a_link(tiny_run, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    run(tiny_run(*SHORT))
    assert only(tmp_path / "disk")


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT, os.O_APPEND])
def test_only_a_regular_file_is_opened_and_nothing_is_waited_for(tmp_path, flags):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for place in (tmp_path / "pipe", tmp_path / "link", Path("/dev/zero"), Path("/dev/null"), tmp_path):
        with pytest.raises(OSError):
            os.close(open_regular(place, flags))
    os.close(open_regular(tmp_path / "file", flags))


def test_of_a_directory_that_cannot_be_made_no_part_is_left(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.StorageError):
        make_directory(tmp_path / "a" / "b" / ("c" * 300), tmp_path)
    with pytest.raises(errors.StorageError):
        make_directory(tmp_path / "file" / "b", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
