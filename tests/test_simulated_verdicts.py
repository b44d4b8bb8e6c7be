"""The error rates and the power that docs/reading_a_verdict.md states, on tables with a planted truth."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from nexus_ablate.comparison import cell, statistics

SCRIPT = Path(__file__).parent.parent / "scripts/simulate_verdicts.py"
spec = importlib.util.spec_from_file_location("simulate_verdicts", SCRIPT)
assert spec is not None and spec.loader is not None
simulation = importlib.util.module_from_spec(spec)
sys.modules["simulate_verdicts"] = simulation
spec.loader.exec_module(simulation)
CASES = {f"{case.name}, {case.arms} arms, {case.seeds} seeds": case for case in simulation.cases()}
FAST = 120


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_target_holds(name):
    case = CASES[name]
    figure, _ = simulation.simulate(case, 1000)
    assert case.holds(figure), f"{figure:.1%}"


def case_named(start, arms):
    return next(case for case in CASES.values() if case.name.startswith(start) and case.arms == arms)


@pytest.mark.slow
def test_without_the_guard_a_noisy_baseline_makes_twice_the_false_claims(monkeypatch):
    case = case_named("baseline 3x", 8)
    guarded, _ = simulation.simulate(case, FAST)
    monkeypatch.setattr(statistics, "unlike_noise", lambda table: {})
    without, _ = simulation.simulate(case, FAST)
    assert guarded <= 0.07 < without


def test_a_margin_from_the_baseline_s_own_spread_would_call_two_deviations_equivalent(monkeypatch):
    """One seed of the baseline at +8 deviations: its spread is 3.6, and the arms at +2 would be lost inside it."""
    case = case_named("EQUIVALENT, truth", 3)
    assert simulation.simulate(case, FAST)[0] <= 0.05
    monkeypatch.setattr(cell, "robust_spread", lambda losses: float(losses[0].std(ddof=1)))
    monkeypatch.setattr(statistics, "unlike_noise", lambda losses: {})
    assert simulation.simulate(case, FAST)[0] > 0.05


def test_looks_that_each_spend_the_whole_5_percent_claim_three_times_as_often():
    looks = case_named("looks at 5, 8, 12, 20 seeds", 1)
    assert simulation.simulate(looks, FAST)[0] <= 0.07
    assert simulation.simulate(simulation.control(), FAST)[0] >= 0.12


def test_an_effect_of_two_deviations_ends_early_and_a_null_arm_late():
    _, result = simulation.simulate(case_named("2 SD found by looks", 1), FAST)
    _, null = simulation.simulate(case_named("looks at 5, 8, 12, 20 seeds", 1), FAST)
    assert result < 9 and null > 17


def test_the_documentation_states_every_case_and_a_figure_that_holds():
    page = (SCRIPT.parent.parent / "docs/reading_a_verdict.md").read_text()
    table = page.partition("<!-- simulated -->")[2].partition("<!-- end -->")[0].strip().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    for case, (name, arms, _, before, now, must_be) in zip(CASES.values(), rows, strict=False):
        assert (name, arms, before, must_be) == (case.name, str(case.arms), case.before, case.must_be)
        assert case.holds(float(now.rstrip("%")) / 100)
    assert rows[-1][0] == simulation.control().name and len(rows) == len(CASES) + 1
