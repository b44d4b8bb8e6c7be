"""docs/claims.md and its figures, from the published entries alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from nexus_ablate.comparison.claim import (
    BETTER_THAN_EXPECTED,
    CONTRADICTED,
    DECIDED,
    NOT_SHOWN,
    NOT_TESTABLE,
    OPPOSITE,
    SUPPORTED,
)
from nexus_ablate.comparison.learning_rates import RATES
from nexus_ablate.comparison.ledger_entry import LedgerEntry
from nexus_ablate.comparison.results import Finding, in_settings
from nexus_ablate.comparison.statistics import LEVEL
from nexus_ablate.comparison.terms import amends_claim
from nexus_ablate.comparison.verdict import EARLY, NOT_COMPARABLE
from nexus_ablate.console import markdown_table, several
from nexus_ablate.report.sentences import arm_of
from nexus_ablate.study.endpoint import Endpoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nexus_ablate.report.charts import Bar
    from nexus_ablate.study.schema import Study

NOT_TRAINED = "not trained yet"
TONES = {SUPPORTED: "good", CONTRADICTED: "bad", OPPOSITE: "warn", BETTER_THAN_EXPECTED: "warn", NOT_SHOWN: "muted"}
"""The colour of each outcome in the figures."""
HEADLINES = ("rms_vs_layer", "ffn", "final_norm", "biases", "dyt_vs_rms")
"""Of the README: changes of today's models, judged by their loss alone."""
LABEL_LETTERS = 40
"""Letters of a line beside intervals."""
OF_TRAINING = ("trains", "fails")
"""What is expected of whether runs train, of no difference."""
HEAD = """# Claims

Claims that are often made about transformer architectures, tested with runs of this project. Each is restated so that a
study can decide it, and its fidelity says how near the tested sentence is to the stated one: the same, weaker or
different. The outcome is that of the tested sentence, in the settings that are given with it: small models. It needs
every part of the sentence; `held` says how many parts hold. Every row can be trained again with its command;
`claims --check` compares your runs with those published here. How far models of this size can be believed: [the
calibration panel](panel.md). Speed is measured by the paired `bench` instead: [what a norm
costs](performance.md#what-a-norm-costs).

The studies were written down before any of their runs; what was amended after the first run stands with its entry. What
became of the claims of the [first edition](#the-first-edition) stands at the end.

Budgets of 20 tokens per parameter count the parameters in blocks; a regime counts all. Where arms share a rate it is
the default's, unless the setting or the design names another. At `femto` the default's is about half the best one:
twice the rate gains 0.025 nats there ([the baseline](baseline.md)), as much as some of the differences below.

A token is a byte here, and mostly a piece of a word of about four bytes in the sources. So 0.015 nats per token here
are about 0.06 there, more than the 0.043 between GELU and SwiGLU (Shazeer 2020, arXiv:2002.05202, Table 1); as a share
of the loss they are 1.0% to 1.4%, and less than that (2.6%). "Too small to matter" is said of the declared margin, and
of no published effect.

An option brings what its paper prescribes, such as an initialization or a scale of the embedding; `nexus-ablate plan
NAME` lists what else each arm changes. The words are those of [studies](studies.md#claims). This page is written by
`python scripts/docs.py` from conf/claims.
"""


def page(
    claims: Mapping[str, Study],
    entries: Mapping[str, LedgerEntry],
    designs: Mapping[str, str],
    former: Sequence[Mapping[str, str]] = (),
) -> str:
    """The page: a table of all claims, what holds over all of them, then each published one with its differences.

    Args:
        claims: The shipped studies that decide a claim, by name.
        entries: What is published, by study.
        designs: What the files of the studies say of their designs.
        former: Claims of the first edition: study, claim, outcome, and what was wrong.
    """
    rows, sections = [], []
    for name, study in claims.items():
        fidelity = " ".join(study.fidelity)
        entry = entries.get(name)
        if entry is None:
            rows.append((study.claim, f"{NOT_TRAINED} ({study.cost})", "–", fidelity, f"`{name}`"))
        else:
            rows.append((entry.claim, f"**{outcome_of(entry)}**", _held(entry), fidelity, f"[`{name}`](#{name})"))
            sections += ["", *_section(study, entry, designs.get(name, ""))]
    lines = [HEAD, *markdown_table(("as it is tested", "outcome", "held", "fidelity", "study"), rows)]
    lines += ["", *_over_the_ledger(entries), *sections]
    if former:
        lines += ["", *_first_edition(former, entries)]
    return "\n".join(lines) + "\n"


