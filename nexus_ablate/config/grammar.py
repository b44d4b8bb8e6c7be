"""Constraints on keys: a small grammar, used in YAML comments and in the configuration's dataclasses.

A constraint is a list of alternatives: `auto | int [1, 1e9]`, `half | interleaved`, `on | off`, `list of text`.

    on | off             a boolean
    word                 that word
    int [1, 1e9]         a whole number in the interval
    float (0, 1]         a number in the interval
    ratio (0, inf)       a number or a fraction such as 8/3
    Nx                   a factor on what `auto` means, such as 2x or 0.5x
    text                 any text that is not empty
    list of text         a list of them, not empty items; `list of int [0, 1e9]` too
    factors by role      a list such as [embedding:lr:0.1, head:lr:0.5:weight_decay:0]
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import zip_longest
from typing import Any

from nexus_ablate.config.roles import ROLES
from nexus_ablate.errors import ConfigError, did_you_mean, printable

BY_ROLE = "factors by role"
FACTORS = {"lr": "float (0, inf)", "weight_decay": "float [0, inf)"}
"""What a role may have a factor on, and the factor's interval."""
REFUSED = object()
_INTERVAL = re.compile(r"^(int|float|ratio)\s*([\[(])\s*([^,]+),\s*([^\])]+)([\])])$")
_FACTOR = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)x")
_FRACTION = re.compile(r"^\s*(\d{1,18})\s*/\s*(\d{1,18})\s*$")


@dataclass(frozen=True)
class NumberInterval:
    """An interval of numbers of one kind, with each end included (`[`, `]`) or excluded (`(`, `)`)."""

    kind: str
    low: float
    high: float
    low_inside: bool
    high_inside: bool

    def admits(self, number: float | Fraction) -> bool:
        above = number > self.low or (self.low_inside and number == self.low)
        below = number < self.high or (self.high_inside and number == self.high)
        return above and below


SWITCHES = {"on": "on", "yes": "on", "y": "on", "1": "on", "off": "off", "no": "off", "n": "off", "0": "off"}
"""What a switch may be called elsewhere."""


@dataclass(frozen=True)
class Constraint:
    """The values that a key may have.

    Raises:
        ValueError: The text doesn't follow the grammar above.
    """

    text: str

    @property
    def alternatives(self) -> list[str]:
        return [part.strip() for part in self.text.split("|")]

    @property
    def words(self) -> list[str]:
        return [a for a in self.alternatives if re.fullmatch(r"[A-Za-z_][\w.-]*", a) and a not in ("text", "Nx")]

    @property
    def intervals(self) -> list[NumberInterval]:
        intervals = [parse_interval(alternative) for alternative in self.alternatives]
        return [interval for interval in intervals if interval is not None]

    def accept(self, key: str, value: object) -> object:
        """The value in its canonical form.

        Raises:
            ConfigError: No alternative admits the value.
        """
        for alternative in self.alternatives:
            canonical = _canonical(alternative, value)
            if canonical is not REFUSED:
                is_switch = canonical in ("on", "off") and set(self.words) == {"on", "off"}
                return canonical == "on" if is_switch else canonical
        near = "[embedding:lr:0.1]" if self.text == BY_ROLE else self.near(value)
        problem = f"{key} takes {self.text}"
        highest = max((interval.high for interval in self.intervals), default=math.inf)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > highest:
            problem = f"{problem}; this is too large"
        raise ConfigError(problem, show(value), f"{key}={near}" if near else self.text)

    def near(self, value: object) -> str:
        """The word that a value is probably meant to be; '' if none is like it."""
        switch = SWITCHES.get(str(value).lower(), "")
        if switch in self.words:
            return switch
        return did_you_mean(value, self.words) if isinstance(value, str) else ""


@cache
def parse_interval(text: str) -> NumberInterval | None:
    match = _INTERVAL.match(text)
    if not match:
        return None
    kind, left, low, high, right = match.groups()
    return NumberInterval(kind, float(low), float(high), left == "[", right == "]")


def _canonical(alternative: str, value: Any) -> Any:
    """A value in its canonical form under one alternative of a constraint; REFUSED if that doesn't admit it."""
    if alternative.startswith("list of "):
        if not isinstance(value, list | tuple):
            return REFUSED
        items = [_canonical(alternative.removeprefix("list of "), item) for item in value]
        return REFUSED if REFUSED in items else items
    if alternative == BY_ROLE:
        is_list_of_text = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        return _canonical_factors(value) if is_list_of_text else REFUSED
    if alternative == "text":
        return value if isinstance(value, str) and value.strip() else REFUSED
    if alternative == "Nx":
        return value if isinstance(value, str) and times_auto(value) else REFUSED
    interval = parse_interval(alternative)
    if interval is None:
        word = show(value) if isinstance(value, bool) else value  # YAML and Hydra turn on and off into booleans
        spelled = {"on": "true", "off": "false"}.get(alternative, alternative)
        return alternative if word in (alternative, spelled) else REFUSED
    number = value
    if interval.kind == "ratio" and isinstance(value, str) and (match := _FRACTION.match(value)) and int(match[2]):
        number = Fraction(int(match[1]), int(match[2]))
    if isinstance(number, bool | str) or (isinstance(number, int) and abs(number) >= 2**63):  # may exceed every float
        return REFUSED
    if not isinstance(number, int | float | Fraction) or not interval.admits(number):
        return REFUSED
    if interval.kind == "float":
        return float(number)
    if number % 1 == 0:
        return int(number)
    if interval.kind == "int":
        return REFUSED
    return str(number) if isinstance(number, Fraction) else number


