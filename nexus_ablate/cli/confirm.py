"""`nexus-ablate confirm STUDY [ARM ...]`: the claims of a study, judged on fresh seeds only."""

from __future__ import annotations

import sys
from typing import Any

from nexus_ablate import errors
from nexus_ablate.cli.study import RUN_FLAGS, launcher_settings, starter
from nexus_ablate.cli.verb import Flag, Verb, whole

VERB = Verb(
    "confirm",
    "the claims of a study, judged on fresh seeds only",
    "STUDY [ARM ...] [KEY=VALUE ...]",
    (
        ("confirm first_look", "every arm that is BETTER, WORSE or EQUIVALENT"),
        ("confirm first_look norm=layer", "one arm, with any verdict"),
        ("confirm first_look --seeds 10", "on ten seeds"),
    ),
    (
        Flag("--seeds", "N", "fresh seeds (as many as the claims rest on)", whole("--seeds", 5, most=1000)),
        *RUN_FLAGS,
    ),
    "Runs a new study next to the first one, first_look-confirm, with the same baseline and settings. Its seeds are "
    "above all seeds of the study, its tuning and earlier confirmations. Tuned arms are trained at their best rates. "
    "The same command resumes an interrupted confirmation, or starts another one after the last has ended. KEY=VALUE "
    "changes how runs are executed (runs_dir, train.device, tracker, ...).",
    "a study",
    kind="studies",
)


def run(words: list[str], flags: dict[str, Any]) -> int:
    """Run a confirmation."""
    from nexus_ablate.study.overrides import is_launch

    words, settings = launcher_settings(words)
    launch = [word for word in words if is_launch(word)]
    name, *arms = [word for word in words if not is_launch(word)] or [""]
    start = starter(flags, launch, settings)

    from nexus_ablate.planning.fresh import confirmation, find_launched

    request = confirmation(find_launched(name, launch), arms, flags.get("seeds"))
    seeds, arms = request.definition.seeds, "; ".join(" ".join(arm.overrides) for arm in request.study.arms)
    print(f"confirming on seeds {seeds[0]}-{seeds[-1]}: {errors.printable(arms, 1000)}", file=sys.stderr)
    return start(request)
