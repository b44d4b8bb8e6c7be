"""Runs and comparisons as pandas frames and matplotlib figures."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from written_runs import Writer

import nexus_ablate
from nexus_ablate import compare, load_run

DOCS = Path(__file__).parents[1] / "docs" / "notebook.md"


@pytest.fixture
def study(tmp_path):
    writer = Writer(tmp_path, "norms")
    writer.arm(losses=[2.0, 2.1, 2.05, 2.02, 2.08])
    writer.arm("norm=layer", losses=[1.9, 2.02, 1.95, 1.93, 2.0])
    writer.arm("norm=t5", losses=[2.0, 2.1, 2.06])
    writer.plan(("norm=layer",), ("norm=t5",))
    return writer


def test_metrics_have_one_row_per_step_and_what_was_not_measured_is_missing(study):
    run = load_run(study.paths[0])
    frame = run.metrics_frame()
    assert list(frame["step"]) == [row["step"] for row in run.metrics()]
    assert frame["val/loss"].notna().sum() == sum("val/loss" in row for row in run.metrics())
    assert frame["val/loss"].dropna().iloc[-1] == 2.0


def test_probes_have_one_row_per_number_with_its_block_and_head(study):
    row = {"step": 8, "tokens": 256, "flops": 1.0, "seconds": 0.1, "act/block_011/resid/rms": 2.0, "attn/entropy": None}
    row |= {"attn/block_000/sink_rate": [0.5, 0.25], "weight_rms/block_001": 3.0, "nonfinite": ["attn/entropy"]}
    (study.paths[0] / "probes.jsonl").write_text(json.dumps(row) + "\n")
    frame = load_run(study.paths[0]).probes_frame()
    assert list(frame.columns) == ["step", "tokens", "flops", "seconds", "name", "block", "head", "value"]
    measured = frame[["name", "block", "head", "value"]].astype(object)
    result = set(measured.where(measured.notna(), None).itertuples(index=False, name=None))
    assert result == {
        ("act/resid/rms", 11, None, 2.0),
        ("attn/sink_rate", 0, 0, 0.5),
        ("attn/sink_rate", 0, 1, 0.25),
        ("attn/entropy", None, None, None),
        ("weight_rms", 1, None, 3.0),
    }


def test_a_run_without_rows_gives_empty_frames_and_says_why_it_has_no_figure(study):
    for name in ("metrics.jsonl", "probes.jsonl"):
        (study.paths[0] / name).write_text("")
    run = load_run(study.paths[0])
    assert run.metrics_frame().empty and run.probes_frame().empty
    assert list(run.metrics_frame().columns) == ["step", "tokens", "flops", "seconds"]
    with pytest.raises(nexus_ablate.errors.UserError, match="no rows yet"):
        run.figure()


def test_arms_have_one_row_each_with_the_numbers_of_the_comparison(study):
    result = compare(study.root / "norms")
    frame = result.frame().set_index("arm")
    rows = result.tables[0].rows
    assert list(frame.index) == [row.arm.name for row in rows] == ["baseline", "norm=layer", "norm=t5"]
    effect = rows[1].effect
    assert effect is not None and tuple(frame.loc["norm=layer", ["low", "high", "p"]]) == (
        effect.low,
        effect.high,
        effect.p,
    )
    assert frame.loc["norm=layer", "delta"] == pytest.approx(-0.09)
    assert frame.loc["norm=layer", "verdict"] == rows[1].verdict
    assert frame.loc["norm=t5", "verdict"].startswith("TOO FEW SEEDS")
    assert frame.loc["baseline", ["delta", "low", "p"]].isna().all()
    assert frame.loc["norm=t5", "act/resid/kurtosis_token"] == pytest.approx(3 + 6.16 / 3)


def test_curves_are_tidy(study):
    result = compare(study.root / "norms")
    last = result.curves_frame().groupby(["arm", "seed"])["val_loss"].last()
    assert last["norm=layer", 1] == 2.02 and len(last) == 13


def test_figures_are_matplotlib_s_and_show_every_arm(study, tmp_path):
    result = compare(study.root / "norms")
    losses, differences = result.figure().axes
    assert [t.get_text() for t in losses.get_legend().get_texts()] == ["baseline", "norm=layer", "norm=t5"]
    assert [label.get_text() for label in differences.get_yticklabels()] == ["norm=layer", "norm=t5"]
    picture = load_run(study.paths[0]).figure()
    assert isinstance(picture, Figure)
    picture.savefig(tmp_path / "picture.pdf")


def test_a_figure_says_why_an_arm_has_no_interval_and_has_one_panel_where_there_is_no_other_arm(tmp_path):
    writer = Writer(tmp_path, "norms")
    writer.arm(losses=[2.0, 2.1, 2.05, 2.02, 2.08])
    (losses,) = compare(writer.root / "norms").figure().axes
    assert losses.lines
    writer.arm("norm=layer", losses=[1.9, 2.02, 1.95, 1.93, 2.0], evaluation="another text")
    _, differences = compare(writer.root / "norms").figure().axes
    assert [label.get_text() for label in differences.get_yticklabels()] == ["norm=layer"]
    assert [text.get_text() for text in differences.texts] == ["NOT COMPARABLE"]


@pytest.mark.slow
def test_a_script_that_runs_a_study_needs_no_guard(tiny_run, tmp_path):
    words = ["mine", "vary.norm=layer", "seeds=0,1", *tiny_run("train.steps=2", f"runs_dir={tmp_path / 'runs'}")]
    script = f"from nexus_ablate import run_study\nprint('once')\nrun_study(*{words!r}, workers=2).frame()\n"
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("once") == 1 and len([*tmp_path.glob("runs/mine/*/s*/summary.json")]) == 4


@pytest.mark.slow
def test_the_notebook_of_the_docs_runs(tiny_run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    tiny = " ".join(tiny_run("runs_dir=runs"))
    for code in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S):
        small = code.replace("model=nano train.steps=50", tiny)
        exec(small.replace('"model=nano", "train.steps=50"', f"*{tiny.split()!r}"), names)
    assert names["logits_BTV"].shape == (2, 8, 256) and names["rows"][-1]["step"] == 20
    assert list(names["table"]["arm"]) == ["baseline", "norm=layer"] and list(names["table"]["seeds"]) == ["3", "3"]
    assert names["loss"].index[-1] == 20 * 32 and names["kurtosis"].shape[1] == 2
    assert isinstance(names["figure"], Figure) and isinstance(names["picture"], Figure)
