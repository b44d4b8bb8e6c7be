"""What a user reads when something is wrong: three lines, in every error of the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from checkouts import parsed

from nexus_ablate import errors
from nexus_ablate.errors import UserError

PACKAGE = Path(errors.__file__).parent
PARTS = ("problem", "got", "fix")


def error_names(sources: dict[str, str]) -> set[str]:
    """UserError and every class that inherits from it, in all sources."""
    bases = {
        node.name: [ast.unparse(base).rpartition(".")[2] for base in node.bases]
        for text in sources.values()
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.ClassDef)
    }
    names = {"UserError"}
    while more := {name for name, parents in bases.items() if names & set(parents)} - names:
        names |= more
    return names


def incomplete(sources: dict[str, str]) -> list[str]:
    """Where an error is made without one of its three parts, or with an empty one."""
    names, places = error_names(sources), []
    for path, text in sources.items():
        for node in ast.walk(parsed(text)):
            if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in names:
                continue
            parts = dict(zip(PARTS, node.args, strict=False)) | {k.arg: k.value for k in node.keywords}
            values = [ast.unparse(parts[part]) if part in parts else "''" for part in PARTS]
            if "''" in values:
                places.append(f"{path}:{node.lineno}")
    return places


def test_every_error_of_the_package_has_a_problem_a_value_and_something_to_try():
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert error_names(sources) >= {"ConfigError", "Diverged", "Preempted", "StorageError"}
    assert not incomplete(sources)


@pytest.mark.parametrize(
    "call",
    [
        "ConfigError('a')", "ConfigError('a', 'b')", "errors.ConfigError('a', '', 'c')", "Own('a', 'b', fix='')",
        "ConfigError('a', fix='c')", "UserError(problem='a', fix='c')",
    ],
)  # fmt: skip
def test_an_error_that_lacks_a_part_is_seen(call):
    source = f"class ConfigError(errors.UserError): ...\nclass Own(ConfigError): ...\nraise {call}\n"
    assert incomplete({"a.py": source}) == ["a.py:3"]
    assert not incomplete({"a.py": "class ConfigError(UserError): ...\nraise ConfigError('a', b, fix=f'{c}')\n"})


def test_an_error_has_three_lines_even_where_nothing_was_given():
    assert str(UserError("a problem", "", "this")).splitlines() == ["error: a problem", "  got: nothing", "  try: this"]
