"""docs/claims.md and its figure, from the published entries alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from nexus_ablate.comparison.endpoint import Endpoint
from nexus_ablate.comparison.load import amends_claim
from nexus_ablate.console import several

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOT_TRAINED = "not trained yet"
OUTCOMES = ("SUPPORTED", "CONTRADICTED", "NOT SHOWN", "NOT TESTABLE HERE")
MARKS = {"SUPPORTED": ("C2", "o"), "CONTRADICTED": ("C3", "X"), "NOT SHOWN": ("C7", "|")}
"""Colour and mark by outcome: the mark for readers who can't tell the colours apart."""
WIDEST = 6.0
"""Margins up to which the figure is drawn."""
HEAD = """# Claims

Claims that are often made about transformer architectures, tested with runs of this project. Each is restated so that a
study can decide it. The outcome is that of the restated sentence, in the regime that is given with it: small models,
early in training. Every row can be trained again with its command; `claims --check` compares your runs with those
published here. Speed is measured by the paired `bench` instead: [what a norm costs](performance.md#what-a-norm-costs).
To judge a difference in loss: in runs of 800 steps of the default model, 0.01 nats are worth about 4% of the training
tokens.

Tables show the baseline's means, and below them each arm's difference. Its interval covers all arms of the column, at
95% or, where endpoints and strata share the 5%, at more. The primary endpoint has a verdict for every arm; another one
has it where the claim expects something. An option brings what its paper prescribes, such as an initialization or a
scale of the embedding; `nexus-ablate plan NAME` lists what else each arm changes.

The words are those of [studies](studies.md#claims). This page is written by `python scripts/docs.py` from conf/claims.
"""


class LedgerClaim(Protocol):
    """What the page says of a claim that may not be published yet: `nexus_ablate.study.definition.Definition`."""

    @property
    def stated(self) -> str: ...
    @property
    def claim(self) -> str: ...
    @property
    def cost(self) -> str: ...


def page(claims: Mapping[str, LedgerClaim], entries: Mapping[str, dict[str, Any]], designs: Mapping[str, str]) -> str:
    """The page: a table of all claims, then each published one with its differences.

    Args:
        claims: The shipped studies that decide a claim, by name.
        entries: What is published, by study.
        designs: What the files of the studies say of their designs.
    """
    lines = [HEAD, "| as it is made | as it is tested | outcome | planned, at most | study |", "|---|---|---|---|---|"]
    for name, study in claims.items():
        outcome = f"**{outcome_of(entries[name])}**" if name in entries else NOT_TRAINED
        link = f"[`{name}`](#{name})" if name in entries else f"`{name}`"
        lines.append(f"| {study.stated} | {study.claim} | {outcome} | {study.cost} | {link} |")
    if entries:
        lines += ["", "![Outcomes and differences by claim](claims.png)"]
    for name in claims:
        if name in entries:
            lines += ["", *_section(entries[name], designs.get(name, ""))]
    return "\n".join(lines) + "\n"


def decided(claims: Mapping[str, LedgerClaim], entries: Mapping[str, dict[str, Any]]) -> str:
    """For the README: how many claims have each outcome, and what decided those that are decided."""
    outcomes = Counter(entry["outcome"] for entry in entries.values())
    counts = [f"{outcomes[outcome]} {outcome.lower()}" for outcome in OUTCOMES if outcomes[outcome]]
    counts += [f"{left} not trained yet"] if (left := len(claims) - len(entries)) else []
    rows = [
        f"| {entry['claim']} | [{outcome_of(entry)}](docs/claims.md#{name}): {_because(entry)} |"
        for name, entry in entries.items()
        if entry["outcome"] in ("SUPPORTED", "CONTRADICTED")
    ]
    head = (
        f"{len(claims)} studies of {len({study.stated for study in claims.values()})} claims of the field, in small "
        f"models early in training: {', '.join(counts)}."
    )
    return "\n".join([head, "", "| decided | outcome |", "|---|---|", *rows])


def _because(entry: dict[str, Any]) -> str:
    """What decided a claim: the expectations that have its outcome."""
    deciding = [one for one in entry["expectations"] if one["outcome"] == entry["outcome"]]
    return "; ".join(f"{_named(one)} {one['sentence'].partition(', expected')[0]}" for one in deciding)


