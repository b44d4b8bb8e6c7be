"""docs/claims.md and its figure, from the published entries alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nexus_ablate.comparison.endpoint import Endpoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"SUPPORTED": "C2", "CONTRADICTED": "C3", "NOT SHOWN": "C7", "NOT TESTABLE HERE": "C8"}
HEAD = """# Claims

Claims that are often made about transformer architectures, tested with runs of this project. Each claim is restated so
that a study can decide it, and holds for the regime that is given with it: small models, early in training. Every row
can be trained again with its command; `claims --check` compares the result with the one published here.

The words are those of [studies](studies.md#claims). This page is written by `python scripts/docs.py` from conf/claims.
"""


def page(claims: Mapping[str, str], entries: Mapping[str, dict[str, Any]]) -> str:
    """The page: a table of all claims, then each published one with its differences.

    Args:
        claims: The sentence of each claim, by study.
        entries: What is published, by study.
    """
    lines = [HEAD, "| claim | outcome | study |", "|---|---|---|"]
    for name, claim in claims.items():
        outcome = f"**{entries[name]['outcome']}**" if name in entries else "not trained yet"
        link = f"[`{name}`](#{name})" if name in entries else f"`{name}`"
        lines.append(f"| {claim} | {outcome} | {link} |")
    if entries:
        lines += ["", "![Outcomes and differences by claim](claims.png)"]
    for name in claims:
        if name in entries:
            lines += ["", *_section(entries[name])]
    return "\n".join(lines) + "\n"


def _section(entry: dict[str, Any]) -> list[str]:
    made = entry["made"]
    lines = [
        f"## {entry['study']}",
        "",
        f"Stated as: {entry['stated']}",
        "",
        f"Tested as: {entry['claim']}. **{entry['outcome']}**: {entry['sentence']}.",
        "",
        *(f"- {requirement}" for requirement in entry["requirements"] if requirement not in entry["sentence"]),
        f"- regime: {entry['regime']}",
        f"- {entry['runs']} runs, {entry['hours']:.1f} core hours: `{entry['command']}`",
        f"- trained {made['when']} by version {made['version']}, commit {str(made['commit'])[:7]}, "
        f"torch {made['torch']}",
    ]
    for stratum, table in entry["strata"].items():
        lines += ["", f"Stratum {stratum}:" if stratum else "", "", "| arm | endpoint | mean | difference | verdict |"]
        lines += ["|---|---|---:|---:|---|"]
        for row in table["rows"]:
            endpoint = Endpoint(row["endpoint"])
            mean = "–" if row["mean"] is None else endpoint.value(row["mean"])
            difference = "" if row["delta"] is None else _difference(endpoint, row)
            lines.append(f"| {row['arm']} | `{row['endpoint']}` | {mean} | {difference} | {row['verdict']} |")
    return [line for i, line in enumerate(lines) if line or lines[i - 1]]


def _difference(endpoint: Endpoint, row: dict[str, Any]) -> str:
    return f"{endpoint.signed(row['delta'])} [{endpoint.signed(row['low'])}, {endpoint.signed(row['high'])}]"


def figure(entries: Mapping[str, dict[str, Any]]) -> Figure:
    """Each expectation's difference with its interval, in units of half its interval's width, coloured by outcome."""
    from matplotlib.figure import Figure

    rows = [
        (entry["study"], one, _row(entry, one))
        for entry in entries.values()
        for one in entry["expectations"]
        if one["expected"] not in ("trains", "fails")
    ]
    rows = [(study, one, row) for study, one, row in rows if row is not None]
    drawn = Figure(figsize=(9, 1.2 + 0.28 * len(rows)), layout="constrained")
    axes = drawn.subplots()
    for at, (_, one, row) in enumerate(reversed(rows)):
        half = (row["high"] - row["low"]) / 2 or math.inf
        centre = max(-8.0, min(8.0, row["delta"] / half))
        axes.plot([centre - 1, centre + 1], [at, at], color=COLOURS[one["outcome"]], linewidth=2)
        axes.plot(centre, at, "o", color=COLOURS[one["outcome"]], markersize=4)
    names = [
        f"{study}{' ' + one['stratum'] if one['stratum'] else ''}: {one['arm']}, {one['endpoint']} {one['expected']}"
        for study, one, _ in rows
    ]
    axes.set_yticks(range(len(rows)), [name[:80] for name in reversed(names)], fontsize=7)
    axes.axvline(0, color="0.4", linewidth=0.8)
    axes.set_xlim(-9.2, 9.2)
    axes.set(xlabel="difference to the baseline, in half widths of its interval (cut off at 8)")
    for outcome, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, label=outcome.lower(), markersize=4)
    axes.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=4)
    axes.spines[["top", "right"]].set_visible(False)
    return drawn


def _row(entry: dict[str, Any], one: dict[str, str]) -> dict[str, Any] | None:
    rows = entry["strata"].get(one["stratum"], {"rows": []})["rows"]
    cell = (one["arm"], one["endpoint"])
    return next((row for row in rows if (row["arm"], row["endpoint"]) == cell and row["delta"] is not None), None)
