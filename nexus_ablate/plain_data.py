"""Read untrusted JSON and YAML as plain data of a bounded size."""

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
_DIGITS = 18
"""Most digits of an integer: one with more might not fit into 64 bits."""
_TAG = "tag:yaml.org,2002:"
_DEPTH = 64
_ITEMS = 10**6
_YAML_BYTES = 2 * 2**20
"""PyYAML takes seconds for this much text."""
_YAML_DEPTH = 5000
"""Most brackets, and most characters in a line: each can open a level."""


# ------------------------------------------------------------------------------------------------------------- reading


def strict_loads(text: str) -> Any:
    """JSON without NaN and Infinity.

    Raises:
        ValueError: The text is not valid JSON.
        RecursionError: It is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class _Bounded:
    """Extra limits of a YAML loader.

    No merge keys (nine short lines can make a billion items), no endless numbers, and no key twice in one mapping: YAML
    forbids it, and PyYAML drops the first.
    """

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

    def flatten_mapping(self, node: Any) -> None:
        if any(key.tag == f"{_TAG}merge" for key, _ in node.value):
            raise ValueError("a merge key (<<)")

    def construct_scalar(self, node: Any) -> Any:
        longest = {f"{_TAG}int": _DIGITS, f"{_TAG}float": 100}.get(node.tag, len(node.value))
        if len(node.value) > longest:
            raise ValueError(f"a number of {len(node.value)} digits")
        return super().construct_scalar(node)  # type: ignore[misc]


class _SafeLoader(_Bounded, yaml.SafeLoader):
    pass


class _FastLoader(_Bounded, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    pass


def load_yaml(text: str) -> Any:
    """Plain data from YAML; tags can't create other objects.

    Raises:
        yaml.YAMLError: The text is not valid YAML. PyYAML also lets other errors through: catch `UNREADABLE`.
    """
    if len(text) > _YAML_BYTES:
        raise ValueError(f"more than {_YAML_BYTES} characters")
    if text.count("[") + text.count("{") > _YAML_DEPTH:  # PyYAML's time grows with the square of their number
        raise ValueError(f"more than {_YAML_DEPTH} brackets")
    # The C loader is several times faster, but twenty thousand levels overflow its stack and kill the process.
    deepest = max(map(len, text.splitlines()), default=0)
    value = yaml.load(text, _SafeLoader if deepest > _YAML_DEPTH else _FastLoader)
    check_plain(value)
    return value


def check_plain(value: Any) -> None:
    """Check that a value is plain data of bounded depth and size, with numbers whose squares are finite.

    What several aliases of a YAML lead to counts as often as it is reached: nine short lines can make a billion items.

    Raises:
        ValueError: It is not.
    """
    left, items = [(value, 0)], 1
    while left:
        value, depth = left.pop()
        if depth > _DEPTH:  # also of what holds itself
            raise ValueError(f"more than {_DEPTH} levels")
        if isinstance(value, dict | list):
            parts = value
            if isinstance(value, dict):
                parts = value.values()
                if strange := [name for name in value if not isinstance(name, str)]:
                    raise ValueError(f"a key that is not a string: {strange[0]!r:.60}")
            items += len(parts)
            if items > _ITEMS:
                raise ValueError(f"more than {_ITEMS} items")
            left += [(part, depth + 1) for part in parts]
        elif isinstance(value, int | float):
            if not -LARGEST < value < LARGEST:
                raise ValueError(f"{value!r:.60} is too large")
        elif value is not None and not isinstance(value, str):
            raise ValueError(f"{value!r:.60} is not plain data")
