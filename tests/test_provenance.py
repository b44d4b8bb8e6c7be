"""Which code made a run: what its hash covers, which commit it names, and that results of other code are not reused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkouts import ROOT, Checkout, git

from nexus_ablate import errors
from nexus_ablate.axes.norm import NORM
from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.config.plugins import VARIABLE, add_plugins
from nexus_ablate.launch.launch import plan
from nexus_ablate.launch.worker import Task
from nexus_ablate.provenance import COMPUTES_NOTHING, PACKAGE, computes, differ, source_hashes, text_hash
from nexus_ablate.runs import find_runs, read_run
from nexus_ablate.study.definition import read_study
from nexus_ablate.training.session import train
from tests.trial_norm import write_plugin

# ------------------------------------------------------------------------------------------------------ the hash

CODE = '''
"""What it is."""
import math


class Norm:
    """Divides."""

    eps = 1e-6
    """Inside the root."""

    def forward(self, x, gain=(1,)):  # shapes: any
        """The result."""
        return math.sqrt(x + self.eps) * gain[0] if x else f"{x} # {gain}"
'''


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  # shapes: any", "  # shapes: others"),
        ("  # shapes: any", ""),
        ('"""Divides."""', '"""Divides by something,\n\n    "#" and all."""'),
        ('        """The result."""\n', ""),
        ('    """Inside the root."""\n', ""),
        ("\n\n\nclass", "\n\nclass"),
        ("x + self.eps", "x+self.eps"),
        ("(self, x, gain=(1,))", "(\n        self,\n        x,  # the input\n        gain=(1,),\n    )"),
        ("sqrt(x + self.eps)", "sqrt(\n            x + self.eps,\n        )"),
        ("return math", "return \\\n            math"),
        ("    ", "\t"),
        ("\n", "\r\n"),
    ],
)
def test_comments_docstrings_and_layout_change_no_hash(before, after):
    assert before in CODE
    assert text_hash(CODE.replace(before, after)) == text_hash(CODE)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("1e-6", "1e-5"),
        ("x + self", "x - self"),
        ("gain=(1,)", "gain=(1)"),
        ("gain[0]", "gain[0,]"),
        ('f"{x} # {gain}"', 'f"{x} # {x}"'),
        ("        return", "    return"),
        ('"""The result."""', 'f"""The {x.add_(1)}."""'),
        ("import math\n", ""),
        ("gain=(1,)", 'gain=(1, "")'),
        ("math.sqrt(x", "math.sqrt (- x"),
    ],
)
def test_whatever_may_compute_changes_the_hash(before, after):
    assert before in CODE
    assert text_hash(CODE.replace(before, after)) != text_hash(CODE)


# ------------------------------------------------------------------------------------------------------ coverage

NOT_LOADED = {"training/follower.py", "measure/evaluation/"}
"""Hashed, and loaded only by other runs than one step in one process: the other processes of one, evaluations."""
TRAINED = """
import json, sys
from pathlib import Path
import nexus_ablate.cli
status = nexus_ablate.cli.main(sys.argv[1:])
folder = Path(nexus_ablate.__file__).resolve().parent
ours = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "nexus_ablate"]
files = [Path(module.__file__).resolve() for module in ours if module.__file__]
print(json.dumps(sorted(file.relative_to(folder).as_posix() for file in files)))
sys.exit(status)
"""


def test_every_module_that_a_training_loads_is_hashed_or_set_aside_with_a_reason(tiny_run, tmp_path):
    command = [sys.executable, "-c", TRAINED, *tiny_run("train.steps=1")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    (path,) = find_runs([tmp_path / "runs"])
    env = read_run(path).env or {}
    recorded = env["source"].keys()
    aside = {name for name in loaded if not computes(name)}
    assert loaded == (loaded & recorded) | aside
    assert "cli/train.py" in aside
    core = {name for name in aside if name.split("/")[0] in ("axes", "data", "measure", "training")}
    described = {"measure/measures.py", "measure/regime.py", "training/display.py", "training/run_facts.py"}
    assert core == described | {"training/nonfinite.py", "training/refusals.py", "training/signals.py"}
    # What is hashed without being loaded would make runs unlike for nothing.
    assert {name for name in recorded - loaded if not any(name.startswith(part) for part in NOT_LOADED)} == set()
    assert env["source"] == source_hashes()
    if (ROOT / ".git").exists():
        head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        assert env["git_commit"] == head.stdout.strip()
        assert isinstance(env["git_dirty"], bool)


def test_what_is_set_aside_exists_and_says_why():
    for name, reason in COMPUTES_NOTHING.items():
        assert (PACKAGE / name).is_dir() == name.endswith("/") and (PACKAGE / name).exists(), name
        assert len(reason.split()) > 2


SUGGESTS = [
    ("config/overrides.py", '"the key already exists"', '"this key exists"'),
    ("config/override_syntax.py", '"this override cannot be read"', '"what does this override mean?"'),
    ("config/rules.py", '"kv_bias": ("off",),', '"kv_bias": ("off", "key"),'),
    ("config/groups.py", "set(option_files(group))", "{*option_files(group)}"),
    ("config/compose.py", "comes after it", "follows it"),
    ("training/refusals.py", "does not fit in memory", "needs more memory"),
    ("training/nonfinite.py", '"the parameter {name}"', '"a parameter, {name}"'),
    ("gpus.py", "timeout=20", "timeout=30"),
    ("masking.py", 'HIDDEN = "<secret>"', 'HIDDEN = "***"'),
]
COMPUTES = [
    ("config/resolve.py", "TOKENS_PER_PARAMETER = 20", "TOKENS_PER_PARAMETER = 21"),
    ("config/spelling.py", "BYTES = 256", "BYTES = 257"),
    ("config/grammar.py", "return float(number)", "return float(number + 1)"),
    ("training/start.py", "model.constrain()", "model.eval()"),
    ("training/distributed.py", "shared[:-1] / self.size", "shared[:-1]"),
    ("training/choices.py", "COMPILE_SAVES = 0.4", "COMPILE_SAVES = 0.5"),
    ("kernels/normuon.py", "RMS = 0.2", "RMS = 0.3"),
]
"""A file, what it says, and what it could say: where it refuses or suggests alone, and where it computes."""


def test_editing_a_suggestion_leaves_the_identity_and_editing_what_computes_does_not(checkout):
    known = source_hashes()
    for file, before, after in SUGGESTS:
        checkout.edit(f"nexus_ablate/{file}", before, after)
    assert source_hashes() == known
    for file, before, after in COMPUTES:
        checkout.edit(f"nexus_ablate/{file}", before, after)
    changed = {name for name, value in source_hashes().items() if value != known[name]}
    assert changed == {file for file, *_ in COMPUTES}


# -------------------------------------------------------------------------------------- asked for again, by other code


def bytes_of(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_run_asked_for_again_after_an_edit_trains_again_and_says_why(tiny_run, text_file, tmp_path, checkout, capsys):
    assert main(tiny_run()) == 0
    (first,) = find_runs([tmp_path / "runs"])
    kept, result = bytes_of(first), (read_run(first).summary or {})["val_loss"]
    capsys.readouterr()

    checkout.edit("nexus_ablate/axes/norm.py", '"""The norm axis', '"""The axis of norms')
    checkout.edit("nexus_ablate/axes/norm.py", "from __future__", "# why not\n\nfrom __future__")
    checkout.edit("nexus_ablate/training/display.py", "BAR_SECONDS = 0.2", "BAR_SECONDS = 0.3")
    assert main(tiny_run()) == 0
    assert f"{result:.4f}" in capsys.readouterr().err
    assert find_runs([tmp_path / "runs"]) == [first]

    checkout.edit("nexus_ablate/axes/norm.py", "from __future__", "import math\nfrom __future__")
    assert main(tiny_run()) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"{first.name}, was made by other code (axes/norm.py differs); training again" in said
    assert "already finished" not in said
    runs = find_runs([tmp_path / "runs"])
    assert len(runs) == 2 and bytes_of(first) == kept

    second = next(path for path in runs if path != first)
    assert (read_run(second).summary or {})["steps"] == 20
    assert main(tiny_run()) == 0
    assert "made by other code" not in capsys.readouterr().err, "today's code has finished it"

    text_file.write_text("the lazy dog sleeps while the quick brown fox jumps.\n" * 200)
    assert main(tiny_run()) == 0
    assert "made by other code" not in capsys.readouterr().err, "other text makes it another configuration"


def test_an_edited_plugin_is_other_code_and_its_comments_are_none(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, "")  # what this test composes with is not for the tests after it
    monkeypatch.setattr(NORM, "_classes", dict(NORM._classes))
    directory = write_plugin(tmp_path / "plugin")
    module = directory / "trial.py"
    overrides = tiny_run("norm=trial", "train.steps=2")

    def again() -> str:
        from nexus_ablate.config.plugins import _plugins

        _plugins.cache_clear()
        add_plugins([directory])
        train(compose(overrides))
        return " ".join(capsys.readouterr().err.split())

    assert "other code" not in again()
    module.write_text(f"# a comment\n{module.read_text()}")
    assert "already finished" in again()
    module.write_text(f"{module.read_text()}\nunused = 1\n")
    assert f"was made by other code (plugin {directory.name} differs); training again" in again()


def test_a_worker_that_finds_other_code_than_its_driver_trains_nothing(tiny_run, tmp_path):
    """The code may be edited while a study runs, and a worker be started after that."""
    planned = plan(*read_study(["mine", "vary.norm=layer", *tiny_run()]))
    task = replace(Task.of(planned.jobs[0], {}), source="0" * 64)
    with pytest.raises(errors.ConfigError, match="the code changed"):
        task.train()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (["a.py"], "a.py differs"),
        (["a.py", "b.py"], "a.py and b.py differ"),
        (list("abcd"), "a, b, c and d differ"),
        (list("abcdefg"), "a, b, c and 4 more differ"),
    ],
)
def test_files_that_differ_are_named_in_words(files, text):
    assert differ(files) == text


# ----------------------------------------------------------------------------------------------------- the commit


def git_state(checkout: Path, **variables: str) -> dict:
    """What a process that imports this checkout's package would record."""
    code = "import json\nfrom nexus_ablate.provenance import git_state\nprint(json.dumps(git_state()))"
    environment = {**os.environ, "PYTHONPATH": str(checkout), **variables}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=checkout.parent, check=True)
    return json.loads(done.stdout)


