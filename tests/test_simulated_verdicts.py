"""The error rates and the power that docs/error_rates.md states, on tables with a planted truth."""

from __future__ import annotations

import pytest
from checkouts import ROOT, script

simulation = script("simulate_verdicts")
CASES = {
    f"{case.name}, {case.arms} arms, {case.settings} settings, {case.seeds} seeds": case for case in simulation.cases()
}
MANY = 5
"""Settings from which a line is slow."""


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        pytest.param(name, tables, marks=[pytest.mark.slow] * (tables == 1000 or case.settings > MANY))
        for name, case in CASES.items()
        for tables in (60, 1000)
        if case.target is not None or tables == 1000  # a control
    ],
)
def test_a_line_is_at_its_promise_and_a_control_is_not(name, tables):
    case = CASES[name]
    assert case.holds(simulation.simulate(case, tables), tables, errors=3)


def test_the_page_has_every_line_and_each_figure_holds():
    page = (ROOT / "docs/error_rates.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:2] == "| "]
    assert len(rows) == len(CASES) + 2
    for case, row in zip(CASES.values(), rows[2:], strict=True):
        figure = float(row[4].rstrip("%")) / 100
        assert tuple(row) == simulation.row_of(case, figure)
        assert case.holds(figure, simulation.TABLES)
