"""The comparison as one self-contained HTML file: `page.html.j2` filled with tables, sentences and pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from nexus_ablate import __version__
from nexus_ablate.comparison.arms import Arm
from nexus_ablate.comparison.curves import AXES
from nexus_ablate.comparison.fairness import FAIL, PASS, STATUSES, UNKNOWN, WAIVED, WARN
from nexus_ablate.comparison.findings import Findings
from nexus_ablate.comparison.result import Comparison
from nexus_ablate.comparison.verdict import BETTER, DIVERGED, EQUIVALENT, IDENTICAL, MEANINGS, UNSTABLE, WORSE
from nexus_ablate.console import several
from nexus_ablate.errors import printable
from nexus_ablate.provenance import source_hash
from nexus_ablate.report import charts, sentences, tables

CLASSES = dict.fromkeys((*MEANINGS, *STATUSES), "") | {
    BETTER: "good",
    WORSE: "bad",
    DIVERGED: "bad",
    UNSTABLE: "bad",
    EQUIVALENT: "same",
    IDENTICAL: "same",
    PASS: "good",
    WARN: "warn",
    FAIL: "bad",
    WAIVED: "warn",
    UNKNOWN: "warn",
}
"""The style of each word and status."""

_BLOCK = re.compile(r"(?P<before>.+)/block_(?P<block>\d{1,5})(?P<after>/.+)?")


def html(findings: Findings, command: str = "", reload_seconds: int = 0) -> str:
    """The whole page.

    Args:
        command: The command that made the page, for its foot.
        reload_seconds: The page reloads itself this often; 0: never.
    """
    views = [_whole_view(table) for table in findings.tables]
    for view, stratum in zip(views, findings.strata, strict=True):
        view["stratum"] = stratum
    parts: dict[str, Any] = {
        "findings": findings,
        "views": views,
        "reload_seconds": reload_seconds,
        "so_far": _so_far(findings.tables),
        "claim": sentences.claim_lines(findings),
        "missing": sentences.missing_lines(findings),
        "origin": _origin(findings.tables, command),
    }
    if findings.across:
        parts |= {
            "across": tables.across_table(findings),
            "strata": _drawing(charts.strata(findings.strata, findings.across)),
        }
    if findings.scaling:
        parts |= {
            "scaling": tables.scaling_table(findings.scaling),
            "scaling_note": sentences.SCALING_NOTE,
            "multipliers": _drawing(charts.multipliers(findings.scaling, findings.across)),
        }
    return _filled(parts)


def summary(comparison: Comparison) -> str:
    """A page with the answer, the table and the intervals alone, for a notebook."""
    return _filled({"views": [_opening_view(comparison)]})


def _filled(parts: dict[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
    )
    environment.globals |= {
        "findings": None,
        "reload_seconds": 0,
        "palette": charts.PALETTE,
        "arm_colours": charts.ARM_COLOURS,
        "classes": CLASSES,
        "meanings": MEANINGS,
        "reason": sentences.reason,
        "together_text": sentences.together_text,
    }
    return environment.get_template("page.html.j2").render(parts)


def _shown(value: Any) -> Any:
    """What the template writes for a value: text without control characters, which jinja2 then escapes."""
    if value is None:
        return ""
    return value if hasattr(value, "__html__") else printable(str(value), 2000)


def _drawing(svg: str) -> Any:
    """A picture as jinja2 takes it over unescaped."""
    from markupsafe import Markup

    return Markup(svg)


def _opening_view(comparison: Comparison) -> dict[str, Any]:
    """What the template shows of a comparison at the top of a page, and in a notebook."""
    statuses = [check.status for check in comparison.checks]
    return {
        "comparison": comparison,
        "title": sentences.title(comparison),
        "answer": sentences.answer(comparison),
        "basis": sentences.basis(comparison),
        "counts": {status: statuses.count(status) for status in STATUSES if status in statuses},
        "main_columns": tables.main_columns(comparison),
        "learning_rates": _drawing(charts.learning_rates(comparison)),
        "forest": _drawing(charts.forest(comparison)),
    }


def _whole_view(comparison: Comparison) -> dict[str, Any]:
    """All that the template shows of a comparison."""
    return _opening_view(comparison) | {
        "secondary": [
            (tables.secondary_heading(other), tables.secondary_table(other), _drawing(charts.secondary(other)))
            for other in comparison.secondary
        ],
        "curves": _curves(comparison),
        "slopes": _drawing(charts.slopes(comparison)),
        "measures": [*tables.side_columns(comparison), *tables.figure_columns(comparison)],
        "maps": {name: _shaded(comparison, grid) for name, grid in by_layer(comparison.arms).items()},
        "pareto": _drawing(charts.pareto(comparison)),
        "stability": _drawing(charts.stability(comparison)),
        "passed": [check for check in comparison.checks if check.status == PASS],
        "others": [check for check in comparison.checks if check.status != PASS],
        "changes": tables.changes_table(comparison),
        "left_out": sentences.left_out(comparison),
        "words": {row.verdict.word for row in comparison.rows if row.verdict},
    }


def _curves(comparison: Comparison) -> list[dict[str, Any]]:
    """The losses and their differences against each budget; the losses late, and from the start."""
    curves = []
    for axis, word in zip(AXES, ("tokens", "FLOPs", "seconds"), strict=True):
        late = charts.losses(comparison, axis)
        if late:
            whole, gap = charts.losses(comparison, axis, whole=True), charts.paired_differences(comparison, axis)
            pictures = {"late": _drawing(late), "whole": _drawing(whole), "gap": _drawing(gap)}
            curves.append({"axis": axis, "word": word, "budget": charts.BUDGETS[axis], **pictures})
    return curves


def by_layer(arms: list[Arm]) -> dict[str, list[list[float | None]]]:
    """Diagnostic to a list per arm of its mean over seeds in each block at the end of training; None: not measured."""
    values: dict[str, dict[tuple[int, int], list[float]]] = {}
    for index, arm in enumerate(arms):
        for run in arm.runs.values():
            for name, value in run.probed.items():
                match = _BLOCK.fullmatch(name)
                if match and isinstance(value, int | float):
                    cells = values.setdefault(match["before"] + (match["after"] or ""), {})
                    cells.setdefault((index, int(match["block"])), []).append(float(value))
    grids = {}
    for name, cells in sorted(values.items()):
        grid: list[list[float | None]] = []
        for index in range(len(arms)):
            depth = 1 + max((block for place, block in cells if place == index), default=-1)
            blocks = [cells.get((index, block)) for block in range(depth)]
            grid.append([float(np.mean(seeds)) if seeds else None for seeds in blocks])
        grids[name] = grid
    return grids


def _shaded(comparison: Comparison, grid: list[list[float | None]]) -> list[tuple[str, list[tuple[str | None, int]]]]:
    """By arm the text of each block's value and its shade in percent, by logarithm where the values span a decade."""
    seen = [value for values in grid for value in values if value is not None]
    low, high = min(seen), max(seen)
    scale = math.log if low > 0 and high > 10 * low else float
    span = scale(high) - scale(low)
    depth = max(map(len, grid))
    rows = []
    for row, values in zip(comparison.rows, grid, strict=True):
        cells: list[tuple[str | None, int]] = []
        for value in [*values, *[None] * (depth - len(values))]:
            shade = 0 if value is None or not span else round(45 * (scale(value) - scale(low)) / span)
            cells.append((None if value is None else f"{value:.3g}", shade))
        if values:
            rows.append((row.arm, cells))
    return rows


