"""The commands of docs/performance.md run, at sizes that take seconds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = "model.n_layers=2 model.d_model=32 model.n_heads=2 model.context=32 train.batch_size=4 train.device=cpu"


COMMANDS = {
    "start train.device=cpu train.threads=1": r"next run in the same worker: it begins after \d",
    f"probe {SMALL}": r"probe=full: [\d.]+ steps each",
    "kernels cpu 1 32 2 16": r"mask with gradient: [\d.]+ ms",
    f"compile {SMALL} train.steps=4": r"a compiled step \w+ \d+%",
    f"stack 2 {SMALL} train.threads=1": r"2 x 100 steps: losses differ by at most \d\.\de-0[4-9]",
    "growth --seconds 0.1": r"status, by runs: time \^\d",
    "queue --pairs 1 --runs 2 --steps 2": "bit-identical to the run alone: 2 of 2",
}
LONG = {"compile", "growth", "queue", "stack"}
ELSEWHERE = {"peer": "needs another project's code", "transfer": "trains for half an hour"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=name, marks=[pytest.mark.long] if name in LONG else [])
        for name, command in ((command.split()[0], command) for command in COMMANDS)
    ],
)
def test_a_benchmark_prints_its_figures(command, tmp_path):
    name, *arguments = command.split()
    words = [sys.executable, str(ROOT / f"scripts/bench_{name}.py"), *arguments]
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=here, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(COMMANDS[command], done.stdout), done.stdout


def test_every_benchmark_is_run_by_a_test_or_says_why_not():
    scripts = {path.stem.removeprefix("bench_") for path in (ROOT / "scripts").glob("bench_*.py")}
    assert scripts == {command.split()[0] for command in COMMANDS} | ELSEWHERE.keys()
