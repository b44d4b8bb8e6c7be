"""`nexus-ablate judge SOURCE`: the verdicts of `compare` for runs that were trained elsewhere."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from nexus_ablate.cli.compare import OUTPUTS, deliver
from nexus_ablate.cli.verb import Flag, Flags, Verb, comma_separated, one_of, positive
from nexus_ablate.errors import OK, ConfigError

WANDB = "wandb:"


def _mapping(text: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in comma_separated(text)]
    if bad := [name + equals for name, equals, column in pairs if not name or not column]:
        fix = "--columns arm=method,seed=rng_seed,val_loss=eval/loss"
        raise ConfigError("--columns takes NAME=COLUMN,...", bad[0], fix)
    return {name: column for name, _, column in pairs}


def _seeds(text: str) -> list[int]:
    items = comma_separated(text)
    if bad := [item for item in items if not item.isdecimal() or len(item) > 15]:
        raise ConfigError("--tuning-seeds takes whole numbers", bad[0], "--tuning-seeds 1001,1002")
    return [int(item) for item in items]


def _filters(text: str) -> dict[str, Any]:
    from nexus_ablate.plain_data import UNREADABLE, strict_loads

    try:
        value = strict_loads(text)
    except UNREADABLE:
        value = None
    if not isinstance(value, dict):
        raise ConfigError("--filters takes a JSON object", text, '--filters \'{"group": "norms"}\'')
    return value


VERB = Verb(
    "judge",
    "the same verdicts for runs of other tools: tables, W&B",
    "SOURCE",
    (
        ("judge runs.csv", "columns arm, seed and val_loss; the baseline is the arm called baseline"),
        ("judge runs.csv --baseline adamw --columns arm=optimizer", "columns of other names"),
        ("judge runs.json --endpoint accuracy --better higher", "another endpoint"),
        ("judge runs.csv --columns seed=none", "runs without seeds: an unpaired test"),
        ("judge logs.csv --target 3.28", "steps to a loss: a row per run and step, in the column step"),
        ("judge wandb:team/project --columns val_loss=summary.eval/loss", "the runs of a W&B project"),
    ),
    (
        Flag("--baseline", "ARM", "the arm that others are compared with (baseline)"),
        Flag("--endpoint", "NAME", "the measure to judge by (val_loss)"),
        Flag("--better", "WORD", "lower or higher, of an endpoint of your own", one_of("--better", "lower", "higher")),
        Flag("--target", "LOSS", "judge the steps to this loss", positive("--target", 3.28, 1e9)),
        Flag("--delta-min", "D", "the smallest difference that matters", positive("--delta-min", 0.01, 1e9)),
        Flag("--columns", "NAME=COLUMN,...", "what the source calls arm, seed, ...", _mapping),
        Flag("--tuning-seeds", "S,...", "seeds whose runs chose the learning rates; not judged", _seeds),
        Flag("--filters", "JSON", "which runs of a W&B project, as wandb.Api().runs takes them", _filters),
        Flag("--allow", "NAME,...", "conditions of fairness to waive", comma_separated),
        *OUTPUTS,
    ),
    "Columns: arm, seed, the endpoint; optional: stratum, rate, tokens, seconds, unit. The word failed in place of the "
    "endpoint counts as a failure to train. What a table cannot prove is UNKNOWN in the report. Without shared seeds "
    "Welch's unpaired test decides. docs/judging_other_runs.md explains it.",
    "a table of results",
    kind="results",
)


def run(sources: list[str], flags: Flags) -> int:
    """Read the source, judge it, and print or save the comparison."""
    from nexus_ablate.comparison.elsewhere import endpoint_of, judged
    from nexus_ablate.comparison.listed import read_source, runs_of

    if len(sources) > 1:
        fix = f"nexus-ablate judge {shlex.quote(sources[0])}, with a column stratum for several tables in one file"
        raise ConfigError("judge takes one source", " ".join(sources), fix)
    name, columns = flags.get("endpoint", "val_loss"), flags.get("columns", {})
    if sources[0].startswith(WANDB):
        from nexus_ablate.track.project_runs import runs_on_wandb

        source, columns = runs_on_wandb(sources[0].removeprefix(WANDB), flags.get("filters", {}), name, columns)
    elif "filters" in flags:
        raise ConfigError("--filters is for W&B", sources[0], "nexus-ablate judge wandb:ENTITY/PROJECT")
    else:
        source = read_source(Path(sources[0]))
    delta_min, better, notes = flags.get("delta_min", "auto"), flags.get("better", ""), {}
    if "target" in flags:
        from nexus_ablate.comparison.target import steps_to_target

        runs, endpoint, notes = steps_to_target(source, name, columns, flags["target"], better, delta_min)
    else:
        runs = runs_of(source, name, columns)
        endpoint = endpoint_of(name, delta_min, better, runs)
    seeds = flags.get("tuning_seeds", ())
    deliver(judged(source, runs, endpoint, flags.get("baseline"), flags.get("allow", ()), seeds, notes), flags)
    return OK
