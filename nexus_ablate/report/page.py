"""The comparison as one self-contained HTML file with style, pictures and a short script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from nexus_ablate import __version__
from nexus_ablate.comparison.curves import AXES
from nexus_ablate.comparison.fairness import FAIL, PASS, STATUSES, UNKNOWN, WAIVED, WARN
from nexus_ablate.comparison.findings import Across
from nexus_ablate.comparison.result import Comparison
from nexus_ablate.comparison.scaling import Scaling
from nexus_ablate.comparison.verdict import BETTER, DIVERGED, EQUIVALENT, IDENTICAL, MEANINGS, UNSTABLE, WORSE
from nexus_ablate.console import several
from nexus_ablate.provenance import source_hash
from nexus_ablate.report import plots
from nexus_ablate.report.layers import by_layer
from nexus_ablate.report.svg import colour, plain
from nexus_ablate.report.table import (
    ARM,
    MAIN,
    SECONDARY,
    Column,
    answer,
    basis,
    figure_columns,
    left_out,
    named,
    secondary_lines,
    side_columns,
    title,
    together_text,
)

CLASSES = {
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


def _texts(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of texts; the first column names the rows."""
    head = "".join(f"<th class=text>{plain(name)}</th>" for name in heads)
    kinds = ["text arm", *["text"] * (len(heads) - 1)]
    cells = ("".join(map(_cell, heads, row, kinds)) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def html(
    comparisons: Sequence[Comparison],
    strata: Sequence[str] = ("",),
    claim: Sequence[str] = (),
    across: Sequence[Across] = (),
    across_table: tuple[tuple[str, ...], list[tuple[str, ...]]] | None = None,
    scaling: Sequence[Scaling] = (),
    scaling_table: tuple[str, tuple[str, ...], list[tuple[str, ...]]] | None = None,
    missing: Sequence[str] = (),
    command: str = "",
    reload_seconds: int = 0,
) -> str:
    """The whole page.

    Args:
        comparisons: One per stratum.
        strata: Their names; [''] for a study without strata.
        claim: The claim's outcome, then what it rests on.
        across: The arms over all strata.
        across_table: Heads and rows of the table of all strata.
        scaling: Of a ladder: the arms' compute multipliers.
        scaling_table: A note, heads and rows of their table.
        missing: What has no result yet.
        command: The command that made the page, for its foot.
        reload_seconds: The page reloads itself this often; 0: never.
    """
    head = f"<h1>{plain(claim[0])}</h1>{_list(claim[1:])}" if claim else ""
    if reload_seconds:
        head = f"<p class='live'>{plain(_so_far(comparisons))}</p>" + head
    head += "".join(f"<p class='live'>{plain(line)}</p>" for line in missing)
    if across_table:
        caption = "Mean paired difference in each stratum with the interval that decides there."
        lead = (
            "Does a difference hold in every stratum? Change: from the first to the last, paired by seed, descriptive."
        )
        head += _section("Strata", lead, _figure(plots.strata(strata, across), caption) + _texts(*across_table))
    if scaling_table:
        picture = _figure(plots.multipliers(scaling, across), "Compute multiplier by size with its interval.")
        head += _section("Scaling", scaling_table[0], picture + _texts(*scaling_table[1:]))
    bodies = [
        (f"<h1>Stratum {plain(stratum)}</h1>" if stratum else "") + _body(comparison)
        for stratum, comparison in zip(strata, comparisons, strict=True)
    ]
    refresh = f"<meta http-equiv='refresh' content='{reload_seconds}'>" if reload_seconds else ""
    body = "\n".join(part for part in (head, *bodies) if part) + _foot(comparisons, command)
    return _document(title(comparisons[0]), body, refresh)


def _so_far(comparisons: Sequence[Comparison]) -> str:
    """How much of a running study the verdicts rest on."""
    used = sum(value is not None for table in comparisons for row in table.rows for value in row.values)
    waiting = sum(row.waiting for table in comparisons for row in table.rows)
    counts = f"{several(used, 'run')} so far, {waiting} without a result yet"
    return f"Live: {counts}. The verdicts are preliminary until all have ended."


def _foot(comparisons: Sequence[Comparison], command: str) -> str:
    """Date, version, code, command and machine: where the page and its runs come from."""
    envs = [run.record.env or {} for table in comparisons for arm in table.arms for run in arm.runs.values()]
    summaries = [run.record.summary or {} for table in comparisons for arm in table.arms for run in arm.runs.values()]
    sources = {source_hash(env["source"])[:8] for env in envs if env.get("source")}
    places = {", ".join(str(env[key]) for key in ("host", "platform") if env.get(key)) for env in envs} - {""}
    devices = {str(s.get("processor") or s.get("device")) for s in summaries if s.get("processor") or s.get("device")}
    facts = {
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by nexus-ablate {__version__}",
        "command": command,
        "runs": ", ".join(f"version {v}" for v in sorted({str(env["version"]) for env in envs if env.get("version")})),
        "source hash": ", ".join(sorted(sources)),
        "machine": "; ".join([*sorted(places), *sorted(devices)]),
    }
    lines = "".join(f"<dt>{name}</dt><dd>{plain(text)}</dd>" for name, text in facts.items() if text)
    return f"<footer><dl>{lines}</dl></footer>"


def summary(comparison: Comparison) -> str:
    """A page with the answer, the table and the intervals alone, for a notebook."""
    return _document(title(comparison), _opening(comparison))


def _document(name: str, body: str, head: str = "") -> str:
    """A page that loads nothing, with style and script."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">{head}'
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{plain(name)}</title><style>{_beside('page.css')}</style></head><body>"
        f"{body}<script>{_beside('page.js')}</script></body></html>\n"
    )


def _opening(comparison: Comparison) -> str:
    """Question, answer, conditions, table and intervals."""
    heading = "h2" if comparison.plan.claim else "h1"
    head = f"<{heading}>{plain(title(comparison))}</{heading}><p class='answer'>{plain(answer(comparison))}</p>"
    head += "".join(
        f"<p class='{CLASSES[WARN] if line.startswith(WARN) else 'muted'}'>{plain(line)}</p>"
        for line in basis(comparison)
    )
    head += f"<p class='muted'>fairness: {_counts(comparison)}</p>"
    parts = [
        head,
        _figure(plots.learning_rates(comparison), "Loss of the tuning runs against the learning rate; each arm is "
                "judged at its best one, ringed (in red at the edge of those tried)."),
        _table(comparison, named(comparison, MAIN)),
        _figure(plots.forest(comparison), "Mean paired difference with the interval that decides, one dot per seed. In "
                "the grey band a difference is too small to matter.")
        or "<p>No difference can be drawn yet: no arm has a pair of runs with the same seed as the baseline.</p>",
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


def _body(comparison: Comparison) -> str:
    """All of one comparison."""
    parts = [
        _opening(comparison),
        _section("In words", "Each verdict with the numbers that it rests on.", _sentences(comparison)),
        _section("Secondary endpoints", "The same comparison for the study's other measures.", _secondary(comparison)),
        _section("Fairness", "Whether the arms were compared on equal terms.", _fairness(comparison)),
        _section("Curves", "How the losses and their differences developed during training.", _curves(comparison)),
        _section("Costs and stability", "What each arm costs, and whether its training was smooth.",
                 _costs(comparison)),
        _section("Inside the model", "Diagnostics and evaluations of the trained models, means over seeds.",
                 _inside(comparison)),
        _section("What each arm changes", "The keys that differ from the baseline, and what follows from them.",
                 _changes(comparison)),
        _section("Left out", "Runs and arms in these folders that no number above rests on.",
                 _list(left_out(comparison)) or "<p>Nothing was left out.</p>"),
        _section("How to read this", "The words and columns of this page.", _legend(comparison)),
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _section(name: str, lead: str, body: str) -> str:
    return f"<section><h2>{name}</h2><p>{lead}</p>{body}</section>" if body else ""


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{plain(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>" if svg else ""


def _cell(head: str, text: str, classes: str = "", key: str | None = None) -> str:
    """A cell of a table; on a narrow page it stands below its head."""
    value = "" if key is None else f' data-v="{plain(key)}"'
    return f'<td class="{classes}" data-head="{plain(head)}"{value}>{plain(text)}</td>'


def _counts(comparison: Comparison) -> str:
    counts = {s: sum(check.status == s for check in comparison.checks) for s in STATUSES}
    return ", ".join(f"<span class='{CLASSES[status]}'>{n} {status}</span>" for status, n in counts.items() if n)


def _table(comparison: Comparison, columns: tuple[Column, ...]) -> str:
    """A table that is sorted by clicking on the head of a column."""
    heads = "".join(
        f"<th data-by={'number' if c.order else 'text'}{' class=text' if c.order is None else ''} "
        f'title="{plain(c.meaning)}">{plain(c.title)}</th>'
        for c in columns
    )
    body = []
    for i, row in enumerate(comparison.rows):
        cells = []
        for column in columns:
            text = plain(column.cell(row))
            classes = ["text"] if column.order is None else []
            if column is ARM:
                text = _chip(i) + text.replace(",", ",<wbr>")
                classes.append("arm")
            if column.title == "verdict" and row.verdict:
                classes += ["word", CLASSES.get(row.verdict.word, "")]
            value = column.order(row) if column.order else column.cell(row)
            key = "" if value is None else value if isinstance(value, str) else repr(float(value))
            cells.append(
                f'<td class="{" ".join(classes).strip()}" data-head="{plain(column.title)}" '
                f'data-v="{plain(key)}">{text}</td>'
            )
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f"<div class=scroll><table><thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"


def _chip(index: int) -> str:
    return f"<span class=chip style='background:{colour(index)}'></span>"


def _sentences(comparison: Comparison) -> str:
    lines = []
    for row in comparison.rows[1:]:
        if row.verdict is not None:
            notes = "".join(f"; {note}" for note in row.notes)
            word = f"<span class='word {CLASSES.get(row.verdict.word, '')}'>{plain(str(row.verdict))}</span>"
            lines.append(f"<li><b>{plain(row.arm)}</b>: {word}. {plain(row.verdict.sentence + notes)}</li>")
    for two in comparison.together:
        lines.append(f"<li>{plain(together_text(two))}</li>")
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _secondary(comparison: Comparison) -> str:
    body = ""
    for other, (heading, rows) in zip(comparison.secondary, secondary_lines(comparison), strict=True):
        heads = "".join(f"<th{' class=text' if name in ('arm', 'verdict') else ''}>{name}</th>" for name in SECONDARY)
        lines = "".join(
            "<tr>"
            + "".join(
                _cell(name, cell, {"arm": "text arm", "verdict": "text"}.get(name, ""))
                for name, cell in zip(SECONDARY, row, strict=True)
            )
            + "</tr>"
            for row in rows
        )
        table = f"<div class=scroll><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>"
        picture = _figure(plots.secondary(comparison, other), "Mean paired difference with its interval.")
        body += f"<h3>{plain(heading)}</h3><div class=plots>{table}{picture}</div>"
    return body


def _fairness(comparison: Comparison) -> str:
    rows = "".join(
        f"<tr><td class='text word {CLASSES[check.status]}'>{check.status}</td><td class=text>{plain(check.name)}</td>"
        f"<td class='text prose'>{plain(check.text)}</td></tr>"
        for check in comparison.checks
    )
    amended = [f"amended {line}" for line in comparison.amendments]
    return f"<table class=checks><tbody>{rows}</tbody></table>{_list(amended)}"


def _curves(comparison: Comparison) -> str:
    """The losses and their differences, against the budget that is chosen; the losses late, or from the start."""
    panels = ""
    for axis in AXES:
        loss = plots.losses(comparison, axis)
        if not loss:
            continue
        against = plots.BUDGETS[axis]
        late = _figure(loss, f"Loss against {against}, one line per run, from where the arms come apart.")
        whole = _figure(plots.losses(comparison, axis, whole=True), f"Loss against {against}, one line per run.")
        note = "" if axis == "tokens" else " Descriptive: before the end of its schedule a run still learns."
        gap = _figure(
            plots.paired_differences(comparison, axis), f"Difference to the baseline at equal {against}.{note}"
        )
        panels += (
            f"<div class='panel' data-axis='{axis}'><div class=plots><div class='late'>{late}</div>"
            f"<div class='whole'>{whole}</div>{gap}</div></div>"
        )
    if not panels:
        return "<p>There is no curve: each run has fewer than two validations.</p>"
    words = {"tokens": "tokens", "flops": "FLOPs", "seconds": "seconds"}
    buttons = "".join(
        f"<button type=button data-axis='{axis}' aria-pressed='{str(axis == AXES[0]).lower()}'>{words[axis]}</button>"
        for axis in AXES
    )
    switch = (
        f"<p class=switch>against {buttons} <button type=button data-whole aria-pressed=false>whole run</button></p>"
    )
    names = "".join(f"<span class=name>{_chip(i)}{plain(row.arm)}</span> " for i, row in enumerate(comparison.rows))
    pairs = _figure(
        plots.slopes(comparison),
        "Each pair of runs with the same seed: the baseline's value (grey dot) joined with the arm's.",
    )
    return f"<p>{names}</p><div class='curves' data-show='{AXES[0]}'>{switch}{panels}</div>{pairs}"


def _costs(comparison: Comparison) -> str:
    pictures = _figure(plots.pareto(comparison), "Loss against speed: lower right is better.")
    strip = _figure(plots.stability(comparison), "Each run's logged steps; a tick is a spike of the training loss, a "
                    "cross is where it failed to train.")  # fmt: skip
    calm = "" if strip else "<p>No run failed to train, and no training loss had a spike.</p>"
    return _table(comparison, (ARM, *side_columns(comparison))) + calm + f"<div class=plots>{pictures}{strip}</div>"


def _inside(comparison: Comparison) -> str:
    figures = figure_columns(comparison)
    body = _table(comparison, (ARM, *figures)) if figures else ""
    maps = by_layer(comparison.arms)
    heat = "".join(_heat_map(comparison, name, grid) for name, grid in maps.items())
    return body + (f"<details><summary>by layer, at the end of training</summary>{heat}</details>" if heat else "")


def _heat_map(comparison: Comparison, name: str, grid: list[list[float | None]]) -> str:
    """Arms x layers, coloured from the lowest to the highest value, by logarithm where they span a decade."""
    seen = [v for values in grid for v in values if v is not None]
    low, high = min(seen), max(seen)
    log = low > 0 and high > 10 * low

    def cell(block: int, value: float | None) -> str:
        if value is None:
            return "<td></td>"
        span = math.log(high / low) if log else high - low
        share = 0.0 if not span else (math.log(value / low) if log else value - low) / span
        colour = f"color-mix(in srgb,var(--heat) {45 * share:.0f}%,transparent)"
        return f"<td data-head='{block}' style='background:{colour}'>{value:.3g}</td>"

    heads = "".join(f"<th>{layer}</th>" for layer in range(max(len(values) for values in grid)))
    rows = "".join(
        f"<tr><td class='text arm'>{plain(row.arm)}</td>{''.join(cell(n, v) for n, v in enumerate(values))}</tr>"
        for row, values in zip(comparison.rows, grid, strict=True)
        if values
    )
    return (
        f"<h3>{plain(name)}</h3><div class=scroll><table class=heat>"
        f"<thead><tr><th class=text>block</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _changes(comparison: Comparison) -> str:
    heads = ("arm", "", "key", "baseline", "arm's")
    rows = []
    for row in comparison.rows[1:]:
        for kind, differences in (("requested", row.requested), ("follows", row.followed)):
            for key, (base_value, value) in differences.items():
                cells = (row.arm, kind, key, base_value or "–", value or "–")
                shown = "".join(_cell(head, cell, "text arm") for head, cell in zip(heads, cells, strict=True))
                rows.append(f"<tr>{shown}</tr>")
    names = "".join(f"<th class=text>{name}</th>" for name in heads)
    table = f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<div class=scroll>{table}</div>" if rows else ""


def _legend(comparison: Comparison) -> str:
    present = {row.verdict.word for row in comparison.rows if row.verdict}
    words = [f"<li><b>{word}</b>: {plain(meaning)}</li>" for word, meaning in MEANINGS.items() if word in present]
    columns = [f"<li><b>{plain(c.title)}</b>: {plain(c.meaning)}</li>" for c in (*MAIN, *side_columns(comparison))]
    return f"<ul>{''.join(words)}</ul><details><summary>columns</summary><ul>{''.join(columns)}</ul></details>"