def _section(entry: dict[str, Any], design: str) -> list[str]:
    made = entry["made"]
    lines = [
        f"## {entry['study']}",
        "",
        f"Stated as: {entry['stated']}",
        "",
        f"Tested as: {entry['claim']}. **{outcome_of(entry)}**",
        *(["", f"Design: {design}"] if design else []),
        "",
        *(f"- {requirement}" for requirement in entry["requirements"]),
        *(f"- {_expectation(one)}" for one in entry["expectations"]),
        *_lacking(entry),
        *(f"- amended {line}" for line in entry["amendments"]),
        *(f"- {warning}" for warning in entry["warnings"]),
        f"- baseline and arms: [conf/studies/{entry['study']}.yaml](../conf/studies/{entry['study']}.yaml)",
        f"- regime: {entry['regime']}",
        f"- {several(_seeds(entry), 'seed')}, {entry['runs']} runs, {entry['hours']:.1f} core hours: "
        f"`{entry['command']}`",
        f"- trained {made['when']} by version {made['version']}, commit {str(made['commit'])[:7]}, "
        f"torch {made['torch']}",
    ]
    if entry["outcome"] == "NOT TESTABLE HERE":  # what was measured does not bear on the claim
        return lines
    for stratum, table in entry["strata"].items():
        lines += ["", *([f"Stratum {stratum}:", ""] if stratum else []), *_table(table)]
        if rates := ", ".join(f"{arm} {rate:g}" for arm, rate in table.get("rates", {}).items()):
            lines += ["", f"Best learning rates: {rates}"]
    return [*lines, *_definitions(entry)]


def outcome_of(entry: Mapping[str, Any]) -> str:
    """The outcome as lists show it: `SUPPORTED`, or `SUPPORTED, amended` if the claim changed after its first run."""
    return f"{entry['outcome']}, amended" if amends_claim(entry["amendments"]) else entry["outcome"]


def _definitions(entry: dict[str, Any]) -> list[str]:
    """What the endpoints other than the loss measure."""
    names = dict.fromkeys(name for table in entry["strata"].values() for name in table["endpoints"])
    lines = [f"- `{name}`: {Endpoint(name).measure.definition}" for name in names if name != "val_loss"]
    return ["", *lines] if lines else []


def _expectation(one: dict[str, Any]) -> str:
    return f"{one['outcome']}: {_named(one)} {one['sentence']}"


def _named(one: dict[str, Any]) -> str:
    return f"{one['stratum']}: {one['arm']}" if one["stratum"] else one["arm"]


def _lacking(entry: dict[str, Any]) -> list[str]:
    """What it would take to decide the expectations that are not shown."""
    if entry["outcome"] != "NOT SHOWN":
        return []
    undecided = [one for one in entry["expectations"] if one["outcome"] == "NOT SHOWN"]
    lines = []
    for one in undecided:
        row = _row(entry, one)
        if row is not None and row["verdict"] == "NOT COMPARABLE":
            lines.append(f"- more seeds would not decide this, but a fair design might: {_named(one)}")
        elif row is None or row["delta"] is None or one["expected"] in ("trains", "fails"):
            lines.append(f"- how many seeds would decide this cannot be estimated: {_named(one)}")
        elif one["seeds"] is None:
            lines.append(f"- to decide this, more than 1000 seeds, or a design with larger differences: {_named(one)}")
    if needed := max((one["seeds"] or 0 for one in undecided), default=0):
        groups = [runs for table in entry["strata"].values() for runs in table["runs"].values()]
        more = (needed - _seeds(entry)) * len(groups)  # each arm at one rate: tuning is done
        hours = entry["hours"] * (1 + more / entry["runs"])
        rest = "the rest" if lines else "it"
        lines.append(f"- to decide {rest} at differences of this size: about {needed} seeds, {hours:.1f} core hours")
    return lines


def _seeds(entry: dict[str, Any]) -> int:
    return max(len(runs) for table in entry["strata"].values() for runs in table["runs"].values())


