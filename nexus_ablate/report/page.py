"""The comparison as one self-contained HTML file with style, pictures and a short script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from nexus_ablate.comparison.curves import AXES
from nexus_ablate.comparison.fairness import FAIL, PASS, STATUSES, UNKNOWN, WAIVED, WARN
from nexus_ablate.comparison.result import Comparison
from nexus_ablate.comparison.verdict import BETTER, DIVERGED, EQUIVALENT, IDENTICAL, MEANINGS, UNSTABLE, WORSE
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
    """A table of texts."""
    head = "".join(f"<th class=text>{plain(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td class=text>{plain(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def html(
    comparisons: Sequence[Comparison],
    strata: Sequence[str] = ("",),
    claim: Sequence[str] = (),
    across: tuple[tuple[str, ...], list[tuple[str, ...]]] | None = None,
    scaling: tuple[str, tuple[str, ...], list[tuple[str, ...]]] | None = None,
) -> str:
    """The whole page.

    Args:
        comparisons: One per stratum.
        strata: Their names; [''] for a study without strata.
        claim: The claim's outcome, then what it rests on.
        across: Heads and rows of the table of all strata.
        scaling: Of a ladder: a note, heads and rows of the table of compute multipliers.
    """
    head = f"<p class='answer'>{plain(claim[0])}</p>{_list(claim[1:])}" if claim else ""
    if across:
        note = "<p>Change: from the first to the last, paired by seed, descriptive.</p>"
        head += _section("Strata", note + _texts(*across))
    if scaling:
        head += _section("Scaling", f"<p>{plain(scaling[0])}</p>{_texts(*scaling[1:])}")
    bodies = [
        (f"<h1>Stratum {plain(stratum)}</h1>" if stratum else "") + _body(comparison)
        for stratum, comparison in zip(strata, comparisons, strict=True)
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{plain(title(comparisons[0]))}</title><style>{_beside('page.css')}</style></head><body>"
        + "\n".join(part for part in (head, *bodies) if part)
        + f"<script>{_beside('page.js')}</script></body></html>\n"
    )


def _body(comparison: Comparison) -> str:
    """All of one comparison."""
    head = f"<h1>{plain(title(comparison))}</h1><p class='answer'>{plain(answer(comparison))}</p>"
    head += "".join(f"<p class='muted'>{plain(line)}</p>" for line in basis(comparison))
    head += f"<p class='muted'>fairness: {_counts(comparison)}</p>"
    parts = [
        head,
        _figure(plots.learning_rates(comparison), "Loss of the tuning runs against the learning rate; each arm is "
                "judged at its best one, ringed (in red at the edge of those tried).", wide=True),
        _table(comparison, named(comparison, MAIN)),
        _figure(plots.forest(comparison), "Mean difference with the interval that decides, one dot per seed. In "
                "the grey band a difference is too small to matter.", wide=True),
        _section("In words", _sentences(comparison)),
        _section("Secondary endpoints", _secondary(comparison)),
        _section("Fairness", _fairness(comparison)),
        _section("Curves", _curves(comparison)),
        _section("Costs and stability", _costs(comparison)),
        _section("Inside the model", _inside(comparison)),
        _section("What each arm changes", _changes(comparison)),
        _section("Left out", _list(left_out(comparison)) or "<p>nothing</p>"),
        _section("How to read this", _legend(comparison)),
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _section(name: str, body: str) -> str:
    return f"<section><h2>{name}</h2>{body}</section>" if body else ""


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{plain(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _figure(svg: str, caption: str, wide: bool = False) -> str:
    return f"<figure{' class=wide' if wide else ''}>{svg}<figcaption>{caption}</figcaption></figure>" if svg else ""


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
            cells.append(f'<td class="{" ".join(classes).strip()}" data-v="{plain(key)}">{text}</td>')
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
    for heading, rows in secondary_lines(comparison):
        heads = "".join(f"<th{' class=text' if name in ('arm', 'verdict') else ''}>{name}</th>" for name in SECONDARY)
        lines = "".join(
            f"<tr><td class='text arm'>{plain(arm)}</td>{''.join(f'<td>{plain(cell)}</td>' for cell in cells)}"
            f"<td class=text>{plain(verdict)}</td></tr>"
            for arm, *cells, verdict in rows
        )
        body += f"<h3>{plain(heading)}</h3><div class=scroll><table><thead><tr>{heads}</tr></thead>"
        body += f"<tbody>{lines}</tbody></table></div>"
    return body


def _fairness(comparison: Comparison) -> str:
    rows = "".join(
        f"<tr><td class='text word {CLASSES[check.status]}'>{check.status}</td><td class=text>{plain(check.name)}</td>"
        f"<td class=text style='white-space:normal'>{plain(check.text)}</td></tr>"
        for check in comparison.checks
    )
    amended = [f"amended {line}" for line in comparison.amendments]
    return f"<table><tbody>{rows}</tbody></table>{_list(amended)}"


def _curves(comparison: Comparison) -> str:
    figures = [
        _figure(plots.slopes(comparison), "Each pair: the baseline's loss (left) and the arm's (right).", wide=True)
    ]
    for axis in AXES:
        figures.append(
            _figure(plots.losses(comparison, axis), f"Loss against {plots.BUDGETS[axis]}, one line per run.")
        )
        note = "" if axis == "tokens" else " Descriptive: before the end of its schedule a run still learns."
        figures.append(
            _figure(
                plots.paired_differences(comparison, axis),
                f"Difference to the baseline at equal {plots.BUDGETS[axis]}.{note}",
            )
        )
    body = "".join(figures)
    names = "".join(f"<span class=name>{_chip(i)}{plain(row.arm)}</span> " for i, row in enumerate(comparison.rows))
    return f"<p>{names}</p><div class=plots>{body}</div>" if body else ""


def _costs(comparison: Comparison) -> str:
    pictures = _figure(plots.pareto(comparison), "Loss against speed: lower right is better.")
    strip = _figure(plots.stability(comparison), "Each run's logged steps; a tick is a spike of the training loss, a "
                    "cross is where it failed to train.", wide=True)  # fmt: skip
    return _table(comparison, (ARM, *side_columns(comparison))) + f"<div class=plots>{pictures}{strip}</div>"


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

    def cell(value: float | None) -> str:
        if value is None:
            return "<td></td>"
        span = math.log(high / low) if log else high - low
        share = 0.0 if not span else (math.log(value / low) if log else value - low) / span
        return f"<td style='background:color-mix(in srgb,var(--c2) {70 * share:.0f}%,transparent)'>{value:.3g}</td>"

    heads = "".join(f"<th>{layer}</th>" for layer in range(max(len(values) for values in grid)))
    rows = "".join(
        f"<tr><td class='text arm'>{plain(row.arm)}</td>{''.join(cell(v) for v in values)}</tr>"
        for row, values in zip(comparison.rows, grid, strict=True)
        if values
    )
    return (
        f"<h3>{plain(name)}</h3><div class=scroll><table class=heat>"
        f"<thead><tr><th class=text>block</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _changes(comparison: Comparison) -> str:
    rows = []
    for row in comparison.rows[1:]:
        for kind, differences in (("requested", row.requested), ("follows", row.followed)):
            for key, (base_value, value) in differences.items():
                cells = (row.arm, kind, key, base_value or "–", value or "–")
                rows.append("<tr>" + "".join(f"<td class='text arm'>{plain(cell)}</td>" for cell in cells) + "</tr>")
    heads = "".join(f"<th class=text>{name}</th>" for name in ("arm", "", "key", "baseline", "arm's"))
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>" if rows else ""


def _legend(comparison: Comparison) -> str:
    present = {row.verdict.word for row in comparison.rows if row.verdict}
    words = [f"<li><b>{word}</b>: {plain(meaning)}</li>" for word, meaning in MEANINGS.items() if word in present]
    columns = [f"<li><b>{plain(c.title)}</b>: {plain(c.meaning)}</li>" for c in (*MAIN, *side_columns(comparison))]
    return f"<ul>{''.join(words)}</ul><details><summary>columns</summary><ul>{''.join(columns)}</ul></details>"
