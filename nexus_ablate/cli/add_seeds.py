"""`nexus-ablate add-seeds STUDY N`: more seeds for a study that was launched, recorded as an amendment."""

from __future__ import annotations

import sys
from typing import Any

from nexus_ablate.cli.study import RUN_FLAGS, launcher_settings, starter
from nexus_ablate.cli.verb import Verb, whole
from nexus_ablate.errors import ConfigError

VERB = Verb(
    "add-seeds",
    "more seeds for a launched study; its verdicts become exploratory",
    "STUDY N [KEY=VALUE ...]",
    (
        ("add-seeds first_look 3", "the next three seeds for every arm"),
        ("add-seeds runs/first_look 3", "the same, by the study's directory"),
    ),
    RUN_FLAGS,
    "study.yaml records the added seeds. Verdicts are exploratory afterwards: adding seeds after a look at the result "
    "finds differences that are not there. `confirm` judges on fresh seeds only, and a study with "
    "seeds.looks=5,8,12,20 adds seeds at a known error rate. KEY=VALUE changes how runs are executed (runs_dir, "
    "train.device, tracker, ...).",
    "a study and a number of seeds",
    kind="studies",
)


def run(words: list[str], flags: dict[str, Any]) -> int:
    """Add the seeds and run what is missing."""
    from nexus_ablate.study.overrides import is_launch
    from nexus_ablate.study.schema import MAX_SEEDS

    words, settings = launcher_settings(words)
    launch = [word for word in words if is_launch(word)]
    names = [word for word in words if not is_launch(word)]
    if len(names) != 2:
        raise ConfigError(f"add-seeds takes {VERB.needed}", " ".join(names), "nexus-ablate add-seeds first_look 3")
    start = starter(flags, launch, settings)
    number = whole("add-seeds STUDY", 3, most=MAX_SEEDS)(names[1])

    from nexus_ablate.planning.fresh import find_launched, with_more_seeds

    before = find_launched(names[0], launch)
    after = with_more_seeds(before, number)
    new = after.definition.seeds[len(before.definition.seeds) :]
    message = f"adding seeds {', '.join(map(str, new))}" if new else "resuming with the seeds that were added last"
    print(f"{message}; verdicts of this study are exploratory", file=sys.stderr)
    return start(after, amend=bool(new))
