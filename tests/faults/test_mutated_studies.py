"""No mutation of a study's files ends or stalls a verb that reads it: a damaged run is excluded, the rest is judged."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import written_runs
import yaml
from written_runs import Writer

from faults.payloads import PICKLE, YAML
from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.launch.arm_configs import resolve
from nexus_ablate.launch.jobs import jobs
from nexus_ablate.launch.local import LocalPool
from nexus_ablate.provenance import source_hash, source_hashes
from nexus_ablate.study.record import load, save

LIMIT_SECONDS = 10.0
"""Of CPU time for a verb; it may wait for the CPU six times as long."""
STUDY = "study"
HUGE = 10**400
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1e308, -1e308, 5e-324, HUGE, -HUGE, 2**63, 10**15),
    *("", "text", "2.0", "NaN", "\x1b[31m\r\n\0", "x" * 100_000, "2020-01-01", "9999-12-31T23:59:59+00:00"),
    *([], [[]], [None], ["text"], [1, "2"], [HUGE], {}, {"a": HUGE}, {"": []}, [[[[[[[[1]]]]]]]]),
)
"""What a value of a file may become."""
TEXTS = (
    *(b"", b"\n", b"[]", b"{}", b"null", b"NaN", b"1e999", b"\0" * 100, b"\xff\xfe\x00", b"[" * 50_000, b"9" * 6000),
    *(b"{" * 900 + b"}" * 900, b'{"a":' * 990 + b"1" + b"}" * 990, PICKLE, b"[" * 900 + b"]" * 900, b"{}" * 1000),
    *(text.encode() for text in YAML.values()),
)
"""What a whole file may become."""
RUN_FILES = (
    *("status.json", "summary.json", "env.json", "config.yaml", "metrics.jsonl", "probes.jsonl", "evaluation.jsonl"),
    *("init.json", "wandb.json", "overrides.txt"),
)
FIGURES = {
    **{"best_val_loss": 2.0, "seconds_eval": 1.0, "seconds_probe": 1.0, "seconds_checkpoint": 1.0},
    **{"act/resid/max_over_median": 40.0, "act/resid/max_abs": 9.0, "attn/sink_rate": 0.2, "attn/entropy": 0.5},
    "attn/first_token_mass": 0.3,
    "onsets": {"attn/sink_rate": {"step": 20, "tokens": 640}},
    "extrapolation": {"non_overlapping": {"1": 2.0}, "sliding": {"1": 2.1}, "not_defined": {"8": "the text is short"}},
    "streaming": {"kept_tokens": 4, "loss_kept": 2.0, "loss_dropped": 2.5, "difference": 0.5},
    "quantization": {"loss": 2.0, "schemes": {"int8": {"loss": 2.1, "gap": 0.1}, "int4": {"loss": 3, "gap": 1}}}
    | {"gap_by_block": [0.1, 0.2], "worst_block": 1},
    "intervention": {
        name: {"loss": 2.0, "attn/first_token_mass": 0.1, "act/resid/max_over_median": 3.0}
        for name in ("before", "massive_zero", "sink_zero")
    },
}


class TooLong(BaseException):
    """A verb took more than LIMIT_SECONDS."""


@pytest.fixture
def template(tmp_path, monkeypatch) -> Path:
    """The folder of a study of two arms and two seeds that every verb can read."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog.\n" * 60)
    data = ("data=files", f"data.files=[{text}]", "data.tokenizer=char")
    monkeypatch.setattr(written_runs, "TINY", (*written_runs.TINY, *data))
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path / "cache"))
    written_runs.config_of.cache_clear()
    monkeypatch.setattr(LocalPool, "run", lambda *_: "")
    monkeypatch.setattr("nexus_ablate.track.upload.begin", lambda settings, config: Mirror())
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    writer = Writer(tmp_path / "template", STUDY, steps=40)
    code = {"source": source_hashes()}
    writer.arm(losses=[2.0, 2.02], summary=FIGURES, env=code)
    writer.arm("norm=layer", losses=[1.9, 1.93], summary=FIGURES, env=code)
    for path in writer.paths:
        (path / "wandb.json").write_text(json.dumps({"id": "a1", "project": "nexus", "entity": None}))
    writer.plan(
        ("norm=layer",),
        **{"baseline": list(written_runs.TINY), "seeds": [0, 1], "added_seeds": [1], "source": source_hash()},
        **{"equal": {"norm=rms": "baseline"}, "refused": {"norm=t5 norm_bias=on": "norm=t5 has no bias"}},
    )
    study, configs = resolve(load(writer.root / STUDY), [])
    save(study, writer.root / STUDY)
    for job in jobs(study, configs, writer.root, []):  # under the names that these runs have in today's code
        (path,) = job.path.parent.glob(f"s{job.seed}-*")
        env = json.loads((path / "env.json").read_text())
        (path / "env.json").write_text(json.dumps(env | {"run_hash": job.path.name.partition("-")[2]}))
        path.rename(job.path)
    yield writer.root / STUDY
    written_runs.config_of.cache_clear()