def _table(table: dict[str, Any]) -> list[str]:
    """A row for each arm and a column for each endpoint."""
    cells = {(row["arm"], row["endpoint"]): row for row in table["rows"]}
    lines = ["| arm | " + " | ".join(f"`{name}`" for name in table["endpoints"]) + " |"]
    lines.append("|---|" + "---:|" * len(table["endpoints"]))
    for arm in table["runs"]:
        texts = [_cell(Endpoint(name), cells[arm, name]) for name in table["endpoints"]]
        lines.append(f"| {arm} | " + " | ".join(texts) + " |")
    return lines


def _cell(endpoint: Endpoint, row: dict[str, Any]) -> str:
    if row["delta"] is not None:
        word = f"**{row['verdict']}** " if row["verdict"] else ""
        return f"{word}{_difference(endpoint, row)}"
    return row["verdict"] or ("–" if row["mean"] is None else endpoint.value(row["mean"]))


def _difference(endpoint: Endpoint, row: dict[str, Any]) -> str:
    return f"{endpoint.signed(row['delta'])} [{endpoint.signed(row['low'])}, {endpoint.signed(row['high'])}]"


def figure(entries: Mapping[str, dict[str, Any]]) -> Figure:
    """Each expectation's difference with its interval, in units of the margin, marked by outcome."""
    from matplotlib.figure import Figure

    rows = [
        (f"{entry['study']}{' ' + one['stratum'] if one['stratum'] else ''}", one, bounds)
        for entry in entries.values()
        for one in entry["expectations"]
        if one["expected"] not in ("trains", "fails") and (bounds := _in_margins(entry, one))
    ]
    drawn = Figure(figsize=(9, 1.2 + 0.28 * len(rows)), layout="constrained")
    axes = drawn.subplots()
    axes.axvspan(-1, 1, color="0.9", linewidth=0, label="too small to matter")
    axes.axvline(0, color="0.4", linewidth=0.8)
    for at, (_, one, (low, middle, high)) in enumerate(reversed(rows)):
        colour, mark = MARKS[one["outcome"]]
        inside = [max(-WIDEST, min(WIDEST, bound)) for bound in (low, middle, high)]
        axes.plot(inside[::2], [at, at], color=colour, linewidth=2)
        axes.plot(inside[1], at, mark, color=colour, markersize=6)
        for beyond, side, arrow in ((low < -WIDEST, -1, "<"), (high > WIDEST, 1, ">")):
            if beyond:
                axes.plot(side * 1.05 * WIDEST, at, arrow, color=colour, markersize=4)
    names = [f"{name}: {one['arm']}, {one['endpoint']} {one['expected']}" for name, one, _ in rows]
    axes.set_yticks(range(len(rows)), names[::-1], fontsize=7)
    axes.set_xlim(-1.1 * WIDEST, 1.1 * WIDEST)
    axes.set_ylim(-1, len(rows))
    axes.set(xlabel=f"difference to the baseline, in margins (arrows: beyond {WIDEST:g})")
    for outcome, (colour, mark) in MARKS.items():
        axes.plot([], [], mark, color=colour, label=outcome.lower(), markersize=6)
    drawn.legend(frameon=False, fontsize=7, loc="outside upper right", ncols=4)
    axes.spines[["top", "right"]].set_visible(False)
    return drawn


def _in_margins(entry: dict[str, Any], one: dict[str, str]) -> tuple[float, float, float] | None:
    """The lower end, the difference and the upper end of an expectation's interval; None where there is none."""
    row = _row(entry, one)
    if row is None or row["delta"] is None:
        return None
    margin = entry["strata"][one["stratum"]]["margins"][one["endpoint"]]
    return row["low"] / margin, row["delta"] / margin, row["high"] / margin


def _row(entry: dict[str, Any], one: dict[str, Any]) -> dict[str, Any] | None:
    """The numbers of an expectation's arm and endpoint; None if the arm has none."""
    table = entry["strata"].get(one["stratum"])
    cell = (one["arm"], one["endpoint"])
    return next((row for row in table["rows"] if (row["arm"], row["endpoint"]) == cell), None) if table else None
