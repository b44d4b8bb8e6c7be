"""The comparison as one self-contained HTML file: `page.html.j2` filled with tables, sentences and pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nexus_ablate import __version__
from nexus_ablate.comparison.fairness import WARN
from nexus_ablate.comparison.results import Comparison, Stratum
from nexus_ablate.comparison.verdict import MEANINGS
from nexus_ablate.errors import printable
from nexus_ablate.report import arm_tables, charts, sentences

BUDGET_BUTTONS = {"tokens": "tokens", "flops": "FLOPs", "seconds": "seconds"}
"""What the switch of the curves says of each budget."""


def html(comparison: Comparison, command: str = "", reload_seconds: int = 0) -> str:
    """The whole page.

    Args:
        command: The command that made the page, for its foot.
        reload_seconds: The page reloads itself this often; 0: never.
    """
    versions, sources, places, devices = [], [], [], []
    for stratum in comparison.strata:
        for arm in stratum.arms:
            for run in arm.runs.values():
                versions.append(run.env.get("version"))
                sources.append(run.source[:8] if run.code else "")
                places.append(_together([run.env.get("host"), run.env.get("platform")]))
                devices.append(run.summary.get("processor") or run.summary.get("device"))
    origin = {
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by nexus-ablate {__version__}",
        "command": command,
        "version": _together(versions),
        "source hash": _together(sources),
        "machine": _together([*places, *devices]),
    }
    return _filled(comparison, origin, reload_seconds)


def summary(stratum: Stratum) -> str:
    """A page with the answer, the table and the intervals alone, for a notebook."""
    return _filled(Comparison(stratum.study, [stratum], [], None), {}, 0)


def _filled(comparison: Comparison, origin: dict[str, str], reload_seconds: int) -> str:
    """The template, filled.

    Args:
        origin: Where the page and its runs come from; {} for the opening of the page alone.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
    )
    environment.globals |= {
        "arm_tables": arm_tables,
        "charts": charts,
        "sentences": sentences,
        "tones": defaultdict(str, arm_tables.TONES),
        "meanings": MEANINGS,
        "basis": _basis,
        "curves_of": _curves,
    }
    template = environment.get_template("page.html.j2")
    return template.render(comparison=comparison, origin=origin, reload_seconds=reload_seconds)


def _shown(value: Any) -> Any:
    """What the template writes for a value: text without control characters, which jinja2 then escapes."""
    if value is None:
        return ""
    return value if hasattr(value, "__html__") else printable(str(value), 2000)


def _basis(comparison: Comparison, stratum: Stratum) -> tuple[list[str], list[str]]:
    """The conditions of the verdicts, and what they warn of. What the first stratum says is not said again."""
    first = comparison.strata[0]
    said = [] if stratum is first else sentences.basis(first)
    lines = [line for line in sentences.basis(stratum) if line not in said]
    warnings = [line for line in lines if line.startswith(WARN)]
    return [line for line in lines if line not in warnings], warnings


def _curves(stratum: Stratum) -> list[dict[str, str]]:
    """The losses and their differences against each budget; the losses late, and from the start."""
    curves = []
    for axis, word in BUDGET_BUTTONS.items():
        late = charts.losses(stratum, axis)
        if late:
            whole = charts.losses(stratum, axis, whole=True)
            gap = charts.paired_differences(stratum, axis)
            curves.append({"axis": axis, "word": word, "late": late, "whole": whole, "gap": gap})
    return curves


def _together(values: Iterable[Any]) -> str:
    """The different ones among some texts, in order."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value))
