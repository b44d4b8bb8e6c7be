"""Damaged run directories never end a comparison, are each accounted for, and move no number of an intact arm (R21)."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from written_runs import Writer

from faults.bench import sizes
from faults.payloads import PICKLE, YAML
from nexus_ablate.cli import main
from nexus_ablate.comparison import read as reading
from nexus_ablate.comparison.compare import Table, compare
from nexus_ablate.errors import UserError

BATCH = 50
TEXTS = (
    b"",
    b"\0" * 40,
    b"[]",
    b"null",
    b"NaN",
    b"\xff\xfe",
    b"[" * 50_000,
    b"9" * 6000,
    PICKLE,
    YAML["itself"].encode(),
)


def intact(root: Path) -> Writer:
    writer = Writer(root, steps=40)
    writer.arm(losses=[2.00, 2.02, 1.98])
    writer.arm("norm=layer", losses=[1.90, 1.93, 1.87])
    return writer


def spoil(path: Path, draw: random.Random) -> str:
    """Damage one file of a run directory, or the directory."""
    file = draw.choice(sorted(p for p in path.iterdir() if p.stat().st_size))
    data = file.read_bytes()
    ways = {
        "cut": lambda: os.truncate(file, draw.randrange(len(data))),
        "flipped": lambda: file.write_bytes(flipped(data, draw)),
        "deleted": file.unlink,
        "replaced": lambda: file.write_bytes(draw.choice(TEXTS)),
        "doubled": lambda: file.write_bytes(data + data),
        "a pipe": lambda: (file.unlink(), os.mkfifo(file)),
        "a directory": lambda: (file.unlink(), file.mkdir()),
        "a link to nowhere": lambda: (file.unlink(), file.symlink_to("nowhere")),
        "shuffled": lambda: file.write_bytes(b"\n".join(draw.sample(data.split(b"\n"), data.count(b"\n") + 1))),
        "unreadable numbers": lambda: file.write_bytes(data.replace(b"2.", b'"x').replace(b"1.", b"null")),
    }
    way = draw.choice(sorted(ways))
    ways[way]()
    return f"{file.name} {way}"


def flipped(data: bytes, draw: random.Random) -> bytes:
    changed, bit = bytearray(data), draw.randrange(8 * len(data))
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def compared(root: Path) -> Table:
    (table,) = compare(root / "study", baseline="baseline").tables
    return table


def means(table: Table) -> dict[str, float | None]:
    """The losses of the two arms that are whole."""
    return {arm.name: arm.mean("val_loss") for arm in table.arms if arm.name in ("baseline", "norm=layer")}


@sizes(50, 500, fast=True)
def test_every_damaged_run_is_counted_and_no_intact_number_moves(tmp_path, counted, count):
    draw = random.Random(count)
    excluded = read = 0
    for start in range(0, count, BATCH):
        writer = intact(tmp_path / str(start))
        expected = means(compared(writer.root))
        said = {}
        for number in range(start, start + BATCH):
            broken = writer.root / "study" / f"x={number}" / f"s{number % 3}-0000{number:04x}"
            broken.parent.mkdir()
            shutil.copytree(writer.paths[number % len(writer.paths)], broken)
            edit_json("env.json", "run_hash", f"0000{number:04x}")(broken, broken)
            said[broken] = spoil(broken, draw)
        table = compared(writer.root)
        reasons = {left.path: left.reason for left in table.left_out}
        used = {run.path for arm in table.arms for run in arm.runs.values()}
        for path, way in said.items():
            assert path in used or reasons.get(path), way
        assert all(reasons.values())
        assert means(table) == expected
        excluded += len(said.keys() & reasons.keys())
        read += len(said.keys() - reasons.keys())
    counted(f"{count} of {count} accounted for: {excluded} left out with a reason, {read} readable anyway")


def edit_lines(name: str, change) -> object:
    """A damage: the lines of a log are changed."""

    def damage(run: Path, _: Path) -> None:
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(change(lines)))

    return damage


def edit_json(name: str, key: str, value: object) -> object:
    """A damage: one value of a file is another."""

    def damage(run: Path, _: Path) -> None:
        file = run / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))

    return damage


def exchange(name: str) -> object:
    """A damage: two arms have each other's file."""

    def damage(run: Path, other: Path) -> None:
        texts = [(path / name).read_text() for path in (other, run)]
        for path, text in zip((run, other), texts, strict=True):
            (path / name).write_text(text)

    return damage


