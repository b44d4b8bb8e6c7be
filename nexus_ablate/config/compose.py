"""The composition of a configuration, and how one configuration differs from another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any

from nexus_ablate.config.grammar import show
from nexus_ablate.config.groups import GROUPS, choices_of, keys_of_file, keys_under
from nexus_ablate.config.options import Option, check_installed, conf_yaml, option_files
from nexus_ablate.config.override_syntax import Override, read_override, replacements
from nexus_ablate.config.overrides import check_overrides
from nexus_ablate.config.plugins import Plugin, add_plugins, plugins
from nexus_ablate.config.resolve import changed, default_rate, from_values
from nexus_ablate.config.run_config import CLOSED_GROUPS, OPTION_GROUPS, RunConfig, flat
from nexus_ablate.errors import ConfigError, printable


def compose(overrides: list[str] | tuple[str, ...] = (), plugins: Iterable[str | Path] = ()) -> RunConfig:
    """The configuration that the overrides describe.

    Args:
        overrides: As on the command line: `["norm=layer", "train.steps=50"]`.
        plugins: Directories of further options. They stay available in this process and in those it starts.

    Raises:
        ConfigError: The configuration can't be run; see rules.py.
    """
    add_plugins(plugins)
    given = check_overrides(list(overrides), sweeps=False)
    config = from_values(compose_values(given))
    check_installed("optim", config.optim.name)
    for former, later in replacements(given):
        if former.text != later.text:
            config.resolved.notes.append(f"{former.text} has no effect: {later.text} comes after it")
    return config


def compose_values(overrides: Sequence[Override]) -> dict[str, Any]:
    """What Hydra composes from overrides that are already checked, as plain nested values, in a twentieth of its time.

    The chosen options begin with the values of their files and the other keys with those of conf/config.yaml. A preset
    replaces these, except those for an option that the user exchanged, and the overrides replace everything.

    Raises:
        ConfigError: An interpolation leads nowhere.
    """
    chosen = {}
    for override in overrides:
        if override.name in GROUPS:
            value = override.values[0]
            chosen[override.name] = show(value) if isinstance(value, bool) else value  # `probe=false`
    preset = chosen.pop("preset", None) or "none"
    choices = choices_of("config") | choices_of(f"preset/{preset}")
    values: dict[str, Any] = _defaults("config")
    for group, choice in choices.items():
        if group != "preset":
            option = chosen.get(group, choice)
            values[group] = {"name": option} | _defaults(f"{group}/{option}")
    for key, value in conf_yaml(f"preset/{preset}").items():
        if key in CLOSED_GROUPS or key in OPTION_GROUPS:
            if values[key]["name"] == choices[key]:
                values[key] |= value
        elif key != "defaults":
            values[key] = value
    for override in overrides:
        if override.name not in GROUPS:
            *path, last = override.name.split(".")
            reduce(dict.__getitem__, path, values)[last] = override.values[0]
    interpolated = [override for override in overrides if "${" in override.text]
    return _interpolated(values, interpolated) if interpolated else values


def _defaults(name: str) -> dict[str, Any]:
    """The values of a file of conf/ by key."""
    return {key: about.default for key, about in keys_of_file(name).items()}


def _interpolated(values: dict[str, Any], overrides: list[Override]) -> dict[str, Any]:
    """The values with `${KEY}` and `${oc.env:NAME}` replaced in some overrides.

    A text that replaces one is read as if it were typed there, unless the key takes texts.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        problem = printable(str(error).splitlines()[0], 200)
        typed = " ".join(override.text for override in overrides)
        raise ConfigError(problem, typed, "nexus-ablate list") from error
    keys = keys_under({group: [resolved[group]["name"]] for group in (*OPTION_GROUPS, *CLOSED_GROUPS)})
    for override in overrides:
        key = keys[override.name]
        *path, last = override.name.split(".")
        owner = reduce(dict.__getitem__, path, resolved)
        if key is None:
            continue
        if isinstance(owner[last], str) and "text" not in key.constraint.alternatives:
            owner[last] = _as_typed(override.name, owner[last])
        try:
            key.constraint.accept(override.name, owner[last])
        except ConfigError as error:
            got = f"{override.text}, which is {error.got}"
            raise ConfigError(error.problem, got, f"{override.name}={show(key.default)}") from None
    return resolved


def _as_typed(name: str, text: str) -> Any:
    """The value that an override with this text has; the text itself where it is none."""
    try:
        given = read_override(f"{name}={text}")
    except ConfigError:
        return text
    return text if given.is_sweep else given.values[0]


@cache
def search_plugins() -> None:
    """Make Hydra also search the plugins' directories for option files, from its next initialization on."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class PluginDirectories(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for plugin in plugins():
                search_path.append(plugin.name, f"file://{plugin.directory}")

    Plugins.instance().register(PluginDirectories)


def plugins_used(config: RunConfig) -> list[Plugin]:
    """The plugins whose options were chosen, each once."""
    used = [option_files(group)[option.name].plugin for group, option in config.options().items()]
    return list(dict.fromkeys(plugin for plugin in used if plugin is not None))


def differences(config: RunConfig, baseline: RunConfig | None = None) -> dict[str, str]:
    """How a configuration differs from a baseline, as `key: value` in the canonical order.

    This includes only what can change the result, and never the seed. Keys of a chosen option are included if they
    differ from the option's own YAML.

    Args:
        config: From `compose`.
        baseline: A study's baseline. Default: the default configuration, or the preset that `config` starts from.
    """
    base = from_values(_preset_values(config.preset)) if baseline is None else baseline
    values, base_values = flat(config.nested()), flat(base.nested())
    exchanged = [group for group in GROUPS if values.get(group) != base_values.get(group)]
    for group in exchanged:
        defaults = _defaults(f"{group}/{values[group]}")
        base_values |= {f"{group}.{key}": value for key, value in defaults.items()}
    if baseline is None or "train" in exchanged:  # a run in bfloat16 has the same name wherever `auto` chose it
        base_values["train.precision"] = "fp32"
    if base_values["optim.lr"] in ("auto", default_rate(base)):
        base_values["optim.lr"] = default_rate(config)
    former = "none" if baseline is None else baseline.preset
    differing = {} if config.preset == former else {"preset": config.preset}
    for key, value in values.items():
        name = key.partition(".")[0]
        if value == base_values.get(key) or (base_values[name] == "auto" and _means_auto(config, name)):
            continue
        differing[key] = _text(value)
    return differing


def _means_auto(config: RunConfig, name: str) -> bool:
    """Whether a value is what `auto` means here, so that setting it changes nothing."""
    auto = Option("auto") if name in OPTION_GROUPS else "auto"
    try:
        return changed(config, **{name: auto}).science() == config.science()
    except ConfigError:  # auto has no meaning here
        return False


def _text(value: Any) -> str:
    if isinstance(value, list):  # paths: folders are irrelevant for the experiment
        return "+".join(Path(str(item)).name for item in value)
    return show(value)


@cache
def _preset_values(preset: str) -> dict[str, Any]:
    return compose_values([read_override(f"preset={preset}")])
