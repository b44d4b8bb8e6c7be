"""Options from outside the package: the documented example, run as it is written, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import answers

from nexus_ablate.axes.norm import NORM
from nexus_ablate.config.compose import compose, differences, plugins_used
from nexus_ablate.config.options import CLASSES, option_files
from nexus_ablate.config.plugins import VARIABLE, add_plugins, plugins
from nexus_ablate.config.rules import check_settings
from nexus_ablate.data import fingerprint_of
from nexus_ablate.errors import ConfigError
from nexus_ablate.model import build_model
from nexus_ablate.provenance import source_hash
from nexus_ablate.runs import find_runs, identity, read_run
from nexus_ablate.training.session import train

PAGE = Path(__file__).resolve().parents[1].joinpath("docs", "adding_an_option.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`(my_options/\S+)`\n\n```\w+\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL))
CLASS, YAML = FILES["my_options/my_norm.py"], FILES["my_options/norm/my_norm.yaml"]

SPELLINGS = {
    "optim.lr=1e-4": "optim.lr=0.0001",
    "norm.eps=1e-6": "norm.eps=1e-06",
    "model.dropout=0.0": "model.dropout=0",
    "tie_embeddings=true": "tie_embeddings=on",
}
"""Values that a rule may not have, and how they are compared."""


def block(language: str) -> str:
    """The one code block of a language that is not a file."""
    (only,) = (b for b in re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL) if b not in FILES.values())
    return only


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def python(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE} | environ
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300, env=environment)


def nexus(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "nexus_ablate", *arguments, cwd=cwd, **environ)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A plugin directory with the documented example and further files; nothing of it is left behind."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(NORM, "_classes", dict(NORM._classes))

    def make(files: dict[str, str] | None = None) -> Path:
        contents = {"my_norm.py": CLASS, "norm/my_norm.yaml": YAML} | (files or {})
        return write(tmp_path / "my_options", {name: text for name, text in contents.items() if text})

    yield make
    for name in [name for name in sys.modules if name.startswith("nexus_ablate_plugin_")]:
        del sys.modules[name]


@pytest.mark.slow
def test_the_documented_commands_work_as_they_are_written(tiny_run, tmp_path):
    write(tmp_path, FILES)
    commands = [shlex.split(line) for line in block("sh").strip().splitlines()]
    listed, explained, trained, many = (command[1:] for command in commands)
    done = nexus(*listed, cwd=tmp_path)
    assert "norm=my_norm" in done.stdout
    assert "(plugin my_options)" in " ".join(done.stdout.split())
    done = nexus(*explained, cwd=tmp_path)
    assert "N(x) = g x / (mean(|x|) + eps)" in done.stdout, done.stderr
    for command in (trained, many):
        done = nexus(*command, *tiny_run("train.steps=4"), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    runs = [read_run(path) for path in find_runs([tmp_path / "runs"])]
    assert len(runs) == 3
    used = [json.loads((run.path / "env.json").read_text())["plugins"] for run in runs]
    assert sorted(list(plugins) for plugins in used) == [[], ["my_options"], ["my_options"]]


def test_the_documented_python_works_as_it_is_written(plugin, tmp_path, monkeypatch):
    plugin()
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(block("python"), names)
    assert type(names["model"].final_norm).__name__ == "MyNorm"


@pytest.mark.slow
def test_the_documented_entry_point_makes_the_option_known_without_a_flag_or_an_import(tmp_path):
    files = {name.replace("my_options", "my_package/options"): text for name, text in FILES.items()}
    files["my_package/__init__.py"] = "raise RuntimeError('imported to look for options')"
    group, name, value = re.findall(r'"([\w.]+)"\]\n(\w+) = "([\w.]+)"', block("toml"))[0]
    files["my_package-1.dist-info/entry_points.txt"] = f"[{group}]\n{name} = {value}\n"
    files["my_package-1.dist-info/METADATA"] = "Metadata-Version: 2.1\nName: my_package\nVersion: 1\n"
    write(tmp_path, files)
    listed = nexus("list", "norm", "--json", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert json.loads(listed.stdout)["norm"]["my_norm"]["plugin"] == "my_package", listed.stderr
    write(tmp_path, {"my_package/__init__.py": ""})
    built = nexus("explain", "norm=my_norm", "--json", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert json.loads(built.stdout)["arm"] == "norm=my_norm", built.stderr


@pytest.mark.slow
def test_the_tests_of_every_option_take_a_plugin_s(plugin):
    tests = Path(__file__).parent
    chosen = ["-k", "test_every_option_changes_the_model and norm", "-p", "no:cacheprovider"]
    done = python("-m", "pytest", "test_model.py", *chosen, cwd=tests, NEXUS_ABLATE_PLUGINS=str(plugin()))
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


def test_a_plugin_s_option_is_composed_named_built_and_computes(plugin, tiny):
    add_plugins([plugin()])
    config = tiny("norm=my_norm", "norm.eps=1e-3")
    assert differences(config)["norm"] == "my_norm"
    assert config.resolved.norm_bias is False
    x = torch.tensor([[1.0, -3.0] * 8])
    norm = build_model(config, 11).blocks[0].norm_attn
    torch.testing.assert_close(norm(x), x / 2.001)


def test_processes_that_are_started_from_here_know_the_plugin_wherever_they_run(plugin, monkeypatch, tmp_path):
    directory = plugin()
    monkeypatch.chdir(tmp_path)
    compose(["norm=my_norm"], plugins=["my_options"])
    assert os.environ[VARIABLE] == str(directory)
    elsewhere = nexus("list", "norm", cwd=Path("/"), NEXUS_ABLATE_PLUGINS=os.environ[VARIABLE])
    assert "norm=my_norm" in elsewhere.stdout


def test_only_a_plugin_that_was_chosen_is_used_and_its_hash_follows_its_source_and_not_its_place(plugin, tmp_path):
    add_plugins([plugin()])
    assert plugins_used(compose(["norm=rms"])) == []
    (here,) = plugins_used(compose(["norm=my_norm"]))
    (moved,) = hashes_of(write(tmp_path / "elsewhere", FILES) / "my_options")
    (changed,) = hashes_of(write(tmp_path / "changed", FILES | {"my_options/other.py": "x = 1"}) / "my_options")
    assert here.sha256 == moved != changed


def hashes_of(directory: Path) -> list[str]:
    os.environ[VARIABLE] = str(directory)
    return [plugin.sha256 for plugin in plugins()]


def test_a_run_s_identity_covers_the_plugin_s_hash(plugin, tiny_run):
    config = compose(tiny_run("norm=my_norm", "train.steps=2"), plugins=[plugin()])
    hashes = {"my_options": plugins_used(config)[0].sha256}
    fingerprint = fingerprint_of(config.data, config.model.context)
    with_it, without = (identity(config.science(), fingerprint, source_hash(), chosen) for chosen in (hashes, {}))
    path = train(config, quiet=True).path
    assert path.name == f"s0-{with_it.hash8}" != f"s0-{without.hash8}"


def test_the_files_of_a_plugin_may_import_each_other(plugin):
    files = {"my_norm.py": "from .mean import MyNorm", "mean.py": CLASS}
    compose(["norm=my_norm"], plugins=[plugin(files)])
    assert NORM.get("my_norm").__name__ == "MyNorm"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"norm/my_norm.yaml": "name: my_norm\neps: [1\n"}, r"my_norm\.yaml:3: .* cannot be read"),
        ({"norm/my_norm.yaml": "# nothing\n"}, "has no keys"),
        ({"norm/my_norm.yaml": YAML.replace("#", "!")}, r"my_norm\.yaml"),
        ({"norm/my_norm.yaml": YAML.replace("# float (0, inf)", "")}, "no constraint"),
        ({"norm/my_norm.yaml": YAML.replace("name: my_norm", "name: mine")}, "must say name: my_norm"),
        ({"norm/my_norm.yaml": YAML.replace("{norm_bias: off}", "{norm_bais: off}")}, "try: norm_bias"),
        (
            {"norm/my_norm.yaml": YAML.replace("{norm_bias=on:", "{norm_bais=on:")},
            "names a key.*\n.*\n.*try: norm_bias",
        ),
        ({"norm/my_norm.yaml": f"{YAML}warns: {{bias=on norm.gain_inti@ffn=0: why}}\n"}, "try: norm.gain_init"),
        ({"norm/my_norm.yaml": f"{YAML}only: {{optm=adamw: why}}\n"}, "try: optim"),
        (
            {"norm/my_norm.yaml": f"{YAML}only: {{placement.norms=2: why}}\n"},
            "needs placement.norms=2: why\n.*placement=pre\n.*try: placement=parallel placement.norms=2",
        ),
        *(
            ({"norm/my_norm.yaml": f"{YAML}warns: {{{typed}: why}}\n"}, f"spelled otherwise\n.*{typed}\n.*: {spelled}$")
            for typed, spelled in SPELLINGS.items()
        ),
        (
            {"norm/my_norm.yaml": f"{YAML}warns: {{gate.site=sdap: why}}\n"},
            "never hold: gate.site takes.*\n.*\n.*=sdpa",
        ),
        ({"norm/my_norm.yaml": f"{YAML}warns: {{init=xaviar: why}}\n"}, "names an option.*\n.*\n.*try: init=xavier"),
        ({"nrom/my_norm.yaml": YAML}, "try: norm"),
        ({"norm/rms.yaml": YAML, "rms.py": CLASS}, "norm=rms already exists"),
        ({"my_norm.py": ""}, "has no class"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_broken_option_file_is_refused_when_it_is_composed(plugin, files, says):
    with pytest.raises(ConfigError, match=says):
        compose(["norm=my_norm"], plugins=[plugin(files)])


@pytest.mark.parametrize(("value", "warned"), [("auto", False), ("2", False), ("9", True)])
def test_a_rule_that_compares_a_number_does_not_hold_where_its_key_is_auto(plugin, value, warned):
    limit = "limit: auto  # auto | int [1, 99]; a limit\nwarns: {limit + 1 > 9: too many}\n"
    overrides = ["norm=my_norm", f"norm.limit={value}"]
    folder = plugin({"norm/my_norm.yaml": YAML + limit})
    notes = compose(overrides, plugins=[folder]).resolved.notes
    assert any("too many" in note for note in notes) == warned


def test_a_rule_holds_in_the_spelling_that_is_suggested(plugin):
    rules = ", ".join(f"{spelled}: because of {spelled}" for spelled in SPELLINGS.values())
    typed = ["norm=my_norm", *SPELLINGS]
    folder = plugin({"norm/my_norm.yaml": f'{YAML}warns: {{{rules}, "window=[4,0]": no}}\n'})
    notes = " ".join(compose(typed, plugins=[folder]).resolved.notes)
    assert all(f"because of {spelled}" in notes for spelled in SPELLINGS.values())


@pytest.mark.parametrize("group", CLASSES)
def test_the_rules_of_shipped_options_name_keys_and_options_that_exist(group):
    for option in option_files(group).values():
        check_settings(option)


@pytest.mark.parametrize("group", CLASSES)
def test_a_shipped_option_names_the_parametrizations_that_do_not_fit_and_leaves_those_of_plugins_open(group):
    assert not [rule for option in option_files(group).values() for rule in option.only if "param=" in rule]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (CLASS + "\n1 / 0\n", r"my_norm\.py:\d+: .*\n.*ZeroDivisionError"),
        (CLASS.replace("class MyNorm", "classMyNorm"), r"my_norm\.py:\d+: .*\n.*SyntaxError"),
        ("import nosuchmodule", r"my_norm\.py:1: .*\n.*nosuchmodule"),
        (CLASS.replace('"my_norm"', '"rms"'), r"my_norm\.py:\d+: .*\n.*twice"),
        (CLASS.replace('"my_norm"', '"another"'), "registers no class as norm=my_norm"),
        (CLASS.replace("eps: float", "epsilon: float"), "disagree on the keys"),
    ],
    ids=["raises", "syntax", "import", "taken", "unregistered", "keys"],
)
def test_a_broken_class_file_is_refused_with_its_line_when_it_is_built(plugin, tiny, source, says):
    add_plugins([plugin({"my_norm.py": source})])
    with pytest.raises(ConfigError, match=says) as refused:
        build_model(tiny("norm=my_norm"), 11)
    assert len(refused.value.lines()) <= 3


@pytest.mark.parametrize(
    ("prescribed", "says"),
    [
        ("embed_scale: foo", "embed_scale takes"),
        ("init: fan_inn", "prescribes an option of init that does not exist"),
        ("qk_norm: rms", "which only a placement can"),
        ("nope_every: 4", ""),
        ("nope_every: [0]", ""),
    ],
)
def test_a_value_that_an_option_prescribes_is_checked(plugin, prescribed, says):
    add_plugins([plugin({"norm/my_norm.yaml": re.sub("prescribes: .*", f"prescribes: {{{prescribed}}}", YAML)})])
    if says:
        with pytest.raises(ConfigError, match=says):
            compose(["norm=my_norm"])
    else:
        assert str(compose(["norm=my_norm"]).resolved.nope_every) == prescribed.partition(": ")[2]


def test_a_placement_prescribes_a_qk_norm_that_exists(plugin):
    placement = "# An example.\nname: my_place\nprescribes: {qk_norm: rmss}\n"
    add_plugins([plugin({"my_place.py": CLASS, "placement/my_place.yaml": placement})])
    with pytest.raises(ConfigError, match=r"an option of qk_norm that does not exist\n.*rmss.*\n.*: rms$"):
        compose(["placement=my_place"])


def test_a_mistake_with_a_plugin_is_three_lines_status_2_and_no_torch(tmp_path):
    write(tmp_path, FILES | {f"copy/{name}": text for name, text in FILES.items()})
    commands = (
        "--plugin",
        "--plugin nosuch list",
        "--plugin my_options norm=my_nrom",
        "--plugin my_options norm=my_norm norm.eps=-1",
        "--plugin my_options norm=my_norm norm_bias=on",
        "--plugin my_options --plugin=copy/my_options list",
    )
    for command, (status, lines) in zip(commands, answers([c.split() for c in commands], tmp_path), strict=True):
        assert status == 2 and [line.split(":")[0].strip() for line in lines] == ["error", "got", "try"], command
