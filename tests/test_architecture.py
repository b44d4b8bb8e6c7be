"""The house rules, held by reading the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from nexus_ablate.config.options import option_files
from nexus_ablate.config.run_config import AXES

PACKAGE = Path(__file__).resolve().parents[1] / "nexus_ablate"
MODULES = sorted(PACKAGE.rglob("*.py"))

FLOOR = {  # a module imports only from lower floors, or from its own
    "errors": 0,
    "masking": 0,
    "provenance": 0,
    "config": 0,
    "": 0,
    "__main__": 9,
    "axes": 1,
    "data": 1,
    "runs": 1,
    "comparison": 2,
    "report": 3,
    "track": 4,
    "attention": 2,
    "model": 2,
    "measure": 2,
    "training": 5,
    "bench": 6,
    "study": 6,
    "readiness": 6,
    "api": 7,
    "cli": 8,
}
HOME = {"hydra": {"cli", "config"}, "omegaconf": {"cli", "config"}, "wandb": {"track"}, "submitit": {"study"}}
HOME["wandb_workspaces"] = HOME["wandb"]


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(tree: ast.AST, top_level: bool = False) -> list[str]:
    nodes = ast.iter_child_nodes(tree) if top_level else ast.walk(tree)
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_from_lower_floors(path):
    if room(path) == "":
        return  # the public API reaches everything, inside functions
    for name in imports(ast.parse(path.read_text())):
        if name.startswith("nexus_ablate."):
            other = name.split(".")[1]
            assert FLOOR.get(other, 0) <= FLOOR[room(path)], f"{path.name} reaches up to {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_hydra_wandb_and_submitit_stay_at_home(path):
    for name in imports(ast.parse(path.read_text())):
        library = name.split(".")[0]
        assert room(path) in HOME.get(library, {room(path)}), f"{name} in {path.name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_slow_libraries_are_imported_inside_functions(path):
    slow = {"wandb", "wandb_workspaces", "pandas", "datasets", "tokenizers", "scipy", "matplotlib", "hydra"}
    if room(path) in (
        "",
        "errors",
        "config",
        "cli",
        "runs",
        "track",
        "data",
        "comparison",
        "report",
        "study",
        "api",
    ):
        slow |= {"torch"}
    assert not slow & {name.split(".")[0] for name in imports(ast.parse(path.read_text()), top_level=True)}


def test_no_module_outside_the_axes_branches_on_an_option_s_name():
    names = {name for axis in AXES for name in option_files(axis)} - {"none", "auto"}
    allowed = {
        ("config", "rope"),  # an even head width, checked before torch is there
        ("model", "learned"),  # embed_scale=learned, not position=learned
        ("bench", "norm"),  # the axis, not gate=norm
    }
    for path in MODULES:
        if room(path) in ("axes", "cli"):
            continue
        compared = [
            n for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Compare) for n in ast.walk(node)
        ]
        for node in compared:
            if isinstance(node, ast.Constant) and node.value in names:
                assert (room(path), node.value) in allowed, f"{path.name} asks for the option {node.value!r}"


def test_no_module_is_called_after_nothing():
    assert not {p.stem for p in MODULES} & {"utils", "util", "helpers", "common", "misc"}


def test_every_module_says_its_job():
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), path.name


@pytest.mark.parametrize(
    "command", [["--help"], ["list"], ["list", "norm"], ["norm=rmss"], ["train.steps=abc"], ["+x=1"]]
)
def test_help_list_and_configuration_errors_import_no_torch(command):
    code = (
        "import sys\nfrom nexus_ablate.cli import main\n"
        f"status = main({command!r})\nslow = {{'torch', 'wandb', 'datasets', 'matplotlib'}} & set(sys.modules)\n"
        "assert not slow, slow\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == (2 if "=" in command[0] else 0), done.stderr
    assert "Traceback" not in done.stderr
