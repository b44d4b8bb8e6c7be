"""docs/claims.md and its figure, from the published entries alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from nexus_ablate.comparison.claim import (
    BETTER_THAN_EXPECTED,
    CONTRADICTED,
    NOT_SHOWN,
    NOT_TESTABLE,
    OPPOSITE,
    SUPPORTED,
)
from nexus_ablate.comparison.endpoint import Endpoint
from nexus_ablate.comparison.learning_rates import RATES
from nexus_ablate.comparison.terms import amends_claim
from nexus_ablate.console import several

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nexus_ablate.report.charts import Bar

NOT_TRAINED = "not trained yet"
DECIDED = (SUPPORTED, CONTRADICTED, OPPOSITE, BETTER_THAN_EXPECTED)
TONES = {SUPPORTED: "good", CONTRADICTED: "bad", OPPOSITE: "warn", BETTER_THAN_EXPECTED: "warn", NOT_SHOWN: "muted"}
"""The colour of each outcome in the figure."""
HEADLINES = ("rms_vs_layer", "gqa", "parallel_blocks", "swiglu", "final_norm")
"""Of the README: changes of today's models, judged by their loss alone and at one learning rate."""
WIDEST = 6.0
"""Margins up to which the figure is drawn."""
HEAD = """# Claims

Claims that are often made about transformer architectures, tested with runs of this project. Each is restated so that a
study can decide it. The outcome is that of the restated sentence, in the regime that is given with it: small models,
early in training. Every row can be trained again with its command; `claims --check` compares your runs with those
published here. Speed is measured by the paired `bench` instead: [what a norm costs](performance.md#what-a-norm-costs).
To judge a difference in loss: in runs of 800 steps of the default model, 0.01 nats are worth about 4% of the training
tokens.

Outcomes, verdicts and intervals are those of the rule by which these runs were judged, which pooled the noise of all
arms (Dunnett) and called the result of fewer than five seeds preliminary. [Today's rule](reading_a_verdict.md) judges
each arm by its own paired t-test and would be stricter at five seeds; the studies are trained again under it.

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
    published = [name for name in claims if name in entries]
    for name, study in claims.items():
        outcome, link = NOT_TRAINED, f"`{name}`"
        if name in entries:
            outcome, link = f"**{outcome_of(entries[name])}**", f"[`{name}`](#{name})"
        lines.append(f"| {study.stated} | {study.claim} | {outcome} | {study.cost} | {link} |")
    if published:
        lines += ["", "![Outcomes and differences by claim](claims.png)"]
    for name in published:
        lines += ["", *_section(entries[name], designs.get(name, ""))]
    return "\n".join(lines) + "\n"


def decided(claims: Mapping[str, LedgerClaim], entries: Mapping[str, dict[str, Any]]) -> str:
    """For the README: how many claims have each outcome, and a row for each of the headlines."""
    outcomes = Counter(entry["outcome"] for entry in entries.values())
    order = (*DECIDED, NOT_SHOWN, NOT_TESTABLE)
    counts = [f"{outcomes[outcome]} {outcome.lower()}" for outcome in order if outcomes[outcome]]
    if len(claims) > len(entries):
        counts.append(f"{len(claims) - len(entries)} not trained yet")
    stated = {study.stated for study in claims.values()}
    lines = [
        f"{len(claims)} studies of {len(stated)} claims of the field, in small models early in training: "
        f"{', '.join(counts)}. Five of them:",
        "",
        "| claim | outcome | difference in nats per token, with its interval |",
        "|---|---|---|",
    ]
    for name in HEADLINES:
        if name in entries:
            entry = entries[name]
            lines.append(f"| {entry['claim']} | [{outcome_of(entry)}](docs/claims.md#{name}) | {_deciding(entry)} |")
    return "\n".join(lines)


def outcome_of(entry: Mapping[str, Any]) -> str:
    """The outcome as lists show it: `SUPPORTED`, or `SUPPORTED, amended` if the claim changed after its first run."""
    return f"{entry['outcome']}, amended" if amends_claim(entry["amendments"]) else entry["outcome"]


def _deciding(entry: dict[str, Any]) -> str:
    """The differences, with their intervals, of the expectations that decided a claim."""
    rows = [_row(entry, each) for each in entry["expectations"] if each["outcome"] == entry["outcome"]]
    return "; ".join(f"{row['delta']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})" for row in rows if row)


def _place(expected: dict[str, Any]) -> str:
    """The arm of an expectation, after its stratum if it has one."""
    return f"{expected['stratum']}: {expected['arm']}" if expected["stratum"] else expected["arm"]


def _section(entry: dict[str, Any], design: str) -> list[str]:
    """What is published of one claim."""
    made, study = entry["made"], entry["study"]
    lines = [f"## {study}", "", f"Stated as: {entry['stated']}", ""]
    lines += [f"Tested as: {entry['claim']}. **{outcome_of(entry)}**", ""]
    lines += [f"Design: {design}", ""] if design else []
    lines += [f"- {requirement}" for requirement in entry["requirements"]]
    for expected in entry["expectations"]:
        lines.append(f"- {expected['outcome']}: {_place(expected)} {expected['sentence']}")
    lines += _lacking(entry)
    lines += [f"- amended {amendment}" for amendment in entry["amendments"]]
    lines += [f"- {warning}" for warning in entry["warnings"]]
    cost = f"{several(_seeds(entry), 'seed')}, {entry['runs']} runs, {entry['hours']:.1f} core hours"
    lines += [
        f"- baseline and arms: [conf/studies/{study}.yaml](../conf/studies/{study}.yaml)",
        f"- regime: {entry['regime']}",
        f"- {cost}: `{entry['command']}`",
        f"- trained {made['when']} by version {made['version']}, commit {str(made['commit'])[:7]}, "
        f"torch {made['torch']}",
    ]
    if entry["outcome"] == NOT_TESTABLE:  # what was measured does not bear on the claim
        return lines
    for stratum, table in entry["strata"].items():
        lines += ["", f"Stratum {stratum}:"] if stratum else []
        lines += ["", *_table(table)]
        rates = ", ".join(f"{arm} {rate:g}" for arm, rate in table.get("rates", {}).items())
        lines += ["", f"Best learning rates: {rates}"] if rates else []
    endpoints = dict.fromkeys(name for table in entry["strata"].values() for name in table["endpoints"])
    endpoints.pop("val_loss", None)
    definitions = [f"- `{name}`: {Endpoint(name).measure.definition}" for name in endpoints]
    return [*lines, "", *definitions] if definitions else lines


def _lacking(entry: dict[str, Any]) -> list[str]:
    """What it would take to decide the expectations that are not shown."""
    if entry["outcome"] != NOT_SHOWN:
        return []
    lines, needed = [], 0
    for expected in entry["expectations"]:
        if expected["outcome"] != NOT_SHOWN:
            continue
        needed = max(needed, expected["seeds"] or 0)
        row, place = _row(entry, expected), _place(expected)
        if row is not None and row["verdict"] == "NOT COMPARABLE":
            lines.append(f"- more seeds would not decide this, but a fair design might: {place}")
        elif row is None or row["delta"] is None or expected["expected"] in ("trains", "fails"):
            lines.append(f"- how many seeds would decide this cannot be estimated: {place}")
        elif expected["seeds"] is None:
            lines.append(f"- to decide this, more than 1000 seeds, or a design with larger differences: {place}")
    if needed:
        groups = sum(len(table["runs"]) * (RATES if table.get("rates") else 1) for table in entry["strata"].values())
        more = (needed - _seeds(entry)) * groups  # tuning is done
        hours = entry["hours"] * (1 + more / entry["runs"])
        rest = "the rest" if lines else "it"
        lines.append(f"- to decide {rest} at differences of this size: about {needed} seeds, {hours:.1f} core hours")
    return lines


def _seeds(entry: dict[str, Any]) -> int:
    return max(len(runs) for table in entry["strata"].values() for runs in table["runs"].values())


def _table(table: dict[str, Any]) -> list[str]:
    """A row for each arm and a column for each endpoint."""
    rows = {(row["arm"], row["endpoint"]): row for row in table["rows"]}
    heads = [f"`{name}`" for name in table["endpoints"]]
    lines = [f"| arm | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for arm in table["runs"]:
        cells = [_cell(Endpoint(name), rows[arm, name]) for name in table["endpoints"]]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def _cell(endpoint: Endpoint, row: dict[str, Any]) -> str:
    """The verdict with the difference and its interval; of the baseline the mean."""
    if row["delta"] is not None:
        delta, low, high = (endpoint.signed(row[name]) for name in ("delta", "low", "high"))
        word = f"**{row['verdict']}** " if row["verdict"] else ""
        return f"{word}{delta} [{low}, {high}]"
    if row["verdict"]:
        return row["verdict"]
    return "–" if row["mean"] is None else endpoint.value(row["mean"])


def _row(entry: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any] | None:
    """The numbers of an expectation's arm and endpoint; None if the arm has none."""
    table = entry["strata"].get(expected["stratum"], {"rows": []})
    for row in table["rows"]:
        if (row["arm"], row["endpoint"]) == (expected["arm"], expected["endpoint"]):
            return row
    return None