CONTRADICTIONS = {
    "a row missing": (edit_lines("metrics.jsonl", lambda lines: lines[:10] + lines[11:]), "rows for 4 of the 5 steps"),
    "the last row missing": (edit_lines("metrics.jsonl", lambda lines: lines[:-1]), "end with different batches"),
    "a row twice": (edit_lines("metrics.jsonl", lambda lines: lines[:5] + lines[4:]), "step 8 comes after step 8"),
    "a row moved": (
        edit_lines("metrics.jsonl", lambda lines: [*lines[:3], lines[9], *lines[3:9], *lines[10:]]),
        "step 6 comes after step 18",
    ),
    "the last row moved": (edit_lines("metrics.jsonl", lambda lines: [lines[-1], *lines[:-1]]), "comes after step"),
    "summaries exchanged": (exchange("summary.json"), "are of different arms"),
    "the summary of another seed": (
        lambda run, _: shutil.copy(next(run.parent.glob("s1-*/summary.json")), run),
        "end with different batches",
    ),
    "environments exchanged": (exchange("env.json"), "env.json is of run"),
    "metrics exchanged": (exchange("metrics.jsonl"), "the last row of metrics.jsonl says"),
    "evaluations exchanged": (exchange("evaluation.jsonl"), "the mean of evaluation.jsonl is"),
    "a window missing": (edit_lines("evaluation.jsonl", lambda lines: lines[:-1]), "the mean of evaluation.jsonl is"),
    "another val_loss": (edit_json("summary.json", "val_loss", 1.0), "summary.json says val_loss 1.0"),
    "other steps": (edit_json("summary.json", "steps", 41), "summary.json says steps 41"),
    "other tokens": (edit_json("summary.json", "tokens", 1), "summary.json says tokens 1"),
    "the configuration of another seed": (
        lambda run, _: shutil.copy(next(run.parent.glob("s1-*/config.yaml")), run),
        "the directory says seed 0, config.yaml says 1",
    ),
    "another width in config.yaml": (
        lambda run, _: (run / "config.yaml").write_text(
            (run / "config.yaml").read_text().replace("d_model: 16", "d_model: 32")
        ),
        "is not the configuration of run",
    ),
    "initial values gone": (lambda run, _: (run / "init.json").unlink(), "init.json is missing"),
    "no metrics": (lambda run, _: (run / "metrics.jsonl").unlink(), "finished without a row in metrics.jsonl"),
    "diverged with a summary": (edit_json("status.json", "state", "diverged"), "but a summary.json was written"),
}


def with_loss(run: Path, loss: float) -> None:
    """All files of a run agree on another final loss."""
    summary = json.loads((run / "summary.json").read_text())
    shift = loss - summary["val_loss"]
    (run / "summary.json").write_text(json.dumps(summary | {"val_loss": loss}))
    for name, key in (("metrics.jsonl", "val/loss"), ("evaluation.jsonl", "loss")):
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
        for row in rows if key == "loss" else rows[-1:]:
            row[key] += shift
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_run_that_contradicts_itself_is_left_out_with_the_reason(tmp_path, name):
    paths = intact(tmp_path).paths
    baseline, arm = paths[0], paths[3]
    damage, reason = CONTRADICTIONS[name]
    damage(arm, baseline)
    excluded = {out.path: out.reason for out in compared(tmp_path).left_out}
    assert excluded.keys() <= {arm, baseline}
    assert "contradicts itself: " in excluded[arm] and reason in excluded[arm]


@pytest.mark.parametrize("loss", [0.0, -1.29])
def test_a_cross_entropy_that_is_not_above_0_is_no_result(tmp_path, loss):
    path = intact(tmp_path).paths[3]
    with_loss(path, 0.5)
    assert not compared(tmp_path).left_out, "the control"
    with_loss(path, loss)
    (left,) = compared(tmp_path).left_out
    assert left.path == path and "a cross-entropy is above 0" in left.reason


def test_a_row_that_was_edited_is_seen_on_the_command_line(tmp_path, capsys):
    path = intact(tmp_path).paths[3]
    edit_json("summary.json", "val_loss", -1.0)(path, path)
    main(["compare", str(tmp_path / "study"), "--details"])
    assert "contradicts itself: summary.json says val_loss -1.0" in " ".join(capsys.readouterr().out.split())


def test_control_runs_whose_files_agree_are_all_used(tmp_path):
    intact(tmp_path)
    assert not compared(tmp_path).left_out


def test_control_without_the_check_of_what_is_read_damage_would_end_the_comparison(tmp_path, monkeypatch):
    writer = intact(tmp_path)
    (writer.paths[0] / "summary.json").write_text("[1]")
    assert len(compared(tmp_path).left_out) >= 1
    monkeypatch.setattr(reading, "UserError", ZeroDivisionError)
    with pytest.raises(UserError):
        compared(tmp_path)
