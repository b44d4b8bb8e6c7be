"""What a report says in sentences: the answer, its conditions, the claim, what was left out. Every output uses them."""

from __future__ import annotations

import shlex

from nexus_ablate.comparison.fairness import PASS, UNKNOWN, Check
from nexus_ablate.comparison.results import ArmResult, Comparison, Interaction, Stratum
from nexus_ablate.comparison.verdict import (
    BETTER,
    CLAIM_SEEDS,
    DIFFERENT,
    EQUIVALENT,
    FAILS,
    MEANINGS,
    UNSTABLE,
    interval_names,
)
from nexus_ablate.console import several
from nexus_ablate.report.arm_tables import interval_text
from nexus_ablate.study.endpoint import Endpoint


def title(stratum: Stratum) -> str:
    return stratum.question or stratum.study or "comparison"


def answer(stratum: Stratum) -> str:
    """The answer in a sentence: each verdict word with its arms."""
    arms_by_word: dict[str, list[str]] = {}
    prefix = ""
    for row in stratum.rows[1:]:
        if row.verdict is not None:
            arms_by_word.setdefault(row.word, []).append(row.arm)
            prefix = max(prefix, row.verdict.prefix, key=len)
    if not arms_by_word:
        return f"Only {stratum.baseline} has a result; there is nothing to compare it with."
    words = [f"{word}: {' · '.join(arms_by_word[word])}" for word in MEANINGS if word in arms_by_word]
    return f"{prefix}{'. '.join(words)}."


def lead_lines(comparison: Comparison) -> list[str]:
    """The claim with what decides it; without one, each arm over the strata, or the headline of the only stratum."""
    if claim := claim_lines(comparison):
        return claim
    over_strata = []
    for change in comparison.changes:  # `norm=none: WORSE in a and b, INCONCLUSIVE in c.`
        places: dict[str, list[str]] = {}
        for row in change.rows:
            if row is not None and row.verdict is not None:
                places.setdefault(row.verdict.prefix + row.word, []).append(row.stratum)
        parts = [f"{word} in {', '.join(strata)}" for word, strata in places.items()]
        over_strata.append(f"{change.arm}: {', '.join(parts) or 'no result yet'}.")
    return [" ".join(over_strata) or headline(comparison.strata[0])]


def headline(stratum: Stratum) -> str:
    """The answer as a colleague would repeat it: the largest difference that is decided, better ones first."""
    judged = [row for row in stratum.rows if row.verdict is not None]
    if not judged:
        return answer(stratum)
    decided = [row for row in judged if row.word in DIFFERENT and row.effect is not None]
    decided = decided or [row for row in judged if row.word in (*DIFFERENT, *FAILS)]
    better = [row for row in decided if row.word == BETTER]
    lead = max(better or decided or judged, key=lambda row: abs(row.difference or 0.0))
    verdict = lead.verdict
    assert verdict is not None
    clause = verdict.sentence.partition(";")[0]
    if not decided and len(judged) > 1:
        furthest = f"; the furthest, {lead.arm}, {clause}" if clause.startswith("ends ") else ""
        return f"No arm is shown to differ from {stratum.baseline}{furthest}."
    joint = " " if clause.startswith(("ends ", "fails ")) else ": "
    qualifiers = f" ({', '.join(verdict.qualifiers)})" if verdict.qualifiers else ""
    word = "" if lead.word in (*DIFFERENT, EQUIVALENT, *FAILS) else f"{lead.word}: "
    return f"{verdict.prefix}{word}{lead.arm}{joint}{clause}{qualifiers}."


def opening(stratum: Stratum) -> list[str]:
    """What a report of one stratum says first: the headline, and the words of all arms."""
    return list(dict.fromkeys((headline(stratum), answer(stratum))))


