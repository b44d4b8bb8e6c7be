"""`nexus-ablate study=NAME ...`: run what is missing of a study, on this machine or on a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from nexus_ablate import errors
from nexus_ablate.errors import ConfigError

if TYPE_CHECKING:
    from nexus_ablate.execution.cluster import Resources

HELP = """nexus-ablate study=NAME [KEY=VALUE ...] [--workers N|auto | --cluster slurm ...] [--retry failed] [--amend]
                            [--retrain]

  nexus-ablate study=norms                                    a study that is shipped (nexus-ablate list studies)
  nexus-ablate study=path/to/mine.yaml                        your own (docs/studies.md)
  nexus-ablate study=mine vary.norm=layer,rms vary.bias=on,off seeds=0,1,2 train.steps=200
  nexus-ablate study=mine vary.norm=layer seeds.looks=5,8,12,20    more seeds only for arms that are undecided
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


def run(arguments: list[str]) -> int:
    """Run the study that the arguments ask for."""
    if any(a in ("-h", "--help") for a in arguments):
        print(HELP)
        return errors.OK
    given, rest = split(arguments, alone=("--amend", "--retrain"))
    start = starter(given, rest)

    from nexus_ablate.study.definition import read_request

    return start(read_request(rest), amend="--amend" in given)


def split(
    arguments: list[str], with_value: Collection[str] = (), alone: Collection[str] = ("--retrain",)
) -> tuple[dict[str, list[str]], list[str]]:
    """The flags of a verb that runs a study, with their values, and the other words.

    Args:
        with_value: Flags of this verb besides those of every study.
        alone: Its flags without a value.

    Raises:
        ConfigError: A flag that does not exist, is given twice, or has a value that it does not take.
    """
    given: dict[str, list[str]] = {}
    rest: list[str] = []
    left = list(arguments)
    while left:
        word, equals, value = left.pop(0).partition("=")
        if word in FLAGS or word in with_value:
            value = value if equals else left.pop(0) if left else ""
            given.setdefault(word, []).append(value)
        elif word in alone:
            given[word] = [""]
        elif word.startswith("-") and not word[1:].isdecimal():
            raise errors.unknown("there is no flag of this name", word, [*FLAGS, *with_value, *alone, "--help"])
        else:
            rest.append(word + equals + value)
    for flag, values in given.items():
        if len(values) > 1 and flag != "--sbatch":
            raise ConfigError(f"{flag} is given twice", " and ".join(values), f"{flag} {values[-1]}")
    if given.get("--retry", ["failed"]) != ["failed"]:
        raise ConfigError("--retry takes one word", given["--retry"][0], "--retry failed")
    if given.get("--cluster", ["slurm"]) != ["slurm"]:
        raise ConfigError("--cluster takes one word", given["--cluster"][0], "--cluster slurm")
    return given, rest


def starter(given: dict[str, list[str]], overrides: list[str]) -> Callable[..., int]:
    """`launch` or `submit` with these flags: called with a request, and with `amend` where the study may change.

    Args:
        given: The flags, from `split`.
        overrides: The other words, from `split`.

    Raises:
        ConfigError: Flags that do not go together, or a value that one does not take.
    """
    from nexus_ablate.training.distributed import require_one_process

    require_one_process("a study")
    retry, retrain = "--retry" in given, "--retrain" in given
    if "--cluster" in given:
        if "--workers" in given:
            raise ConfigError("--workers is for this machine", "--cluster slurm", "--parallel N bounds the jobs")
        from nexus_ablate.execution.cluster import submit

        return partial(submit, resources=resources(given, overrides), retry_failed=retry, retrain=retrain)
    if idle := [flag for flag in given if FLAGS.get(flag) == "resources" and flag != "--time"]:
        raise ConfigError(f"{idle[0]} is for a cluster", f"{idle[0]} {given[idle[0]][0]}", "--cluster slurm")
    from nexus_ablate.execution.launch import launch

    workers = worker_count(given.get("--workers", ["auto"])[0])
    limit = 60 * whole_number("--time", given["--time"][0], 240) if "--time" in given else math.inf
    return partial(launch, workers=workers, retry_failed=retry, limit=limit, retrain=retrain)


def resources(given: dict[str, list[str]], overrides: list[str]) -> Resources:
    """What each job is to get.

    Raises:
        ConfigError: A value that cannot be.
    """
    from nexus_ablate.execution.cluster import Resources

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


def whole_number(flag: str, text: str, example: int, others: str = "", most: int | None = None) -> int:
    """The value of a flag that counts.

    Args:
        others: What else the flag takes, for who reads the error.
        most: The largest number that it takes.

    Raises:
        ConfigError: It is no number from 1.
    """
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= (most or math.inf):
        unit = " in minutes" if flag == "--time" else f" from 1 to {most}" if most else ""
        raise ConfigError(f"{flag} takes a whole number{unit}{others}", text, f"{flag} {example}")
    return int(text)


def worker_count(text: str) -> int | str:
    """The value of --workers.

    Raises:
        ConfigError: It is neither auto nor a number from 1.
    """
    return text if text == "auto" else whole_number("--workers", text, 2, " or auto")