def test_commit_and_changes_are_those_of_the_package_s_own_checkout(tmp_path):
    own = Checkout(tmp_path / "own").root
    git(own, "init")
    nothing = {"git_commit": None, "git_dirty": None}
    assert git_state(own, PYTHONDONTWRITEBYTECODE="1") == nothing, "not committed yet"
    git(own, "add", ".")
    git(own, "commit", "-m", "m")
    clean = {"git_commit": git(own, "rev-parse", "HEAD"), "git_dirty": False}
    (own / "notes.txt").write_text("mine")
    (own / "nexus_ablate" / "__pycache__").mkdir()
    (own / "nexus_ablate" / "__pycache__" / "model.cpython-311.pyc").write_text("Python's own files are no change")
    assert git_state(own) == clean
    assert git_state(own, GIT_DIR=str(tmp_path)) == clean, "a variable of another checkout's hook"
    for name in ("nexus_ablate/new.py", "conf/norm/rms.yaml"):
        with open(own / name, "a") as file:
            file.write("# changed\n")
        assert git_state(own) == clean | {"git_dirty": True}, name
        git(own, "add", ".")
        git(own, "commit", "-m", "m")
        clean["git_commit"] = git(own, "rev-parse", "HEAD")
    assert git_state(own, PATH="") == nothing

    installed = Checkout(own / "venv" / "site-packages").root
    (own / ".gitignore").write_text("venv/\n")
    assert git_state(installed) == nothing, "installed inside the checkout of something else"


