"""Sweepers that search: they choose the values of a run from the losses of those before it, as Optuna's does."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from wandb_server import serving_alone

from nexus_ablate import errors
from nexus_ablate.cli import main
from nexus_ablate.runs import find_runs, read_run

SWEEPER = """
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


@dataclass
class Settings:
    _target_: str = "hydra_plugins.halving.Halving"
    tries: int = 3


ConfigStore.instance().store(group="hydra/sweeper", name="halving", node=Settings, provider="test")


class Halving(Sweeper):
    '''Halves the rate as long as the loss gets lower, and keeps the results to itself.'''

    def __init__(self, tries):
        self.tries = tries

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        (searched,) = [text for text in arguments if "interval" in text]
        key, rate, best = searched.partition("=")[0], float(searched.rpartition(",")[2].strip(")")), float("inf")
        for number in range(self.tries):
            words = [*(text for text in arguments if text != searched), f"{key}={rate}"]
            (ended,) = self.launcher.launch([words], initial_job_idx=number)
            if float(ended.return_value) >= best:
                break
            best, rate = float(ended.return_value), rate / 2
"""


def multirun(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    plugins = tmp_path / "plugins" / "hydra_plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    (plugins / "halving.py").write_text(SWEEPER)
    path = os.pathsep.join([str(plugins.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "nexus_ablate", "-m", *words]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)


def trained(tmp_path: Path) -> dict[float, float]:
    """Validation losses by learning rate."""
    runs = map(read_run, find_runs([tmp_path / "runs"]))
    return {run.config["optim"]["lr"]: run.summary["val_loss"] for run in runs if run.config and run.summary}


@pytest.mark.slow
def test_a_sweeper_that_keeps_the_results_gets_each_loss_and_the_end_ranks_the_runs(tiny_run, tmp_path):
    words = [*tiny_run(), "hydra/sweeper=halving", "hydra.sweeper.tries=3"]
    done = multirun(tmp_path, *words, "optim.lr=interval(1e-4,0.02)")
    assert done.returncode == 0, done.stderr
    losses = trained(tmp_path)
    assert set(losses) < {0.02, 0.01, 0.005} and losses[0.01] > losses[0.02], "in twenty steps a lower rate learns less"
    lines = done.stderr.splitlines()
    assert [line.split()[0] for line in lines if re.match(r"optim.lr=\S+ +1 ", line)] == [
        "optim.lr=0.02",
        "optim.lr=0.01",
    ]
    assert "2 of 2 runs finished" in lines


@pytest.mark.slow
def test_a_run_that_fails_is_the_worst_value_for_a_searching_sweeper(tiny_run, tmp_path):
    words = [*tiny_run("train.steps=4"), "hydra/sweeper=halving", "optim.schedule=constant", "optim.clip=off"]
    done = multirun(tmp_path, *words, "optim.lr=interval(1,1e30)")
    assert done.returncode == errors.DIVERGED, done.stderr
    assert "0 of 1 runs finished" in done.stderr, "the first value is infinite, so the next is not lower"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is None,
    reason="hydra-optuna-sweeper is not installed",
)
def test_optuna_minimizes_the_validation_loss(tiny_run, tmp_path):
    words = [*tiny_run("train.steps=4"), "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    done = multirun(tmp_path, *words, "optim.lr=interval(1e-4,1e-2)")
    assert done.returncode == 0, done.stderr
    assert "3 of 3 runs finished" in done.stderr and len(trained(tmp_path)) == 3


def test_an_interval_is_refused_where_nothing_searches_it(capsys):
    assert main(["-m", "optim.lr=interval(1e-4,1e-2)"]) == errors.CONFIG
    assert "a list of values, not an interval" in capsys.readouterr().err


def test_the_ends_of_an_interval_must_be_values_of_the_key(capsys):
    assert main(["-m", "hydra/sweeper=optuna", "optim.lr=interval(-1,1e-2)"]) == errors.CONFIG
    assert "optim.lr takes float (0, inf)" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("hydra_plugins.hydra_ax_sweeper") is not None, reason="it is installed")
def test_a_sweeper_that_is_not_installed_is_refused_with_the_package_to_install(capsys):
    assert main(["-m", "hydra/sweeper=ax", "optim.lr=interval(1e-4,1e-2)"]) == errors.CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and lines[2] == "  try: pip install hydra-ax-sweeper"


@pytest.mark.slow
def test_the_runs_of_a_multirun_have_a_group_on_wandb_and_those_of_an_experiment_have_its_name(
    tiny_run, tmp_path, monkeypatch
):
    with serving_alone(tmp_path, monkeypatch) as server:
        assert main(["-m", *tiny_run("train.steps=4"), "norm=rms,layer", "seed=0,1"]) == 0
        assert main(["-m", *tiny_run("train.steps=4"), "experiment=mine", "norm=rms,layer"]) == 0
        assert main(["sync", "runs"]) == 0
        groups = [(run.config["study"], run.fields["groupName"]) for run in server.runs.values()]
    assert sorted(groups) == [("mine", "mine")] * 2 + [("scratch", "norm=rms,layer")] * 4


def test_rows_survive_what_launchers_do_to_them():
    import pickle

    from nexus_ablate.execution.multirun import RunRow

    assert float(pickle.loads(pickle.dumps(RunRow(val_loss=1.5)))) == 1.5
    assert json.dumps(float(RunRow(why="diverged"))) == "Infinity"


@pytest.mark.slow
def test_an_arm_with_a_list_of_roles_is_named_as_typed(tiny_run, capfd):
    assert main(["-m", *tiny_run(), "train.steps=4", "optim.groups=[],[embedding:lr:0.1]"]) == 0
    assert "optim.groups=[embedding:lr:0.1]" in capfd.readouterr().err
