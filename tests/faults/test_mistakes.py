"""A malformed command: exit 2, at most three lines that name key and value, no directory, no traceback (R7)."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections import Counter

import pytest
from hydra_composition import composed_by_hydra

from faults.bench import sizes
from faults.mistakes import KINDS, Mistake, mistakes
from nexus_ablate.cli import main
from nexus_ablate.config.compose import compose
from nexus_ablate.errors import ConfigError
from nexus_ablate.runs import read_run


def refusal(mistake: Mistake) -> ConfigError | None:
    """The error; None where the command was taken for a run. Anything else is raised."""
    try:
        compose(list(mistake.overrides))
    except ConfigError as error:
        return error
    return None


@sizes(120, 2000)
def test_every_mistake_is_refused_in_three_lines_that_name_it(counted, count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    suggested = rightly = 0
    seen: Counter[str] = Counter()
    for mistake in itertools.islice(mistakes(seed=count), count):
        error = refusal(mistake)
        assert error is not None, mistake
        lines = error.lines()
        assert 1 <= len(lines) <= 3, mistake
        text = "\n".join(lines)
        assert len(text) < 1500 and all(line.isprintable() for line in lines), mistake
        assert "Traceback" not in text
        assert [name for name in mistake.names if name not in text] == [], (mistake, text)
        seen[mistake.kind] += 1
        if mistake.meant:
            suggested += 1
            rightly += mistake.meant.rpartition(".")[2] in error.fix
    assert set(seen) == set(KINDS)
    assert list(tmp_path.iterdir()) == []
    assert rightly >= 0.95 * suggested
    counted(f"{count} of {count} refused with status 2, {rightly} of {suggested} suggestions right")


def tried(mistake: Mistake, fix: str) -> ConfigError | None:
    """What comes of a mistake's `try:` where it is overrides; None where it is advice in words, or works."""
    words = shlex.split(fix.removeprefix("nexus-ablate ")) if fix.count("'") % 2 == 0 else [fix]
    if not all(re.fullmatch(r"[\w./]+=\S*", word) for word in words):
        return None
    keys = {word.partition("=")[0] for word in words}
    others = [word for word in mistake.overrides[:-1] if word.partition("=")[0] not in keys]
    return refusal(Mistake("tried", (*others, *words), ()))


@sizes(120, 1200)
def test_what_a_refusal_says_to_try_is_not_refused_itself(counted, count, tmp_path, monkeypatch):
    """Except where the option that was meant needs a package, or another choice, whose refusal names one that works."""
    monkeypatch.chdir(tmp_path)
    again = 0
    for mistake in itertools.islice(mistakes(seed=count + 1), count):
        error = refusal(mistake)
        assert error is not None
        second = tried(mistake, error.fix)
        if second is None or "needs the package" in second.problem:
            continue
        again += 1
        is_value_as_typed = mistake.kind in ("key typo", "added key")  # which the key that was meant may refuse
        is_of_another = re.search("contradict each other|cannot have", second.problem)
        assert is_value_as_typed or is_of_another, (mistake, error.fix, second)
        third = tried(Mistake("", (*mistake.overrides[:-1], error.fix, ""), ()), second.fix)
        assert third is None or "has no key" in third.problem, (mistake, second, third)  # a key of what was replaced
    counted(f"{count} mistakes, {again} whose `try:` needs another choice")


REFUSED = (
    "norm.shift=''", "norm=derf norm.shift=''", "position=t5 position.max_distance=0", "optim.beta1=interval(0,1)",
    "evals=''", "evals=", "model.d_model=On", "model.n_heads=-1", "value=embedding value.own=null",
)  # fmt: skip


@pytest.mark.parametrize("typed", REFUSED)
def test_the_suggestion_for_a_value_can_be_typed(typed):
    overrides = tuple(typed.replace("''", "").split())
    error = refusal(Mistake("", overrides, ()))
    assert error is not None
    assert tried(Mistake("", overrides, ()), error.fix) is None, error.fix


@pytest.mark.parametrize("verb", ["explain", "plan first_look", "bench norm", "train"])
def test_a_model_that_fits_no_memory_is_three_lines_and_no_result(verb, capsys, tmp_path, monkeypatch):
    """Only `train` leaves a folder, of a run that failed."""
    monkeypatch.chdir(tmp_path)
    assert main([*verb.split(), "vocab_size=1000000000"]) == 2
    said = capsys.readouterr().err
    assert [line.split(":")[0] for line in said.splitlines()[-3:]] == ["error", "  got", "  try"]
    assert " memory" in said.splitlines()[-3] and "Traceback" not in said
    states = [read_run(file.parent).state for file in tmp_path.rglob("status.json")]
    assert states == ["failed"] * (verb == "train")


@pytest.mark.slow
def test_as_a_process_a_mistake_ends_with_2_in_under_three_seconds_and_makes_no_directory(tmp_path, counted):
    made = {mistake.kind: mistake for mistake in itertools.islice(mistakes(seed=5), 60)}
    del made["type"], made["range"], made["missing"], made["duplicate"], made["added key"]  # as the others in kind
    for mistake in made.values():
        before = os.times()
        command = [sys.executable, "-m", "nexus_ablate", *mistake.overrides]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
        now = os.times()  # of the processor, which others may keep busy
        assert now.children_user + now.children_system - before.children_user - before.children_system < 3, mistake
        assert done.returncode == 2, (mistake, done.stderr)
        assert 1 <= len(done.stderr.splitlines()) <= 3, (mistake, done.stderr)
        assert "Traceback" not in done.stderr
        assert list(tmp_path.iterdir()) == []
    counted(f"{len(made)} of {len(made)} as processes")


def test_control_without_our_check_hydra_takes_added_keys_and_misspelt_ones_of_its_own():
    for override in ("+x=1", "+hydra.ouput_subdir=null"):
        assert composed_by_hydra([override])
        assert refusal(Mistake("", (override,), ())) is not None
