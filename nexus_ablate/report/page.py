"""The comparison as one self-contained HTML file: `page.html.j2` filled with tables, sentences and pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nexus_ablate import __version__
from nexus_ablate.comparison.compare import Comparison, Table
from nexus_ablate.comparison.verdict import MEANINGS
from nexus_ablate.errors import printable
from nexus_ablate.report import charts, columns, sentences


def html(comparison: Comparison, command: str = "") -> str:
    """The whole page.

    Args:
        command: The command that made the page, for its foot.
    """
    runs = [run for table in comparison.tables for arm in table.arms for run in arm.runs.values()]
    origin = {
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by nexus-ablate {__version__}",
        "command": command,
        "commit": _together(str(run.env.get("git_commit") or "")[:8] for run in runs),
        "machine": _together(run.summary.get("processor") or run.summary.get("device") for run in runs),
    }
    return _filled(comparison, origin)


def summary(table: Table) -> str:
    """A page with the answer, the table and the intervals alone, for a notebook."""
    return _filled(Comparison([table]), {})


def _filled(comparison: Comparison, origin: dict[str, str]) -> str:
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
        "columns": columns,
        "charts": charts,
        "sentences": sentences,
        "tones": defaultdict(str, columns.TONES),
        "meanings": MEANINGS,
    }
    return environment.get_template("page.html.j2").render(comparison=comparison, origin=origin)


def _shown(value: Any) -> Any:
    """What the template writes for a value: text without control characters, which jinja2 then escapes."""
    if value is None:
        return ""
    return value if hasattr(value, "__html__") else printable(str(value), 2000)


def _together(values: Iterable[Any]) -> str:
    """The different ones among some texts, in order."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value))
