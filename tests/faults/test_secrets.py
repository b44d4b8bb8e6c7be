"""No secret reaches a file, a report, a process's output, or what is sent to W&B (R19)."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from leaking_norm import write_control, write_plugin

from faults.bench import only
from nexus_ablate import errors, masking
from nexus_ablate.cli import main
from nexus_ablate.data import Batches
from nexus_ablate.errors import ConfigError
from nexus_ablate.masking import mask, masked_streams

ENVIRONMENT = {
    "ONE_CANARY_KEY": "canary0wandb0local0key0of0forty0characters",
    "TWO_CANARY_KEY": "canary with spaces, 'quotes' & <signs>",
    "WANDB_API_KEY": "canary1wandb1local1key1of1forty1characters",
    "HF_TOKEN": "hf_canaryCANARYcanaryCANARYcanary0123",
    "AWS_SECRET_ACCESS_KEY": "canary/aws+secret",
    "MY_SERVICE_PASSWORD": "canary with spaces",
    "GITHUB_TOKEN": "ghp_canarycanarycanary",
}
TYPED = {
    "in a URL": "https://me:canary-in-a-url@host/x",
    "in a query": "api_key=canary-in-a-query",
    "with a prefix": "ghp_0canary1with2a3prefix4and5digits",
    "of the environment": ENVIRONMENT["ONE_CANARY_KEY"],
}


def traces(root: Path, said: str = "") -> list[str]:
    """Where a canary is: files under `root` that hold one, names that do, lines that were printed."""
    leaks = [str(path) for path in root.rglob("*") if "canary" in path.name.lower()]
    leaks += [str(path) for path in root.rglob("*") if path.is_file() and b"canary" in path.read_bytes().lower()]
    return leaks + [line for line in said.splitlines() if "canary" in line.lower()]


def nexus(cwd: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit status and output of a command with secrets in its environment, which writes below `cwd` alone."""
    command = [sys.executable, "-m", "nexus_ablate", "--plugin", str(cwd.parent / "plugin"), *arguments]
    places = {"HOME": str(cwd / "home"), "TMPDIR": str(cwd / "tmp"), "NEXUS_ABLATE_CACHE": str(cwd / "cache")}
    env = os.environ | ENVIRONMENT | places | variables
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=240, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path):
    """A folder to work in; beside it are a plugin that leaks, and a text whose name is a typed secret."""
    write_plugin(tmp_path / "plugin")
    (tmp_path / "text,token=canary-in-a-name.txt").write_text("the quick brown fox jumps over the dog.\n" * 200)
    for name in ("home", "tmp"):
        (tmp_path / "work" / name).mkdir(parents=True)
    return tmp_path / "work"


@pytest.fixture
def leaking(tiny_run):
    def make(*overrides: str) -> list[str]:
        short = tiny_run("train.steps=4", "model.n_layers=1")
        kept = [text for text in short if not text.startswith(("data.files", "runs_dir"))]
        return [*kept, "data.files=['../text,token=canary-in-a-name.txt']", "norm=leak", *overrides]

    return make


def reported(cwd: Path, runs: str) -> str:
    """What the reading verbs print and write of the runs."""
    said = ""
    for verb in (
        ["compare", runs, "--html", "runs/page.html", "--json", "runs/page.json", "--md", "runs/page.md"],
        ["compare", runs, "--csv", "-"],
        ["status", runs],
        *(["show", str(path)] for path in sorted((cwd / "runs").glob("*/*/s0*"))),
    ):
        said += nexus(cwd, *verb)[1]
    return said


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["off", "on"])
def test_a_run_its_repetition_and_its_reports_hold_no_secret(folder, leaking, fails, counted):
    offline = [text for text in leaking(f"norm.fails={fails}") if text != "tracker=files"]
    status, said = nexus(folder, *offline, "tracker=wandb_offline")
    assert status == (1 if fails == "on" else 0), said
    assert "printed <secret>" in said and "warned of <secret>" in said and "logged <secret>" in said
    assert "token=_secret_" in str(only(folder / "runs"))
    said += nexus(folder, *offline, "tracker=wandb_offline")[1] + reported(folder, "runs")
    said += nexus(folder, *offline, "seed=1", f"data.path={TYPED['in a URL']}")[1]
    assert list((folder / "runs").rglob("wandb/offline-run-*")), said
    assert traces(folder, said) == []
    counted(f"{len(ENVIRONMENT) + len(TYPED)} secrets, {sum(1 for _ in (folder / 'runs').rglob('*'))} files, 0 found")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["RuntimeError", "SystemExit", "BaseException"])
