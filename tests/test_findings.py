"""docs/findings.md is filled in from comparisons, and says what they say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from written_runs import Writer

from nexus_ablate.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGE = """# Findings

<!-- answers -->

<!-- end -->

## Does QK-norm help?

<!-- result: prose_qk_norm qk_norm=rms val_loss as QK-norm -->

<!-- end -->

## Pre-norm or post-norm?

<!-- result: prose_placement placement=post val_loss as Post-norm -->

<!-- end -->

<!-- panel -->

<!-- end -->
"""


def findings(folder: Path, *comparisons: Path) -> None:
    script = folder / "scripts/findings.py"
    subprocess.run([sys.executable, script, *comparisons], check=True, env={"PYTHONDONTWRITEBYTECODE": "1"})


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """A folder with the scripts and the data of the page, and with a page of two questions."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    for name in ("findings.py", "panel.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    shutil.copytree(ROOT / "docs/findings", tmp_path / "docs/findings")
    for kept in (tmp_path / "docs/findings").glob("prose_*.json"):
        kept.unlink()
    (tmp_path / "docs/findings.md").write_text(PAGE)
    return tmp_path


def kept(copy: Path, study: str, arm: str, shift: float, seeds: int = 5) -> Path:
    """The `compare --json` file of a study of five planned seeds, whose arm differs by `shift`."""
    writer = Writer(copy / "runs", study)
    losses, noise = [2.0, 2.01, 1.99, 2.0, 2.02], [0.0, 0.002, -0.001, 0.001, 0.0]
    writer.arm(losses=losses)
    writer.arm(arm, losses=[a + shift + b for a, b in zip(losses, noise, strict=True)][:seeds])
    writer.plan((arm,))
    assert main(["compare", study, "--json", f"{study}.json"]) == 0
    return copy / f"{study}.json"


def test_a_row_says_the_word_the_difference_and_the_interval_of_its_comparison(copy):
    file = kept(copy, "prose_qk_norm", "qk_norm=rms", -0.03)
    row = json.loads(file.read_text())["tables"][0]["rows"][1]
    findings(copy, file)
    page = (copy / "docs/findings.md").read_text()
    assert f"| Does QK-norm help? | QK-norm is better by {-row['delta']:.3f}. |" in page
    assert f"{row['delta']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f}) | – | – |" in page
    assert f"**pico**: BETTER, {row['sentence']}" in page
    assert "Asked, and not trained yet: Pre-norm or post-norm?" in page
    assert "On Python as bytes: -0.029 (-0.037 to -0.021)" in page
    assert "about 0.1 of these 1 intervals" in page
    line = json.loads((copy / "docs/findings.jsonl").read_text())
    assert (line["question"], line["size"], line["delta"]) == ("Does QK-norm help?", "pico", row["delta"])
    assert len(line["losses"]) == 5
    assert (copy / "docs/findings.png").stat().st_size > 0


def test_a_study_that_lacks_runs_is_not_trained_yet(copy):
    findings(copy, kept(copy, "prose_qk_norm", "qk_norm=rms", -0.03, seeds=3))
    assert "Asked, and not trained yet: Does QK-norm help?" in (copy / "docs/findings.md").read_text()
    assert (copy / "docs/findings.jsonl").read_text() == ""


@pytest.mark.parametrize(("at_femto", "alike"), [(-0.05, 1), (0.05, 0)])
def test_the_page_says_whether_both_sizes_agree(copy, at_femto, alike):
    files = [
        kept(copy, "prose_qk_norm", "qk_norm=rms", -0.03),
        kept(copy, "prose_qk_norm_femto", "qk_norm=rms", at_femto),
    ]
    findings(copy, *files)
    page = (copy / "docs/findings.md").read_text()
    assert f"Both sizes decide 1 of the questions, {alike} of these with the same sign." in page
    assert "is better by 0.030" in page, "the answer is that of the larger size"


def test_the_page_is_what_the_script_makes_of_the_data(copy):
    for file in (ROOT / "docs/findings").glob("prose_*.json"):
        shutil.copy(file, copy / "docs/findings")
    shutil.copy(ROOT / "docs/findings.md", copy / "docs/findings.md")
    findings(copy)
    for name in ("findings.md", "findings.jsonl"):
        assert (copy / "docs" / name).read_text() == (ROOT / "docs" / name).read_text(), "python scripts/findings.py"
