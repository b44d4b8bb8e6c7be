"""A link that leads out of runs_dir is never followed: what lies outside is neither changed nor read."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from faults.bench import only, run
from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.runs import files, find_runs
from nexus_ablate.runs.files import make_directory, open_regular

SHORT = ("train.steps=8", "train.checkpoint_every=2", "model.n_layers=1")
LONG_AGO = 10**18
"""Nanoseconds: before any access or change that a test makes."""


def age(place: Path) -> None:
    """Date every access and change of a directory back."""
    for path in [*place.rglob("*"), place]:
        os.utime(path, ns=(LONG_AGO, LONG_AGO), follow_symlinks=False)


def touched(place: Path) -> list[str]:
    """What was changed, made or read below a directory since `age`; the directory's own name may be looked up."""
    changed, left = [], [place]
    while left:
        path = left.pop()
        status = path.lstat()
        if status.st_mtime_ns != LONG_AGO:
            changed.append(f"changed: {path}")
        if status.st_atime_ns != LONG_AGO and not path.is_symlink():
            changed.append(f"read: {path}")
        if path.is_dir() and not path.is_symlink():
            left += path.iterdir()
    return changed


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_finished_run_below_a_link_is_not_even_read(tiny_run, tmp_path, level):
    path = run(tiny_run(*SHORT)).path
    place, outside = [path, *path.parents][level], tmp_path / "outside"
    outside.mkdir()
    place.rename(outside / "victim")
    place.symlink_to(outside / "victim")
    age(outside)
    with pytest.raises(errors.StorageError, match=re.escape(str(place))):
        run(tiny_run(*SHORT))
    assert touched(outside) == []


def test_a_study_whose_directory_is_a_link_is_not_even_read(tmp_path, capfd):
    (tmp_path / "runs").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "study.yaml").write_text("question: is it confidential?\n")
    (tmp_path / "runs" / "mine").symlink_to(tmp_path / "outside")
    age(tmp_path / "outside")
    for verb in (
        ["plan", "mine"],
        ["plan", "mine", "vary.norm=layer"],
        ["confirm", "mine"],
        ["add-seeds", "mine", "1"],
    ):
        assert main([*verb, f"runs_dir={tmp_path / 'runs'}"]) == 2
        said = capfd.readouterr().err
        assert "it is a symbolic link" in said and len(said.splitlines()) == 3
    assert touched(tmp_path / "outside") == []


def test_control_a_read_or_a_change_outside_is_seen(tmp_path):
    (tmp_path / "file").write_text("x")
    age(tmp_path)
    (tmp_path / "file").read_text()
    (tmp_path / "new").write_text("")
    assert {text.partition(":")[0] for text in touched(tmp_path)} == {"read", "changed"}


def test_a_new_file_is_never_written_through_a_link(tmp_path):
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "new").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        files.write_synced(tmp_path / "new", b"overwritten")
    assert (tmp_path / "victim").read_text() == "kept"


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
