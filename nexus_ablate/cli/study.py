"""`nexus-ablate study NAME ...`: run a study, or its missing runs; with more seeds, or its claims on fresh seeds."""

from __future__ import annotations

import shlex
import sys

from nexus_ablate.cli.backend import BACKEND_FLAGS, backend_of
from nexus_ablate.cli.verb import Flag, Flags, Verb, one_of, typed, whole
from nexus_ablate.errors import ConfigError, printable

RUN_FLAGS = (
    Flag("--retry", "failed", "run failed runs again (diverged runs have a result)", one_of("--retry", "failed")),
    Flag("--retrain", "", "train again, with the current code, runs finished by other code"),
    *BACKEND_FLAGS,
)
VERB = Verb(
    "study",
    "run a study, or its missing runs (docs/studies.md)",
    "STUDY [KEY=VALUE ...]",
    (
        ("study norms", "a shipped study (nexus-ablate list studies)"),
        ("study path/to/mine.yaml", "your own"),
        ("study mine vary.norm=layer,rms vary.bias=on,off seeds=0,1,2", ""),
        ("study mine vary.norm=layer seeds.looks=8,12,20", "more seeds only for undecided arms"),
        ("study mine", "resume: train only the missing runs"),
        ("study mine --add-seeds 3", "the next three seeds for every arm"),
        ("study mine --confirm", "its claims, judged on fresh seeds only"),
        ("study norms name=norms_mini model=mini", "another baseline is another study"),
        ("study norms --launcher slurm --partition gpu", "one array of jobs; returns at once"),
        ("study norms --launcher joblib hydra.launcher.n_jobs=4", "by a Hydra launcher"),
    ),
    (
        Flag("--add-seeds", "N", "more seeds for a launched study; its verdicts become exploratory",
             whole("--add-seeds", 3, most=1000)),
        Flag("--confirm", "", "a new study of its claims, or of the ARMs named, on fresh seeds only"),
        Flag("--seeds", "N", "with --confirm: fresh seeds (as many as the claims rest on)",
             whole("--seeds", 5, most=1000)),
        Flag("--amend", "", "accept a change of the study since its first launch; study.yaml records it"),
        *RUN_FLAGS,
    ),
    "`nexus-ablate plan STUDY` shows arms and costs and runs nothing.\n\n"
    "`--confirm` runs a new study next to the first one, mine-confirm, with the same baseline and settings, on seeds "
    "above all seeds of the study, its tuning and earlier confirmations; with lr_grid, arms are tuned again. "
    "`study mine norm=layer --confirm` names an arm, with any verdict.",
    "a study",
    kind="studies",
)  # fmt: skip


def run(words: list[str], flags: Flags) -> int:
    """Run the study."""
    clash = typed(flags, "add_seeds", "confirm", "amend")
    if len(clash) > 1:
        raise ConfigError("these flags exclude each other", " and ".join(clash), f"leave {clash[1]} out")
    if "seeds" in flags and "confirm" not in flags:
        raise ConfigError("--seeds is for --confirm", f"--seeds {flags['seeds']}", "seeds=0,1,2, or --add-seeds 3")

    from nexus_ablate.training.distributed import require_one_process

    require_one_process("a study")
    words, backend = backend_of(words, flags, shlex.join(["nexus-ablate", "study", *words[:1]]))

    from nexus_ablate.execution.launch import launch_strata
    from nexus_ablate.planning.fresh_seeds import confirmation, find_launched, with_more_seeds
    from nexus_ablate.study.arm_overrides import is_launch
    from nexus_ablate.study.definition import read_request

    launch = [word for word in words if is_launch(word)]
    names = [word for word in words if not is_launch(word)]
    amend = "amend" in flags
    if "add_seeds" in flags:
        if len(names) != 1:
            fix = "nexus-ablate study mine --add-seeds 3"
            raise ConfigError("--add-seeds takes one launched study", " ".join(names), fix)
        before = find_launched(names[0], launch)
        request = with_more_seeds(before, flags["add_seeds"])
        new = request.study.seeds[len(before.study.seeds) :]
        amend = bool(new)
        message = f"adding seeds {', '.join(map(str, new))}" if new else "resuming with the seeds that were added last"
        print(f"{message}; verdicts of this study are exploratory", file=sys.stderr)
    elif "confirm" in flags:
        name, *arms = names or [""]
        request = confirmation(find_launched(name, launch), arms, flags.get("seeds"))
        seeds, chosen = request.study.seeds, "; ".join(" ".join(arm.overrides) for arm in request.study.arms)
        print(f"confirming on seeds {seeds[0]}-{seeds[-1]}: {printable(chosen, 1000)}", file=sys.stderr)
    else:
        request = read_request(words)
    return launch_strata(request, backend, "retry" in flags, amend, "retrain" in flags)
