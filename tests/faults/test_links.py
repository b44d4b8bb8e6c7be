"""Links planted where the tool reads and writes lead nowhere: nothing outside of runs_dir is changed or shown (R18)."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from faults.bench import at_step, child, ended, only, run
from faults.test_mutated_studies import Mirror
from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.errors import Preempted
from nexus_ablate.execution.local_pool import LocalPool
from nexus_ablate.runs import files, find_runs
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


def preempted(tiny_run, monkeypatch, *more: str) -> tuple[Path, list[str]]:
    """A run that was stopped after a checkpoint, and its command."""
    import signal

    overrides = tiny_run(*SHORT, *more)
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
def test_a_link_in_the_place_of_the_lock_is_not_followed_by_any_verb(tiny_run, outside, monkeypatch, capfd):
    path, overrides = preempted(tiny_run, monkeypatch)
    plant(path / "LOCK", outside / "file")
    before = snapshot(outside)
    status = main(overrides)
    for verb in (
        ["show", str(path)],
        ["status", str(path)],
        ["compare", str(path)],
        ["evaluate", str(path), "--evals", "quantization"],
    ):
        assert main(verb) in (0, 2, 4, 5), verb
    assert snapshot(outside) == before
    said = "".join(capfd.readouterr())
    assert "Traceback" not in said and "confidential" not in said
    assert status == errors.STORAGE


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


# ------------------------------------------------------------------------- in the place of everything that is written

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


def listing(place: Path) -> list[str]:
    """Every name below a directory, but for those of W&B's own runs, which nobody can foresee."""
    names = [path.relative_to(place) for path in sorted(place.rglob("*"))]
    return [str(name) for name in names if not (name.parts[0] == "wandb" and len(name.parts) > 2)]


def planted(origin: Path, copy: Path, name: str, original: Path, fresh: bool = False) -> Path:
    """A copy of a directory in which a link has the place of `name`, and leads to a valid file or directory.

    Args:
        origin: The directory; with `fresh` nothing of it is copied.
        copy: Where its copy is made.
        name: Relative to the directory.
        original: What is copied to the place that the link leads to.

    Returns:
        The directory outside of the copy, dated back, which holds that and nothing else.
    """
    shutil.rmtree(copy.parent, ignore_errors=True)
    outside = copy.parent / "outside"
    outside.mkdir(parents=True)
    copy_of = shutil.copytree if original.is_dir() else shutil.copyfile
    copy_of(original, outside / "victim")
    if not fresh:
        shutil.copytree(origin, copy, symlinks=True)
    place = copy / name
    if os.path.lexists(place):
        shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(outside / "victim")
    age(outside)
    return outside


@pytest.fixture
def trespasses(monkeypatch, capfd):
    """A function: what a command did to a directory, and how it ended if not in a result or in three lines."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)

    def call(command: list[str], outside: Path) -> list[str]:
        capfd.readouterr()
        with monkeypatch.context() as patch:
            if command[0] == "sync":
                patch.setattr("nexus_ablate.track.upload.begin", lambda settings, config: Mirror())
            status = main(command)
        said = "".join(capfd.readouterr())
        changed = touched(outside)
        age(outside)
        message = said[said.find("error: ") :].strip().splitlines()
        one_message = len(message) == 3 or command[0] in ("evaluate", "sync")  # which go on with other runs
        if "Traceback" in said or (status in (2, 4, 5) and not one_message):
            changed.append(f"status {status}: {said}")
        return [f"{' '.join(command[:2])}: {text}" for text in changed]

    return call


def reading(directory: Path, out: Path) -> list[list[str]]:
    """Every verb that takes a run or a directory of runs, those that write to it last."""
    return [
        *([verb, str(directory)] for verb in ("status", "compare")),
        ["compare", str(directory), "--html", str(out / "report.html"), "--json", str(out / "report.json")],
        *(["show", str(directory)] for _ in range((directory / "status.json").exists())),
        ["evaluate", str(directory), "--evals", "quantization"],
        ["sync", str(directory)],
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("signals_as_in_a_terminal")
@pytest.mark.parametrize("kind", ["finished", pytest.param("preempted", marks=pytest.mark.long), "fresh"])
def test_a_link_in_the_place_of_anything_that_a_run_writes_is_followed_by_no_verb(
    tiny_run, tmp_path, monkeypatch, trespasses, counted, kind
):
    """The names are those of a finished and a preempted run, W&B's files included."""
    offline = ["tracker=wandb_offline"]
    stopped, _ = preempted(tiny_run, monkeypatch, *offline)
    runs = tmp_path / "finished"
    finished = run(tiny_run(*SHORT, *offline, "evals=[quantization]", f"runs_dir={runs}")).path
    assert main(["show", str(finished)]) == 0
    below = finished.relative_to(runs)
    origins = {name: place / name for place in (stopped, finished) for name in listing(place)}
    assert {"LOCK", "status.json", "checkpoints", "metrics.jsonl", "wandb", "picture.png"} <= origins.keys()
    bad, copy = [], tmp_path / "case" / "runs"
    for name, original in origins.items():
        origin = tmp_path / "runs" if kind == "preempted" else runs
        outside = planted(origin, copy, str(below / name), original, fresh=kind == "fresh")
        train = tiny_run(*SHORT, f"runs_dir={copy}", *(offline if name.startswith("wandb") else []))
        verbs = reading(copy / below, tmp_path) if kind == "finished" else []
        for command in (*verbs, train, *([["show", str(copy / below)]] if kind == "preempted" else [])):
            bad += [f"{name}: {text}" for text in trespasses(command, outside)]
    counted(f"{len(origins)} names, {len(bad)} trespasses")
    assert not bad, "\n".join(bad)