def _first_edition(former: Sequence[Mapping[str, str]], entries: Mapping[str, LedgerEntry]) -> list[str]:
    """What became of each claim of the first edition."""
    rows = []
    for row in former:
        entry = entries.get(row["study"])
        now = outcome_of(entry).lower() if entry else "–"
        rows.append((f"`{row['study']}`", row["claim"], row["outcome"].lower(), now, row["cause"]))
    heads = ("study", "as it was tested", "outcome then", "outcome now", "what was wrong, or what became of it")
    return [
        "## The first edition",
        "",
        "Its runs had about 2 tokens per parameter, initial values of standard deviation 0.02, which is small for "
        "their width, mostly one learning rate for all arms, and intervals that pooled the noise of all arms. So its "
        "outcomes say how training begins. They are kept here with what was wrong or what became of them; the numbers "
        "are in the history of this repository.",
        "",
        *markdown_table(heads, rows),
    ]


def _over_the_ledger(entries: Mapping[str, LedgerEntry]) -> list[str]:
    """What a correction over all entries leaves, and which of them share runs."""
    survives = survives_correction(entries)
    lines = []
    if survives:
        lost = [f"`{name}`" for name in survives if not survives[name]]
        but = f": all but {', '.join(lost)}" if lost else ""
        survivors = len(survives) - len(lost)
        lines.append(
            f"Of the {several(len(survives), 'outcome')} that tests of differences decided, {survivors} survive Holm's "
            f"correction over all such tests of the ledger{but}."
        )
    for studies in sharing_a_baseline(entries):
        names = ", ".join(f"`{name}`" for name in studies)
        lines.append(f"These share runs of a baseline, which by chance moves them together: {names}.")
    return lines


def survives_correction(entries: Mapping[str, LedgerEntry]) -> dict[str, bool]:
    """Of each study whose outcome was decided by tests, whether it survives a correction over all tests.

    Holm's procedure holds the chance of one false word in the whole ledger at 5%. A study survives if each test that
    decided its outcome does. Outcomes by counts of failures have no such test.
    """
    tests = []
    for name, entry in entries.items():
        for expected in entry.expectations:
            if expected.p is not None:
                tests.append((expected.p, name, expected.outcome == entry.outcome))
    survives, is_rejected = {}, True
    for rank, (p, name, decides) in enumerate(sorted(tests)):
        is_rejected = is_rejected and p <= LEVEL / (len(tests) - rank)
        if decides and entries[name].outcome in DECIDED:
            survives[name] = is_rejected  # of the largest p of its tests
    return {name: survives[name] for name in entries if name in survives}


def sharing_a_baseline(entries: Mapping[str, LedgerEntry]) -> list[list[str]]:
    """Groups of studies that have runs of one baseline in common, so that their errors go together."""
    users: dict[float | None, set[str]] = defaultdict(set)
    for name, entry in entries.items():
        for stratum in entry.strata.values():
            baseline = next(iter(stratum.runs.values()))
            for values in baseline.values():
                users[values.get("val_loss")].add(name)
    users.pop(None, None)
    groups = {frozenset(names) for names in users.values() if len(names) > 1}
    return sorted(sorted(group) for group in groups if not any(group < other for other in groups))


def decided(claims: Mapping[str, Study], entries: Mapping[str, LedgerEntry]) -> str:
    """For the README: how many claims have each outcome, and a row for each of the headlines."""
    outcomes = Counter(entry.outcome for entry in entries.values())
    order = (*DECIDED, NOT_SHOWN, NOT_TESTABLE)
    counts = [f"{outcomes[outcome]} {outcome.lower()}" for outcome in order if outcomes[outcome]]
    if len(claims) > len(entries):
        counts.append(f"{len(claims) - len(entries)} {NOT_TRAINED}")
    stated = {study.stated for study in claims.values()}
    survives, rows = survives_correction(entries), []
    for name in HEADLINES:
        if name in entries:
            entry = entries[name]
            outcome = f"[{outcome_of(entry)}](docs/claims.md#{name}){_in_numbers(claims[name], entry)}"
            if not survives.get(name, True):
                outcome += "; not after a correction over all claims"
            rows.append((entry.stated, entry.claim, outcome))
    lines = [
        f"{len(claims)} studies of {len(stated)} claims of the field, in small models: {', '.join(counts)}. "
        "What the words mean: [claims](docs/studies.md#claims). Five of them:",
        "",
        *markdown_table(("what is said", "how it was tested in small models", "outcome"), rows),
    ]
    return "\n".join(lines)