def test_a_study_with_runs_that_fail_holds_no_secret(folder, leaking, end, monkeypatch):
    """Whatever a run raises, and whatever it and its children write past Python's streams, in parts of a line."""
    monkeypatch.setenv("LEAK_ENDS_BY", end)
    monkeypatch.setenv("LEAK_BELOW_PYTHON", "1")
    question = f"question=is it {' or '.join(TYPED.values())}?"
    study = ["study", "mine", "vary.norm.fails=on", "seeds=0,1", *leaking(), "--workers", "2"]
    status, said = nexus(folder, *study, question)
    assert status == 1, said
    assert "login refused: <secret>" in said
    again, more = nexus(folder, *study, question)
    assert again == 1 and "has changed since" not in more, "the masked question is the same question"
    log = "".join(path.read_text() for path in (folder / "runs" / "mine" / ".workers").glob("worker*.log"))
    assert "printed <secret>" in log and f"{end}: login refused: <secret>" in log
    assert "began <secret>" in log and "child <secret>" in log
    assert "<secret>" in (folder / "runs" / "mine" / "study.yaml").read_text()
    assert traces(folder, said + more + reported(folder, "runs/mine")) == []


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib"])
def test_a_multirun_with_runs_that_fail_holds_no_secret(folder, leaking, launcher):
    sweep = ["-m", *leaking("norm.fails=on,off", f"hydra/launcher={launcher}")]
    status, said = nexus(folder, *sweep)
    assert status == 1, said
    assert "login refused: <secret>" in said
    assert len(list((folder / "runs").rglob("status.json"))) == 2
    assert traces(folder, said + reported(folder, "runs")) == []


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["run", "study", "basic", "joblib"])
def test_control_without_the_mask_they_are_everywhere(folder, leaking, launch, monkeypatch):
    monkeypatch.setenv("LEAK_BELOW_PYTHON", "1")
    command = {
        "run": leaking("norm.fails=on"),
        "study": ["study", "mine", "vary.norm.fails=on", "seeds=0-0", *leaking(), "--workers", "1"],
    }.get(launch, ["-m", *leaking("norm.fails=on", f"hydra/launcher={launch}")])
    typed = [f"question=is it {TYPED['of the environment']}?"] if launch == "study" else []
    path = os.pathsep.join([str(write_control(folder.parent / "control")), os.environ.get("PYTHONPATH", "")])
    _, said = nexus(folder, *command, *typed, PYTHONPATH=path)
    leaks = {Path(place).name for place in traces(folder / "runs")}
    written = {"study": {"worker0.log", "study.yaml"}}.get(launch, set())
    assert {"status.json", "log.txt", "config.yaml", "overrides.txt", *written} <= leaks
    if launch == "study":
        log = (folder / "runs/mine/.workers/worker0.log").read_text()
        assert "began canary" in log and "child canary" in log
    assert traces(folder / "nothing", said)


@pytest.mark.parametrize("end", [SystemExit, BaseException])
def test_a_run_that_ends_python_itself_prints_no_secret(tiny_run, monkeypatch, capsys, end):
    def fail(self, step):
        raise end(f"login with {ENVIRONMENT['ONE_CANARY_KEY']}")

    monkeypatch.setenv("ONE_CANARY_KEY", ENVIRONMENT["ONE_CANARY_KEY"])
    monkeypatch.setattr(Batches, "batch", fail)
    assert main(tiny_run("train.steps=2")) == errors.BUG
    said = "".join(capsys.readouterr())
    assert f"{end.__name__}: login with <secret>" in said and "canary" not in said


