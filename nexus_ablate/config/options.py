"""Registries (names to classes, one per axis), and the option files, which are their schema.

An option is a class in its axis file and `conf/<axis>/<name>.yaml`. The YAML is read without torch:

    # First line: what it is and where it is published. `list` prints it.
    name: rms
    eps: 1.0e-6      # float (0, inf); added to the mean square, inside the root
    equation: y = g x / sqrt(mean(x^2) + eps)   (or a list of lines) printed by `explain`
    prescribes: {norm_bias: off}         what this option means by `auto` elsewhere
    refuses: {norm_bias=on: the reason}  explicit contradictions
    only: {optim=adamw: the reason}      everything but these settings of a key, separated by spaces, is refused
    warns: {embed_scale=off: the reason} known traps
    equals: {norm=t5: at equal eps}      options that are the same function, and when
    reads: all                           of a mixer: the keys of `READ_BY_MIXERS` (rules.py) that it reads, or all
    reads: [attention]                   of an evaluation: those that the mixer of every layer must read
    norm_sites: [attn, ffn]              of a placement: where its norms are, or with the setting that a site needs
    needs: {module: pip install ...}     a module that not every installation has, and the command that installs it

A rule of `refuses` or `warns` names one setting, or several, separated by spaces, that must all hold. A norm's initial
gain is named with its site: `norm.gain_init@ffn=0`. Or a rule compares numbers: the option's own keys, and the model's
`head_dim`, `n_layers`, `d_model` and so on: `head_dim % 2 == 1`. A reason may end in `; try: what works`.

Every other key has its constraint (see grammar.py) and meaning as a comment, and is passed to the class as a
keyword-only argument, which has no default in Python.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from nexus_ablate.config.grammar import BY_ROLE, Constraint, show
from nexus_ablate.config.plugins import Plugin, plugins
from nexus_ablate.errors import ConfigError, require_module, unknown
from nexus_ablate.plain_data import UNREADABLE, load_yaml

T = TypeVar("T")
Class = TypeVar("Class", bound=type)
AXES = (
    "norm",
    "placement",
    "position",
    "mixer",
    "attention",
    "normalizer",
    "qk_norm",
    "gate",
    "value",
    "conv",
    "ffn",
    "head",
    "init",
    "param",
)
"""The groups whose options are the architecture; every option is a class in axes/, in mixers.py or in a plugin."""

OPTIONS = (*AXES, "optim")
"""The groups whose options are classes: the axes, and the optimizer."""

CLASSES = (*OPTIONS, "data", "evaluation")
"""The groups to which a plugin may add an option (a class and its YAML)."""

IN_OTHER_LAYERS = {
    "mixer": "attention",
    "ffn": "swiglu",
    "qk_norm": "none",
    "gate": "none",
    "value": "none",
    "conv": "none",
}
"""The axes whose options may differ by layer, and the option of the layers that `layers` doesn't list."""

COMMON_KEYS = {
    **{
        axis: {"layers": f"all | list of int [0, 1e9]; layers that have it, from 0; the others have {axis}={other}"}
        for axis, other in IN_OTHER_LAYERS.items()
    },
    "optim": {
        "lr": "auto | Nx | float (0, inf); peak rate; auto: 0.384 / d_model, of muP at its base width; 2x: twice",
        "decay": "matrices | matrices_embeddings | all; which parameters decay",
        "schedule": "cosine | linear | wsd | constant; after warm-up: to final_lr, or held (wsd: then cooled)",
        "warmup": "auto | int [0, 1e9]; steps from 0 to the peak, linear; "
        "auto: an eighth of the run up to 100, at least 1%",
        "final_lr": "float [0, 1]; last learning rate as a share of the peak",
        "cooldown": "float (0, 1]; wsd: share of all steps that the final linear cooling takes",
        "clip": "off | float (0, inf); largest global gradient norm",
        "decay_mode": "coupled | independent; weight decay times the learning rate, "
        "or times its schedule alone (peak 1)",
        "cautious_decay": "on | off; weight decay only where the step moves the weight towards 0 too, arXiv:2510.12402",
        "groups": f"{BY_ROLE}; on the learning rate and weight decay of a role: [embedding:lr:0.1,head:weight_decay:0]",
    },
}
"""Keys that every option of a group has, with constraint and meaning; the YAML only has their values."""