def _in_numbers(study: Study, entry: LedgerEntry) -> str:
    """The first difference in a setting with the entry's outcome: ` (femto: bias=on ends 0.03 nats lower)`."""
    outcome = entry.outcome
    if outcome in DECIDED:
        named = {arm.name: " ".join(arm.overrides) for arm in study.arms}
        for expected in entry.expectations:
            if expected.outcome == entry.settings.get(expected.stratum) == outcome:
                arm = named.get(expected.arm, expected.arm)
                return f" ({arm_of(expected.stratum, arm)} {_difference(entry, expected)})"
    return ""


def outcome_of(entry: LedgerEntry) -> str:
    """The outcome as lists show it: `SUPPORTED IN 3 OF 4 SETTINGS, not shown in 1`, and what must be known with it."""
    depends_on = dict.fromkeys(each.on for each in entry.dependences if each.is_shown)
    text = in_settings(entry.outcome, entry.settings, [*depends_on], entry.expectations)
    if any(EARLY in row.verdict for stratum in entry.strata.values() for row in stratum.rows):
        text += f", {EARLY}"
    if amends_claim(entry.amendments):
        text += ", amended"
    return text


def _difference(entry: LedgerEntry, expected: Finding) -> str:
    """`ends 0.0322 nats per token lower`, and what qualifies it; of another measure how its sentence begins."""
    delta = entry.row(expected).delta
    if delta is None or expected.endpoint != "val_loss":
        return expected.sentence.partition(" (")[0]
    _, but, reason = expected.sentence.partition(", but ")
    return f"ends {Endpoint(expected.endpoint).clause(delta)}{but}{reason}"


def _held(entry: LedgerEntry) -> str:
    """How many parts of the tested sentence hold: `2 of 3`."""
    held = [expected for expected in entry.expectations if expected.outcome == SUPPORTED]
    return f"{len(held)} of {len(entry.expectations)}"


def _place(expected: Finding) -> str:
    """The arm of an expectation, after its stratum if it has one."""
    return arm_of(expected.stratum, expected.arm)


def _section(study: Study, entry: LedgerEntry, design: str) -> list[str]:
    """What is published of one claim."""
    made, name = entry.made, entry.study
    lines = [f"## {name}", "", f"Stated as: {entry.stated}", ""]
    lines += [f"Tested as: {entry.claim}. **{outcome_of(entry)}**", ""]
    for word, reason in study.fidelity.items():
        lines += [f"Fidelity: {word}, {reason}.", ""]
    if design:
        lines += [f"Design: {design}", ""]
    if _panels(entry):
        lines += [f"![Differences to the baseline]({picture_of(name)})", ""]
    lines += [f"- {requirement}" for requirement in entry.requirements]
    for expected in entry.expectations:
        lines.append(f"- {expected.outcome}: {_place(expected)} {expected.sentence}")
    lines += [f"- {dependence.sentence}" for dependence in entry.dependences]
    lines += _lacking(entry)
    for name_of_stratum, stratum in entry.strata.items():
        rates = ", ".join(f"{arm} {rate:g}" for arm, rate in stratum.rates.items())
        where = f" in {name_of_stratum}" if name_of_stratum else ""
        if rates:
            lines.append(f"- best learning rates{where}: {rates}")
    lines += [f"- amended {amendment}" for amendment in entry.amendments]
    lines += [f"- {warning}" for warning in entry.warnings]
    cost = f"{several(entry.seeds, 'seed')}, {entry.runs} runs, {entry.hours:.1f} core hours"
    lines += [
        f"- baseline and arms: [conf/studies/{name}.yaml](../conf/studies/{name}.yaml)",
        f"- regime: {entry.regime}",
        f"- {cost}: `{entry.command}`",
        f"- trained {made.when} by version {made.version}, commit {str(made.commit)[:7]}, torch {made.torch}",
    ]
    endpoints = dict.fromkeys(endpoint for stratum in entry.strata.values() for endpoint in stratum.margins)
    endpoints.pop("val_loss", None)
    for endpoint in map(Endpoint, endpoints):
        odds = "; differences are ratios of the odds" * endpoint.is_share
        lines.append(f"- `{endpoint.name}`: {endpoint.measure.definition}{odds}")
    return [*lines, *_also_measured(entry)]


