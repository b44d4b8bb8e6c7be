"""Which code made a run: one hash per source file that computes, and the git commit of the checkout.

Comments, docstrings, blank lines, spaces, line breaks inside brackets and trailing commas don't change a hash, and the
Python version doesn't either. Anything else does.
"""

from __future__ import annotations

import hashlib
import keyword
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nexus_ablate.errors import AGAIN, ConfigError

PACKAGE = Path(__file__).resolve().parent

COMPUTES_NOTHING = {
    "__init__.py": "names the public functions",
    "__main__.py": "calls the command line",
    "api.py": "gives runs and comparisons their frames and figures",
    "bench/": "measures speed outside of any run",
    "cli/": "reads command lines and prints results",
    "comparison/": "reads finished runs",
    "execution/": "starts the processes that train, with configurations that the identity covers",
    "console.py": "fits output to the terminal",
    "errors.py": "defines error messages",
    "measure/architecture.py": "prepares what `explain` prints",
    "measure/regime.py": "describes a budget",
    "measure/measures.py": "describes what other modules measure",
    "plain_data.py": "reads text as plain data",
    "pretrained/": "reads published decoders; the content hash of their weights is part of the identity",
    "provenance.py": "hashes the code that computes",
    "report/": "shows finished runs and comparisons",
    "runs/": "stores what was computed",
    "study/": "says what a study is; the identity covers the configurations that it names",
    "planning/": "chooses configurations, which the identity covers",
    "track/": "sends what was stored to W&B",
    "training/display.py": "shows the progress of a run",
    "training/signals.py": "records that a run was asked to stop",
}
"""Files and folders that can't change a number of a run, with the reason. Every other .py file is hashed.

The option files in conf/ aren't hashed either: all their values are in the configuration, which the identity covers.
"""

NOT_RECORDED = "source hashes not recorded"

_TOKEN = re.compile(
    r"""
    (?:[bBfFrRuU]{1,2}(?=["']))?
    (?: '''[^\\']*(?:(?:\\.|'(?!''))[^\\']*)*'''
      | \"\"\"[^\\"]*(?:(?:\\.|"(?!""))[^\\"]*)*\"\"\"
      | '[^\\'\n]*(?:\\.[^\\'\n]*)*'
      | "[^\\"\n]*(?:\\.[^\\"\n]*)*" )
    | \#[^\n]*
    | \\\n
    | \n[^\S\n]*
    | \d[\w.]*(?:(?<=[eE])[+-]\d\w*)?
    | \w+
    | [^\s\w]
    """,
    re.VERBOSE | re.DOTALL,
)
"""Strings, comments, line continuations, line ends with the next indentation, numbers, names, single operator signs."""


@cache
def source_hashes() -> dict[str, str]:
    """The hash of each file of this package that computes, by its path in the package: `axes/norm.py`."""
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    return {name: text_hash(files[name].read_text(encoding="utf-8")) for name in sorted(files) if computes(name)}


def source_hash(hashes: Mapping[str, str] | None = None) -> str:
    """One hash over the file hashes (`source_hashes()` by default): this package's part of a run's identity."""
    files = sorted((source_hashes() if hashes is None else hashes).items())
    return hashlib.sha256("".join(f"{name} {value}\n" for name, value in files).encode()).hexdigest()


def computes(name: str) -> bool:
    """Whether a file, by its path in the package, is hashed."""
    folders = (f"{parent.as_posix()}/" for parent in Path(name).parents)
    return COMPUTES_NOTHING.keys().isdisjoint((name, *folders))


def text_hash(python: str) -> str:
    """The hash of a Python source without what can't change its results (16 hex digits)."""
    return hashlib.sha256(_tokens(python).encode()).hexdigest()[:16]


