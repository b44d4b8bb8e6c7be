"""The coordinate check passes where learning rates transfer over the width, and fails where they don't."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts/bench_coordinates.py"
TINY = "model.n_layers=1 model.d_model=64 model.n_heads=4 model.context=16 --widths 64,128,256 --seeds 1 --steps 6"
MUP = "param=mup param.base_width=64 param.base_head_dim=16"


@pytest.mark.parametrize(
    ("param", "status", "said"),
    [(MUP, 0, "param=mup passes"), ("param=sp", 1, "not flat"), ("param=sp optim.lr=1e30", 1, "param=sp fails")],
)
def test_the_check_passes_under_mup_and_fails_without_it(param, status, said):
    command = [sys.executable, str(SCRIPT), *param.split(), *TINY.split()]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == status, ended.stderr
    assert said in ended.stdout
