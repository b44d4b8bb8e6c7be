"""The shell completes what can be typed, and never shows an error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from written_runs import Writer

from nexus_ablate.cli import main
from nexus_ablate.cli.completion import LINE, SCRIPTS, candidates
from nexus_ablate.cli.verb import all_verbs


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with two studies and the runs of one."""
    monkeypatch.chdir(tmp_path)
    writer = Writer(tmp_path / "runs", "mine")
    writer.arm("norm=layer", losses=[2.0])
    writer.plan(("norm=layer",))
    (tmp_path / "yours.yaml").write_text("question: which?\n")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("st", ["status", "study"]),
        ("norm=rms_", ["norm=rms_outside", "norm=rms_zero"]),
        ("placement=post norm=rms_z", ["norm=rms_zero"]),
        ("train.st", ["train.steps="]),
        ("position=rope_yarn position.fac", ["position.factor="]),
        ("-m position=rope,rope_yarn position.at", ["position.attention_factor="]),
        ("explain preset=gpt_oss ffn.al", ["ffn.alpha="]),
        ("position=rope_yarn position.truncate=", ["position.truncate=off", "position.truncate=on"]),
        ("position=nonsense ffn.al", []),
        ("train.compile=gr", ["train.compile=graphs"]),
        ("explain optim.dec", ["optim.decay=", "optim.decay_mode="]),
        ("study first", ["first_look"]),
        ("plan mi", ["mine"]),
        ("study yo", ["yours.yaml"]),
        ("study norms train.prec", ["train.precision="]),
        ("confirm mine --se", ["--seeds"]),
        ("compare runs --h", ["--help", "--html"]),
        ("compare ru", ["runs/"]),
        ("show runs/mine/", ["runs/mine/norm=layer/"]),
        ("list qk", ["qk_norm"]),
        ("bench co", ["coordinates"]),
        ("completion z", ["zsh"]),
        ("compare --nonsense", []),
        ("show /no/such/", []),
        ("norm=${", []),
        ("data.files=[", []),
    ],
)
def test_a_line_is_completed(desk, line, expected):
    assert candidates(f"nexus-ablate {line}") == expected


def test_every_verb_and_every_flag_is_completed(desk):
    for verb in all_verbs():
        assert verb.name in candidates(f"nexus-ablate {verb.name}")
        for flag in verb.flags:
            assert flag.name in candidates(f"nexus-ablate {verb.name} {flag.name}")


@pytest.mark.parametrize(
    "line", ["", "nexus-ablate ", "nexus-ablate 'x", "nexus-ablate --plugin /no/such ", "\x00", "norm"]
)
def test_a_line_that_is_no_command_is_no_error(desk, line, capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy() | {LINE: line})
    assert main(["completion", "words"]) == 0
    assert capsys.readouterr().err == ""


def test_completing_imports_neither_torch_nor_hydra():
    code = (
        "import sys\nfrom nexus_ablate.cli import main\nassert main(['completion', 'words']) == 0\n"
        "assert not {'torch', 'hydra', 'wandb', 'scipy', 'matplotlib', 'datasets'} & set(sys.modules)"
    )
    environ = os.environ | {LINE: "nexus-ablate norm=rms_z"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "norm=rms_zero\n", "")


@pytest.mark.parametrize(
    ("line", "typed", "expected"),
    [("norm=rms_", "rms_", {"rms_outside", "rms_zero"}), ("stud", "stud", {"study"}), ("--plug", "--plug", set())],
)
def test_the_script_for_bash_completes_after_the_part_that_readline_keeps(line, typed, expected, tmp_path):
    program = tmp_path / "nexus-ablate"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m nexus_ablate "$@"\n')
    program.chmod(0o755)
    line = f"nexus-ablate {line}"
    call = f"COMP_LINE='{line}' COMP_POINT={len(line)}\n_nexus_ablate\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    script = f"{SCRIPTS['bash']}\n{call}"
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environ)
    assert set(done.stdout.split()) == expected, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_of_a_shell_is_printed(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "nexus-ablate completion words" in capsys.readouterr().out


def test_another_shell_is_an_error_that_names_those_there_are(capsys):
    assert main(["completion", "bsh"]) == 2
    assert capsys.readouterr().err.splitlines()[2] == "  try: completion bash"
