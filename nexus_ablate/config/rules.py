"""Which values go together: the rules between keys, and those in the files of options: `refuses`, `only`, `warns`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nexus_ablate.config.evaluations import SHIPPED, evaluation_of
from nexus_ablate.config.grammar import compare_numbers, factors_by_role, is_comparison, names_in, show
from nexus_ablate.config.groups import GROUPS, keys_of_file, keys_under, option_names
from nexus_ablate.config.options import (
    IN_OTHER_LAYERS,
    Option,
    OptionFile,
    option_files,
)
from nexus_ablate.config.override_syntax import read_override
from nexus_ablate.config.roles import DECAYED
from nexus_ablate.config.run_config import MEANT, Resolved, RunConfig, by_key
from nexus_ablate.config.spelling import norm_sites
from nexus_ablate.errors import ConfigError, unknown

READ_BY_MIXERS: dict[str, tuple[str, ...]] = {
    "attention": ("dot",),
    "normalizer": ("softmax",),
    "qk_norm": ("none",),
    "gate": ("none",),
    "value": ("none",),
    "conv.attn_in": ("off",),
    "conv.qkv": ("off",),
    "position": ("none", "learned", "sinusoidal"),
    "model.head_dim": ("auto",),
    "n_kv_heads": ("auto",),
    "qkv_bias": ("off",),
    "attn_out_bias": ("off",),
    "clip_qkv": ("off",),
    "window": ("off",),
    "attn_scale": ("auto",),
    "attn_softcap": ("off",),
    "kv_bias": ("off",),
}
"""What acts through the mixer alone, and the values with which it does nothing there.

Learned and sinusoidal positions are in the embedding."""
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9=,+._@-]*")


def check_rules(config: RunConfig) -> None:
    """Check the rules between keys.

    Raises:
        ConfigError: For the first broken rule.
    """
    model, train = config.model, config.train
    if model.head_dim == "auto" and model.d_model % model.n_heads:
        heads = [h for h in range(1, model.d_model + 1) if model.d_model % h == 0]
        nearest = min(heads, key=lambda h: abs(h - model.n_heads))
        fix = f"model.n_heads={nearest}, or give model.head_dim"
        raise ConfigError("model.n_heads must divide model.d_model", f"{model.n_heads} and {model.d_model}", fix)
    if config.n_kv_heads != "auto" and model.n_heads % config.n_kv_heads:
        got = f"{config.n_kv_heads} and {model.n_heads}"
        raise ConfigError("n_kv_heads must divide model.n_heads", got, "n_kv_heads=1 shares one among all")
    if config.window == []:
        raise ConfigError("window needs at least one layer's width", "[]", "window=off, or window=[128,0]")
    for key, value in config.position.keys.items():
        if value == []:
            default = option_files("position")[config.position.name].keys[key].default
            raise ConfigError(
                f"position.{key} needs at least one layer's value", "[]", f"position.{key}={show(default)}"
            )
    check_nope_layers(config.nope_every, model.n_layers)
    for axis, other in IN_OTHER_LAYERS.items():
        option = getattr(config, axis)
        if isinstance(layers := option.keys.get("layers"), list):
            check_layers(f"{axis}.layers", layers, model.n_layers)
            got = f"{axis}={option.name} {axis}.layers={show(layers)}"
            if len(layers) == model.n_layers:
                raise ConfigError(f"{axis}.layers lists every layer", got, f"{axis}.layers=all")
            if option.name == other:
                raise ConfigError(f"the other layers have {axis}={other} too", got, f"{axis}.layers=all")
    if train.tokens != "auto" and train.flops != "auto":
        raise ConfigError("a run has one budget", "train.tokens and train.flops", "give one of them")
    if train.compile == "graphs" and train.device in ("cpu", "mps"):
        check_graphs(train.device)
    if train.compile == "graphs" and train.grad_accum > 1:
        got = f"train.compile=graphs train.grad_accum={train.grad_accum}"
        raise ConfigError("a CUDA graph's gradients do not outlive its next replay", got, "train.compile=on")
    for evaluation in map(evaluation_of, config.evals):
        file = evaluation.keys.get("file", SHIPPED)
        if file != SHIPPED and not Path(file).expanduser().is_file():
            name = f"evals=[{evaluation.name}:file:{file}]"
            raise ConfigError(
                f"{evaluation.name} has no such file", name, f"evals=[{evaluation.name}], the shipped one"
            )
    schedule, groups = config.schedule, f"optim.groups={show(config.schedule.groups)}"
    for role, factors in factors_by_role(schedule.groups).items():
        if "weight_decay" in factors and not config.weight_decay:
            problem = "weight_decay=0 decays nothing, so a factor on it has no effect"
            raise ConfigError(problem, f"{groups} weight_decay=0", "weight_decay=0.1")
        if "weight_decay" in factors and role not in DECAYED[schedule.decay]:
            problem = f"optim.decay={schedule.decay} does not decay the role {role}"
            raise ConfigError(problem, groups, "optim.decay=all")
        if role == "head" and config.tie_embeddings:
            problem = "a tied head is the embedding and has no factors of its own"
            raise ConfigError(problem, f"{groups} tie_embeddings=on", "tie_embeddings=off")
    check_project(str(config.tracker.keys.get("project", "")), "tracker.project=", "tracker.entity=")
    if not _SAFE_NAME.fullmatch(config.experiment):
        fix = f"experiment={re.sub('[^A-Za-z0-9]+', '_', config.experiment).strip('_') or 'mine'}"
        raise ConfigError("experiment is the name of a folder: letters, digits, = , + . _ @ -", config.experiment, fix)


def check_vocabulary(config: RunConfig, tokens: int) -> None:
    """Check that the embedding has a row for each of the tokenizer's tokens."""
    if config.vocab_size == "auto" or config.vocab_size >= tokens:
        return
    got = f"vocab_size={config.vocab_size}, the tokenizer has {tokens} tokens"
    fix = "use the model's own tokenizer.json" if "run" in config.init.keys else "vocab_size=auto"
    raise ConfigError("the embedding is smaller than the tokenizer", got, fix)


