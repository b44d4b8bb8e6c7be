"""docs/findings.md is filled in from comparisons, and says what they say."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import pyplot
from written_runs import Writer

from nexus_ablate.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGE = """# Findings

<!-- answers -->

<!-- end -->

## Does a value residual help?

<!-- result: prose_recent value=residual val_loss as The value residual -->

<!-- end -->

## Pre-norm or post-norm?

<!-- result: prose_placement placement=post val_loss as Post-norm -->

<!-- end -->

<!-- panel -->

<!-- end -->
"""


def findings(folder: Path, *comparisons: Path) -> None:
    """Run the script of a copy in this process."""
    script = folder / "scripts/findings.py"
    sys.modules.pop("panel", None)  # that of another copy, which reads other data
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(script.parent)
        patch.setattr(sys, "argv", [str(script), *map(str, comparisons)])
        runpy.run_path(str(script), run_name="__main__")
    pyplot.close("all")


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
    (tmp_path / "README.md").write_text("<!-- findings -->\n\n<!-- end -->\n")
    return tmp_path


def kept(
    copy: Path, study: str, arm: str, shift: float, seeds: int = 5, budgets: tuple[float, ...] = (), noise: float = 1.0
) -> Path:
    """The `compare --json` file of a study of five planned seeds, whose arm differs by `shift`, with `noise`.

    `budgets` is how far from the baseline's loss it ends with half its tokens and with twice as many.
    """
    writer = Writer(copy / "runs", study)
    losses, apart = [2.0, 2.01, 1.99, 2.0, 2.02], [0.0, 0.002, -0.001, 0.001, 0.0]
    writer.arm(losses=losses)
    writer.arm(arm, losses=[a + shift + noise * b for a, b in zip(losses, apart, strict=True)][:seeds])
    for name, tokens, by in zip(("0.5", "2"), (0.5, 2.0), budgets, strict=False):
        writer.arm(losses=[loss + by for loss in losses], folder=f"baseline-{name}x", train_noise=name, batch=tokens)
    writer.plan((arm,), worth=bool(budgets))
    assert main(["compare", study, "--json", f"{study}.json"]) == 0
    return copy / f"{study}.json"


def test_a_row_says_the_word_the_difference_and_the_interval_of_its_comparison(copy):
    file = kept(copy, "prose_recent", "value=residual", -0.03)
    row = json.loads(file.read_text())["tables"][0]["rows"][1]
    findings(copy, file)
    page = (copy / "docs/findings.md").read_text()
    assert f"| Does a value residual help? | The value residual is better by {-row['delta']:.3f} at pico. |" in page
    assert f"{row['delta']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f}) | – | – |" in page
    assert f"**pico**: The value residual {row['sentence']}" in page
    assert "The default model ends at 2.004. The interval holds with 95.0%" in page
    assert "Asked, and not trained yet: Pre-norm or post-norm?" in page
    assert f"| The value residual is better by {-row['delta']:.3f} at pico. |" in (copy / "README.md").read_text()
    assert "On Python as bytes it is -0.001 (-0.020 to +0.018) nats per byte" in page
    assert "about 0.1 of these 1 intervals" in page
    line = json.loads((copy / "docs/findings.jsonl").read_text())
    assert (line["question"], line["size"], line["delta"]) == ("Does a value residual help?", "pico", row["delta"])
    assert len(line["losses"]) == 5
    assert (copy / "docs/findings.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("shift", "worth"),
    [(-0.03, "1.23x (1.22 to 1.24) at pico"), (-0.2, "above 2x at pico"), (0.4, "below 0.5x at pico")],
)
def test_a_row_says_what_its_difference_is_worth(copy, shift, worth):
    findings(copy, kept(copy, "prose_recent", "value=residual", shift, budgets=(0.1, -0.1)))
    assert f"| {worth} |\n" in (copy / "docs/findings.md").read_text()


def test_a_study_that_lacks_runs_is_not_trained_yet(copy):
    findings(copy, kept(copy, "prose_recent", "value=residual", -0.03, seeds=3))
    assert "Asked, and not trained yet: Does a value residual help?" in (copy / "docs/findings.md").read_text()
    assert (copy / "docs/findings.jsonl").read_text() == ""


def test_an_arm_without_runs_is_not_trained_yet(copy):
    writer = Writer(copy / "runs", "prose_placement")
    writer.arm(losses=[2.0, 2.01, 1.99, 2.0, 2.02])
    writer.arm("value=residual", losses=[1.9, 1.91, 1.89, 1.9, 1.92])
    writer.plan(("value=residual",), ("placement=post",))
    assert main(["compare", "prose_placement", "--json", "prose_placement.json"]) == 0
    findings(copy, copy / "prose_placement.json")
    page = (copy / "docs/findings.md").read_text()
    assert "Asked, and not trained yet: Does a value residual help? Pre-norm or post-norm?" in page


@pytest.mark.parametrize(
    ("at_femto", "alike", "answer"),
    [
        (-0.05, 1, "The value residual is better by 0.030 at pico and by 0.050 at femto."),
        (0.05, 0, "The value residual is better by 0.030 at pico and is worse by 0.050 at femto."),
    ],
)
def test_the_page_says_whether_both_sizes_agree(copy, at_femto, alike, answer):
    files = [
        kept(copy, "prose_recent", "value=residual", -0.03),
        kept(copy, "prose_recent_femto", "value=residual", at_femto),
    ]
    findings(copy, *files)
    page = (copy / "docs/findings.md").read_text()
    assert f"Both sizes decide 1 of the questions, {alike} with the same sign." in page
    assert f"| {answer} |" in page


@pytest.mark.parametrize(
    ("at_femto", "noise", "answer"),
    [
        (-0.05, 1, "The value residual is better by 0.050 at femto; not decided at pico ({pico})."),
        (0.0, 10, "Not decided at pico ({pico}) or at femto ({pico})."),
    ],
)
def test_an_answer_says_which_size_does_not_decide_and_how_many_seeds_would(copy, at_femto, noise, answer):
    pico = kept(copy, "prose_recent", "value=residual", 0.0, noise=10)
    row = json.loads(pico.read_text())["tables"][0]["rows"][1]
    findings(copy, pico, kept(copy, "prose_recent_femto", "value=residual", at_femto, noise=noise))
    said = answer.format(pico=f"{row['needed']} seeds would decide this difference")
    assert f"| {said} |" in (copy / "docs/findings.md").read_text()


def test_a_row_that_cannot_be_compared_says_so(copy):
    writer = Writer(copy / "runs", "prose_recent")
    writer.arm(losses=[2.0, 2.01, 1.99])
    writer.arm("value=residual", losses=[1.9, 1.91, 1.89], stream=7)
    writer.plan(("value=residual",), seeds=[0, 1, 2])
    assert main(["compare", "prose_recent", "--json", "prose_recent.json"]) == 0
    findings(copy, copy / "prose_recent.json")
    page = (copy / "docs/findings.md").read_text()
    assert "| The value residual is NOT COMPARABLE at pico. | – | – | – |" in page


def test_the_page_is_what_the_script_makes_of_the_data(copy):
    for file in (ROOT / "docs/findings").glob("prose_*.json"):
        shutil.copy(file, copy / "docs/findings")
    shutil.copy(ROOT / "docs/findings.md", copy / "docs/findings.md")
    shutil.copy(ROOT / "README.md", copy / "README.md")
    subprocess.run([sys.executable, copy / "scripts/findings.py"], check=True, env={"PYTHONDONTWRITEBYTECODE": "1"})
    for name in ("docs/findings.md", "docs/findings.jsonl", "README.md"):
        assert (copy / name).read_text() == (ROOT / name).read_text(), "python scripts/findings.py"


def what_would_answer() -> list[tuple[str, list[str]]]:
    """The studies of the page, each with the overrides that would answer its strongest objection."""
    page = " ".join((ROOT / "docs/findings.md").read_text().split())
    found = []
    for study, answer in re.findall(r"<!-- result: (\w+) .*?What would answer it:\*(.*?) ##", page):
        for arm, keys in re.findall(r"(arms? |and )?`([^`]+)`", answer):
            found.append((study, [f"arms.other={keys}"] if arm else keys.split()))
    return found


@pytest.mark.parametrize(("study", "overrides"), what_would_answer())
def test_what_would_answer_an_objection_can_be_typed(study, overrides, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("gcide.txt").write_text("entries of a dictionary\n" * 10_000)
    file = ROOT / f"docs/findings/{study}.yaml"
    assert main(["plan", str(file), "data.tokenizer=bytes", "name=another", *overrides]) == 0, capsys.readouterr().err
