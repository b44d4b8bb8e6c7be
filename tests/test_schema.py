import math

import pytest

from nexus_ablate.config.grammar import Constraint, ratio, show
from nexus_ablate.errors import ConfigError, did_you_mean, printable


@pytest.mark.parametrize(
    ("constraint", "value", "canonical"),
    [
        ("int [1, inf)", 3, 3),
        ("int [1, inf)", 3.0, 3),
        ("float (0, inf)", 1, 1.0),
        ("on | off", "off", False),
        ("on | off", True, True),
        ("auto | on | off", True, "on"),
        ("auto | off | sqrt_d", False, "off"),
        ("auto | ratio (0, inf)", "8/3", "8/3"),
        ("auto | ratio (0, inf)", "8/2", 4),
        ("auto | ratio (0, inf)", 4.0, 4),
        ("list of text", ["a", "b"], ["a", "b"]),
        ("list of int [1, 9]", [1, 2], [1, 2]),
        ("bytes | text", "my/tokenizer.json", "my/tokenizer.json"),
    ],
)
def test_a_value_is_accepted_in_one_canonical_form(constraint, value, canonical):
    accepted = Constraint(constraint).accept("key", value)
    assert accepted == canonical
    assert type(accepted) is type(canonical)


@pytest.mark.parametrize(
    ("constraint", "value"),
    [
        ("int [1, inf)", 0),
        ("int [1, inf)", 1.5),
        ("int [1, inf)", True),
        ("int [1, inf)", "abc"),
        ("int [1, inf)", math.inf),
        ("float (0, inf)", 0),
        ("float (0, 1]", 1.01),
        ("float (0, inf)", math.nan),
        ("on | off", "maybe"),
        ("on | off", 1),
        ("half | interleaved", "halves"),
        ("ratio (0, inf)", "8/0"),
        ("ratio (0, inf)", "-8/3"),
        ("list of text", "a"),
        ("list of text", [""]),
        ("text", ""),
        ("text", None),
    ],
)
def test_a_value_outside_the_constraint_is_refused(constraint, value):
    with pytest.raises(ConfigError, match="key"):
        Constraint(constraint).accept("key", value)


def test_a_fraction_is_a_number():
    assert ratio("8/3") == pytest.approx(8 / 3)
    assert ratio(4) == 4.0


def test_values_are_shown_as_they_are_typed():
    assert [show(v) for v in (True, False, 0.1, 1e-5, 3, "x", ["a", True])] == [
        "on",
        "off",
        "0.1",
        "1e-05",
        "3",
        "x",
        "[a,on]",
    ]


def test_the_nearest_word_is_suggested():
    assert did_you_mean("nrom", ["norm", "position", "seed"]) == "norm"
    assert did_you_mean("rmss", ["rms", "layer"]) == "rms"
    assert did_you_mean("zzzzzz", ["rms", "layer"]) == ""


def test_a_message_has_at_most_three_lines_whatever_it_holds():
    lines = str(ConfigError("what\nis\nthis", "got\x1b[31m" * 200, "fix")).splitlines()
    assert len(lines) == 3
    assert "\x1b" not in "".join(lines)
    assert len(printable("x" * 1000)) == 400