def check_nope_layers(layers: object, n_layers: int) -> None:
    """Check a list of layers without positions.

    Raises:
        ConfigError: As in `check_layers`, or it lists all layers.
    """
    if not isinstance(layers, list):
        return
    check_layers("nope_every", layers, n_layers)
    if len(layers) == n_layers:
        got = f"nope_every={show(layers)} model.n_layers={n_layers}"
        problem = "no layer has positions, so the choice of position does nothing"
        raise ConfigError(problem, got, "position=none nope_every=off")


def check_layers(key: str, layers: list[int], n_layers: int) -> None:
    """Check that a list of layers names each of them once.

    Raises:
        ConfigError: It is empty, or names a layer twice, or one that doesn't exist.
    """
    got = f"{key}={show(layers)} model.n_layers={n_layers}"
    if not layers or len(set(layers)) < len(layers):
        raise ConfigError(f"{key} lists at least one layer, each once", got, f"{key}=[0]")
    if max(layers) >= n_layers:
        raise ConfigError(f"there is no layer {max(layers)}", got, f"layers from 0 to {n_layers - 1}")


def check_project(project: str, typed: str, typed_entity: str = "") -> None:
    """Check that W&B takes a project's name.

    Args:
        project: `NAME` or `ENTITY/NAME`.
        typed: What is typed before a project's name.
        typed_entity: What is typed before an entity's.

    Raises:
        ConfigError: The name is too long, or has a character that W&B refuses.
    """
    problem = "a W&B project has none of / \\ # ? % : in its name"
    if not re.search(r"[/\\#?%:]", project):
        if len(project) <= 128:
            return
        problem = "a W&B project has at most 128 characters in its name"
    entity, _, name = project.rpartition("/")
    plain = re.sub(r"[/\\#?%:]+", "-", name).strip("-")[:128] or "mine"
    fix = typed + plain
    if entity:
        fix += f" {typed_entity}{re.sub(r'[^A-Za-z0-9_-]+', '-', entity)}"
    raise ConfigError(problem, project, fix)


def check_graphs(device: str) -> None:
    """Check that a kind of device has CUDA graphs."""
    if device != "cuda":
        raise ConfigError("CUDA graphs need a GPU with CUDA", f"train.compile=graphs on {device}", "train.compile=on")


