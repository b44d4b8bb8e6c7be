"""A study's findings in the terminal and as files: the claim, the strata side by side, then each comparison."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from nexus_ablate.comparison.findings import Across, Findings
from nexus_ablate.comparison.scaling import Scaling
from nexus_ablate.comparison.statistics import Interval
from nexus_ablate.comparison.verdict import IDENTICAL
from nexus_ablate.errors import printable
from nexus_ablate.report import exports, page, terminal
from nexus_ablate.report.table import NOTHING, bounds
from nexus_ablate.runs import strict_json

if TYPE_CHECKING:
    from rich.console import Console


def claim_lines(findings: Findings) -> list[str]:
    """The claim with its outcome, what it requires, and each expectation."""
    claim = findings.claim
    if claim is None:
        judged = f"the claim is judged over all strata: nexus-ablate compare {shlex.quote(str(findings.whole))}"
        return [judged] if findings.whole and findings.tables[0].plan.claim else []
    lines = [str(claim), *(requirement.sentence for requirement in claim.requirements)]
    for one in claim.results:
        where = f"{one.stratum}: " if one.stratum else ""
        lines.append(f"{one.outcome}: {where}{one.arm} {one.sentence}")
    return lines if len(lines) > 1 else [*lines, claim.sentence]


def missing_lines(findings: Findings) -> list[str]:
    """The strata without a result."""
    lines = [f"stratum {name}: no result yet ({states})" for name, states in findings.missing.items()]
    of_ladder = any(table.plan.rung for table in findings.tables)
    if not of_ladder:
        return lines
    if findings.missing:
        return [*lines, "compute multipliers are read when every size has results"]
    scaled = {one.arm for one in findings.scaling}
    rows = [row for row in findings.tables[0].rows if row.verdict and row.verdict.word != IDENTICAL]
    without = [row.arm for row in rows if row.arm not in scaled]
    reason = "a size lacks a fair result at one of at least three seeds"
    return [f"no compute multiplier, since {reason}: {', '.join(without)}"] if without else []


def across_table(findings: Findings) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows: each arm's difference by stratum, its change from the first to the last, agreement of sign."""
    heads = ("arm", *findings.strata, "change", "sign")
    return heads, [_across_row(findings, one) for one in findings.across]


def _across_row(findings: Findings, one: Across) -> tuple[str, ...]:
    cells = [
        NOTHING if row is None or row.effect is None else f"{row.endpoint.signed(row.effect.delta)} "
        f"{bounds(row.endpoint, row.effect)} {row.verdict.word if row.verdict else ''}".rstrip()
        for row in one.rows
    ]  # fmt: skip
    agree = {True: "the same", False: "differs", None: NOTHING}[one.agree]
    return (one.arm, *cells, _interval(findings, one.change), agree)


def _interval(findings: Findings, change: Interval | None) -> str:
    if change is None:
        return NOTHING
    signed = findings.tables[0].endpoint.signed
    text = signed(change.mean)
    return (
        text if change.low is None or change.high is None else f"{text} [{signed(change.low)}, {signed(change.high)}]"
    )


def scaling_table(findings: Findings) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows: each arm's compute multiplier by size, how it changes with compute, and the outcome."""
    sizes = [f"{compute:.1e}" for compute in findings.scaling[0].compute]
    by_size = [head for size in sizes for head in (f"at {size} FLOPs", f"by time at {size}")]
    heads = ("arm", *by_size, "per 10 times", "predicted", "outcome")
    return heads, [_scaling_row(one) for one in findings.scaling]


def _scaling_row(one: Scaling) -> tuple[str, ...]:
    pairs = zip(one.multipliers, one.by_time, strict=True)
    by_size = [NOTHING if cell is None else _times(cell) for pair in pairs for cell in pair]
    predicted = NOTHING if one.predicted is None else f"x{one.predicted:.3g}"
    return (one.arm, *by_size, _times(one.trend), predicted, one.outcome)


def _times(interval: Interval) -> str:
    return f"x{interval.mean:.3g} [x{interval.low:.3g}, x{interval.high:.3g}]"


WRITTEN = {
    "html": r"(?s)\A<!doctype html>.*nexus-ablate",
    "md": r"(?s)\n## Fairness\n.*\n## Left out\n",
    "latex": r"\A(% .*\n)*% \\usepackage\{booktabs\}\n",
    "csv": r"\A(stratum,)?arm,verdict,sentence,",
    "json": r'(?s)"answer": .*"basis": ',
    "runs": r"\A(stratum,)?arm,seed,[^\n]*,rate,tokens,seconds(,caution)?\n",
}
"""What every file of a format has that this module wrote."""

SCALING_NOTE = (
    "x1.2: the arm reaches its loss where the baseline needs 1.2 times the compute, at equal training tokens. "
    "Intervals hold all arms and sizes, with the noise of the fit. By time: at equal training time, by the measured "
    "speeds, whose own noise is not in the interval. Predicted: the largest size from the sizes below it alone."
)


