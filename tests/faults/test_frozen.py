"""Runs of earlier versions are read, or refused in a line: a frozen one of each version stands beside this file (R22).

To freeze one of a new version: `python -m faults.test_frozen` in tests/, and commit what it wrote.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from safetensors.torch import save as to_bytes

from faults.bench import at_step, logged, run, sizes, weights
from faults.payloads import replant
from nexus_ablate import __version__, load_run
from nexus_ablate.cli import main
from nexus_ablate.config import resolve
from nexus_ablate.config.options import Option, option_files
from nexus_ablate.errors import CheckpointError
from nexus_ablate.runs import find_runs
from nexus_ablate.training.checkpoint import load_newest
from nexus_ablate.training.trainer import Trainer

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
    assert "baseline" in capsys.readouterr().out


def test_a_finished_run_of_each_version_is_evaluated_or_refused_in_a_line(frozen, capsys):
    (path,) = find_runs([Path("runs")])
    assert main(["evaluate", str(path), "--evals", "quantization"]) in (0, 2, 4)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert len([line for line in said.splitlines() if line.startswith("error")]) <= 1


def test_a_stopped_run_goes_on_to_the_same_end_or_is_left_alone(frozen, capsys):
    """Another version, or a configuration that since has more keys, is another run: never a mixture of both."""
    (before,) = find_runs([Path("stopped")])
    kept = {path: path.read_bytes() for path in before.rglob("*") if path.is_file()}
    assert main([*COMMAND, "runs_dir=stopped"]) == 0
    after = find_runs([Path("stopped")])
    if after == [before]:
        loss, expected = (logged(path)[-1]["train/loss"] for path in (before, find_runs([Path("runs")])[0]))
        assert loss == pytest.approx(expected, rel=1e-5)
    else:
        assert len(after) == 2
        assert f"{before.name}, was made by other code (" in " ".join(capsys.readouterr().err.split())
        assert all(path.read_bytes() == data for path, data in kept.items())


# ------------------------------------------------------------------------- versions that do not exist yet, or no more

READ = {"config.yaml": yaml.safe_load, "summary.json": json.loads, "status.json": json.loads, "env.json": json.loads,
        "init.json": json.loads, "metrics.jsonl": None, "probes.jsonl": None, "evaluation.jsonl": None}  # fmt: skip
VERBS = (["status"], ["show"], ["compare"], ["evaluate", "--evals", "quantization"])


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run of this version that crashed before step 10, with checkpoints of steps 4 and 8."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path / "cache"))
    Path("text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, lambda step: 1 / (step != 9))
        with pytest.raises(ZeroDivisionError):
            run([*COMMAND, "runs_dir=runs"])
    return find_runs([Path("runs")])[0]


@pytest.fixture
def finished(stopped):
    """That run at its end."""
    return run([*COMMAND, "runs_dir=runs"]).path


def places(values, before=()):
    """Where each key stands, at any depth."""
    for key, value in values.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from places(value, (*before, key))


def without(values, place, instead=None) -> None:
    """Take a key out, as it was before there was one; with `instead` under another name, as it may be one day."""
    for key in place[:-1]:
        values = values[key]
    value = values.pop(place[-1])
    if instead:
        values[instead] = value


def changes(path):
    """Each file and key of a run that another version may lack, and in config.yaml also call otherwise."""
    for name, parse in READ.items():
        text = (path / name).read_text()
        values = parse(text) if parse else json.loads(text.splitlines()[-1])
        for place in places(values):
            yield name, place, None
            if name == "config.yaml":  # the one file in which a key that is not known is refused
                yield name, place, "of_a_later_version"


def rewrite(path, name, place, new) -> None:
    """Change a key of a file, in a log in each row that has it."""
    text, parse = (path / name).read_text(), READ[name]
    parts = [parse(text)] if parse else [json.loads(line) for line in text.splitlines()]
    for values in parts:
        with suppress(KeyError):
            without(values, place, new)
    dump = yaml.safe_dump if parse is yaml.safe_load else json.dumps
    (path / name).write_text("\n".join(map(dump, parts)) + "\n")


@sizes(4, 0)  # 0: every key
def test_whatever_key_a_run_of_another_version_lacks_each_verb_reads_it_or_refuses_it(finished, capsys, counted, count):
    every = list(changes(finished))
    read = refused = 0
    for name, place, new in random.Random(0).sample(every, count) if count else every:
        kept = {file: file.read_bytes() for file in finished.iterdir() if file.is_file()}
        rewrite(finished, name, place, new)
        for verb, *flags in VERBS:
            status = main([verb, "runs" if verb in ("status", "compare") else str(finished), *flags])
            said = capsys.readouterr().err
            assert status in (0, 2, 4), (verb, name, place, new, said)
            assert status == 0 or 0 < len(said.splitlines()) <= 3, (verb, name, place, new, said)
            read, refused = read + (status == 0), refused + (status != 0)
        for file in [file for file in finished.iterdir() if file.is_file()]:
            file.unlink()
        for file, data in kept.items():
            file.write_bytes(data)
    counted(f"{count or len(every)} of {len(every)} keys gone or renamed, {read} commands read on, {refused} refused")


@pytest.mark.slow
def test_control_without_asking_for_every_key_an_evaluation_would_end_in_a_traceback(finished, monkeypatch, capsys):
    command = ["evaluate", str(finished), "--evals", "quantization"]
    rewrite(finished, "config.yaml", ("norm", "eps"), None)
    assert main(command) in (2, 4)

    def trusting(axis, values):
        return Option(values["name"], {key: values[key] for key in option_files(axis)[values["name"]].keys})

    monkeypatch.setattr(resolve, "check_option", trusting)
    assert main(command) == 1
    assert "KeyError: 'eps'" in capsys.readouterr().err


def test_weights_of_other_names_or_shapes_are_refused_in_three_lines(finished, monkeypatch, capsys):
    (checkpoint,) = (finished / "checkpoints").iterdir()
    tensors = weights(finished)
    tensors["blocks.0.ffn.called_otherwise.weight"] = tensors.pop("blocks.0.ffn.down.weight")
    replant(checkpoint, "model.safetensors", to_bytes(tensors))
    assert main(["evaluate", str(finished), "--evals", "quantization"]) == 4
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 3
    assert "blocks.0.ffn.called_otherwise.weight: " in said and "not there in the model" in said


def of_another_version(path, place, new=None) -> None:
    """Give every checkpoint of a run a state without a key, and a manifest that vouches for it."""
    for state in (path / "checkpoints").glob("*/state.json"):
        values = json.loads(state.read_text())
        without(values, place, new)
        replant(state.parent, "state.json", json.dumps(values).encode())


@pytest.mark.parametrize("new", [None, "of_a_later_version"])
def test_a_checkpoint_whose_state_has_other_keys_is_refused_in_three_lines(stopped, new):
    of_another_version(stopped, ("progress", "interval_loss"), new)
    with pytest.raises(CheckpointError, match="no checkpoint") as refused:
        run([*COMMAND, "runs_dir=runs"])
    assert "another version" in refused.value.got
    assert len(refused.value.lines()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("new", [None, "of_a_later_version"])
def test_control_without_comparing_the_keys_a_run_goes_on_wrongly_or_ends_in_a_traceback(stopped, monkeypatch, new):
    expected = logged(run([*COMMAND, "runs_dir=whole"]).path)
    of_another_version(stopped, ("progress", "interval_loss"), new)
    monkeypatch.setattr(Trainer, "_accept", lambda self, state: None)
    if new:
        with pytest.raises(TypeError, match=new):
            run([*COMMAND, "runs_dir=runs"])
    else:
        assert logged(run([*COMMAND, "runs_dir=runs"]).path) != expected


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
            for file, changes in (("status.json", {"host": "frozen"}), ("env.json", dict.fromkeys(MACHINE, "frozen"))):
                values = json.loads((path / file).read_text()) | changes
                (path / file).write_text(json.dumps(values, indent=2) + "\n")
            shutil.copytree(name, FROZEN / __version__ / name)


if __name__ == "__main__":
    sys.exit(freeze())
