"""Options from outside the package: directories that hold `my_norm.py` and `norm/my_norm.yaml`, found without torch.

They come from `--plugin DIR` and `compose(..., plugins=[DIR])`, which store them in an environment variable for child
processes, and from installed packages, which list theirs in an entry-point group.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

from nexus_ablate.errors import ConfigError
from nexus_ablate.provenance import text_hash

VARIABLE = "NEXUS_ABLATE_PLUGINS"
ENTRY_POINTS = "nexus_ablate.options"


@dataclass(frozen=True)
class Plugin:
    """A directory of options, as of its first use in this process."""

    name: str
    directory: Path
    package: str | None
    """The installed package of the directory; None if it was given by its path."""
    sha256: str
    """The hash of every .py file (as in `provenance`) and every .yaml file: part of a run's identity."""

    def option_paths(self) -> list[Path]:
        """The YAML of each option: `norm/my_norm.yaml`."""
        return [path for path in sources(self.directory) if path.suffix == ".yaml" and path.parent != self.directory]

    def class_file(self, option: str) -> Path:
        return self.directory / f"{option}.py"

    def load(self, option: str) -> None:
        """Import the option's class file, which registers it.

        Raises:
            ConfigError: The file raises an error; the message has the line.
        """
        package = self.package or f"nexus_ablate_plugin_{self.name.replace('.', '_')}"
        if self.package is None and package not in sys.modules:  # a package, so that `from .other import x` works
            made = ModuleType(package)
            made.__path__ = [str(self.directory)]
            sys.modules[package] = made
        try:
            importlib.import_module(f"{package}.{option}")
        except Exception as error:
            problem = f"{self._where(error, option)}: the plugin's file cannot be imported"
            raise ConfigError(
                problem, f"{type(error).__name__}: {error}", f"python {self.class_file(option)}"
            ) from error

    def _where(self, error: Exception, option: str) -> str:
        """File and line of the plugin that an exception comes from."""
        if isinstance(error, SyntaxError):
            return f"{error.filename}:{error.lineno}"
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(self.directory)
        ]
        return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else str(self.class_file(option))


def add_plugins(directories: Iterable[str | Path]) -> None:
    """Add directories of options, for this process and every process it starts.

    Raises:
        ConfigError: A directory doesn't exist, or two plugins have the same name.
    """
    named = [str(Path(directory).resolve()) for directory in directories]
    if named:
        paths = os.pathsep.join(dict.fromkeys([*_named(os.environ.get(VARIABLE, "")), *named]))
        _plugins(paths)
        os.environ[VARIABLE] = paths


def plugins() -> tuple[Plugin, ...]:
    """The available plugins, those of `--plugin` first.

    Raises:
        ConfigError: A named plugin doesn't exist, or two have the same name.
    """
    return _plugins(os.environ.get(VARIABLE, ""))


@cache
def _plugins(paths: str) -> tuple[Plugin, ...]:
    result = [_plugin(Path(path).name, Path(path), None) for path in _named(paths)]
    installed = sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name)
    result += [_plugin(entry.name, _package_directory(entry), entry.value) for entry in installed]
    directories: dict[str, Path] = {}
    for plugin in result:
        if plugin.name in directories:  # runs record a plugin by its name
            got = f"{directories[plugin.name]} and {plugin.directory}"
            raise ConfigError(f"two plugins are called {plugin.name}", got, "remove one, or rename it")
        directories[plugin.name] = plugin.directory
    return tuple(result)


def _named(paths: str) -> list[str]:
    """The absolute directories that the environment variable names."""
    return [str(Path(path).resolve()) for path in paths.split(os.pathsep) if path]


def _plugin(name: str, directory: Path, package: str | None) -> Plugin:
    if not directory.is_dir():
        fix = f"give an existing directory to --plugin or in the variable {VARIABLE}"
        raise ConfigError("this plugin directory does not exist", str(directory), fix)
    digest = hashlib.sha256()
    for path in sources(directory):
        content = path.read_bytes()
        if path.suffix == ".py":
            content = text_hash(content.decode(errors="backslashreplace")).encode()
        digest.update(f"{path.relative_to(directory).as_posix()}\n{len(content)}\n".encode() + content)
    return Plugin(name, directory, package, digest.hexdigest())


def sources(directory: Path) -> list[Path]:
    """Every .py and .yaml file of a plugin outside hidden folders, sorted."""
    result = [path for kind in ("*.py", "*.yaml") for path in directory.rglob(kind) if path.is_file()]
    return sorted(p for p in result if not any(part.startswith(".") for part in p.relative_to(directory).parts))


def _package_directory(entry: metadata.EntryPoint) -> Path:
    """The directory of a package, without importing the package, which may import torch."""
    top, *inner = entry.value.split(".")
    result = importlib.util.find_spec(top)
    if result is None or not result.submodule_search_locations:
        raise ConfigError(f"the plugin {entry.name} names no package", entry.value, "install it again, or uninstall it")
    return Path(result.submodule_search_locations[0]).resolve().joinpath(*inner)
