"""`nexus-ablate KEY=VALUE ...`: one run; with -m, every combination of values."""

from __future__ import annotations

import shlex

from nexus_ablate.cli.backend import backend_of
from nexus_ablate.cli.flags import BACKEND, MULTIRUN, VERBOSE, Flags, refuse_beside, typed_words
from nexus_ablate.cli.verb import OVERRIDES, Verb
from nexus_ablate.config.override_syntax import read_override
from nexus_ablate.errors import ConfigError

VERB = Verb(
    "train",
    "train one run, or every combination with -m; the default verb",
    f"[{OVERRIDES} ...]",
    (
        ("train", "the default run, with the baseline's options"),
        ("norm=rms placement=pre", "one run"),
        ("norm=layer placement=post bias=on position=alibi", ""),
        ("model=femto train.device=cuda:1 data=files data.files=[book.txt]", ""),
        ("-m norm=layer,rms placement=pre,post seed=0,1,2", "every combination"),
        ("-m norm=layer,rms seed=0,1,2 --launcher joblib", "or slurm (docs/clusters.md)"),
    ),
    (MULTIRUN, VERBOSE, *BACKEND),
    "`torchrun --nproc-per-node 4 -m nexus_ablate model=base train.steps=1000` trains one run on four GPUs with the "
    "same global batch. `nexus-ablate list` names every key and option. The same command again shows the result of a "
    "finished run and resumes an interrupted one.\n\n"
    "Exit status: 0 done, 1 a bug, 2 configuration, 3 diverged, 4 checkpoint unusable, 5 storage, 6 alive elsewhere, "
    "75 preempted, 130 Ctrl-C.",
    kind="runs",
)


def run(overrides: list[str], flags: Flags) -> int:
    """Train the run, or the runs, that the overrides describe."""
    refuse_beside(MULTIRUN, [VERBOSE], flags)
    if "multirun" in flags:
        from nexus_ablate.launch.multirun import multirun
        from nexus_ablate.training.distributed import require_one_process

        require_one_process("a multirun")
        return multirun(*backend_of(overrides, flags))
    if typed := [word for flag in BACKEND for word in typed_words(flag, flags)]:
        is_sweep = any(read_override(text).is_sweep for text in overrides)
        seeds = [] if is_sweep else ["seed=0,1,2"]
        fix = shlex.join(["nexus-ablate", "-m", *overrides, *seeds, *typed])
        raise ConfigError(f"{typed[0]} is for many runs", shlex.join(typed), fix)

    from nexus_ablate.config.compose import compose
    from nexus_ablate.training.device import share_cores_politely

    config = compose(overrides)
    share_cores_politely()
    from nexus_ablate.training import display
    from nexus_ablate.training.session import train

    display.verbose = "verbose" in flags
    return train(config, overrides).status
