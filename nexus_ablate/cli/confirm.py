"""`nexus-ablate confirm STUDY [ARM ...]`: the claims of a study, judged on fresh seeds alone."""

from __future__ import annotations

import sys

from nexus_ablate import errors
from nexus_ablate.errors import ConfigError

HELP = """nexus-ablate confirm STUDY [ARM ...] [--seeds N] [--workers N|auto | --cluster slurm ...] [KEY=VALUE ...]

  nexus-ablate confirm first_look                    every arm that is BETTER, WORSE or EQUIVALENT
  nexus-ablate confirm first_look norm=layer         one arm, whatever its verdict
  nexus-ablate confirm first_look --seeds 10         on ten seeds; default: as many as the claims rest on

A new study beside the first one, first_look-confirm, with the same baseline and settings. Its seeds are above all that
the study, its tuning and earlier confirmations used; tuned arms are trained at their best rates. The same command goes
on with a confirmation that was interrupted, and begins another one where the last has ended. KEY=VALUE says how runs
are carried out; the flags are those of `nexus-ablate study=NAME --help`."""


def run(arguments: list[str]) -> int:
    """Run a confirmation."""
    from nexus_ablate.cli.study import split, starter, whole_number

    if not arguments or any(a in ("-h", "--help") for a in arguments):
        print(HELP)
        return errors.OK if arguments else errors.CONFIG
    given, rest = split(arguments, with_value=("--seeds",))

    from nexus_ablate.study.definition import MAX_SEEDS, is_launch

    words, launch = [word for word in rest if not is_launch(word)], [word for word in rest if is_launch(word)]
    if not words:
        raise ConfigError("confirm takes a study", " ".join(arguments), "nexus-ablate confirm first_look")
    start = starter(given, launch)
    number = whole_number("--seeds", given["--seeds"][0], 5, most=MAX_SEEDS) if "--seeds" in given else None

    from nexus_ablate.study.fresh import confirmation, find_launched

    request = confirmation(find_launched(words[0], launch), words[1:], number)
    seeds, arms = request.definition.seeds, "; ".join(map(" ".join, request.definition.arms))
    print(f"confirming on seeds {seeds[0]}-{seeds[-1]}: {errors.printable(arms, 1000)}", file=sys.stderr)
    return start(request)
