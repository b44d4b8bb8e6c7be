"""`nexus-ablate evaluate RUN...`: evaluates finished runs from their final checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from nexus_ablate.cli.flags import EVALS, Flags
from nexus_ablate.cli.verb import Verb
from nexus_ablate.config.options import option_files
from nexus_ablate.errors import OK, UserError, printable

if TYPE_CHECKING:
    from rich.console import Console


VERB = Verb(
    "evaluate",
    "evaluate finished runs: longer text, quantization, recall",
    "DIR...",
    (
        ("evaluate runs/scratch/baseline/s0-1a2b3c4d", "all evaluations of one run"),
        ("evaluate runs/norms --evals extrapolation,quantization", "two, of every finished run below"),
        ("evaluate last", "of the run that changed last"),
        ("evaluate runs/norms --evals streaming:kept:8", "one with another value; the result has this name"),
    ),
    (EVALS,),
    "`nexus-ablate list evaluation` explains them and their keys. Evaluations that a run already has are not "
    "repeated. Results are saved in summary.json; docs/metrics.md defines them.",
    "at least one directory",
    kind="results",
)


def run(words: list[str], flags: Flags) -> int:
    """Evaluate the runs. For a run that can't be evaluated, print the reason and continue with the others."""
    names = flags.get("evals") or list(option_files("evaluation"))

    from nexus_ablate.console import open_console
    from nexus_ablate.runs import read_run
    from nexus_ablate.runs.lookup import runs_at
    from nexus_ablate.track import refresh
    from nexus_ablate.training.evaluation import evaluate

    paths = runs_at(words, "evaluate")
    console = open_console()
    status = OK
    for path in paths:
        try:
            before = read_run(path).summary
            summary = evaluate(path, names)
        except UserError as error:
            print(error, file=sys.stderr)
            status = status or error.status
            continue
        if summary != before:
            refresh(path, lambda line: print(line, file=sys.stderr))
        console.print("", printable(str(path), 4096), sep="\n", soft_wrap=True, markup=False)
        print_results({name: summary[name] for name in names}, console)
    return status


def print_results(summary: dict[str, Any], console: Console) -> None:
    """Print the evaluations in a run's summary: of each a table with a row per part, and what else it says."""
    from nexus_ablate.report.columns import TextTable
    from nexus_ablate.report.terminal import print_texts
    from nexus_ablate.runs.reading import leaves
    from nexus_ablate.training.display import shown

    for name, result in summary.items():
        if name.partition(":")[0] not in option_files("evaluation") or not isinstance(result, Mapping):
            continue
        parts: dict[str, dict[str, str]] = {}
        for (*part, key), value in leaves(result):
            if isinstance(value, int | float | None):
                figure = f"{value:,}" if isinstance(value, int) else shown(value, ".4f")
                parts.setdefault(" ".join(part) or "all", {})[key] = figure
        columns = list(dict.fromkeys(chain.from_iterable(parts.values())))
        rows = [[part, *(figures.get(key, "") for key in columns)] for part, figures in parts.items()]
        console.print("")
        print_texts(TextTable([name, *columns], rows, ()), console)
        for key, value in result.items():
            if isinstance(value, str):
                console.print(printable(f"{key.replace('_', ' ')}: {value}", 2000), style="dim", markup=False)
