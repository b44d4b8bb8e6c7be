"""`nexus-ablate list`: every option, key and switch with its meaning and citation, read from conf/ without torch."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import Flag, Verb
from nexus_ablate.config.grammar import show
from nexus_ablate.config.options import conf_dir, evaluation_value, option_files
from nexus_ablate.config.run_config import CLOSED_GROUPS, OPTION_GROUPS, RunConfig
from nexus_ablate.measure.measures import MEASURES, SECTIONS, table
from nexus_ablate.plain_data import load_yaml

VERB = Verb(
    "list",
    "every option with its citation",
    "[GROUP ...]",
    (
        ("list", "every option and switch, one line each"),
        ("list norm placement", "these groups, with the keys of each option"),
        ("list measures", "every number that a run can produce"),
    ),
    (
        Flag("--json", "", "for programs"),
        Flag("--markdown", "", "as a page, with equations (docs/options.md)"),
    ),
    kind="runs",
)


def run(words: list[str], flags: dict[str, Any]) -> int:
    """Print the options of the named groups, or of all."""
    options = catalogue()
    everything = options | {"measures": measures()}
    for name in words:
        if name not in everything:
            raise errors.unknown(
                "there is no group of this name",
                name,
                everything,
                "nexus-ablate list {}",
                otherwise="nexus-ablate list",
            )
    chosen = {name: everything[name] for name in words or options}
    if "json" in flags:
        json.dump(chosen, sys.stdout, indent=1)
        print()
    elif "markdown" in flags:
        print(markdown(chosen))
    else:
        _print(chosen, with_keys=bool(words))
    return errors.OK


def catalogue() -> dict[str, Any]:
    """`{summary, default, keys}` by group and option, on axes also `equation`, `prescribes` and `plugin`. The group
    `switches` has the top-level keys."""
    defaults = _defaults()
    groups: dict[str, Any] = {}
    for group in (*OPTION_GROUPS, "evaluation"):
        groups[group] = {
            name: {
                "summary": option.summary,
                "default": defaults.get(group) == name,
                "equation": option.equation,
                "prescribes": [f"{key}={show(value)}" for key, value in option.prescribes.items()],
                "plugin": option.plugin.name if option.plugin else None,
                "keys": {k: _key(s.default, s.constraint.text, s.meaning) for k, s in option.keys.items()},
            }
            for name, option in option_files(group).items()
        }
    for group, cls in (*CLOSED_GROUPS.items(), ("preset", None), ("studies", None)):
        groups[group] = {
            path.stem: {
                "summary": _summary(path),
                "default": defaults.get(group) == path.stem,
                "keys": _dataclass_keys(cls, path) if cls else {},
            }
            for path in sorted(conf_dir().joinpath(group).glob("*.yaml"), key=_parameters if group == "model" else None)
        }
    values = _yaml(conf_dir() / "config.yaml")
    groups["switches"] = {
        f.name: _key(values.get(f.name), f.metadata["constraint"].text, f.metadata["meaning"])
        for f in dataclasses.fields(RunConfig)
        if "constraint" in f.metadata and f.name != "preset"
    }
    return groups


def measures() -> dict[str, Any]:
    """Every number that a run can produce, by name."""
    return {name: dataclasses.asdict(measure) for measure in MEASURES for name in measure.names[:1]}


def _key(default: Any, takes: str, meaning: str) -> dict[str, Any]:
    return {"default": default, "takes": takes, "meaning": meaning}


def _dataclass_keys(cls: type, path: Path) -> dict[str, Any]:
    values = _yaml(path)
    return {
        f.name: _key(values[f.name], f.metadata["constraint"].text, f.metadata["meaning"])
        for f in dataclasses.fields(cls)
        if f.name != "name"
    }


def _yaml(path: Path) -> dict[str, Any]:
    return load_yaml(path.read_text(encoding="utf-8"))


def _defaults() -> dict[str, str]:
    return {
        k: v
        for entry in _yaml(conf_dir() / "config.yaml")["defaults"]
        if isinstance(entry, dict)
        for k, v in entry.items()
    }


def _parameters(path: Path) -> int:
    """A number that is proportional to the parameters of a model's blocks."""
    values = _yaml(path)
    return values["n_layers"] * values["d_model"] ** 2


def _summary(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("#").strip() for line in lines if not line.startswith("# @package"))


