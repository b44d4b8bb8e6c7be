"""A study's findings as Markdown, LaTeX (booktabs), CSV and JSON: pandas writes the frame of every table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_ablate.comparison.findings import Findings
from nexus_ablate.comparison.result import Comparison
from nexus_ablate.comparison.verdict import NOT_COMPARABLE
from nexus_ablate.errors import printable
from nexus_ablate.report import sentences, tables
from nexus_ablate.report.frames import arms_frame
from nexus_ablate.report.tables import ARM, TextTable
from nexus_ablate.runs import strict_json

if TYPE_CHECKING:
    import pandas

WRITTEN = {
    "html": r"(?s)\A<!doctype html>.*nexus-ablate",
    "md": r"(?s)\n## Fairness\n.*\n## Left out\n",
    "latex": r"\A(% .*\n)*% \\usepackage\{booktabs\}\n",
    "csv": r"\A(stratum,)?arm,verdict,sentence,",
    "json": r'(?s)"answer": .*"basis": ',
    "runs": r"\A(stratum,)?arm,seed,[^\n]*,rate,tokens,seconds(,caution)?\n",
}
"""What every file of a format has that this package wrote."""

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the start of a formula."""

_MARKDOWN = str.maketrans({"&": "&amp;", "<": "&lt;"} | {character: f"\\{character}" for character in "\\`*_[]|#~"})
_TEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "–": "--",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
    }
    | {character: f"\\{character}" for character in "#$%&_"}
)


# -------------------------------------------------------------------------------------------------------- markdown


def markdown(findings: Findings) -> str:
    """One page: the claim, the strata side by side, then each comparison."""
    lines = [f"- {md(line)}" for line in (*sentences.claim_lines(findings), *sentences.missing_lines(findings))]
    if sentences.claim_lines(findings):
        lines[0] = f"**{lines[0].removeprefix('- ')}**\n"
    if findings.across:
        lines += ["", md_table(tables.across_table(findings)), ""]
    if findings.scaling:
        lines += ["", sentences.SCALING_NOTE, "", md_table(tables.scaling_table(findings.scaling)), ""]
    if lines:
        lines.append("")
    for stratum, comparison in zip(findings.strata, findings.tables, strict=True):
        lines += [f"# Stratum {md(stratum)}", ""] if stratum else []
        lines.append(comparison_markdown(comparison))
    return "\n".join(lines)


def comparison_markdown(comparison: Comparison) -> str:
    """The table, the sentences, fairness and what was left out of one comparison."""
    lines = [f"# {md(sentences.title(comparison))}", "", md(sentences.answer(comparison)), ""]
    lines += [f"- {md(line)}" for line in sentences.basis(comparison)]
    lines += ["", md_table(tables.arm_table(comparison, tables.main_columns(comparison))), ""]
    lines += [f"- {md(row.arm)}: {md(sentences.reason(row))}" for row in comparison.rows if row.verdict]
    lines += [f"- {md(sentences.together_text(two))}" for two in comparison.together]
    costs = tables.arm_table(comparison, [ARM, *tables.side_columns(comparison)])
    lines += ["", "## Costs and stability", "", md_table(costs)]
    for other in comparison.secondary:
        lines += ["", f"## {md(tables.secondary_heading(other))}", "", md_table(tables.secondary_table(other))]
    figures = tables.figure_columns(comparison)
    if figures:
        diagnostics = tables.arm_table(comparison, [ARM, *figures])
        lines += ["", "## Diagnostics and evaluations", "", md_table(diagnostics)]
    left_out = [f"- {md(line)}" for line in sentences.left_out(comparison)]
    lines += [
        "",
        "## Fairness",
        "",
        md_table(tables.checks_table(comparison)),
        "",
        "## Left out",
        "",
        *(left_out or ["nothing"]),
        "",
    ]
    return "\n".join(lines)


def md_table(table: TextTable) -> str:
    """The table in Markdown, numbers to the right."""
    align = ["left" if head in table.words else "right" for head in table.heads]
    heads = [md(head) for head in table.heads]
    frame = _text_frame(table).map(md)
    return frame.to_markdown(index=False, headers=heads, colalign=align, disable_numparse=True)


def md(text: str) -> str:
    """Text that Markdown shows as it is."""
    return printable(text, 2000).translate(_MARKDOWN)


def _text_frame(table: TextTable) -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame(table.rows, columns=list(table.heads), dtype=object)


# ----------------------------------------------------------------------------------------------------------- latex


def latex(findings: Findings) -> str:
    """A table for each stratum, below the claim, for a paper; needs the booktabs package."""
    lines = [f"% {printable(line, 1000)}" for line in sentences.claim_lines(findings)]
    for stratum, comparison in zip(findings.strata, findings.tables, strict=True):
        lines.append(_latex_table(comparison, stratum))
    return "\n".join(lines)


