"""`nexus-ablate KEY=VALUE ...`: one run; with -m, every combination through Hydra's sweeper and launcher."""

from __future__ import annotations

import sys

from nexus_ablate import errors
from nexus_ablate.config.compose import check_overrides, compose, search_plugins
from nexus_ablate.config.options import conf_dir

HELP = """nexus-ablate [train] [KEY=VALUE ...]        one run
nexus-ablate -m KEY=A,B KEY=C,D ...         every combination, through Hydra

  nexus-ablate norm=rms placement=pre
  nexus-ablate norm=layer placement=post bias=on d_ff_ratio=8/3 weight_decay=0 position=alibi train.steps=50
  nexus-ablate model=micro train.device=cuda:1 data=files data.files=[book.txt]
  nexus-ablate -m norm=layer,rms placement=pre,post seed=0,1,2
  torchrun --nproc-per-node 4 -m nexus_ablate model=small        one run on four GPUs, the same global batch
  nexus-ablate -m norm=layer,rms seed=0,1,2 hydra/launcher=joblib        or slurm (docs/clusters.md)

`nexus-ablate list` names every key and option. `--cfg job` prints the configuration and trains nothing.
The same command again: a finished run prints its result, an interrupted one goes on. Exit status: 0 ok, 1 a bug,
2 configuration, 3 diverged, 4 checkpoint unusable, 5 storage, 6 alive elsewhere, 75 preempted."""

HYDRA_FLAGS = (
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--hydra-help",
    "--shell-completion",
    "-sc",
    "--resolve",
    "--package",
    "-p",
)


def run(arguments: list[str]) -> int:
    """Train what the arguments ask for."""
    if any(a in ("-h", "--help") for a in arguments):
        print(HELP)
        return errors.OK
    if any(a.split("=")[0] in HYDRA_FLAGS for a in arguments):
        return _hydra_flag(arguments)
    flags = [a for a in arguments if a.startswith("-")]
    overrides = [a for a in arguments if not a.startswith("-")]
    for flag in flags:
        if flag not in ("-m", "--multirun"):
            raise errors.unknown("train has no flag of this name", flag, ["-m", "--multirun", "--help", *HYDRA_FLAGS])
    if flags:
        from nexus_ablate.execution.multirun import multirun
        from nexus_ablate.training.distributed import require_one_process

        require_one_process("a multirun")
        return multirun(overrides)
    return single(overrides)


def single(overrides: list[str]) -> int:
    """One run in this process."""
    from nexus_ablate.training.device import share_cores_politely

    config = compose(overrides)
    share_cores_politely()
    from nexus_ablate.training.session import train

    return train(config, overrides).status


def _hydra_flag(arguments: list[str]) -> int:
    """What Hydra itself answers: --cfg, --info, shell completion."""
    import hydra

    if not {"-sc", "--shell-completion"} & set(arguments):  # whose query=bash is no override
        given = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
        check_overrides(given, sweeps=True)
    search_plugins()
    sys.argv = [sys.argv[0], *arguments]
    hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(lambda composed: None)()
    return errors.OK
