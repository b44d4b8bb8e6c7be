"""The source of the package and its scripts, and copies that a test may edit, as a user edits a checkout."""

from __future__ import annotations

import ast
import functools
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from nexus_ablate.provenance import source_hashes

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def parsed(source: str) -> ast.Module:
    """The syntax tree of a module, parsed once for all the tests that look at it."""
    return ast.parse(source)


def script(name: str) -> ModuleType:
    """A module of scripts/."""
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / f"scripts/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


class Checkout:
    """A copy of the package and its options under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("nexus_ablate", "conf"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))

    def edit(self, name: str, before: str, after: str) -> None:
        """Replace the one place of a file that says `before`."""
        path = self.root / name
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1, (name, before)
        path.write_text(text.replace(before, after), encoding="utf-8")
        source_hashes.cache_clear()


def git(folder: Path, *arguments: str) -> str:
    """What git prints there."""
    flags = ["-c", "user.name=n", "-c", "user.email=e@e", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *flags, "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()