def check_mixer(config: RunConfig, resolved: Resolved) -> None:
    """Check that some layer's mixer reads each choice that acts through the mixer alone.

    Raises:
        ConfigError: None reads a choice that was made.
    """
    options, mixer = config.options(resolved), f"mixer={config.mixer.name}"
    values = by_key(config.nested()) | {name: getattr(resolved, name) for name in MEANT}
    values["qk_norm"] = resolved.qk_norm.name
    if resolved.n_kv_heads == config.model.n_heads:
        values["n_kv_heads"] = "auto"
    check_positions(config, resolved)
    for key, idle in READ_BY_MIXERS.items():
        value, axis = show(values.get(key, idle[0])), key.partition(".")[0]
        chosen = layers_of(config, options[axis]) if axis in options else {*range(config.model.n_layers)}
        if key == "value":
            chosen = acting_layers(config)
        if key == "window" and any(resolved.windows):
            chosen = {layer for layer in chosen if resolved.windows[layer]}
        if value in idle or not config.layers_reading(key).isdisjoint(chosen):
            continue
        problem = f"{mixer} does not read {key}, so {key}={value} would change nothing"
        if source := resolved.prescribed.get(key):
            raise ConfigError(problem, f"{mixer} {source}", f"another {source.partition('=')[0]}, or mixer=attention")
        raise ConfigError(problem, f"{mixer} {key}={value}", f"{key}={idle[0]}")
    reading, first = config.layers_reading("value"), min(layers_of(config, config.value))
    if config.value.name == "residual" and first not in reading:
        problem = f"value=residual adds the values of layer {first}, and {mixer} has none there"
        reading = sorted(reading & acting_layers(config))
        fix = f"value.layers={show(reading)}" if len(reading) > 1 else "value=none value.layers=all"
        raise ConfigError(problem, f"{mixer} mixer.layers={show(config.mixer.keys['layers'])} value=residual", fix)


def layers_of(config: RunConfig, option: Option) -> set[int]:
    """The layers that have an option of an axis, whatever it does in them."""
    layers = option.keys.get("layers", "all")
    return {*range(config.model.n_layers)} if layers == "all" else {*layers}


def acting_layers(config: RunConfig) -> set[int]:
    """The layers whose values the option of the value axis changes, if their mixer reads it.

    Raises:
        ConfigError: Its `layers` has none of those in which it acts.
    """
    layers, last = layers_of(config, config.value), config.model.n_layers - 1
    if config.value.name == "residual":
        return layers - {min(layers)} or layers
    if config.value.name != "gated_embedding":
        return layers
    every_other = {*range(last, -1, -2)}
    if layers.isdisjoint(every_other):
        problem = "value=gated_embedding acts in every other layer, the last included, so it would change nothing"
        got = f"value.layers={show(sorted(layers))} model.n_layers={last + 1}"
        raise ConfigError(problem, got, f"value.layers={show(sorted(every_other))}")
    return layers & every_other


def check_positions(config: RunConfig, resolved: Resolved) -> None:
    """Check that `nope_every` takes the positions from some, but not from all layers whose mixer reads them.

    Raises:
        ConfigError: It takes them from none, or from all.
    """
    reading, without = config.layers_reading("position"), resolved.nope_layers
    if not without or not reading or config.nope_every == "auto":
        return
    mixer, nope = f"mixer={config.mixer.name}", f"nope_every={show(config.nope_every)}"
    got = f"{mixer} mixer.layers={show(config.mixer.keys['layers'])} {nope}"
    if reading.isdisjoint(without):
        fix = "position=rope nope_every=off" if config.position.name == "irope" else "nope_every=off"
        raise ConfigError(f"{mixer} does not read position in these layers, so {nope} would change nothing", got, fix)
    if reading <= without and config.position.name != "irope":  # which acts in layers without positions too
        problem = "no layer has positions, so the choice of position does nothing"
        raise ConfigError(problem, got, "position=none nope_every=off")