LATER: dict[str, dict[str, Any]] = {
    "optim": {"decay_mode": "coupled", "cautious_decay": False, "groups": []},
    "param": {"name": "sp"},
    "mixer": {"name": "attention", "layers": "all"},
    "ffn": {"layers": "all"},
    "qk_norm": {"layers": "all"},
    "gate": {"layers": "all"},
    "value": {"name": "none", "layers": "all"},
    "conv": {"name": "none", "layers": "all"},
    "head": {"name": "linear"},
}
"""What configurations mean that were written before a key or a group existed. A run's identity leaves these out."""

RULES = ("prescribes", "refuses", "only", "warns", "equals", "needs")
RESERVED = ("name", "equation", "norm_sites", "reads", *RULES)
OTHER_VERSION = "read it with the version of the program that env.json names"
_KEY_LINE = re.compile(r"^(?P<key>\w+):\s[^#]*#\s*(?P<comment>.+)$")


@dataclass(frozen=True)
class Key:
    """One key of a YAML file: its default, constraint and meaning."""

    default: Any
    constraint: Constraint
    meaning: str


@dataclass(frozen=True)
class OptionFile:
    """The content of an option's YAML file."""

    axis: str
    name: str
    summary: str
    equation: list[str]
    keys: dict[str, Key]
    norm_sites: dict[str, str]
    """Sites of a placement's norms in the blocks, and the setting that each needs, if any."""
    reads: list[str]
    """What a mixer reads of the other choices, or what an evaluation needs the mixers to read; [] is nothing."""
    prescribes: dict[str, Any]
    refuses: dict[str, str]
    only: dict[str, str]
    warns: dict[str, str]
    equals: dict[str, str]
    needs: dict[str, str]
    plugin: Plugin | None = None

    @property
    def override(self) -> str:
        """What chooses it: `norm=rms`."""
        return f"{self.axis}={self.name}"


@dataclass
class Option:
    """A chosen option: its name and the values of its keys."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        return {"name": self.name, **self.keys}


def conf_dir() -> Path:
    """The built-in `conf/`: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    shipped = package / "conf"
    return shipped if shipped.is_dir() else package.parent / "conf"


@cache
def conf_yaml(name: str) -> dict[str, Any]:
    """The values of a file of conf/, such as `config` or `preset/gpt2`; all callers share them."""
    return load_yaml(conf_dir().joinpath(f"{name}.yaml").read_text(encoding="utf-8"))


def option_files(axis: str) -> dict[str, OptionFile]:
    """The options of an axis by name, in alphabetical order, including those of plugins.

    Raises:
        ConfigError: A file doesn't have the form described at the top of this module.
    """
    own = _built_in(axis)
    added = _of_plugins(plugins()).get(axis)
    return dict(sorted((own | added).items())) if added else own


@cache
def _built_in(axis: str) -> dict[str, OptionFile]:
    return {path.stem: read_option_file(axis, path) for path in sorted(conf_dir().joinpath(axis).glob("*.yaml"))}


@cache
def _of_plugins(known: tuple[Plugin, ...]) -> dict[str, dict[str, OptionFile]]:
    """The options of plugins by axis and name."""
    result: dict[str, dict[str, OptionFile]] = {axis: {} for axis in CLASSES}
    for plugin in known:
        for path in plugin.option_paths():
            axis, name = path.parent.name, path.stem
            if path.parent.parent != plugin.directory or axis not in CLASSES:
                raise unknown(f"{path} is in a folder that isn't an axis", axis, CLASSES)
            if name in _built_in(axis) or name in result[axis]:
                raise ConfigError(f"{axis}={name} already exists", str(path), "give the plugin's option another name")
            if not plugin.class_file(name).is_file():
                raise ConfigError(
                    f"{axis}={name} has no class", str(path), f"register one in {plugin.class_file(name)}"
                )
            result[axis][name] = replace(read_option_file(axis, path), plugin=plugin)
    return result


