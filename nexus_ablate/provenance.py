"""Which code made a run: one hash per source file that computes, and the git commit of the checkout.

A hash is over the syntax tree without docstrings: comments and layout don't change it, and the Python version doesn't
either. Anything else does.
"""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent

COMPUTES_NOTHING = {
    "__main__.py": "calls the command line",
    "api.py": "gives runs and comparisons their frames and figures",
    "bench/": "measures speed outside of any run",
    "cli/": "reads command lines and prints results",
    "comparison/": "reads finished runs",
    "launch/": "chooses configurations, which the identity covers, and starts the processes that train",
    "config/compose.py": "turns overrides into a configuration, all of whose values the identity covers",
    "config/foreign_words.py": "suggests names for those that do not exist",
    "config/groups.py": "finds the options and keys that a command may name; the identity covers what is chosen",
    "config/override_syntax.py": "reads the text of an override; the identity covers the value",
    "config/overrides.py": "refuses overrides that do not fit the schema, and suggests others",
    "config/rules.py": "refuses configurations, and warns of traps",
    "console.py": "fits output to the terminal",
    "errors.py": "defines error messages",
    "gpus.py": "finds GPUs; the precision that follows from them is part of the identity",
    "masking.py": "replaces secrets in texts",
    "measure/architecture.py": "prepares what `explain` prints",
    "measure/regime.py": "describes a budget",
    "measure/measures.py": "describes what other modules measure",
    "plain_data.py": "reads text as plain data",
    "pretrained/": "reads published decoders; the content hash of their weights is part of the identity",
    "provenance.py": "hashes the code that computes",
    "report/": "shows finished runs and comparisons",
    "runs/": "stores what was computed",
    "study/": "says what a study is; the identity covers the configurations that it names",
    "track/": "sends what was stored to W&B",
    "training/display.py": "shows the progress of a run",
    "training/nonfinite.py": "names what was not finite first in a run that has ended for it",
    "training/refusals.py": "refuses runs that cannot be trained",
    "training/run_facts.py": "describes a run before its first step",
    "training/signals.py": "records that a run was asked to stop",
}
"""Files and folders that can't change a number of a run, with the reason. Every other .py file is hashed.

The option files in conf/ aren't hashed either: all their values are in the configuration, which the identity covers and
whose hash a study keeps for each arm.
"""

NOT_RECORDED = "source hashes not recorded"


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
    try:
        meaning = repr(_meaning(ast.parse(python)))
    except SyntaxError:  # of a plugin, which is refused with its line when it is loaded
        meaning = python
    return hashlib.sha256(meaning.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _meaning(node: Any) -> Any:
    """A syntax tree as nested lists, without positions, docstrings and what only some Python versions have."""
    if isinstance(node, list):
        return [_meaning(item) for item in node if not _is_docstring(item)]
    if not isinstance(node, ast.AST):
        return node
    if isinstance(node, ast.JoinedStr):  # Python 3.12 adds empty strings
        node.values = [value for value in node.values if not isinstance(value, ast.Constant) or value.value]
    parts: list[Any] = [type(node).__name__]
    for name, value in ast.iter_fields(node):
        meaning = _meaning(value)
        if name not in ("ctx", "kind", "type_comment") and meaning is not None and meaning != []:
            parts.append((name, meaning))
    return parts


def _is_docstring(node: Any) -> bool:
    """Whether a statement is nothing but a string. An f-string may call something."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


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