def without_effect(config: RunConfig, resolved: Resolved) -> list[str]:
    """A note for each value that was set and changes nothing beside the others."""
    notes = []
    n_layers, context = config.model.n_layers, config.model.context
    with_maps = sorted(config.layers_reading("attention"))
    if config.probe.name != "off" and len(with_maps) < n_layers:
        where = f"of the layers {show(with_maps)} alone" if with_maps else "not defined"
        notes.append(f"mixer={config.mixer.name} has no attention maps: the measures attn/... are {where}")
    if isinstance(resolved.nope_every, int) and resolved.nope_every > n_layers:
        notes.append(f"nope_every={resolved.nope_every}: with {n_layers} layers all have positions")
    windows = [window for window in resolved.windows if window]
    if windows and min(windows) >= context:
        note = f"window={show(config.window)}: no query of {context} tokens is that far from a key"
        notes.append(f"{note}; it acts in longer evaluations alone")
    return notes


def apply_rules(config: RunConfig, resolved: Resolved, chosen: dict[str, OptionFile]) -> list[str]:
    """The warnings of the chosen options, the data set and the evaluations.

    Raises:
        ConfigError: An option refuses this configuration.
    """
    check_mixer(config, resolved)
    settings, warnings = settings_of(config, resolved), []
    sizes = {n: v for n, v in vars(config.model).items() if isinstance(v, int)}
    sizes |= {"head_dim": resolved.head_dim, "n_kv_heads": resolved.n_kv_heads}
    files = [*chosen.values(), option_files("data")[config.data.name]]
    options = [(file.override, getattr(config, file.axis).keys, file) for file in files]
    for evaluation in map(evaluation_of, config.evals):
        file = option_files("evaluation")[evaluation.name]
        options.append((f"evals=[{evaluation.name}]", evaluation.keys, file))
        for key in file.reads:
            if len(config.layers_reading(key)) < config.model.n_layers:
                mixer, name = f"mixer={config.mixer.name}", f"evals=[{evaluation.name}]"
                problem = f"{name} is not defined for {mixer}: it needs the {key} of every layer"
                raise ConfigError(problem, f"{mixer} {name}", "mixer=attention, or evals=[]")
    for name, keys, option in options:
        if option.plugin:
            check_settings(option)
        numbers = {**sizes, **keys}
        if "layers" in keys:
            numbers["layers"] = config.model.n_layers if keys["layers"] == "all" else len(keys["layers"])
        for rule, text in option.refuses.items():
            if holds(rule, settings, numbers):
                reason, _, fix = text.partition("; try: ")
                spelled = _spelled(rule)
                together = [f"{n}={show(numbers[n])}" for n in names_in(rule)] or [spelled]
                clash = f"cannot have {spelled}" if is_comparison(rule) else f"and {spelled} contradict each other"
                fix = fix or f"another {option.axis}, or no {spelled}"
                raise ConfigError(f"{name} {clash}: {reason}", " ".join([name, *together]), fix)
        for rule, text in option.only.items():
            allowed = rule.split()
            if settings.isdisjoint(allowed):
                key = allowed[0].partition("=")[0]
                values = sorted(setting for setting in settings if setting.startswith(f"{key}="))
                reason, _, fix = text.partition("; try: ")
                if not values:  # a key of an option that was not chosen
                    group = key.partition(".")[0]
                    got = f"{name} {group}={getattr(config, group).name}"
                    fix = fix or with_key(allowed[0])
                    raise ConfigError(f"{name} needs {_spelled(allowed[0])}: {reason}", got, fix)
                setting = next((value for value in values if not value.endswith("=auto")), values[0])
                raise ConfigError(f"{name} cannot have {setting}: {reason}", f"{name} {setting}", fix or allowed[0])
        broken = sorted(rule for rule in option.warns if holds(rule, settings, numbers))
        warnings += [f"{name}{'' if r == name else f' with {_spelled(r)}'}: {option.warns[r]}" for r in broken]
    return warnings