def _latex_table(comparison: Comparison, stratum: str) -> str:
    columns = [column for column in tables.main_columns(comparison) if column.title not in ("seeds", "wins")]
    frame = _text_frame(tables.arm_table(comparison, columns)).map(tex)
    frame.columns = [tex(name) for name in frame.columns]
    align = "".join("r" if column.number else "l" for column in columns)
    text = frame.to_latex(index=False, column_format=align)
    if stratum:
        heading = f"\\multicolumn{{{len(columns)}}}{{l}}{{{tex(stratum)}}} \\\\\n\\midrule\n"
        text = text.replace("\\toprule\n", f"\\toprule\n{heading}")
    notes = [sentences.title(comparison), sentences.answer(comparison), *sentences.basis(comparison)]
    return "\n".join(["% \\usepackage{booktabs}", *(f"% {printable(note)}" for note in notes), text])


def tex(text: str) -> str:
    """Text that LaTeX shows as it is."""
    return printable(text, 2000).translate(_TEX)


# ------------------------------------------------------------------------------------------------------------- csv


def csv_text(findings: Findings) -> str:
    """A row per arm with raw numbers, its stratum first where there are several; an empty cell was not measured."""
    import pandas

    frames = [arms_frame(comparison) for comparison in findings.tables]
    if len(frames) > 1:
        for stratum, frame in zip(findings.strata, frames, strict=True):
            frame.insert(0, "stratum", stratum)
    return _csv(pandas.concat([frame.astype(object) for frame in frames]))


def runs_text(findings: Findings) -> str:
    """A row per run of the tables, as `nexus-ablate judge` reads it: the endpoint, or `failed`."""
    import pandas

    records = []
    for stratum, comparison in zip(findings.strata, findings.tables, strict=True):
        for record in run_records(comparison):
            records.append({"stratum": stratum, **record} if stratum else record)
    return _csv(pandas.DataFrame(records, dtype=object))


def _csv(frame: pandas.DataFrame) -> str:
    """CSV in which a text that a spreadsheet would execute begins with an apostrophe."""
    frame = frame.map(_spreadsheet_safe).rename(columns=_spreadsheet_safe)
    return frame.to_csv(index=False, lineterminator="\n")


def _spreadsheet_safe(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA_STARTS) else cell


def run_records(comparison: Comparison) -> list[dict[str, Any]]:
    """A record per run that counts, without those that only one of a pair has; `caution` is what a verdict needs."""
    records = []
    for row, arm in zip(comparison.rows, comparison.arms, strict=True):
        caution = "; ".join(_beyond_rows(comparison))
        if row.verdict and row.verdict.word == NOT_COMPARABLE:
            caution = f"{NOT_COMPARABLE}: {row.verdict.sentence}"
        for seed, value in zip(row.seeds, row.values, strict=True):
            if value is None and seed not in row.failed:
                continue
            figures = arm.runs[seed].figures
            record = {"arm": row.arm, "seed": seed, comparison.endpoint.name: "failed" if value is None else value}
            record |= {"rate": row.lr, "tokens": figures.get("tokens"), "seconds": figures.get("seconds")}
            records.append(record | ({"caution": caution} if caution else {}))
    return records


def _beyond_rows(comparison: Comparison) -> list[str]:
    """What verdicts rest on that rows don't show, so that a table of them would claim more."""
    terms = comparison.terms
    reasons = list(comparison.exploratory)
    if comparison.looks:
        reasons.append("the looks of the study chose its seeds")
    if terms.family >= len(comparison.rows):
        reasons.append(f"{terms.family} pairs of arms share the 5%")
    if terms.share < 1:
        reasons.append("other endpoints or strata share the 5%")
    return reasons


# ------------------------------------------------------------------------------------------------------------ json


def json_text(findings: Findings) -> str:
    """Strict JSON: the comparison, with the claim; of several strata a list of them."""
    values = [_json_values(comparison) for comparison in findings.tables]
    more = {"claim": findings.claim, "missing": findings.missing}
    more = {name: value for name, value in more.items() if value}
    if len(values) == 1:
        return _json(values[0] | more)
    across = _text_frame(tables.across_table(findings)).to_dict("records")
    more |= {"scaling": findings.scaling} if findings.scaling else {}
    strata = dict(zip(findings.strata, values, strict=True))
    return _json({"study": findings.name, **more, "across": across, "strata": strata})


def _json_values(comparison: Comparison) -> dict[str, Any]:
    """Everything that a comparison holds; its rows with every column of the CSV."""
    values = {name: value for name, value in vars(comparison).items() if name not in ("arms", "terms")}
    frame = arms_frame(comparison).astype(object)
    columns = frame.where(frame.notna(), None).to_dict("records")
    rows = [{**column, **vars(row)} for column, row in zip(columns, comparison.rows, strict=True)]
    endpoint = {"endpoint": comparison.endpoint.name, "unit": comparison.endpoint.unit}
    opening = {"answer": sentences.answer(comparison), "basis": sentences.basis(comparison)}
    return opening | values | endpoint | {"rows": rows}


def _json(values: dict[str, Any]) -> str:
    return strict_json(_plain(values), indent=1) + "\n"


def _plain(value: Any) -> Any:
    """Dataclasses as mappings, paths as texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(vars(value)[field.name]) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
