"""Command lines over all verbs: every one ends with a status of its own, and every `try:` leads on (R7)."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from written_runs import Writer

from faults.bench import sizes
from faults.command_lines import Answer, answer, command_lines, followed, only_checks, refused_again, written_folder
from nexus_ablate import cli
from nexus_ablate.errors import ALIVE, BUG, CHECKPOINT, CONFIG, OK, STORAGE, ConfigError
from nexus_ablate.runs import files

STATUSES = {None, OK, CONFIG, CHECKPOINT, STORAGE, ALIVE}
"""None: it would have begun to train or to measure."""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, in which no command trains, measures or asks a server."""
    only_checks(monkeypatch)
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def faults(steps: list[tuple[list[str], Answer]]) -> list[str]:
    """What is wrong with the answers to a command and to what each `try:` says."""
    wrong = [f"{command}: {done.said[-500:]}" for command, done in steps if "Traceback" in done.said]
    wrong += [f"{command}: status {done.status}" for command, done in steps if done.status not in STATUSES]
    wrong += [
        f"{command}: {len(done.error)} lines"
        for command, done in steps
        if done.status == CONFIG and len(done.error) != 3
    ]
    return wrong + [f"{steps[0][0]}: `try: {fix}` was refused" for fix in refused_again(steps)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of wandb's process, which ends late
@sizes(120, 400)
def test_every_command_line_is_answered_and_what_it_says_to_try_leads_on(counted, count, folder):
    written_folder(folder)
    bad, statuses, tried = [], Counter(), 0
    for command in itertools.islice(command_lines(seed=count), count):
        steps = followed(command)
        bad += faults(steps)
        statuses[steps[0][1].status] += 1
        tried += len(steps) - 1
    assert not bad, "\n".join(bad)
    refused, begun = statuses[CONFIG], statuses[OK] + statuses[None]
    counted(f"{count} commands: {refused} refused, {begun} accepted; {tried} suggestions typed, 0 refused again")


def test_control_a_suggestion_that_is_refused_and_a_traceback_are_noticed(folder, monkeypatch):
    def refuse(arguments: list[str]) -> int:
        raise ConfigError("norm is wrong", "norm=x", "norm=y")

    monkeypatch.setattr(cli, "_run", refuse)
    assert "`try: norm=y` was refused" in faults(followed(["norm=x"]))[0]
    monkeypatch.setattr(cli, "_run", lambda arguments: 1 / 0)
    assert "ZeroDivisionError" in faults(followed(["norm=x"]))[0] and answer([]).status == BUG


# ------------------------------------------------------------------------------------------------------------- URLs


URL = "s3://user:hunter22@bucket/x.txt"
KEYS = ("runs_dir", "data.files", "data.tokenizer", "data.path", "norm", "experiment", "preset", "init.run")


@pytest.mark.parametrize(
    "line",
    [f"name: {URL}", f"runs_dir: {URL}", f"baseline: [data=files, 'data.files=[{URL}]']", f"arms: {{far: '{URL}'}}"],
)
@pytest.mark.parametrize("verb", ["plan", "study"])
def test_a_url_in_a_study_s_file_is_masked(folder, verb, line):
    lines = {"question": "question: is it?", "arms": "arms: {layer: norm=layer}"} | {line.partition(":")[0]: line}
    (folder / "mine.yaml").write_text("\n".join(lines.values()))
    done = answer([verb, "mine.yaml"])
    assert done.status == CONFIG and len(done.error) == 3 and "hunter22" not in done.said
    assert [path.name for path in folder.iterdir()] == ["mine.yaml"]


def test_a_url_in_the_environment_is_refused_as_the_cache(folder, monkeypatch):
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", URL)
    done = answer(["plan", "first_look"])
    assert done.status == CONFIG and "hunter22" not in done.said and not list(folder.iterdir())


def test_a_run_that_python_starts_makes_no_folder_of_a_url(tmp_path, tiny_run, monkeypatch):
    """Nor does a command whose arguments nobody has checked; without either check, `s3:` is made."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    from nexus_ablate import compose, train

    overrides = [*tiny_run("train.steps=1"), f"runs_dir={URL}"]
    with pytest.raises(ConfigError, match="a URL is not a folder"):
        train(compose(overrides))
    done = answer(overrides)
    assert done.status == CONFIG and "s3:/<secret>@bucket" in done.said and not list(folder.iterdir())
    monkeypatch.setattr(files, "_SCHEME", re.compile("(?!)"))
    assert answer(overrides).status == OK and [path.name for path in folder.iterdir()] == ["s3:"]


# ------------------------------------------------------------------------------------------------------- names of files


NAME = "$(touch canary)`touch canary`;touch canary; x"


def suggestions(said: str) -> list[str]:
    """What an answer says to type: its `try:` lines, and commands in other sentences."""
    lines = [line for line in said.splitlines() if not line.startswith("  got: ")]
    found = [line.removeprefix("  try: ") for line in lines if line.startswith("  try: ")]
    found += re.findall(r"`(nexus-ablate [^`]+)`|next +(nexus-ablate .*)", "\n".join(lines))
    words = (text if isinstance(text, str) else "".join(text) for text in found)
    commands = r"(nexus-ablate|chmod|mkdir|ls|mv|rm|--[a-z]|[\w.]+=)"
    return [
        text if re.match(r"[a-z]+ ", text) else f"nexus-ablate {text}" for text in words if re.match(commands, text)
    ]


def commands_with_a_name() -> list[list[str]]:
    """Verbs that take a path, on folders and files that are called as a shell would execute."""
    paths = [NAME, f"{NAME}/{NAME}", f"{NAME}/{NAME}/baseline", f"{NAME}.csv", f"{NAME}.yaml", f"{NAME}/nothing"]
    verbs = ("status", "compare", "show", "evaluate", "sync", "sample", "import", "judge", "study", "plan", "doctor")
    commands = [[verb, *[path] * times] for verb in verbs for path in paths for times in (1, 2, 3)]
    for path in paths:
        commands += [["dashboard", path], ["dashboard", path, "--json", "-"]]
        commands += [["compare", path, "--html", f"{NAME}/nothing/x.html"], ["compare", path, "--html", NAME]]
        commands += [["compare", path, "--html", f"{NAME}.csv"], ["status", path, "--json"]]
        commands += [["show", path, "--out", f"{NAME}/nothing/x.png"], ["show", path, "--out", f"{NAME}.csv"]]
    return commands + [[f"{key}={NAME}"] for key in KEYS] + [["study", f"experiment={NAME}"]]


def executed(commands: list[list[str]], folder: Path) -> list[str]:
    """The suggestions that a shell, given them as they are printed, would take for more than names."""
    tools = folder.parent / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("nexus-ablate", "chmod", "mkdir", "ls", "mv", "rm"):
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    hits = []
    for command in commands:
        for text in {text for text in suggestions(answer(command).said) if "touch" in text}:
            environment = {"PATH": f"{tools}:{os.environ['PATH']}"}
            subprocess.run(["bash", "-c", text], cwd=tools, env=environment, capture_output=True, check=False)
            if (tools / "canary").exists():
                hits.append(text)
                (tools / "canary").unlink()
    return hits


@pytest.mark.slow
def test_no_name_of_a_folder_runs_in_a_command_that_is_suggested(folder, counted, monkeypatch):
    """As a control, without quotes, some do."""
    writer = Writer(folder / NAME, NAME)
    writer.arm(losses=[2.0, 2.1])
    writer.plan(("norm=layer",))
    (folder / f"{NAME}.csv").write_text("arm,seed,val_loss\nbaseline,0,2.0\n")
    (folder / f"{NAME}.yaml").write_text("question: is it?\narms: {layer: norm=layr}\n")
    commands = commands_with_a_name()
    assert not executed(commands, folder)
    monkeypatch.setattr("shlex.quote", str)
    hits = executed([["sample", NAME], ["judge", NAME, NAME]], folder)
    assert len(hits) == 2
    counted(f"{len(commands)} commands, 0 names that a shell runs")
