"""What grows with steps, failures and noise stays within bounds (R20)."""

from __future__ import annotations

import io
import json
import math
import time

import pytest
from written_runs import Writer, write_json

from faults.bench import only, run
from nexus_ablate.comparison.result import compare
from nexus_ablate.composition import compose
from nexus_ablate.study.status import Watcher, summary, table, troubles
from nexus_ablate.training import display as display_module
from nexus_ablate.training.display import LINE_SECONDS, Display

STEPS = 100_000
MEBIBYTE = 2**20


@pytest.mark.slow
def test_a_hundred_thousand_steps_of_the_default_log_less_than_25_mebibytes(tiny_run, tmp_path, counted):
    """Rows of the default configuration's width, as often as it asks for them."""
    config = compose()
    short = run(
        [o for o in tiny_run("train.log_every=5", "train.eval_every=10", "probe.every=10") if "n_layers" not in o]
    )
    rows = [json.loads(line) for line in (short.path / "metrics.jsonl").read_text().splitlines()]
    widest = {kind: len(json.dumps(row)) + 1 for row in rows for kind in [kind_of(row)]}
    digits = 40 * len(rows[-1])  # later steps, tokens and FLOPs have more digits, and so have other numbers
    logged = (STEPS // config.train.log_every) * widest["logged"]
    validated = (STEPS // config.train.eval_every) * (widest["validated"] + digits)
    probes = (STEPS // config.probe.every) * ((short.path / "probes.jsonl").stat().st_size // 5 + digits)
    counted(
        f"{(logged + validated) / MEBIBYTE:.1f} MiB of metrics, {probes / MEBIBYTE:.1f} MiB of probes a 100,000 steps"
    )
    assert logged + validated <= 25 * MEBIBYTE
    assert probes <= 25 * MEBIBYTE


def kind_of(row) -> str:
    return "validated" if "val/loss" in row else "logged"


def test_checkpoints_are_never_more_than_were_to_be_kept(tiny_run, tmp_path):
    seen = []
    from faults.bench import at_step

    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, lambda step: seen.append(len(list((tmp_path / "runs").rglob("step_*")))))
        run(tiny_run("train.steps=40", "train.checkpoint_every=1", "train.keep=3"))
    assert max(seen) == 3
    assert len(list((only(tmp_path / "runs") / "checkpoints").iterdir())) == 1


def test_without_a_terminal_a_day_of_steps_is_a_line_each_thirty_seconds(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    shown = Display(stream)
    shown.start(STEPS, 0)
    for step in range(1, STEPS + 1):
        clock[0] += 0.05
        shown.advance(step, 2.0, 1e-3, 1.0, 1000.0)
    lines = stream.getvalue().splitlines()
    assert 0 < len(lines) <= STEPS * 0.05 / LINE_SECONDS + 1
    assert "\r" not in stream.getvalue()
    monkeypatch.setattr(display_module, "LINE_SECONDS", 0.0)  # the control
    for step in range(100):
        shown.advance(step, 2.0, 1e-3, 1.0, 1000.0)
    assert len(stream.getvalue().splitlines()) >= len(lines) + 100


def test_a_storm_of_nonfinite_numbers_stays_one_row_of_strict_json(tiny_run, tmp_path):
    from nexus_ablate.runs import strict_json

    row = {f"act/block_{b:03d}/x": [math.nan] * 12 for b in range(100)} | {"step": 1}
    text = strict_json(row)
    json.loads(text, parse_constant=pytest.fail)
    assert len(text) < 100_000


@pytest.mark.slow
def test_a_thousand_failed_runs_are_told_in_seconds_and_a_line_each(tmp_path, counted):
    writer = Writer(tmp_path, steps=4)
    good = [writer.run(seed=seed, loss=2.0 + seed / 100) for seed in range(3)]
    good += [writer.run("norm=layer", seed=seed, loss=1.9 + seed / 100) for seed in range(3)]
    status = json.loads((good[0] / "status.json").read_text())
    for number in range(1000):
        path = tmp_path / "study" / f"lr={number}" / "s0-00000000"
        path.mkdir(parents=True)
        write_json(path / "status.json", status | {"state": "failed", "reason": "x" * 300, "traceback": "y" * 9000})
    start = time.monotonic()
    lines = Watcher().lines([tmp_path])
    assert summary(lines) == "6 finished, 1000 failed"
    assert len(troubles(lines)) == 1000
    table(lines, limit=40)
    comparison = compare([tmp_path])
    seconds = time.monotonic() - start
    assert len(comparison.excluded) + sum(len(arm.runs) for arm in comparison.arms) >= 1000
    assert seconds < 30
    counted(f"1000 failed runs told in {seconds:.1f} s")
