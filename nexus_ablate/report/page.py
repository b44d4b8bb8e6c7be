"""The comparison as one self-contained HTML file: `page.html.j2` filled with tables, sentences and pictures."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nexus_ablate import __version__
from nexus_ablate.comparison.curves import AXES
from nexus_ablate.comparison.fairness import FAIL, PASS, STATUSES, UNKNOWN, WAIVED, WARN
from nexus_ablate.comparison.results import Comparison, Stratum
from nexus_ablate.comparison.verdict import BETTER, DIVERGED, EQUIVALENT, IDENTICAL, MEANINGS, UNSTABLE, WORSE
from nexus_ablate.console import several
from nexus_ablate.errors import printable
from nexus_ablate.provenance import source_hash
from nexus_ablate.report import arm_tables, charts, sentences

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


def html(comparison: Comparison, command: str = "", reload_seconds: int = 0) -> str:
    """The whole page.

    Args:
        command: The command that made the page, for its foot.
        reload_seconds: The page reloads itself this often; 0: never.
    """
    parts: dict[str, Any] = {
        "comparison": comparison,
        "views": [_whole_view(stratum) for stratum in comparison.strata],
        "reload_seconds": reload_seconds,
        "so_far": _so_far(comparison),
        "claim": sentences.claim_lines(comparison),
        "missing": sentences.missing_lines(comparison),
        "origin": _origin(comparison, command),
    }
    if comparison.changes:
        parts["change_note"] = sentences.change_note(comparison)
        parts["changes"] = arm_tables.changes_over_strata(comparison)
        parts["strata"] = charts.strata(comparison)
    return _filled(parts)


def summary(stratum: Stratum) -> str:
    """A page with the answer, the table and the intervals alone, for a notebook."""
    return _filled({"views": [_opening_view(stratum)]})


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
        "comparison": None,
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


def _opening_view(stratum: Stratum) -> dict[str, Any]:
    """What the template shows of a comparison at the top of a page, and in a notebook."""
    statuses = [check.status for check in stratum.checks]
    return {
        "stratum": stratum,
        "title": sentences.title(stratum),
        "answer": sentences.answer(stratum),
        "basis": sentences.basis(stratum),
        "counts": {status: statuses.count(status) for status in STATUSES if status in statuses},
        "main_columns": arm_tables.main_columns(stratum),
        "learning_rates": charts.learning_rates(stratum),
        "forest": charts.forest(stratum),
    }


def _whole_view(stratum: Stratum) -> dict[str, Any]:
    """All that the template shows of a stratum."""
    return _opening_view(stratum) | {
        "secondary": [
            (arm_tables.secondary_heading(other), arm_tables.secondary_table(other), charts.secondary(other))
            for other in stratum.secondary
        ],
        "curves": _curves(stratum),
        "measures": [*arm_tables.side_columns(stratum), *arm_tables.figure_columns(stratum)],
        "troubled": any(row.failed or row.spike_score for row in stratum.rows),
        "passed": [check for check in stratum.checks if check.status == PASS],
        "others": [check for check in stratum.checks if check.status != PASS],
        "changes": arm_tables.changed_keys(stratum),
        "left_out": sentences.left_out(stratum),
        "words": {row.word for row in stratum.rows},
    }


def _curves(stratum: Stratum) -> list[dict[str, Any]]:
    """The losses and their differences against each budget; the losses late, and from the start."""
    curves = []
    for axis, word in zip(AXES, ("tokens", "FLOPs", "seconds"), strict=True):
        late = charts.losses(stratum, axis)
        if late:
            whole, gap = charts.losses(stratum, axis, whole=True), charts.paired_differences(stratum, axis)
            pictures = {"late": late, "whole": whole, "gap": gap}
            curves.append({"axis": axis, "word": word, "budget": charts.BUDGETS[axis], **pictures})
    return curves


def _so_far(comparison: Comparison) -> str:
    """How much of a running study the verdicts rest on."""
    rows = [row for stratum in comparison.strata for row in stratum.rows]
    used, waiting = sum(row.trained for row in rows), sum(row.waiting for row in rows)
    counts = f"{several(used, 'run')} so far, {waiting} without a result yet"
    return f"Live: {counts}. The verdicts are preliminary until all have ended."


def _origin(comparison: Comparison, command: str) -> dict[str, str]:
    """Date, version, code, command and machine: where the page and its runs come from."""
    arms = [arm for stratum in comparison.strata for arm in stratum.arms]
    records = [run.record for arm in arms for run in arm.runs.values()]
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