NAMES = (
    *("X_KEY", "HF_TOKEN", "A_SECRET", "A_PASSWORD", "DB_PASSWD", "MYSQL_PWD", "GITLAB_PAT"),
    *("SERVICE_CREDENTIALS", "SSH_PASSPHRASE"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_variable_is_a_secret_by_its_name(name, monkeypatch):
    monkeypatch.setenv(name, "canary0value")
    assert mask("is canary0value") == "is <secret>"
    monkeypatch.delenv(name)
    for other in ("PWD", "OLDPWD", "MONKEYS", "COMPAT", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(other, "canary0value")
    assert mask("is canary0value") == "is canary0value"


@pytest.mark.parametrize("masked", [True, False])
def test_a_failed_run_s_traceback_is_printed_and_kept_without_the_secret(
    tiny_run, tmp_path, monkeypatch, capsys, masked
):
    """With the mask; and without it, as a control that shows the secret on its way to each of these places."""
    monkeypatch.setenv("ONE_CANARY_KEY", ENVIRONMENT["ONE_CANARY_KEY"])
    if not masked:
        monkeypatch.setattr(masking, "_masked", lambda value, words: value)

    text = f"login with {ENVIRONMENT['ONE_CANARY_KEY']} at {TYPED['in a URL']}"

    def fail(self, step):
        raise RuntimeError(text)

    monkeypatch.setattr(Batches, "batch", fail)
    typed = ["tracker=auto", f"tracker.entity='{TYPED['in a query']}'"]
    assert main(tiny_run("train.steps=2", *typed)) == 1
    said = "".join(capsys.readouterr())
    path = only(tmp_path / "runs")
    if masked:
        assert "RuntimeError: login with <secret> at https://<secret>@host/x" in said
        assert "login with <secret>" in (path / "status.json").read_text()
        assert traces(tmp_path / "runs", said) == []
    else:
        places = ("status.json", "log.txt", "config.yaml", "overrides.txt")
        assert {str(path / place) for place in places} <= set(traces(tmp_path / "runs"))
        assert len(traces(tmp_path / "nothing", said)) == 1


@pytest.mark.parametrize("secret", [*ENVIRONMENT.values(), "canary-one\nand canary-two\nof which one is short\nx"])
def test_a_secret_is_masked_in_whatever_form_it_is_written(secret, monkeypatch):
    import html
    import json
    import shlex
    from urllib.parse import quote

    import yaml

    monkeypatch.setenv("THE_PASSWORD", f"{secret}\n")
    forms = [secret, repr(secret), json.dumps({"x": secret}), yaml.safe_dump({"x": secret}, width=10**6)]
    forms += [html.escape(secret), quote(secret), quote(secret, safe=""), shlex.join(["a", secret])]
    for form in forms:
        assert "canary" not in mask(f"so: {form}!")
        assert mask(f"so: {form}!").startswith("so: ")
    nested = mask({"a": [secret, (3, secret)], "b": None})
    assert nested["b"] is None and nested["a"][1][0] == 3 and "canary" not in str(nested)


@pytest.mark.parametrize("text", TYPED.values())
def test_a_typed_secret_is_known_by_its_form(text, monkeypatch):
    monkeypatch.setenv("ONE_CANARY_KEY", ENVIRONMENT["ONE_CANARY_KEY"])
    assert "canary" not in mask(f"is {text} it?")
    error = ConfigError(f"what {text}", f"got {text}", f"fix {text}")
    assert "canary" not in f"{error} {error.problem} {error.got} {error.fix} {errors.described(RuntimeError(text))}"


def test_a_stream_masks_what_is_written_and_is_given_back(monkeypatch):
    monkeypatch.setenv("ONE_CANARY_KEY", ENVIRONMENT["ONE_CANARY_KEY"])
    kept = io.StringIO()
    monkeypatch.setattr(sys, "stdout", kept)
    with masked_streams():
        print("a", ENVIRONMENT["ONE_CANARY_KEY"])
        sys.stdout.write("in two ")
        sys.stdout.writelines(ENVIRONMENT["ONE_CANARY_KEY"][:9])
        sys.stdout.write(ENVIRONMENT["ONE_CANARY_KEY"][9:])
        with masked_streams():
            print("b")
    assert sys.stdout is kept
    assert kept.getvalue() == "a <secret>\nin two <secret>b\n"