# ---------------------------------------------------------------------------------------------------------- figure


def figure(entries: Mapping[str, dict[str, Any]]) -> Figure:
    """Each expectation's difference with its interval, in units of the margin, and its outcome."""
    from nexus_ablate.report.charts import draw_intervals, picture

    bars = [bar for entry in entries.values() for bar in _bars(entry)]
    with picture("outcomes by expectation", 60 + 21 * len(bars), 930) as drawn:
        draw_intervals(drawn.axes, bars, f"difference to the baseline, in margins (cut at {WIDEST:g})", 1.0, WIDEST)
    return drawn.figure


def _bars(entry: dict[str, Any]) -> list[Bar]:
    """An interval for each expectation that has one and a margin."""
    from nexus_ablate.report.charts import Bar

    bars = []
    for expected in entry["expectations"]:
        row = _row(entry, expected)
        if expected["expected"] in ("trains", "fails") or row is None or row["delta"] is None:
            continue
        margin = entry["strata"][expected["stratum"]]["margins"][expected["endpoint"]]
        if margin:
            study = " ".join(filter(None, (entry["study"], expected["stratum"])))
            endpoint = "/".join(expected["endpoint"].replace("val_loss", "").split("/")[-2:])
            label = f"{study}: {' '.join(filter(None, (expected['arm'], endpoint, expected['expected'])))}"
            ends = (row["low"] / margin, row["delta"] / margin, row["high"] / margin)
            tone = TONES[expected["outcome"]]
            bars.append(Bar(label, ends, expected["outcome"].lower(), tone, tone))
    return bars