def times_auto(value: str) -> float:
    """The factor on what `auto` means: 1 for `auto`, 2 for `2x`; 0 for other text."""
    match = _FACTOR.fullmatch(value)
    return float(match[1]) if match else float(value == "auto")


def factors_by_role(items: Iterable[str]) -> dict[str, dict[str, float]]:
    """The factors on learning rate and weight decay by role, from the items of `optim.groups`.

    Raises:
        ConfigError: There is no such role, or an item isn't a role with its factors, each once and in its interval.
    """
    factors: dict[str, dict[str, float]] = {}
    for item in items:
        role, *words = item.split(":")
        rest = ":".join(words) or "lr:0.1"
        if role not in ROLES:
            near = did_you_mean(role, ROLES)
            fix = f"optim.groups=[{near}:{rest}]" if near else f"one of {', '.join(ROLES)}"
            raise ConfigError(f"there is no role {printable(role, 40)}", f"optim.groups=[{item}]", fix)
        example = f"optim.groups=[{role}:lr:0.1]"
        for name, text in zip_longest(words[::2] or [""], words[1::2], fillvalue=""):
            if name not in FACTORS or not text:
                problem = "a role has factors on lr, on weight_decay or on both"
                raise ConfigError(problem, f"optim.groups=[{item}]", example)
            if name in factors.get(role, {}):
                raise ConfigError(f"{role} has two factors on {name}", f"optim.groups={show([*items])}", example)
            try:
                number = float(text)
            except ValueError:
                number = math.nan
            interval = parse_interval(FACTORS[name])
            assert interval is not None
            if not interval.admits(number):
                raise ConfigError(f"a factor on {name} is a {FACTORS[name]}", f"optim.groups=[{item}]", example)
            factors.setdefault(role, {})[name] = number
    return factors


def _canonical_factors(items: Iterable[str]) -> list[str]:
    """The same factors in the order of the roles, without those of 1, so that equal ones are written alike."""
    factors = factors_by_role(items)
    canonical = []
    for role in ROLES:
        of_role = factors.get(role, {})
        words = [f"{name}:{show(of_role[name])}" for name in FACTORS if of_role.get(name, 1) != 1]
        if words:
            canonical.append(":".join([role, *words]))
    return canonical


def ratio(value: object) -> float:
    """The number of a canonical `ratio` value."""
    return float(Fraction(value)) if isinstance(value, str) else float(value)  # type: ignore[arg-type]


def show(value: object) -> str:
    """A value as the user would type it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(item) for item in value) + "]"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)


# ------------------------------------------------------------------------------------- comparisons between numbers

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def is_comparison(rule: str) -> bool:
    """Whether a rule of an option compares numbers, as in `head_dim % 2 == 1`, instead of listing settings."""
    return re.search(r"[<>]|==", rule) is not None


def names_in(rule: str) -> list[str]:
    """The names in a comparison; none for a list of settings."""
    if not is_comparison(rule):
        return []
    return [node.id for node in ast.walk(ast.parse(rule)) if isinstance(node, ast.Name)]


def compare_numbers(rule: str, numbers: Mapping[str, Any]) -> bool:
    """Whether a comparison of sums and products of named numbers holds. One of `auto`, `off` or a list doesn't.

    Raises:
        ConfigError: It isn't a comparison, or names a number that doesn't exist.
    """

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Expression():
                return value(node.body)
            case ast.Constant():
                return node.value
            case ast.Name() if node.id in numbers:
                return numbers[node.id]
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](value(node.left), value(node.right))
            case ast.Compare() if len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
                return _OPERATORS[type(node.ops[0])](value(node.left), value(node.comparators[0]))
        known = f"numbers, + - * / %, one comparison, and {', '.join(sorted(numbers))}"
        raise ConfigError("this rule of an option cannot be read", rule, known)

    named = [numbers[name] for name in names_in(rule) if name in numbers]
    if not all(isinstance(number, int | float) for number in named):
        return False
    return bool(value(ast.parse(rule, mode="eval")))
