import inspect
from importlib import import_module
from typing import Any

import pytest

from nexus_ablate.config.options import (
    AXES,
    COMMON_KEYS,
    Option,
    Registry,
    check_option,
    option_files,
    read_option_file,
)
from nexus_ablate.config.run_config import OPTION_GROUPS
from nexus_ablate.errors import ConfigError
from nexus_ablate.mixers import MIXER

REGISTRIES: dict[str, Registry[Any]] = {"mixer": MIXER} | {
    axis: getattr(import_module(f"nexus_ablate.axes.{axis}"), axis.upper()) for axis in AXES
}


@pytest.mark.parametrize("axis", AXES)
def test_every_yaml_has_a_class_whose_keyword_only_arguments_are_its_keys_without_a_default(axis):
    registry, files = REGISTRIES[axis], {name: file for name, file in option_files(axis).items() if name != "auto"}
    assert set(registry.names()) == set(files)
    for name, file in files.items():
        common = COMMON_KEYS.get(axis, {}).keys()
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


def test_a_name_is_registered_once():
    registry: Registry[object] = Registry("norm")
    registry.register("x")(object)
    with pytest.raises(ValueError, match="twice"):
        registry.register("x")(object)


def test_a_class_that_does_not_take_the_keys_of_its_yaml_is_refused():
    class Wrong:
        def __init__(self, *, epsilon): ...

    registry: Registry[object] = Registry("norm")
    registry.register("rms")(Wrong)
    with pytest.raises(ConfigError, match="disagree"):
        registry.build(Option("rms", {"eps": 1e-6}))


def test_an_unknown_option_or_key_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="try: norm=rms"):
        check_option("norm", {"name": "rmss"})
    with pytest.raises(ConfigError, match=r"try: norm\.eps"):
        check_option("norm", {"name": "rms", "epz": 1.0, "fp32": True})


def test_an_option_file_whose_key_has_no_constraint_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("# My norm, 2026.\nname: mine\neps: 1.0e-6\n")
    with pytest.raises(ConfigError, match="no constraint"):
        read_option_file("norm", path)


def test_an_option_file_must_carry_its_own_name(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("# My norm, 2026.\nname: yours\n")
    with pytest.raises(ConfigError, match="name: mine"):
        read_option_file("norm", path)
