"""A comparison as Markdown, LaTeX (booktabs), CSV and JSON: pandas writes the frame of every table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from nexus_ablate.comparison.results import Comparison, Stratum
from nexus_ablate.comparison.verdict import NOT_COMPARABLE
from nexus_ablate.errors import printable
from nexus_ablate.report import arm_tables, parts, sentences
from nexus_ablate.report.arm_tables import TextTable
from nexus_ablate.runs import strict_json

if TYPE_CHECKING:
    import pandas

FORMULA_STARTS = tuple("=+-@\t\r\n＝＋－＠")
"""What a spreadsheet takes for the start of a formula (https://owasp.org/www-community/attacks/CSV_Injection)."""

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


def markdown(comparison: Comparison) -> str:
    """One page: the claim, the strata side by side, then each of them."""
    starts = {"title": "\n# ", "heading": "\n## ", "text": "\n", "note": "- ", "item": "- ", "path": "- "}
    lines, before = [], ""
    for part in parts.of_comparison(comparison, details=True):
        if part.kind == "table":
            lines += ["", md_table(part.table)]
        elif part.text:
            is_first = starts[part.kind] == "- " and part.kind != before
            gap = "\n" if is_first else ""
            word = f"{part.word} " if part.kind == "item" and part.word else ""
            lines.append(gap + starts[part.kind] + md(word + part.text))
        before = part.kind
    return "\n".join(lines).lstrip() + "\n"


def md_table(table: TextTable) -> str:
    """The table in Markdown, numbers to the right."""
    align = ["left" if head in table.words else "right" for head in table.heads]
    frame = _text_frame(table).map(md).rename(columns=md)
    return frame.to_markdown(index=False, colalign=align, disable_numparse=True)


def md(text: str) -> str:
    """Text that Markdown shows as it is."""
    return printable(text, 2000).translate(_MARKDOWN)


def _text_frame(table: TextTable) -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame(table.rows, columns=list(table.heads), dtype=object)


# ----------------------------------------------------------------------------------------------------------- latex


def latex(comparison: Comparison) -> str:
    """A table for each stratum, below the claim, for a paper; needs the booktabs package."""
    lines = [f"% {printable(line, 1000)}" for line in sentences.claim_lines(comparison)]
    return "\n".join([*lines, *map(_latex_table, comparison.strata)])


def _latex_table(stratum: Stratum) -> str:
    columns = [column for column in arm_tables.main_columns(stratum) if column.title not in ("seeds", "wins")]
    frame = _text_frame(arm_tables.arm_table(stratum.rows, columns)).map(tex).rename(columns=tex)
    align = ""
    for column in columns:
        align += "r" if column.number else "l"
    text = frame.to_latex(index=False, column_format=align)
    text = re.sub(r"^(?=[\[*])", "{}", text, flags=re.M)  # after a row's end these would be read as its arguments
    if stratum.name:
        heading = f"\\multicolumn{{{len(columns)}}}{{l}}{{{tex(stratum.name)}}} \\\\\n\\midrule\n"
        text = text.replace("\\toprule\n", f"\\toprule\n{heading}")
    notes = [sentences.title(stratum), *sentences.opening(stratum), *sentences.basis(stratum)]
    return "\n".join(["% \\usepackage{booktabs}", *(f"% {printable(note)}" for note in notes), text])


def tex(text: str) -> str:
    """Text that LaTeX shows as it is."""
    return printable(text, 2000).translate(_TEX)


# ------------------------------------------------------------------------------------------------------------- csv


def csv_text(comparison: Comparison) -> str:
    """The rows of `arm_tables.records`, counts as whole numbers; an empty cell was not measured."""
    return _csv([row for stratum in comparison.strata for row in arm_tables.records(stratum)])


def runs_text(comparison: Comparison) -> str:
    """A row per run of the tables, as `nexus-ablate judge` reads it: the endpoint, or `failed`."""
    return _csv([record for stratum in comparison.strata for record in run_records(stratum)])


def _csv(records: list[dict[str, Any]]) -> str:
    """CSV in which a text that a spreadsheet would execute begins with an apostrophe."""
    import pandas

    safe = []
    for record in records:
        safe.append({_spreadsheet_safe(name): _spreadsheet_safe(cell) for name, cell in record.items()})
    return pandas.DataFrame(safe, dtype=object).to_csv(index=False, lineterminator="\n")


def _spreadsheet_safe(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA_STARTS) else cell


def run_records(stratum: Stratum) -> list[dict[str, Any]]:
    """A record per run that counts, without those that only one of a pair has."""
    cautions = "; ".join(_cautions(stratum))
    records = []
    for row, arm in zip(stratum.rows, stratum.arms, strict=True):
        caution = f"{NOT_COMPARABLE}: {row.reason}" if row.word == NOT_COMPARABLE else cautions
        for seed, value in zip(row.seeds, row.values, strict=True):
            if value is None and seed not in row.failed:
                continue
            figures = arm.runs[seed].figures
            result = {row.endpoint.name: "failed" if value is None else value}
            record = {"stratum": stratum.name} if stratum.name else {}
            record |= {"arm": row.arm, "seed": seed} | result
            record |= {"rate": row.lr, "tokens": figures.get("tokens"), "seconds": figures.get("seconds")}
            record |= result  # again: `seconds` and `tokens` are endpoints too
            if caution:
                record["caution"] = caution
            records.append(record)
    return records


def _cautions(stratum: Stratum) -> list[str]:
    """What verdicts rest on that rows of runs don't show, so that a table of them would claim more."""
    terms = stratum.terms
    cautions = list(stratum.exploratory)
    if stratum.looks:
        cautions.append("the looks of the study chose its seeds")
    sharing = round(stratum.comparisons * terms.study.share)
    if sharing > sum(bool(row.runs) for row in stratum.rows[1:]):
        cautions.append(f"{sharing} comparisons share the 5%")
    if round(terms.study.share * terms.strata, 6) < 1:
        cautions.append("other endpoints share the 5%")
    if any(row.effect is not None and row.effect.counts_text for row in stratum.rows):
        cautions.append("rows don't have the error over text")
    return cautions


# ------------------------------------------------------------------------------------------------------------ json


def json_text(comparison: Comparison) -> str:
    """Strict JSON: the comparison, with the claim; of several strata a list of them."""
    import msgspec

    values: dict[str, Any] = {}
    if comparison.claim:
        values["claim"] = comparison.claim
    if comparison.missing:
        values["missing"] = comparison.missing
    if len(comparison.strata) == 1:
        values = _json_values(comparison.strata[0]) | values
    else:
        values = {"study": comparison.name, **values}
        values["across"] = _text_frame(arm_tables.changes_over_strata(comparison)).to_dict("records")
        values["strata"] = {stratum.name: _json_values(stratum) for stratum in comparison.strata}
    plain = msgspec.to_builtins(values, str_keys=True, enc_hook=str)  # dataclasses as mappings, paths as texts
    return strict_json(plain, indent=1) + "\n"


def _json_values(stratum: Stratum) -> dict[str, Any]:
    """Everything that a stratum holds; its rows with every column of the CSV."""
    values = {name: value for name, value in vars(stratum).items() if name not in ("arms", "terms")}
    endpoint = stratum.endpoint
    values |= {"endpoint": endpoint.name, "unit": endpoint.unit, "delta_min": endpoint.delta_min}
    rows = zip(arm_tables.records(stratum), stratum.rows, strict=False)  # without secondary endpoints, which come after
    values["rows"] = [record | vars(row) for record, row in rows]
    return {"answer": sentences.answer(stratum), "basis": sentences.basis(stratum), **values}
