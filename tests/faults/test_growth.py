"""What grows with steps, failures and noise stays within bounds (R20)."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch
from written_runs import Writer, write_json

from faults.bench import at_step, only, run, sizes
from nexus_ablate.comparison import read as reading
from nexus_ablate.comparison.compare import compare
from nexus_ablate.config.compose import compose
from nexus_ablate.launch.states import read_lines, summary, table, troubles
from nexus_ablate.training import checkpoint, trainer
from nexus_ablate.training.display import LINE_SECONDS
from nexus_ablate.training.session import train
from nexus_ablate.training.step import Seen, Step

STEPS = 100_000
MEBIBYTE = 2**20


class FakeStep:
    """Puts in the place of an optimizer step what it costs nothing to have: losses and norms with all their digits.

    Attributes:
        checkpoints: The most there were of them at any step.
    """

    def __init__(self, patch: pytest.MonkeyPatch, runs_dir) -> None:
        self.checkpoints, self.runs_dir = 0, runs_dir
        patch.setattr(Step, "take", lambda step, number, batch, watched: self.take(step, number))
        patch.setattr(Step, "read", lambda step: self.read(step))
        at_step(patch, self.count)

    def count(self, step: int) -> None:
        if step % 100 == 1:
            self.checkpoints = max(self.checkpoints, len(list(self.runs_dir.glob("*/*/*/checkpoints/step_*"))))

    def take(self, step: Step, number: int) -> None:
        step.lr = 1e-3 / (number + 3)
        step._unread.append((number, torch.empty(0)))

    def read(self, step: Step) -> list[Seen]:
        unread, step._unread = step._unread, []
        noisy = [math.pi + 1 / (number + 3) for number, _ in unread]
        return [Seen(loss, loss / 7, [loss / (i + 7) for i in range(len(step.parts))], {}) for loss in noisy]


def default_rows(tiny_run, steps: int, *overrides: str) -> list[str]:
    """A run that logs, probes, validates and saves as often and as widely as the default one, on a narrow model."""
    config = compose()
    often = [f"train.{key}={getattr(config.train, key)}" for key in ("log_every", "eval_every", "checkpoint_every")]
    model = [f"model.{key}={getattr(config.model, key)}" for key in ("n_layers", "n_heads")]
    return tiny_run(f"train.steps={steps}", *often, *model, f"probe.every={config.probe.every}", *overrides)


def sizes_of(path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}


@sizes(2000, STEPS)
def test_the_logs_of_a_long_run_stay_below_25_mebibytes_a_hundred_thousand_steps(
    tiny_run, tmp_path, monkeypatch, capsys, counted, count
):
    fake = FakeStep(monkeypatch, tmp_path / "runs")
    overrides = default_rows(tiny_run, count)
    start = time.monotonic()
    path = train(compose(overrides), overrides).path
    seconds = time.monotonic() - start
    written = sizes_of(path)
    most = 25 * MEBIBYTE * count / STEPS
    assert written["metrics.jsonl"] <= most
    assert written["probes.jsonl"] <= most
    assert sum(written.values()) - written["metrics.jsonl"] - written["probes.jsonl"] < 64 * 1024
    assert fake.checkpoints == compose().train.keep
    progress = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert len(progress) <= seconds / LINE_SECONDS
    logged = ", ".join(f"{written[name] / MEBIBYTE:.2f} MiB of {name}" for name in ("metrics.jsonl", "probes.jsonl"))
    counted(f"{count} steps: {logged}, {fake.checkpoints} checkpoints, {len(progress)} lines in {seconds:.0f} s")


@sizes(2000, 20_000)
def test_a_storm_of_nonfinite_numbers_grows_the_logs_by_no_more_and_says_nothing(
    tiny_run, tmp_path, monkeypatch, capsys, counted, count
):
    """Every probed figure is NaN from the first to the last step, and training goes on."""
    FakeStep(monkeypatch, tmp_path / "runs")
    probe = trainer.probe

    def spoilt(*arguments):
        probed = probe(*arguments).items()
        return {name: [math.nan] * len(value) if isinstance(value, list) else math.nan for name, value in probed}

    monkeypatch.setattr(trainer, "probe", spoilt)
    overrides = default_rows(tiny_run, count)
    path = train(compose(overrides), overrides).path
    written = sizes_of(path)
    most = 25 * MEBIBYTE * count / STEPS
    assert max(written["metrics.jsonl"], written["probes.jsonl"]) <= most
    assert len(capsys.readouterr().err.splitlines()) < 60  # its header and its table, whatever the width
    for name in ("metrics.jsonl", "probes.jsonl"):
        for line in (path / name).read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)
    assert "nonfinite" in (path / "probes.jsonl").read_text()
    counted(f"{count} steps: {written['metrics.jsonl']} and {written['probes.jsonl']} bytes, of {most:.0f} allowed")


@pytest.mark.slow
def test_control_a_row_for_every_step_breaks_the_bound(tiny_run, tmp_path, monkeypatch):
    FakeStep(monkeypatch, tmp_path / "runs")
    path = run(default_rows(tiny_run, 1000, "train.log_every=1")).path
    assert sizes_of(path)["metrics.jsonl"] > 25 * MEBIBYTE * 1000 / STEPS


@pytest.mark.slow
def test_control_without_pruning_checkpoints_pile_up(tiny_run, tmp_path, monkeypatch):
    fake = FakeStep(monkeypatch, tmp_path / "runs")
    monkeypatch.setattr(checkpoint, "_prune", lambda checkpoints, step, keep: None)
    run(default_rows(tiny_run, 1000))
    assert fake.checkpoints > compose().train.keep


def test_checkpoints_are_never_more_than_were_to_be_kept(tiny_run, tmp_path):
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, lambda step: seen.append(len(list((tmp_path / "runs").rglob("step_*")))))
        run(tiny_run("train.steps=40", "train.checkpoint_every=1", "train.keep=3"))
    assert max(seen) == 3
    assert len(list((only(tmp_path / "runs") / "checkpoints").iterdir())) == 1


@pytest.mark.slow
def test_a_thousand_failed_runs_are_listed_in_seconds_with_one_line_per_run(tmp_path, monkeypatch, counted):
    writer = Writer(tmp_path, steps=4)
    good = [writer.run(seed=seed, loss=2.0 + seed / 100) for seed in range(3)]
    good += [writer.run("norm=layer", seed=seed, loss=1.9 + seed / 100) for seed in range(3)]
    status = json.loads((good[0] / "status.json").read_text())
    for number in range(1000):
        path = tmp_path / "study" / f"lr={number}" / "s0-00000000"
        path.mkdir(parents=True)
        write_json(path / "status.json", status | {"state": "failed", "reason": "x" * 300, "traceback": "y" * 9000})
    start = time.monotonic()
    lines, _ = read_lines([tmp_path])
    assert summary(lines, 0) == "6 finished, 1000 failed"
    assert len(troubles(lines)) == 1000
    assert table(lines, limit=40).row_count == 40
    (compared,) = compare([tmp_path / "study"]).tables
    seconds = time.monotonic() - start
    assert len(compared.left_out) >= 1000
    assert seconds < 30
    longest = max(len(left.reason) for left in compared.left_out)
    assert longest <= 200
    monkeypatch.setattr(reading, "printable", lambda text, most: text)  # the control: reasons as long as a job likes
    (compared,) = compare([tmp_path / "study"]).tables
    assert max(len(left.reason) for left in compared.left_out) > longest
    assert table(lines).row_count == 1006
    counted(f"1000 failed runs reported in {seconds:.1f} s")
