"""Runs of earlier versions are read, or refused in a line: a frozen one of each version stands beside this file (R22).

To freeze one of a new version: `python -m faults.test_frozen` in tests/, and commit what it wrote.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from faults.bench import at_step, run
from faults.payloads import replant
from nexus_ablate import __version__
from nexus_ablate.cli import main
from nexus_ablate.comparison.load import load_run
from nexus_ablate.errors import CheckpointError
from nexus_ablate.runs import find_runs, read_run
from nexus_ablate.training.checkpoint import load_newest

FROZEN = Path(__file__).with_name("frozen")
VERSIONS = sorted(path.name for path in FROZEN.glob("*"))
TEXT = "the quick brown fox jumps over the lazy dog.\n" * 60
COMMAND = ["model.n_layers=1", "model.d_model=8", "model.n_heads=2", "model.context=8", "data=files",
           "data.files=[text.txt]", "tracker=files", "train.device=cpu", "train.threads=1", "train.steps=12",
           "train.batch_size=2", "train.eval_every=6", "train.eval_tokens=64", "train.checkpoint_every=4",
           "train.log_every=3", "optim.warmup=2"]  # fmt: skip
MACHINE = ("host", "platform", "command", "git_commit", "git_dirty")


@pytest.fixture(params=VERSIONS)
def frozen(request, tmp_path, monkeypatch):
    """A copy of a version's runs: one finished, and one stopped at step 9 of 12."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    for name in ("runs", "stopped"):
        shutil.copytree(FROZEN / request.param / name, tmp_path / name)
    return request.param


def test_this_version_is_frozen():
    assert __version__ in VERSIONS


def test_a_finished_run_of_each_version_is_read_shown_and_compared(frozen, capsys):
    (path,) = find_runs([Path("runs")])
    record = load_run(path)
    assert record.state == "finished"
    assert record.summary is not None and record.summary["steps"] == 12
    assert len(record.metrics()) >= 4
    assert load_newest(path / "checkpoints") is not None
    assert main(["show", str(path)]) == 0
    assert main(["status", "runs"]) == 0
    assert main(["compare", "runs"]) == 0
    assert "baseline" in capsys.readouterr().out or record.arm


def test_a_finished_run_of_each_version_is_evaluated_or_refused_in_a_line(frozen, capsys):
    (path,) = find_runs([Path("runs")])
    assert main(["evaluate", str(path), "--evals", "quantization"]) in (0, 2, 4)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert len([line for line in said.splitlines() if line.startswith("error")]) <= 1


def test_a_stopped_run_goes_on_to_the_same_end_or_is_left_alone(frozen):
    """Another version, or a configuration that since has more keys, is another run: never a mixture of both."""
    (before,) = find_runs([Path("stopped")])
    kept = {path: path.read_bytes() for path in before.rglob("*") if path.is_file()}
    assert main([*COMMAND, "runs_dir=stopped"]) == 0
    after = find_runs([Path("stopped")])
    if after == [before]:
        loss, expected = (read_run(path).summary["val_loss"] for path in (before, find_runs([Path("runs")])[0]))
        assert loss == pytest.approx(expected, rel=1e-5)
    else:
        assert len(after) == 2
        assert all(path.read_bytes() == data for path, data in kept.items())


def test_a_checkpoint_whose_state_has_other_keys_is_refused_in_three_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path / "cache"))
    Path("text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, lambda step: 1 / (step != 9))
        with pytest.raises(ZeroDivisionError):
            run([*COMMAND, "runs_dir=runs"])
    (path,) = find_runs([Path("runs")])
    for state in (path / "checkpoints").glob("*/state.json"):
        values = json.loads(state.read_text())
        values["progress"]["added_later"] = 1
        replant(state.parent, "state.json", json.dumps(values).encode())
    with pytest.raises(CheckpointError, match="no checkpoint") as refused:
        run([*COMMAND, "runs_dir=runs"])
    assert "another version" in refused.value.got
    assert len(refused.value.lines()) == 3


def freeze() -> None:
    """Write the runs of this version, which must not be there yet."""
    import os
    import signal
    import tempfile

    from nexus_ablate.data import Batches

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["NEXUS_ABLATE_CACHE"] = str(Path(folder) / "cache")
        Path("text.txt").write_text(TEXT)
        assert main([*COMMAND, "runs_dir=runs"]) == 0
        batch = Batches.batch

        def asked_to_stop(self, step):
            if step == 8:
                os.kill(os.getpid(), signal.SIGTERM)
            return batch(self, step)

        Batches.batch = asked_to_stop  # type: ignore[method-assign]
        assert main([*COMMAND, "runs_dir=stopped"]) == 75
        for name in ("runs", "stopped"):
            (path,) = find_runs([Path(name)])
            (path / "LOCK").unlink()
            for file, told in (("status.json", {"host": "frozen"}), ("env.json", dict.fromkeys(MACHINE, "frozen"))):
                values = json.loads((path / file).read_text()) | told
                (path / file).write_text(json.dumps(values, indent=2) + "\n")
            shutil.copytree(name, FROZEN / __version__ / name)


if __name__ == "__main__":
    sys.exit(freeze())
