"""The worked examples of the documentation, added to a copy of the package and run from the command line."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY

from nexus_ablate.runs import find_runs, read_jsonl, read_run

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/worked_examples.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`(my_options/\S+)`\n\n```\w+\n(.*?)^```$", PAGE, flags=re.M | re.S))
GROUPS = ("placement", "position", "value", "ffn", "mixer", "head", "optim", "data", "evaluation")


def snippet(before: str) -> str:
    """The code block after a line that ends so."""
    (block,) = re.findall(rf"{re.escape(before)}\n\n```\w+\n(.*?)^```$", PAGE, flags=re.M | re.S)
    return block


def test_an_option_is_two_files():
    names = {group: f"my_{group}" for group in GROUPS}
    expected = {file for g, n in names.items() for file in (f"my_options/{n}.py", f"my_options/{g}/{n}.yaml")}
    assert set(FILES) == expected


@pytest.mark.slow
def test_the_worked_examples_train_one_run_as_they_are_written(tmp_path):
    for folder in ("nexus_ablate", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    folder = tmp_path / "nexus_ablate/measure"
    statistics, measures = folder / "activation_statistics.py", folder / "measures.py"
    function = snippet("`nexus_ablate/measure/activation_statistics.py`")
    row = snippet("`nexus_ablate/measure/measures.py`")
    statistics.write_text(f"{statistics.read_text()}\n\n{function}")
    head = '    "activations": (\n'
    assert measures.read_text().count(head) == 1
    measures.write_text(measures.read_text().replace(head, head + row))
    (tmp_path / "nexus_ablate/cli/my_verb.py").write_text(snippet("`nexus_ablate/cli/my_verb.py`"))

    (command,) = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.S)
    settings = ["train.steps=2", "train.device=cpu", "train.threads=1", "train.eval_tokens=64", "tracker=files"]
    words = [sys.executable, "-m", *shlex.split(command.replace("nexus-ablate", "nexus_ablate")), *TINY, *settings]
    environment = os.environ | {"NEXUS_ABLATE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": ""}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = find_runs([tmp_path / "runs"])
    record = read_run(path)
    assert record.config is not None and record.summary is not None
    options = GROUPS[:-1]
    assert [record.config[group]["name"] for group in options] == [f"my_{group}" for group in options]
    assert set(record.summary["my_evaluation:targets:256"]) == {"loss", "backwards"}
    assert record.summary["act/resid/max_channel_mean"] > 0
    rows = [row for row in read_jsonl(path / "metrics.jsonl") if "option/router_entropy" in row]
    assert rows and all(row["option/balance_loss"] > 0 for row in rows)
    assert "act/block_001/resid/max_channel_mean" in read_jsonl(path / "probes.jsonl")[-1]

    def printed(*arguments: str) -> str:
        return subprocess.run([*words[:3], *arguments], capture_output=True, text=True, cwd=tmp_path).stdout

    assert "max_channel_mean" in printed("list", "measures")
    assert printed("my-verb", "runs", "--best", "5") == f"{record.summary['val_loss']:.4f}  {path}\n"
    assert "my-verb" in printed("--help") and "number of runs (1)" in printed("my-verb", "--help")


def pytest_in_the_background(*arguments: str) -> str:
    """The output of pytest while SIGINT is ignored, as in a shell's background job."""
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *arguments]
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False).stdout
    finally:
        signal.signal(signal.SIGINT, ignored)


@pytest.mark.slow
def test_a_sample_of_the_tests_ends_in_time_and_says_how_many_it_left_out():
    complete, none = (pytest_in_the_background("tests/test_regime.py", "--minutes", at) for at in ("5", "0"))
    (passed,) = re.findall(r"(\d+) passed", complete)
    assert "sample" not in complete and f"a sample of the tests: {passed} were left out" in none


@pytest.mark.slow
def test_tests_of_ctrl_c_pass_in_a_job_in_the_background_too():
    case = "tests/faults/test_signals.py::test_signals_after_the_save_leave_the_exit_status_at_75"
    assert "2 passed" in pytest_in_the_background(case)


def test_every_file_that_contributing_names_is_there():
    files = re.findall(r"`([\w/]+\.(?:py|yaml))`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(files) > 50
    assert [name for name in files if not any((place / name).exists() for place in (ROOT, ROOT / "nexus_ablate"))] == []


def test_contributing_names_every_room():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = [path.parent.name for path in (ROOT / "nexus_ablate").glob("*/__init__.py")]
    assert [room for room in rooms if f" {room}/ " not in page] == []
