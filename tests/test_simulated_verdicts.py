"""The error rates and the power that docs/error_rates.md states, on tables with a planted truth."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("simulate_verdicts", ROOT / "scripts/simulate_verdicts.py")
assert spec is not None and spec.loader is not None
simulation = importlib.util.module_from_spec(spec)
sys.modules["simulate_verdicts"] = simulation
spec.loader.exec_module(simulation)
CASES = {f"{case.name}, {case.arms} arms, {case.cells} cells, {case.seeds} seeds": case for case in simulation.cases()}
MANY = 5
"""Cells from which a line is slow."""


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        pytest.param(name, tables, marks=[pytest.mark.slow] * (tables == 1000 or case.cells > MANY))
        for name, case in CASES.items()
        for tables in (60, 1000)
    ],
)
def test_a_line_is_at_its_promise_and_a_control_is_not(name, tables):
    figure = simulation.simulate(CASES[name], tables)
    errors = 3 if tables == 60 else 2  # of 80 lines, one or two lie beyond two standard errors
    assert CASES[name].holds(figure, tables, errors), f"{figure:.1%}"


def test_the_page_has_every_line_and_each_figure_holds():
    page = (ROOT / "docs/error_rates.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:2] == "| "]
    assert len(rows) == len(CASES) + 2
    for case, row in zip(CASES.values(), rows[2:], strict=True):
        figure = float(row[4].rstrip("%")) / 100
        assert tuple(row) == simulation.row_of(case, figure)
        assert case.holds(figure, simulation.TABLES)


def test_every_line_that_the_documentation_names_is_in_the_table():
    lines = [case.name for case in simulation.cases()]
    pages = set()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = " ".join(page.read_text(encoding="utf-8").split())
        for name in re.findall(r"\bline \*([^*]+)\*", text):
            pages.add(page.name)
            assert any(name in line for line in lines), f"{page.name}: {name}"
    assert pages >= {"README.md", "reading_a_verdict.md", "studies.md", "metrics.md"}
