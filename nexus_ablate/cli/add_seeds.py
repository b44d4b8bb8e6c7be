"""`nexus-ablate add-seeds STUDY N`: more seeds for a study that was launched, recorded as an amendment."""

from __future__ import annotations

import sys

from nexus_ablate import errors
from nexus_ablate.errors import ConfigError

HELP = """nexus-ablate add-seeds STUDY N [--workers N|auto | --cluster slurm ...] [--retry failed] [KEY=VALUE ...]

  nexus-ablate add-seeds first_look 3               the next three seeds for every arm
  nexus-ablate add-seeds runs/first_look 3          the same, by the study's directory

study.yaml keeps what was added and when, and verdicts are exploratory from then on: who looks at a result before asking
for more seeds finds differences that are not there. `confirm` judges on fresh seeds alone, and a study with
seeds.looks=5,8,12,20 adds seeds at a known error rate. KEY=VALUE says how runs are carried out (runs_dir,
train.device, tracker, ...); the flags are those of `nexus-ablate study=NAME --help`."""


def run(arguments: list[str]) -> int:
    """Add the seeds and run what is missing."""
    from nexus_ablate.cli.study import split, starter, whole_number

    if not arguments or any(a in ("-h", "--help") for a in arguments):
        print(HELP)
        return errors.OK if arguments else errors.CONFIG
    given, rest = split(arguments)

    from nexus_ablate.study.definition import MAX_SEEDS, is_launch

    words, launch = [word for word in rest if not is_launch(word)], [word for word in rest if is_launch(word)]
    if len(words) != 2:
        got, fix = " ".join(words) or "nothing", "nexus-ablate add-seeds first_look 3"
        raise ConfigError("add-seeds takes a study and a number of seeds", got, fix)
    start = starter(given, launch)
    number = whole_number("add-seeds STUDY", words[1], 3, most=MAX_SEEDS)

    from nexus_ablate.study.fresh import find_launched, with_more_seeds

    before = find_launched(words[0], launch)
    after = with_more_seeds(before, number)
    new = after.definition.seeds[len(before.definition.seeds) :]
    said = f"adding seeds {', '.join(map(str, new))}" if new else "going on with the seeds that were added last"
    print(f"{said}; verdicts of this study are exploratory", file=sys.stderr)
    return start(after, amend=bool(new))