def _tokens(python: str) -> str:
    """The tokens of a Python source, one statement per line, without comments, docstrings and trailing commas."""
    lines: list[str] = []
    statement: list[str] = []
    indents, indent = [0], 0
    brackets: list[list[int]] = []  # per open bracket: whether it means the same with one more comma, and its commas
    for token in _TOKEN.findall(python + "\n"):
        first = token[0]
        if first not in "\n#\\([{,)]}":  # most of them
            statement.append(token)
            continue
        if first == "\n":
            if not brackets:
                if statement and not _is_docstring(statement):
                    while indents[-1] > indent:
                        indents.pop()
                    if indents[-1] < indent:
                        indents.append(indent)
                    lines.append("\0".join((str(len(indents)), *statement)))
                statement, indent = [], len(token) - 1
            continue
        if first == "#" or token == "\\\n":
            continue
        if first in "([{":
            follows_value = bool(statement) and _ends_value(statement[-1])
            brackets.append([first == "{" or follows_value == (first == "("), 0])
        elif first == "," and brackets:
            brackets[-1][1] += 1
        elif first in ")]}" and brackets:
            neutral, commas = brackets.pop()
            if statement[-1] == "," and (neutral or commas > 1):
                statement.pop()
        statement.append(token)
    return "\n".join(lines)


def _is_docstring(statement: list[str]) -> bool:
    """Whether a statement is nothing but strings. An f-string may call something."""
    return all(token[-1] in "\"'" and "f" not in re.split("[\"']", token, maxsplit=1)[0].lower() for token in statement)


def _ends_value(token: str) -> bool:
    """Whether a bracket after this token is a call or an index, and not a tuple or a list."""
    return token in ")]}" or (token.isidentifier() and not keyword.iskeyword(token) and token not in ("case", "match"))


# ----------------------------------------------------------------------------------------- code of two runs compared


def code_of(env: Mapping[str, Any]) -> dict[str, str] | None:
    """The hashes in an env.json: those of the package's files and, as `plugin NAME`, those of the plugins used.

    None where they weren't recorded.
    """
    if not env.get("source"):
        return None
    return env["source"] | {f"plugin {name}": str(of.get("sha256")) for name, of in (env.get("plugins") or {}).items()}


def differing_files(one: Mapping[str, str] | None, other: Mapping[str, str] | None) -> list[str]:
    """The files in which two results of `code_of` differ; a plugin that only one run used is no difference."""
    if one is None or other is None:
        return [] if one is other else [NOT_RECORDED]
    names = [n for n in one.keys() | other.keys() if one.get(n) != other.get(n)]
    return sorted(n for n in names if not n.startswith("plugin ") or (n in one and n in other))


def differ(files: Iterable[str]) -> str:
    """`axes/norm.py differs`, `a.py and b.py differ`, `a.py, b.py, c.py and 4 more differ`."""
    names = list(files)
    if names == [NOT_RECORDED]:
        return NOT_RECORDED
    if len(names) > 4:
        names = [*names[:3], f"{len(names) - 3} more"]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    return f"{listed} {'differs' if len(names) == 1 else 'differ'}"


def refuse_other_source(expected: str) -> None:
    """Stop a queued run whose code was edited before it started.

    Args:
        expected: `source_hash` when the run was submitted; '' accepts any.

    Raises:
        ConfigError: The hash has changed since.
    """
    if expected and expected != source_hash():
        got = f"source {expected[:8]} when it was submitted, {source_hash()[:8]} when it started"
        raise ConfigError(f"the code changed while the run was queued: {got}", source_hash(), AGAIN)


# ------------------------------------------------------------------------------------------------------------- git


@cache
def git_state() -> dict[str, Any]:
    """Commit of the checkout that this package is imported from, and whether its code or options have changed since.

    Both None where git doesn't track this package, as when it is installed inside the checkout of something else.
    """
    unknown = {"git_commit": None, "git_dirty": None}
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return unknown
    changes = _git("status", "--porcelain", "--", ".", "../conf", ":(exclude)*.pyc")
    return {"git_commit": _git("rev-parse", "HEAD"), "git_dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    """What git prints in the folder of this package; None where it fails or isn't installed."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(PACKAGE), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env=variables, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
