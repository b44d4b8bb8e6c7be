"""Layers, imports and names, checked by reading the source."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from checkouts import parsed
from written_runs import Writer

from nexus_ablate.config.options import AXES, option_files

PACKAGE = Path(__file__).resolve().parents[1] / "nexus_ablate"
MODULES = sorted(PACKAGE.rglob("*.py"))

LAYERS = (
    "masking",
    "errors plain_data gpus",
    "console",
    "provenance",
    "config",
    "kernels",
    "axes",
    "runs",
    "data",
    "attention_core",
    "mixers",
    "model optimizers",
    "measure",
    "study",
    "comparison",
    "report",
    "track",
    "pretrained",
    "training",
    "launch",
    "bench",
    "api",
    "cli",
    "__main__",
)
"""From the bottom. A module imports from lower layers or from its own package; the package itself, which names the
public functions, from any."""

LAYER = {name: number for number, names in enumerate(LAYERS) for name in names.split()}
HYDRA = {"config", "launch", "cli"}
HOME = {"hydra": HYDRA, "omegaconf": HYDRA, "wandb": {"track"}, "submitit": {"launch"}}
HOME["wandb_workspaces"] = HOME["wandb"]


def room(path):
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(tree, top_level=False):
    nodes = ast.iter_child_nodes(tree) if top_level else ast.walk(tree)
    imported = []
    for node in nodes:
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
    return imported


def edges(sources):
    """Who imports whom, by dotted module name; imports in functions and under TYPE_CHECKING count."""
    arrows: dict[str, set[str]] = {}
    for module, source in sources.items():
        arrows[module] = set()
        for name in imports(parsed(source)):
            while name and name not in sources:
                name = name.rpartition(".")[0]
            if name and name != module:
                arrows[module].add(name)
    return arrows


def package_sources():
    names = [path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".") for path in MODULES]
    return {name.removesuffix(".__init__"): p.read_text() for name, p in zip(names, MODULES, strict=True)}


def cycle(arrows):
    """The modules of one import cycle; empty where there is none."""
    try:
        list(TopologicalSorter(arrows).static_order())
    except CycleError as error:
        return error.args[1]
    return []


def upward(arrows):
    """Every import of a higher layer."""
    violations = []
    for module, others in arrows.items():
        here = module.split(".")[1] if "." in module else ""
        for other in others:
            there = other.split(".")[1] if "." in other else ""
            if here and there and LAYER[there] >= LAYER[here] and here != there:
                violations.append(f"{module} imports {other}")
    return violations


def test_a_module_imports_only_from_lower_layers():
    assert upward(edges(package_sources())) == []


def test_there_is_no_import_cycle():
    assert cycle(edges(package_sources())) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("config.resolve", ""),
        ("config.run_config", "from nexus_ablate.config.resolve import resolve"),
        ("config.run_config", "if TYPE_CHECKING:\n    from nexus_ablate.config.resolve import resolve"),
        ("comparison.verdict", "def show():\n    from nexus_ablate.comparison.compare import compare"),
    ],
)
def test_a_cycle_would_be_found(module, line):
    sources = package_sources()
    sources[f"nexus_ablate.{module}"] += f"\n{line}\n"
    assert bool(cycle(edges(sources))) == bool(line)


def test_an_import_from_a_higher_layer_would_be_found():
    sources = package_sources()
    sources["nexus_ablate.comparison.verdict"] += "\nfrom nexus_ablate.report import page\n"
    assert upward(edges(sources)) == ["nexus_ablate.comparison.verdict imports nexus_ablate.report.page"]


def test_hydra_wandb_and_submitit_stay_at_home():
    for path in MODULES:
        for name in imports(parsed(path.read_text())):
            library = name.split(".")[0]
            assert room(path) in HOME.get(library, {room(path)}), f"{name} in {path}"


SLOW = {"wandb", "wandb_workspaces", "pandas", "datasets", "tokenizers", "scipy", "matplotlib", "hydra"}
WITHOUT_TORCH = """
errors plain_data gpus console provenance pretrained masking launch config cli runs track data comparison report
study api
""".split()
"""Rooms that are imported without torch, besides the package itself."""


def test_slow_libraries_are_imported_inside_functions():
    for path in MODULES:
        slow = SLOW | ({"torch"} if room(path) in ("", *WITHOUT_TORCH) else set())
        assert not slow & {name.split(".")[0] for name in imports(parsed(path.read_text()), top_level=True)}, path


def test_no_module_outside_the_axes_branches_on_an_option_s_name():
    names = {name for axis in AXES for name in option_files(axis)} - {"none", "auto"}
    allowed = {
        ("config", "rope"),  # an even head width, checked before torch is there
        ("config", "irope"),  # which acts in layers without positions, likewise
        ("config", "residual"),  # the layer whose values it adds, likewise
        ("config", "gated_embedding"),  # the layers in which it acts, likewise
        ("model", "learned"),  # embed_scale=learned, not position=learned
        ("bench", "norm"),  # the axis, not gate=norm
        ("measure", "attention"),  # the component, not mixer=attention
        ("pretrained", "linear"),  # a scaling of RoPE, not head=linear
    }
    for path in MODULES:
        if room(path) in ("axes", "cli"):
            continue
        compared = [
            n for node in ast.walk(parsed(path.read_text())) if isinstance(node, ast.Compare) for n in ast.walk(node)
        ]
        for node in compared:
            if isinstance(node, ast.Constant) and node.value in names:
                assert (room(path), node.value) in allowed, f"{path.name} asks for the option {node.value!r}"


def test_every_module_says_its_job():
    for path in MODULES:
        assert ast.get_docstring(parsed(path.read_text())), path.name


STEPS = (  # in one process, so that what one of them imports would be seen by all that follow
    ("import nexus_ablate", "torch numpy hydra yaml"),
    ("import nexus_ablate.runs", "torch numpy"),
    ("import nexus_ablate.measure.history nexus_ablate.measure.measures", "torch"),
    ("import nexus_ablate.data", "torch datasets tokenizers pyarrow"),
    ("import nexus_ablate.track", "torch wandb"),
    ("--help", "torch wandb datasets matplotlib"),
    ("list", "torch wandb datasets matplotlib"),
    ("list norm", "torch wandb datasets matplotlib"),
    ("list measures", "torch wandb datasets matplotlib"),
    ("norm=rmss", "torch wandb datasets matplotlib"),
    ("train.steps=abc", "torch wandb datasets matplotlib"),
    ("+x=1", "torch wandb datasets matplotlib"),
    ("import anything", "torch"),
    ("status RUNS", "torch wandb matplotlib scipy"),
    ("compare RUNS", "torch wandb matplotlib"),
    ("doctor", "torch wandb datasets submitit joblib"),
)
"""Modules that are imported and commands, and what must not be imported by then."""
STEP = """
import json, sys
from importlib import import_module
sys.modules["transformers"] = None
for step, slow in json.loads(sys.argv[1]):
    words = step.split()
    if step.startswith("import nexus_ablate"):
        modules = [import_module(name) for name in words[1:]]
    else:
        if step == "doctor":  # which imports every package in a process of its own, for seconds
            import_module("nexus_ablate.cli.doctor").import_error = lambda modules: ("", "")
        status = import_module("nexus_ablate.cli").main(words)
        assert status == (2 if "=" in step or "anything" in step else 0), step
    assert not {*slow.split()} & {name for name, module in sys.modules.items() if module}, step
"""


def test_what_needs_no_torch_imports_none_and_makes_nothing(tmp_path):
    writer = Writer(tmp_path / "runs", "mine")
    writer.arm(losses=[2.0, 2.02, 1.98, 2.01, 1.99])
    writer.arm("norm=layer", losses=[2.11, 2.12, 2.09, 2.11, 2.08])
    writer.plan(("norm=layer",))
    (tmp_path / "work").mkdir()
    steps = [(step.replace("RUNS", str(tmp_path / "runs/mine")), slow) for step, slow in STEPS]
    command = [sys.executable, "-c", STEP, json.dumps(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path / "work")
    assert done.returncode == 0, done.stderr
    assert "pip install 'nexus-ablate[import]'" in done.stderr
    assert "10 finished" in done.stdout and "WORSE" in done.stdout
    assert not list((tmp_path / "work").iterdir())