class Mirror:
    """Takes the place of a W&B run: takes everything, as W&B does."""

    id, project, url, starting_step, entity = "a1", "nexus", "", 0, None

    def __init__(self) -> None:
        self.summary: dict[str, Any] = {}

    def log(self, numbers: dict[str, Any], step: int | None = None) -> None:
        assert all(isinstance(value, int | float) for value in numbers.values()) or step is None

    def define_metric(self, *_: Any, **__: Any) -> None: ...
    def finish(self, *_: Any, **__: Any) -> None: ...
    def mark_preempting(self) -> None: ...


# ------------------------------------------------------------------------------------------------------- mutations


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from places(item, (*at, key))


def changed(document: Any, draw: random.Random) -> tuple[Any, str]:
    """A document with one value replaced or removed."""
    way = draw.choice(list(places(document)))
    inside = document
    for key in way[:-1]:
        inside = inside[key]
    name = "/".join(map(str, way))
    if isinstance(inside, dict) and draw.random() < 0.15:
        del inside[way[-1]]
        return document, f"{name} removed"
    inside[way[-1]] = value = draw.choice(VALUES)
    return document, f"{name} = {value!r:.40}"


def mutate_value(file: Path, draw: random.Random) -> str:
    """Change one value and leave the rest of the file well-formed."""
    text = file.read_text()
    if file.suffix == ".yaml":
        document, change = changed(yaml.safe_load(text), draw)
        file.write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=False))
    elif file.suffix == ".json":
        document, change = changed(json.loads(text), draw)
        file.write_text(json.dumps(document))
    elif file.suffix == ".jsonl":
        rows = text.splitlines()
        number = draw.choice([0, -1, draw.randrange(len(rows))])
        row, change = changed(json.loads(rows[number]), draw)
        rows[number] = json.dumps(row)
        file.write_text("\n".join(rows) + "\n")
    else:
        file.write_text(change := draw.choice([str(value) for value in VALUES]))
    return f"{file.name}: {change}"


def mutate_file(file: Path, draw: random.Random) -> str:
    """Put something else in the place of a file."""
    data = file.read_bytes()
    ways: dict[str, Callable[[], object]] = {
        "cut": lambda: os.truncate(file, draw.randrange(max(len(data), 1))),
        "replaced": lambda: file.write_bytes(draw.choice(TEXTS)),
        "removed": file.unlink,
        "a directory": lambda: (file.unlink(), file.mkdir()),
        "a pipe": lambda: (file.unlink(), os.mkfifo(file)),
        "a link to itself": lambda: (file.unlink(), file.symlink_to(file)),
        "doubled": lambda: file.write_bytes(data + data),
    }
    way = draw.choice(sorted(ways) + ["replaced"] * 4)
    ways[way]()
    return f"{file.name} {way}"


def mutated(template: Path, root: Path, number: int) -> tuple[Path, str]:
    """A copy of the study with a few mutations, of one run or of study.yaml."""
    draw = random.Random(number)
    study = root / str(number) / STUDY
    shutil.copytree(template, study)
    if number % 4 == 3:
        files = [study / "study.yaml"]
    else:
        run = draw.choice(sorted(path.parent for path in study.glob("*/*/status.json")))
        files = [run / RUN_FILES[number % len(RUN_FILES)]]
    mutations = [mutate_value(file, draw) if draw.random() < 0.7 else mutate_file(file, draw) for file in files]
    return study, f"{files[0].relative_to(study).parent}: {'; '.join(mutations)}"


# ----------------------------------------------------------------------------------------------------------- verbs


def commands(study: Path) -> dict[str, list[str]]:
    """Every verb that reads a study, those that write to it last."""
    run = next((path for path in sorted(study.glob("*/*")) if is_changed(path, study)), sorted(study.glob("*/*"))[0])
    out = study.parent
    place = f"runs_dir={study.parent}"
    return {
        "status": ["status", str(study.parent)],
        "compare": ["compare", str(study), "--html", f"{out}/report.html", "--json", f"{out}/report.json"],
        "show": ["show", str(run), "--out", f"{out}/picture.svg"],
        "evaluate": ["evaluate", str(study)],
        "sync": ["sync", str(study)],
        "plan": ["plan", STUDY, place],
        "study": ["study", STUDY, place, "--workers", "1"],
        "add-seeds": ["study", STUDY, "--add-seeds", "1", place, "--workers", "1"],
    }


def is_changed(path: Path, study: Path) -> bool:
    """Whether a run was mutated, so that `show` is asked for it."""
    original = study.parents[2] / "template" / STUDY / path.relative_to(study)
    names = {file.name for file in (*path.iterdir(), *original.iterdir()) if file.name != "checkpoints"}
    return any(contents(path / name) != contents(original / name) for name in names)


