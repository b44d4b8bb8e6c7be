"""`nexus-ablate list`: every option, key and switch with its meaning and citation, read from conf/ without torch."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nexus_ablate.cli.flags import JSON, Flags
from nexus_ablate.cli.verb import Verb
from nexus_ablate.config.evaluations import evaluation_value
from nexus_ablate.config.foreign_words import meaning
from nexus_ablate.config.grammar import show
from nexus_ablate.config.groups import choices_of, keys_of_file
from nexus_ablate.config.options import Key, OptionFile, conf_dir, conf_yaml, option_files
from nexus_ablate.config.run_config import CLOSED_GROUPS, OPTION_GROUPS
from nexus_ablate.errors import OK, unknown
from nexus_ablate.measure.measures import MEASURES

VERB = Verb(
    "list",
    "every option with its citation, or those that a word is about",
    "[GROUP|WORD ...]",
    (
        ("list", "every option and switch, one line each"),
        ("list norm placement", "these groups, with the keys of each option"),
        ("list grouped", "every option, key and number whose name or sentence has this word"),
        ("list measures", "every number that a run can produce"),
    ),
    (JSON,),
    "docs/options.md shows the same with equations.",
    kind="runs",
)


def run(words: list[str], flags: Flags) -> int:
    """Print the options of the named groups, those that a word is about, or all."""
    options = catalogue()
    groups = options | {"measures": {measure.names[0]: dataclasses.asdict(measure) for measure in MEASURES}}
    chosen: dict[str, Any] = {} if words else options
    notes = []
    for word in words:
        if word in groups:
            chosen = chosen | {word: groups[word]}
            continue
        found, meant = about(word, groups), meaning(word)
        if not found and not meant:
            problem, form = "nothing here has this name or word", "nexus-ablate list {}"
            raise unknown(problem, word, groups, form, otherwise="nexus-ablate list")
        switch = meant.partition("=")[0]
        if switch in options["switches"]:
            found["switches"] = {switch: options["switches"][switch]}
        for group, of_group in found.items():
            shown = chosen.setdefault(group, {})
            for name, option in of_group.items():
                before = shown.get(name, option)
                shown[name] = before | {"keys": before.get("keys", {}) | option.get("keys", {})}
        notes += [f"{word} is typed {meant}"] * bool(meant)
    if "json" in flags:
        print(json.dumps(chosen, indent=1))
    else:
        _print(chosen, notes, with_keys=bool(words))
    return OK


def about(word: str, groups: dict[str, Any]) -> dict[str, Any]:
    """The options whose name or sentences have a word, and those of which a key has, with these keys alone."""

    def has_word(*texts: str) -> bool:
        return any(_plain(word) in _plain(text) for text in texts)

    found: dict[str, Any] = {}
    for group, options in groups.items():
        for name, option in options.items():
            keys = {}
            for key, spec in option.get("keys", {}).items():
                if has_word(key, spec["meaning"]):
                    keys[key] = spec
            if group in CLOSED_GROUPS and name != list(options)[-1]:  # their keys are listed once
                keys = {}
            if keys or has_word(name, *(value for value in option.values() if isinstance(value, str))):
                found.setdefault(group, {})[name] = option | {"keys": keys}
    return found


def _plain(text: str) -> str:
    """A text in which case, `_`, `-` and spaces make no difference."""
    return re.sub("[ _-]", "", text.lower())


def catalogue() -> dict[str, Any]:
    """`{summary, default, keys}` by group and option, on axes also `equation`, `prescribes` and `plugin`. The group
    `switches` has the top-level keys."""
    defaults = choices_of("config")
    groups: dict[str, Any] = {}
    for group in (*OPTION_GROUPS, "evaluation"):
        groups[group] = {name: _option(file, name == defaults.get(group)) for name, file in option_files(group).items()}
    for group in (*CLOSED_GROUPS, "preset", "studies"):
        paths = sorted(conf_dir().joinpath(group).glob("*.yaml"))
        if group == "model":
            paths.sort(key=_parameters)
        groups[group] = {path.stem: _closed_option(group, path, path.stem == defaults.get(group)) for path in paths}
    groups["switches"] = _described(keys_of_file("config"))
    del groups["switches"]["preset"]
    return groups


def _described(keys: Mapping[str, Key]) -> dict[str, Any]:
    """Keys as plain data, without the one that chooses the option itself."""
    described = {}
    for name, key in keys.items():
        if name != "name":
            described[name] = {"default": key.default, "takes": key.constraint.text, "meaning": key.meaning}
    return described


def _option(file: OptionFile, is_default: bool) -> dict[str, Any]:
    """An option of an axis, as its file describes it."""
    return {
        "summary": file.summary,
        "default": is_default,
        "equation": file.equation,
        "prescribes": [f"{key}={show(value)}" for key, value in file.prescribes.items()],
        "plugin": file.plugin.name if file.plugin else None,
        "keys": _described(file.keys),
    }


def _closed_option(group: str, path: Path, is_default: bool) -> dict[str, Any]:
    """An option of a group to which no class belongs: a size, a recipe, a preset or a study."""
    if group == "studies":
        return {"summary": conf_yaml(f"{group}/{path.stem}")["question"], "default": False, "keys": {}}
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if not line.startswith("# @package")]
    keys = keys_of_file(f"{group}/{path.stem}") if group in CLOSED_GROUPS else {}
    return {"summary": comments[0], "default": is_default, "keys": _described(keys)}


def _parameters(path: Path) -> int:
    """A number that is proportional to the parameters of a model's blocks."""
    values = conf_yaml(f"model/{path.stem}")
    return values["n_layers"] * values["d_model"] ** 2


def _print(groups: dict[str, Any], notes: list[str], with_keys: bool) -> None:
    from nexus_ablate.console import folded, open_console

    console = open_console()
    for note in notes:
        console.print(note, markup=False)
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
        if with_keys and option.get("prescribes"):
            yield "", f"Prescribes {', '.join(option['prescribes'])}.", "dim"
        if not with_keys or (shares_keys and name != list(options)[-1]):
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
