"""The comparison as Markdown, LaTeX (booktabs), CSV and JSON: the same numbers, nothing added."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nexus_ablate.comparison.result import Comparison, Row
from nexus_ablate.comparison.statistics import Interval
from nexus_ablate.comparison.verdict import NOT_COMPARABLE
from nexus_ablate.errors import printable
from nexus_ablate.report.table import (
    ARM,
    MAIN,
    SECONDARY,
    Column,
    answer,
    basis,
    figure_columns,
    left_out,
    named,
    secondary_lines,
    side_columns,
    title,
    together_text,
)
from nexus_ablate.runs import strict_json


def markdown(comparison: Comparison) -> str:
    """A page with the table, the sentences, fairness and what was left out."""
    lines = [f"# {md(title(comparison))}", "", md(answer(comparison)), ""]
    lines += [f"- {md(line)}" for line in basis(comparison)]
    lines += ["", *_md_table(comparison, named(comparison, MAIN)), ""]
    for row in comparison.rows[1:]:
        if row.verdict is not None:
            lines.append(f"- {md(row.arm)}: {md('; '.join([row.verdict.sentence, *row.notes]))}")
    for two in comparison.together:
        lines.append(f"- {md(together_text(two))}")
    lines += ["", "## Costs and stability", "", *_md_table(comparison, (ARM, *side_columns(comparison)))]
    for heading, rows in secondary_lines(comparison):
        lines += ["", f"## {md(heading)}", "", *md_lines(SECONDARY, rows)]
    figures = figure_columns(comparison)
    if figures:
        lines += ["", "## Diagnostics and evaluations", "", *_md_table(comparison, (ARM, *figures))]
    lines += ["", "## Fairness", "", "| condition | | |", "|---|---|---|"]
    lines += [f"| {check.name} | {check.status} | {md(check.text)} |" for check in comparison.checks]
    lines += ["", "## Left out", "", *([f"- {md(line)}" for line in left_out(comparison)] or ["nothing"]), ""]
    return "\n".join(lines)


def latex(comparison: Comparison, stratum: str = "") -> str:
    """The main table for a paper, headed by its stratum; needs the booktabs package."""
    columns = [column for column in named(comparison, MAIN) if column.title not in ("seeds", "wins")]
    align = "".join("l" if column.order is None else "r" for column in columns)
    lines = [
        "% \\usepackage{booktabs}",
        *(f"% {printable(line)}" for line in (title(comparison), answer(comparison), *basis(comparison))),
        f"\\begin{{tabular}}{{{align}}}",
        "\\toprule",
        *([f"\\multicolumn{{{len(columns)}}}{{l}}{{{_tex(stratum)}}} \\\\\n\\midrule"] if stratum else []),
        " & ".join(_tex(column.title) for column in columns) + " \\\\",
        "\\midrule",
        *(" & ".join(_tex(column.cell(row)) for column in columns) + " \\\\" for row in comparison.rows),
        "\\bottomrule",
        "\\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def csv_text(comparison: Comparison) -> str:
    """A row per arm with raw numbers; an empty cell was not measured."""
    return csv_of([flat_row(row) for row in comparison.rows])


def run_records(comparison: Comparison) -> list[dict[str, Any]]:
    """A record per run that counts, without those that only one of a pair has; `caution` is what a verdict needs."""
    late = "; ".join(_beyond_rows(comparison))
    return [
        {
            "arm": row.arm,
            "seed": seed,
            comparison.endpoint.name: "failed" if value is None else value,
            "rate": row.lr,
            "tokens": arm.runs[seed].figures.get("tokens"),
            "seconds": arm.runs[seed].figures.get("seconds"),
            **({"caution": caution} if (caution := _unfair(row) or late) else {}),
        }
        for row, arm in zip(comparison.rows, comparison.arms, strict=True)
        for seed, value in zip(row.seeds, row.values, strict=True)
        if value is not None or seed in row.failed
    ]


def _beyond_rows(comparison: Comparison) -> Iterator[str]:
    """What verdicts rest on that rows don't show, so that a table of them would claim more."""
    yield from comparison.exploratory
    if comparison.looks:
        yield "the looks of the study chose its seeds"
    if comparison.plan.family >= len(comparison.rows):
        yield f"{comparison.plan.family} pairs of arms share the 5%"
    if comparison.plan.share < 1:
        yield "other endpoints or strata share the 5%"


def _unfair(row: Row) -> str:
    verdict = row.verdict
    return f"{NOT_COMPARABLE}: {verdict.sentence}" if verdict and verdict.word == NOT_COMPARABLE else ""


def csv_of(records: list[dict[str, Any]]) -> str:
    """Records as CSV with every name that occurs as a column."""
    names = list(dict.fromkeys(name for record in records for name in record))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def json_text(comparison: Comparison) -> str:
    """Everything, as strict JSON."""
    return strict_json(json_values(comparison), indent=1) + "\n"


def json_values(comparison: Comparison) -> dict[str, Any]:
    """Everything, as plain values."""
    values = {
        f.name: getattr(comparison, f.name) for f in dataclasses.fields(comparison) if f.name not in ("arms", "plan")
    }
    values |= {"endpoint": comparison.endpoint.name, "unit": comparison.endpoint.unit}
    # every column of the CSV, and the rest
    values["rows"] = [flat_row(row) | plain_values(row) for row in comparison.rows]
    return {"answer": answer(comparison), "basis": basis(comparison), **plain_values(values)}


def flat_row(row: Row) -> dict[str, Any]:
    """One arm's numbers by name, without nesting."""
    effect = row.effect
    values: dict[str, Any] = {
        "arm": row.arm,
        "verdict": str(row.verdict) if row.verdict else "baseline",
        "sentence": row.verdict.sentence if row.verdict else "",
        "pairs": sum(d is not None for d in row.differences),
        "failed": len(row.failed),
        "waiting": row.waiting,
    }
    if effect is not None:
        values |= {"delta": effect.delta, "low": effect.low, "high": effect.high, "p": effect.p}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if isinstance(value, Interval):
            values |= {f"{field.name}": value.mean, f"{field.name}_low": value.low, f"{field.name}_high": value.high}
        elif isinstance(value, int | float) or (value is None and field.name not in ("effect", "verdict")):
            values.setdefault(field.name, value)
    if effect is not None:
        values |= dataclasses.asdict(effect) | {"detectable": effect.detectable}
    values |= {f"{name}": mean for name, (mean, _) in row.figures.items()}
    return values | {f"seed {seed}": value for seed, value in zip(row.seeds, row.values, strict=True)}


def plain_values(value: Any) -> Any:
    """Dataclasses to mappings, paths to texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_values(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _md_table(comparison: Comparison, columns: tuple[Column, ...]) -> list[str]:
    head = "| " + " | ".join(md(column.title) for column in columns) + " |"
    rule = "|" + "|".join("---" if column.order is None else "---:" for column in columns) + "|"
    rows = ["| " + " | ".join(md(column.cell(row)) for column in columns) + " |" for row in comparison.rows]
    return [head, rule, *rows]


def md_lines(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(map(md, row)) + " |" for row in rows),
    ]


def md(text: str) -> str:
    """Text that Markdown shows as it is."""
    shown = printable(text, 2000).replace("&", "&amp;").replace("<", "&lt;")
    for character in "\\`*_[]|#~":
        shown = shown.replace(character, f"\\{character}")
    return shown


_TEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
} | {character: f"\\{character}" for character in "#$%&_"}


def _tex(text: str) -> str:
    """Text that LaTeX shows as it is."""
    return "".join(_TEX.get(character, character) for character in printable(text, 2000))
