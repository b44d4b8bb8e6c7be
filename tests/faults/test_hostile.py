"""Nothing that is read is ever run, and nothing that is shown is ever more than text (R18)."""

from __future__ import annotations

import ast
import json
import pickle
import re
import resource
import shutil
from pathlib import Path

import pytest
import yaml
from checkouts import parsed

import nexus_ablate
from faults.bench import child, ended, run
from faults.payloads import CHECKPOINT_FILES, COMMANDS, MANIFESTS, PICKLE, STATE_FILES, TEXTS, YAML, replant
from nexus_ablate.cli import main
from nexus_ablate.errors import UserError
from nexus_ablate.training.checkpoint import load_newest

ALL = [*CHECKPOINT_FILES, *STATE_FILES, *MANIFESTS, *YAML, *COMMANDS, *TEXTS]
MEMORY = 3 * 2**30


@pytest.fixture
def planted(finished_run, tmp_path, monkeypatch):
    """A finished run, in whose directory the test now is, and nothing may appear there."""
    path = finished_run("train.steps=4", "model.n_layers=1")
    monkeypatch.chdir(tmp_path)
    yield path
    assert not list(tmp_path.rglob("*canary*"))


def bounded(action) -> int:
    """The status of a child that runs `action` in bounded memory and time."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
        action()

    return ended(child(limited))


def newest(path: Path) -> Path:
    return next((path / "checkpoints").iterdir())


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_hostile_tensor_file_is_damage(planted, name):
    replant(newest(planted), "model.safetensors", CHECKPOINT_FILES[name])

    def load() -> None:
        with pytest.raises(UserError):
            load_newest(planted / "checkpoints")

    assert bounded(load) == 0


@pytest.mark.parametrize("name", STATE_FILES)
def test_a_hostile_state_file_is_damage_or_data(planted, name, tiny_run):
    replant(newest(planted), "state.json", STATE_FILES[name])
    status = json.loads((planted / "status.json").read_text()) | {"state": "preempted"}
    (planted / "status.json").write_text(json.dumps(status))

    def resume() -> None:
        with pytest.raises(UserError):
            run(tiny_run("train.steps=4", "model.n_layers=1"))

    assert bounded(resume) == 0


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hostile_manifest_is_damage(planted, name):
    file = newest(planted) / "MANIFEST.json"
    manifest = json.loads(file.read_text())
    MANIFESTS[name](manifest)
    file.write_text(json.dumps(manifest))
    with pytest.raises(UserError):
        load_newest(planted / "checkpoints")


@pytest.mark.parametrize("name", YAML)
def test_hostile_yaml_is_damage_or_data(planted, tmp_path, name):
    (planted / "config.yaml").write_text(YAML[name])
    (tmp_path / "runs" / "scratch" / "study.yaml").write_text(YAML[name])

    def read_everywhere() -> None:
        for verb in ("evaluate", "compare", "status"):
            options = ["--evals", "quantization"] if verb == "evaluate" else []
            assert main([verb, str(planted), *options]) in (0, 2, 4)
        assert main(["status", str(tmp_path / "runs")]) in (0, 2)

    assert bounded(read_everywhere) == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_a_hostile_command_is_a_configuration_error(tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    assert main(COMMANDS[name]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert 1 <= len(lines) <= 3
    assert all(line.isprintable() for line in lines)
    assert "Traceback" not in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "an escape")) for name in TEXTS]
)
def test_a_hostile_text_in_a_run_is_shown_as_text(planted, tmp_path, name, capfd):
    text = TEXTS[name]
    status = json.loads((planted / "status.json").read_text()) | {"state": "failed", "reason": text, "host": text}
    arm = planted.parent.with_name(re.sub(r"[/\0]", "_", text))
    shutil.copytree(planted.parent, arm)
    other = next(arm.glob("s*"))
    (other / "status.json").write_text(json.dumps(status))
    verbs = (["status", "runs"], ["compare", "runs", "--html", "page.html"], ["show", str(other)])
    for verb in verbs:
        main(verb)
        said = capfd.readouterr()
        for shown in (said.out, said.err):
            match = re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e]", shown)
            assert not match, (verb, shown[max(0, match.start() - 200) : match.end() + 50])
    page = (tmp_path / "page.html").read_text() if (tmp_path / "page.html").exists() else ""
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e]", page)
    assert "<img src=x" not in page


# Controls: what trusting code would have done with them


def test_control_the_pickle_runs_where_pickles_are_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(PICKLE)
    assert (tmp_path / "canary").exists()


def test_control_the_yaml_runs_where_objects_are_allowed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yaml.load(YAML["os.system"], yaml.UnsafeLoader)
    assert (tmp_path / "canary").exists()


# The source


MODULES = sorted(Path(nexus_ablate.__file__).parent.rglob("*.py"))
CALLS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "eval", "exec", "instantiate"}


def test_no_module_unpickles_evaluates_or_instantiates():
    for path in MODULES:
        tree = parsed(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        imported = {
            part
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for part in [*(a.name for a in node.names), getattr(node, "module", None) or ""]
        }
        assert not CALLS & (names | {part.split(".")[0] for part in imported}), path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = ast.unparse(node.func)
                assert of not in {"torch.load", "torch.save", "yaml.unsafe_load", "yaml.full_load", "os.system"}, path
                assert not any(k.arg == "allow_pickle" for k in node.keywords), path
                assert not any(k.arg == "shell" for k in node.keywords), path
                if of == "yaml.load":
                    assert "Safe" in path.read_text() and "Unsafe" not in path.read_text(), path
                assert "broadcast_object" not in of and "gather_object" not in of, path  # they pickle
