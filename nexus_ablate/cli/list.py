"""`nexus-ablate list`: every option, key and switch with its meaning and citation, read from conf/ without torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nexus_ablate.cli.verb import Flag, Flags, Verb
from nexus_ablate.config.evaluations import evaluation_value
from nexus_ablate.config.grammar import show
from nexus_ablate.config.groups import choices_of
from nexus_ablate.config.options import OptionFile, conf_dir, conf_yaml, option_files
from nexus_ablate.config.run_config import CLOSED_GROUPS, OPTION_GROUPS, RunConfig
from nexus_ablate.errors import OK, unknown
from nexus_ablate.measure.measures import MEASURES

VERB = Verb(
    "list",
    "every option with its citation",
    "[GROUP ...]",
    (
        ("list", "every option and switch, one line each"),
        ("list norm placement", "these groups, with the keys of each option"),
        ("list measures", "every number that a run can produce"),
    ),
    (Flag("--json", "", "for programs"),),
    "docs/options.md shows the same with equations.",
    kind="runs",
)


def run(words: list[str], flags: Flags) -> int:
    """Print the options of the named groups, or of all."""
    options = catalogue()
    measures = {measure.names[0]: dataclasses.asdict(measure) for measure in MEASURES}
    groups = options | {"measures": measures}
    for name in words:
        if name not in groups:
            problem, form = "there is no group of this name", "nexus-ablate list {}"
            raise unknown(problem, name, groups, form, otherwise="nexus-ablate list")
    chosen = {name: groups[name] for name in words or options}
    if "json" in flags:
        print(json.dumps(chosen, indent=1))
    else:
        _print(chosen, with_keys=bool(words))
    return OK


def catalogue() -> dict[str, Any]:
    """`{summary, default, keys}` by group and option, on axes also `equation`, `prescribes` and `plugin`. The group
    `switches` has the top-level keys."""
    values, defaults = conf_yaml("config"), choices_of("config")
    groups: dict[str, Any] = {}
    for group in (*OPTION_GROUPS, "evaluation"):
        groups[group] = {name: _option(file, name == defaults.get(group)) for name, file in option_files(group).items()}
    for group in (*CLOSED_GROUPS, "preset", "studies"):
        paths = sorted(conf_dir().joinpath(group).glob("*.yaml"))
        if group == "model":
            paths.sort(key=_parameters)
        groups[group] = {path.stem: _closed_option(group, path, path.stem == defaults.get(group)) for path in paths}
    switches = [field for field in dataclasses.fields(RunConfig) if "constraint" in field.metadata]
    groups["switches"] = {field.name: _key(field, values) for field in switches if field.name != "preset"}
    return groups


def _option(file: OptionFile, is_default: bool) -> dict[str, Any]:
    """An option of an axis, as its file describes it."""
    keys = {}
    for name, key in file.keys.items():
        keys[name] = {"default": key.default, "takes": key.constraint.text, "meaning": key.meaning}
    return {
        "summary": file.summary,
        "default": is_default,
        "equation": file.equation,
        "prescribes": [f"{key}={show(value)}" for key, value in file.prescribes.items()],
        "plugin": file.plugin.name if file.plugin else None,
        "keys": keys,
    }


def _closed_option(group: str, path: Path, is_default: bool) -> dict[str, Any]:
    """An option of a group to which no class belongs: a size, a recipe, a preset or a study."""
    values = conf_yaml(f"{group}/{path.stem}")
    if group == "studies":
        return {"summary": values["question"], "default": False, "keys": {}}
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if not line.startswith("# @package")]
    keys = {}
    if group in CLOSED_GROUPS:
        fields = dataclasses.fields(CLOSED_GROUPS[group])
        keys = {field.name: _key(field, values) for field in fields if field.name != "name"}
    return {"summary": comments[0], "default": is_default, "keys": keys}


def _key(field: dataclasses.Field[Any], values: dict[str, Any]) -> dict[str, Any]:
    """A key of a dataclass, with its default in `values`."""
    about = field.metadata
    return {"default": values.get(field.name), "takes": about["constraint"].text, "meaning": about["meaning"]}


def _parameters(path: Path) -> int:
    """A number that is proportional to the parameters of a model's blocks."""
    values = conf_yaml(f"model/{path.stem}")
    return values["n_layers"] * values["d_model"] ** 2


def _print(groups: dict[str, Any], with_keys: bool) -> None:
    from nexus_ablate.console import folded, open_console

    console = open_console()
    for group, options in groups.items():
        rows, styles = [], []
        for *row, style in _rows(group, options, with_keys):
            rows.append(row)
            styles.append(style)
        console.print(f"\n[bold]{group}[/bold]")
        console.print(folded(rows, styles=styles))
    console.print("\n[dim]* the baseline; `nexus-ablate list GROUP` shows the keys of its options[/dim]")


def _rows(group: str, options: dict[str, Any], with_keys: bool) -> Iterator[tuple[str, str, str]]:
    """What is typed, its meaning, and a style, for each option of a group and each of its keys."""
    shares_keys = group in CLOSED_GROUPS  # the sizes, and the recipes
    for name, option in options.items():
        if group == "measures":
            facts = [option["definition"], option["unit"], ", ".join(option["where"]), option["source"]]
            yield f"  {name}", "; ".join(filter(None, facts)), ""
            continue
        if group == "switches":
            yield f"  {name}={show(option['default'])}", f"{option['takes']}; {option['meaning']}", ""
            continue
        source = f" (plugin {option['plugin']})" if option.get("plugin") else ""
        star = "*" if option["default"] else " "
        yield f"{star} {typed_option(group, name)}", option["summary"] + source, ""
        if not with_keys:
            continue
        if option.get("prescribes"):
            yield "", f"Prescribes {', '.join(option['prescribes'])}.", "dim"
        if shares_keys and name != list(options)[-1]:
            continue
        for key, spec in option["keys"].items():
            typed = typed_key(group, name, key)
            if not (shares_keys and len(options) > 1):
                typed += typed_default(group, spec)
            yield f"    {typed}", f"{spec['takes']}; {spec['meaning']}", "dim"


def typed_option(group: str, name: str) -> str:
    """The override, or the words after the verb, that choose an option."""
    if group == "studies":
        return f"study {name}"
    return f"evals=[{name}]" if group == "evaluation" else f"{group}={name}"


def typed_key(group: str, name: str, key: str) -> str:
    """An option's key as it is typed in an override."""
    return f"{name}:{key}" if group == "evaluation" else f"{group}.{key}"


def typed_default(group: str, key: dict[str, Any]) -> str:
    """The default of a key as it is typed after the key's name."""
    return f":{evaluation_value(key['default'])}" if group == "evaluation" else f"={show(key['default'])}"
