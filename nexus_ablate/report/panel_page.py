"""The calibration panel in words: its table, how often small models agree with it, and a figure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from nexus_ablate.comparison.calibration import (
    ChangeOutcome,
    PanelRun,
    Share,
    chance_of,
    fewest_right,
    newer_wins,
    no_difference,
    outcomes,
    share,
    trained,
)
from nexus_ablate.comparison.statistics import LEVEL
from nexus_ablate.console import markdown_table, several
from nexus_ablate.report.arm_tables import TextTable
from nexus_ablate.study.panel import Panel, PanelChange

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Outcomes = Sequence[ChangeOutcome]
TONES = {"right": "good", "wrong": "warn", "reversed": "bad", "not decided": "muted"}
FARTHEST = 0.1
"""Nats per token: larger differences are drawn at the edge of the figure."""
CHECKED = {
    "source": "the numbers or words were read in the source",
    "abstract": "the sign was read in the source's abstract, its numbers were not read",
    "copy": "the numbers were read in a copy of the source's table or in a summary of it",
    "unread": "not compared with the source, and not scored",
}
HEAD = """# The calibration panel

How far can a model of 0.05 or 0.2 million parameters be believed? Each change below has a known outcome in models of
about 124M parameters and more. The table was written before the panel's runs; of the changes that were `seen before`
the first edition of the [claims](claims.md) had shown the outcome. Four things were changed when part of the runs was
known: optimizers are no longer scored, nor is `dyt`, whose authors report a match, the rates of `femto` end at 0.048
instead of 0.024, and `pico` leaves out rates that no arm would be read at.
[conf/panel.yaml](../conf/panel.yaml) is its source, `python scripts/docs.py` writes this page, and
`nexus-ablate claims --panel` prints it for your runs.

- A *directional* change is right where the mean difference to its baseline has the published sign. It is a *reversal*
  where the 95% interval over the seeds excludes 0 on the other side.
- A *null* change is right only where the interval lies inside its margin. An interval that crosses the margin decides
  nothing, and counts as not right.
- Each of the two is read at its own best rate over the seeds, `qk_norm` at the largest rate for both. The intervals are
  over three seeds and know nothing of other texts. Two processors that round differently share the runs at pico: two of
  the baseline's that were trained on both end 0.0017 and 0.0026 apart, as seeds do.
- At femto every arm is trained at every rate. At pico the rates go out from the best one so far until those on both
  sides of it are worse, and those beyond are left out. At femto that would have found the same rate for every arm: each
  loss falls to one minimum and rises after it.
- Some arms are one configuration in two studies: the baseline with and without matched parameters, GELU and ReLU as an
  arm and as a baseline. At femto each was trained in both and ends at the same losses to the last digit. At pico one
  run stands in both.
- Differences are in nats per token. A token is a byte here, and mostly a piece of a word in the sources, so signs can
  be compared, and sizes cannot. Nor can margins: 0.02 nats per byte are about 0.08 per piece of a word, more than any
  published effect below.
- A contested change is shown and not scored: a source of like weight disagrees. Which ones are was written down before
  the runs, but for `dyt`. Nor is another optimizer scored: it is trained at its default rate alone.
