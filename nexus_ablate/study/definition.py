"""The study that a command asks for: a YAML file, a shipped or launched study, or a new name; then KEY=VALUE.

`vary.KEY=A,B`, `arms.NAME=OVERRIDES` and `settings.NAME=OVERRIDES` are parts of a study, its keys are themselves
(`seeds=0-7`), and every other override joins the baseline.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from nexus_ablate.config.compose import compose
from nexus_ablate.config.grammar import show
from nexus_ablate.config.options import conf_dir
from nexus_ablate.config.override_syntax import quoted, read_override
from nexus_ablate.config.overrides import check_overrides
from nexus_ablate.errors import ConfigError, did_you_mean
from nexus_ablate.plain_data import UNREADABLE, load_yaml
from nexus_ablate.runs.lookup import DEFAULT
from nexus_ablate.runs.reading import read_text, setting_folders
from nexus_ablate.study.arm_overrides import OF_ONE_RUN, YAML, in_yaml, is_override, key_of, merged, says_how
from nexus_ablate.study.record import load
from nexus_ablate.study.study import TYPED, Study, encode, from_values


def read_study(words: list[str], verb: str = "study") -> tuple[Study, list[str]]:
    """The study of `nexus-ablate study NAME KEY=VALUE ...`, and the overrides for how its runs are carried out.

    Args:
        words: NAME, then the overrides. NAME is the path of a YAML file, a shipped study, a study launched before (its
            name or its folder), or a new name together with `vary.KEY=` or `arms.NAME=`.
        verb: The verb that they were typed after, for the errors.

    Raises:
        ConfigError: The study does not exist, or its definition is invalid.
    """
    if not words or is_override(words[0]):
        name = "mine" if any(word.startswith(("vary.", "arms")) for word in words) else "norms"
        fix = shlex.join(["nexus-ablate", verb, name, *words])
        raise ConfigError("the name of the study comes first", shlex.join(words), fix)
    source, typed, overrides, launch = words[0], {}, [], []
    keys = {word.partition("=")[0] for word in words[1:]}
    for word in words[1:]:
        key, _, value = word.partition("=")
        part, _, name = key.partition(".")
        if name and part in ("vary", "arms", "settings"):
            if part in keys:
                raise ConfigError(f"{part} is typed as a whole or in parts", word, f"leave {part}=... out")
            typed.setdefault(part, {})[name] = _listed(key, value) if part == "vary" else value
        elif key in TYPED:
            typed[key] = _typed(key, value)
        elif key in OF_ONE_RUN:
            raise ConfigError(f"a study does not take {key}", word, OF_ONE_RUN[key])
        elif says_how(key):
            launch.append(word)
        else:
            overrides.append(word)
    is_folder = any((folder / "study.yaml").is_file() for folder in setting_folders(Path(source)))
    is_folder = is_folder and not any(key_of(word) == "runs_dir" for word in launch)
    if is_folder:
        folder = Path(source).resolve()
        source = folder.name
        if folder.parent != DEFAULT.resolve():
            launch.append(f"runs_dir={quoted(folder.parent)}")
    as_launched = is_folder or (typed.keys() == {"name", "seeds"} and not overrides)
    command = ["nexus-ablate", verb, *words]
    values = _values_of(source, typed, overrides, runs_dir_of(launch), as_launched, command)
    study = from_values(values | typed, typed)
    study = replace(study, baseline=merged(study.baseline, overrides))
    check_overrides(study.baseline, sweeps=False, beside=TYPED)
    own = {}
    if study.source and not study.setting:  # as launched: each setting has a record
        for setting in study.settings:
            if (runs_dir_of(launch) / f"{source}@{setting}" / "study.yaml").exists():
                own[setting], _ = read_study([f"{words[0].rstrip('/')}@{setting}", *words[1:]], verb)
    return replace(study, own=own), merged(launch)


def settings_of(study: Study) -> list[Study]:
    """The study of each setting; the study itself where it has none, or is one of them."""
    if study.setting or not study.settings:
        return [study]
    return [study.own.get(setting, replace(study, setting=setting)) for setting in study.settings]


def folders_of(path: Path) -> list[Path]:
    """The folders of a study's settings in the order of its file, of one without settings its own."""
    folders = setting_folders(path)
    study = next((study for folder in folders if (study := load(folder))), None)
    order = [f"{path.name}@{setting}" for setting in study.settings] if study else []
    return sorted(folders, key=lambda folder: [*order, folder.name].index(folder.name))


def runs_dir_of(launch: list[str]) -> Path:
    """The folder for the runs of a launch: `runs_dir` in its overrides, or `runs`.

    Raises:
        ConfigError: The override cannot be read.
    """
    typed = [text for text in launch if key_of(text) == "runs_dir"]
    return Path(compose([typed[-1]]).runs_dir) if typed else DEFAULT