def read_option_file(axis: str, path: Path) -> OptionFile:
    """Read one option's YAML.

    Raises:
        ConfigError: The file doesn't have the form described at the top of this module.
    """
    text, values = _read_yaml(path)
    values = _later(axis) | values
    comments = COMMON_KEYS.get(axis, {})
    if missing := comments.keys() - values.keys():
        fix = f"copy their lines from conf/{axis}"
        raise ConfigError(f"{axis}/{path.name} lacks keys that every {axis} has", ", ".join(sorted(missing)), fix)
    if values.get("name") != path.stem:
        problem, fix = f"{axis}/{path.name} must say name: {path.stem}", f"name: {path.stem}"
        raise ConfigError(problem, f"name: {values.get('name')}", fix)
    comments = comments | {match["key"]: match["comment"] for match in map(_KEY_LINE.match, text.splitlines()) if match}
    keys = {}
    for key, default in values.items():
        if key in RESERVED:
            continue
        if key not in comments:
            got, fix = f"{key}: {default}", f"{key}: {default}  # constraint; meaning"
            raise ConfigError(f"{axis}/{path.name}: key {key!r} has no constraint in its comment", got, fix)
        accepts, _, meaning = comments[key].partition(";")
        constraint = Constraint(accepts.strip())
        keys[key] = Key(constraint.accept(f"{axis}.{key}", default), constraint, meaning.strip())
    summary = text.splitlines()[0].removeprefix("#").strip()
    equation, sites, reads = values.get("equation") or [], values.get("norm_sites") or {}, values.get("reads") or []
    equation = equation if isinstance(equation, list) else [equation]
    sites = sites if isinstance(sites, dict) else dict.fromkeys(sites, "")
    rules: dict[str, Any] = {name: values.get(name) or {} for name in RULES}
    reads = reads if isinstance(reads, list) else [reads]
    return OptionFile(axis, path.stem, summary, equation, keys, sites, reads, **rules)


def _later(axis: str) -> dict[str, Any]:
    """The keys that the options of an axis got later, with what their absence means."""
    return {key: value for key, value in LATER.get(axis, {}).items() if key != "name"}


def _read_yaml(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = load_yaml(text)
    except (OSError, *UNREADABLE) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        got, fix = getattr(error, "problem", None) or str(error), f"correct {where}"
        raise ConfigError(f"{where}: this option file cannot be read", got, fix) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} has no keys", show(values), f"begin with `# What it is` and `name: {path.stem}`")
    return text, values


def check_option(axis: str, values: dict[str, Any]) -> Option:
    """The chosen option of an axis with canonical values.

    Raises:
        ConfigError: Unknown name, unknown key, or a value that the key doesn't accept.
    """
    files = option_files(axis)
    name = values.get("name")
    if name not in files:
        raise unknown(f"{axis} has no option of this name", str(name), files, f"{axis}={{}}")
    given = {key: value for key, value in values.items() if key not in RESERVED}
    constraints = {key: about.constraint for key, about in files[name].keys.items()}
    problem = f"{axis}={name} has no key of this name"
    return Option(name, checked_keys(axis, f"{axis}={name}", _later(axis) | given, constraints, problem))