def _print(groups: dict[str, Any], with_keys: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    from nexus_ablate.console import open_console

    console = open_console()
    for group, options in groups.items():
        console.print(f"\n[bold]{group}[/bold]")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        if group == "measures":
            for name, measure in options.items():
                facts = [measure["unit"], ", ".join(measure["where"]), measure["source"]]
                grid.add_row(f"  {escape(name)}", escape("; ".join(filter(None, [measure["definition"], *facts]))))
        elif group == "switches":
            for name, spec in options.items():
                grid.add_row(f"  {name}={show(spec['default'])}", escape(_takes(spec)))
        else:
            for name, option in options.items():
                star = "[green]*[/green]" if option["default"] else " "
                source = f" (plugin {option['plugin']})" if option.get("plugin") else ""
                typed = _typed(group, name)
                grid.add_row(f"{star} {escape(typed)}", escape(option["summary"] + source))
                if with_keys and option.get("prescribes"):
                    grid.add_row("", f"[dim]{escape(_prescribed(option['prescribes']))}[/dim]")
                last = name == list(options)[-1]
                if with_keys and (group not in CLOSED_GROUPS or last):  # sizes and recipes share their keys
                    for key, spec in option["keys"].items():
                        default = "" if group in CLOSED_GROUPS and len(options) > 1 else _set_to(group, spec)
                        grid.add_row(
                            f"    [dim]{_prefix(group, name)}{key}{escape(default)}[/dim]",
                            f"[dim]{escape(_takes(spec))}[/dim]",
                        )
        console.print(grid)
    console.print("\n[dim]* the baseline; `nexus-ablate list GROUP` shows the keys of its options[/dim]")


def markdown(groups: dict[str, Any]) -> str:
    """A page of the groups of `catalogue`: every option with its equations, its keys and its source."""
    about = (
        "Every option with its equation, keys and source. `*` is the baseline. Made by `nexus-ablate list --markdown`."
    )
    lines = ["# Options", "", about, "", option_table(groups), ""]
    for group, options in groups.items():
        lines += [f"## {group}", ""]
        if group == "measures":
            lines += [line for section in SECTIONS for line in (f"### {section}", "", table(section), "")]
            continue
        if group == "switches":
            lines += _key_table(options, "")
            continue
        for name, option in options.items():
            typed = _typed(group, name)
            lines += [f"**`{typed}`**{' *' if option['default'] else ''} {option['summary']}", ""]
            if option.get("equation"):
                lines += ["    " + equation for equation in option["equation"]] + [""]
            if option.get("prescribes"):
                lines += [_prescribed([f"`{override}`" for override in option["prescribes"]]), ""]
            if option["keys"] and group not in CLOSED_GROUPS:
                lines += _key_table(option["keys"], _prefix(group, name))
        if group in CLOSED_GROUPS:  # all options of the group have the same keys
            default = next((o for o in options.values() if o["default"]), next(iter(options.values())))
            lines += _key_table(default["keys"], group + ".")
    return "\n".join(lines).rstrip()


def _prescribed(overrides: list[str]) -> str:
    """The values that an option prescribes for other keys."""
    return f"Prescribes {', '.join(overrides)}."


def _key_table(keys: dict[str, Any], prefix: str) -> list[str]:
    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    group = "evaluation" if prefix.endswith(":") else ""
    rows = [
        f"| `{prefix}{name}{_set_to(group, spec)}` | {cell(spec['takes'])} | {cell(spec['meaning'])} |"
        for name, spec in keys.items()
    ]
    return ["| key | takes | meaning |", "|---|---|---|", *rows, ""]


def option_table(groups: dict[str, Any]) -> str:
    """One row per group with the names of its options; the baseline's option has a star."""
    rows = ["| group | options |", "|---|---|"]
    for group, options in groups.items():
        if group == "switches":
            names = [f"`{name}`" for name in options]
        else:
            first = sorted(options, key=lambda name: not options[name]["default"])
            names = [f"`{name}`" + "*" * options[name]["default"] for name in first]
        rows.append(f"| `{'study' if group == 'studies' else group}` | {' '.join(names)} |")
    return "\n".join(rows)


def _typed(group: str, name: str) -> str:
    """The override, or the words after the verb, that choose an option."""
    return {"studies": f"study {name}", "evaluation": f"evals=[{name}]"}.get(group, f"{group}={name}")


def _prefix(group: str, name: str) -> str:
    """The prefix of an option's key in an override."""
    return f"{name}:" if group == "evaluation" else f"{group}."


def _set_to(group: str, spec: dict[str, Any]) -> str:
    """The default of a key as it is typed after the key's name."""
    return f":{evaluation_value(spec['default'])}" if group == "evaluation" else f"={show(spec['default'])}"


def _takes(spec: dict[str, Any]) -> str:
    """A key's constraint and meaning, as in its YAML comment."""
    return f"{spec['takes']}; {spec['meaning']}"