def shipped_studies() -> dict[str, Path]:
    """The studies of conf/studies by name."""
    return {path.stem: path for path in sorted(conf_dir().joinpath("studies").glob("*.yaml"))}


# --------------------------------------------------------------------------------------------------- the study's source


def _values_of(
    source: str, typed: dict[str, Any], overrides: list[str], runs_dir: Path, as_launched: bool, command: list[str]
) -> dict[str, Any]:
    """What is written of a study before the command line has its say.

    Args:
        as_launched: A shipped study means the one that was launched under its name, if there is one.
        command: All that was typed, for the errors.

    Raises:
        ConfigError: There is no such study.
    """
    shipped = shipped_studies()
    if source.endswith(YAML):
        file = Path(os.path.expanduser(source))
        name = typed.get("name", file.stem)
        if name in shipped and file.resolve() != shipped[name].resolve():
            fix = shlex.join([*command, f"name=my_{name}"])
            raise ConfigError(f"{name} is a shipped study, so `study {name}` would not be this one", source, fix)
        return read_file(file)
    launched = None
    if as_launched or source not in shipped:
        launched = load(folders_of(runs_dir / source)[0])
    if source in shipped and launched is None:
        return read_file(shipped[source])
    program, verb, first, *words = command
    another_name = f"{source.partition('@')[0]}-2"
    swept = [text for text in overrides if "," in text and read_override(text).is_sweep]
    if swept and "arms" not in typed:
        name = first if launched is None else another_name
        varied = [f"vary.{word}" if word in swept else word for word in words]
        fix = shlex.join([program, verb, name, *varied])
        raise ConfigError("a key with several values in a study is written vary.KEY", swept[0], fix)
    if typed.get("vary") or typed.get("arms"):
        return {"name": source}
    if launched is not None:
        changes = [word for word in words if key_of(word) != "seeds" and not says_how(key_of(word))]
        if changes and "name" not in typed:
            fix = shlex.join([program, verb, first, f"name={another_name}", *words])
            raise ConfigError("a launched study is fixed; a new name can change it", " ".join(changes), fix)
        if "name" in typed:
            launched = replace(launched, added_seeds=[])
        return encode(replace(launched, setting=source.partition("@")[2]))
    raise unknown_study(source, runs_dir)


def unknown_study(name: str, runs_dir: Path) -> ConfigError:
    """The error for a study that is neither shipped nor launched."""
    launched = {path.parent.name.partition("@")[0] for path in runs_dir.glob("*/study.yaml")}
    near = did_you_mean(name, [*shipped_studies(), *sorted(launched)])
    return ConfigError("there is no study of this name", name, near or "nexus-ablate list studies")


def read_file(path: Path) -> dict[str, Any]:
    """The values of a study's file, with its name.

    Raises:
        ConfigError: It cannot be read.
    """
    text = read_text(path)
    if text is None:
        here = sorted(other.name for other in path.parent.glob("*.y*ml"))
        near = did_you_mean(path.name, here) or next(iter(here), "")
        fix = shlex.quote(str(path.with_name(near))) if near else "nexus-ablate list studies"
        raise ConfigError("there is no such file", str(path), fix)
    try:
        values = load_yaml(text)
    except UNREADABLE as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = str(getattr(error, "problem", None) or error)
        fix = f"correct {where}"
        line = text.splitlines()[mark.line] if mark else ""
        key, _, value = line.partition(": ")
        if ": " in value:
            fix = f"{key}: {in_yaml(value.strip())}"
        raise ConfigError(f"{where}: this study cannot be read", line.strip() or problem, fix) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a study", text.strip()[:60] or "an empty file", "vary: {norm: [layer, rms]}")
    return {"name": path.stem} | values


def _listed(key: str, text: str) -> list[str]:
    """The items of `a,b,c`; brackets group items."""
    try:
        return [item if isinstance(item, str) else show(item) for item in load_yaml(f"[{text}]")]
    except UNREADABLE as error:
        raise ConfigError(f"{key} cannot be read", text, f"{key}=A,B") from error


def _typed(key: str, text: str) -> Any:
    """A value of a study's key, as typed after `=`."""
    if key in ("seeds", "name", "question", "design", "match"):
        return text
    try:
        value = load_yaml(text)
        if key in ("lr_grid", "endpoints") and isinstance(value, str) and value != "auto":
            return [load_yaml(item) for item in text.split(",")]
    except UNREADABLE as error:
        raise ConfigError(f"{key} cannot be read", text, f"{key}=...") from error
    return value
