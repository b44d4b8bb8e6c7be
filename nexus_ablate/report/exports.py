"""A comparison as Markdown, CSV and JSON."""

from __future__ import annotations

import math
from typing import Any

from nexus_ablate.comparison.compare import Comparison, Table
from nexus_ablate.errors import printable
from nexus_ablate.report import sentences
from nexus_ablate.report.columns import MAIN, TextTable, by_measure, matrix, records, shown, text_table
from nexus_ablate.runs import strict_json

_MARKDOWN = str.maketrans({"&": "&amp;", "<": "&lt;"} | {character: f"\\{character}" for character in "\\`*_[]|#~"})


def markdown(comparison: Comparison) -> str:
    """One page, each table with all of its details."""
    lines = []
    for table in comparison.tables:
        lines += _markdown_lines(table)
    if len(comparison.tables) > 1:
        lines += ["## Settings", "", md_table(matrix(comparison)), ""]
    lines += [f"- {md(line)}" for line in sentences.missing(comparison)]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_lines(table: Table) -> list[str]:
    name = f" ({table.setting})" if table.setting else ""
    lines = [f"# {md(sentences.title(table) + name)}", "", md(sentences.answer(table)), ""]
    lines += [md(sentences.scale(table)), "", md_table(text_table(table.rows, table, shown(table, MAIN))), ""]
    lines += [md(", ".join(sentences.basis(table))), ""]
    for rows in table.secondary:
        lines += [f"## {md(rows[0].endpoint.name)}", "", md_table(text_table(rows, table, MAIN[:4])), ""]
    lines += [f"- {md(f'{row.endpoint.name} {row.arm.name}: {row.verdict}, {row.sentence}')}" for row in table.all_rows]
    checks, passed = sentences.fairness(table)
    lines += ["", "## Fairness", ""]
    lines += [f"- {md(f'{check.status} {check.name}: {check.text}')}" for check in checks]
    lines += [f"- {md(passed)}"] if passed else []
    lines += ["", "## Measures", "", md_table(by_measure(table)), ""]
    if left_out := sentences.left_out(table):
        lines += ["## Left out", "", *(f"- {md(line)}" for line in left_out), ""]
    return lines


def md_table(table: TextTable) -> str:
    """The table in Markdown, numbers to the right."""
    import pandas

    align = ["left" if head in table.words else "right" for head in table.heads]
    frame = pandas.DataFrame(table.rows, columns=list(table.heads), dtype=object)
    return frame.map(md).rename(columns=md).to_markdown(index=False, colalign=align, disable_numparse=True)


def md(text: str) -> str:
    """Text that Markdown shows as it is."""
    return printable(text, 2000).translate(_MARKDOWN)


def csv_text(comparison: Comparison) -> str:
    """The records of every table; an empty cell was not measured."""
    import pandas

    rows = [record for table in comparison.tables for record in records(table)]
    return pandas.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n")


def json_text(comparison: Comparison) -> str:
    """Strict JSON: each table with its records, conditions and what was left out."""
    return strict_json(to_dict(comparison), indent=1) + "\n"


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """What `json_text` writes, as plain data."""
    return {
        "tables": [_table_values(table) for table in comparison.tables],
        "advice": ": ".join(filter(None, sentences.advice(comparison))),
        "missing": comparison.missing,
    }


def _table_values(table: Table) -> dict[str, Any]:
    endpoint = table.endpoint
    rows = [{name: _plain(value) for name, value in record.items()} for record in records(table)]
    return {
        "name": table.name,
        "setting": table.setting,
        "question": table.question,
        "answer": sentences.answer(table),
        "endpoint": endpoint.name,
        "unit": endpoint.unit,
        "delta_min": endpoint.delta_min,
        "level": table.level,
        "cells": table.cells,
        "basis": ", ".join(sentences.basis(table)),
        "rows": rows,
        "checks": [{"name": c.name, "status": c.status, "text": c.text, "arms": [*c.arms]} for c in table.checks],
        "left_out": [{"path": str(out.path), "reason": out.reason, "arm": out.arm} for out in table.left_out],
        "refused": table.study.refused if table.study else {},
        "equal": table.study.equal if table.study else {},
    }


def _plain(value: Any) -> Any:
    """A value as JSON holds it: a multiple beyond the budgets as text, other numbers that are not finite as null."""
    if isinstance(value, float) and not math.isfinite(value):
        return "above" if value > 0 else None
    return value