def _so_far(comparisons: Sequence[Comparison]) -> str:
    """How much of a running study the verdicts rest on."""
    rows = [row for table in comparisons for row in table.rows]
    used = sum(value is not None for row in rows for value in row.values)
    waiting = sum(row.waiting for row in rows)
    counts = f"{several(used, 'run')} so far, {waiting} without a result yet"
    return f"Live: {counts}. The verdicts are preliminary until all have ended."


def _origin(comparisons: Sequence[Comparison], command: str) -> dict[str, str]:
    """Date, version, code, command and machine: where the page and its runs come from."""
    records = [run.record for table in comparisons for arm in table.arms for run in arm.runs.values()]
    versions, sources, places, devices = set(), set(), set(), set()
    for record in records:
        env, result = record.env or {}, record.summary or {}
        versions.add(f"version {env['version']}" if env.get("version") else "")
        sources.add(source_hash(env["source"])[:8] if env.get("source") else "")
        places.add(", ".join(str(env[key]) for key in ("host", "platform") if env.get(key)))
        devices.add(str(result.get("processor") or result.get("device") or ""))
    machines = [*sorted(places), *sorted(devices)]
    return {
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by nexus-ablate {__version__}",
        "command": command,
        "runs": ", ".join(sorted(filter(None, versions))),
        "source hash": ", ".join(sorted(filter(None, sources))),
        "machine": "; ".join(filter(None, machines)),
    }
