"""`nexus-ablate evaluate RUN...`: evaluates finished runs from their final checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from nexus_ablate import errors
from nexus_ablate.cli.verb import Flag, Verb, comma_separated
from nexus_ablate.config.options import evaluation_name, evaluation_of, option_files


def evaluations(text: str) -> list[str]:
    """Read a comma-separated list of evaluations, `streaming,quantization:group:16`."""
    return [evaluation_name(evaluation_of(item)) for item in comma_separated(text)]


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
    (
        Flag(
            "--evals",
            "NAME,...",
            "these evaluations (all), as NAME or NAME:KEY:VALUE",
            evaluations,
            example="--evals extrapolation,streaming",
        ),
    ),
    "`nexus-ablate list evaluation` explains them and their keys. Evaluations that a run already has are not "
    "repeated. Results are saved in summary.json; docs/metrics.md defines them.",
    "at least one directory",
    kind="results",
)


def run(words: list[str], flags: dict[str, Any]) -> int:
    """Evaluate the runs. For a run that can't be evaluated, print the reason and continue with the others."""
    names = flags.get("evals") or list(option_files("evaluation"))

    from nexus_ablate.console import open_console
    from nexus_ablate.runs import read_run
    from nexus_ablate.runs.lookup import runs_at
    from nexus_ablate.track import refresh
    from nexus_ablate.training.display import table
    from nexus_ablate.training.evaluation import evaluate

    paths = runs_at(words, "evaluate")
    if not paths:
        raise errors.ConfigError("there is no run here", " ".join(words), "name a run directory or a folder of runs")
    console = open_console()
    status = errors.OK
    for path in paths:
        try:
            before = read_run(path).summary
            summary = evaluate(path, names)
        except errors.UserError as error:
            print(error, file=sys.stderr)
            status = status or error.status
            continue
        if summary != before:
            refresh(path, lambda line: print(line, file=sys.stderr))
        console.print("", errors.printable(str(path), 4096), sep="\n", soft_wrap=True, markup=False)
        console.print(table({name: line for n in names for name, line in lines(n, summary[n])}))
    return status


def results(summary: dict[str, Any]) -> dict[str, str]:
    """The results of a run's evaluations, for the terminal."""
    done = {name: result for name, result in summary.items() if name.partition(":")[0] in option_files("evaluation")}
    return {title: line for name, result in done.items() for title, line in lines(name, result)}


def lines(name: str, result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The results of one evaluation, for the terminal."""
    from nexus_ablate.training.display import shown

    if isinstance(reason := result.get("not_defined"), str):
        yield name, f"not defined: {reason}"
    elif (kind := name.partition(":")[0]) == "extrapolation":
        for way in ("non_overlapping", "sliding"):
            losses = result.get(way, {}).items()
            yield f"{name}, {way}", "  ".join(f"{f}x {shown(loss, '.4f')}" for f, loss in losses)
        for factor, why in result.get("not_defined", {}).items():
            yield f"{name}, {factor}x", f"not defined: {why}"
    elif kind == "streaming":
        kept, dropped = (shown(result.get(f"loss_{way}"), ".4f") for way in ("kept", "dropped"))
        difference = shown(result.get("difference"), "+.4f")
        yield name, f"{kept} with the first {result.get('kept_tokens')} tokens kept, {dropped} without ({difference})"
    elif kind == "quantization":
        schemes = result.get("schemes", {})
        gaps = {scheme: f"{scheme} {shown(after['gap'], '+.4f')}" for scheme, after in schemes.items()}
        eight = "  ".join(gap for scheme, gap in gaps.items() if not scheme.startswith("int4"))
        worst = result.get("worst_block")
        yield f"{name}, 8 bits", f"{shown(result.get('loss'), '.4f')}  {eight}  (worst block {worst})"
        yield f"{name}, 4 bits", "  ".join(gap for scheme, gap in gaps.items() if scheme.startswith("int4"))
    elif kind == "intervention":
        before = result.get("before", {}).get("loss")
        for change, after in result.items():
            if isinstance(after, dict):
                loss, mass = after["loss"], shown(after["attn/first_token_mass"], ".3f")
                gap = None if loss is None or before is None else loss - before
                yield (
                    f"{name}, {change}",
                    f"loss {shown(loss, '.4f')} ({shown(gap, '+.4f')})  "
                    f"first token {mass}  max/median {shown(after['act/resid/max_over_median'], '.1f')}",
                )
    elif "accuracy" in result:
        names = ("accuracy", "chance", "ngram_accuracy")
        yield (
            name,
            "  ".join(f"{figure} {shown(result[figure], '.3f')}" for figure in names) + f"  of {result['items']}",
        )
        for by in ("distance", "pairs", "length", "tokens_read"):
            if parts := result.get(by):
                accuracies = (f"{part} {shown(figures['accuracy'], '.3f')}" for part, figures in parts.items())
                yield f"{name}, by {by.replace('_', ' ')}", "  ".join(accuracies)
        for part, why in result.get("not_defined", {}).items():
            yield f"{name}, {part}", f"not defined: {why}"
    else:
        yield name, "  ".join(f"{measure} {shown(number, '.4f')}" for measure, number in result.items())