def basis(stratum: Stratum) -> list[str]:
    """The conditions of the verdicts, one sentence each."""
    endpoint, seeds = stratum.endpoint, len(stratum.rows[0].seeds)
    unit = f" in {endpoint.unit}" if endpoint.unit else ""
    better = f"; {endpoint.good()}" if endpoint.good() else ""
    sd = "" if stratum.seed_sd is None else f", standard deviation over seeds {endpoint.spread(stratum.seed_sd)}"
    lines = [
        f"{endpoint.name}{unit}, against {stratum.baseline} ({several(seeds, 'seed')}{sd}){better}",
        f"smallest difference that matters: {endpoint.matters}",
    ]
    levels = [row.effect.level for row in stratum.rows if row.effect is not None]
    if levels:
        cells = several(stratum.comparisons, "comparison")
        lines.append(f"{interval_names(levels)}: over {cells}, the chance of any false verdict is 5%")
    lines += stratum.regime
    if stratum.looks:
        looks = ", ".join(map(str, stratum.looks))
        lines.append(f"the looks at {looks} seeds share these 5%; {stratum.look} of {len(stratum.looks)} are complete")
    if not stratum.terms.is_paired:
        lines.append("unpaired, since the arms share no seeds: each is judged by Welch's t-test against the baseline")
    if any(row.claim_curve for row in stratum.rows):
        lines.append(
            "each arm is judged at its own best learning rate: each seed's loss at the lowest point of a parabola "
            "through its losses at three rates"
        )
    name = stratum.arms[0].name if stratum.arms else stratum.baseline
    if name != stratum.baseline:
        lines.append(f"{stratum.baseline} is {name}")
    if stratum.exploratory:
        place = stratum.terms.place
        fresh = f"; nexus-ablate study {place} --confirm judges fresh seeds alone" if place else ""
        lines.append(f"exploratory: {'; '.join(stratum.exploratory)}{fresh}")
    if seeds < CLAIM_SEEDS:
        lines.append(f"fewer than {CLAIM_SEEDS} seeds: intervals, but no verdict")
    if any(row.word == UNSTABLE for row in stratum.rows):
        lines.append("values in brackets are over the seeds that trained; do not compare them")
    return lines


def fairness(stratum: Stratum) -> tuple[list[Check], dict[str, list[Check]]]:
    """The checks that a reader must know of; those that passed or are not proved by the source, by their sum."""
    shown = [check for check in stratum.checks if check.status not in (PASS, UNKNOWN)]
    passed = [check for check in stratum.checks if check.status == PASS]
    unknown = [check for check in stratum.checks if check.status == UNKNOWN]
    others = {f"{several(len(passed), 'check')} passed": passed}
    if unknown:
        others[f"{len(unknown)} not proved by the source: {', '.join(check.name for check in unknown)}"] = unknown
    return shown, others


def direction(stratum: Stratum) -> str:
    """What an axis of differences shows, and which side is better."""
    side = {"lower": " (left is better)", "higher": " (right is better)"}.get(stratum.endpoint.better, "")
    return stratum.endpoint.axis() + side


def reason(row: ArmResult) -> str:
    """Why an arm has its verdict, and what it changes besides what was asked for; '' for the baseline."""
    return "; ".join([row.verdict.sentence, *row.notes]) if row.verdict else ""


def together_text(two: Interaction, endpoint: Endpoint) -> str:
    """An interaction in a sentence."""
    beyond = "the product of the two (below x1: lower)" if endpoint.log else "the sum of the two (negative: lower)"
    return f"{two.one} with {two.other}: {interval_text(two.interval, endpoint.signed)} beyond {beyond}"


def left_out(stratum: Stratum) -> list[str]:
    """One line per item in scope that is not in the table: excluded, refused, equal to another arm, tuning."""
    lines = [f"{'/'.join(out.path.parts[-2:])}: {out.reason}" for out in stratum.excluded]
    lines += [f"{overrides}: refused, {why}" for overrides, why in stratum.refused]
    lines += [f"{overrides}: the same configuration as {arm}, not trained twice" for overrides, arm in stratum.equal]
    if stratum.tuning_runs:
        lines.append(f"{several(stratum.tuning_runs, 'tuning run')} chose the learning rates and are not judged")
    return lines


def change_note(comparison: Comparison) -> str:
    """What the column `change` of the table of strata says."""
    first, last = comparison.strata[0].name, comparison.strata[-1].name
    return f"change: from {first} to {last} unless the cell says otherwise; paired by seed; not a verdict"


def claim_lines(comparison: Comparison) -> list[str]:
    """The claim with its outcome, what it requires, and each expectation."""
    claim = comparison.claim
    if claim is None:
        judged = f"the claim is judged over all strata: nexus-ablate compare {shlex.quote(str(comparison.whole))}"
        return [judged] if comparison.whole and comparison.strata[0].terms.study.claim else []
    lines = [requirement.sentence for requirement in claim.requirements]
    for expected in claim.results:
        lines.append(f"{expected.outcome}: {arm_of(expected.stratum, expected.arm)} {expected.sentence}")
    lines += [dependence.sentence for dependence in claim.dependences]
    return [str(claim), *(lines or [claim.sentence])]


def arm_of(stratum: str, arm: str) -> str:
    """An arm by name, after its stratum if it has one."""
    return f"{stratum}: {arm}" if stratum else arm


def missing_lines(comparison: Comparison) -> list[str]:
    """The strata without a result."""
    return [f"stratum {name}: no result yet ({states})" for name, states in comparison.missing.items()]
