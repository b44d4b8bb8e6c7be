"""Damaged run directories never end a comparison, are each accounted for, and move no number of an intact arm (R21)."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
from written_runs import Writer, at, sealed

from faults.bench import sizes
from faults.payloads import PICKLE, YAML
from nexus_ablate.comparison import load
from nexus_ablate.comparison.within_stratum import compare_stratum as compare
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
        "a directory": lambda: (file.unlink(), file.mkdir()),
        "a link to nowhere": lambda: (file.unlink(), file.symlink_to("nowhere")),
        "a pipe": lambda: (file.unlink(), os.mkfifo(file)),
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


def means(comparison) -> dict[str, float | None]:
    """The numbers of the two arms that are whole."""
    return {row.arm: row.mean for row in comparison.rows if row.arm in ("baseline", "norm=layer")}


@sizes(50, 500, fast=True)
def test_every_damaged_run_is_counted_and_no_intact_number_moves(tmp_path, counted, count):
    draw = random.Random(count)
    excluded = read = 0
    for start in range(0, count, BATCH):
        writer = intact(tmp_path / str(start))
        expected = means(compare(writer.root))
        said = {}
        for number in range(start, start + BATCH):
            broken = writer.root / "study" / f"x={number}" / f"s{number % 3}-0000{number:04x}"
            broken.parent.mkdir()
            shutil.copytree(writer.paths[number % len(writer.paths)], broken)
            said[broken] = spoil(broken, draw)
        comparison = compare(writer.root, baseline="baseline")
        reasons = {left.path: left.reason for left in comparison.excluded}
        used = {run.record.path for arm in comparison.arms for run in arm.runs.values()}
        for path, way in said.items():
            assert path in used or reasons.get(path), way
        assert all(reasons.values())
        assert means(comparison) == expected
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
    "the last row missing": (
        edit_lines("metrics.jsonl", lambda lines: lines[:-1]),
        "end with different batches",
    ),
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
}
UNNOTICED = {
    "probes cut": edit_lines("probes.jsonl", lambda lines: lines[:3]),
    "probes gone": lambda run, _: (run / "probes.jsonl").unlink(),
    "metrics exchanged": exchange("metrics.jsonl"),
    "evaluations exchanged": exchange("evaluation.jsonl"),
    "another val_loss": edit_json("summary.json", "val_loss", 1.0),
    "another figure of the probes": edit_json("summary.json", "logits/max_abs", 9.0),
    "probes exchanged": exchange("probes.jsonl"),
    "configurations exchanged": exchange("config.yaml"),
    "overrides exchanged": exchange("overrides.txt"),
    "a figure that one file has": edit_json("summary.json", "params", 7),
}
"""Damage that only a run with recorded hashes shows."""


def trained(root: Path, recorded: bool) -> list[Path]:
    """Runs of two arms, with probes of several steps."""
    writer = Writer(root, steps=40)
    writer.arm(losses=[2.00, 2.02, 1.98], summary={"logits/max_abs": 2.0})
    writer.arm("norm=layer", losses=[1.90, 1.93, 1.87], summary={"logits/max_abs": 2.0})
    for path in writer.paths:
        env, summary = (json.loads((path / name).read_text()) for name in ("env.json", "summary.json"))
        (path / "env.json").write_text(json.dumps(env | {"run_hash": path.name.partition("-")[2] * 8}))
        (path / "summary.json").write_text(json.dumps(summary | {"arm_hash": env["arm_hash"]}))
        rows = [{**at(step), "logits/max_abs": step / 20, "act/block_000/resid/max_abs": float(len(path.parent.name))}
                for step in (0, 1, 2, 4, 8, 16, 32, 40)]  # fmt: skip
        (path / "probes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if recorded:
            sealed(path)
    return writer.paths


@pytest.mark.parametrize("recorded", [False, True], ids=["by other figures", "by recorded hashes"])
@pytest.mark.parametrize("name", [*CONTRADICTIONS, *UNNOTICED])
def test_files_that_contradict_each_other_exclude_their_run(tmp_path, name, recorded):
    paths = trained(tmp_path, recorded)
    baseline, arm = paths[0], paths[3]
    damage, reason = CONTRADICTIONS.get(name) or (UNNOTICED[name], "")
    damage(arm, baseline)
    excluded = {out.path: out.reason for out in compare(tmp_path).excluded}
    assert excluded.keys() <= {arm, baseline}
    if recorded and name not in ("summaries exchanged", "the summary of another seed"):  # each is whole
        assert re.search("not the file that this run ended with|by its checksum", excluded[arm])
    elif reason:
        assert reason in excluded[arm]


def test_control_runs_whose_files_agree_are_all_used(tmp_path):
    for recorded in (False, True):
        trained(tmp_path / str(recorded), recorded)
        assert not compare(tmp_path / str(recorded)).excluded


def test_control_without_the_check_of_what_is_read_damage_would_end_the_comparison(tmp_path, monkeypatch):
    writer = intact(tmp_path)
    (writer.paths[0] / "summary.json").write_text("[1]")
    assert len(compare(tmp_path).excluded) >= 1
    monkeypatch.setattr(load, "UserError", ZeroDivisionError)
    try:
        compare(tmp_path)
    except UserError:
        return
    raise AssertionError("the damage went unnoticed")