def show(findings: Findings, console: Console, details: bool = False, full: bool = False) -> None:
    """Print the claim, the strata side by side, then each comparison."""
    for i, line in enumerate(claim_lines(findings)):
        console.print(line, style="bold" if not i else "", markup=False)
    for line in missing_lines(findings):
        console.print(printable(line), style="yellow", markup=False)
    if findings.across:
        console.print("\nchange: from the first stratum to the last, paired by seed, descriptive", style="dim")
        heads, rows = across_table(findings)
        if sum(max(len(head), *map(len, cells)) + 2 for head, *cells in zip(heads, *rows, strict=True)) > console.width:
            rows = [(row[0], head, cell) for row in rows for head, cell in zip(heads[1:], row[1:], strict=True)]
            heads = ("arm", "stratum", "difference")
        terminal.lines(heads, rows, console, full)
    if findings.scaling:
        console.print(f"\n{SCALING_NOTE}", style="dim")
        heads, rows = scaling_table(findings)
        rows = [(row[0], head, cell) for row in rows for head, cell in zip(heads[1:], row[1:], strict=True)]
        terminal.lines(("arm", "", "compute multiplier"), rows, console, full)
        for one in findings.scaling:
            console.print(printable(f"{one.arm} {one.outcome}: {one.sentence}"), markup=False)
    for stratum, table in zip(findings.strata, findings.tables, strict=True):
        if findings.claim or stratum:
            console.print("")
        if stratum:
            console.print(f"── stratum {printable(stratum)} ──", style="bold", markup=False)
        terminal.show(table, console, details, full)


def markdown(findings: Findings) -> str:
    """One page."""
    lines = [
        f"**{exports.md(line)}**\n" if not i else f"- {exports.md(line)}"
        for i, line in enumerate(claim_lines(findings))
    ]
    lines += [f"- {exports.md(line)}" for line in missing_lines(findings)]
    if findings.across:
        lines += ["", *exports.md_lines(*across_table(findings)), ""]
    if findings.scaling:
        lines += ["", SCALING_NOTE, "", *exports.md_lines(*scaling_table(findings)), ""]
    pages = [exports.markdown(table) for table in findings.tables]
    if any(findings.strata):
        pages = [f"# Stratum {exports.md(name)}\n\n{text}" for name, text in zip(findings.strata, pages, strict=True)]
    return "\n".join([*lines, *([""] if lines else []), *pages])


def html(findings: Findings, command: str = "", reload_seconds: int = 0) -> str:
    """One file that needs nothing else; see `page.html`."""
    return page.html(
        findings.tables,
        findings.strata,
        claim_lines(findings),
        findings.across,
        across_table(findings) if findings.across else None,
        findings.scaling,
        (SCALING_NOTE, *scaling_table(findings)) if findings.scaling else None,
        missing_lines(findings),
        command,
        reload_seconds,
    )


def latex(findings: Findings) -> str:
    """A table for each stratum, below the claim."""
    tables = [exports.latex(table, name) for name, table in zip(findings.strata, findings.tables, strict=True)]
    return "\n".join([*(f"% {printable(line, 1000)}" for line in claim_lines(findings)), *tables])


def csv_text(findings: Findings) -> str:
    """A row per arm, with its stratum first where there are several."""
    if len(findings.tables) == 1:
        return exports.csv_text(findings.tables[0])
    records = [
        {"stratum": stratum, **exports.flat_row(row)}
        for stratum, table in zip(findings.strata, findings.tables, strict=True)
        for row in table.rows
    ]
    return exports.csv_of(records)


def runs_text(findings: Findings) -> str:
    """A row per run of the tables, as `nexus-ablate judge` reads it: the endpoint, or `failed`."""
    records = [
        {**({"stratum": stratum} if stratum else {}), **record}
        for stratum, table in zip(findings.strata, findings.tables, strict=True)
        for record in exports.run_records(table)
    ]
    return exports.csv_of(records)


def json_text(findings: Findings) -> str:
    """Strict JSON: the comparison, with the claim; of several strata a list of them."""
    tables = [exports.json_values(table) for table in findings.tables]
    more: dict[str, object] = {"claim": exports.plain_values(findings.claim)} if findings.claim else {}
    more |= {"missing": findings.missing} if findings.missing else {}
    if len(tables) == 1:
        return strict_json(tables[0] | more, indent=1) + "\n"
    heads, rows = across_table(findings)
    across = [dict(zip(heads, row, strict=True)) for row in rows]
    by_stratum = dict(zip(findings.strata, tables, strict=True))
    more |= {"scaling": exports.plain_values(findings.scaling)} if findings.scaling else {}
    return strict_json({"study": findings.name, **more, "across": across, "strata": by_stratum}, indent=1) + "\n"
