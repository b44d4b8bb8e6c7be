"""A comparison of planted runs says what was recorded of it, which no rewriting of the code may change."""

from __future__ import annotations

import guards
import pytest

WORDS = ("word", "qualifiers", "unfair")


@pytest.fixture(scope="module", params=guards.STUDIES)
def planted(request, tmp_path_factory):
    """A study and the tables of its comparison."""
    study = guards.read(request.param)
    return study, guards.tables_of(study, tmp_path_factory.mktemp("guards"))


def numbers(result):
    """Its numbers, as far as there are any."""
    return {name: result[name] for name in guards.NUMBERS if result[name] is not None}


def test_every_cell_has_the_recorded_word_and_seeds_to_decide(planted):
    study, tables = planted
    found = guards.results(tables)
    expected = {cell: result for cell, result in guards.recorded(study).items()}
    assert found.keys() == expected.keys()
    for cell, result in expected.items():
        assert {name: found[cell][name] for name in WORDS} == {name: result[name] for name in WORDS}, cell


def test_every_cell_has_the_recorded_difference_interval_and_errors(planted):
    study, tables = planted
    found = guards.results(tables)
    for cell, result in guards.recorded(study).items():
        assert numbers(found[cell]) == pytest.approx(numbers(result), rel=1e-9, abs=1e-12), cell


def test_the_recorded_arms_break_fairness_and_the_recorded_runs_are_left_out(planted):
    study, tables = planted
    assert guards.broken(tables) == study["broken"]
    assert guards.left_out(tables) == study["left_out"]


def test_every_word_is_among_the_recorded_ones():
    words = {result["word"] for name in guards.STUDIES for result in guards.read(name)["results"]}
    differences = {"BETTER", "WORSE", "LOWER", "HIGHER", "EQUIVALENT", "INCONCLUSIVE", "IDENTICAL"}
    assert words == differences | {"DIVERGED", "NOT COMPARABLE", "TOO FEW SEEDS", "INCOMPLETE"}


@pytest.mark.parametrize("name", guards.STUDIES)
def test_the_recorded_numbers_follow_from_the_planted_ones(name):
    study = guards.read(name)
    for cell, result in guards.recorded(study).items():
        if result["delta"] is not None:
            expected = numbers(guards.reference(study, cell))
            assert numbers(result) == pytest.approx(expected, rel=1e-9, abs=1e-12), cell


def test_one_loss_that_is_a_millionth_higher_is_noticed(tmp_path):
    study = guards.read("baseline_failures")
    study["runs"][1]["losses"][1] += 1e-6
    found = guards.results(guards.tables_of(study, tmp_path))
    cell = ("", study["runs"][1]["arm"], "val_loss")
    expected = numbers(guards.recorded(study)[cell])
    assert numbers(found[cell]) != pytest.approx(expected, rel=1e-9, abs=1e-12)
