"""Links planted where the tool reads and writes lead nowhere: nothing outside of runs_dir is changed or shown (R18)."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from faults.bench import at_step, child, ended, only, run
from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.errors import Preempted
from nexus_ablate.runs import files, find_runs
from nexus_ablate.runs.files import make_directory, open_regular

IN_A_RUN = (
    *("LOCK", "status.json", "env.json", "config.yaml", "overrides.txt", "log.txt", "init.json", "decay_groups.json"),
    *("metrics.jsonl", "probes.jsonl", "summary.json", "wandb.json", "picture.png", "checkpoints", "wandb"),
)
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


def preempted(tiny_run, monkeypatch) -> tuple[Path, list[str]]:
    """A run that was stopped after a checkpoint, and its command."""
    import signal

    overrides = tiny_run(*SHORT)
    with monkeypatch.context() as patch:
        at_step(patch, lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 5 else None)
        with pytest.raises(Preempted):
            run(overrides)
    return only(Path(next(o for o in overrides if o.startswith("runs_dir=")).partition("=")[2])), overrides


def plant(place: Path, target: Path) -> None:
    """A link in the place of a file or a directory, which stands beside it from then on."""
    kept = place.with_name(f"{place.name}.kept")
    if place.exists():
        place.rename(kept)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)


@pytest.mark.usefixtures("signals_as_in_a_terminal")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in IN_A_RUN if name != "LOCK"])
def test_a_link_in_a_run_is_not_followed_by_any_verb(tiny_run, outside, monkeypatch, capfd, name):
    every_verb_leaves_the_outside_alone(tiny_run, outside, monkeypatch, capfd, name)


@pytest.mark.usefixtures("signals_as_in_a_terminal")
def test_a_link_in_the_place_of_the_lock_is_not_followed_by_any_verb(tiny_run, outside, monkeypatch, capfd):
    every_verb_leaves_the_outside_alone(tiny_run, outside, monkeypatch, capfd, "LOCK")


def every_verb_leaves_the_outside_alone(tiny_run, outside, monkeypatch, capfd, name):
    path, overrides = preempted(tiny_run, monkeypatch)
    directory = name in ("checkpoints", "wandb")
    plant(path / name, outside / ("folder" if directory else "file"))
    before = snapshot(outside)
    status = main(overrides)
    for verb in (
        ["show", str(path)],
        ["status", str(path)],
        ["compare", str(path)],
        ["noise", str(path)],
        ["evaluate", str(path), "--evals", "quantization"],
    ):
        assert main(verb) in (0, 2, 4, 5), verb
    assert snapshot(outside) == before
    said = "".join(capfd.readouterr())
    assert "Traceback" not in said and "confidential" not in said
    if not (path / name).is_symlink():
        assert status == 0, "the link was replaced and the run went on"


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["study.yaml", ".workers", ".workers/worker0.log", "mine"])
def test_a_link_in_a_study_is_not_followed(tiny_run, tmp_path, outside, capfd, name):
    study = tmp_path / "runs" / "mine"
    plant(study if name == "mine" else study / name, outside / ("file" if "." in Path(name).name[1:] else "folder"))
    before = snapshot(outside)
    overrides = [text for text in tiny_run(*SHORT) if not text.startswith("train.threads")]
    status = main(["study", "mine", "vary.norm=layer", "seeds=0", *overrides, "--workers", "1"])
    assert status == (2 if name == "study.yaml" else 5)
    assert snapshot(outside) == before
    said = capfd.readouterr().err
    assert "Traceback" not in said and "confidential" not in said


@pytest.mark.slow
def test_a_multirun_writes_nothing_beside_its_runs(tiny_run, tmp_path, outside):
    plant(tmp_path / "runs" / ".multirun", outside / "folder")
    before = snapshot(outside)
    assert main(["-m", "seed=0,1", *tiny_run(*SHORT)]) == 0
    assert snapshot(outside) == before
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [".multirun", "scratch"]


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


def test_a_run_goes_on_where_runs_dir_itself_is_a_link(tiny_run, tmp_path):
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


@pytest.mark.usefixtures("signals_as_in_a_terminal")
@pytest.mark.parametrize("without", ["open_regular", "refuse_link", "atomic_write"])
def test_control_without_the_protection_the_link_is_followed(tiny_run, outside, monkeypatch, without):
    from nexus_ablate.report import run_picture as picture
    from nexus_ablate.runs import directory, ownership
    from nexus_ablate.training import checkpoint

    path, overrides = preempted(tiny_run, monkeypatch)
    trusting = {
        "open_regular": lambda path, flags=os.O_RDONLY, follow=False: os.open(path, flags, 0o666),
        "refuse_link": lambda path: None,
        "atomic_write": lambda path, data: path.write_bytes(data),
    }
    place = {"open_regular": "LOCK", "refuse_link": "checkpoints", "atomic_write": "picture.png"}[without]
    plant(path / place, outside / ("folder" if place == "checkpoints" else "file"))
    before = snapshot(outside)
    for module in (files, directory, ownership, picture, checkpoint):
        if hasattr(module, without):
            monkeypatch.setattr(module, without, trusting[without])
    main(["show", str(path)] if place == "picture.png" else overrides)
    assert snapshot(outside) != before


def test_of_a_directory_that_cannot_be_made_no_part_is_left(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.StorageError):
        make_directory(tmp_path / "a" / "b" / ("c" * 300), tmp_path)
    with pytest.raises(errors.StorageError):
        make_directory(tmp_path / "file" / "b", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_lock_that_is_a_pipe_is_refused_at_once(tiny_run, monkeypatch):
    path, overrides = preempted(tiny_run, monkeypatch)
    (path / "LOCK").unlink()
    os.mkfifo(path / "LOCK")

    def resume() -> None:
        import signal

        signal.alarm(20)
        with pytest.raises(errors.StorageError, match="LOCK"):
            run(overrides)

    assert ended(child(resume)) == 0
    shutil.rmtree(path)