def check_settings(option: OptionFile) -> None:
    """Check that the rules of an option name keys, options and values that exist: others would never hold.

    Raises:
        ConfigError: One does not.
    """
    for name in option.reads:
        if name not in (known := ["all", *READ_BY_MIXERS]):
            raise unknown(f"{option.override} reads a key that does not act through mixers", name, known)
    options = {group: sorted(option_names(group)) for group in GROUPS}
    keys = keys_under(options)
    rules = [rule for rule in (*option.refuses, *option.only, *option.warns) if not is_comparison(rule)]
    for setting in " ".join(rules).split():
        name, _, value = setting.partition("=")
        key = name.partition("@")[0]
        if key not in keys:
            raise unknown(f"a rule of {option.override} names a key that does not exist", key, keys)
        if key in options and value not in options[key]:
            problem = f"a rule of {option.override} names an option that does not exist"
            raise unknown(problem, value, options[key], f"{key}={{}}")
        if key not in options and setting != "nope_every=on":
            check_value(option, key, value)


def check_value(option: OptionFile, key: str, value: str) -> None:
    """Check that a rule's value of a key is one that some option accepts, spelled as it is compared.

    Raises:
        ConfigError: It isn't.
    """
    group, _, name = key.rpartition(".")
    members = sorted(option_names(group)) if group else ["config"]
    files = [keys_of_file(f"{group}/{member}" if group else member) for member in members]
    refused, problem = None, f"a rule of {option.override} would never hold"
    for constraint in dict.fromkeys(file[name].constraint for file in files if name in file):
        try:
            canonical = show(constraint.accept(key, read_override(f"{key}={value}").values[0]))
        except ConfigError as error:
            refused = error
            continue
        if canonical == value:
            return
        raise ConfigError(f"{problem}: its value is spelled otherwise", f"{key}={value}", f"{key}={canonical}")
    if refused:
        raise ConfigError(f"{problem}: {refused.problem}", f"{key}={value}", refused.fix)


def with_key(setting: str) -> str:
    """A setting of an option's key, after the first option that has the key."""
    group, _, key = setting.partition("=")[0].partition("@")[0].partition(".")
    option = next(name for name in sorted(option_names(group)) if key in keys_of_file(f"{group}/{name}"))
    return f"{group}={option} {setting}"


def settings_of(config: RunConfig, resolved: Resolved) -> set[str]:
    """All settings that a rule may name, as `key=value`, both as requested and as resolved."""
    values = by_key(config.nested())
    meant = by_key({"init": resolved.init.flat()}) | {name: getattr(resolved, name) for name in MEANT}
    settings = {f"{key}={show(value)}" for key, value in (*values.items(), *meant.items())}
    if resolved.nope_every != "off":
        settings.add("nope_every=on")
    in_blocks = norm_sites(config, settings)
    outside = {"final"} if resolved.final_norm else set()
    outside |= {"embed"} if config.embed_norm else set()
    sites = gain_sites(config, in_blocks, outside)
    return settings | {f"norm.gain_init@{site}={show(config.norm.keys.get('gain_init'))}" for site in sites}


def holds(rule: str, settings: set[str], numbers: Mapping[str, Any]) -> bool:
    """Whether a rule of an option applies: all of its settings hold, or its comparison is true."""
    return compare_numbers(rule, numbers) if is_comparison(rule) else set(rule.split()) <= settings


def _spelled(rule: str) -> str:
    """A rule as a user would type it: `norm.gain_init@ffn=0` becomes `norm.gain_init=0 at ffn`."""
    if is_comparison(rule):
        return rule
    return " and ".join(re.sub(r"@(\w+)=(\S+)", r"=\2 at \1", setting) for setting in rule.split())


def gain_sites(config: RunConfig, in_blocks: set[str], outside: set[str]) -> set[str]:
    """The sites whose norms start at `norm.gain_init`.

    Args:
        in_blocks: The sites of the placement's norms.
        outside: The sites of the norms outside the blocks.

    Raises:
        ConfigError: A list of sites would change nothing, or names a site without a norm.
    """
    requested, gain = config.norm_gain_sites, config.norm.keys.get("gain_init", 1.0)
    if requested == "blocks":
        return in_blocks
    if gain == 1 or not requested:
        got = f"norm_gain_sites={show(requested)} with norm={config.norm.name}, norm.gain_init={show(gain)}"
        raise ConfigError("norm_gain_sites would change nothing", got, "norm=rms norm.gain_init=0")
    for site in requested:
        if site not in in_blocks | outside:
            problem = f"placement={config.placement.name} has no norm at this site"
            raise unknown(problem, site, sorted(in_blocks) + sorted(outside))
    return set(requested)
