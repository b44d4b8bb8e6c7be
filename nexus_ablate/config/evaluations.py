"""Evaluations as they are typed, `streaming:kept:8`: a name, then keys with their values."""

from __future__ import annotations

import itertools
import re

from nexus_ablate.config.grammar import show
from nexus_ablate.config.options import Option, default_option, option_files
from nexus_ablate.errors import ConfigError, unknown
from nexus_ablate.plain_data import UNREADABLE, load_yaml

SHIPPED = "shipped"
"""The value of an evaluation's key `file` that means the one in conf/evaluation."""


def evaluation_of(text: str) -> Option:
    """The evaluation that `streaming` or `streaming:kept:8:texts:2` describes; items of a list are joined by `+`.

    Hydra accepts `evals=[streaming:kept:8]` without quotes; in other places `kept=8` works too.

    Raises:
        ConfigError: There is no such evaluation or key, or the key doesn't accept the value.
    """
    name, *words = re.split("[:=]", text)
    files = option_files("evaluation")
    if name not in files:
        raise unknown("there is no evaluation of this name", name, files)
    option = default_option("evaluation", name)
    for key, value in itertools.zip_longest(words[::2], words[1::2], fillvalue=""):
        if key not in option.keys:
            raise unknown(f"{name} has no key of this name", key, option.keys, f"{name}:{{}}:{value or 'VALUE'}")
        spec = files[name].keys[key]
        given = _yaml_value(value)
        if isinstance(spec.default, list):
            given = [_yaml_value(item) for item in value.split("+")]
        try:
            accepted = spec.constraint.accept(f"{name}:{key}", given)
        except ConfigError as error:
            raise ConfigError(error.problem, text, f"{name}:{key}:{evaluation_value(spec.default)}") from None
        option.keys[key] = accepted
    return option


def _yaml_value(text: str) -> object:
    """The value that a text is in YAML; the text itself where it is none."""
    try:
        return load_yaml(text)
    except UNREADABLE:
        return text


def evaluation_name(option: Option) -> str:
    """The name of an evaluation's result in the form of `evaluation_of`, with all keys that aren't at their default."""
    changed = {k: v for k, v in option.keys.items() if v != option_files("evaluation")[option.name].keys[k].default}
    return ":".join([option.name, *(f"{key}:{evaluation_value(value)}" for key, value in changed.items())])


def evaluation_value(value: object) -> str:
    """The value of an evaluation's key in the form of `evaluation_of`."""
    return "+".join(map(show, value)) if isinstance(value, list) else show(value)