def _also_measured(entry: LedgerEntry) -> list[str]:
    """A table, folded up, of the differences of which nothing was expected."""
    asked = [each for each in entry.expectations if each.expected not in OF_TRAINING]
    expected = {(each.stratum, each.arm, each.endpoint) for each in asked}
    rows = []
    for name, stratum in entry.strata.items():
        for row in stratum.rows:
            if row.delta is None or row.low is None or row.high is None or (name, row.arm, row.endpoint) in expected:
                continue
            delta, low, high = map(Endpoint(row.endpoint).signed, (row.delta, row.low, row.high))
            rows.append((name or "–", row.arm, f"`{row.endpoint}`", delta, f"{low} to {high}", str(row.verdict)))
    if not rows:
        return []
    return [
        "",
        f"<details><summary>Also measured: {several(len(rows), 'difference')} of which nothing was expected</summary>",
        "",
        *markdown_table(("setting", "arm", "measure", "difference", "interval", "verdict"), rows),
        "",
        "</details>",
    ]


def picture_of(study: str) -> str:
    """The path of a claim's figure from docs."""
    return f"claims/{study}.png"


def _lacking(entry: LedgerEntry) -> list[str]:
    """What it would take to decide the expectations that are not shown."""
    if entry.outcome != NOT_SHOWN:
        return []
    lines, needed = [], 0
    for expected in entry.expectations:
        if expected.outcome != NOT_SHOWN:
            continue
        needed = max(needed, expected.seeds or 0)
        row = entry.row(expected)
        if row.verdict == NOT_COMPARABLE:
            why = "more seeds would not decide this, but a fair design might"
        elif row.delta is None or expected.expected in OF_TRAINING:
            why = "how many seeds would decide this cannot be estimated"
        elif expected.seeds is None:
            why = "to decide this, more than 1000 seeds, more validation text, or a design with larger differences"
        else:
            continue
        lines.append(f"- {why}: {_place(expected)}")
    if needed:
        of_a_seed = 0
        for stratum in entry.strata.values():
            of_a_seed += len(stratum.runs) * (RATES if stratum.rates else 1)
        more = (needed - entry.seeds) * of_a_seed  # tuning is done
        hours = entry.hours * (1 + more / entry.runs)
        rest = "the rest" if lines else "it"
        lines.append(f"- to decide {rest} at differences of this size: about {needed} seeds, {hours:.1f} core hours")
    return lines


# ---------------------------------------------------------------------------------------------------------- figure


def figure(entry: LedgerEntry) -> Figure | None:
    """A panel per endpoint: each expected difference with its interval and outcome; None where none is expected."""
    from nexus_ablate.report.charts import draw_intervals, picture

    panels = _panels(entry)
    if not panels:
        return None
    heights = []
    for bars in panels.values():
        lines = sum(1 + bar.label.count("\n") for bar in bars)
        heights.append(80 + 8 * len(bars) + 16 * lines)
    with picture(f"differences of {entry.study}", sum(heights), 640, heights) as (figure, all_axes):
        for axes, ((name, margin), bars) in zip(np.ravel(all_axes), panels.items(), strict=True):
            endpoint = Endpoint(name)
            axes.set_title(name, loc="left", fontsize=13)
            draw_intervals(axes, bars, endpoint.axis(), margin, endpoint)
    return figure


def _panels(entry: LedgerEntry) -> dict[tuple[str, float], list[Bar]]:
    """The expected differences, by endpoint and margin. One that has no interval is a row with the reason."""
    from nexus_ablate.report.charts import NOT_DRAWN, Bar

    panels = defaultdict(list)
    for expected in entry.expectations:
        if expected.expected in OF_TRAINING:
            continue
        row, tone = entry.row(expected), TONES[expected.outcome]
        label = fill(f"{_place(expected).replace(',', ', ')} (expected:\u00a0{expected.expected})", LABEL_LETTERS)
        ends, note = NOT_DRAWN, row.verdict or expected.outcome
        if row.delta is not None and row.low is not None and row.high is not None:
            ends, note = (row.low, row.delta, row.high), expected.outcome
        margin = entry.strata[expected.stratum].margins[expected.endpoint]
        panels[expected.endpoint, margin].append(Bar(label, ends, note.lower(), tone, tone))
    return panels
