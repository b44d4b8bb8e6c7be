"""`nexus-ablate KEY=VALUE ...`: one run; with -m, every combination of values."""

from __future__ import annotations

from typing import Any

from nexus_ablate import errors
from nexus_ablate.cli.backend import BACKEND_FLAGS, backend_of
from nexus_ablate.cli.verb import OVERRIDES, Flag, Verb, one_of
from nexus_ablate.errors import ConfigError

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
        Flag("--cfg", "job", "print the configuration; train nothing", one_of("--cfg", "job"), short="-c"),
        *BACKEND_FLAGS,
    ),
    "`torchrun --nproc-per-node 4 -m nexus_ablate model=base` trains one run on four GPUs with the same global batch. "
    "`nexus-ablate list` names every key and option. The same command again shows the result of a finished run and "
    "resumes an interrupted one.\n\n"
    "Exit status: 0 done, 1 a bug, 2 configuration, 3 diverged, 4 checkpoint unusable, 5 storage, 6 alive elsewhere, "
    "75 preempted.",
    kind="runs",
)


def run(overrides: list[str], flags: dict[str, Any]) -> int:
    """Train the run, or the runs, that the overrides describe."""
    if "multirun" in flags:
        if "cfg" in flags:
            fix = "nexus-ablate norm=layer --cfg job"
            raise ConfigError("--cfg is for one configuration, without -m", "-m --cfg", fix)
        from nexus_ablate.execution.multirun import multirun

        return multirun(*backend_of(overrides, flags, "a multirun"))
    if one_run := [flag.name for flag in BACKEND_FLAGS if flag.key in flags]:
        raise ConfigError(f"{one_run[0]} is for many runs", one_run[0], f"nexus-ablate -m seed=0,1,2 {one_run[0]} ...")
    if "cfg" in flags:
        return _print_configuration(overrides)
    return single(overrides, "verbose" in flags)


def _print_configuration(overrides: list[str]) -> int:
    """Print the values that the overrides choose, as YAML."""
    import yaml

    from nexus_ablate.config.compose import compose_values
    from nexus_ablate.config.overrides import check_overrides

    check_overrides(overrides, sweeps=False)
    print(yaml.safe_dump(compose_values(overrides), sort_keys=False, allow_unicode=True), end="")
    return errors.OK


def single(overrides: list[str], verbose: bool = False) -> int:
    """Train one run in this process; `verbose`: print all that is known of it."""
    from nexus_ablate.config.compose import compose
    from nexus_ablate.gpus import on_gpu
    from nexus_ablate.training.device import share_cores_politely
    from nexus_ablate.training.memory import check_memory, machine_bytes

    config = compose(overrides)
    if not on_gpu(config.train.device):
        check_memory(config, machine_bytes(), vocab_size=1 if config.vocab_size == "auto" else config.vocab_size)
    share_cores_politely()
    from nexus_ablate.training import display
    from nexus_ablate.training.session import train

    display.verbose = verbose
    return train(config, overrides).status
