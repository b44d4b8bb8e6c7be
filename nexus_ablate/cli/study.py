"""`nexus-ablate study=NAME ...`: run what is missing of a study, on this machine or on a cluster."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nexus_ablate import errors
from nexus_ablate.errors import ConfigError

if TYPE_CHECKING:
    from nexus_ablate.study.cluster import Resources

HELP = """nexus-ablate study=NAME [KEY=VALUE ...] [--workers N|auto | --cluster slurm ...] [--retry failed] [--amend]
                            [--retrain]

  nexus-ablate study=norms                                    a study that is shipped (nexus-ablate list studies)
  nexus-ablate study=path/to/mine.yaml                        your own (docs/studies.md)
  nexus-ablate study=mine vary.norm=layer,rms vary.bias=on,off seeds=0,1,2 train.steps=200
  nexus-ablate study=mine                                     goes on: only what is missing is trained
  nexus-ablate study=norms name=norms_small model=mini        another baseline is another study
  nexus-ablate study=norms --cluster slurm --partition gpu    one array, one GPU a run; returns at once

--workers N     runs at the same time; auto: one a GPU, or one a core
--time MINUTES  of a run; one that takes longer is saved, and the same command goes on with it
--retry failed  try failed runs again; one that diverged has a result
--amend         accept that the study changed since its first launch, and keep that in study.yaml
--retrain       train again, with today's code, what other code has finished; the old runs stay on disk
--cluster slurm submit what is missing and is not in the queue yet (docs/clusters.md); each run gets
  --partition P  --time MINUTES (240; then it goes on by itself)  --mem-gb N (16)  --cpus N (4)
  --gres TEXT (gpu:1; none with train.device=cpu)  --sbatch NAME=VALUE (any other option; may be repeated)
  --parallel N (256): most jobs at the same time

`nexus-ablate plan study=NAME ...` shows arms and costs and runs nothing."""

FLAGS = {
    **dict.fromkeys(("--workers", "--retry", "--cluster"), "launch"),
    **dict.fromkeys(("--partition", "--time", "--mem-gb", "--cpus", "--gres", "--parallel", "--sbatch"), "resources"),
}
"""Flags that take a value."""
SWITCHES = ("--amend", "--retrain")


def run(arguments: list[str]) -> int:
    """Run the study that the arguments ask for."""
    if any(a in ("-h", "--help") for a in arguments):
        print(HELP)
        return errors.OK
    given: dict[str, list[str]] = {}
    rest: list[str] = []
    left = list(arguments)
    while left:
        word, equals, value = left.pop(0).partition("=")
        if word in FLAGS:
            value = value if equals else left.pop(0) if left else ""
            given.setdefault(word, []).append(value)
        elif word in SWITCHES:
            given[word] = [""]
        elif word.startswith("-"):
            raise errors.unknown("a study has no flag of this name", word, [*FLAGS, *SWITCHES, "--help"])
        else:
            rest.append(word + equals + value)
    for flag, values in given.items():
        if len(values) > 1 and flag != "--sbatch":
            raise ConfigError(f"{flag} is given twice", " and ".join(values))
    if given.get("--retry", ["failed"]) != ["failed"]:
        raise ConfigError("--retry takes one word", given["--retry"][0], "--retry failed")
    if given.get("--cluster", ["slurm"]) != ["slurm"]:
        raise ConfigError("--cluster takes one word", given["--cluster"][0], "--cluster slurm")
    retry, amend, retrain = "--retry" in given, "--amend" in given, "--retrain" in given

    from nexus_ablate.study.definition import read_request
    from nexus_ablate.training.distributed import require_one_process

    require_one_process("a study")

    if "--cluster" in given:
        if "--workers" in given:
            raise ConfigError("--workers is for this machine", "--cluster slurm", "--parallel N bounds the jobs")
        from nexus_ablate.study.cluster import submit

        return submit(read_request(rest), resources(given, rest), retry, amend, retrain)
    if idle := [flag for flag in given if FLAGS.get(flag) == "resources" and flag != "--time"]:
        raise ConfigError(f"{idle[0]} is for a cluster", " ".join(arguments), "--cluster slurm")
    from nexus_ablate.study.launch import launch

    workers = worker_count(given.get("--workers", ["auto"])[0])
    limit = 60 * whole_number("--time", given["--time"][0], 240) if "--time" in given else math.inf
    return launch(read_request(rest), workers, retry, amend, limit, retrain)


def resources(given: dict[str, list[str]], overrides: list[str]) -> Resources:
    """What each job is to get.

    Raises:
        ConfigError: A value that cannot be.
    """
    from nexus_ablate.study.cluster import Resources

    values: dict[str, Any] = {"gres": ""} if "train.device=cpu" in overrides else {}
    for flag, key in (("--time", "time"), ("--mem-gb", "mem_gb"), ("--cpus", "cpus"), ("--parallel", "parallel")):
        if flag in given:
            values[key] = whole_number(flag, given[flag][0], getattr(Resources, key))
    values |= {key: given[f"--{key}"][0] for key in ("partition", "gres") if f"--{key}" in given}
    further = {}
    for text in given.get("--sbatch", ()):
        name, equals, value = text.removeprefix("--").partition("=")
        if not equals or not name:
            raise ConfigError("--sbatch takes NAME=VALUE", text, "--sbatch account=mine")
        further[name] = value
    return Resources(**values, sbatch=further)


def whole_number(flag: str, text: str, example: int, others: str = "") -> int:
    """The value of a flag that counts.

    Args:
        others: What else the flag takes, for who reads the error.

    Raises:
        ConfigError: It is no number from 1.
    """
    if not text.isdecimal() or int(text) < 1:
        unit = " in minutes" if flag == "--time" else ""
        raise ConfigError(f"{flag} takes a whole number{unit}{others}", text, f"{flag} {example}")
    return int(text)


def worker_count(text: str) -> int | str:
    """The value of --workers.

    Raises:
        ConfigError: It is neither auto nor a number from 1.
    """
    return text if text == "auto" else whole_number("--workers", text, 2, " or auto")
