"""The comparison as one self-contained HTML file: `page.html.j2` filled with tables, sentences and pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nexus_ablate import __version__
from nexus_ablate.comparison.curves import AXES
from nexus_ablate.comparison.fairness import PASS, UNKNOWN, WARN, Check
from nexus_ablate.comparison.results import Comparison, Stratum
from nexus_ablate.comparison.verdict import MEANINGS
from nexus_ablate.console import several
from nexus_ablate.errors import printable
from nexus_ablate.provenance import source_hash
from nexus_ablate.report import arm_tables, charts, sentences


def html(comparison: Comparison, command: str = "", reload_seconds: int = 0) -> str:
    """The whole page.

    Args:
        command: The command that made the page, for its foot.
        reload_seconds: The page reloads itself this often; 0: never.
    """
    first, *others = views = [_whole_view(stratum) for stratum in comparison.strata]
    for view in others:  # what the first stratum says is not said again
        for name in ("basis", "warnings"):
            view[name] = [line for line in view[name] if line not in first[name]]
    parts = {
        "title": sentences.title(comparison.strata[0]),
        "lead": sentences.lead_lines(comparison),
        "views": views,
        "words": {row.word for row in comparison.results},
        "reload_seconds": reload_seconds,
        "so_far": _so_far(comparison),
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
    lead = [sentences.headline(stratum)]
    return _filled({"title": sentences.title(stratum), "lead": lead, "views": [_opening_view(stratum)]})


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
        "changes": None,
        "missing": [],
        "origin": {},
        "reload_seconds": 0,
        "palette": charts.PALETTE,
        "arm_colours": charts.ARM_COLOURS,
        "tones": defaultdict(str, arm_tables.TONES),
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
    conditions = sentences.basis(stratum)
    warnings = [line for line in conditions if line.startswith(WARN)]
    return {
        "stratum": stratum,
        "answer": sentences.answer(stratum),
        "basis": [line for line in conditions if line not in warnings],
        "warnings": warnings,
        "main_columns": arm_tables.main_columns(stratum),
        "learning_rates": charts.learning_rates(stratum),
        "forest": charts.forest(stratum),
    }


def _whole_view(stratum: Stratum) -> dict[str, Any]:
    """All that the template shows of a stratum."""
    secondary = []
    for other in stratum.secondary:
        heading, definition = arm_tables.secondary_heading(other)
        secondary.append((heading, definition, arm_tables.secondary_table(other), charts.secondary(other)))
    return _opening_view(stratum) | {
        "secondary": secondary,
        "curves": _curves(stratum),
        "measures": arm_tables.measures(stratum),
        "open_checks": [check for check in stratum.checks if check.status not in (PASS, UNKNOWN)],
        "closed_checks": _closed_checks(stratum),
        "changes": arm_tables.changed_keys(stratum),
        "left_out": sentences.left_out(stratum),
    }


def _closed_checks(stratum: Stratum) -> list[tuple[str, list[Check]]]:
    """The checks that passed, and those that the source does not prove, each with a summary."""
    passed = [check for check in stratum.checks if check.status == PASS]
    unknown = [check for check in stratum.checks if check.status == UNKNOWN]
    names = ", ".join(check.name for check in unknown)
    closed = [
        (f"{several(len(passed), 'check')} passed", passed),
        (f"{len(unknown)} not proved by the source: {names}", unknown),
    ]
    return [(summary, checks) for summary, checks in closed if checks]


def _curves(stratum: Stratum) -> list[dict[str, Any]]:
    """The losses and their differences against each budget; the losses late, and from the start."""
    curves = []
    for axis, word in zip(AXES, ("tokens", "FLOPs", "seconds"), strict=True):
        late = charts.losses(stratum, axis)
        if late:
            curve = {"axis": axis, "word": word, "budget": charts.BUDGETS[axis], "late": late}
            curve["whole"] = charts.losses(stratum, axis, whole=True)
            curve["gap"] = charts.paired_differences(stratum, axis)
            curves.append(curve)
    return curves


def _so_far(comparison: Comparison) -> str:
    """How much of a running study the verdicts rest on."""
    rows = [row for stratum in comparison.strata for row in stratum.rows]
    used = several(sum(row.trained for row in rows), "run")
    waiting = sum(row.waiting for row in rows)
    return f"Live: {used} so far, {waiting} without a result yet. The verdicts are preliminary until all have ended."


def _origin(comparison: Comparison, command: str) -> dict[str, str]:
    """Date, version, code, command and machine: where the page and its runs come from."""
    versions, sources, places, devices = [], [], [], []
    arms = [arm for stratum in comparison.strata for arm in stratum.arms]
    for record in [run.record for arm in arms for run in arm.runs.values()]:
        env, summary = record.env or {}, record.summary or {}
        versions.append(env.get("version"))
        sources.append(source_hash(env["source"])[:8] if env.get("source") else "")
        places.append(_together([env.get("host"), env.get("platform")]))
        devices.append(summary.get("processor") or summary.get("device"))
    return {
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by nexus-ablate {__version__}",
        "command": command,
        "version": _together(versions),
        "source hash": _together(sources),
        "machine": _together([*places, *devices]),
    }


def _together(values: Iterable[Any]) -> str:
    """The different ones among some texts, in order."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value))
