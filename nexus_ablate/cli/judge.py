"""`nexus-ablate judge SOURCE`: the verdicts of `compare` for runs that were trained elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from nexus_ablate.cli.compare import deliver
from nexus_ablate.cli.flags import ALLOW, ARM, AT, BASELINE, BETTER, COLUMNS, DELTA_MIN, ENDPOINT, OUTPUTS, Flags
from nexus_ablate.cli.verb import Verb
from nexus_ablate.errors import OK, ConfigError

WANDB = re.compile(r"(?:wandb:|https://wandb\.ai/)([^/]+/[^/?]+)")


VERB = Verb(
    "judge",
    "the same verdicts for runs of other tools: tables, logs, W&B",
    "SOURCE",
    (
        ("judge runs.csv", "columns arm, seed and val_loss; the baseline is the arm called baseline"),
        ("judge runs.csv --arm norm,placement --baseline rms,pre", "arms by several columns"),
        ("judge runs.json --endpoint accuracy --better higher", "another endpoint"),
        ("judge runs.csv --columns seed=none", "runs without seeds: an unpaired test"),
        ("judge log.csv --at 3000", "a row per run and step: at this step instead of the last"),
        ("judge wandb:team/project --columns val_loss=eval/loss", "the runs of a W&B project"),
    ),
    (ARM, BASELINE, ENDPOINT, BETTER, COLUMNS, AT, DELTA_MIN, ALLOW, *OUTPUTS),
    "Reads .csv, .tsv, .json, .jsonl and tables in .md, W&B's exports among them. The word failed in place "
    "of the endpoint counts as a failure to train. Without shared seeds Welch's unpaired test decides. "
    "docs/judging_other_runs.md explains it.",
    "one table of results",
    1,
    kind="results",
)


def run(sources: list[str], flags: Flags) -> int:
    """Read the source, judge it, and print or save the comparison."""
    from nexus_ablate.comparison.foreign import Choice, read_source
    from nexus_ablate.comparison.judge import judge

    if match := WANDB.match(sources[0]):
        from nexus_ablate.track.project_runs import runs_on_wandb

        source = runs_on_wandb(match[1])
    elif sources[0].startswith("wandb:"):
        raise ConfigError("W&B runs are named by entity and project", sources[0], "wandb:ENTITY/PROJECT")
    else:
        source = read_source(Path(sources[0]))
    chosen = {name: value for name, value in flags.items() if name in vars(Choice())}
    deliver(judge(source, Choice(**chosen)), flags)
    return OK
