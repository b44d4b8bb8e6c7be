"""The public names of the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nexus_ablate
from nexus_ablate.errors import UserError


@pytest.mark.parametrize("name", nexus_ablate.__all__)
def test_every_public_name_is_there(name):
    assert getattr(nexus_ablate, name)


def test_a_comparison_of_no_folders_is_refused():
    with pytest.raises(UserError, match="there is nothing to compare"):
        nexus_ablate.compare([])


PROGRAM = """
import sys
import nexus_ablate.training.session, nexus_ablate.comparison.read, nexus_ablate.config.compose
from nexus_ablate import build_model, compose, load_run, train
assert all(callable(f) for f in (build_model, compose, load_run, train))

import torch
from nexus_ablate.cli import main
from nexus_ablate.optimizers import build_optimizer
assert main(["explain", "--json"]) == 0
config = compose(["model.n_layers=1", "model.d_model=8", "model.n_heads=1", "model.context=8"])
model = build_model(config)
optimizer = build_optimizer(model, config.optim, 0.1)
model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
optimizer.step()
assert not {"torch._dynamo", "sympy"} & set(sys.modules)
"""


def test_public_functions_stay_functions_and_neither_explain_nor_a_step_imports_the_compiler():
    """torch._dynamo and sympy cost as much as torch itself, two seconds of every start."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        _ = nexus_ablate.nothing


def test_the_readme_s_python_runs(tiny_run):
    import torch

    from nexus_ablate import build_model, compose, load_run, train

    config = compose(tiny_run("norm=layer"))
    logits_BTV = build_model(config, vocab_size=256)(torch.zeros(1, 4, dtype=torch.long))
    assert logits_BTV.shape == (1, 4, 256)
    outcome = train(config, quiet=True)
    assert load_run(outcome.path).metrics()[-1]["step"] == 20
