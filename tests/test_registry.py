import inspect
from importlib import import_module
from typing import Any

import pytest

from nexus_ablate.config.options import (
    AXES,
    COMMON_KEYS,
    Registry,
    option_files,
)
from nexus_ablate.config.run_config import OPTION_GROUPS
from nexus_ablate.data import DATA
from nexus_ablate.data.cache import TOKENIZER_KEYS
from nexus_ablate.measure.evaluation import EVALUATION
from nexus_ablate.mixers import MIXER
from nexus_ablate.optimizers import OPTIM

REGISTRIES: dict[str, Registry[Any]] = {"mixer": MIXER, "data": DATA, "evaluation": EVALUATION, "optim": OPTIM} | {
    axis: getattr(import_module(f"nexus_ablate.axes.{axis}"), axis.upper()) for axis in AXES
}


@pytest.mark.parametrize("axis", REGISTRIES)
def test_every_yaml_has_a_class_whose_keyword_only_arguments_are_its_keys_without_a_default(axis):
    registry, files = REGISTRIES[axis], {name: file for name, file in option_files(axis).items() if name != "auto"}
    assert set(registry.names()) == set(files)
    for name, file in files.items():
        common = {*COMMON_KEYS.get(axis, {}), *(TOKENIZER_KEYS if axis == "data" else ())}
        assert registry.keys_of(name) - common == file.keys.keys() - common, name
        parameters = inspect.signature(registry.get(name)).parameters.values()
        assert not [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty], name


@pytest.mark.parametrize("axis", OPTION_GROUPS)
def test_every_option_says_what_it_is_and_what_its_keys_mean(axis):
    for option in option_files(axis).values():
        assert len(option.summary) > 20
        assert all(key.meaning for key in option.keys.values()), option.name


@pytest.mark.parametrize("axis", AXES)
def test_every_architecture_option_names_its_source(axis):
    plain = ("none", "auto", "checkpoint")
    for option in option_files(axis).values():
        assert option.name in plain or any(c.isdigit() for c in option.summary), f"{axis}={option.name} cites nothing"
