"""Damaged run directories never end a comparison, are each accounted for, and move no number of an intact arm (R21)."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from written_runs import Writer

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


@sizes(50, 500)
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
