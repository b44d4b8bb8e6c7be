"""The picture of a run, in matplotlib and in the terminal."""

from __future__ import annotations

import json
import shlex

import pytest
from matplotlib.figure import Figure
from written_runs import Writer

from nexus_ablate.cli import main
from nexus_ablate.report.run_picture import heat_maps, run_figure
from nexus_ablate.runs import read_run

STEPS = (0, 1, 2, 4, 100)


@pytest.fixture
def run(tmp_path):
    """A run of ten blocks, probed early and late, with attention entropy between 0.6 and 0.7."""
    path = Writer(tmp_path / "runs", "mine").run(loss=2.0)
    places = [{"step": step, "tokens": step, "flops": step, "seconds": step} for step in STEPS]
    probes = [at | {f"attn/block_{b:03d}/entropy": 0.7 - at["step"] / 1000 for b in range(10)} for at in places]
    (path / "probes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in probes))
    norms = {"grad_norm/global": 1.0} | {f"grad_norm/block_{b:03d}/attn": 1.0 for b in range(10)}
    metrics = [at | norms | {"train/loss": 5.0 - at["step"] / 100, "val/loss": 5.0} for at in places]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return read_run(path)


def test_a_heat_map_has_its_steps_to_scale_and_its_colours_fit_the_data(run):
    figure = dict(heat_maps(run.probes()))["attn/entropy"]
    assert isinstance(figure, Figure)
    axes = figure.axes[0]
    mesh = axes.collections[0]
    assert mesh.get_clim() == pytest.approx((0.6, 0.7))  # and not from 0 to the largest possible value
    assert axes.get_xlim() == (0, 100)
    assert [x for x, _ in mesh.get_coordinates()[0]] == [0, 0.5, 1.5, 3, 52, 100]  # type: ignore[attr-defined]


def test_a_selection_of_blocks_is_said(run):
    titles = [axes.get_title() for figure in run_figure(run).subfigs for axes in figure.axes]
    assert "gradients (blocks 0, 5, 9 of 10)" in titles


def test_the_terminal_shows_curves_without_a_picture(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(shlex.split(f"show {run.path}")) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("train/loss ") and "5 █" in line and line.endswith(" 4") for line in lines)
    assert not any("block" in line for line in lines)


@pytest.mark.parametrize("weights", [{"weight_rms/global": 1.0}, {"weight_rms/block_000": 0.0}])
def test_a_run_without_weights_of_its_blocks_is_shown(run, weights, capsys):
    rows = [json.loads(line) | weights for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(shlex.split(f"show {run.path}")) == 0  # a warning is an error here
    assert "not probed" in " ".join(
        text.get_text() for f in run_figure(run).subfigs for a in f.axes for text in a.texts
    )