@pytest.mark.slow
@pytest.mark.long
def test_a_link_in_the_place_of_anything_that_a_study_writes_is_followed_by_no_verb(
    tiny_run, tmp_path, monkeypatch, trespasses, counted
):
    """The names are those of a finished study, down to its run directories. Workers run where their files are links."""
    overrides = [text for text in tiny_run(*SHORT) if not text.startswith(("train.threads", "runs_dir"))]
    study = ["study", "mine", "vary.norm=layer", "seeds=0", *overrides, "--workers", "1"]
    runs = tmp_path / "runs"
    assert main([*study, f"runs_dir={runs}"]) == 0
    names = [".", *(name for name in listing(runs / "mine") if name.count("/") < 2)]
    assert {".", "study.yaml", ".workers", ".workers/worker0.log", "baseline", "norm=layer"} <= {*names}
    bad, copy, run = [], tmp_path / "case" / "runs", LocalPool.run
    for name in names:
        monkeypatch.setattr(LocalPool, "run", run if name.startswith(".workers") else lambda *_: "")
        for fresh in (False, True):
            outside = planted(runs, copy, f"mine/{name}", runs / "mine" / name, fresh)
            where = f"runs_dir={copy}"
            commands = [["plan", *study[1:-2], where], [*study, where]]
            if not fresh:
                commands += [
                    ["study", "mine", "norm=layer", "--confirm", where],
                    ["study", "mine", "--add-seeds", "1", where],
                ]
                commands += reading(copy, tmp_path)
                commands += reading(copy / "mine", tmp_path) if name != "." else []  # which the user names
            for command in commands:
                bad += [f"{name}: {text}" for text in trespasses(command, outside)]
    counted(f"{len(names)} names, {len(bad)} trespasses")
    assert not bad, "\n".join(bad)


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
        ["study", "mine", "--add-seeds", "1"],
    ):
        assert main([*verb, f"runs_dir={tmp_path / 'runs'}"]) == 2
        said = capfd.readouterr().err
        assert "it is a symbolic link" in said and len(said.splitlines()) == 3
    assert touched(tmp_path / "outside") == []


@pytest.mark.usefixtures("signals_as_in_a_terminal")
def test_a_checkpoint_that_is_a_link_is_replaced_and_never_taken_for_the_run_s_own(tiny_run, tmp_path, monkeypatch):
    finished = run(tiny_run(*SHORT, f"runs_dir={tmp_path / 'elsewhere'}")).path / "checkpoints"
    path, overrides = preempted(tiny_run, monkeypatch)
    (last,) = finished.iterdir()
    (path / "checkpoints" / last.name).symlink_to(last)
    age(finished)
    run(overrides)
    assert touched(finished) == []
    assert not (path / "checkpoints" / last.name).is_symlink()


def test_a_new_file_is_never_written_through_a_link(tmp_path):
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "new").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        files.write_synced(tmp_path / "new", b"overwritten")
    assert (tmp_path / "victim").read_text() == "kept"


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