def checked_keys(
    group: str, chosen: str, values: Mapping[str, Any], keys: Mapping[str, Constraint], no_key: str
) -> dict[str, Any]:
    """The values of a group's keys in their canonical form.

    Args:
        chosen: What the keys belong to, as in `norm=rms`.
        keys: All of them, with their constraints.
        no_key: The problem of any other key.

    Raises:
        ConfigError: A key is unknown or missing, or doesn't accept its value.
    """
    for key in values:
        if key not in keys:
            raise unknown(no_key, f"{group}.{key}", [f"{group}.{known}" for known in keys])
    if missing := keys.keys() - values.keys():  # as in the config.yaml of another version
        raise ConfigError(f"{chosen} is incomplete", f"no {', '.join(sorted(missing))}", OTHER_VERSION)
    return {key: constraint.accept(f"{group}.{key}", values[key]) for key, constraint in keys.items()}


def check_installed(axis: str, name: str) -> None:
    """Check that the modules that an option needs are installed, without importing them.

    Raises:
        ConfigError: One isn't.
    """
    for module, command in option_files(axis)[name].needs.items():
        require_module(module, f"{axis}={name}", command)


def default_option(group: str, name: str) -> Option:
    """An option with the values of its YAML."""
    return Option(name, {k: spec.default for k, spec in option_files(group)[name].keys.items()})


def at_layer(axis: str, option: Option, layer: int) -> Option:
    """The option of an axis in a layer: the chosen one, or that of the layers that its `layers` doesn't list."""
    layers = option.keys.get("layers", "all")
    return option if layers == "all" or layer in layers else default_option(axis, IN_OTHER_LAYERS[axis])


class Registry(Generic[T]):
    """The classes of one axis by option name.

    The class's keyword-only arguments are the option's keys, so each default is only in the YAML.
    """

    def __init__(self, axis: str) -> None:
        self.axis = axis
        self._classes: dict[str, Callable[..., T]] = {}

    def register(self, name: str) -> Callable[[Class], Class]:
        """Class decorator.

        Raises:
            ValueError: The name is taken.
        """

        def add(cls: Class) -> Class:
            if name in self._classes:
                raise ValueError(f"{self.axis}={name} is registered twice")
            self._classes[name] = cls
            return cls

        return add

    def names(self) -> list[str]:
        return sorted(self._classes)

    def get(self, name: str) -> Callable[..., T]:
        """The class of an option; the file of a plugin's option is imported on first use.

        Raises:
            ConfigError: No class of that name is registered, or the plugin's file raises an error.
        """
        if name not in self._classes:
            option = option_files(self.axis).get(name)
            if option is None or option.plugin is None:
                raise unknown(f"{self.axis} has no class registered under this name", name, self._classes)
            option.plugin.load(name)
            if name not in self._classes:
                problem = f"{option.plugin.class_file(name)} registers no class as {self.axis}={name}"
                fix = f'write @REGISTRY.register("{name}") above its class'
                raise ConfigError(problem, f"classes {', '.join(self.names())}", fix)
        return self._classes[name]

    def keys_of(self, name: str) -> set[str]:
        """The names of the class's keyword-only arguments."""
        parameters = inspect.signature(self.get(name)).parameters.values()
        return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def build(self, option: Option, *args: object) -> T:
        """An instance of the option's class, from the model's arguments and the option's keys.

        Raises:
            ConfigError: The arguments of the class aren't exactly the keys of the option's YAML.
        """
        takes, common = self.keys_of(option.name), COMMON_KEYS.get(self.axis, {})
        keys = {key: value for key, value in option.keys.items() if key in takes or key not in common}
        if takes != keys.keys():
            got = f"class {sorted(takes)}, YAML {sorted(keys)}"
            fix = "the YAML's keys and the class's keyword-only arguments must be the same"
            raise ConfigError(f"{self.axis}={option.name}: class and YAML disagree on the keys", got, fix)
        return self.get(option.name)(*args, **keys)

    def build_at(self, layer: int, option: Option, *args: object) -> T:
        """As `build`, for a layer: other layers than those of the option's `layers` have another option."""
        return self.build(at_layer(self.axis, option, layer), *args)
