"""The coordinate check passes where learning rates transfer over the width, and fails where they don't."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts/bench_coordinates.py"
TINY = "model.n_layers=1 model.d_model=64 model.n_heads=4 model.context=16 --widths 64,128,256 --seeds 1 --steps 6"
MUP = "param=mup param.base_width=64 param.base_head_dim=16"


@pytest.mark.parametrize(
    ("param", "status", "said"),
    [(MUP, 0, "param=mup passes"), ("param=sp", 1, "not flat")],
)
def test_the_check_passes_under_mup_and_fails_without_it(param, status, said):
    command = [sys.executable, str(SCRIPT), *param.split(), *TINY.split()]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == status, ended.stderr
    assert said in ended.stdout


def said_of_mup():
    """The options that docs/recent_options.md says to pass or to fail under muP, with the exit status of the check."""
    page = (SCRIPT.parent.parent / "docs/recent_options.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` .* (passes|fails) \|$", page, re.M)
    return [(overrides, ("passes", "fails").index(word)) for overrides, word in rows]


def test_the_page_says_which_options_pass_and_which_fail():
    assert {status for _, status in said_of_mup()} == {0, 1}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("overrides", "status"), [("ffn=gelu", 1), *said_of_mup()])
def test_an_option_passes_or_fails_as_the_page_says(overrides, status):
    command = [sys.executable, str(SCRIPT), "param=mup", *overrides.split()]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == status, ended.stdout
