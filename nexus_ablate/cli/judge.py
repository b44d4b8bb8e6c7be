"""`nexus-ablate judge SOURCE`: the verdicts of `compare` for runs that were trained elsewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from nexus_ablate.cli.compare import OUTPUTS, deliver
from nexus_ablate.cli.verb import Flag, Flags, Verb, comma_separated, one_of, positive
from nexus_ablate.errors import OK, ConfigError

WANDB = re.compile(r"(?:wandb:|https://wandb\.ai/)([^/]+/[^/?]+)")


def _mapping(text: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in comma_separated(text)]
    if bad := [name + equals for name, equals, column in pairs if not name or not column]:
        fix = "--columns seed=rng_seed,val_loss=eval/loss"
        raise ConfigError("--columns takes NAME=COLUMN,...", bad[0], fix)
    return {name: column for name, _, column in pairs}


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
    (
        Flag("--arm", "COLUMN,...", "the columns that name an arm (arm)", comma_separated),
        Flag("--baseline", "ARM", "the arm that others are compared with (baseline)"),
        Flag("--endpoint", "NAME", "the measure to judge by (val_loss)"),
        Flag("--better", "WORD", "lower or higher, of an endpoint of your own", one_of("--better", "lower", "higher")),
        Flag("--columns", "NAME=COLUMN,...", "what the source calls the endpoint, seed, step, ...", _mapping),
        Flag("--at", "STEP", "the step at which a log is read (the last)", positive("--at", 3000, 1e12)),
        Flag("--delta-min", "D", "the smallest difference that matters", positive("--delta-min", 0.01, 1e9)),
        Flag("--allow", "NAME,...", "conditions of fairness to waive", comma_separated),
        *OUTPUTS,
    ),
    "Reads .csv, .tsv, .json, .jsonl and tables in .md, W&B's exports among them. The word failed in place "
    "of the endpoint counts as a failure to train. Without shared seeds Welch's unpaired test decides. "
    "docs/judging_other_runs.md explains it.",
    "a table of results",
    kind="results",
)


def run(sources: list[str], flags: Flags) -> int:
    """Read the source, judge it, and print or save the comparison."""
    from nexus_ablate.comparison.foreign import Choice, read_source
    from nexus_ablate.comparison.judge import judge

    if len(sources) > 1:
        raise ConfigError(
            "judge takes one source", " ".join(sources), shlex.join(["nexus-ablate", "judge", sources[0]])
        )
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