def contents(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() and not file.is_symlink() else b""


def answer(command: list[str]) -> tuple[int, str]:
    """Exit status and output of a verb in this process; -1 where it takes longer than LIMIT_SECONDS."""
    said, stalled = io.StringIO(), []

    def over(*_: object) -> None:
        stalled.append(True)
        raise TooLong

    before = {number: signal.signal(number, over) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.setitimer(signal.ITIMER_REAL, 6 * LIMIT_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = main(command)
        return -1 if stalled else status, said.getvalue()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def failures(template: Path, root: Path, numbers: range, verbs: tuple[str, ...]) -> tuple[list[str], int]:
    """What went wrong in any verb of any mutated study, and how many calls were made."""
    bad, calls = [], 0
    for number in numbers:
        study, mutation = mutated(template, root, number)
        for verb, command in commands(study).items():
            if verb not in verbs:
                continue
            calls += 1
            status, said = answer(command)
            if status == -1:
                bad.append(f"{number} {verb} stalled on {mutation}")
            elif "Traceback" in said:
                bad.append(f"{number} {verb} ended in a traceback on {mutation}: {said.strip().splitlines()[-1:]}")
            elif (
                verb not in ("status", "evaluate", "sync")
                and status == errors.CONFIG
                and len(said[said.find("error: ") :].strip().splitlines()) > 3
            ):
                bad.append(f"{number} {verb} said more than three lines on {mutation}: {said}")
            elif verb == "compare" and status == errors.OK:
                bad += uncounted(study, mutation)
        shutil.rmtree(study.parent)
    return bad, calls


def uncounted(study: Path, mutation: str) -> list[str]:
    """What a comparison says otherwise than of the whole study, without a run left out with a reason."""
    (table,) = json.loads((study.parent / "report.json").read_text())["tables"]
    left_out = {Path(out["path"]).name for out in table["left_out"] if out["reason"]}
    used = sum(row.get(f"seed {seed}") is not None for row in table["rows"] for seed in (0, 1))
    if used + len(left_out) < 4:
        return [f"{mutation}: {used} runs used and {len(left_out)} left out of 4"]
    losses = [row.get(f"seed {seed}") for row in table["rows"] for seed in (0, 1)]
    if not left_out and losses != [2.0, 2.02, 1.9, 1.93] and "study.yaml" not in mutation:
        return [f"{mutation}: other losses without a notice: {losses}"]
    return []


READING = ("status", "compare", "show")
WORKING = ("evaluate", "sync", "plan", "study", "add-seeds")


@pytest.mark.slow
def test_no_verb_fails_on_the_study_before_it_is_mutated(template, tmp_path):
    study = tmp_path / "whole" / "0" / STUDY
    shutil.copytree(template, study)
    for verb, command in commands(study).items():
        status, said = answer(command)
        assert status == errors.OK or verb in ("evaluate", "add-seeds"), f"{verb}: {said}"
        assert "Traceback" not in said


@pytest.mark.slow
def test_twelve_mutated_studies_end_no_reading_verb_in_a_traceback(template, tmp_path):
    bad, _ = failures(template, tmp_path / "mutated", range(12), ("status", "compare"))
    assert not bad, "\n".join(bad)


@pytest.mark.slow
@pytest.mark.parametrize(
    "start", [*range(0, 160, 20), *(pytest.param(start, marks=pytest.mark.long) for start in range(160, 300, 20))]
)
def test_no_mutated_study_ends_or_stalls_a_verb_that_reads_it(template, tmp_path, counted, start):
    bad, calls = failures(template, tmp_path / "mutated", range(start, start + 20), READING)
    counted(f"{calls} calls on 20 mutated studies, {len(bad)} tracebacks or stalls")
    assert not bad, "\n".join(bad)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("start", range(160, 320, 20))
def test_no_mutated_study_ends_or_stalls_a_verb_that_continues_it(template, tmp_path, counted, start):
    bad, calls = failures(template, tmp_path / "mutated", range(start, start + 20), ("show", *WORKING))
    counted(f"{calls} calls on 20 mutated studies, {len(bad)} tracebacks or stalls")
    assert not bad, "\n".join(bad)


@pytest.mark.slow
def test_as_processes_they_end_in_time_and_without_a_traceback(template, tmp_path):
    for number in range(1000, 1008):
        study, mutation = mutated(template, tmp_path / "mutated", number)
        for verb in ("status", "compare"):
            command = [sys.executable, "-m", "nexus_ablate", *commands(study)[verb]]
            done = subprocess.run(command, capture_output=True, text=True, timeout=6 * LIMIT_SECONDS, check=False)
            assert done.returncode in (errors.OK, errors.CONFIG), f"{verb} on {mutation}: {done.stderr}"


def test_control_a_verb_that_fails_and_one_that_stalls_are_noticed(template, tmp_path, monkeypatch):
    from nexus_ablate.comparison import read as reading

    def fail(path: Path) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(reading, "read_run", fail)
    assert "traceback" in failures(template, tmp_path / "one", range(1), ("compare",))[0][0]
    monkeypatch.setattr(reading, "read_run", lambda path: time.sleep(60))
    monkeypatch.setattr(sys.modules[__name__], "LIMIT_SECONDS", 0.3)
    assert "stalled" in failures(template, tmp_path / "two", range(1), ("compare",))[0][0]
