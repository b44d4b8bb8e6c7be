"""The study that a command asks for: from a YAML file, `key=value` on the command line, or both.

On the command line `vary.KEY=A,B` is a factor, `strata.KEY=A,B` are strata, the keys of a study are themselves
(`seeds=0,1,2`), and every other override joins the baseline.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from nexus_ablate.config.compose import compose
from nexus_ablate.config.grammar import show
from nexus_ablate.config.options import conf_dir
from nexus_ablate.config.override_syntax import quoted
from nexus_ablate.config.overrides import NO_KEY, check_overrides
from nexus_ablate.errors import ConfigError, did_you_mean
from nexus_ablate.masking import mask
from nexus_ablate.plain_data import UNREADABLE, load_yaml
from nexus_ablate.runs.lookup import DEFAULT
from nexus_ablate.runs.record import with_strata
from nexus_ablate.study.arm_overrides import OF_ONE_RUN, YAML, is_override, key_of, merged, says_how
from nexus_ablate.study.decoding import decode, decode_file, in_yaml, listed_endpoints, read_study
from nexus_ablate.study.panel import STUDY as PANEL
from nexus_ablate.study.panel import read_panel
from nexus_ablate.study.schema import CLAIM_SEEDS, STUDY_NAME, WRITTEN_BY_A_LAUNCH, Study

_LISTS = ("seeds", "tuning_seeds", "lr_grid", "endpoints")
_TYPED = (*_LISTS, "name", "question", "design", "match", "endpoint", "delta_min")
"""Keys of a study that can be typed on a command line."""


@dataclass(frozen=True)
class Request:
    """A study, and the overrides for how its runs are carried out.

    Attributes:
        whole: For a stratum that was asked for by its name before its study was launched: that study.
        strata: For a study whose strata were launched, and which no file describes: each of them.
    """

    study: Study
    launch: list[str]
    whole: Request | None = None
    strata: list[Request] = field(default_factory=list)

    @property
    def runs_dir(self) -> Path:
        return runs_dir_of(self.launch)

    @property
    def directory(self) -> Path:
        return self.runs_dir / self.study.name


@dataclass(frozen=True)
class _Words:
    """What was typed after a study's name.

    Attributes:
        values: Keys of the study, strata among them.
        overrides: Of the baseline.
        launch: How runs are carried out.
    """

    values: dict[str, Any]
    factors: dict[str, list[Any]]
    overrides: list[str]
    launch: list[str]

    @property
    def changes_strata(self) -> bool:
        """Whether launched strata are not meant as they are."""
        return bool(self.factors or self.overrides or self.values.keys() & {"strata", "name"})


def read_request(words: list[str]) -> Request:
    """The study requested by `nexus-ablate study NAME KEY=VALUE ...`.

    Args:
        words: NAME, then the overrides. NAME is the path of a YAML file, a shipped study or STUDY@STRATUM of one, a
            study launched before, by its name or its directory, or a new name together with `vary.KEY=`.

    Raises:
        ConfigError: The study does not exist, or its definition is invalid.
    """
    source, *rest = words or [""]
    if is_override(source) or not source:
        name, _, value = source.partition("=")
        named = ["norms", source] if source else ["norms"]
        if name in ("experiment", "name"):
            named = [value]
        raise ConfigError("the name of the study comes first", source, shlex.join(named))
    if (Path(source) / "study.yaml").is_file():
        source, rest = _by_name(source, rest)
    typed = _read_words(rest)
    runs_dir = runs_dir_of(typed.launch)
    study_name, _, stratum = source.partition("@")
    if stratum and _shipped(study_name) and not read_study(runs_dir / source):
        return _stratum(read_request([study_name, *rest]), stratum)
    if not (typed.changes_strata or source.endswith(YAML) or _shipped(source)):
        launched = [read_request([name, *rest]) for name in _launched_strata(runs_dir / source)]
        if launched:
            return Request(structs.replace(launched[0].study, name=source), typed.launch, strata=launched)
    study = _study(source, typed, runs_dir)
    study = structs.replace(study, baseline=merged(study.baseline, typed.overrides))
    check_overrides(study.baseline, sweeps=False, beside=_TYPED)
    _check_against_strata(study, typed.overrides, words)
    _check_folder(study, runs_dir)
    return Request(study, typed.launch)


def _by_name(source: str, words: list[str]) -> tuple[str, list[str]]:
    """The name of the study of a directory, and the words with the folder that it is in.

    Raises:
        ConfigError: The words name another folder.
    """
    directory = Path(source)
    if runs_dirs := [text for text in words if key_of(text) == "runs_dir"]:
        if source == directory.name:  # one in `runs_dir` is meant
            return source, words
        problem = "runs_dir cannot be combined with the directory of a study"
        raise ConfigError(problem, runs_dirs[0], f"leave {runs_dirs[0]} out")
    if directory.name in ("", ".."):
        directory = directory.resolve()
    return directory.name, [*words, f"runs_dir={quoted(directory.parent)}"]


def _read_words(words: list[str]) -> _Words:
    """What follows the name of a study on the command line.

    Raises:
        ConfigError: A word is no override, or contradicts another one.
    """
    values, looks, factors, strata, overrides, launch = {}, {}, {}, {}, [], []
    for text in words:
        name, _, value = text.partition("=")
        prefix, _, key = name.partition(".")
        if prefix in ("vary", "strata"):
            several = factors if prefix == "vary" else strata
            if key in several:
                once = dict.fromkeys(map(show, [*several[key], *_items(name, value)]))
                raise ConfigError(f"{name} is given twice", text, f"{name}={','.join(once)}")
            several[key] = _items(name, value)
            _check_key(prefix, key, several[key][:1], value)
        elif name in _LISTS:
            values[name] = _flat(_items(name, value))
            if name == "seeds" and value.isdecimal() and int(value):
                values[name] = int(value)  # is `seeds=3` the seed 3 or three seeds? refused, as in a file
        elif name in _TYPED:
            values[name] = value
        elif name in ("seeds.looks", "seeds.weights"):
            looks[name.removeprefix("seeds.")] = _flat(_items(name, value))
        elif name in OF_ONE_RUN:
            fix = shlex.quote(f"name={value}") if name == "experiment" else OF_ONE_RUN[name]
            raise ConfigError(f"a study does not take {name}", text, fix)
        elif says_how(name):
            launch.append(text)
        else:
            overrides.append(text)
    if looks and "seeds" in values:
        got = f"seeds={show(values['seeds'])} beside seeds.{next(iter(looks))}"
        raise ConfigError("looks already define the seeds", got, "seeds.looks=8,12,20 alone, or seeds=0,1,2,3,4")
    if looks:
        values["seeds"] = looks
    if strata:
        values["strata"] = strata
    return _Words(values, factors, overrides, merged(launch))


def _launched_strata(directory: Path) -> list[str]:
    """The names STUDY@STRATUM of the strata of a study, in their order; [] unless each of them was launched."""
    strata = {}
    for folder in with_strata(directory):
        study = read_study(folder)
        if study is not None and study.of == directory.name:
            strata[study.name] = study.all_strata
    names = [f"{directory.name}@{stratum}" for stratum in next(iter(strata.values()), [])]
    return names if strata.keys() == {*names} else []


def _check_folder(study: Study, runs_dir: Path) -> None:
    """Check that a study has a folder of its own or folders of its strata: with both, its name would mean the first.

    Raises:
        ConfigError: It would have both.
    """
    directory = runs_dir / study.name
    folders = with_strata(directory)
    fix = f"name={study.name}_2"
    if study.strata and (directory / "study.yaml").exists():
        raise ConfigError(f"study {study.name} was launched without strata, and has some now", str(directory), fix)
    if not study.strata and folders != [directory]:
        names = ", ".join(folder.name for folder in folders)
        raise ConfigError(f"study {study.name} was launched in strata, and has none now", names, fix)
    launched = [launch for folder in folders if (launch := read_study(folder)) and launch.of == study.name]
    if dropped := [launch.stratum for launch in launched if launch.stratum not in study.strata]:
        had, has = (", ".join(names) for names in (launched[0].all_strata or dropped, study.strata))
        raise ConfigError(f"study {study.name} was launched with other strata", f"{had} -> {has}", fix)


def _stratum(whole: Request, stratum: str) -> Request:
    """A stratum of a study that was not launched.

    Raises:
        ConfigError: The study has no such stratum.
    """
    strata = {request.study.stratum: request for request in strata_of(whole)}
    if stratum not in strata:
        study = whole.study.name
        near = did_you_mean(stratum, whole.study.strata)
        fix = f"{study}@{near}" if near else study
        raise ConfigError(f"study {study} has no such stratum", stratum, shlex.join(["nexus-ablate", "plan", fix]))
    return replace(strata[stratum], whole=whole)


def _check_against_strata(study: Study, overrides: list[str], words: list[str]) -> None:
    """Check that no stratum undoes an override that was typed after a study.

    Args:
        words: All that was typed.

    Raises:
        ConfigError: A stratum sets the key otherwise, or chooses another option or budget than the one it is about.
    """
    for stratum, of_stratum in study.strata.items():
        kept = merged(study.baseline, of_stratum)
        undone = [text for text in overrides if text in study.baseline and text not in kept]
        if undone:
            problem = f"stratum {stratum} of study {study.name} sets this itself, so it would change nothing there"
            fix = shlex.join(["nexus-ablate", "study", *(word for word in words if word not in undone)])
            raise ConfigError(problem, f"{' '.join(undone)} beside {' '.join(of_stratum)}", fix)


def _check_key(prefix: str, key: str, items: Sequence[Any], values: str) -> None:
    """Refuse `vary.KEY=A,B` and `strata.KEY=A,B` where there is no such key, in the form that was typed.

    Args:
        items: Of the values, those to check.
        values: As they were typed.

    Raises:
        ConfigError: There is none.
    """
    try:
        check_overrides([f"{key}={show(item)}" for item in items], sweeps=False)
    except ConfigError as error:
        if error.problem == NO_KEY:
            fix = error.fix
            if is_override(fix):
                fix = f"{prefix}.{key_of(fix)}={values}"
            raise ConfigError(error.problem, f"{prefix}.{key}={values}", fix) from error


def runs_dir_of(launch: list[str]) -> Path:
    """The folder for the runs of a launch: `runs_dir` in its overrides, or `runs`.

    Raises:
        ConfigError: The override cannot be read.
    """
    typed = [text for text in launch if key_of(text) == "runs_dir"]
    return _runs_dir(typed[-1]) if typed else DEFAULT


@cache
def _runs_dir(text: str) -> Path:
    """The folder that an override names, without the quotes and with the variables of the shell that it may have."""
    return Path(compose([text]).runs_dir)


def _study(source: str, typed: _Words, runs_dir: Path) -> Study:
    """The study of this name, file or earlier launch, with what was typed on the command line."""
    launched, factors = None, typed.factors
    file = Path(os.path.expanduser(source)) if source.endswith(YAML) else None
    values: dict[str, Any]
    if file:
        values = read_file(file)
    elif shipped := _shipped(source):
        values = shipped
    elif factors:
        varied = "; ".join(f"{k}={','.join(map(show, v))}" for k, v in factors.items())
        values = {"name": source, "question": f"What does it change: {varied}?"}
    elif launched := read_study(runs_dir / source):
        values = msgspec.to_builtins(launched)
    elif choices := [text for text in typed.overrides if "," in text and "[" not in text]:
        problem = "a key with several values in a study is written vary.KEY"
        raise ConfigError(problem, choices[0], shlex.join(["nexus-ablate", "study", source, f"vary.{choices[0]}"]))
    else:
        raise unknown_study(source, runs_dir)
    name = str(typed.values.get("name", values["name"]))
    shipped_file = shipped_studies().get(name)
    if file and shipped_file and file.resolve() != shipped_file.resolve():
        problem = f"{name} is a shipped study, so `study {name}` would not be this one"
        raise ConfigError(problem, source, shlex.join(["nexus-ablate", "study", source, f"name=my_{name}"]))
    if not STUDY_NAME.fullmatch(name):
        safe = re.sub("[^A-Za-z0-9]+", "_", mask(name)).strip("_") or "mine"
        command = f"nexus-ablate study {shlex.quote(source)} name={safe}" if file else safe
        raise ConfigError("a study's name is that of a folder: letters, digits, . _ @ -", name, command)
    if factors:
        values = values | {"factors": (values.get("factors") or {}) | factors}
    if launched and (name != launched.name or typed.overrides):
        arms = [structs.replace(arm, overrides=arm.requested, match=None) for arm in launched.arms]
        values = msgspec.to_builtins(structs.replace(launched, arms=arms))
    if launched and name != launched.name:  # the machine, the size and the endpoints may be others
        values = {key: value for key, value in values.items() if key not in WRITTEN_BY_A_LAUNCH}
        values["baseline"] = [text for text in launched.baseline if text not in launched.pinned]
    values = _with_typed(values, typed.values)
    keys = typed.values.keys() - {"strata"}  # typed as strata.KEY=A,B
    study = decode(values, keys) if launched else decode_file(values, keys)
    _check_looks(study)
    return study


def _check_looks(study: Study) -> None:
    """Check that each look can tell an arm from the baseline.

    Raises:
        ConfigError: One has too few seeds for any verdict.
    """
    if study.looks and study.looks[0] < CLAIM_SEEDS:
        problem = f"a look at fewer than {CLAIM_SEEDS} seeds tells no arm from the baseline, and spends part of the 5%"
        looks = [look + CLAIM_SEEDS - study.looks[0] for look in study.looks]
        got, fix = (f"seeds.looks={','.join(map(str, counts))}" for counts in (study.looks, looks))
        raise ConfigError(problem, got, fix)


def _with_typed(values: dict[str, Any], typed: dict[str, Any]) -> dict[str, Any]:
    """The values with those of the command line, where endpoint= and delta_min= are about the primary endpoint."""
    if isinstance(typed.get("seeds"), list) and values.get("looks"):
        values = values | {"looks": [], "look_weights": []}
    if not values.get("endpoints") or "endpoints" in typed or typed.keys().isdisjoint(("endpoint", "delta_min")):
        return values | typed
    first, *others = listed_endpoints(values["endpoints"])
    rest = {**typed}
    if "delta_min" in typed:
        first = {"name": first["name"], "delta_min": rest.pop("delta_min")}
    if "endpoint" in typed:
        first["name"] = rest.pop("endpoint")
    return values | rest | {"endpoints": [first, *others]}


def unknown_study(name: str, runs_dir: Path) -> ConfigError:
    """The error for a study that is neither shipped nor launched; suggests the nearest name."""
    known = [*shipped_studies(), *(path.parent.name for path in runs_dir.glob("*/study.yaml"))]
    if strata := [study for study in known if study.startswith(f"{name}@")]:
        return each_stratum(name, strata)
    near = did_you_mean(name, known)
    return ConfigError("there is no study of this name", name, near or "nexus-ablate list studies")


def each_stratum(name: str, strata: Iterable[str]) -> ConfigError:
    """The error for a study of which only the strata can be asked for."""
    return ConfigError("each stratum is a study of its own", name, f"one of {', '.join(sorted(strata))}")


def shipped_studies() -> dict[str, Path]:
    """The studies of conf/studies by name."""
    return {path.stem: path for path in sorted(conf_dir().joinpath("studies").glob("*.yaml"))}


def _shipped(name: str) -> dict[str, Any]:
    """The values of a study of conf/studies or of the calibration panel; none where there is no such study."""
    if path := shipped_studies().get(name):
        return read_file(path)
    return read_panel().studies().get(name, {}) if name.startswith(f"{PANEL}_") else {}


def shipped_study(name: str) -> Study:
    """A study of conf/studies."""
    return decode_file(read_file(shipped_studies()[name]))


def strata_of(request: Request) -> list[Request]:
    """The study of each stratum, named STUDY@STRATUM; a study without strata alone."""
    study = request.study
    requests = [*request.strata]
    for stratum, overrides in study.strata.items():
        expects = [e for e in study.expects if e.stratum in ("", stratum)]
        of_stratum = structs.replace(
            study,
            name=f"{study.name}@{stratum}",
            baseline=merged(study.baseline, overrides),
            strata={},
            expects=[structs.replace(e, stratum="") for e in expects],
            stratum=stratum,
            of=study.name,
            all_strata=[*study.strata],
        )
        requests.append(replace(request, study=of_stratum))
    return requests or [request]


def _items(name: str, text: str) -> list[Any]:
    """The items of `a,b,c`; brackets group items."""
    try:
        return load_yaml(f"[{text}]")
    except UNREADABLE as error:
        raise ConfigError(f"{name} cannot be read", text, f"{name}=A,B") from error


def _flat(items: list[Any]) -> Any:
    """`seeds=[0,1]` is `seeds=0,1`."""
    return items[0] if len(items) == 1 and isinstance(items[0], list | dict) else items


def read_file(path: Path) -> dict[str, Any]:
    """The values of a study's YAML, with its name.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        values = load_yaml(path.read_bytes().decode())
    except OSError as error:
        here = sorted(other.name for other in path.parent.glob("*.y*ml"))
        near = did_you_mean(path.name, here) or next(iter(here), "")
        fix = shlex.quote(str(path.with_name(near))) if near else "nexus-ablate list studies"
        problem = f"{path.name} in {path.parent.absolute()} cannot be read"
        raise ConfigError(problem, f"{path}: {error.strerror}", fix) from error
    except UNREADABLE as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: this study cannot be read", problem, f"correct {where}") from error
    if not isinstance(values, dict):
        fix = "a mapping of plain values: {question: is it better?, factors: {norm: [layer, rms]}}"
        raise ConfigError(f"{path} is not a study", in_yaml(values), fix)
    return {"name": path.stem} | values