"""


def page(panel: Panel, runs: Sequence[PanelRun]) -> str:
    """docs/panel.md."""
    lines = [HEAD, "## How often small models agree", "", *(f"{line}\n" for line in sentences(panel, runs))]
    found = outcomes(panel, runs)
    if found:
        for table in (score_table(found), kind_table(found)):
            lines += [*markdown_table(table.heads, table.rows), ""]
        lines += ["![Each difference, to the right where it agrees with what is published](panel.png)", ""]
    else:
        lines += [f"    nexus-ablate study {study}" for study in panel.studies()]
        lines += ["    nexus-ablate claims --panel", ""]
    groups: dict[str, dict[str, PanelChange]] = {"Directional": {}, "Null": {}, "Shown, not scored": {}}
    for name, change in panel.changes.items():
        title = "Null" if change.is_null else "Directional"
        groups[title if change.is_scored else "Shown, not scored"][name] = change
    for title, changes in groups.items():
        table = published_table(panel, changes, found)
        lines += [f"## {title}", "", *markdown_table(table.heads, table.rows), ""]
    lines += [f"- {word}: {meaning}" for word, meaning in CHECKED.items()]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------------------------ tables


def published_table(panel: Panel, changes: Mapping[str, PanelChange], outcomes: Outcomes) -> TextTable:
    """What is published of some changes, in full, and what small models say of them."""
    heads = ["change", "kind", "arm", "against", "published", "in models of", "matched", "source", "seen before"]
    if outcomes:
        heads += panel.sizes
    rows = []
    for name, change in changes.items():
        source = change.source
        against = " ".join(change.baseline) or "the default"
        published = f"{expectation(change)}: {change.says}"
        models = f"{source.params}; tokens: {source.tokens}"
        arxiv = f", [arXiv:{source.arxiv}](https://arxiv.org/abs/{source.arxiv})" if source.arxiv else ""
        where = f"{source.title}{arxiv}, {source.place}"
        if change.checked != source.place:
            where += f" ({change.checked})"
        seen = "yes" if change.seen_before else "no"
        arm = f"`{' '.join(change.arm)}`"
        row = [name, change.kind, arm, against, published, models, source.matched, where, seen]
        if outcomes:
            row += _at_sizes(panel, name, outcomes)
        rows.append(row)
    return TextTable(heads, rows, heads)


def short_table(panel: Panel, outcomes: Outcomes) -> TextTable:
    """The panel in the width of a terminal."""
    heads = ["change", "kind", "published", "models", "", *panel.sizes]
    rows = []
    for name, change in panel.changes.items():
        notes = "contested " * change.contested + "seen" * change.seen_before
        row = [name, change.kind, expectation(change), change.source.params, notes]
        rows.append(row + _at_sizes(panel, name, outcomes))
    return TextTable(heads, rows, heads)


def expectation(change: PanelChange) -> str:
    """`higher +0.043`, or `equivalent ±0.02`."""
    if change.is_null:
        return f"equivalent ±{change.margin:g}"
    return change.expected if change.effect is None else f"{change.expected} {change.effect:+.3f}"


def _at_sizes(panel: Panel, name: str, outcomes: Outcomes) -> list[str]:
    """What each size says of a change; '' where it is not trained."""
    cells = dict.fromkeys(panel.sizes, "")
    failed = {math.inf: "(arm fails to train)", -math.inf: "(baseline fails to train)"}
    for outcome in outcomes:
        if outcome.name == name:
            shown = failed.get(outcome.difference, "(both fail)")
            if math.isfinite(outcome.difference):
                shown = f"{outcome.difference:+.3f} [{outcome.low:+.3f}, {outcome.high:+.3f}]"
            cells[outcome.size] = f"{outcome.agreement} {shown}"
    return list(cells.values())


def score_table(outcomes: Outcomes) -> TextTable:
    """By size: how many are right, beside two strategies that look at nothing."""
    heads, rows = ["", "directional", "null", "both"], []
    for size, of_size in _by_size(outcomes).items():
        scored = [outcome for outcome in of_size if outcome.change.is_scored]
        fresh = [outcome for outcome in scored if not outcome.change.seen_before]
        contested = [outcome for outcome in of_size if outcome.change.contested]
        shares = [(size, scored, share), (f"{size}, not seen before", fresh, share)]
        if contested:
            shares.append((f"{size}, contested", contested, share))
            shares.append((f"{size}, contested ones counted too", [*scored, *contested], share))
        shares.append((f'always "no difference" ({size})', scored, no_difference))
        shares.append((f'always "the newer one wins" ({size})', scored, newer_wins))
        for title, chosen, score in shares:
            groups = (_directional(chosen), _null(chosen), chosen)
            rows.append([title, *(share_text(score(group)) for group in groups)])
    return TextTable(heads, rows, heads)


def _by_size(outcomes: Outcomes) -> dict[str, list[ChangeOutcome]]:
    groups: dict[str, list[ChangeOutcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.size].append(outcome)
    return groups


def _directional(outcomes: Outcomes) -> list[ChangeOutcome]:
    return [outcome for outcome in outcomes if not outcome.change.is_null]


def _null(outcomes: Outcomes) -> list[ChangeOutcome]:
    return [outcome for outcome in outcomes if outcome.change.is_null]


def share_text(share: Share) -> str:
    """`10 of 12, 83% (52% to 98%)`."""
    if not share.of:
        return "–"
    low, high = share.interval
    return f"{share.right} of {share.of}, {share.right / share.of:.0%} ({low:.0%} to {high:.0%})"


def kind_table(outcomes: Outcomes) -> TextTable:
    """By kind of change and size, how many of the scored ones are right, and the names of the others."""
    sizes = list(_by_size(outcomes))
    kinds: dict[str, list[ChangeOutcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.change.is_scored:
            kinds[outcome.change.kind].append(outcome)
    rows = []
    for kind, of_kind in sorted(kinds.items()):
        row = [kind]
        for size in sizes:
            at_size = [outcome for outcome in of_kind if outcome.size == size]
            counts = {"": share(_directional(at_size)), "null ": share(_null(at_size))}
            row.append("; ".join(f"{name}{found.right} of {found.of}" for name, found in counts.items() if found.of))
        missed = [f"{outcome.name} at {outcome.size}" for outcome in of_kind if outcome.agreement != "right"]
        rows.append([*row, ", ".join(missed)])
    heads = ["kind", *sizes, "not right"]
    return TextTable(heads, rows, heads)


# --------------------------------------------------------------------------------------------------------- sentences


def sentences(panel: Panel, runs: Sequence[PanelRun]) -> list[str]:
    """What the panel shows, and what it cannot show."""
    found = outcomes(panel, runs)
    scored = [change for change in panel.changes.values() if change.is_scored]
    directional = [change for change in scored if not change.is_null]
    fresh = sum(not change.seen_before for change in directional)
    lines = [
        f"The panel has {several(len(directional), 'directional change')}, {len(scored) - len(directional)} null ones "
        f"and {len(panel.changes) - len(scored)} that are not scored.",
        f"{power(len(directional))} {power(fresh, ' that were not seen before')} Changes of one kind share baselines "
        "and causes, so they count for less than as many independent ones.",
    ]
    counts, readable = trained(panel, runs), _by_size(found)
    if any(ended < of for ended, of in counts.values()):
        shares = []
        for size, (ended, of) in counts.items():
            shares.append(
                f"{ended} of {of} runs at {size}, from which {several(len(readable[size]), 'change')} can be read"
            )
        lines.append(f"Trained: {'; '.join(shares)}. Rates that no arm would be read at are left out.")
    if not found:
        return lines
    lines += [*agreements(panel, found), *_not_scored(panel, found)]
    edges = [f"{outcome.name} at {outcome.size}" for outcome in found if outcome.at_edge]
    if edges:
        lines.append(f"The best rate lies at the edge of the grid, a wider grid might change it: {', '.join(edges)}.")
    lines.append(
        "For a study of your own: of published changes that were chosen as above, this share has the same sign at this "
        "size. For a change that nobody has published that is no probability. Rely on no more than the lower end of "
        "the interval until you have trained a larger size."
    )
    return lines


def agreements(panel: Panel, outcomes: Outcomes) -> list[str]:
    """By size, how many of the scored directional changes have the published sign."""
    planned = sum(change.is_scored and not change.is_null for change in panel.changes.values())
    lines = []
    for size, of_size in _by_size(outcomes).items():
        scored = [outcome for outcome in _directional(of_size) if outcome.change.is_scored]
        if not scored:
            continue
        reversed_ = [outcome.name for outcome in scored if outcome.agreement == "reversed"]
        names = f" ({', '.join(reversed_)})" if reversed_ else ""
        shown = [outcome for outcome in scored if outcome.low * outcome.high > 0]
        seen = sum(outcome.change.seen_before for outcome in shown)
        count, _, rest = share_text(share(scored)).partition(", ")
        of_shown = (
            f"{share(shown).right} of the {len(shown)} whose own interval excludes 0 ({seen} of them seen before)"
        )
        missing = planned - len(scored)
        where = f"{size} ({missing} of {planned} are not trained yet)" if missing else size
        lines.append(
            f"{where}: {count} directional changes have the published sign, {rest}. Among them are {of_shown}; the "
            f"others show no more than a sign. There are {several(len(reversed_), 'reversal')}{names}. "
            f"{_against_newer(scored)}"
        )
    return lines


def _against_newer(outcomes: Outcomes) -> str:
    """How much better small models do than the expectation that the newer of the two wins each time."""
    apart = [outcome for outcome in outcomes if (outcome.agreement == "right") != newer_wins([outcome]).right]
    right = share(apart).right
    better = "they do better" if chance_of(right, len(apart), 0.5) < LEVEL else "no evidence that they do better"
    return (
        f"Expecting the newer one to win each time is right for {newer_wins(outcomes).right}; the two differ on "
        f"{len(apart)}, of which small models have {right} right: {better}."
    )


def _not_scored(panel: Panel, outcomes: Outcomes) -> list[str]:
    """By size: what is not scored and not trained, reversals among it, and null changes that three seeds left open."""
    lines = []
    for size, of_size in _by_size(outcomes).items():
        read = {outcome.name for outcome in of_size}
        missing = [name for name, change in panel.changes.items() if not change.is_scored and name not in read]
        if missing:
            lines.append(f"{size}: of the changes that are not scored these are not trained yet: {', '.join(missing)}.")
        unscored = [outcome for outcome in of_size if not outcome.change.is_scored]
        reversed_ = [outcome.name for outcome in unscored if outcome.agreement == "reversed"]
        if reversed_:
            lines.append(f"{size}: of the changes that are not scored these are reversed: {', '.join(reversed_)}.")
        wide = [null.name for null in _null(of_size) if null.high - null.low > 2 * null.change.margin]
        if wide:
            names = ", ".join(wide)
            lines.append(f"{size}: three seeds could not decide these null changes, their intervals are wide: {names}.")
    return lines


def power(of: int, which: str = "") -> str:
    """What an accuracy over this many changes can show."""
    fewest = fewest_right(of)
    if fewest > of:
        return f"{several(of, 'change')}{which} cannot tell any accuracy from that of a coin."
    return (
        f"With {of} directional changes{which} the interval excludes a coin's 50% from {fewest} right on "
        f"({fewest / of:.0%}); a true accuracy of 80% reaches that in {chance_of(fewest, of, 0.8):.0%} of such panels."
    )


# ------------------------------------------------------------------------------------------------------------ figure


def figure(outcomes: Outcomes) -> Figure:
    """Each scored difference with its interval, directed so that agreement with what is published lies to the right."""
    from nexus_ablate.report.charts import Bar, draw_intervals, picture

    bars = []
    by_name: dict[str, list[ChangeOutcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.change.is_scored:
            by_name[outcome.name].append(outcome)
    for outcome in chain.from_iterable(by_name.values()):  # the sizes of a change beside each other
        change = outcome.change
        sign = -1 if change.expected == "lower" else 1
        low, middle, high = sorted(sign * end for end in (outcome.low, outcome.difference, outcome.high))
        margin = f" (margin {change.margin:g})" if change.is_null else ""
        tone = TONES[outcome.agreement]
        label = f"{outcome.name}, {outcome.size}"
        bars.append(Bar(label, (low, middle, high), outcome.agreement + margin, tone, tone))
    with picture("agreement with published outcomes", 60 + 21 * len(bars), 800) as (figure, axes):
        draw_intervals(axes, bars, "nats per token, agreement to the right", limit=FARTHEST)
    return figure
