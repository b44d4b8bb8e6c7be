"""`nexus-ablate KEY=VALUE ...`: one run; with -m, every combination of values."""

from __future__ import annotations

import sys

from nexus_ablate.cli.backend import BACKEND_FLAGS, backend_of
from nexus_ablate.cli.verb import OVERRIDES, Flag, Flags, Verb, one_of, typed
from nexus_ablate.errors import OK, ConfigError, unknown

VERB = Verb(
    "train",
    "train one run, or every combination with -m; the default verb",
    f"[{OVERRIDES} ...]",
    (
        ("train", "the default run, with the baseline's options"),
        ("norm=rms placement=pre", "one run"),
        ("norm=layer placement=post bias=on position=alibi", ""),
        ("model=mini train.device=cuda:1 data=files data.files=[book.txt]", ""),
        ("-m norm=layer,rms placement=pre,post seed=0,1,2", "every combination"),
        ("-m norm=layer,rms seed=0,1,2 --launcher joblib", "or slurm (docs/clusters.md)"),
    ),
    (
        Flag("--multirun", "", "train every combination of values", short="-m"),
        Flag("--verbose", "", "also print decay, memory, outliers and attention of a run", short="-v"),
        Flag(
            "--cfg",
            "job|hydra|all",
            "print the configuration; train nothing",
            one_of("--cfg", "job", "hydra", "all"),
            short="-c",
        ),
        Flag("--resolve", "", "with --cfg: replace interpolations"),
        Flag("--package", "NAME", "with --cfg: only this part", short="-p"),
        Flag(
            "--info",
            "TOPIC",
            "what Hydra reads: all, config, defaults, defaults-tree, plugins, searchpath",
            one_of("--info", "all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
            short="-i",
        ),
        Flag("--hydra-help", "", "Hydra's own help"),
        *BACKEND_FLAGS,
    ),
    "`torchrun --nproc-per-node 4 -m nexus_ablate model=base` trains one run on four GPUs with the same global batch. "
    "`nexus-ablate list` names every key and option. The same command again shows the result of a finished run and "
    "resumes an interrupted one.\n\n"
    "Exit status: 0 done, 1 a bug, 2 configuration, 3 diverged, 4 checkpoint unusable, 5 storage, 6 alive elsewhere, "
    "75 preempted.",
    kind="runs",
)


def run(overrides: list[str], flags: Flags) -> int:
    """Train the run, or the runs, that the overrides describe."""
    if "multirun" in flags:
        others = typed(flags, "cfg", "resolve", "package", "info", "hydra_help")
        if others:
            fix = "nexus-ablate norm=layer --cfg job"
            raise ConfigError(f"{others[0]} is for one configuration, without -m", f"-m {others[0]}", fix)
        from nexus_ablate.launch.multirun import multirun
        from nexus_ablate.training.distributed import require_one_process

        require_one_process("a multirun")
        return multirun(*backend_of(overrides, flags))
    if one_run := [flag.name for flag in BACKEND_FLAGS if flag.key in flags]:
        raise ConfigError(f"{one_run[0]} is for many runs", one_run[0], f"nexus-ablate -m seed=0,1,2 {one_run[0]} ...")
    shown = typed(flags, "cfg", "info", "hydra_help")
    of_cfg = [] if "cfg" in flags else typed(flags, "resolve", "package")
    if of_cfg or len(shown) > 1:
        problem = f"{of_cfg[0]} is for --cfg" if of_cfg else "a command prints one of these"
        raise ConfigError(problem, " ".join([*shown, *of_cfg]), "nexus-ablate norm=layer --cfg job --resolve")
    if flags.keys() - {"verbose"}:
        return _hydra(overrides, flags)

    from nexus_ablate.config.compose import compose
    from nexus_ablate.config.override_syntax import refuse_hydra_keys
    from nexus_ablate.training.device import share_cores_politely

    config = compose(overrides)
    refuse_hydra_keys(overrides)
    share_cores_politely()
    from nexus_ablate.training import display
    from nexus_ablate.training.session import train

    display.verbose = "verbose" in flags
    return train(config, overrides).status


def _hydra(overrides: list[str], flags: Flags) -> int:
    """Let Hydra answer --cfg, --info and --hydra-help."""
    import hydra

    from nexus_ablate.config.compose import compose_values, search_plugins
    from nexus_ablate.config.options import conf_dir
    from nexus_ablate.config.overrides import check_overrides

    given = check_overrides(overrides, sweeps=False)
    if flags.get("cfg") == "job" and "package" in flags:
        values = compose_values(given)
        groups = {name: keys for name, keys in values.items() if isinstance(keys, dict)}
        parts = [*values, *(f"{group}.{key}" for group, keys in groups.items() for key in keys)]
        if flags["package"] not in parts:
            raise unknown("the configuration has no part of this name", flags["package"], parts)
    overrides = [] if "hydra_help" in flags else overrides
    search_plugins()
    sys.argv = [sys.argv[0], *overrides]
    for flag, value in zip(typed(flags, *flags), flags.values(), strict=True):
        sys.argv.append(flag if value is True else f"{flag}={value}")
    hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(lambda composed: None)()
    return OK
