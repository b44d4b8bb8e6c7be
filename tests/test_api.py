"""The public names of the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nexus_ablate


@pytest.mark.parametrize("name", nexus_ablate.__all__)
def test_every_public_name_is_there(name):
    assert getattr(nexus_ablate, name)


def test_public_functions_stay_functions_whatever_was_imported_before():
    code = (
        "import nexus_ablate.training.session, nexus_ablate.comparison.load, nexus_ablate.config.compose\n"
        "from nexus_ablate import build_model, compose, load_run, train\n"
        "assert all(callable(f) for f in (build_model, compose, load_run, train))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_the_package_imports_nothing_slow():
    code = "import sys, nexus_ablate; assert not {'torch', 'numpy', 'hydra', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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
