"""`nexus-ablate study=NAME ...`: run what is missing of a study on this machine."""

from __future__ import annotations

from nexus_ablate import errors
from nexus_ablate.errors import ConfigError

HELP = """nexus-ablate study=NAME [KEY=VALUE ...] [--workers N|auto] [--retry failed] [--amend]

  nexus-ablate study=norms                                    a study that is shipped (nexus-ablate list studies)
  nexus-ablate study=path/to/mine.yaml                        your own (docs/studies.md)
  nexus-ablate study=mine vary.norm=layer,rms vary.bias=on,off seeds=0,1,2 train.steps=200
  nexus-ablate study=mine                                     goes on: only what is missing is trained
  nexus-ablate study=norms name=norms_small model=mini        another baseline is another study

--workers N     runs at the same time; auto: one a GPU, or one a core
--retry failed  try failed runs again; one that diverged has a result
--amend         accept that the study changed since its first launch, and keep that in study.yaml

`nexus-ablate plan study=NAME ...` shows arms and costs and runs nothing."""


def run(arguments: list[str]) -> int:
    """Run the study that the arguments ask for."""
    if any(a in ("-h", "--help") for a in arguments):
        print(HELP)
        return errors.OK
    workers, retry, amend = "auto", False, False
    rest: list[str] = []
    left = list(arguments)
    while left:
        word, given, value = left.pop(0).partition("=")
        if word in ("--workers", "--retry"):
            value = value if given else left.pop(0) if left else ""
            if word == "--workers":
                workers = value
            elif value == "failed":
                retry = True
            else:
                raise ConfigError("--retry takes one word", value, "--retry failed")
        elif word == "--amend":
            amend = True
        elif word.startswith("-"):
            raise errors.unknown(
                "a study has no flag of this name", word, ["--workers", "--retry", "--amend", "--help"]
            )
        else:
            rest.append(word + given + value)

    from nexus_ablate.study.definition import read_request
    from nexus_ablate.study.launch import launch

    return launch(read_request(rest), worker_count(workers), retry, amend)


def worker_count(text: str) -> int | str:
    """The value of --workers.

    Raises:
        ConfigError: It is neither auto nor a number from 1.
    """
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError("--workers takes a number or auto", text, "--workers 2")
    return int(text)