# --------------------------------------------------------------------- the whole of it, in a checkout that is edited


def nexus(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command by a checkout's code, from another folder."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", "nexus_ablate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=checkout.parent, timeout=300)


@pytest.fixture
def committed(tmp_path):
    """A checkout with one commit."""
    copied = Checkout(tmp_path / "code")
    (copied.root / ".gitignore").write_text("__pycache__/\n")
    git(copied.root, "init")
    git(copied.root, "add", ".")
    git(copied.root, "commit", "-m", "m")
    return copied


def envs(folder: Path) -> dict[Path, dict]:
    return {path: read_run(path).env or {} for path in find_runs([folder])}


@pytest.mark.slow
def test_a_study_whose_code_was_edited_halfway_is_never_compared_in_silence(committed, tiny_run, tmp_path):
    """An arm trained at 1.5 times the learning rate must not pass for an option that is worse, or better."""
    overrides = [text for text in tiny_run("train.steps=2") if text != "train.threads=1"]
    study = ["study", "tiny", "vary.norm=layer", "seeds=0,1", "--workers", "1", *overrides]
    folder, head = tmp_path / "runs" / "tiny", git(committed.root, "rev-parse", "HEAD")
    assert nexus(committed.root, *study).returncode == 0
    former = envs(folder)
    assert {(env["git_commit"], env["git_dirty"]) for env in former.values()} == {(head, False)}

    shutil.rmtree(folder / "norm=layer")
    committed.edit("nexus_ablate/optimizers.py", 'option.keys["lr"], fused', '1.5 * option.keys["lr"], fused')
    before = bytes_of(folder)
    refused = nexus(committed.root, *study)
    assert refused.returncode == errors.CONFIG
    problem, got, fix = refused.stderr.splitlines()
    assert "study tiny has runs by other code: optimizers.py differs" in problem
    assert "2 runs, such as baseline/s0-" in got and head[:10] in got
    assert fix == f"  try: git checkout {head[:10]}, or name=tiny-2"
    assert bytes_of(folder) == before
    assert nexus(committed.root, *study, "name=tiny-2").returncode == 0
    git(committed.root, "stash")
    assert nexus(committed.root, *study).returncode == 0, "the commit that is named"
    assert {env["git_commit"] for env in envs(folder).values()} == {head} and len(envs(folder)) == 4


@pytest.mark.slow
def test_a_study_whose_option_file_was_edited_halfway_is_not_continued(committed, tiny_run, tmp_path):
    study = ["study", "tiny", "vary.norm=layer", "seeds=0,1", "--workers", "1", *tiny_run("train.steps=2")]
    assert nexus(committed.root, *study).returncode == 0
    shutil.rmtree(tmp_path / "runs" / "tiny" / "norm=layer")
    committed.edit("conf/norm/layer.yaml", "eps: 1.0e-5", "eps: 1.0e-1")
    committed.edit("conf/norm/rms.yaml", "eps: 1.0e-6", "eps: 1.0e-2")
    before = bytes_of(tmp_path / "runs")
    for verb in ("study", "plan"):
        refused = nexus(committed.root, verb, *(word for word in study[1:] if word not in ("--workers", "1")))
        assert refused.returncode == errors.CONFIG
        problem, got, fix = refused.stderr.splitlines()
        assert "was launched otherwise" in problem and fix == "  try: name=tiny-2"
        assert "baseline resolves otherwise; norm=layer resolves otherwise" in got
    assert bytes_of(tmp_path / "runs") == before
