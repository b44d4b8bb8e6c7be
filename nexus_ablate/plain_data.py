"""Read JSON and YAML as plain data."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import yaml

UNREADABLE = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError),
    *(yaml.YAMLError, msgspec.MsgspecError),
)
"""What parsing damaged text can raise: PyYAML lets KeyError and IndexError through for tags such as `!!bool x`."""

LARGEST = 1e100
"""Far above every number that a run computes, and the square of anything smaller is still a finite float."""
_TAG = "tag:yaml.org,2002:"


def strict_loads(text: str) -> Any:
    """JSON without NaN and Infinity.

    Raises:
        ValueError: The text is not valid JSON.
        RecursionError: It is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A safe loader that refuses a key twice in one mapping: YAML forbids it, and PyYAML drops the first."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key.value, str):
                continue
            if key.value in keys:
                raise yaml.constructor.ConstructorError(problem=f"{key.value} twice", problem_mark=key.start_mark)
            keys.add(key.value)
            if key.tag in (f"{_TAG}int", f"{_TAG}float", f"{_TAG}bool"):
                key.tag = f"{_TAG}str"  # a name is text, also `4:` and `on:`
        return super().construct_mapping(node, deep)  # type: ignore[misc]


def load_yaml(text: str) -> Any:
    """Plain data from YAML; tags can't create other objects.

    Raises:
        yaml.YAMLError: The text is not valid YAML. PyYAML also lets other errors through: catch `UNREADABLE`.
    """
    value = yaml.load(text, _Loader)
    check_plain(value)
    return value


def check_plain(value: Any) -> None:
    """Check that a value is plain data whose keys are strings, with numbers whose squares are finite.

    Raises:
        ValueError: It is not.
        RecursionError: It holds itself.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"a key that is not a string: {key!r:.60}")
            check_plain(item)
    elif isinstance(value, list):
        for item in value:
            check_plain(item)
    elif isinstance(value, int | float):
        if not -LARGEST < value < LARGEST:
            raise ValueError(f"{value!r:.60} is too large")
    elif value is not None and not isinstance(value, str):
        raise ValueError(f"{value!r:.60} is not plain data")
