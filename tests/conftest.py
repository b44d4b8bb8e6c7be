"""Fixtures: tiny configurations, and one thread for everything."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: parallel tests of several threads starve each other
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's job in the background hands this on to its children
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from checkouts import Checkout

from nexus_ablate import provenance
from nexus_ablate.config.compose import compose
from nexus_ablate.launch import cost
from nexus_ablate.provenance import source_hashes
from nexus_ablate.runs import find_runs
from nexus_ablate.training.session import train

torch.set_num_threads(1)
cost.MEASURED_SECONDS = 0.01  # of training, from which a plan tells how long a study takes: a second elsewhere

OUTSIDE_SAMPLE = "not in this sample: its minutes are over"

TINY = ("model.n_layers=2", "model.d_model=16", "model.n_heads=2", "model.context=8", "optim.lr=3e-3")
"""Overrides of a model that trains a step in a millisecond."""


@pytest.fixture
def tiny():
    """A tiny configuration with further overrides."""
    return lambda *overrides: compose([*TINY, *overrides])


@pytest.fixture
def text_file(tmp_path):
    """A small text that a model can learn something from."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog.\n" * 200, encoding="utf-8")
    return path


@pytest.fixture
def tiny_run(tmp_path, text_file, monkeypatch):
    """Overrides of a run of a few seconds that keeps to its own folder."""
    monkeypatch.setenv("NEXUS_ABLATE_CACHE", str(tmp_path / "cache"))

    def make(*overrides: str) -> list[str]:
        return [
            *TINY,
            "data=files",
            f"data.files=[{text_file}]",
            f"runs_dir={tmp_path / 'runs'}",
            "tracker=files",
            "train.device=cpu",
            "train.threads=1",
            "train.steps=20",
            "train.batch_size=4",
            "train.eval_every=10",
            "train.eval_tokens=64",
            "train.checkpoint_every=5",
            "train.log_every=1",
            "optim.warmup=2",
            *overrides,
        ]

    return make


@pytest.fixture(scope="session")
def kept_runs(tmp_path_factory):
    """Folders of finished runs by their overrides."""
    return defaultdict(lambda: tmp_path_factory.mktemp("kept"))


@pytest.fixture
def finished_run(tiny_run, tmp_path, kept_runs):
    """The directory of a finished run in `runs`: a copy of one that all tests share, with its text."""

    def make(*overrides: str) -> Path:
        kept = kept_runs[overrides]
        if not find_runs([kept]):
            train(compose(tiny_run(*overrides, f"runs_dir={kept}")), quiet=True)
        shutil.copytree(kept, tmp_path / "runs", dirs_exist_ok=True)
        return tmp_path / "runs" / find_runs([kept])[0].relative_to(kept)

    return make


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """This process's code as one that can be edited: its hashes follow the edits, what is computed does not."""
    source_hashes.cache_clear()
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "checkout" / "nexus_ablate")
    yield Checkout(tmp_path / "checkout")
    source_hashes.cache_clear()


@pytest.fixture
def instant(monkeypatch):
    """Studies whose runs end at once, without training."""
    from instant_runs import Instant

    from nexus_ablate.launch.local import LocalPool

    made = Instant()
    monkeypatch.setattr(LocalPool, "run", lambda _, jobs, progress: made.run(jobs, progress))
    return made


@pytest.fixture
def forked_workers(monkeypatch):
    """Worker processes that are forked from this one: they begin at once, where others import torch for seconds."""
    from nexus_ablate.launch import local

    forking, ends = multiprocessing.get_context("fork"), []
    lock = threading.Lock()  # a process forked while `pipe` runs would keep the new one open and never know

    def pipe():
        with lock:
            ends.append(forking.Pipe())
            return ends[-1]

    def work(*arguments):
        for ours, _ in ends:
            ours.close()  # or this process would keep the pipe open that it reads from
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))  # not pytest's own
        local.work(*arguments)

    class Process(forking.Process):
        def __init__(self, target, **options):
            super().__init__(target=work, **options)

        def start(self):
            with lock:
                super().start()

    monkeypatch.setattr(local, "get_context", lambda _: SimpleNamespace(Pipe=pipe, Process=Process))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        yield


@pytest.fixture
def counted(record_property, request):
    """A function that keeps a line for the end of the session: `200 kills of 200 recovered`."""
    return lambda line: record_property("counted", f"{request.node.name}: {line}")


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, help="a sample: tests in an order of the commit's own, as time allows")


def pytest_collection_modifyitems(config, items):
    if config.getoption("minutes") is not None:
        head = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(head, capture_output=True, check=False).stdout  # outside of git, one order for all
        items.sort(key=lambda item: hashlib.sha256(commit + item.nodeid.encode()).digest())
        config.sample_ends = time.monotonic() + 60 * config.getoption("minutes")


def pytest_runtest_setup(item):
    if time.monotonic() > getattr(item.config, "sample_ends", float("inf")):
        pytest.skip(OUTSIDE_SAMPLE)


def pytest_terminal_summary(terminalreporter):
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    calls = [report for report in reports if getattr(report, "when", "") == "call"]
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    if outside := sum(OUTSIDE_SAMPLE in reason for reason in skipped):
        terminalreporter.section(f"a sample of the tests: {outside} were left out")
    lines = [text for report in calls for name, text in report.user_properties if name == "counted"]
    if lines:
        terminalreporter.section("counted")
        for line in lines:
            terminalreporter.write_line(line)
